"""``outbox inbox``: what groups have handled, failed at or parked."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from outbox.cli.arguments import Doing, Listing, Many, Span, Where, gathered
from outbox.cli.bulk import Order, carry_out
from outbox.cli.choosing import InboxChoice, TargetsArgument, inbox_targets, selected_inbox
from outbox.cli.lists import Shape, print_page, taken
from outbox.operator.model import Action, InboxRow

app = typer.Typer(
    help="See what groups have handled, failed at or parked; have it tried again, or set it aside.\n\n"
    "A message in an inbox is written GROUP/ID.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SHAPE = Shape(
    InboxRow,
    ("group", "id", "topic", "status", "attempts>", "next attempt", "error", "last error", "changed"),
    lambda row: (
        row.group,
        row.message_id,
        row.topic,
        "discarded" if row.discarded_at else row.status,
        row.attempts,
        row.next_attempt_at,
        row.error_kind,
        row.last_error,
        row.changed_at,
    ),
    lambda row: f"{row.group}/{row.message_id}",
)


class InboxStatus(enum.StrEnum):
    """How a message stands in an inbox."""

    CONSUMED = "consumed"
    FAILED = "failed"
    PARKED = "parked"
    QUARANTINED = "quarantined"


StatusOption = Annotated[list[InboxStatus] | None, typer.Option(help="Only those that stand so; may be given again.")]


@app.command("list")
@gathered
def show_list(where: Where, choice: InboxChoice, listing: Listing, status: StatusOption = None) -> None:
    """List messages in inboxes, the newest id first.

    \b
    Statuses:
      consumed     handled
      failed       will be tried again, at its next attempt
      parked       a dead letter: waits for a human (see `outbox dead`)
      quarantined  kept out: its local transaction was compensated
    \b
    Examples:
      outbox inbox list --group mail --status failed
      outbox inbox list --status failed --error timeout -o id | outbox inbox retry - --reason "it is back" --yes
    """
    with where.opened() as admin:
        span = Span.of(admin, choice.since, choice.until, listing.after)
        wanted = choice.wanted(span, where.only, status or ())
        page = taken(lambda page: admin.inbox(wanted, page), listing.limit, span.token)
        print_page(span.onward(page), SHAPE, listing, admin, what="rows")


@app.command()
@gathered
def retry(
    targets: TargetsArgument = None,
    *,
    where: Where,
    choice: InboxChoice,
    many: Many,
    doing: Doing,
    status: StatusOption = None,
) -> None:
    """Have messages tried again now.

    A failed one keeps its attempts; a parked one gets all of them anew. Options pick failed and parked messages,
    unless --status says which. Several at once, and those picked by options, need a --reason, are shown first and run
    as a bulk job.

    \b
    Examples:
      outbox inbox retry mail/01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox inbox retry --group mail --status failed --reason "the mail server is back" --rate 50
    """
    default = [InboxStatus.FAILED, InboxStatus.PARKED]
    _act(Action.RETRY, targets or [], where, choice, many, doing, default, status)


@app.command()
@gathered
def park(targets: TargetsArgument = None, *, where: Where, choice: InboxChoice, many: Many, doing: Doing) -> None:
    """Park failed messages: they are not tried again until somebody says so.

    \b
    Examples:
      outbox inbox park mail/01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "crashes the renderer"
      outbox inbox park --group mail --error "no such template" --reason "the template comes on Monday"
    """
    _act(Action.PARK, targets or [], where, choice, many, doing, [InboxStatus.FAILED])


def _act(
    action: Action,
    given: list[str],
    where: Where,
    choice: InboxChoice,
    many: Many,
    doing: Doing,
    default: list[InboxStatus],
    status: list[InboxStatus] | None = None,
) -> None:
    targets = inbox_targets(given, choice.group)
    with where.opened() as admin:
        span = Span.of(admin, choice.since, choice.until)
        wanted = choice.wanted(span, where.only, status or default, discarded=False)
        narrowed = choice.narrows(targets) or bool(status)
        selector = selected_inbox(admin, targets, wanted, many, narrowed=narrowed)
        carry_out(admin, where, Order(action, selector, rate=many.rate), doing)
