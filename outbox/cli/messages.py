"""``outbox messages``: find messages, and follow one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outbox.cli import export, messages_acts
from outbox.cli.arguments import BodyOption, as_id
from outbox.cli.bodies import readable
from outbox.cli.choosing import MessageChoice
from outbox.cli.database import find_databases, find_settings, find_url, opened
from outbox.cli.database import where as place_of
from outbox.cli.exits import Code, Failure
from outbox.cli.export import MESSAGES
from outbox.cli.lists import print_page, taken
from outbox.cli.options import Listing, Where, gathered
from outbox.cli.output import Form, Output, OutputOption, print_json, print_table
from outbox.cli.span import Span
from outbox.cli.way import story

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.messages import Way
    from outbox.settings import Settings

app = typer.Typer(
    help="Find messages, follow one to the inboxes, send again, recall, or roll back.\n\n"
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


app.command("resend")(messages_acts.resend)
app.command("recall")(messages_acts.recall)
app.command("rollback")(messages_acts.rollback)
app.command("export")(export.export_messages)


def _way(message_id: UUID, urls: list[URL], consumer_url: URL | None, settings: Settings, body: bool) -> Way:
    """Return what the database that has the half knows of a message, and what the inboxes of the others do."""
    from outbox.messages import add_inboxes, way_of  # noqa: PLC0415

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
