"""Endpoints of reconciliations: runs, findings, both sides of one, timetables, the runs that are ordered."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from outbox.console.api.lists import EXPORT_TYPES, ExportQuery, export_answers, streamed
from outbox.console.api.requests import Listed, PageQuery, from_query, problems
from outbox.console.context import API, Context
from outbox.operator.look.paging import every_page, listed
from outbox.operator.model import Page, PageRequest
from outbox.reconcile.record.orders import RunOrder
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


@router.get("/orders")
def orders(context: Context, page: PageRequest = from_query(PageQuery)) -> Page[RunOrder]:
    """Return a page of the runs that are ordered, and that no worker has taken yet."""
    rows = context.reconciliations.orders()
    return listed(rows, page, lambda row: (row.schedule, row.topic, row.group), context.operator.databases.away)
