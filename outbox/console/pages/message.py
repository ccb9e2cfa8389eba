"""One message with its whole way."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from fastapi import APIRouter, Request, Response

from outbox.admin.model import Action, Actor, MessageView
from outbox.console.permissions import Permission

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
