"""``outbox reconcile fleet``, ``follow`` and ``tables``: many services' databases, one without an end, any two tables.

A fleet is found by the patterns of a file. A reconciliation that follows two databases runs in the foreground. Two
business tables are compared column by column.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy.exc import SQLAlchemyError

from outbox.cli import options, output
from outbox.cli.options import command, options_of, read_options
from outbox.cli.output import Code, Failure, Output, needing
from outbox.cli.processes import load_quietly, named_app
from outbox.cli.reconcile import (
    FILTERS,
    RECORD_VARIABLE,
    PairOptions,
    RecordingOptions,
    ReportOptions,
    SourceOptions,
    check_file,
    described_job,
    no_result,
    sure,
    with_databases,
    writing,
)
from outbox.database.engines import connect, discard, sync_engine
from outbox.database.execute import Backoff
from outbox.destination import Destination, destination
from outbox.errors import InvalidSettings, SourceError, was_interrupted
from outbox.reader import option, variable
from outbox.reconcile.columns import TablesJob
from outbox.reconcile.config import access_of
from outbox.reconcile.fleet.config import Bounds, Fleet, read_fleet
from outbox.reconcile.job import NO_DATABASE, PASS_EVERY, Job, Window

if TYPE_CHECKING:
    from outbox.reconcile.fleet.members import Member
    from outbox.reconcile.fleet.run import FleetResult
    from outbox.reconcile.follow.follower import Follower, PassResult


app: typer.Typer = typer.Typer(rich_markup_mode=None)

#: They go over those of the file.
_BOUNDS = options_of(Bounds)


@command(app, "fleet", bounds=_BOUNDS)
def fleet(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The fleet as a file, or a folder of files *.toml.")],
    bounds: Any,
    report: ReportOptions,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only databases named so, and no totals; again for more."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Trust no range: verify all anew.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Repair what differs, by the policy.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be compared; compare nothing.")] = False,
    yes: options.YesOption = False,
) -> None:
    """Compare many services' databases as one: what is compared is found by the patterns of a file.

    Databases are compared some at a time, and with a bounded number of sessions on each server. One that fails doesn't
    end the others. The exit code is 0 in sync (or all repaired), 6 if differences are left, 5 if some came to no
    result, 70 if none did.

    \b
    Examples:
      outbox reconcile fleet fleet.toml --dry-run
      outbox reconcile fleet fleet.toml --prometheus /var/lib/node_exporter/fleet.prom
      outbox reconcile fleet fleet.d --only 'shop-*' --apply --yes
    """
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile fleet", "reconcile"):
        report.check()
        whole = read_fleet(path)
        secrets += [access.url for access in whole.databases.values()]
        url = variable(RECORD_VARIABLE)
        secrets += [url] if url else []
        record = {"record_in": access_of(url, what=RECORD_VARIABLE)} if url else {}
        job = {**record, **whole.job, **({"keep_for": 0.0} if fresh else {}), **({"apply": True} if apply else {})}
        limits = dataclasses.replace(whole.bounds, **read_options(Bounds, bounds))
        whole = dataclasses.replace(whole, job=job, bounds=limits, only=tuple(only or ()))
        if dry_run:
            _show(whole, report.output)
            return
        if whole.job.get("apply"):
            options.need_terminal("not repairing", yes=yes)
        result = _run(whole, yes=yes)
        report.report(result, "outbox.reconcile.fleet.report")

    reached = result.verdict
    if result.failed:
        raise typer.Exit(Code.PARTIAL if result.results else Code.NO_RESULT)
    raise typer.Exit(Code.PROBLEMS if reached.left or reached.measures else Code.DONE)


def _show(fleet: Fleet, form: Output) -> None:
    from outbox.reconcile.fleet.members import members_of  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        found = members_of(fleet, bars)
    rows = [_row(member) for member in found.members]
    table = output.rows_table("producer consumer priority> sessions pairs", rows)
    output.print_as(form, {"members": rows, "unreachable": found.unreachable}, table)
    for name, why in found.unreachable.items():
        output.say(f"{name}: {why}")


def _row(member: Member) -> dict[str, Any]:
    return {
        "producer": member.producer,
        "consumer": member.consumer,
        "priority": member.priority,
        "sessions": ", ".join(f"{server}: {number}" for server, number in member.sessions.items()),
        "pairs": ", ".join(map(str, member.job.pairs)),
    }


def _run(fleet: Fleet, *, yes: bool) -> FleetResult:
    from outbox.reconcile.fleet.run import compare_fleet, mend_fleet  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        result = compare_fleet(fleet, bars)
    if fleet.job.get("apply") and sure([(member.job, each) for member, each in result.results], yes=yes):
        with output.Bars() as bars:
            mend_fleet(fleet, result, bars)
    return result


#: What only a run has is left out.
_WINDOW = options_of(Window, "last", "until")
_JOB = options_of(
    Job,
    *("producer", "consumer", "pairs", "window", "measures", "record", "record_in", "spark"),
    *("tier", "engine", "keep_for", "max_time", "max_findings", "workers"),
)
#: How long (seconds) until a pass that failed is tried again.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


@command(app, "follow", filters=FILTERS, window=_WINDOW, job=_JOB)
def follow(
    *,
    source: SourceOptions,
    pairs: PairOptions,
    filters: Any,
    window: Any,
    job: Any,
    recording: RecordingOptions,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What it is called in the record.")] = "follow",
    every: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="Between two passes.")] = PASS_EVERY,
    form: Annotated[Output, typer.Option("--output", "-o", help="json: an event a line.")] = Output.TABLE,
    yes: options.YesOption = False,
) -> None:
    """Follow the log until Ctrl-C: tell what differs when it is past its grace period, and when it is gone.

    It begins with what is sent from now on, or at --since, and goes on where it was when it is started again. A worker
    does the same with `outbox.reconciliation("live", follows=True)`. The exit code is 6 if differences are left.

    \b
    Examples:
      outbox reconcile follow --topic orders --group mail --grace 30s
      outbox reconcile follow --app shop.messages:outbox --apply --yes -o json
    """
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile follow", "reconcile"):
        from outbox.reconcile.follow.follower import Follower  # noqa: PLC0415 - an extra

        work = described_job(source, pairs, filters, window, {**read_options(Job, job), **recording.values(source)})
        secrets += [work.producer.url, work.consumer.url, work.recorder.url]
        if work.apply:
            options.need_terminal("not repairing", yes=yes)
        shown = _Shown(name, form)
        followers = [Follower(work, pair, name, every, shown.report) for pair in work.pairs]
        with _until_stopped():
            _run_followers(work, followers)
    raise typer.Exit(Code.PROBLEMS if any(shown.open.values()) else Code.DONE)


def _run_followers(job: Job, followers: list[Follower]) -> None:
    """Take the passes as they come due; say what goes wrong, and go on."""
    from outbox.reconcile.record.write import why_of  # noqa: PLC0415 - an extra
    from outbox.reconcile.source import engine_of  # noqa: PLC0415 - an extra

    backoff, engine = Backoff(_FIRST_WAIT, _LONGEST_WAIT), engine_of(job.recorder)
    with ExitStack() as stack:
        for follower in followers:
            stack.callback(follower.close)
        connection = None
        while True:
            try:
                connection = connection or connect(engine)
                passes = [follower(connection) for follower in followers]
                backoff.reset()
                wait = 0.0 if any(each.more for each in passes) else 1.0
            except (SourceError, SQLAlchemyError) as error:
                if was_interrupted(error):
                    raise KeyboardInterrupt from None
                output.say(f"{why_of(error, job)}; it is tried again")
                if connection is not None:
                    discard(connection)
                connection, wait = None, backoff.next()
            time.sleep(wait)


@dataclasses.dataclass(frozen=True, slots=True)
class TablesReportOptions:
    """In which forms the comparison of two tables is reported."""

    html: Destination | None = option(None, "Write the report as a page.", parse=destination, metavar="FILE|URL")
    parquet: Destination | None = option(
        None, "Write all differences as Parquet, a row for each column.", parse=destination, metavar="FILE|URL"
    )
    output: Output = option(Output.TABLE, output.FORM_HELP)

    def check(self) -> None:
        """Check that the files can be written, before anything else takes its time."""
        for name, path in (("html", self.html), ("parquet", self.parquet)):
            if path is not None:
                check_file(name, path)


@command(app, "tables", source=options_of(SourceOptions, "schema"), job=options_of(TablesJob, "producer", "consumer"))
def compare_two(*, source: Any, job: Any, report: TablesReportOptions) -> None:
    """Compare two tables of any kind by key: which rows one side alone has, which columns differ, and both values.

    A key is one column or several: integers, decimals, uuids, texts, booleans, bytes, times. Other columns may have
    other types on either side, and are compared by value. Columns named as secrets or personal data are masked. The
    exit code is 0 if the tables are equal, 6 if they differ.

    \b
    Examples:
      outbox reconcile tables --left shop_order --key id
      outbox reconcile tables --left shop_order --right copy.orders --key shop,id --column total,state:status
      outbox reconcile tables --left shop_order --key id --tolerance weight=0.1%,placed_at=1s --parquet found.parquet
    """
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile tables", "reconcile"):
        from outbox.reconcile.columns.compare import compare_tables  # noqa: PLC0415 - an extra
        from outbox.reconcile.columns.report import as_json, print_report, write_html  # noqa: PLC0415 - an extra

        report.check()
        where = SourceOptions(**read_options(SourceOptions, source))
        values = with_databases(where, where.values(), load_quietly(where.app) if where.app else None)
        databases = {side: values[side] for side in ("producer", "consumer")}
        if NO_DATABASE in databases.values():
            raise Failure("a side of this file is read by Spark; name its database with --producer or --consumer")
        secrets += [access.url for access in databases.values()]
        work = TablesJob(**databases, **read_options(TablesJob, job))
        with output.Bars() as bars, writing(report.parquet) if report.parquet else nullcontext():
            result = compare_tables(work, bars, parquet=report.parquet)
        if report.html is not None:
            with writing(report.html):
                write_html(report.html, result)
        if report.output is Output.JSON:
            output.print_json(as_json(result))
        else:
            print_report(result, output.console())
    raise typer.Exit(Code.DONE if result.equal else Code.PROBLEMS)


@app.command("intake")
def compare_intake(
    topic: Annotated[str, typer.Argument(help="The topic of this service that an intake stores messages in.")],
    app: options.AppOption = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="The source, where the topic has several.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Store what is missing.")] = False,
    form: output.OutputOption = Output.TABLE,
) -> None:
    """Compare what a broker still has with what an intake has stored here, message by message.

    Only what was confirmed to the broker counts, and nothing is confirmed by this. The exit code is 0 if all is here
    (or stored now), 6 if messages are missing, 70 if there is no result.

    \b
    Examples:
      outbox reconcile intake orders --app loyalty.app:outbox
      outbox reconcile intake orders --app loyalty.app:outbox --apply
    """
    from outbox.relay.intake.comparison import compare  # noqa: PLC0415 - needed by this command alone

    with no_result([]), output.Bars() as bars:
        outbox = named_app(app)
        named = [each for each in outbox.intakes if each.topic == topic and source in {None, each.source.name}]
        if len(named) != 1:
            known = ", ".join(f"{each.topic} from {each.source.name}" for each in outbox.intakes) or "none"
            raise InvalidSettings(f"{len(named)} intakes are called so; name one by TOPIC and --source: {known}")
        bars.stage(f"messages of {named[0].source.name}", None)
        engine = sync_engine(outbox.engine)
        with closing(named[0].source), closing(connect(engine)) as connection:
            found = compare(connection, outbox.settings, named[0], apply=apply, done=bars.done)
    counts = dataclasses.asdict(found)
    shown = [{**each, "id": str(each["id"]), "at": each["at"].isoformat()} for each in counts.pop("missing")]
    tables = [output.facts_table(f"{topic} from {found.source}", counts)]
    tables += [output.rows_table("missing=id origin at", shown)] if shown else []
    output.print_as(form, {**counts, "missing": shown}, *tables)
    raise typer.Exit(Code.PROBLEMS if found.lost > found.stored else Code.DONE)


@dataclasses.dataclass
class _Shown:
    """Shows what passes have to tell, and knows how many differences are left of each pair."""

    name: str
    form: Output
    open: dict[str, int] = dataclasses.field(default_factory=dict)

    def report(self, result: PassResult) -> None:
        """Show what a pass has to tell."""
        from outbox.reconcile.follow.follower import events_of  # noqa: PLC0415 - an extra

        self.open[str(result.pair)] = result.open.total()
        for event in events_of(result, f"reconcile {self.name}: {result.pair}", self.name):
            facts = event.facts()
            if self.form is Output.JSON:
                typer.echo(json.dumps({"event": event.code, **facts}))
            else:
                typer.echo(event.text % facts)


@contextmanager
def _until_stopped() -> Iterator[None]:
    """Go on after the block once Ctrl-C or SIGTERM has ended it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        output.say("stopped; when it is started again it goes on from here")
    finally:
        signal.signal(signal.SIGTERM, before)
