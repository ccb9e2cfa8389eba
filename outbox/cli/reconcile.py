"""``outbox reconcile``: compare producer and consumer, repair what differs, and look at what was found before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outbox.cli import reconcile_options, reconcile_runs
from outbox.cli import reconcile_runs as reconcile_archive
from outbox.cli.database import SchemaOption
from outbox.cli.exits import Code, Failure
from outbox.cli.options import YesOption, ask
from outbox.cli.options import need_terminal as can_ask
from outbox.cli.output import Output, OutputOption, say
from outbox.cli.reconcile_options import Asked, as_duration, as_policy, check_engine, needing
from outbox.cli.reconcile_report import SHOWN, Bars, Report, code_of, coming_to_a_result
from outbox.reconcile.job import EngineName, Job, Repair, Tier

if TYPE_CHECKING:
    from outbox.reconcile.rows import JobResult

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.command("runs")(reconcile_runs.show_runs)
app.command("show")(reconcile_runs.show_run)
app.command("archive")(reconcile_archive.archive)


@app.callback()
def reconcile(  # noqa: PLR0917 - options of the command line
    context: typer.Context,
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
    tier: Annotated[
        Tier | None, typer.Option(help="digest: read only ranges whose digests differ; full: every row. Default: auto.")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="local: threads of this process; spark: a cluster. Default: auto.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranges compared at once.")] = None,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="Spark's master: local[4], spark://…, yarn.")
    ] = None,
    remote: Annotated[str | None, typer.Option(metavar="URL", help="A Spark Connect server: sc://host:port.")] = None,
    jdbc_jar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let Spark read by JDBC, with this driver.")
    ] = None,
    spark_ui: Annotated[bool, typer.Option("--spark-ui", help="Open Spark's web page.")] = False,
    archive: Annotated[
        list[Path] | None,
        typer.Option("--archive", metavar="DIR", help="Archived messages, for what was pruned; may be given again."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Repair what differs, by the policy; asks first.")] = False,
    yes: YesOption = False,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="KIND=ACTION", help="What is done about a kind; may be given again."),
    ] = None,
    max_resends: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Resend a missing message so often at most. Default: 3.")
    ] = None,
    keep_for: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long a range that was in sync is trusted. Default: 7d."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Trust no range: verify all anew.")] = False,
    no_record: Annotated[
        bool, typer.Option("--no-record", help="Write neither runs nor findings nor what was in sync.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as a page with charts.")] = None,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figures of the run for Prometheus.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help=f"Findings to show. Default: {SHOWN}; all with -o json.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare the message tables of producer and consumer, and repair what differs.

    Each message of the window is looked up on both sides; what differs is told by kind, with its mend. Nothing is
    changed without --apply but the record (see `outbox reconcile runs`). How it is compared, and why so, goes to
    stderr.

    \b
    Kinds and what can be done about them (the first is the default; --policy KIND=ACTION):
      missing                     resend, alert
      undispatched                dispatch, alert
      unrecorded, status_mismatch sync_status, alert
      parked                      alert, retry
      failed, phantom, digest_mismatch  alert, park
      undecided                   alert, check
      unconsumed, resend_exhausted, no_effect, duplicate_effect, uncompensated, consumed_though_rolled_back  alert
    The exit code is 0 in sync (or all repaired), 1 if differences are left; every failure has another one.

    \b
    Examples:
      outbox reconcile --topic orders --group mail --since 24h
      outbox reconcile --app shop.messages:outbox --apply --yes --html report.html
      outbox reconcile --config nightly.toml -o json
      outbox reconcile --topic orders --group mail --apply --policy parked=retry
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    asked = Asked(producer, consumer, schema, config, outbox, topic, group, pair, tag, key, effect, since, until, grace)
    report = Report(output, limit, html, prometheus)
    secrets: list[str] = []
    with coming_to_a_result(secrets), needing("outbox reconcile", "reconcile"):
        report.check()
        if fresh and keep_for:
            raise Failure("--fresh and --keep-for exclude each other", Code.USAGE)
        on_spark = engine or (EngineName.SPARK if master or remote or jdbc_jar or spark_ui else None)
        spark = {"master": master, "remote": remote, "jdbc_jar": jdbc_jar, "ui": spark_ui or None}
        options = {
            "tier": tier,
            "engine": on_spark,
            "archives": tuple(archive) if archive else None,
            "policy": as_policy(policy) if policy else None,
            "max_resends": max_resends,
            "apply": apply or None,
            "record": False if no_record else None,
            "keep_for": 0.0 if fresh else as_duration(keep_for, "--keep-for"),
            "workers": workers,
            "spark": {name: value for name, value in spark.items() if value is not None},
        }
        job = asked.job({name: value for name, value in options.items() if value is not None})
        secrets += [job.producer.url, job.consumer.url]
        check_engine(job.engine)
        if job.apply:
            can_ask("not repairing", yes=yes)
        with report.failing(job):
            result = _run(job, yes=yes)
        report.tell(result)
    raise typer.Exit(code_of(result))


def _run(job: Job, *, yes: bool) -> JobResult:
    from outbox.reconcile.run import compare, mend  # noqa: PLC0415 - an extra

    with Bars() as bars:
        result = compare(job, bars)
    if job.apply and _sure(job, result, yes=yes):
        with Bars() as bars:
            mend(job, result, bars)
    return result


def _sure(job: Job, result: JobResult, *, yes: bool) -> bool:
    """Show what is to be repaired, and ask; where nothing is, there is nothing to ask."""
    repairs = [
        (pair.pair, kind, number, action)
        for pair in result.pairs
        for kind, number in pair.differences.items()
        if (action := job.repair_of(kind)) is not Repair.ALERT
    ]
    if yes or not repairs:
        return True
    for pair, kind, number, action in repairs:
        say(f"{number:>9,} {kind.label} of {pair}: {action.value}")
    return ask(f"Repair {sum(repair[2] for repair in repairs):,} differences?")


def _refuse_options(context: typer.Context) -> None:
    """What stands before a subcommand would be without effect."""
    sources = (context.get_parameter_source(name) for name in context.params)
    if any(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise Failure(
            f"options of `outbox reconcile {context.invoked_subcommand}` stand after it, not before", Code.USAGE
        )
