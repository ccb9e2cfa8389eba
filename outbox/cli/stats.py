"""``outbox stats``: how things stand."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from sqlalchemy.exc import DBAPIError

from outbox.cli.database import SchemaOption, UrlOption, find_settings, find_url, opened, where
from outbox.cli.exits import Code, as_failure
from outbox.cli.output import Output, OutputOption, age, cell, console, print_json, print_table, say, table

if TYPE_CHECKING:
    from rich.table import Table
    from sqlalchemy import URL

    from outbox.operator.health.stats import Stats
    from outbox.settings import Settings


def show_stats(
    url: UrlOption = None,
    schema: SchemaOption = None,
    output: OutputOption = Output.TABLE,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Show it again every so many seconds, until Ctrl-C."),
    ] = None,
) -> None:
    """Show how things stand, by topic and by group.

    Cheap to ask at any time: a count stops at 10000 and is then shown as 10000+. With --watch -o json there is one
    JSON object a line.

    \b
    Topics (in the producer's database):
      undecided     prepared, and neither committed nor rolled back yet; of them
        parked      over their checks: waiting for a human
        orphans     due for a check; of these unasked: never checked so far. Is a worker running that has
                    a checker for the topic?
      undispatched  committed, but not a message yet: is a worker running?
      scheduled     committed, to be delivered later
      messages      all there ever were
    Groups (in the consumer's database):
      consumed      messages up to where the group has come
      lag           messages after that (unknown where the producer is in another database)
      failed        will be retried; due: how long the oldest one waits although its time has come
      parked        waiting for a human
    """
    address, settings = find_url(url), find_settings(schema)
    if watch is None:
        _print(_stats(address, settings), output)
    elif output is Output.TABLE and sys.stdout.isatty():
        _live(address, settings, watch)
    else:
        for shown in _watch(address, settings, watch):
            _print(shown, output)


def _stats(url: URL, settings: Settings) -> Stats:
    from outbox.operator.health.stats import stats  # noqa: PLC0415

    with opened(url, settings) as (connection, parts):
        return stats(connection, settings, parts)


def _watch(url: URL, settings: Settings, seconds: float) -> Iterator[Stats]:
    """Yield how things stand, again and again; once it worked, a database that is away is waited for."""
    yield _stats(url, settings)
    while True:
        time.sleep(seconds)
        try:
            shown = _stats(url, settings)
        except DBAPIError as error:
            failure = as_failure(error)
            if failure is None or failure.code is not Code.UNAVAILABLE:
                raise
            say(f"{failure}; trying again")
        else:
            yield shown


def _live(url: URL, settings: Settings, seconds: float) -> None:
    say(f"{where(url, settings.schema)}, every {seconds:g} s; Ctrl-C ends it")
    with Live(console=console(), auto_refresh=False) as live:
        for shown in _watch(url, settings, seconds):
            live.update(Group(*_tables(shown)), refresh=True)


def _print(stats: Stats, output: Output) -> None:
    if output is Output.JSON:
        print_json(dataclasses.asdict(stats))
    else:
        print_table(*_tables(stats))


def _tables(stats: Stats) -> list[Table]:
    topics = [
        (
            row.topic,
            _count(row, "undecided"),
            row.parked,
            row.orphans,
            row.unasked,
            age(row.oldest_undecided),
            _count(row, "undispatched"),
            age(row.oldest_undispatched),
            _count(row, "scheduled"),
            cell(row.next_due),
            row.messages,
        )
        for row in stats.topics
    ]
    groups = [
        (
            row.group,
            row.topic,
            row.consumed,
            "?" if row.lag is None else row.lag,
            _count(row, "failed"),
            age(row.oldest_due),
            _count(row, "parked"),
        )
        for row in stats.groups
    ]
    return [
        table(
            (
                "topic", "undecided>", "parked>", "orphans>", "unasked>", "oldest>", "undispatched>", "oldest>",
                "scheduled>", "next due", "messages>",
            ),
            topics,
            f"Topics at {cell(stats.at)}",
        ),
        table(("group", "topic", "consumed>", "lag>", "failed>", "due>", "parked>"), groups, "Groups"),
    ]  # fmt: skip


def _count(row: Any, name: str) -> str:
    return f"{getattr(row, name)}{'+' if name in row.capped else ''}"
