"""The page of one message, and the page (or dialog) that asks before an act on it."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from uuid import UUID, uuid4

from fastapi import APIRouter, Response

from outbox.console.context import requires
from outbox.console.pages.lists import FormPairs, options_of, read
from outbox.console.pages.view import PageView, View
from outbox.console.permissions import REVEAL
from outbox.errors import VersionMismatch
from outbox.operator.acts import ACTS, Act, act_named
from outbox.operator.model import Actor, MessageView, Selector, Target
from outbox.reader import option

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class ActForm:
    """What the form before an act sends, beside the options of the act; ``typed`` is the key of the message."""

    reason: str = option("", most=4000)
    version: str | None = option(None)
    group: str | None = option(None)
    database: str | None = option(None)
    typed: str = option("")
    key: str | None = option(None)


@router.get("/messages/{message_id}")
def message(view: View, message_id: UUID) -> Response:
    """Show a message."""
    return _message_page(view, message_id)


# Not a link: a reveal is recorded, and nothing that follows links by itself may do it.
@router.post("/messages/{message_id}/reveal", dependencies=[requires(REVEAL)])
def reveal(view: View, message_id: UUID) -> Response:
    """Show a message with its body unmasked."""
    return _message_page(view, message_id, reveal=view.context.actor)


@router.get("/messages/{message_id}/do/{action}")
def confirm(
    view: View, message_id: UUID, action: str, group: str | None = None, database: str | None = None
) -> Response:
    """Show what an act would do, with the form that does it."""
    act = act_named(action)
    view.context.demand(action)
    return _ask(view, view.operator.message(message_id), act, group, database)


@router.post("/messages/{message_id}/do/{action}")
def do(view: View, message_id: UUID, action: str, pairs: FormPairs) -> Response:
    """Do an act."""
    act, form = act_named(action), read(ActForm, pairs)
    view.context.demand(action)
    if act.as_job:
        return _order(view, message_id, act, form, pairs)
    view.operator.act(
        action,
        Target(message_id, form.group),
        by=view.context.actor,
        why=form.reason,
        options=options_of(act, pairs),
        version=form.version,
        database=form.database,
    )
    return view.done(action, "messages", message_id)


def _order(view: PageView, message_id: UUID, act: Act, form: ActForm, pairs: FormPairs) -> Response:
    found = view.operator.message(message_id)
    if form.version and form.version != found.version:
        raise VersionMismatch(
            f"message {message_id} has changed since you looked at it; read it again, then decide again"
        )
    expected = to_type(found)
    if form.typed != expected.strip():
        fault = f"Nothing was done: to go on, type {expected!r}."
        return _ask(view, found, act, form.group, form.database, fault=fault, reason=form.reason)
    job = view.operator.start(
        act.name,
        Selector(targets=(Target(message_id),)),
        by=view.context.actor,
        why=form.reason,
        database=found.database,
        options=options_of(act, pairs),
        idempotency_key=form.key,
    )
    return view.done(act.name, "bulk-jobs", job.id)


def to_type(message: MessageView) -> str:
    """Return what has to be typed before a bulk job: the message's key, or its topic where it has none."""
    half = message.half or {}
    return str(half.get("key") or half.get("topic") or message.id)


def states_of(message: MessageView) -> AbstractSet[str]:
    """Return the states of a message for which an act may have an option."""
    fenced = {"fenced"} if message.op is None and message.check and message.check["fenced"] else set()
    delivered = {"delivered"} if any(row.status == "consumed" for row in message.inbox) else set()
    return fenced | delivered


def possible(message: MessageView) -> list[tuple[Act, str | None, str | None]]:
    """Return what can be done now: the act, and for those in an inbox the group and its database."""
    found: list[tuple[Act, str | None, str | None]] = []
    states = states_of(message)
    for act in ACTS.values():
        if any(each.adds & states for each in act.options) or message.actions.get(act.name) == []:
            found.append((act, None, None))
        for group in message.actions.get(act.name, []):
            found += [(act, group, row.database) for row in message.inbox if row.group == group]
    return found


def _message_page(view: PageView, message_id: UUID, reveal: Actor | None = None) -> Response:
    found = view.operator.message(message_id, reveal=reveal)
    return view.page("message.html", view=found, acts=possible(found), revealed=reveal is not None)


def _ask(
    view: PageView,
    found: MessageView,
    act: Act,
    group: str | None,
    database: str | None,
    *,
    fault: str | None = None,
    reason: str = "",
) -> Response:
    states = states_of(found)
    topic = (found.half or {}).get("topic")
    return view.page(
        "ask.html",
        422 if fault else 200,
        view=found,
        act=act,
        group=group,
        database=database,
        states=states,
        options=[each for each in act.options if not each.adds or each.adds & states],
        refused=_refused(found, act, group),
        expected=to_type(found) if act.as_job else None,
        delivered=[row for row in found.inbox if row.status == "consumed"],
        handlers=[row for row in view.operator.handlers() if (row.kind, row.topic) == (act.handler, topic)],
        fault=fault,
        reason=reason,
        key=uuid4().hex,
    )


def _refused(message: MessageView, act: Act, group: str | None) -> str | None:
    """Return why an act can't be done; None if it can."""
    if any(each.adds & states_of(message) for each in act.options):
        return None
    groups = message.actions.get(act.name)
    if groups is None:
        return message.refused.get(act.name) or "nothing that is known of this message allows it"
    if group is not None and groups and group not in groups:
        return f"it can be done for {', '.join(groups)}, but not for group {group!r}"
    return None
