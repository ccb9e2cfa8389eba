"""Bulk jobs, and the audit of all that operators did."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

import typer

from outbox.acts.messages import ACTS
from outbox.cli import groups, options, output
from outbox.cli.database import DatabasesOptions
from outbox.cli.exits import Failure
from outbox.cli.groups import CommandGroup, all_rows, commands_of, item_word
from outbox.cli.nouns.messages import fates_text
from outbox.cli.options import (
    ActorOptions,
    PageOptions,
    as_id,
    cli_actor,
    command,
)
from outbox.cli.output import ExportForm, ExportFormOption, ListForm, Output, OutputOption, RowShape, say
from outbox.operator import model

# --- bulk jobs -------------------------------------------------------------------------------------------------------

BulkIdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the bulk job.")]

_ITEMS = RowShape(
    model.BulkItem,
    "number> message state attempts> changed=changed_at outcome since_then",
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
    RowShape(
        model.BulkJob,
        "id act=action state done> of>=total skipped> failed> by=requested_by reason ordered=created_at what=described",
    ),
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
        fetch = partial(operator.bulk_items, job_id, state=items.state)
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
    RowShape(model.AuditRow, "when=acted_at by=actor did=action to=target why=reason result from", {"from": _origin}),
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
