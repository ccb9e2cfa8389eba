"""``outbox reconcile``: compare producer and consumer, repair what differs; earlier runs.

The options are the fields of `outbox.reconcile.job.Job` and of what it is made of. They go over those of a file, and
these over what an application says.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from sqlalchemy import URL

from outbox.cli import options, output
from outbox.cli.database import SCHEMA_HELP, engine_of
from outbox.cli.groups import add_acts
from outbox.cli.options import URL_VARIABLE, LimitOption, command, find_url, gathered, options_of, read_options
from outbox.cli.output import (
    Code,
    Failure,
    ListForm,
    ListFormOption,
    Output,
    OutputOption,
    RowShape,
    as_failure,
    needing,
    say,
)
from outbox.cli.processes import load_quietly
from outbox.destination import Destination, Remote, destination
from outbox.errors import pip_install
from outbox.message.content import is_internal
from outbox.reader import option, variable
from outbox.reconcile.config import Values, clock_of, job_of, merged, only, read_file, subscribed, with_clock
from outbox.reconcile.job import KINDS, Access, EngineName, Job, Pair, Repair, Spark, Window, hidden
from outbox.settings import Settings
from outbox.text import described, key_text, trace_of

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.reconcile.record.orders import ReconciliationOrders
    from outbox.reconcile.record.views import FindingRow, Run, Schedule
    from outbox.reconcile.rows import JobResult

PRODUCER_VARIABLE = "OUTBOX_PRODUCER_URL"
CONSUMER_VARIABLE = "OUTBOX_CONSUMER_URL"
RECORD_VARIABLE = "OUTBOX_RECORD_URL"
#: How many findings are shown as tables unless an option says so.
SHOWN = 20


# --- what is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Which databases, and where else the job is described."""

    producer: str | None = option(
        None,
        "The producer's database. Default: OUTBOX_PRODUCER_URL, the better place for a password; that of --config or "
        "--app; or OUTBOX_DATABASE_URL.",
        metavar="URL",
    )
    consumer: str | None = option(
        None,
        "The consumer's database. Default: OUTBOX_CONSUMER_URL; that of --config or --app; or the producer's.",
        metavar="URL",
    )
    schema: str | None = option(None, SCHEMA_HELP, metavar="NAME")
    config: Path | None = option(None, "The job as a file; options override it.", metavar="FILE.toml")
    app: str | None = option(
        None, "Your Outbox: its groups with their filters, and their databases.", metavar="MODULE:OBJECT"
    )

    def values(self) -> Values:
        """Return what file, options and environment say of the databases, and the file of the rest."""
        values = dict(read_file(self.config)) if self.config else {}
        choices = (("producer", self.producer, PRODUCER_VARIABLE), ("consumer", self.consumer, CONSUMER_VARIABLE))
        for side, url, name in choices:
            if url or variable(name):
                values[side] = self.access(_find_url(url, f"--{side}", name))
        return values

    def access(self, url: URL) -> Access:
        """Return the access to a database."""
        return Access(url.render_as_string(hide_password=False), Settings.from_env(schema=self.schema or None))


