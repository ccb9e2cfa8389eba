"""``outbox group``: the groups that consume topics, how far each is, and what is done to one as a whole.

One is paused, resumed or slowed down; reads again, skips a backlog, or is deleted when it is gone.
"""

from __future__ import annotations

from typing import Annotated

import typer

from outbox.cli.database import DatabasesOptions
from outbox.cli.options import command
from outbox.cli.output import ListForm, ListFormOption, RowShape, age, first_line
from outbox.cli.whole_acts import add_acts
from outbox.operator.groups import GroupRow

group_app: typer.Typer = typer.Typer(
    name="group",
    help="Groups that consume topics: how far each is; pause one, slow it down, have it read again or skip a backlog, "
    "delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_GROUPS = RowShape(
    GroupRow,
    "group topic state rate lag> oldest>=oldest_lag failed> parked> workers> openings> passages> moved=moved_at "
    "because",
    {
        "rate": lambda row: row.rate_text,
        "lag": lambda row: "unknown" if row.lag is None else row.lag,
        "oldest_lag": lambda row: age(row.oldest_lag),
        "because": lambda row: first_line(row.because),
    },
    lambda row: f"{row.group}/{row.topic}",
)


@command(group_app, "list")
def list_groups(
    databases: DatabasesOptions,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    form: ListFormOption = ListForm.TABLE,
) -> None:
    """List the groups: which go on, how far each is behind, its failures, consumers and moves.

    \b
    States:
      running    nothing holds it back, unless a rate does
      paused     by an operator
      open       its breaker has stopped it, since everything failed
      half_open  its breaker is open, and one message is tried
    \b
    Example:
      outbox group list --topic transfer
    """
    only = databases.only
    databases.show(lambda each: (row for row in each.groups(only) if topic in {None, row.topic}), _GROUPS, form)


add_acts(group_app, "group")
