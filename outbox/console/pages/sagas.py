"""The pages of sagas: the flows, and one with its commands."""

from __future__ import annotations

from uuid import UUID

from fastapi import APIRouter, Response

from outbox.console.pages.lists import Listing
from outbox.console.pages.view import View
from outbox.flow.saga import SagaStatus
from outbox.flow.views import FlowFilter

router: APIRouter = APIRouter(prefix="/sagas", include_in_schema=False)


@router.get("")
def flows(view: View) -> Response:
    """Show the flows."""
    found = Listing(view, FlowFilter, view.context.sagas.flows, tabs={"overdue", "open"})
    return view.page("sagas.html", found.status, list=found, statuses=list(SagaStatus))


@router.get("/{flow_id}")
def flow(view: View, flow_id: UUID) -> Response:
    """Show a flow with its commands."""
    return view.page("saga.html", view=view.context.sagas.flow(flow_id))
