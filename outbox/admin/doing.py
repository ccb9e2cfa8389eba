"""Do an act to messages of one database, in the caller's transaction; what is refused is told, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from outbox import dispatch
from outbox.admin.model import Action, Actor, Target
from outbox.admin.states import UNCONSUMED, refusal, states_for
from outbox.check import operator as checking
from outbox.decide import already
from outbox.errors import AlreadyDecided, HalfNotFound, InvalidRequest, RecallRefused
from outbox.model import Resolution
from outbox.settings import Settings
from outbox.store import acts as store
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import execute
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: What can't be taken back, or what nobody would understand later without being told.
NEED_REASON = frozenset(
    {Action.DISCARD, Action.COMMIT, Action.ABORT, Action.ROLLBACK, Action.RECALL, Action.RESET, Action.PARK}
)
#: The options of each act that has any; each is yes or no.
OPTIONS = {Action.COMMIT: ("force",), Action.ROLLBACK: ("acknowledge_delivered",)}

_LONGEST = 4_000
#: What stands in the audit where an act must have a reason and nobody gave one.
_NO_REASON = "no reason given"
_BUSY = "somebody is working on it at this moment"


@dataclass(frozen=True, slots=True)
class Deed:
    """What is done, by whom, why, by which way, with which options."""

    action: Action
    actor: str
    reason: str
    origin: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> store.Recorded:
        """What the audit says of it."""
        return store.Recorded(self.actor, self.action, self.reason, self.origin)


def deed_of(action: Action, actor: Actor, reason: str, options: Mapping[str, Any]) -> Deed:
    """Return what is asked for, checked.

    Raises:
        InvalidRequest: no reason where one is needed, or an option that isn't one.
    """
    if action in NEED_REASON and not reason.strip():
        raise InvalidRequest(f"give a reason: the audit must tell why ({action})", field="reason")
    check_said(actor, reason)
    check_options(action, options)
    return Deed(action, actor.name, reason.strip(), dict(actor.origin), dict(options))


def check_said(actor: Actor, reason: str) -> None:
    """See that the audit can tell who did it, and why.

    Raises:
        InvalidRequest: it can't.
    """
    if not actor.name.strip():
        raise InvalidRequest("the actor has no name: the audit must tell who did it", field="actor")
    for name, text in (("reason", reason), ("actor", actor.name)):
        if storable(text) != text or len(text) > _LONGEST:
            raise InvalidRequest(
                f"the {name} must have at most {_LONGEST} characters, and none that the database can't store",
                field=name,
            )


def check_options(action: Action, options: Mapping[str, Any]) -> None:
    """See that an act has these options.

    Raises:
        InvalidRequest: it hasn't, or one is neither true nor false.
    """
    known = OPTIONS.get(action, ())
    for name, value in options.items():
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise InvalidRequest(f"{action} has no option {name!r}; {there}", field="options")
        if not isinstance(value, bool):
            raise InvalidRequest(f"option {name} = {value!r} must be true or false", field="options")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it for one message, as a clause about the message; ``busy``: nothing yet, somebody else has it."""

    state: Literal["done", "skipped", "busy"]
    text: str


def do(
    connection: Connection, settings: Settings, deed: Deed, targets: Sequence[Target], *, wait: bool
) -> list[Outcome]:
    """Do it to each of these messages, which are different ones; return what came of each, in their order.

    In the caller's transaction, which must be READ COMMITTED. With ``wait``, inbox rows that others hold are waited
    for, else they are ``busy``.

    Raises:
        sqlalchemy.exc.DBAPIError: the transaction has failed; for a lock, with SQLSTATE 55P03.
    """
    if deed.action.part == "consumer":
        return _do_inbox(connection, settings, deed, targets, wait)
    return _do_halves(connection, settings, deed, [target.message_id for target in targets])


def _do_halves(connection: Connection, settings: Settings, deed: Deed, ids: Sequence[UUID]) -> list[Outcome]:
    if deed.action is Action.RESEND:
        # Before the look: until the transaction ends, nobody else sends or prunes them.
        dispatch.newest_sends(connection, settings, ids)
    states = _states(connection, settings, ids)
    wanted = states_for(deed.action, deed.options)
    able = [each for each in ids if states[each] in wanted]
    if deed.action is Action.RESEND:
        done = _resend(connection, settings, deed, able)
    else:
        done = {each: _do_half(connection, settings, deed, each) for each in able}
    return [done.get(each) or Outcome("skipped", refusal(deed.action, states[each])) for each in ids]


