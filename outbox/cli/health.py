"""Show problems, progress, workers and holders of locks: ``outbox doctor``, ``stats``, ``lock`` …"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from outbox.cli import output
from outbox.cli.database import DatabaseOptions, DatabasesOptions, check_role, opened
from outbox.cli.groups import add_acts
from outbox.cli.messages import dead_app
from outbox.cli.options import URL_VARIABLE, AppOption, command, gathered
from outbox.cli.output import Code, Failure, ListForm, ListFormOption, Output, OutputOption, RowShape, if_away, say
from outbox.cli.processes import load_quietly
from outbox.errors import InvalidSettings
from outbox.operator.health.grants import ROLES
from outbox.operator.health.silences import Silence
from outbox.operator.health.workers import HandlerRow, LockRow, ProducerRow, WorkerRow
from outbox.reader import variable
from outbox.text import counted, plain

if TYPE_CHECKING:
    from rich.table import Table

    from outbox.operator.health.examine import HealthReport
    from outbox.operator.health.stats import Stats

_STYLES = {"problem": "bold red", "note": "bold yellow"}


# --- doctor ----------------------------------------------------------------------------------------------------------


@gathered
def doctor(
    database: DatabaseOptions,
    app: AppOption = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(ROLES),
            help="What the role of the URL is there for, as of `outbox db grants`; may be given again. Default: with "
            "--app consumer where it has consumers, else producer; without --app it isn't known.",
        ),
    ] = None,
    form: OutputOption = Output.TABLE,
) -> None:
    """Report the faults of one database, and how to mend them.

    It only reads, and reads little: it may be run at any time, and also where there is a transaction pooler in between.
    With --app (or OUTBOX_APP) it examines the application's own database, settings, checkers and consumers, connecting
    as the application does, unless --url names another; and it knows which topics have a checker. What it isn't
    permitted to read it names, and goes on.

    \b
    It examines:
      server     version, standby, read-only, durability, connections left, clock, pooler
      tables     migrations, privileges, differences, invalid indexes, autovacuum
      vacuum     open and prepared transactions, replication slots
      halves     topics without a checker, late checks, old and parked halves
      messages   not dispatched, not released, parked, retries, groups that fell behind, not pruned
      settings   those that contradict each other
    The exit code is 6 if there is a problem; notes alone leave it at 0.

    \b
    Examples:
      outbox doctor --url postgresql+psycopg://me@localhost/shop
      outbox doctor --app shop.messages:outbox -o json
      outbox doctor --url postgresql+psycopg://mailer@localhost/mail --role consumer
    """
    report = _examine(database, app, [check_role(name) for name in role or ()] or None)
    if form is Output.JSON:
        output.print_json({**dataclasses.asdict(report), "healthy": report.healthy})
    else:
        _print_report(report)
    if not report.healthy:
        raise typer.Exit(Code.PROBLEMS)


def _examine(database: DatabaseOptions, app: str | None, roles: list[str] | None) -> HealthReport:
    from outbox.operator.health.examine import examine, read_settings  # noqa: PLC0415 - needed by this command alone

    refused: InvalidSettings | None = None
    if app:
        try:
            outbox = load_quietly(app)
        except Failure as failure:
            # The doctor is there for settings that contradict each other, where it knows a database.
            if not isinstance(failure.__cause__, InvalidSettings) or not (database.url or variable(URL_VARIABLE)):
                raise
            refused = failure.__cause__
        else:
            settings, engine, groups = outbox.settings, outbox.engine, outbox.subscriptions.values()
            if database.schema:
                settings = dataclasses.replace(settings, schema=database.schema)
            bind = database.address if database.url else engine
            try:
                return examine(bind, settings, outbox.checkers, subscriptions=groups, roles=roles, app=app)
            finally:
                if isinstance(engine, Engine):
                    engine.dispose()
    _ = database.engine  # says what to install where there is no driver
    settings, of_environment = read_settings(database.schema)
    return examine(database.address, settings, refused=refused or of_environment, roles=roles)


def _print_report(report: HealthReport) -> None:
    terminal = output.console()
    for finding in report.findings:
        if finding.silenced:
            terminal.print(Text(plain(f"silenced {finding.silenced}: {finding.sentence}\n"), "dim"), soft_wrap=True)
            continue
        title = Text(finding.severity.upper(), _STYLES[finding.severity]).append(f"  {finding.code}", "default")
        mend = finding.mend.replace("\n", "\n        ")
        terminal.print(title)
        terminal.print(Text(plain(f"  {finding.sentence}\n  mend: {mend}\n")), soft_wrap=True)
    incomplete: dict[tuple[str, str], list[str]] = {}
    for each in report.inspections:
        if each.why:
            how = "not inspected" if each.outcome == "skipped" else "inspected in part"
            incomplete.setdefault((how, each.why), []).append(each.name)
    for (how, why), names in incomplete.items():
        terminal.print(Text(plain(f"{how}: {', '.join(names)}: {why}")), soft_wrap=True)
    loud = [finding for finding in report.findings if not finding.silenced]
    problems = sum(finding.severity == "problem" for finding in loud)
    done = sum(each.outcome != "skipped" for each in report.inspections)
    terminal.print(
        f"{counted(problems, 'problem')}, {counted(len(loud) - problems, 'note')}; {done} of "
        f"{len(report.inspections)} inspections done in {report.database}, schema {report.schema!r}",
        soft_wrap=True,
    )


# --- stats -----------------------------------------------------------------------------------------------------------


@gathered
def show_stats(
    database: DatabaseOptions,
    form: OutputOption = Output.TABLE,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Show it again every so many seconds, until Ctrl-C."),
    ] = None,
) -> None:
    """Show how far each topic and each group has come.

    Cheap to run at any time: a count stops at 10000 and is then shown as 10000+. With --watch -o json there is one
    JSON object a line.

    \b
    Topics (in the producer's database):
      undecided     prepared, and neither committed nor rolled back yet; of them
        parked      over their checks: waiting for an operator
        orphans     due for a check; of these unasked: never checked so far. Is a worker running that has
                    a checker for the topic?
      undispatched  committed, but not a message yet: is a worker running?
      scheduled     committed, to be delivered later
      exhausted      a known group has lost it, and it isn't sent again: waiting for an operator
      messages      all there ever were
      committed     halves that were decided so, as far as dispatch has come; so with rolled_back
      checks        how often a checker or a fence was asked
    Groups (in the consumer's database):
      consumed      messages up to where the group has come
      lag           messages after that (unknown where the producer is in another database)
      failed        will be retried; due: how long the oldest one waits although its time has come
      waiting       for an earlier message of their key
      taken         by clients, under leases
      parked        waiting for an operator
    """
    shown = _watched(database, watch)
    if watch is not None and form is Output.TABLE and sys.stdout.isatty():
        say(f"{database}, every {watch:g} s; Ctrl-C ends it")
        with Live(console=output.console(), auto_refresh=False) as live:
            for stats in shown:
                live.update(Group(*_stats_tables(stats)), refresh=True)
    else:
        for stats in shown:
            output.print_as(form, stats, *_stats_tables(stats))


def _stats(database: DatabaseOptions) -> Stats:
    from outbox.operator.health.stats import stats  # noqa: PLC0415 - needed by this command alone

    with opened(database.address, database.settings) as (connection, parts):
        return stats(connection, database.settings, parts)


def _watched(database: DatabaseOptions, seconds: float | None) -> Iterator[Stats]:
    """Yield the statistics, once or every so many seconds; later ones wait for a database that is away."""
    yield _stats(database)
    while seconds is not None:
        time.sleep(seconds)
        try:
            stats = _stats(database)
        except DBAPIError as error:
            say(f"{if_away(error)}; trying again")
        else:
            yield stats


def _stats_tables(stats: Stats) -> list[Table]:
    names = ("undecided", "undispatched", "scheduled", "exhausted", "failed", "waiting", "taken", "parked")
    counts = {
        name: lambda row, name=name: f"{getattr(row, name)}{'+' if name in row.capped else ''}"
        for name in (*names, "open", "compensating", "overdue")
    }
    ages = {
        name: lambda row, name=name: output.age(getattr(row, name))
        for name in ("oldest_undecided", "oldest_undispatched", "oldest_lag", "oldest_due", "oldest_overdue")
    }
    topics = (
        "topic undecided> parked>=parked_halves orphans> unasked> oldest>=oldest_undecided undispatched> "
        "oldest>=oldest_undispatched scheduled> next_due exhausted> messages> committed> "
        "rolled_back> checks>"
    )
    shown = {**counts, **ages, "lag": lambda row: "?" if row.lag is None else row.lag}
    shown["parked_halves"] = lambda row: row.parked
    sagas = "saga open> compensating> overdue> oldest>=oldest_overdue first=overdue_id"
    groups = "group topic consumed> lag> oldest>=oldest_lag failed> due>=oldest_due waiting> taken> parked> lost>"
    return [
        output.rows_table(topics, stats.topics, f"Topics at {output.cell(stats.at)}", **shown),
        output.rows_table(groups, stats.groups, "Groups", **shown),
        *([output.rows_table(sagas, stats.sagas, "Sagas", **shown)] if stats.sagas else []),
    ]


# --- workers and handlers --------------------------------------------------------------------------------------------

_WORKERS = RowShape(WorkerRow, {"roles": lambda row: ", ".join(row.roles)})
_PRODUCERS = RowShape(ProducerRow)


def _number_of(name: str, shown: Callable[[Any], object] = str) -> Callable[[HandlerRow], object]:
    """Return what shows a number of a handler; nothing where it isn't known."""

    def show(row: HandlerRow) -> object:
        value = getattr(row.numbers, name, None)
        return "" if value is None else shown(value)

    return show


_HANDLERS = RowShape(
    HandlerRow,
    {
        "workers": lambda row: ", ".join(row.workers),
        "rate": _number_of("rate", "{:.1f}/s".format),
        **{name: _number_of(name, "{:.3f}s".format) for name in ("p50", "p95")},
        **{name: _number_of(name) for name in ("failures", "in_flight", "lag")},
        "oldest_lag": _number_of("oldest_lag", output.age),
    },
    attrgetter("name"),
)


@gathered
def show_workers(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the workers that run, or have died.

    \b
    Example:
      outbox workers
    """
    databases.show(lambda operator: operator.workers(), _WORKERS, form)


@gathered
def show_producers(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the processes that have sent within the last day, and how many active ones each producer group has.

    \b
    Example:
      outbox producers
    """
    databases.show(lambda operator: operator.producers(), _PRODUCERS, form)


@gathered
def show_handlers(
    databases: DatabasesOptions,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    form: ListFormOption = ListForm.TABLE,
) -> None:
    """List the functions registered on the workers that run: consumers, checkers, compensations.

    A topic without a compensation can't be compensated; one without a checker or fence can't be checked. Of consumers:
    how many messages a second they consumed in the last five minutes, within what time half of the calls and nearly
    all of them ended, how many failed, how many run; and how far behind the group is, in messages and in time.

    \b
    Example:
      outbox handlers --topic transfer
    """
    databases.show(lambda each: (row for row in each.handlers() if topic in {None, row.topic}), _HANDLERS, form)


# --- locks -----------------------------------------------------------------------------------------------------------

_LOCKS = RowShape(LockRow, {}, attrgetter("session"))
lock_app: typer.Typer = typer.Typer(
    name="lock",
    help="See which sessions hold the locks of dispatch, of a group or of a queue, and end one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@command(lock_app, "list")
def list_locks(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the locks of dispatch, of groups and of queues that are held at this moment, the longest first.

    Most are held for milliseconds. One that isn't let go is that of a handler which takes its time, of a host that has
    vanished, of a program that was stopped, or of an application that uses the same key for itself.

    \b
    Example:
      outbox lock list
    """
    databases.show(lambda operator: operator.locks(databases.only), _LOCKS, form)


add_acts(lock_app, "lock")

rule_app: typer.Typer = typer.Typer(
    name="rule",
    help="Silence a rule of health for a time, see what is silenced, and lift it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@command(rule_app, "silences")
def list_silences(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the silences and maintenance windows that haven't ended.

    \b
    Example:
      outbox rule silences
    """
    databases.show(lambda operator: operator.silences(), RowShape(Silence), form)


add_acts(rule_app, "rule")
add_acts(dead_app, "dead")