def _find_url(url: str | None, title: str, name: str, *others: str) -> URL:
    """Return the URL of an option, else that of the environment; say so if the option has a password."""
    found = find_url(url, title, name, *others)
    text = found.render_as_string(hide_password=False)
    if url and hidden(text, text) != text:
        say(f"note: while this runs, ps shows the password in {title} to every user of this host; set {name} instead")
    return found


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which topics and groups."""

    topic: str | None = option(None, "The topic.")
    group: str | None = option(None, "The group.")
    pair: tuple[str, ...] = option((), "A topic and a group.", metavar="TOPIC:GROUP")

    def pairs(self, known: list[Pair], filters: Values) -> tuple[Pair, ...] | None:
        """Return the pairs that are named; a topic or a group alone chooses among those that are known."""
        names: list[tuple[str, str]] = []
        for text in self.pair:
            topic, _, group = text.partition(":")
            if not topic or not group:
                raise Failure(f"--pair {text!r} must be TOPIC:GROUP")
            names.append((topic, group))
        if self.topic and self.group:
            names.append((self.topic, self.group))
        elif self.topic or self.group:
            chosen = [pair for pair in known if self.topic in {None, pair.topic} and self.group in {None, pair.group}]
            if not chosen:
                there = ", ".join(f"{pair.topic}:{pair.group}" for pair in known)
                raise Failure(
                    f"--topic needs its --group, and --group its --topic{f'; known are {there}' if there else ''}"
                )
            names += [pair.names for pair in chosen]
        if not names and filters:
            raise Failure("--tag, --key, --header and --effect are of a pair: name its topic and group")
        return tuple(Pair(topic, group, **filters) for topic, group in names) or None


FILTERS = options_of(Pair, "topic", "group")
WINDOW = options_of(Window, "last")
_SPARK = options_of(Spark, "conf")
_JOB = options_of(
    Job,
    *("producer", "consumer", "producer_table", "consumer_table"),
    *("pairs", "window", "measures", "record", "record_in", "spark"),
)


def with_databases(source: SourceOptions, values: Values, outbox: Outbox | None) -> Values:
    """Return values with both databases: those of an application, or of the environment, where they name none."""
    if outbox is not None:
        values = only(subscribed(outbox, values))
    elif "producer" not in values:
        url = find_url(None, "--producer", PRODUCER_VARIABLE, URL_VARIABLE)
        values = {**values, "producer": source.access(url)}
    return {"consumer": values["producer"], **values}


def described_job(source: SourceOptions, pairs: PairOptions, filters: Any, window: Any, more: Values) -> Job:
    """Return the job that options describe; ``more`` goes over what is known from the file and the application."""
    values = source.values()
    outbox = load_quietly(source.app) if source.app else None
    known = list(values.get("pairs", ()))
    if outbox is not None and "pairs" not in values:
        known = [Pair(topic, group) for topic, group in outbox.subscriptions if not is_internal(topic)]
    if (chosen := pairs.pairs(known, read_options(Pair, filters))) is not None:
        values = merged(values, {"pairs": chosen})
    values = dict(with_databases(source, values, outbox))
    if source.schema:
        for side in ("producer", "consumer", "record_in"):
            if (access := values.get(side)) is not None:
                values[side] = replace(access, settings=replace(access.settings, schema=source.schema))
    times, _ = options.read_filter(Window, window, lambda: clock_of(with_clock(values)))
    return job_of(merged(merged(values, more), {"window": times}))


# --- outbox reconcile ------------------------------------------------------------------------------------------------

app: typer.Typer = typer.Typer(rich_markup_mode=None, invoke_without_command=True)

_KINDS = "\n".join(f"  {kind.label:<30}{', '.join(kind.repairs)}" for kind in KINDS)
_HELP = f"""Compare the message tables of producer and consumer, and repair what differs.

Each message of the window is compared on both sides; each difference has a kind and a mend. Nothing is changed without
--apply but the record (see `outbox reconcile runs`). How it is compared, and why so, goes to stderr.

\b
Kinds and what can be done about them (the first is the default; --policy KIND=REPAIR):
{_KINDS}

The exit code is 0 in sync (or all repaired), 6 if differences are left; every failure has another one.

\b
Examples:
  outbox reconcile --topic orders --group mail --since 24h
  outbox reconcile --topic orders --group mail --dry-run
  outbox reconcile --app shop.messages:outbox --apply --yes --html report.html
  outbox reconcile --config nightly.toml -o json
  outbox reconcile --topic orders --group mail --apply --policy parked=retry
