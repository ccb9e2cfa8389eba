"""``outbox reconcile runs`` and ``show``: what earlier reconciliations found, and what was done about it.

``outbox reconcile archive``: keep what a reconciliation reads, for when it is pruned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli import reconcile_options
from outbox.cli.database import URL_VARIABLE, SchemaOption, find_settings, find_url, opened
from outbox.cli.database import described as where
from outbox.cli.exits import Code, Failure
from outbox.cli.options import LimitOption, as_id
from outbox.cli.output import Output, OutputOption, age, print_json, print_table, say, table
from outbox.cli.reconcile_options import (
    CONSUMER_VARIABLE,
    PRODUCER_VARIABLE,
    Asked,
    GroupOption,
    TopicOption,
    needing,
    note_password,
)
from outbox.cli.reconcile_report import Bars
from outbox.reconcile import record

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.reconcile.archive.files import Manifest

ConsumerOption = Annotated[
    str | None,
    typer.Option(
        "--consumer",
        metavar="URL",
        help="The consumer's database, in which the runs are recorded. Default: OUTBOX_CONSUMER_URL, the better place "
        "for a password, or OUTBOX_PRODUCER_URL, or OUTBOX_DATABASE_URL.",
    ),
]


def show_runs(
    consumer: ConsumerOption = None,
    schema: SchemaOption = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    limit: LimitOption = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """List recorded runs, the newest first; each compared a pair of topic and group.

    \b
    Results:
      in sync, or how many differences were found (see `show` for what was done about them)
      running     or it died: it has no end
      an error    why it came to no result
    """
    with _recorded(consumer, schema) as (connection, name):
        rows = record.runs(connection, name, topic, group, limit)
    if output is Output.JSON:
        print_json({"runs": rows})
        return
    columns = ("run", "topic", "group", "since", "until", "started", "took>", "repairs", "schedule", "result")
    print_table(
        table(
            columns,
            [
                (
                    row["id"],
                    row["topic"],
                    row["group"],
                    row["window_start"],
                    row["window_end"],
                    row["started_at"],
                    _took(row),
                    row["applied"],
                    row["schedule"],
                    _result(row),
                )
                for row in rows
            ],
        )
    )


def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, see `outbox reconcile runs`.")],
    consumer: ConsumerOption = None,
    schema: SchemaOption = None,
    limit: LimitOption = 50,
    after: Annotated[int, typer.Option(min=0, metavar="N", help="Go on after this finding: the end of a list.")] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one run, and its findings: what differed, and what was done about it.

    \b
    Example:
      outbox reconcile show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --limit 500
    """
    run_id = as_id(run, "RUN")
    with _recorded(consumer, schema) as (connection, name):
        told = record.run(connection, name, run_id)
        if told is None:
            raise Failure(f"no run {run_id} is recorded here; see `outbox reconcile runs`", Code.NOT_FOUND)
        findings = record.findings(connection, name, run_id, after, limit)
    following = findings[-1]["id"] if len(findings) == limit else None
    if output is Output.JSON:
        print_json({"run": told, "findings": findings, "next": following})
        return
    _print(told, findings)
    if following is not None:
        say(f"there may be more: --after {following}")


def _print(told: dict[str, Any], findings: list[dict[str, Any]]) -> None:
    names = (
        "topic",
        "group",
        "window_start",
        "window_end",
        "started_at",
        "finished_at",
        "applied",
        "schedule",
        "job_id",
    )
    facts: list[tuple[str, Any]] = [("id", told["id"]), ("result", _result(told))]
    facts += [(name.replace("_", " "), told[name]) for name in names if told[name] is not None]
    facts += [(name, number) for name, number in (told["counts"] or {}).items()]
    facts += [("" if number else "plan", why) for number, why in enumerate((told["plan"] or {}).get("why", ()))]
    rows = [
        (row["id"], row["message_id"], row["kind"], row["action"], row["result"], row["acted_at"], _detail(row))
        for row in findings
    ]
    print_table(
        table(("run", ""), facts),
        table(("number>", "message", "kind", "action", "result", "acted at", "detail"), rows, "Findings"),
    )


def _result(row: dict[str, Any]) -> str:
    if row["error"]:
        return str(row["error"])
    if row["finished_at"] is None:
        return "running, or died"
    return f"{row['differences']:,} differences" if row["differences"] else "in sync"


def _took(row: dict[str, Any]) -> str:
    return age((row["finished_at"] - row["started_at"]).total_seconds()) if row["finished_at"] else ""


def _detail(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in (row["detail"] or {}).items()
    )


@contextmanager
def _recorded(consumer: str | None, schema: str | None) -> Iterator[tuple[Connection, str]]:
    """Open the database in which runs are recorded; yield it with the schema."""
    url = find_url(consumer, "--consumer", CONSUMER_VARIABLE, PRODUCER_VARIABLE, URL_VARIABLE)
    if consumer:
        note_password(url, "--consumer", CONSUMER_VARIABLE)
    settings = find_settings(schema)
    with opened(url, settings) as (connection, parts):
        if "consumer" not in parts:
            raise Failure(
                f"only the producer's tables are in {where(url, settings.schema)}; name the consumer's database",
                Code.CONFIG,
            )
        yield connection, settings.schema


def archive(  # noqa: PLR0917 - options of the command line
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder of the archives; made if need be.")],
    producer: reconcile_options.ProducerOption = None,
    consumer: reconcile_options.ConsumerOption = None,
    schema: SchemaOption = None,
    config: reconcile_options.ConfigOption = None,
    outbox: reconcile_options.AppOption = None,
    topic: reconcile_options.TopicOption = None,
    group: reconcile_options.GroupOption = None,
    pair: reconcile_options.PairOption = None,
    tag: reconcile_options.TagOption = None,
    key: reconcile_options.KeyOption = None,
    effect: reconcile_options.EffectOption = None,
    since: reconcile_options.SinceOption = None,
    until: reconcile_options.UntilOption = None,
    grace: reconcile_options.GraceOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Archive what both sides say of a window's messages, as Parquet files.

    With `outbox reconcile --archive DIR` a pruned month can still be reconciled. What is younger than the grace period
    isn't archived. What is in the archive already isn't read again: run it each night, or again after a crash.

    \b
    Example:
      outbox reconcile archive --topic orders --group mail --until 1d --to /var/lib/outbox/archive
    """
    asked = Asked(producer, consumer, schema, config, outbox, topic, group, pair, tag, key, effect, since, until, grace)
    with needing("outbox reconcile archive", "reconcile"):
        from outbox.reconcile.archive import take_archive  # noqa: PLC0415 - an extra

        job = asked.job()
        taken: list[Manifest] = []
        with Bars() as bars:
            for each in job.pairs:
                taken += take_archive(job.producer, job.consumer, each, job.window, to, bars)
    rows = [_row(manifest) for manifest in taken]
    if output is Output.JSON:
        print_json({"archives": rows})
        return
    columns = ("folder", "side", "topic", "group", "parts>", "rows>", "unsettled>", "taken at")
    print_table(table(columns, [tuple(row.values()) for row in rows]))


def _row(manifest: Manifest) -> dict[str, Any]:
    content = manifest.content
    return {
        "folder": str(manifest.folder),
        "side": content.kind,
        "topic": content.pair.topic,
        "group": content.pair.group,
        "parts": len(manifest.parts),
        "rows": manifest.rows,
        "unsettled": sum(part.unsettled for part in manifest.parts),
        "taken_at": manifest.taken_at,
    }