def _states(connection: Connection, settings: Settings, ids: Sequence[UUID]) -> dict[UUID, str]:
    _, rows = execute(connection, plan_by_index(), store.half_states(settings.schema, ids))
    return {half_id: state for half_id, state, _ in rows}


def _do_inbox(
    connection: Connection, settings: Settings, deed: Deed, targets: Sequence[Target], wait: bool
) -> list[Outcome]:
    # In one order everywhere: two that lock the same rows don't wait for each other.
    ordered = sorted(targets, key=lambda target: (target.group or "", target.message_id))
    groups, ids = [target.group or "" for target in ordered], [target.message_id for target in ordered]
    _, rows = execute(connection, plan_by_index(), store.lock_inbox(settings.schema, groups, ids, wait=wait))
    states: dict[Target, str | None] = {
        target: state or (None if there else UNCONSUMED)
        for target, (_, state, there) in zip(ordered, rows, strict=True)
    }
    wanted = states_for(deed.action, deed.options)
    able = [(target, state) for target, state in states.items() if state in wanted]
    if able:
        execute(
            connection,
            store.change_inbox(
                settings.schema,
                deed.action,
                [target.group or "" for target, _ in able],
                [target.message_id for target, _ in able],
                [str(state) for _, state in able],
                deed.said,
            ),
        )
    return [_inbox_outcome(deed.action, states[target], wanted) for target in targets]


def _inbox_outcome(action: Action, state: str | None, wanted: frozenset[str]) -> Outcome:
    if state is None:
        return Outcome("busy", _BUSY)
    if state not in wanted:
        return Outcome("skipped", refusal(action, state))
    if action is Action.RETRY:
        kept = "all its attempts" if state == "parked" else "the attempts it has left"
        return Outcome("done", f"is due now, with {kept}")
    return Outcome("done", _CHANGED[action])


_CHANGED = {
    Action.PARK: "is parked",
    Action.DISCARD: "is discarded; it can be restored until it is pruned",
    Action.RESTORE: "is parked again",
}


def _resend(connection: Connection, settings: Settings, deed: Deed, ids: Sequence[UUID]) -> dict[UUID, Outcome]:
    if not ids:
        return {}
    sends = dispatch.newest_sends(connection, settings, ids)
    dispatch.resend(connection, settings, list(sends), actor=deed.actor, reason=deed.reason, origin=deed.origin)
    return {each: Outcome("done", f"is sent again (send {sent + 1})") for each, sent in sends.items()}


def _do_half(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> Outcome:
    try:
        return Outcome("done", _HALF_DEEDS[deed.action](connection, settings, deed, half_id))
    except (AlreadyDecided, HalfNotFound, RecallRefused) as error:
        # Somebody was faster: a statement of its own sees what it has become.
        state = _states(connection, settings, [half_id])[half_id]
        late = state not in states_for(deed.action, deed.options)
        return Outcome("skipped", refusal(deed.action, state) if late else str(error))


def _recall(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    dispatch.recall(connection, settings, half_id, actor=deed.actor, reason=deed.reason, origin=deed.origin)
    return "is recalled: it will not be sent"


def _check(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    checking.request_check(
        connection, settings, half_id, actor=deed.actor, reason=deed.reason or _NO_REASON, origin=deed.origin
    )
    return "will be asked about in the next check pass"


def _reset(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    checking.reset(connection, settings, half_id, actor=deed.actor, reason=deed.reason, origin=deed.origin)
    return "has all its checks again, the first in the next check pass"


def _decide(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    commits = deed.action is Action.COMMIT
    decision = checking.resolve(
        connection,
        settings,
        half_id,
        Resolution.COMMIT if commits else Resolution.ROLLBACK,
        actor=deed.actor,
        reason=deed.reason,
        force=bool(deed.options.get("force")),
        origin=deed.origin,
    )
    if not decision.first:
        raise already(decision)
    return "is committed: it will be sent" if commits else "is rolled back: it will never be sent"


_HALF_DEEDS: dict[Action, Callable[[Connection, Settings, Deed, UUID], str]] = {
    Action.RECALL: _recall,
    Action.CHECK: _check,
    Action.RESET: _reset,
    Action.COMMIT: _decide,
    Action.ABORT: _decide,
}
