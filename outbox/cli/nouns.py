"""The command groups beside those of messages: groups, topics, sagas, bulk jobs, and the audit of all acts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outbox.acts.messages import ACTS
from outbox.cli import groups, options, output
from outbox.cli.database import DatabasesOptions
from outbox.cli.groups import CommandGroup, add_acts, add_list, all_rows, commands_of, item_word
from outbox.cli.messages import fates_text
from outbox.cli.options import ActorOptions, AppOption, PageOptions, as_id, cli_actor, command
from outbox.cli.output import (
    ExportForm,
    ExportFormOption,
    Failure,
    ListForm,
    ListFormOption,
    Output,
    OutputOption,
    RowShape,
    age,
    facts_table,
    first_line,
    print_as,
    rows_table,
    say,
    table,
)
from outbox.cli.processes import named_app
from outbox.flow.views import FlowFilter, FlowRow, Sagas
from outbox.message.topic import Topic
from outbox.operator import model
from outbox.operator.groups import GroupRow
from outbox.operator.schedules import CronScheduleRow
from outbox.operator.topics import TopicPause

if TYPE_CHECKING:
    from outbox.operator.model import Page, PageRequest
    from outbox.operator.operator import Operator


group_app: typer.Typer = typer.Typer(
    name="group",
    help="Groups that consume topics: how far each is; pause one, slow it down, have it read again or skip a backlog, "
    "delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_GROUPS = RowShape(
    GroupRow,
    {
        "rate": lambda row: row.rate_text,
        "lag": lambda row: "unknown" if row.lag is None else row.lag,
        "oldest_lag": lambda row: age(row.oldest_lag),
        "because": lambda row: first_line(row.because),
    },
    lambda row: f"{row.group}/{row.topic}",
)


@command(group_app, "list")
def list_groups(
    databases: DatabasesOptions,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    form: ListFormOption = ListForm.TABLE,
) -> None:
    """List the groups: which go on, how far each is behind, its failures, consumers and moves.

    \b
    States:
      running     nothing holds it back, unless a rate does
      paused      by an operator
      open        its breaker has stopped it, since everything failed
      half_open   its breaker is open, and one message is tried
      unattended  nothing holds it back, and no living worker consumes for it
    \b
    Example:
      outbox group list --topic transfer
    """
    databases.show(lambda one: (row for row in one.groups(databases.only) if topic in {None, row.topic}), _GROUPS, form)


@command(group_app, "work")
def show_work(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The group.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Its topic.")],
    databases: DatabasesOptions,
    window: Annotated[str, typer.Option(help="1h, or a minute of each step of 6h, 24h or 7d.")] = "1h",
    form: OutputOption = Output.TABLE,
) -> None:
    """Show what the handlers of a group did by the minute: messages, failed attempts, and the times of calls.

    \b
    Example:
      outbox group work bank_b transfer --window 24h
    """
    with databases.opened(partly=True) as operator:
        series = operator.work(topic, group, databases.only, window)
        names = ["minute", *(each.name for each in series)]
        rows = zip(series[0].times, *(each.values for each in series), strict=True)
        known = [dict(zip(names, row, strict=True)) for row in rows if any(value is not None for value in row[1:])]
        seconds = {name: lambda row, name=name: age(row[name]) for name in ("p50", "p95")}
        print_as(form, {"items": series}, rows_table("minute consumed> failed> p50> p95>", known, **seconds))


add_acts(group_app, "group")


topics_app: typer.Typer = typer.Typer(
    name="topics",
    help="Topics as your application declares them: models and versions.\n\n"
    "No database is needed but to pause the dispatch of a topic, and to delete one that is gone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@topics_app.command("list")
def show_topics(app: AppOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the declared topics, with model, version, and the versions that can be read.

    \b
    Example:
      outbox topics list --app shop.messages:outbox
    """
    topics = _declared(app)
    rows = [
        {"topic": name, "model": topic.model_name, "version": topic.version, "reads_since": _reads_since(topic)}
        for name, topic in sorted(topics.items())
    ]
    columns = ("topic", "model", "version>", "reads since>")
    print_as(output, rows, table(columns, [tuple(row.values()) for row in rows]))


# --- a topic as a whole, in its producer's database ------------------------------------------------------------------

_PAUSES = RowShape(
    TopicPause,
    {"because": lambda row: first_line(row.pause_reason)},
    lambda row: row.topic,
)


