"""Endpoints of reconciliations: runs, their findings, both sides of one finding, and the timetables."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter

from outbox.console.api.requests import Listed, PageQuery, from_query, problems
from outbox.console.context import API, Context
from outbox.operator.model import Page
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
    """Return the findings of a run that match: what either side said of each message, and what was done about it."""
    return context.reconciliations.findings(run_id, *query)


@router.get("/runs/{run_id}/findings/{message_id}", responses=problems(404))
def finding(context: Context, run_id: UUID, message_id: UUID) -> FindingView:
    """Return what a run found of a message: both sides as they were, what it means, and what can be done."""
    return context.reconciliations.finding(run_id, message_id)


@router.get("/schedules")
def schedules(context: Context) -> list[Schedule]:
    """Return the reconciliations that living workers have declared: when they run, what they compare, the last runs."""
    return context.reconciliations.schedules()
