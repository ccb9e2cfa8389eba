"""``outbox group``: the groups that consume topics, how far each is, and what is done to one as a whole.

One is paused, resumed or slowed down; reads again, skips a backlog, or is deleted when it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from outbox.cli.database import DatabasesOptions
from outbox.cli.options import ActorOptions, DecidedOptions, act_after_preview, command, gathered, help_of
from outbox.cli.output import ListForm, ListFormOption, RowShape, age, facts_table, first_line, rows_table
from outbox.operator.acts import DELETE_GROUP, PAUSE_GROUP, RESET_GROUP, RESUME_GROUP, SET_RATE, SKIP_GROUP
from outbox.operator.groups import GroupMove, GroupRow
from outbox.reader import option

group_app: typer.Typer = typer.Typer(
    name="group",
    help="Groups that consume topics: how far each is; pause one, slow it down, have it read again or skip a backlog, "
    "delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group, as `outbox group list` names it.")]
TopicOption = Annotated[str, typer.Option(help="Of which topic.")]
SourceOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="The producer's database, where several have the topic.")
]
_TO = "first, now, a position, QUEUE:POSITION,…, a time (2026-01-31T12:00:00+00:00), or how long ago (90s, 15m, 2h, 3d)"

_GROUPS = RowShape(
    GroupRow,
    "group topic state rate lag> oldest>=oldest_lag failed> parked> workers> openings> readings> moved=moved_at "
    "because",
    {
        "rate": lambda row: row.rate_text,
        "lag": lambda row: "unknown" if row.lag is None else row.lag,
        "oldest_lag": lambda row: age(row.oldest_lag),
        "because": lambda row: first_line(row.because),
    },
    lambda row: f"{row.group}/{row.topic}",
)


@dataclass(frozen=True, slots=True)
class GroupOptions(DecidedOptions):
    """The actor and the reason of an act on a group, and the topic that it is limited to."""

    topic: str | None = option(None, "Only what it consumes of this topic. Default: of all.", metavar="NAME")

    def facts(self, databases: DatabasesOptions) -> dict[str, Any]:
        """Return the arguments of the operator's methods."""
        return {"topic": self.topic, "by": self.by, "why": self.reason, "database": databases.only}


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


# --- held back -------------------------------------------------------------------------------------------------------


@gathered
def pause(group: GroupArgument, databases: DatabasesOptions, decided: GroupOptions) -> None:
    """Pause a group."""
    decided.perform(PAUSE_GROUP, databases, lambda operator: operator.pause_group(group, **decided.facts(databases)))


@gathered
def resume(group: GroupArgument, databases: DatabasesOptions, decided: GroupOptions) -> None:
    """Resume a group."""
    decided.perform(RESUME_GROUP, databases, lambda operator: operator.resume_group(group, **decided.facts(databases)))


@gathered
def set_rate(
    group: GroupArgument,
    rate: Annotated[
        str, typer.Argument(metavar="RATE", help="Such as 100/s, 30/min or 5/h; declared: as its handler declares.")
    ],
    databases: DatabasesOptions,
    decided: GroupOptions,
) -> None:
    """Slow a group down."""
    chosen = None if rate == "declared" else rate
    decided.perform(SET_RATE, databases, lambda operator: operator.set_rate(group, chosen, **decided.facts(databases)))


# --- moved, or deleted -----------------------------------------------------------------------------------------------


@gathered
def reset(
    group: GroupArgument,
    topic: TopicOption,
    to: Annotated[str, typer.Option(help=f"Where it goes on: {_TO}.")],
    databases: DatabasesOptions,
    acting: ActorOptions,
    skip_pruned: Annotated[bool, typer.Option(help="Accept that some of it was pruned.")] = False,
    source: SourceOption = None,
) -> None:
    """Have a group read again."""
    with databases.opened() as operator:
        where = {"database": databases.only, "source": source}
        preview = operator.preview_reset(group, topic, to, **where)
        decided: Any = {"by": acting.by, "why": acting.reason, "skip_pruned": skip_pruned, **where}
        do = partial(operator.reset_group, group, topic, to, **decided)
        act_after_preview(RESET_GROUP, acting, f"group {group} of topic {topic}", preview, _tables(preview), do)


@gathered
def skip(
    group: GroupArgument,
    topic: TopicOption,
    databases: DatabasesOptions,
    acting: ActorOptions,
    to: Annotated[str, typer.Option(help=f"Where it goes on: {_TO}.")] = "now",
    source: SourceOption = None,
) -> None:
    """Have a group skip."""
    with databases.opened() as operator:
        where = {"database": databases.only, "source": source}
        preview = operator.preview_skip(group, topic, to, **where)
        do = partial(operator.skip_group, group, topic, to, by=acting.by, why=acting.reason, **where)
        act_after_preview(SKIP_GROUP, acting, f"group {group} of topic {topic}", preview, _tables(preview), do)


@gathered
def delete(group: GroupArgument, topic: TopicOption, databases: DatabasesOptions, acting: ActorOptions) -> None:
    """Delete a group."""
    with databases.opened() as operator:
        where = {"database": databases.only}
        preview = operator.preview_delete(group, topic, **where)
        inbox = ", ".join(f"{number} {status}" for status, number in preview.inbox.items())
        facts = {"topic": topic, "inbox": inbox or "empty", "workers": ", ".join(preview.workers) or "none"}
        do = partial(operator.delete_group, group, topic, by=acting.by, why=acting.reason, **where)
        tables = [facts_table(f"Group {group}", facts)]
        act_after_preview(DELETE_GROUP, acting, f"group {group} of topic {topic}", preview, tables, do)


def _tables(preview: GroupMove) -> list[Table]:
    facts = {"topic": preview.topic, "messages": preview.messages, "pruned": preview.missing or "none"}
    moves = rows_table("queue> from=former> to=position> messages>", preview.queues, "Queues")
    return [facts_table(f"Group {preview.group}", facts), moves]


group_app.command("pause", help=help_of(PAUSE_GROUP, "group pause mailer"))(pause)
group_app.command("resume", help=help_of(RESUME_GROUP, "group resume mailer --topic transfer"))(resume)
group_app.command("rate", help=help_of(SET_RATE, "group rate mailer 50/s"))(set_rate)
group_app.command("reset", help=help_of(RESET_GROUP, "group reset ledger --topic transfer --to 3d"))(reset)
group_app.command("skip", help=help_of(SKIP_GROUP, "group skip mailer --topic transfer"))(skip)
group_app.command("delete", help=help_of(DELETE_GROUP, "group delete statistics --topic transfer"))(delete)
