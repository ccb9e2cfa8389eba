"""What groups have handled, failed at or parked; dead letters by what they died of."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import typer

from outbox.cli import output
from outbox.cli.database import DatabasesOptions
from outbox.cli.groups import CommandGroup, commands_of
from outbox.cli.options import (
    command,
)
from outbox.cli.output import ListForm, RowShape, at_least
from outbox.message.model import Status
from outbox.operator import model


def _inbox(name: str, help_: str, listing: str, **more: Any) -> CommandGroup[model.InboxRow]:
    shape = RowShape(
        model.InboxRow,
        "group id=message_id topic status attempts> next_attempt=next_attempt_at error=error_kind last_error "
        "waits_for changed=changed_at",
        {"status": lambda row: "discarded" if row.discarded_at else row.status},
        lambda row: f"{row.group}/{row.message_id}",
    )
    return CommandGroup(
        name, "rows", help_, listing, model.InboxFilter, shape, "inbox", "consumer", noun="inbox", **more
    )


inbox_app: typer.Typer = commands_of(
    _inbox(
        "inbox",
        "See what groups have handled, failed at or parked; have it tried again, or park it.\n\n"
        "A message in an inbox is written GROUP/ID.",
        """List messages in inboxes, the newest id first.

    \b
    Statuses:
      consumed     handled
      failed       will be retried, at its next attempt
      waiting      an earlier message of its key is to be settled first (see waits_for)
      parked       a dead letter: waits for an operator (see `outbox dead`)
      quarantined  kept out of the group for ever: its local transaction was compensated
    \b
    Examples:
      outbox inbox list --group mail --status failed
      outbox inbox list --status failed --error timeout -o id | outbox inbox retry - --reason "it is back" --yes
    """,
        hidden=frozenset({"discarded"}),
        states=frozenset({*Status, "unconsumed"} - {Status.PARKED}),
    )
)
dead_app: typer.Typer = commands_of(
    _inbox(
        "dead",
        "See dead letters by their kind of error; retry, discard or restore them.\n\n"
        "A dead letter is a message that a group has parked: over its attempts, or set aside. It is written GROUP/ID.",
        """List dead letters, the newest id first; with --discarded those that were discarded, instead.

    \b
    Examples:
      outbox dead list --group mail --topic orders
      outbox dead list --discarded --since 3d -o csv > discarded.csv
    """,
        preset={"status": ("parked",), "discarded": False},
        hidden=frozenset({"status"}),
        states=frozenset({"parked", "discarded"}),
    )
)


@command(dead_app, "groups")
def show_dead_groups(
    databases: DatabasesOptions,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only this group.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    form: output.ListFormOption = ListForm.TABLE,
) -> None:
    """Show dead letters by group, topic and kind of error, the most first.

    Those with one fingerprint died of one cause: retry one of them, then all.

    \b
    Example:
      outbox dead groups --topic orders
    """
    chosen: Any = {"database": databases.only, "group": group, "topic": topic, "limit": limit}
    databases.show(lambda operator: operator.dead_groups(**chosen), _DEAD_GROUPS, form)


_DEAD_GROUPS = RowShape(
    model.DeadGroup,
    "fingerprint group topic error=error_kind count> day> first=first_at last=last_at owner note last_error",
    {
        "count": lambda row: at_least(row.count),
        "day": lambda row: str(sum(row.trend)),
        "last_error": lambda row: row.sample.last_error,
    },
    attrgetter("fingerprint"),
)