"""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """Where the run is recorded."""

    record: str | None = option(
        None,
        "The database in which the run is recorded. Default: OUTBOX_RECORD_URL; that of --config; or the consumer's, "
        "which can't be a standby then.",
        metavar="URL",
    )
    no_record: bool = option(False, "Record nothing.")

    def values(self, source: SourceOptions) -> Values:
        """Return what options and environment say of the record."""
        if self.record and self.no_record:
            raise Failure("--record and --no-record exclude each other")
        if self.no_record:
            return {"record": False}
        if not self.record and not variable(RECORD_VARIABLE):
            return {}
        return {"record_in": source.access(_find_url(self.record, "--record", RECORD_VARIABLE))}


#: The module that has each form of a job's result, in a function of its name.
_FORMS = {
    "write_html": "outbox.reconcile.report.html",
    "write_prometheus": "outbox.reconcile.report.prometheus",
    **dict.fromkeys(("write_findings", "print_report", "as_json"), "outbox.reconcile.report"),
}


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """In which forms a result is reported; ``limit`` is of the findings shown on stdout."""

    html: Destination | None = option(
        None, "Write the report as a page with charts.", parse=destination, metavar="FILE|URL"
    )
    prometheus: Destination | None = option(
        None, "Write the figures of the run for Prometheus.", parse=destination, metavar="FILE|URL"
    )
    findings: Destination | None = option(
        None, "Write the differences as Parquet, a file for each pair, by day.", parse=destination, metavar="DIR|URL"
    )
    limit: int | None = option(None, f"Findings to show. Default: {SHOWN}; all with -o json.", least=0)
    output: Output = option(Output.TABLE, output.FORM_HELP)

    def files(self) -> list[tuple[str, Destination]]:
        """Return what else than stdout the result goes to, by the option that names it."""
        return [(name, path) for name in ("html", "prometheus", "findings") if (path := getattr(self, name))]

    def check(self) -> None:
        """Check that the files can be written, before anything else takes its time."""
        for name, path in self.files():
            importlib.import_module(_FORMS[f"write_{name}"])  # what isn't installed is reported now
            check_file(name, path, is_folder=name == "findings")

    def report(self, result: object, module: str | None = None) -> None:
        """Print a result, and write the files; ``module`` has all forms of one that isn't a job's."""

        def form(name: str) -> Callable[..., Any]:
            found: Callable[..., Any] = getattr(importlib.import_module(module or _FORMS[name]), name)
            return found

        if self.output is Output.JSON:
            output.print_json(form("as_json")(result, self.limit))
        else:
            form("print_report")(result, output.console(), SHOWN if self.limit is None else self.limit)
        for name, path in self.files():
            with writing(path):
                form(f"write_{name}")(path, result)

    def report_failure(self, job: Job) -> None:
        """Write for Prometheus that a run failed."""
        if self.prometheus:
            from outbox.reconcile.report.prometheus import write_failed  # noqa: PLC0415 - needed by this command alone

            with writing(self.prometheus):
                write_failed(self.prometheus, job.pairs, dt.datetime.now(dt.UTC))


def check_file(name: str, path: Destination, *, is_folder: bool = False) -> None:
    """Check that the file of an option can be written."""
    if isinstance(path, Remote):
        with writing(path):
            path.opened()
        return
    if is_folder and path.is_file():
        raise Failure(f"--{name} {path} is a file; name a folder")
    if not is_folder and path.is_dir():
        raise Failure(f"--{name} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise Failure(f"--{name} {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise Failure(f"--{name} {path}: the folder {path.parent} can't be written to")


@contextmanager
def writing(path: Destination) -> Iterator[None]:
    """Tell which file it is that can't be written in the block."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{path} can't be written: {error.strerror or error}", Code.FAILED) from error


def reconcile(
    context: typer.Context,
    *,
    source: SourceOptions,
    pairs: PairOptions,
    filters: Any,
    window: Any,
    job: Any,
    spark: Any,
    recording: RecordingOptions,
    report: ReportOptions,
    fresh: Annotated[bool, typer.Option("--fresh", help="Trust no range: verify all anew.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how it would be compared, and what to expect; compare nothing.")
    ] = False,
    yes: options.YesOption = False,
) -> None:
    """Run the job of the options."""
    if context.invoked_subcommand is not None:
        # What stands before a subcommand would be without effect.
        sources = map(context.get_parameter_source, context.params)
        if any(source is not None and source.name == "COMMANDLINE" for source in sources):
            command = f"outbox reconcile {context.invoked_subcommand}"
            raise Failure(f"options of `{command}` stand after it, not before")
        return
    secrets: list[str] = []
    with no_result(secrets), needing("outbox reconcile", "reconcile"):
        report.check()
        values = {**read_options(Job, job), "spark": read_options(Spark, spark), **recording.values(source)}
        if fresh and "keep_for" in values:
            raise Failure("--fresh and --keep-for exclude each other")
        if fresh:
            values["keep_for"] = 0.0
        if values["spark"]:
            values.setdefault("engine", EngineName.SPARK)
        with output.Bars():  # a window of the last hours asks a database for the time
            work = described_job(source, pairs, filters, window, values)
        secrets += [work.producer.url, work.consumer.url, work.recorder.url]
        if (work.by_spark or work.engine is EngineName.SPARK) and importlib.util.find_spec("pyspark") is None:
            raise Failure(f"the engine spark needs pyspark; {pip_install('spark')}", Code.CONFIG)
        if dry_run:
            _show_plans(work, report.output)
            return
        if work.apply:
            options.need_terminal("not repairing", yes=yes)
        try:
            result = _run(work, yes=yes)
        except BaseException:
            report.report_failure(work)
            raise
        report.report(result)
    from outbox.reconcile.report import verdict  # noqa: PLC0415 - needed by this command alone

    reached = verdict(result)  # what was repaired is no difference any more
    raise typer.Exit(Code.PROBLEMS if reached.left or reached.measures else Code.DONE)


