"""One message with its whole way.

Operations: what was ordered for many messages at once, how far it is, and what became of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse

from outbox.console.pages.fields import Fields
from outbox.console.pages.listing import listing
from outbox.console.permissions import Permission
from outbox.operator.model import Action, Actor, MessageView, OperationRow, Page, PageRequest

if TYPE_CHECKING:
    from outbox.console.pages.view import View


def add_routes(router: APIRouter, view: View) -> None:
    """Add the page of a message, and the one with its body unmasked."""
    console = view.console

    @router.get("/messages/{message_id}")
    def message(request: Request, message_id: UUID) -> Response:
        return _page(view, request, message_id)

    # Not a link: to see it is recorded, and nothing that follows links by itself may do it.
    @router.post("/messages/{message_id}/reveal", dependencies=[console.requires(Permission.REVEAL)])
    def reveal(request: Request, message_id: UUID) -> Response:
        return _page(view, request, message_id, reveal=console.actor_of(request))


def _page(view: View, request: Request, message_id: UUID, reveal: Actor | None = None) -> Response:
    shown = view.console.admin.message(message_id, reveal=reveal)
    return view.page(request, "message.html", view=shown, acts=possible(shown), revealed=reveal is not None)


def possible(shown: MessageView) -> list[tuple[Action, str | None, str | None]]:
    """Return what can be done now: the action, and for those in an inbox the group and its database."""
    acts: list[tuple[Action, str | None, str | None]] = []
    for name, groups in shown.actions.items():
        if name not in set(Action):
            continue
        if not groups:
            acts.append((Action(name), None, None))
        for group in groups:
            acts += [(Action(name), group, row.database) for row in shown.inbox if row.group == group]
    if against_fence(shown):
        acts.append((Action.COMMIT, None, None))
    return acts


def against_fence(shown: MessageView) -> bool:
    """Tell whether the half could be committed against its fence, by who says so knowingly."""
    return bool(shown.check and shown.check["fenced"]) and shown.op is None and Action.COMMIT not in shown.actions


STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")


def add_operation_routes(router: APIRouter, view: View) -> None:
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
