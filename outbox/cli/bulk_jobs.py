"""``outbox bulk``: bulk jobs, what became of each of their messages, watch one, cancel one."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated

import typer

from outbox.cli import bulk
from outbox.cli.arguments import Doing, Listing, Where, as_id, can_ask, gathered, make_sure
from outbox.cli.bulk import actor_of
from outbox.cli.exits import Code, Failure
from outbox.cli.lists import Shape, print_page, print_rows, taken
from outbox.cli.output import Form, Output, OutputOption, print_json, print_table, say, table
from outbox.operator.model import BulkItem, BulkJob

app = typer.Typer(
    help="See bulk jobs: what was ordered for many messages at once, and each compensation.\n\n"
    "Workers carry them out, at the rate that was ordered; each message has an outcome of its own.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BulkJobArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the bulk job.")]

SHAPE = Shape(
    BulkJob,
    ("id", "action", "state", "done>", "of>", "skipped>", "failed>", "by", "reason", "ordered", "what"),
    lambda row: (
        row.id,
        row.action,
        row.state,
        row.done,
        row.total,
        row.skipped,
        row.failed,
        row.requested_by,
        row.reason,
        row.created_at,
        row.described,
    ),
    lambda row: row.id,
)
ITEMS = Shape(
    BulkItem,
    ("number>", "message", "state", "attempts>", "changed", "outcome"),
    lambda row: (row.number, bulk.named_item(row), row.state, row.attempts, row.changed_at, row.outcome),
    bulk.named_item,
)


class State(enum.StrEnum):
    """How a bulk job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    PARTLY = "partly"
    CANCELLED = "cancelled"


class ItemState(enum.StrEnum):
    """How an item stands."""

    PENDING = "pending"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"


@app.command("list")
@gathered
def show_list(
    where: Where,
    listing: Listing,
    state: Annotated[State | None, typer.Option(help="Only bulk jobs that stand so.")] = None,
) -> None:
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
    """
    with where.opened() as admin:
        page = taken(
            lambda page: admin.bulk_jobs(page, state=state and state.value, database=where.only),
            listing.limit,
            listing.after,
        )
        print_page(page, SHAPE, listing, admin, what="bulk jobs")


@app.command()
@gathered
def show(
    id_: BulkJobArgument,
    where: Where,
    listing: Listing,
    state: Annotated[ItemState | None, typer.Option(help="Only items that stand so.")] = None,
) -> None:
    """Show a bulk job, and what became of each of its messages.

    As csv, ndjson or id it is the items alone.

    \b
    Examples:
      outbox bulk show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
      outbox bulk show 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --state failed --limit 10000 -o csv
    """
    bulk_job_id = as_id(id_, "bulk job")
    with where.opened() as admin:
        bulk_job = admin.bulk_job(bulk_job_id)
        page = taken(
            lambda page: admin.bulk_items(bulk_job_id, page, state=state and state.value),
            listing.limit,
            listing.after,
        )
    if listing.output is Form.JSON:
        print_json({"bulk_job": dataclasses.asdict(bulk_job), "items": dataclasses.asdict(page)})
        return
    if listing.output is Form.TABLE:
        facts = [(name.replace("_", " "), value) for name, value in dataclasses.asdict(bulk_job).items()]
        print_table(table(("bulk job", ""), [fact for fact in facts if fact[1] not in (None, {})]))
    print_rows(page.items, ITEMS, listing.output)
    if page.next_page_token:
        say(f"there may be more: --after {page.next_page_token}")


@app.command()
@gathered
def watch(
    id_: BulkJobArgument,
    where: Where,
    output: OutputOption = Output.TABLE,
    run: Annotated[
        bool, typer.Option("--run", help="Carry it out from here, too; not for a compensation, which needs a worker.")
    ] = False,
) -> None:
    """Wait until a bulk job has ended, and tell what came of it; Ctrl-C ends the waiting, not the bulk job.

    The exit code is 0 if all of it was done, 5 if a part, 4 if nothing since nothing could be, 1 if all of it failed.

    \b
    Example:
      outbox bulk watch 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11
    """
    bulk_job_id = as_id(id_, "bulk job")
    with where.opened() as admin:
        bulk_job = admin.bulk_job(bulk_job_id)
        if run and bulk_job.action == "compensate":
            raise Failure(f"bulk job {bulk_job_id} is a compensation, which only a worker can carry out", Code.USAGE)
        bulk.see_through(admin, where, bulk_job, output, here=run)


@app.command()
@gathered
def cancel(id_: BulkJobArgument, where: Where, doing: Doing) -> None:
    """Cancel what is left of a bulk job; what was done stays done.

    \b
    Example:
      outbox bulk cancel 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 --reason "wrong topic"
    """
    bulk_job_id, actor = as_id(id_, "bulk job"), actor_of(doing.actor)
    refusal = f"bulk job {bulk_job_id} was not cancelled"
    if not doing.dry_run:
        can_ask(refusal, yes=doing.yes)
    with where.opened() as admin:
        bulk_job = admin.bulk_job(bulk_job_id)
        say(f"bulk job {bulk_job_id} ({bulk_job.action}: {bulk_job.described}): {bulk.summary(bulk_job)}")
        if not doing.dry_run:
            make_sure(f"Cancel the {bulk_job.pending} that are pending?", refusal, yes=doing.yes)
            bulk_job = admin.cancel(bulk_job_id, actor=actor, reason=doing.reason.strip())
            say(f"cancelled: {bulk.summary(bulk_job)}")
    if doing.output is Output.JSON:
        print_json(dataclasses.asdict(bulk_job))
