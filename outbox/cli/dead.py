"""``outbox dead``: dead letters, by what they died of."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

import typer

from outbox.cli import inbox
from outbox.cli.arguments import Doing, Listing, Many, Span, Where, gathered
from outbox.cli.bulk import Order, carry_out
from outbox.cli.choosing import InboxChoice, TargetsArgument, inbox_targets, selected_inbox
from outbox.cli.lists import Shape, at_least, print_page, print_rows, taken
from outbox.cli.output import Form, print_json
from outbox.operator.model import Action, DeadGroup, InboxFilter

app = typer.Typer(
    help="See dead letters by what they died of; retry, discard or restore them.\n\n"
    "A dead letter is a message that a group has parked: over its attempts, or set aside. It is written GROUP/ID.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

GROUPS = Shape(
    DeadGroup,
    ("fingerprint", "group", "topic", "error", "count>", "first", "last", "last error"),
    lambda row: (
        row.fingerprint,
        row.group,
        row.topic,
        row.error_kind,
        at_least(row.count),
        row.first_at,
        row.last_at,
        row.sample.last_error,
    ),
    lambda row: row.fingerprint,
)

#: How `outbox.operator.look.inbox` names a group of dead letters.
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


@app.command("groups")
@gathered
def show_groups(
    where: Where,
    group: Annotated[str | None, typer.Option(metavar="NAME", help="Only this group.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    output: Annotated[Form, typer.Option("--output", "-o", help="The form of the data on stdout.")] = Form.TABLE,
) -> None:
    """Show dead letters by group, topic and kind of error, the most first.

    Those with one fingerprint died of one cause: retry one of them, then all.

    \b
    Example:
      outbox dead groups --topic orders
    """
    with where.opened() as admin:
        found = admin.dead_groups(database=where.only, group=group, topic=topic, limit=limit)
        if output is Form.JSON:
            print_json({"items": [dataclasses.asdict(row) for row in found]})
        else:
            print_rows(found, GROUPS, output, databases=len(admin.databases) > 1)


@app.command("list")
@gathered
def show_list(
    where: Where,
    choice: InboxChoice,
    listing: Listing,
    discarded: Annotated[bool, typer.Option("--discarded", help="Those that were discarded, instead.")] = False,
) -> None:
    """List dead letters, the newest id first.

    --group takes the name of a group, or a fingerprint of `outbox dead groups`.

    \b
    Examples:
      outbox dead list --group mail --topic orders
      outbox dead list --discarded --since 3d -o csv > discarded.csv
    """
    with where.opened() as admin:
        span = Span.of(admin, choice.since, choice.until, listing.after)
        wanted = _wanted(choice, span, where, discarded=discarded)
        page = taken(lambda page: admin.inbox(wanted, page), listing.limit, span.token)
        print_page(span.onward(page), inbox.SHAPE, listing, admin, what="rows")


@app.command()
@gathered
def retry(targets: TargetsArgument = None, *, where: Where, choice: InboxChoice, many: Many, doing: Doing) -> None:
    """Have dead letters tried again, now and with all attempts.

    --group takes the name of a group, or a fingerprint of `outbox dead groups`. Several at once, and those picked by
    options, need a --reason, are shown first and run as a bulk job.

    \b
    Examples:
      outbox dead retry mail/01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox dead retry --group 3f9c0a1be2d45678 --limit 1  # does it work now?
      outbox dead retry --group 3f9c0a1be2d45678 --reason "mended in 2.4.1" --rate 50
    """
    _act(Action.RETRY, targets or [], where, choice, many, doing)


@app.command()
@gathered
def discard(targets: TargetsArgument = None, *, where: Where, choice: InboxChoice, many: Many, doing: Doing) -> None:
    """Discard dead letters that nobody will need; they can be restored until they are pruned.

    \b
    Example:
      outbox dead discard --group 3f9c0a1be2d45678 --reason "test orders" --dry-run
    """
    _act(Action.DISCARD, targets or [], where, choice, many, doing)


@app.command()
@gathered
def restore(targets: TargetsArgument = None, *, where: Where, choice: InboxChoice, many: Many, doing: Doing) -> None:
    """Make discarded messages dead letters again.

    \b
    Example:
      outbox dead restore mail/01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
    """
    _act(Action.RESTORE, targets or [], where, choice, many, doing, discarded=True)


def _act(
    action: Action,
    given: list[str],
    where: Where,
    choice: InboxChoice,
    many: Many,
    doing: Doing,
    *,
    discarded: bool = False,
) -> None:
    targets = inbox_targets(given, choice.group)
    with where.opened() as admin:
        span = Span.of(admin, choice.since, choice.until)
        wanted = _wanted(choice, span, where, discarded=discarded)
        selector = selected_inbox(admin, targets, wanted, many, narrowed=choice.narrows(targets))
        carry_out(admin, where, Order(action, selector, rate=many.rate), doing)


def _wanted(choice: InboxChoice, span: Span, where: Where, *, discarded: bool) -> InboxFilter:
    fingerprint = choice.group if choice.group and _FINGERPRINT.fullmatch(choice.group) else None
    return choice.wanted(span, where.only, ["parked"], discarded=discarded, fingerprint=fingerprint)
