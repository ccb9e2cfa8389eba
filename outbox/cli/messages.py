"""``outbox messages``: find messages, and follow one.

``outbox messages resend``, ``recall`` and ``compensate``: one message, or many as a bulk job.

``outbox messages export``: all that fit, as they come.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from outbox.cli.arguments import ActorOption, BodyOption, Doing, Listing, Many, Span, Where, as_id, gathered
from outbox.cli.bulk import Order, actor_of, carry_out
from outbox.cli.choosing import IdsArgument, MessageChoice, message_targets, selected_messages
from outbox.cli.database import find_databases, find_settings, find_url, opened
from outbox.cli.database import where as place_of
from outbox.cli.exits import Code, Failure
from outbox.cli.lists import Shape, every, print_page, print_stream, taken
from outbox.cli.output import Form, Output, OutputOption, print_json, print_table, readable, say
from outbox.cli.way import story
from outbox.errors import MessageNotFound
from outbox.operator.model import Action, Actor, MessageFilter, MessageRow
from outbox.operator.old_messages import MessageStatus

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.operator.old_messages import Way
    from outbox.operator.service import Admin
    from outbox.settings import Settings


@gathered
def resend(ids: IdsArgument = None, *, where: Where, choice: MessageChoice, many: Many, doing: Doing) -> None:
    """Send messages once more under the same ids.

    A group that has handled a message knows its id, and does nothing; one that has lost it gets it. Only what was
    dispatched can be resent. Several at once, and those picked by options, need a --reason, are shown first and run as
    a bulk job.

    \b
    Examples:
      outbox messages resend 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox messages resend --topic orders --since 2h --dry-run
      outbox messages list --key 42 -o id | outbox messages resend - --reason "mail lost its inbox" --yes
    """
    _act(Action.RESEND, ids or [], where, choice, many, doing, [MessageStatus.DISPATCHED])


@gathered
def recall(ids: IdsArgument = None, *, where: Where, choice: MessageChoice, many: Many, doing: Doing) -> None:
    """Take scheduled messages back before they are due.

    \b
    Examples:
      outbox messages recall 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "the order was cancelled"
      outbox messages recall --topic reminders --all --reason "wrong text" --dry-run
    """
    _act(Action.RECALL, ids or [], where, choice, many, doing, [MessageStatus.SCHEDULED])


@gathered
def compensate(
    ids: IdsArgument = None,
    *,
    where: Where,
    choice: MessageChoice,
    many: Many,
    doing: Doing,
    acknowledge_delivered: Annotated[
        bool,
        typer.Option(
            "--acknowledge-delivered", help="Also where a group has handled the message: its effect there stays."
        ),
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Don't wait for a worker to have done it; print the bulk job's id.")
    ] = False,
) -> None:
    """Compensate local transactions whose messages must not, or can't, take effect.

    First each group's inbox is fenced, so that the message can't take effect later; then a worker that has the
    function which the service registered for the topic (`@outbox.compensation`) runs it, once per message ever. Where a
    group has handled the message already, that is refused. It is a bulk job, which this command waits for; Ctrl-C
    ends the waiting, not the bulk job.

    \b
    Examples:
      outbox messages compensate 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "no such account at bank B"
      outbox messages compensate --topic transfer --where to=B-9999 --reason "no such account" --dry-run
    """
    options = {"acknowledge_delivered": True} if acknowledge_delivered else {}
    _act(Action.COMPENSATE, ids or [], where, choice, many, doing, [], options=options, wait=not no_wait)


def _act(
    action: Action,
    ids: list[str],
    where: Where,
    choice: MessageChoice,
    many: Many,
    doing: Doing,
    statuses: list[MessageStatus],
    *,
    options: dict[str, bool] | None = None,
    wait: bool = True,
) -> None:
    targets = message_targets(ids)
    with where.opened() as admin:
        wanted = choice.wanted(Span.of(admin, choice.since, choice.until), where.only, statuses=statuses)
        selector = selected_messages(admin, targets, wanted, many, narrowed=choice.narrows())
        carry_out(admin, where, Order(action, selector, options or {}, many.rate, wait), doing)


#: How a list shows messages.
MESSAGES = Shape(
    MessageRow,
    ("id", "topic", "key", "tag", "status", "born", "deliver at", "decided by"),
    lambda row: (row.id, row.topic, row.key, row.tag, row.status, row.born_at, row.deliver_at, row.decided_by),
    lambda row: row.id,
)

#: What an export with bodies has beside that; ``body_base64`` only where bytes that are no text are revealed.
_BODY = ("content_type", "size", "headers", "body", "body_base64", "masked", "truncated")


class ExportForm(enum.StrEnum):
    """The form of an export."""

    NDJSON = "ndjson"
    CSV = "csv"


ExportOption = Annotated[
    ExportForm, typer.Option("--output", "-o", help="The form of the data on stdout; ndjson: a JSON object a line.")
]
UpToOption = Annotated[int | None, typer.Option(min=1, metavar="N", help="Not more than so many. Default: all.")]


@gathered
def export_messages(
    where: Where,
    choice: MessageChoice,
    limit: UpToOption = None,
    body: Annotated[
        bool, typer.Option("--body", help="With headers and bodies; what may be secret in them is masked.")
    ] = False,
    reveal: Annotated[
        bool, typer.Option("--reveal", help="With --body: nothing is masked. Each is recorded in the audit table.")
    ] = False,
    actor: ActorOption = None,
    output: ExportOption = ExportForm.NDJSON,
) -> None:
    """Export messages, the newest first.

    \b
    Examples:
      outbox messages export --topic orders --since 1d > orders.ndjson
      outbox messages export --status dispatched --header tenant=acme --body -o csv > acme.csv
    """
    if reveal and not body:
        raise Failure("--reveal goes with --body", Code.USAGE)
    by = actor_of(actor) if reveal else None
    with where.opened() as admin:
        wanted = choice.wanted(Span.of(admin, choice.since, choice.until), where.only)
        names = [*MESSAGES.names, *(_BODY if body else ())]
        told(print_stream(_rows(admin, wanted, limit, by, body=body), names, csv_=output is ExportForm.CSV), "messages")


def _rows(
    admin: Admin, wanted: MessageFilter, limit: int | None, by: Actor | None, *, body: bool
) -> Iterator[dict[str, Any]]:
    for row in every(lambda page: admin.messages(wanted, page), limit):
        fields = MESSAGES.fields(row)
        yield fields | _contents(admin, row, by) if body else fields


def _contents(admin: Admin, row: MessageRow, by: Actor | None) -> dict[str, Any]:
    try:
        view = admin.message(row.id, reveal=by)
    except MessageNotFound:
        # Pruned since it was listed.
        return dict.fromkeys(_BODY)
    if view.body is None:
        return dict.fromkeys(_BODY)
    raw = admin.body(row.id)[1] if by and (view.body.text is None or view.body.truncated) else None
    return {
        "content_type": view.body.content_type,
        "size": view.body.size,
        "headers": view.half and view.half["headers"],
        "body": None if raw is not None else view.body.text,
        "body_base64": None if raw is None else base64.b64encode(raw).decode(),
        "masked": list(view.body.masked),
        "truncated": view.body.truncated and raw is None,
    }


def told(count: int, what: str) -> None:
    """Tell how many rows were exported."""
    say(f"{count} {what}")


app = typer.Typer(
    help="Find messages, follow one to the inboxes, send again, recall, or compensate.\n\n"
    "What is done is recorded in the audit table, with who did it and why.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
@gathered
def show_list(where: Where, choice: MessageChoice, listing: Listing) -> None:
    """List messages, the newest first.

    They are those of the producers' databases. A search looks at many messages at a time and says where to go on;
    undecided, scheduled and recalled messages are found however many others there are.

    \b
    Statuses:
      undecided    prepared; neither committed nor rolled back yet
      rolled_back  will never be delivered
      committed    to be dispatched
      dispatched   in its queue
      scheduled    to be delivered later
      recalled     taken back before it was due
    \b
    Examples:
      outbox messages list --topic orders --since 1h
      outbox messages list --where order.id=42
      outbox messages list --status undecided -o json
    """
    with where.opened() as admin:
        if not admin.databases.having("producer", where.only):
            places = ", ".join(str(database.engine.url) for database in admin.databases.values())
            raise Failure(f"only the consumer's tables are in {places}; name the producer's database", Code.CONFIG)
        span = Span.of(admin, choice.since, choice.until, listing.after)
        wanted = choice.wanted(span, where.only)
        page = span.onward(taken(lambda page: admin.messages(wanted, page), listing.limit, span.token))
        if listing.output is Form.JSON:
            print_json({"messages": [MESSAGES.fields(row) for row in page.items], "next": page.next_page_token})
        else:
            print_page(page, MESSAGES, listing, admin, what="messages")


@app.command()
@gathered
def show(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the message.")],
    where: Where,
    consumer_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The consumer's database, where it is another one, and not a --database."),
    ] = None,
    body: BodyOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the whole way of one message.

    Half message, checks, decision, queue, inboxes, and what operators did.

    \b
    In the inbox of a group it is one of:
      consumed, failed (will be retried), parked (waits for a human), rolled_back;
      unconsumed  the group hasn't come so far
      left_out    the group has, but has no inbox row: its filter left the message out, or the row was pruned
    \b
    Example:
      outbox messages show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --body
    """
    message_id, settings = as_id(id_), find_settings(where.schema)
    addresses = list(find_databases(where.url, where.database).values())
    way = _way(message_id, addresses, find_url(consumer_url) if consumer_url else None, settings, body)
    if not way.known:
        places = " or ".join(place_of(address, settings.schema) for address in addresses)
        raise Failure(f"no message {message_id} in {places}", Code.NOT_FOUND)
    shown = readable(way.half, way.raw) if body else None
    if output is Output.JSON:
        fields = {f.name: getattr(way, f.name) for f in dataclasses.fields(way) if f.name != "raw"}
        print_json(fields | ({"body": shown} if body else {}))
        return
    print_table(*story(way, shown))


app.command("resend")(resend)
app.command("recall")(recall)
app.command("compensate")(compensate)
app.command("export")(export_messages)


def _way(message_id: UUID, urls: list[URL], consumer_url: URL | None, settings: Settings, body: bool) -> Way:
    """Return what the database that has the half knows of a message, and what the inboxes of the others do."""
    from outbox.operator.old_messages import add_inboxes, way_of  # noqa: PLC0415

    found = []
    for url in urls:
        with opened(url, settings) as (connection, parts):
            found.append((url, way_of(connection, settings, message_id, parts, body=body)))
    home, way = next((each for each in found if each[1].half), found[0])
    for url in [*(url for url in urls if url != home), *([consumer_url] if consumer_url is not None else [])]:
        with opened(url, settings) as (connection, parts):
            if "consumer" in parts:
                add_inboxes(connection, settings, way)
            elif url is consumer_url:
                place = place_of(url, settings.schema)
                raise Failure(f"--consumer-url: the consumer's tables are not in {place}", Code.CONFIG)
    return way
