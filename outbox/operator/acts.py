"""Do one thing to one message: in the database that has it, in one transaction with its audit row.

In which states of a message each act can be done, and what to say where it can't.

A state is a word that the database finds (outbox/store/acts.py): a status of a message or of an inbox row, or a finer
one.

Do an act to messages of one database, in the caller's transaction; what is refused is told, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.decision import already
from outbox.database.execute import execute
from outbox.database.failure import LOCK_NOT_AVAILABLE, sqlstate
from outbox.database.sql import plan_by_index
from outbox.dispatch import once
from outbox.errors import (
    ActRefused,
    AlreadyDecided,
    HalfNotFound,
    InvalidRequest,
    MessageNotFound,
    RecallRefused,
    VersionMismatch,
)
from outbox.message.model import Resolution
from outbox.operator import sql, undecided
from outbox.operator.databases import PATIENCE, Database, Databases
from outbox.operator.look import inbox_sql
from outbox.operator.model import Action, Actor, Target
from outbox.operator.sql import half_states, inbox_states
from outbox.settings import Settings
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Beside the statuses of `MessageStatus`: an undecided half with a fence; a message whose local transaction was
#: rolled back, or is about to be; one of which its transaction is to be rolled back although it took effect; none.
FENCED = "fenced"
COMPENSATED = "compensated"
COMPENSATING = "compensating"
DELIVERED = "delivered"
UNKNOWN = "unknown"
#: Beside the statuses of an inbox row: parked and discarded, and no row.
DISCARDED = "discarded"
UNCONSUMED = "unconsumed"

_HALF_ACTS = (Action.CHECK, Action.RESET, Action.COMMIT, Action.ROLLBACK)

_FROM: dict[Action, frozenset[str]] = {
    Action.RESEND: frozenset({"dispatched"}),
    Action.RECALL: frozenset({"scheduled"}),
    Action.COMPENSATE: frozenset({"committed", "dispatched", "scheduled", "recalled"}),
    Action.CHECK: frozenset({"undecided", FENCED}),
    Action.RESET: frozenset({"undecided", FENCED}),
    Action.COMMIT: frozenset({"undecided"}),
    Action.ROLLBACK: frozenset({"undecided", FENCED}),
    Action.RETRY: frozenset({"parked", "failed"}),
    Action.PARK: frozenset({"failed"}),
    Action.DISCARD: frozenset({"parked"}),
    Action.RESTORE: frozenset({DISCARDED}),
}

#: What is said of a message to which an act can't be done: "message … can't be <this>: …".
DONE_TO: Mapping[Action, str] = MappingProxyType(
    {
        Action.RESEND: "sent again",
        Action.RECALL: "recalled",
        Action.COMPENSATE: "compensated",
        Action.CHECK: "checked",
        Action.RESET: "reset",
        Action.COMMIT: "committed",
        Action.ROLLBACK: "rolled back",
        Action.RETRY: "retried",
        Action.PARK: "parked",
        Action.DISCARD: "discarded",
        Action.RESTORE: "restored",
    }
)

_IS = {
    "undecided": "it is not decided yet",
    FENCED: "it is not decided yet",
    "rolled_back": "it was rolled back and never sent",
    "quarantined": "it is quarantined in this group, since its local transaction was or will be compensated",
    "committed": "it is committed and waits for dispatch",
    "scheduled": "it is scheduled for later",
    "dispatched": "it is dispatched",
    "recalled": "it was recalled",
    COMPENSATED: "its local transaction was compensated",
    COMPENSATING: "its local transaction is being compensated",
    DELIVERED: "it took effect: a group has consumed it",
    UNKNOWN: "no half message has this id",
    "consumed": "it is consumed: it took effect in this group",
    "failed": "it failed and will be retried by itself",
    "parked": "it is parked",
    DISCARDED: "it is discarded",
    UNCONSUMED: "this group's inbox has no row of it",
}
#: All states of messages and inbox rows.
STATES = frozenset(_IS)


_NO_DECISION = "nothing is left to decide; compensate it if it must not stand"
_MEND: dict[tuple[Action, str], str] = {
    (Action.RESEND, "undecided"): "have it checked, or decide it",
    (Action.RESEND, FENCED): "have it checked",
    (Action.RESEND, "rolled_back"): "its producer has to send a new message",
    (Action.RESEND, "committed"): "a worker with the role dispatch will send it",
    (Action.RESEND, "scheduled"): "it goes out by itself when it is due",
    (Action.RESEND, "recalled"): "its producer has to send a new message",
    (Action.RESEND, COMPENSATED): "its producer has to send a new message",
    (Action.RESEND, COMPENSATING): "cancel that bulk job first",
    (Action.RECALL, "undecided"): "roll the half back instead",
    (Action.RECALL, FENCED): "roll the half back instead",
    (Action.RECALL, "rolled_back"): "there is nothing to take back",
    (Action.RECALL, "committed"): "it has no delivery time; compensate it instead",
    (Action.RECALL, "dispatched"): "it is out already; compensate it instead",
    (Action.RECALL, "recalled"): "there is nothing left to take back",
    (Action.RECALL, COMPENSATED): "there is nothing left to take back",
    (Action.RECALL, COMPENSATING): "its consumers are quarantined anyway",
    (Action.COMPENSATE, "undecided"): "roll the half back instead",
    (Action.COMPENSATE, FENCED): "roll the half back instead",
    (Action.COMPENSATE, "rolled_back"): "there is nothing to undo",
    (Action.COMPENSATE, COMPENSATED): "a compensation runs once ever",
    (Action.COMPENSATE, COMPENSATING): "wait for that bulk job, or cancel it",
    (Action.COMPENSATE, DELIVERED): "undo that too, and say so with acknowledge_delivered",
    (Action.COMMIT, FENCED): (
        "it is fenced and has no op, so its business change isn't committed, and its consumers would be told of a "
        "change that was never made; roll it back, or use force"
    ),
    (Action.RETRY, "consumed"): "there is nothing to retry",
    (Action.RETRY, DISCARDED): "restore it first",
    (Action.RETRY, "quarantined"): "it must not take effect any more",
    (Action.RETRY, UNCONSUMED): "it comes by itself when the group has come so far; if it was left out, send it again",
    (Action.PARK, "consumed"): "there is nothing to set aside",
    (Action.PARK, "parked"): "retry it, or discard it",
    (Action.PARK, DISCARDED): "it is set aside already",
    (Action.PARK, "quarantined"): "it will not be tried anyway",
    (Action.PARK, UNCONSUMED): "only what has failed can be parked",
    (Action.DISCARD, "consumed"): "there is nothing to discard",
    (Action.DISCARD, "failed"): "park it first",
    (Action.DISCARD, DISCARDED): "restore it if that was wrong",
    (Action.DISCARD, "quarantined"): "it will not be tried anyway",
    (Action.DISCARD, UNCONSUMED): "only what is parked can be discarded",
    (Action.RESTORE, "parked"): "it was not discarded; retry it, or discard it",
    (Action.RESTORE, "failed"): "it was not discarded",
    (Action.RESTORE, "consumed"): "it was not discarded",
    (Action.RESTORE, "quarantined"): "it was not discarded",
    (Action.RESTORE, UNCONSUMED): "only what was discarded can be restored",
}


def states_for(action: Action, options: Mapping[str, Any]) -> frozenset[str]:
    """Return the states of a message in which an act with these options can be done."""
    if action is Action.COMMIT and options.get("force"):
        return _FROM[action] | {FENCED}
    if action is Action.COMPENSATE and options.get("acknowledge_delivered"):
        return _FROM[action] | {DELIVERED}
    return _FROM[action]


def refusal(action: Action, state: str) -> str:
    """Return why an act can't be done to a message in a state, and the mend: a clause without the message's name."""
    what = _IS[state]
    mend = _MEND.get((action, state))
    if mend is None and action in _HALF_ACTS:
        mend = _NO_DECISION if state in {"committed", "scheduled", "dispatched", "recalled"} else "it stays so"
    if state == UNKNOWN:
        mend = "was it prepared in another database, or deleted by prune?"
    return f"{what}; {mend}" if mend else what


#: What can't be taken back, or what nobody would understand later without being told.
NEED_REASON = frozenset(
    {Action.DISCARD, Action.COMMIT, Action.ROLLBACK, Action.COMPENSATE, Action.RECALL, Action.RESET, Action.PARK}
)
#: The options of each act that has any; each is yes or no.
OPTIONS = {Action.COMMIT: ("force",), Action.COMPENSATE: ("acknowledge_delivered",)}

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
    def said(self) -> sql.Recorded:
        """What the audit says of it."""
        return sql.Recorded(self.actor, self.action, self.reason, self.origin)


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
        once.newest_sends(connection, settings, ids)
    states = _states(connection, settings, ids)
    wanted = states_for(deed.action, deed.options)
    able = [each for each in ids if states[each] in wanted]
    if deed.action is Action.RESEND:
        done = _resend(connection, settings, deed, able)
    else:
        done = {each: _do_half(connection, settings, deed, each) for each in able}
    return [done.get(each) or Outcome("skipped", refusal(deed.action, states[each])) for each in ids]


def _states(connection: Connection, settings: Settings, ids: Sequence[UUID]) -> dict[UUID, str]:
    _, rows = execute(connection, plan_by_index(), sql.half_states(settings.schema, ids))
    return {half_id: state for half_id, state, _ in rows}


def _do_inbox(
    connection: Connection, settings: Settings, deed: Deed, targets: Sequence[Target], wait: bool
) -> list[Outcome]:
    # In one order everywhere: two that lock the same rows don't wait for each other.
    ordered = sorted(targets, key=lambda target: (target.group or "", target.message_id))
    groups, ids = [target.group or "" for target in ordered], [target.message_id for target in ordered]
    _, rows = execute(connection, plan_by_index(), sql.lock_inbox(settings.schema, groups, ids, wait=wait))
    states: dict[Target, str | None] = {
        target: state or (None if there else UNCONSUMED)
        for target, (_, state, there) in zip(ordered, rows, strict=True)
    }
    wanted = states_for(deed.action, deed.options)
    able = [(target, state) for target, state in states.items() if state in wanted]
    if able:
        execute(
            connection,
            sql.change_inbox(
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
    sends = once.newest_sends(connection, settings, ids)
    once.resend(connection, settings, list(sends), actor=deed.actor, reason=deed.reason, origin=deed.origin)
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
    once.recall(connection, settings, half_id, actor=deed.actor, reason=deed.reason, origin=deed.origin)
    return "is recalled: it will not be sent"


def _check(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    undecided.request_check(
        connection, settings, half_id, actor=deed.actor, reason=deed.reason or _NO_REASON, origin=deed.origin
    )
    return "will be asked about in the next check pass"


def _reset(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    undecided.reset(connection, settings, half_id, actor=deed.actor, reason=deed.reason, origin=deed.origin)
    return "has all its checks again, the first in the next check pass"


def _decide(connection: Connection, settings: Settings, deed: Deed, half_id: UUID) -> str:
    commits = deed.action is Action.COMMIT
    decision = undecided.resolve(
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
    Action.ROLLBACK: _decide,
}


def act(
    databases: Databases,
    action: Action,
    target: Target,
    *,
    actor: Actor,
    reason: str,
    options: Mapping[str, Any],
    version: str | None,
    database: str | None,
) -> str:
    """Do one thing to one message, and say in a sentence what came of it; see `outbox.operator.service.Admin.act`.

    ``version`` is looked at before: what changes after that is caught by the state in which the act can be done.

    Raises:
        MessageNotFound: nobody knows the message.
        ActRefused: it isn't in a state in which this can be done; says which, and the mend.
        VersionMismatch: it has changed meanwhile.
        InvalidRequest: no reason where one is needed, a group that is missing, an option that isn't known, or several
            databases have the message.
    """
    deed = deed_of(action, actor, reason, options)
    if action is Action.COMPENSATE:
        raise InvalidRequest("a compensation is ordered as a bulk job, also of one message", field="action")
    found = find(databases, action, target, database)
    if version is not None:
        _check_version(databases, target, version)
    try:
        with found.acting() as connection:
            (outcome,) = do(connection, found.settings, deed, [target], wait=True)
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        why = f"somebody has been working on it for {PATIENCE:g} s; look again in a while"
        raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {why}") from error
    if outcome.state != "done":
        raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {outcome.text}")
    return f"{named(target)} {outcome.text}"


def named(target: Target) -> str:
    """Return what a message is called in a sentence."""
    return f"message {target.message_id}" + (f" of group {target.group}" if target.group else "")


def find(databases: Databases, action: Action, target: Target, name: str | None) -> Database:
    """Return the database in which an act on a message is done; ``name`` limits the search to one.

    Raises:
        MessageNotFound: nobody knows the message.
        ActRefused: the message is known, but not where this act is done.
        InvalidRequest: a group that is missing or too many, or several databases have the message.
        UnknownDatabase: no database has this name.
    """
    check_group(action, target)
    asked = databases.having(action.part, name)
    having = [database for database in asked if _has(database, action, target)]
    if len(having) == 1:
        return having[0]
    if having:
        names = ", ".join(database.name for database in having)
        raise InvalidRequest(f"{named(target)} is in several databases; name one of: {names}", field="database")
    if not any(_knows(database, target) for database in databases.values()):
        raise MessageNotFound(
            f"no registered database ({', '.join(databases)}) knows message {target.message_id}; "
            "is it in another one, or was it pruned?"
        )
    state = UNCONSUMED if action.part == "consumer" else UNKNOWN
    raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {refusal(action, state)}")


def check_group(action: Action, target: Target) -> None:
    """See that a target has a group where the act needs one, and none elsewhere.

    Raises:
        InvalidRequest: it hasn't, or has.
    """
    if action.part == "consumer" and not target.group:
        raise InvalidRequest(f"name the group in whose inbox message {target.message_id} is", field="group")
    if action.part == "producer" and target.group:
        raise InvalidRequest(f"{action} is done on the producer's side, which knows no groups", field="group")


def _has(database: Database, action: Action, target: Target) -> bool:
    with database.looking() as connection:
        if action.part == "consumer":
            (rows,) = execute(connection, inbox_states(database.schema, [target.group or ""], [target.message_id]))
            return bool(rows)
        (((_, state, _),),) = execute(connection, half_states(database.schema, [target.message_id]))
        return bool(state != UNKNOWN)


def _knows(database: Database, target: Target) -> bool:
    """Does any table of a database know the message?"""
    rows: Sequence[Any] = ()
    with database.looking() as connection:
        if "producer" in database.parts:
            (((_, state, _),),) = execute(connection, half_states(database.schema, [target.message_id]))
            if state != UNKNOWN:
                return True
        if "consumer" in database.parts:
            wanted = inbox_sql.rows_of(database.schema, inbox_sql.Wanted(), target.message_id, None, 1)
            _, rows = execute(connection, plan_by_index(), wanted)
    return any(row[2] is not None for row in rows)


def _check_version(databases: Databases, target: Target, version: str) -> None:
    from outbox.operator.look.message import version_of  # noqa: PLC0415

    if version_of(databases, target.message_id) != version:
        raise VersionMismatch(
            f"message {target.message_id} has changed since you looked at it; look again, then decide again"
        )
