"""Endpoints of reconciliations: runs, findings, both sides of one, timetables; to order a run, and a repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from outbox.console.api.acts import ReasonBody, declared
from outbox.console.api.lists import EXPORT_TYPES, ExportQuery, export_answers, streamed
from outbox.console.api.requests import IdempotencyKey, Listed, PageQuery, from_body, from_query, problems
from outbox.console.context import API, Context, requires
from outbox.operator.acts import RECONCILE, REPAIR
from outbox.operator.look.paging import every_page, listed
from outbox.operator.model import LONGEST, MAX_ITEMS, BulkJob, Page, PageRequest
from outbox.reader import option
from outbox.reconcile.record.orders import RepairPreview, RepairSelection, RunOrder
from outbox.reconcile.record.views import (
    FindingFilter,
    FindingRow,
    FindingView,
    Run,
    RunFilter,
    RunView,
    Schedule,
)

router: APIRouter = APIRouter(prefix=f"{API}/reconciliations", responses=problems(), tags=["reconciliations"])
#: Below the path of all exports, which have slots of their own.
exports: APIRouter = APIRouter(prefix=f"{API}/export", responses=problems(), tags=["export"])


@router.get("/runs")
def runs(context: Context, query: Listed[RunFilter] = from_query(RunFilter, PageQuery)) -> Page[Run]:
    """Return the runs that match, the newest first: each compared a topic with a group."""
    return context.reconciliations.runs(*query)


@router.get("/runs/{run_id}", responses=problems(404))
def run(context: Context, run_id: UUID) -> RunView:
    """Return a run with the sums of its measures, and its differences by kind."""
    return context.reconciliations.run(run_id)


@router.get("/runs/{run_id}/findings", responses=problems(404))
def findings(
    context: Context, run_id: UUID, query: Listed[FindingFilter] = from_query(FindingFilter, PageQuery)
) -> Page[FindingRow]:
    """Return the findings of a run that match: the facts of either side about each message, and its repair."""
    return context.reconciliations.findings(run_id, *query)


@router.get("/runs/{run_id}/findings/{message_id}", responses=problems(404))
def finding(context: Context, run_id: UUID, message_id: UUID) -> FindingView:
    """Return what a run found of a message: both sides as they were, what it means, and what can be done."""
    return context.reconciliations.finding(run_id, message_id)


def _add_findings_export(suffix: str) -> None:
    def export(
        context: Context, run_id: UUID, query: Any = from_query(FindingFilter, ExportQuery)
    ) -> StreamingResponse:
        criteria, most = query
        pages = every_page(lambda page: context.reconciliations.findings(run_id, criteria, page), most.limit)
        return streamed(f"findings-{run_id}", suffix, pages, FindingRow)

    exports.add_api_route(
        f"/findings/{{run_id}}.{suffix}",
        export,
        name=f"findings_{suffix}",
        description=f"Return the findings of a run that match, in their order, as {suffix.upper()}.",
        response_class=StreamingResponse,
        responses=export_answers(suffix) | problems(404),
    )


for _suffix in EXPORT_TYPES:
    _add_findings_export(_suffix)


@router.get("/schedules")
def schedules(context: Context, page: PageRequest = from_query(PageQuery)) -> Page[Schedule]:
    """Return a page of the reconciliations that living workers have declared: when they run, what they compare."""
    rows = context.reconciliations.schedules()
    return listed(rows, page, lambda row: (row.name, row.database, row.pairs[:1]), context.operator.databases.away)


# --- orders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunBody(ReasonBody):
    """An order that a worker runs a reconciliation now."""

    schedule: str = option(help="The name of the reconciliation.", most=LONGEST)
    dry_run: bool = option(False, "Compare, and repair nothing.")
    database: str | None = option(None, "The consumer's database, where several have one of this name.", most=LONGEST)
    topic: str | None = option(None, "The topic of its first pair, where there are several of this name.", most=LONGEST)
    group: str | None = option(None, "The group of its first pair, where there are several of this name.", most=LONGEST)


@dataclass(frozen=True, kw_only=True)
class SelectionBody:
    """Which findings of a run are repaired, and how."""

    kind: str | None = option(None, "Only those of this kind.", most=LONGEST)
    messages: tuple[UUID, ...] | None = option(None, "Only those of these messages.")
    repair: str | None = option(None, "The repair, which needs the kind; else that of the run's policy.", most=LONGEST)

    def selection(self, run_id: UUID) -> RepairSelection:
        """Return the selection of a run's findings."""
        return RepairSelection(run_id, self.kind, self.messages, self.repair)


@dataclass(frozen=True, kw_only=True)
class RepairBody(SelectionBody, ReasonBody):
    """An order of a repair."""

    number: int | None = option(None, "How many the preview would repair; if it is another number: 409.", least=0,
                                most=MAX_ITEMS)  # fmt: skip
    rate: float | None = option(None, "The most messages a second.", above=0, most=1e6)


@router.get("/orders")
def orders(context: Context, page: PageRequest = from_query(PageQuery)) -> Page[RunOrder]:
    """Return a page of the runs that are ordered, and that no worker has taken yet."""
    rows = context.reconciliations.orders()
    return listed(rows, page, lambda row: (row.schedule, row.topic, row.group), context.operator.databases.away)


@router.post("/orders", status_code=202, **declared(RECONCILE, 409, 415))
def order_run(context: Context, body: RunBody = from_body(RunBody)) -> RunOrder:
    """Order that a worker runs a reconciliation."""
    return context.reconciliations.run_now(
        body.schedule,
        by=context.actor,
        why=body.reason,
        dry_run=body.dry_run,
        database=body.database,
        topic=body.topic,
        group=body.group,
    )


@router.post("/runs/{run_id}/repair/preview", dependencies=[requires(REPAIR.permission)], responses=problems(404, 415))
def preview_repair(context: Context, run_id: UUID, body: SelectionBody = from_body(SelectionBody)) -> RepairPreview:
    """Return what a repair of a run's findings would do; writes nothing."""
    return context.reconciliations.preview(body.selection(run_id))


@router.post("/runs/{run_id}/repair", status_code=202, **declared(REPAIR, 404, 409, 415))
def repair(
    context: Context, response: Response, run_id: UUID, key: IdempotencyKey, body: RepairBody = from_body(RepairBody)
) -> BulkJob:
    """Order a bulk job that repairs what a run has found."""
    job = context.reconciliations.repair(
        body.selection(run_id),
        by=context.actor,
        why=body.reason,
        number=body.number,
        rate=body.rate,
        idempotency_key=key,
    )
    response.headers["Location"] = context.url("api", "v1", "bulk-jobs", job.id)
    return job
