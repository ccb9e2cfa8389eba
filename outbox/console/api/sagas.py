"""Endpoints of sagas: flows, and one with its commands."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter

from outbox.console.api.requests import Listed, PageQuery, from_query, problems
from outbox.console.context import API, Context
from outbox.flow.views import FlowFilter, FlowRow, FlowView
from outbox.operator.model import Page

router: APIRouter = APIRouter(prefix=f"{API}/sagas", responses=problems(), tags=["sagas"])


@router.get("")
def flows(context: Context, query: Listed[FlowFilter] = from_query(FlowFilter, PageQuery)) -> Page[FlowRow]:
    """Return the flows of sagas that match, the newest first."""
    return context.sagas.flows(*query)


@router.get("/{flow_id}", responses=problems(404))
def flow(context: Context, flow_id: UUID) -> FlowView:
    """Return a flow, and the commands that it has sent."""
    return context.sagas.flow(flow_id)
