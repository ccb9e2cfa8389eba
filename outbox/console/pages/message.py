"""The page of one message with its whole way, and the page (or dialog) that asks before an act on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import APIRouter, Form, Response
from pydantic import BaseModel, StringConstraints

from outbox.console.api.fields import ActName
from outbox.console.context import requires
from outbox.console.pages.view import PageView, View
from outbox.console.permissions import Permission
from outbox.errors import VersionMismatch
from outbox.operator.acts import ACTS
from outbox.operator.health.workers import HandlerRow
from outbox.operator.model import Actor, MessageView, Selector, Target

router = APIRouter(include_in_schema=False)

_Text = Annotated[str, StringConstraints(max_length=4000)]


class ActForm(BaseModel):
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
class ActRequest:
    """An action, and in an inbox for which group of which database."""

    action: str
    group: str | None = None
    database: str | None = None


@router.get("/messages/{message_id}")
def message(view: View, message_id: UUID) -> Response:
    """Show a message."""
    return _message_page(view, message_id)


# Not a link: a reveal is recorded, and nothing that follows links by itself may do it.
@router.post("/messages/{message_id}/reveal", dependencies=[requires(Permission.REVEAL)])
def reveal(view: View, message_id: UUID) -> Response:
    """Show a message with its body unmrequest."""
    return _message_page(view, message_id, reveal=view.context.actor)


@router.get("/messages/{message_id}/do/{action}")
def confirm(
    view: View, message_id: UUID, action: ActName, group: str | None = None, database: str | None = None
) -> Response:
    """Show what an act would do, with the form that does it."""
    view.context.demand(action)
    return _ask(view, view.admin.message(message_id), ActRequest(action, group, database))


@router.post("/messages/{message_id}/do/{action}")
def act(view: View, message_id: UUID, action: ActName, form: Annotated[ActForm, Form()]) -> Response:
    """Do it."""
    view.context.demand(action)
    request = ActRequest(action, form.group or None, form.database or None)
    if action == "compensate":
        return _compensate(view, message_id, request, form)
    view.admin.act(
        action,
        Target(message_id, request.group),
        by=view.context.actor,
        why=form.reason,
        options={"force": True} if form.force else {},
        version=form.version or None,
        database=request.database,
    )
    return view.done(action, "messages", message_id)


def _message_page(view: PageView, message_id: UUID, reveal: Actor | None = None) -> Response:
    found = view.admin.message(message_id, reveal=reveal)
    return view.page("message.html", view=found, acts=possible(found), revealed=reveal is not None)


def possible(message: MessageView) -> list[tuple[str, str | None, str | None]]:
    """Return what can be done now: the action, and for those in an inbox the group and its database."""
    acts: list[tuple[str, str | None, str | None]] = []
    for name, groups in message.actions.items():
        if name not in ACTS:
            continue
        if not groups:
            acts.append((name, None, None))
        for group in groups:
            acts += [(name, group, row.database) for row in message.inbox if row.group == group]
    if against_fence(message):
        acts.append(("commit", None, None))
    return acts


def against_fence(message: MessageView) -> bool:
    """Tell whether the half could be committed against its fence, by an operator who confirms it."""
    return bool(message.check and message.check["fenced"]) and message.op is None and "commit" not in message.actions


def _compensate(view: PageView, message_id: UUID, request: ActRequest, form: ActForm) -> Response:
    shown = view.admin.message(message_id)
    if form.version and form.version != shown.version:
        raise VersionMismatch(f"message {message_id} has changed since you looked at it; look again, then decide again")
    expected = to_type(shown)
    if form.typed.strip() != expected.strip():
        fault = f"Nothing was done: to go on, type {expected!r}."
        return _ask(view, shown, request, fault=fault, reason=form.reason)
    job = view.admin.start(
        "compensate",
        Selector(targets=(Target(message_id),)),
        by=view.context.actor,
        why=form.reason,
        database=shown.database,
        options={"acknowledge_delivered": True} if form.acknowledged else {},
        idempotency_key=form.key or None,
    )
    return view.done(request.action, "bulk-jobs", job.id)


def to_type(shown: MessageView) -> str:
    """Return what has to be typed before a compensation: the message's key, or its topic where it has none."""
    half: dict[str, Any] = shown.half or {}
    return str(half.get("key") or half.get("topic") or shown.id)


def _ask(
    view: PageView, shown: MessageView, request: ActRequest, fault: str | None = None, reason: str = ""
) -> Response:
    compensating = request.action == "compensate"
    return view.page(
        "ask.html",
        422 if fault else 200,
        view=shown,
        asked=request,
        act=ACTS[request.action],
        refused=_refused(shown, request),
        against_fence=request.action == "commit" and against_fence(shown),
        expected=to_type(shown) if compensating else None,
        delivered=[row for row in shown.inbox if row.status == "consumed"],
        compensations=_compensations(view, shown) if compensating else [],
        fault=fault,
        reason=reason,
        key=uuid4().hex,
    )


def _refused(shown: MessageView, request: ActRequest) -> str | None:
    """Return why it can't be done; None if it can."""
    if request.action == "commit" and against_fence(shown):
        return None
    groups = shown.actions.get(request.action)
    if groups is None:
        return shown.refused.get(request.action) or "nothing that is known of this message allows it"
    if request.group is not None and groups and request.group not in groups:
        return f"it can be done for {', '.join(groups)}, but not for group {request.group!r}"
    return None


def _compensations(view: PageView, shown: MessageView) -> list[HandlerRow]:
    topic = (shown.half or {}).get("topic")
    return [row for row in view.admin.handlers() if row.kind == "compensation" and row.topic == topic]
