"""``outbox messages``: find messages, and follow one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outbox.cli.arguments import AfterOption, BodyOption, LimitOption, as_id, as_time
from outbox.cli.bodies import readable
from outbox.cli.database import SchemaOption, UrlOption, find_settings, find_url, opened, producer_opened, where
from outbox.cli.exits import Code, Failure
from outbox.cli.output import Output, OutputOption, print_json, print_table, say, table
from outbox.cli.way import story
from outbox.messages import Filter, MessageStatus, Page, Way

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outbox.settings import Settings

app = typer.Typer(help="Find messages, and follow one to the inboxes.", no_args_is_help=True,
                  rich_markup_mode=None)  # fmt: skip


@app.command("list")
def show_list(  # noqa: PLR0917 - options of the command line
    url: UrlOption = None,
    schema: SchemaOption = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    status: Annotated[MessageStatus | None, typer.Option(help="Only messages that have come so far.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Not older: 90s, 15m, 2h, 3d, or 2026-01-31T12:00:00+00:00.")
    ] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List messages, the newest first.

    They are those of a producer's database. A search looks at 100000 messages at a time and says where to go on;
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
      outbox messages list --status undecided -o json
    """
    from outbox.messages import list_messages  # noqa: PLC0415

    address, settings = find_url(url), find_settings(schema)
    moment, seconds = as_time(since, "--since") if since else (None, None)
    wanted = Filter(topic, key, status.value if status else None, moment, seconds)
    last = as_id(after, "--after") if after else None
    with producer_opened(address, settings) as connection:
        page = list_messages(connection, settings, wanted, after=last, limit=limit)
    _print_page(page, output)


@app.command()
def show(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the message.")],
    url: UrlOption = None,
    schema: SchemaOption = None,
    consumer_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The consumer's database, where it is another one.")
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
    message_id, address, settings = as_id(id_), find_url(url), find_settings(schema)
    way = _way(message_id, address, find_url(consumer_url) if consumer_url else None, settings, body)
    if not way.known:
        raise Failure(f"no message {message_id} in {where(address, settings.schema)}", Code.NOT_FOUND)
    shown = readable(way.half, way.raw) if body else None
    if output is Output.JSON:
        fields = {f.name: getattr(way, f.name) for f in dataclasses.fields(way) if f.name != "raw"}
        print_json(fields | ({"body": shown} if body else {}))
        return
    print_table(*story(way, shown))


def _way(message_id: UUID, url: URL, consumer_url: URL | None, settings: Settings, body: bool) -> Way:
    from outbox.messages import add_inboxes, way_of  # noqa: PLC0415

    with opened(url, settings) as (connection, parts):
        way = way_of(connection, settings, message_id, parts, body=body)
    if consumer_url is not None:
        with opened(consumer_url, settings) as (connection, parts):
            if "consumer" not in parts:
                place = where(consumer_url, settings.schema)
                raise Failure(f"--consumer-url: the consumer's tables are not in {place}", Code.CONFIG)
            add_inboxes(connection, settings, way)
    return way


def _print_page(page: Page, output: Output) -> None:
    if output is Output.JSON:
        print_json({"messages": [dataclasses.asdict(row) for row in page.messages], "next": page.next})
        return
    rows = [
        (row.id, row.topic, row.key, row.tag, row.status, row.born_at, row.deliver_at, row.decided_by)
        for row in page.messages
    ]
    print_table(table(("id", "topic", "key", "tag", "status", "born", "deliver at", "decided by"), rows))
    if page.exhausted:
        say(f"looked at 100000 messages; to search further: --after {page.next}")
    elif page.next:
        say(f"there may be more: --after {page.next}")
