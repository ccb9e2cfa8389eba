"""One action on one message: a page (or dialog) that says what would happen, and the form that does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID, uuid4

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import BaseModel, StringConstraints

from outbox.console.pages.message import against_fence
from outbox.console.pages.words import ACTS
from outbox.errors import VersionMismatch
from outbox.operator.model import Action, HandlerRow, MessageView, Selector, Target

if TYPE_CHECKING:
    from outbox.console.pages.view import View

_Text = Annotated[str, StringConstraints(max_length=4000)]


class Given(BaseModel):
    """What the form before an action sends; what a checkbox sends is text as well."""

    reason: _Text = ""
    version: _Text = ""
    group: _Text = ""
    database: _Text = ""
    force: _Text = ""
    typed: _Text = ""
    acknowledged: _Text = ""
    key: _Text = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for: an action, and in an inbox for which group of which database."""

    action: Action
    group: str | None = None
    database: str | None = None


def add_routes(router: APIRouter, view: View) -> None:
    """Add the question before each action, and the action."""
    console = view.console

    @router.get("/messages/{message_id}/do/{action}")
    def ask(
        request: Request, message_id: UUID, action: Action, group: str | None = None, database: str | None = None
    ) -> Response:
        console.demand(request, action)
        return _ask(view, request, console.admin.message(message_id), Asked(action, group, database))

    @router.post("/messages/{message_id}/do/{action}")
    def act(request: Request, message_id: UUID, action: Action, given: Annotated[Given, Form()]) -> Response:
        console.demand(request, action)
        actor = console.actor_of(request)
        asked = Asked(action, given.group or None, given.database or None)
        if action is Action.ROLLBACK:
            return _roll_back(view, request, message_id, asked, given)
        console.admin.act(
            action,
            Target(message_id, asked.group),
            actor=actor,
            reason=given.reason,
            options={"force": True} if given.force else {},
            version=given.version or None,
            database=asked.database,
        )
        view.badges.forget()
        return RedirectResponse(console.path(request, "messages", message_id, did=action), 303)


def _roll_back(view: View, request: Request, message_id: UUID, asked: Asked, given: Given) -> Response:
    console = view.console
    shown = console.admin.message(message_id)
    if given.version and given.version != shown.version:
        raise VersionMismatch(f"message {message_id} has changed since you looked at it; look again, then decide again")
    expected = to_type(shown)
    if given.typed.strip() != expected.strip():
        fault = f"Nothing was done: to go on, type {expected!r}."
        return _ask(view, request, shown, asked, fault=fault, reason=given.reason)
    operation = console.admin.start(
        Action.ROLLBACK,
        Selector(targets=(Target(message_id),)),
        actor=console.actor_of(request),
        reason=given.reason,
        database=shown.database,
        options={"acknowledge_delivered": True} if given.acknowledged else {},
        idempotency_key=given.key or None,
    )
    view.badges.forget()
    return RedirectResponse(console.path(request, "operations", operation.id, did=asked.action), 303)


def to_type(shown: MessageView) -> str:
    """Return what has to be typed before a rollback: the message's key, or its topic where it has none."""
    half: dict[str, Any] = shown.half or {}
    return str(half.get("key") or half.get("topic") or shown.id)


def _ask(
    view: View, request: Request, shown: MessageView, asked: Asked, fault: str | None = None, reason: str = ""
) -> Response:
    rollback = asked.action is Action.ROLLBACK
    return view.page(
        request,
        "ask.html",
        422 if fault else 200,
        view=shown,
        asked=asked,
        act=ACTS[asked.action],
        refused=_refused(shown, asked),
        against_fence=asked.action is Action.COMMIT and against_fence(shown),
        expected=to_type(shown) if rollback else None,
        delivered=[row for row in shown.inbox if row.status == "consumed"],
        compensations=_compensations(view, shown) if rollback else [],
        fault=fault,
        reason=reason,
        key=uuid4().hex,
    )


def _refused(shown: MessageView, asked: Asked) -> str | None:
    """Return why it can't be done; None if it can."""
    if asked.action is Action.COMMIT and against_fence(shown):
        return None
    groups = shown.actions.get(asked.action)
    if groups is None:
        return shown.refused.get(asked.action) or "nothing that is known of this message allows it"
    if asked.group is not None and groups and asked.group not in groups:
        return f"it can be done for {', '.join(groups)}, but not for group {asked.group!r}"
    return None


def _compensations(view: View, shown: MessageView) -> list[HandlerRow]:
    topic = (shown.half or {}).get("topic")
    return [row for row in view.console.admin.handlers() if row.kind == "compensation" and row.topic == topic]