app.callback(help=_HELP)(gathered(reconcile, filters=FILTERS, window=WINDOW, job=_JOB, spark=_SPARK))


def _show_plans(job: Job, form: Output) -> None:
    from outbox.reconcile.run import foresee  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        plans = foresee(job, bars)
    rows = [{"topic": pair.topic, "group": pair.group, **dataclasses.asdict(plan)} for pair, plan in plans]
    output.print_as(
        form,
        rows,
        output.rows_table(
            "topic group tier engine settled> rows> megabytes> seconds>",
            rows,
            rows=lambda row: row["expected"]["rows"],
            megabytes=lambda row: f"{row['expected']['bytes'] / 1e6:,.1f}",
            seconds=lambda row: f"{row['expected']['seconds']:,.1f}",
        ),
    )


def _run(job: Job, *, yes: bool) -> JobResult:
    from outbox.reconcile.run import compare, mend  # noqa: PLC0415 - an extra

    with output.Bars() as bars:
        result = compare(job, bars)
    if job.apply and sure([(job, result)], yes=yes):
        with output.Bars() as bars:
            mend(job, result, bars)
    return result


def sure(compared: Iterable[tuple[Job, JobResult]], *, yes: bool) -> bool:
    """Show what is to be repaired, and ask; if there is nothing to repair, there is nothing to ask."""
    repairs = [
        (pair.pair, kind, number, repair)
        for job, result in compared
        for pair in result.pairs
        for kind, number in pair.differences.items()
        if (repair := kind.repair(job.policy, job.tables)) is not Repair.ALERT
    ]
    if yes or not repairs:
        return True
    for pair, kind, number, repair in repairs:
        say(f"{number:>9,} {kind.label} of {pair}: {repair.value}")
    return options.ask(f"Repair {sum(repair[2] for repair in repairs):,} differences?")


@contextmanager
def no_result(secrets: Sequence[str]) -> Iterator[None]:
    """Give a failure that has no code of its own that of no result; no traceback shows what is secret in URLs."""
    try:
        yield
    except Exception as error:
        failure = as_failure(error)
        if failure is None:
            text = trace_of(error)
            for url in secrets:
                text = hidden(text, url)
            say(text)
            failure = Failure("this error is unexpected, see above", Code.NO_RESULT)
        raise Failure(str(failure), Code.NO_RESULT if failure.code is Code.FAILED else failure.code) from error


# --- earlier runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where runs are recorded."""

    consumer: str | None = option(
        None,
        "The consumer's database, in which the runs are recorded. Default: OUTBOX_RECORD_URL, where they are recorded "
        "elsewhere; OUTBOX_CONSUMER_URL, the better place for a password; OUTBOX_PRODUCER_URL; or OUTBOX_DATABASE_URL.",
        metavar="URL",
    )
    schema: str | None = option(None, SCHEMA_HELP, metavar="NAME")

    def opened(self) -> ReconciliationOrders:
        """Open the database in which runs are recorded; return what it has of them, and takes orders."""
        from outbox.operator.databases import Databases, open_database  # noqa: PLC0415 - needed by this command alone
        from outbox.reconcile.record.orders import ReconciliationOrders  # noqa: PLC0415 - needed by this command alone

        url = _find_url(
            self.consumer, "--consumer", RECORD_VARIABLE, CONSUMER_VARIABLE, PRODUCER_VARIABLE, URL_VARIABLE
        )
        settings = Settings.from_env(schema=self.schema or None)
        database = open_database(str(url.database), engine_of(url), settings)
        if "consumer" not in database.parts:
            found = f"only the producer's tables are in {described(url, settings.schema)}"
            raise Failure(f"{found}; name the consumer's database", Code.CONFIG)
        return ReconciliationOrders(Databases([database]))


