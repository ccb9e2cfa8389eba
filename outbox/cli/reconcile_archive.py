"""``outbox reconcile archive``: keep what a reconciliation reads, for when it is pruned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.cli import reconcile_options as options
from outbox.cli.database import SchemaOption
from outbox.cli.output import Output, OutputOption, print_json, print_table, table
from outbox.cli.reconcile_options import Asked, needing
from outbox.cli.reconcile_progress import Bars

if TYPE_CHECKING:
    from outbox.reconcile.archive import Manifest


def archive(  # noqa: PLR0917 - options of the command line
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder of the archives; made if need be.")],
    producer: options.ProducerOption = None,
    consumer: options.ConsumerOption = None,
    schema: SchemaOption = None,
    config: options.ConfigOption = None,
    outbox: options.AppOption = None,
    topic: options.TopicOption = None,
    group: options.GroupOption = None,
    pair: options.PairOption = None,
    tag: options.TagOption = None,
    key: options.KeyOption = None,
    effect: options.EffectOption = None,
    since: options.SinceOption = None,
    until: options.UntilOption = None,
    grace: options.GraceOption = None,
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