@command(topics_app, "paused")
def list_pauses(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the topics whose dispatch is paused, and how many messages each holds.

    \b
    Example:
      outbox topics paused
    """
    databases.show(lambda operator: operator.topic_pauses(databases.only), _PAUSES, form)


add_acts(topics_app, "topics")


cron_app: typer.Typer = typer.Typer(
    name="cron",
    help="Schedules: at each time one message, as an application declares by outbox.every.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SCHEDULES = RowShape(CronScheduleRow, {}, lambda row: row.name)


@command(cron_app, "list")
def list_schedules(databases: DatabasesOptions, form: ListFormOption = ListForm.TABLE) -> None:
    """List the schedules, with the last time and the next one of each.

    \b
    Example:
      outbox cron list
    """
    databases.show(lambda operator: operator.cron_schedules(databases.only), _SCHEDULES, form)


add_acts(cron_app, "cron")

filter_app: typer.Typer = typer.Typer(
    name="filter",
    help="Save the filter of a list under a name, which the console shows to its user, and delete one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
add_acts(filter_app, "filter")


# --- what an application declares ------------------------------------------------------------------------------------


def _declared(path: str | None) -> Mapping[str, Topic[Any]]:
    return named_app(path).topics


def _reads_since(topic: Topic[Any]) -> int:
    missing = topic.missing_upcasters()
    return missing[-1] + 1 if missing else 1


sagas_app: typer.Typer = typer.Typer(
    name="sagas",
    help="Sagas: changes over several services, that are done everywhere or undone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True, slots=True)
class _FlowCommands(CommandGroup[FlowRow]):
    """The commands on flows, which are read by `Sagas`."""

    def pages(self, operator: Operator, criteria: Any) -> Callable[[PageRequest], Page[FlowRow]]:
        """Return what fetches a page of a filter."""
        return partial(Sagas(operator.databases).flows, criteria)


add_list(
    sagas_app,
    _FlowCommands(
        "sagas",
        "flows",
        "",
        """List the flows of sagas, the newest first.

    \b
    Examples:
      outbox sagas list --open
      outbox sagas list --saga trip --overdue
    """,
        FlowFilter,
        RowShape(
            FlowRow,
            {"reason": lambda row: first_line(row.reason)},
        ),
        "flows",
        "producer",
    ),
)


@command(sagas_app, "show")
def show_saga(
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the flow: that of the message that started it.")],
    databases: DatabasesOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a flow and the commands that it has sent; each is a message, which outbox messages show tells more of."""
    with databases.opened(partly=True) as operator:
        view = Sagas(operator.databases).flow(as_id(id_, "flow"))
        facts = {name: getattr(view.flow, name) for name in RowShape(FlowRow).names}
        columns = (
            "step command=kind message=message_id sent=sent_at deadline=deadline_at overdue=overdue_at "
            "answered=answered_at answer reason"
        )
        shown = rows_table(columns, view.commands, "Commands", reason=lambda each: first_line(each.reason))
        print_as(output, view, facts_table("Saga", facts), shown)


@contextmanager
def _sagas(databases: DatabasesOptions) -> Iterator[Sagas]:
    with databases.opened() as operator:
        yield Sagas(operator.databases)


add_acts(sagas_app, "sagas", part=_sagas)


# --- bulk jobs -------------------------------------------------------------------------------------------------------

BulkIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the bulk job.")]

_ITEMS = RowShape(
    model.BulkItem,
    {"message": item_word, "since_then": lambda item: fates_text(item.fates)},
    item_word,
)
_BULK = CommandGroup(
    "bulk",
    "bulk jobs",
    "See bulk jobs: one act on many messages, and each compensation.\n\n"
    "Workers carry them out, at the rate that was ordered; each message has an outcome of its own.",
    """List bulk jobs, the newest first.

    \b
    States:
      waiting    no worker has begun with it; is one running?
      running    under way
      done       all of it
      partly     ended; some of it failed or was skipped, see `outbox bulk show`
      cancelled  by an operator; what was done before stays done
    \b
    Example:
      outbox bulk list --state running
    """,
    model.BulkJobFilter,
    RowShape(model.BulkJob),
    "bulk_jobs",
)
bulk_app: typer.Typer = commands_of(_BULK)


@command(bulk_app, "show")
def show_bulk_job(
    id_: BulkIdArgument,
    databases: DatabasesOptions,
    page: PageOptions,
    items: model.BulkItemFilter,
) -> None:
    """Show a bulk job, and what became of each of its messages since: pending is what no worker has tried yet.

    As csv, ndjson or id it is the items alone.

    \b
    Examples:
      outbox bulk show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox bulk show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --state failed --limit 10000 -o csv
    """
    job_id = as_id(id_, "bulk job")
    with databases.opened(partly=True) as operator:
        job, outcome = operator.bulk_job(job_id), operator.bulk_outcome(job_id)
        fetch = partial(operator.bulk_items, job_id, items)
        found = groups.page_of(fetch, page.limit, page.after)
        if page.output is ListForm.JSON:
            output.print_json({"bulk_job": job, "outcome": outcome, "items": found})
            return
        if page.output is ListForm.TABLE:
            known = [f"{count} {status}" for status, count in outcome.counts.items()]
            since = ", ".join(known + [f"unknown in {name}" for name in outcome.unreached])
            output.print_table(output.facts_table("bulk job", dataclasses.asdict(job) | {"since_then": since or None}))
        output.print_rows(found.items, _ITEMS, page.output)
        if found.next_page_token:
            say(f"there may be more: --after {found.next_page_token}")


@command(bulk_app, "watch")
def watch_bulk_job(
    id_: BulkIdArgument,
    databases: DatabasesOptions,
    form: OutputOption = Output.TABLE,
    run: Annotated[
        bool, typer.Option("--run", help="Carry it out from here, too; not a compensation, which needs a worker.")
    ] = False,
) -> None:
    """Wait until a bulk job has ended, and say what came of it; Ctrl-C ends the waiting, not the bulk job.

    The exit code is 0 if all of it was done, 5 if a part, 4 if nothing since nothing could be, 1 if all of it failed.

    \b
    Example:
      outbox bulk watch 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
    """
    job_id = as_id(id_, "bulk job")
    with databases.opened() as operator:
        job = operator.bulk_job(job_id)
        if run and ACTS[job.action].as_job:
            raise Failure(f"bulk job {job_id} is to {job.action}, which only a worker can do; leave out --run")
        groups.see_through(operator, databases, job, form, here=run)


@command(bulk_app, "cancel")
def cancel_bulk_job(id_: BulkIdArgument, databases: DatabasesOptions, acting: ActorOptions) -> None:
    """Cancel what is left of a bulk job; what was done stays done.

    \b
    Example:
      outbox bulk cancel 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "wrong topic"
    """
    job_id, actor = as_id(id_, "bulk job"), cli_actor(acting.actor)
    refusal = f"bulk job {job_id} was not cancelled"
    if not acting.dry_run:
        options.need_terminal(refusal, yes=acting.yes)
    with databases.opened() as operator:
        job = operator.bulk_job(job_id)
        say(f"bulk job {job_id} ({job.action}: {job.described}): {groups.summary(job)}")
        if not acting.dry_run:
            options.confirm(f"Cancel the {job.pending} that are pending?", refusal, yes=acting.yes)
            job = operator.cancel(job_id, by=actor, why=acting.reason.strip())
            say(f"cancelled: {groups.summary(job)}")
    if acting.output is Output.JSON:
        output.print_json(job)


# --- the audit -------------------------------------------------------------------------------------------------------


def _origin(row: model.AuditRow) -> str:
    origin = (row.origin or {}).items()
    return ", ".join(str(value) if name == "via" else f"{name} {value}" for name, value in origin)


_AUDIT = CommandGroup(
    "audit",
    "acts",
    "See what operators did, why, and with what result.",
    """List what operators did, the newest first.

    \b
    Examples:
      outbox audit list --since 1d
      outbox audit list --target 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 -o json
    """,
    model.AuditFilter,
    RowShape(model.AuditRow, {"from": _origin}),
    "audit",
)
audit_app: typer.Typer = commands_of(_AUDIT)


@command(audit_app, "export", choice=_AUDIT.options())
def export_audit(
    choice: Any,
    databases: DatabasesOptions,
    limit: options.UpToOption = None,
    form: ExportFormOption = ExportForm.NDJSON,
) -> None:
    """Export all that operators did, the newest first.

    \b
    Example:
      outbox audit export --since 2026-01-01T00:00:00+00:00 -o csv > audit.csv
    """
    with databases.opened() as operator:
        rows = map(dataclasses.asdict, all_rows(operator, databases, _AUDIT, choice, limit))
        say(f"{output.print_stream(rows, _AUDIT.shape.names, form)} acts")
