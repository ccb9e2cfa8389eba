"""Operations: what was ordered for many messages at once, how far it is, and what became of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from outbox.admin.model import OperationRow, Page, PageRequest
from outbox.console.pages.fields import Fields
from outbox.console.pages.listing import listing
from outbox.console.permissions import Permission

if TYPE_CHECKING:
    from outbox.console.pages.view import View

STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")


def add_routes(router: APIRouter, view: View) -> None:
    """Add the list of operations, one operation, and the way to cancel it."""
    console = view.console

    @router.get("/operations")
    def operations(request: Request) -> Response:
        def fetch(asked: Fields, page: PageRequest) -> Page[OperationRow]:
            return console.admin.operations(page, state=asked.text("state"), database=asked.text("database"))

        found = listing(console, request, "operations", {"state": "state", "database": "database"}, fetch)
        return view.page(request, "operations.html", found.status, list=found, states=STATES)

    @router.get("/operations/{operation_id}")
    def operation(request: Request, operation_id: UUID) -> Response:
        shown = console.admin.operation(operation_id)
        items = listing(
            console, request, "items", {"state": "state"},
            lambda asked, page: console.admin.operation_items(operation_id, page, state=asked.text("state")),
        )  # fmt: skip
        may_cancel = shown.finished_at is None and console.may(request, Permission.CANCEL)
        return view.page(
            request, "operation.html", operation=shown, list=items, states=ITEM_STATES, may_cancel=may_cancel
        )

    @router.get("/operations/{operation_id}/cancel", dependencies=[console.requires(Permission.CANCEL)])
    def ask(request: Request, operation_id: UUID) -> Response:
        return view.page(request, "cancel.html", operation=console.admin.operation(operation_id))

    @router.post("/operations/{operation_id}/cancel", dependencies=[console.requires(Permission.CANCEL)])
    def cancel(request: Request, operation_id: UUID, reason: Annotated[str, Form(max_length=1000)] = "") -> Response:
        console.admin.cancel(operation_id, actor=console.actor_of(request), reason=reason)
        view.badges.forget()
        return RedirectResponse(console.path(request, "operations", operation_id, did="cancel"), 303)