@command(app, "runs")
def show_runs(
    where: RecordOptions,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    limit: LimitOption = 50,
    form: ListFormOption = ListForm.TABLE,
) -> None:
    """List recorded runs, the newest first; each compared a pair of topic and group.

    \b
    Results:
      in sync, or how many differences were found (see `show` for what was done about them)
      running     or it died: it has no end
      an error    why it came to no result
    """
    from outbox.operator.look.paging import every  # noqa: PLC0415 - needed by this command alone
    from outbox.reconcile.record.views import Run, RunFilter  # noqa: PLC0415 - needed by this command alone

    runs, criteria = where.opened(), RunFilter(topic=topic, group=group)
    rows = list(every(lambda page: runs.runs(criteria, page), limit))
    shape = RowShape(Run, {"took": lambda run: output.age(run.seconds), "result": _result})
    output.print_rows(rows, shape, form)


@command(app, "show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, see `outbox reconcile runs`.")],
    where: RecordOptions,
    limit: LimitOption = 50,
    after: Annotated[int, typer.Option(min=0, metavar="N", help="Go on after this finding.")] = 0,
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="Only findings of this kind.")] = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Show one run: differences by kind, sums, findings; what differed, and what was done about it.

    \b
    Example:
      outbox reconcile show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --limit 500
    """
    from outbox.operator.look.paging import every  # noqa: PLC0415 - needed by this command alone
    from outbox.reconcile.record.views import FindingFilter  # noqa: PLC0415 - needed by this command alone

    runs, run_id = where.opened(), options.as_id(run, "RUN")
    found, criteria = runs.run(run_id), FindingFilter(kind=kind, after=after)
    findings = list(every(lambda page: runs.findings(run_id, criteria, page), limit))
    following = findings[-1].id if len(findings) == limit else None
    if form is Output.JSON:
        output.print_json({"run": found.run, "kinds": found.kinds, "findings": findings, "next": following})
        return
    read = {"counts", "plan", "error", "differences", "measures", "database"}
    values = dataclasses.asdict(found.run)
    facts = {"result": _result(found.run)} | {name: value for name, value in values.items() if name not in read}
    facts |= (found.run.counts or {}) | {"plan": "; ".join((found.run.plan or {}).get("why", ()))}
    output.print_table(output.facts_table("run", facts))
    columns = "kind number> repair=action done> healed> refused> left> meaning"
    output.print_table(output.rows_table(columns, found.kinds, "Differences by kind"))
    if found.run.measures:
        columns = "measure value key producer> rolled_back> consumer> in_flight> unexplained>"
        output.print_table(output.rows_table(columns, _sums(found.run), "Sums", key=lambda row: key_text(row["key"])))
    columns = "number>=id message=message_id kind action result acted_at detail"
    output.print_table(output.rows_table(columns, findings, "Findings", detail=_detail))
    if following is not None:
        say(f"there may be more: --after {following}")


def _sums(run: Run) -> list[dict[str, Any]]:
    """Return the sums of a run: the totals, and the keys that don't add up."""
    return [
        {"measure": measure["name"], **row}
        for measure in run.measures
        for row in (*measure["totals"], *(each for each in measure["rows"] if Decimal(each["unexplained"])))
    ]


def _result(run: Run) -> str:
    if run.error:
        return run.error
    if run.finished_at is None:
        return "running, or died"
    found = f"{run.differences:,} differences, {run.left or 0:,} left" if run.differences else ""
    unexplained = [f"{each['name']} unexplained" for each in run.measures if not each["in_sync"]]
    return "; ".join(filter(None, [found, *unexplained])) or "in sync"


def _detail(row: FindingRow) -> str:
    details = row.detail.items()
    return ", ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in details)


# --- what workers do -------------------------------------------------------------------------------------------------


@command(app, "schedules")
def show_schedules(where: RecordOptions, form: OutputOption = Output.TABLE) -> None:
    """List the reconciliations that living workers have declared: when they run, what they compare, the next run."""
    rows = where.opened().schedules()
    shown = {
        "when": _when,
        "compares": lambda row: ", ".join(row.compares),
        "workers": lambda row: ", ".join(row.workers),
    }
    columns = "name when timezone compares next=next_at workers"
    output.print_as(form, {"items": rows}, output.rows_table(columns, rows, **shown))


def _when(row: Schedule) -> str:
    if row.follows is not None:
        return f"without an end, every {output.age(row.follows)}"
    return f"every {output.age(row.every)}" if row.every is not None else row.cron or ""


add_acts(app, "reconcile", RecordOptions, lambda where: nullcontext(where.opened()))
