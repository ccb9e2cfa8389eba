"""What an act is, and what each changes in the caller's transaction: lock, look, act, record.

`apply` has a contract that operators, bulk jobs and the reconciliation's repairs share:

1. **Lock** the act's subject: for a message the right to send (dispatch, release and compensation take the same lock)
   and its op (prune takes it), for an undecided half its check (every decision locks it first), for an inbox its row
   (a retry holds it while the handler runs).
2. **Look** in which state each message is, in a statement of its own after the lock: it sees what a rival did while the
   lock was waited for.
3. **Act** on those in a state in which the act can be done. The others are reported, and nothing of theirs changes.
4. **Record** each change as one row of ``audit``, in the same transaction.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.check import sql as check_sql
from outbox.consumer.sql import RETRY
from outbox.database.decision import decide
from outbox.database.execute import LOCK_NOT_AVAILABLE, Statement, Template, execute, sqlstate, statement
from outbox.database.sql import audit, message_status, plan_by_index, take_lock
from outbox.dispatch import dispatch_pass as dispatch
from outbox.dispatch import sql as dispatch_sql
from outbox.errors import InvalidRequest, OutboxError
from outbox.message.model import Resolution
from outbox.settings import Settings
from outbox.text import process_name, storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The longest text that is searched for; no stored text that it could equal is longer.
LONGEST = 1_000
#: The most messages of one bulk job.
MAX_ITEMS = 100_000
_LONGEST = 4_000
BUSY = "another transaction is working on it at this moment"


@dataclass(frozen=True, slots=True)
class Actor:
    """Name the actor of an act, and its interface: ``origin`` has ``via`` (console, cli), ``ip``, ``request_id``."""

    name: str
    origin: Mapping[str, str] = field(default_factory=dict)


def as_actor(by: str | Actor) -> Actor:
    """Return the actor; a name alone is that of a Python program's caller."""
    return by if isinstance(by, Actor) else Actor(by)


@dataclass(frozen=True, slots=True)
class Target:
    """One message to act on; ``group`` for acts on an inbox. Its text is its name in a sentence."""

    message_id: UUID
    group: str | None = None

    def __str__(self) -> str:
        return f"message {self.message_id}" + (f" of group {self.group}" if self.group else "")

    @property
    def audited(self) -> str:
        """Return its name in the audit."""
        return f"{self.group}/{self.message_id}" if self.group else str(self.message_id)


class MessageStatus(enum.StrEnum):
    """How far a message has come on the producer's side."""

    UNDECIDED = "undecided"
    ROLLED_BACK = "rolled_back"
    COMMITTED = "committed"
    DISPATCHED = "dispatched"
    SCHEDULED = "scheduled"
    RECALLED = "recalled"

    @property
    def committed(self) -> bool:
        """Was its local transaction committed?"""
        return self not in {MessageStatus.UNDECIDED, MessageStatus.ROLLED_BACK}

    @property
    def to_come(self) -> bool:
        """Is it yet to come into its queue, by itself?"""
        return self in {MessageStatus.COMMITTED, MessageStatus.SCHEDULED}


#: The things that acts apply to: a producer's message, an undecided half message, a message in the inbox of a group.
Noun = Literal["message", "half", "inbox"]

#: Each state of a message, as the clause that a refusal gives. Those beside the statuses: an undecided half with a
#: fence, a compensated or recalled message, one that took effect (which isn't undone without a word), none of this
#: id; in an inbox: parked and discarded, and no row.
STATES: Mapping[str, str] = {
    "undecided": "it is not decided yet",
    "fenced": "it is not decided yet",
    "rolled_back": "it was rolled back and never sent",
    "committed": "it is committed and waits for dispatch",
    "scheduled": "it is scheduled for later",
    "dispatched": "it is dispatched",
    "recalled": "it was recalled",
    "compensated": "its local transaction was compensated",
    "compensating": "its local transaction is being compensated",
    "replaced": "a copy with another body was sent instead of it",
    "delivered": "it took effect: a group has consumed it",
    "unknown": "no half message has this id",
    "consumed": "it is consumed: it took effect in this group",
    "failed": "it failed and will be retried by itself",
    "waiting": "it waits for an earlier message of its key, which is to be settled first",
    "taken": "a client has taken it, and has yet to settle it",
    "parked": "it is parked",
    "quarantined": "it is quarantined in this group: its local transaction was or will be compensated, or a copy was "
    "sent instead of it",
    "expired": "it had expired when this group came to it",
    "discarded": "it is discarded",
    "unconsumed": "this group's inbox has no row of it",
}

#: What touches more messages than this has their number typed before, as what can't be taken back.
FAR = 1_000
#: What can't be taken back, and reaches no more messages than this, needs no name typed.
FEW = 100
_UNKNOWN_MEND = "was it prepared in another database, or deleted by prune?"


@dataclass(frozen=True, slots=True)
class ActOption:
    """An option of an act, which is set or not. If it is, the act can also be done in ``adds`` states."""

    name: str
    help: str
    adds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Declare the texts and demands of an act. Its name is the word of the command, the endpoint and the audit.

    ``summary`` is a command in the imperative, ``details`` more about it, ``why`` an example of a reason.
    ``consequence`` stands beside the question, ``happened`` is shown afterwards. ``button`` stands on the button, where
    that isn't the name. ``grave`` is what can't be taken back, or loses something; ``undone_by`` is the act that takes
    it back. ``permission`` is what a user of the console needs, ``role`` the smallest role that has it.
    """

    name: str
    summary: str
    details: str
    why: str
    consequence: str
    happened: str
    permission: str
    role: Literal["operator", "admin"] = "operator"
    button: str = ""
    needs_reason: bool = True
    grave: bool = False
    undone_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act(Declaration):
    """One act on messages.

    ``change`` does it, in a transaction (`apply`). ``from_states`` are those in which it can be
    done, ``mends`` the act to do instead in each other state.

    ``participle`` completes "message … can't be …"; ``verb`` begins "… 12 messages", where that isn't the name. With
    ``as_job`` the act is a bulk job even for one message: ``change`` is None, and a duty of its own carries it out.
    ``handler`` is the kind of handler that a worker must have for the message's topic.
    """

    noun: Noun
    from_states: frozenset[str]
    change: Change | None
    participle: str
    verb: str = ""
    as_job: bool = False
    handler: str = ""
    options: tuple[ActOption, ...] = ()
    mends: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What stands on the button."""
        return self.button or (self.verb or self.name).capitalize()

    @property
    def part(self) -> Literal["producer", "consumer"]:
        """The side whose database the act is done in."""
        return "consumer" if self.noun == "inbox" else "producer"

    def number_to_type(self, count: int) -> str:
        """Return what an operator types before the act on so many messages; empty where a yes will do."""
        return str(count) if count > FAR or (self.grave and not self.undone_by) else ""

    def states(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the states of a message in which the act can be done with these options."""
        added = (option.adds for option in self.options if options.get(option.name))
        return self.from_states.union(*added)

    def refusal(self, state: str) -> str:
        """Return why the act can't be done to a message in a state, and the mend: a clause without its name."""
        mend = _UNKNOWN_MEND if state == "unknown" else self.mends.get(state)
        return f"{STATES[state]}; {mend}" if mend else STATES[state]

    def refused(self, target: Target, why: str) -> str:
        """Return the sentence that refuses the act on a message."""
        return f"{target} can't be {self.participle}: {why}"

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidRequest if the act hasn't these options, or a value has the wrong type."""
        known = [option.name for option in self.options]
        for name, value in options.items():
            if name not in known:
                there = f"it has {', '.join(known)}" if known else "it has none"
                raise InvalidRequest(f"{self.name} has no option {name!r}; {there}", field="options")
            if not isinstance(value, bool):
                raise InvalidRequest(f"option {name} = {value!r} must be true or false", field="options")

    def check_group(self, target: Target) -> None:
        """Raise InvalidRequest if a target has no group where the act needs one, or one elsewhere."""
        if self.part == "consumer" and not target.group:
            raise InvalidRequest(f"name the group in whose inbox message {target.message_id} is", field="group")
        if self.part == "producer" and target.group:
            raise InvalidRequest(f"{self.name} is done on the producer's side, which knows no groups", field="group")


@dataclass(frozen=True, slots=True)
class ActRequest:
    """An act with its actor, reason and options; ``origin`` names the interface by which it came."""

    act: Act
    by: str
    why: str
    origin: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def record(self, schema: str, target: Target, result: object = None) -> Statement:
        """Return the statement that writes the audit row of a change."""
        return audit(schema, self.by, self.act.name, target.audited, self.why, result, self.origin)


def requested(act: Act, by: Actor, why: str, options: Mapping[str, Any]) -> ActRequest:
    """Return an act as it is asked for; raise InvalidRequest if a reason, an option or the actor's name isn't one."""
    checked_actor(act, by, why)
    act.check_options(options)
    return ActRequest(act, by.name, why.strip(), dict(by.origin), dict(options))


def checked_actor(act: Declaration, by: str | Actor, why: str) -> Actor:
    """Return the actor of an act; raise InvalidRequest if it lacks a needed reason, or the audit can't record it."""
    actor = as_actor(by)
    if act.needs_reason and not why.strip():
        raise InvalidRequest(f"give a reason: the audit must tell why ({act.name})", field="reason")
    check_audited(actor, why)
    return actor


def record_of(schema: str, action: str, actor: Actor, why: str, target: object, result: object = None) -> Statement:
    """Return the statement that writes the audit row of an act."""
    return audit(schema, actor.name, action, str(target), why.strip(), result, actor.origin)


@contextmanager
def unless_locked(refusal: Callable[[], OutboxError]) -> Iterator[None]:
    """Raise a refusal where a lock can't be had in time."""
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise
        raise refusal() from error


def check_audited(by: Actor, why: str) -> None:
    """Raise InvalidRequest if the audit can't record an actor and a reason."""
    if not by.name.strip():
        raise InvalidRequest("the actor has no name, which the audit needs: give one", field="actor")
    for name, text in (("reason", why), ("actor", by.name)):
        if storable(text) != text or len(text) > _LONGEST:
            raise InvalidRequest(
                f"the {name} must have at most {_LONGEST} characters, and none that the database can't store",
                field=name,
            )


@dataclass(frozen=True, slots=True)
class ActOutcome:
    """What came of an act for one message: ``text`` is a clause about it, ``was`` the state in which it was found.

    ``busy``: nothing was done, another transaction holds its lock; ``was`` is None then.
    """

    state: Literal["done", "skipped", "busy"]
    text: str
    was: str | None


@dataclass(frozen=True, slots=True)
class LockedMessage:
    """A message as it is after its lock: its state (None: another transaction has the lock), and its newest send."""

    state: str | None
    sends: int = 0


@dataclass(frozen=True, slots=True)
class ActRun:
    """A request, and the messages to which it is done: they are locked, and in a state for it."""

    connection: Connection
    settings: Settings
    request: ActRequest
    able: Mapping[Target, LockedMessage]

    def record(self, target: Target, *change: Statement, result: object = None) -> None:
        """Run what changes a message, and write the audit row of that."""
        execute(self.connection, *change, self.request.record(self.settings.schema, target, result))


#: Does an act; returns a clause about each message that it has changed.
Change = Callable[[ActRun], Mapping[Target, str]]


def apply(
    connection: Connection, settings: Settings, request: ActRequest, targets: Sequence[Target], *, wait: bool = True
) -> list[ActOutcome]:
    """Do an act to these messages, which are different ones; return what came of each, in their order.

    Runs in the caller's transaction, which must be READ COMMITTED. Without ``wait``, inbox rows whose lock another
    transaction holds are ``busy``; everything else is waited for, up to the transaction's lock_timeout.

    Raises:
        sqlalchemy.exc.DBAPIError: the transaction has failed; for a lock, with SQLSTATE 55P03.
    """
    act = request.act
    locked = lock(connection, settings, act, targets, wait=wait)
    states = act.states(request.options)
    able = {target: found for target, found in locked.items() if found.state in states}
    done = act.change(ActRun(connection, settings, request, able)) if act.change and able else {}
    if late := [target for target in able if target not in done]:
        # A rival that doesn't take the lock was faster: a statement of its own sees what it has made of them.
        locked |= lock(connection, settings, act, late, wait=wait)
    outcomes = []
    for target in targets:
        if (state := locked[target].state) is None:
            outcomes.append(ActOutcome("busy", BUSY, None))
        elif target in done:
            outcomes.append(ActOutcome("done", done[target], state))
        else:
            outcomes.append(ActOutcome("skipped", act.refusal(state), state))
    return outcomes


# --- lock and look ---------------------------------------------------------------------------------------

#: The state of a half message ``h`` with its op ``o``, schedule ``d`` and check ``c``.
MESSAGE_STATE = (
    "CASE WHEN h.id IS NULL THEN 'unknown' WHEN o.half_id IS NULL AND c.fenced THEN 'fenced' ELSE {} END".format(
        message_status(
            of_committed="""
            WHEN EXISTS (SELECT FROM {s}.compensation x WHERE x.half_id = h.id) THEN 'compensated'
            WHEN EXISTS (SELECT FROM {s}.bulk_item i
                          WHERE i.message_id = h.id AND i.action = 'compensate' AND i.state = 'pending')
                 THEN 'compensating'
            WHEN EXISTS (SELECT FROM {s}.audit a
                          WHERE a.target = h.id::text AND a.action = 'edit' AND a.result ->> 'original' <> 'leave')
                 THEN 'replaced'""",
            of_undispatched="""
            WHEN h.deliver_at IS NOT NULL THEN 'scheduled'""",
        )
    )
)

MESSAGE_JOINS = """
  LEFT JOIN {s}.op_message o ON o.half_id = h.id
  LEFT JOIN {s}.scheduled_message d ON d.half_id = h.id
  LEFT JOIN {s}.half_check c ON c.half_id = h.id"""

#: The state of an inbox row ``m``.
INBOX_STATE = "CASE WHEN m.discarded_at IS NULL THEN m.status ELSE 'discarded' END"

#: In which state messages of these ids are. Rows: ``(id, state, newest send number or 0)``, one for each id.
message_states: Template = Template(f"""
SELECT w.id, {MESSAGE_STATE}, coalesce((SELECT max(send_number) FROM {{s}}.message m WHERE m.half_id = w.id), 0)
  FROM unnest(%s::uuid[]) w (id)
  LEFT JOIN {{s}}.half_message h ON h.id = w.id{MESSAGE_JOINS}
""")

# Ordered, as every lock of several rows: two transactions that lock the same ones don't deadlock.
_LOCK_ROWS = "SELECT FROM {s}.{table} WHERE half_id = ANY (%(ids)s::uuid[]) ORDER BY half_id FOR UPDATE"

#: In which state inbox rows (`inbox_columns`) are. Rows: ``(group, id, state)`` of those that there are.
inbox_states: Template = Template(f"""
SELECT w.consumer_group, w.id, {INBOX_STATE}
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) w (consumer_group, id)
  CROSS JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                       WHERE consumer_group = w.consumer_group AND message_id = w.id OFFSET 0) m
""")

# Without waiting, a row that another transaction has is still seen to be there.
_LOCK_INBOX = f"""
SELECT w.number::int, l.state,
       EXISTS (SELECT FROM {{s}}.consumer_message e WHERE e.consumer_group = w.consumer_group AND e.message_id = w.id)
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) WITH ORDINALITY w (consumer_group, id, number)
  LEFT JOIN LATERAL (SELECT {INBOX_STATE} AS state FROM {{s}}.consumer_message m
                      WHERE m.consumer_group = w.consumer_group AND m.message_id = w.id
                        FOR UPDATE {{skip}}) l ON true
 ORDER BY w.number
"""


def lock(
    connection: Connection, settings: Settings, act: Act, targets: Sequence[Target], *, wait: bool
) -> dict[Target, LockedMessage]:
    """Lock the rows that an act on these messages changes, and read their states after that."""
    schema, ids = settings.schema, [target.message_id for target in targets]
    if act.noun == "inbox":
        ordered = sorted(targets, key=lambda target: (target.group or "", target.message_id))
        locking = statement(schema, _LOCK_INBOX, inbox_columns(ordered), skip="" if wait else "SKIP LOCKED")
        _, rows = execute(connection, plan_by_index(), locking)
        states = ((state or (None if there else "unconsumed")) for _, state, there in rows)
        return {target: LockedMessage(state) for target, state in zip(ordered, states, strict=True)}
    of_message = act.noun == "message"
    table = "op_message" if of_message else "half_check"
    locks = [take_lock(dispatch.dispatch_lock(schema))] if of_message else []
    locks.append(statement(schema, _LOCK_ROWS, {"ids": ids}, table=table))
    *_, rows = execute(connection, plan_by_index(), *locks, message_states(schema, ids))
    found = {half_id: LockedMessage(state, sends) for half_id, state, sends in rows}
    return {target: found[target.message_id] for target in targets}


def inbox_columns(targets: Collection[Target]) -> dict[str, object]:
    """Return the values ``groups`` and ``ids`` that name inbox rows in a statement."""
    return {"groups": [target.group or "" for target in targets], "ids": [target.message_id for target in targets]}


# --- messages --------------------------------------------------------------------------------------------


def resend(run: ActRun) -> dict[Target, str]:
    """Append messages once more, each with the next send number."""
    sends, request = {target.message_id: found.sends for target, found in run.able.items()}, run.request
    dispatch.resend(run.connection, run.settings, sends, actor=request.by, reason=request.why, origin=request.origin)
    return {target: f"is sent again (send {found.sends + 1})" for target, found in run.able.items()}


def recall(run: ActRun) -> dict[Target, str]:
    """Take scheduled messages back."""
    for target in run.able:
        run.record(target, dispatch_sql.recall(run.settings.schema, half_id=target.message_id, actor=run.request.by))
    return dict.fromkeys(run.able, "is recalled: it will not be sent")


# --- undecided halves ------------------------------------------------------------------------------------


def check(run: ActRun) -> dict[Target, str]:
    """Try the fences of halves that have one; have the next check pass ask about the others."""
    done = {}
    for target, found in run.able.items():
        if found.state != "fenced":
            once_more = check_sql.once_more(run.settings.schema, target.message_id)
            run.record(target, once_more, result={"asked": "next pass"})
            done[target] = "will be asked about in the next check pass"
        elif try_fence(run.connection, run.settings, run.request, target):
            done[target] = f"was asked about, without a verdict: {check_sql.RUNNING}"
        else:
            done[target] = "was rolled back by the check of its fence"
    return done


def try_fence(connection: Connection, settings: Settings, request: ActRequest, target: Target) -> bool:
    """Try the fence of an undecided half, which is locked: roll the half back, or tell that its function still runs."""
    (((running, _),),) = execute(
        connection, check_sql.try_fences(settings.schema, [target.message_id], settings.check_interval, process_name())
    )
    answer, error = ("unknown", check_sql.RUNNING) if running else ("rollback", None)
    execute(connection, request.record(settings.schema, target, {"asked": "fence", "answer": answer, "error": error}))
    return bool(running)


def reset(run: ActRun) -> dict[Target, str]:
    """Set the counters of halves back to 0, and have them checked by the next pass (RocketMQ: resume)."""
    for target in run.able:
        run.record(target, check_sql.reset(run.settings.schema, target.message_id))
    return dict.fromkeys(run.able, "has all its checks again, the first in the next check pass")


def _decision(resolution: Resolution, text: str) -> Change:
    """Return what decides halves."""

    def change(run: ActRun) -> dict[Target, str]:
        done = {}
        for target in run.able:
            # A fenced function that still runs can't write its op meanwhile: it locks the check first, which is ours.
            if decide(run.connection, run.settings.schema, target.message_id, resolution, "operator").first:
                run.record(target, result=dict(run.request.options) or None)
                done[target] = text
        return done

    return change


commit: Change = _decision(Resolution.COMMIT, "is committed: it will be sent")
rollback: Change = _decision(Resolution.ROLLBACK, "is rolled back: it will never be sent")


# --- inboxes ---------------------------------------------------------------------------------------------

_CHANGE_INBOX = f"""
WITH changed AS (
    UPDATE {{s}}.consumer_message m
       SET {{change}}, changed_at = clock_timestamp()
      FROM unnest(%(groups)s::text[], %(ids)s::uuid[], %(states)s::text[]) WITH ORDINALITY
           w (consumer_group, id, state, number)
     WHERE m.consumer_group = w.consumer_group AND m.message_id = w.id AND {INBOX_STATE} = w.state
    RETURNING m.consumer_group, m.message_id, w.state, w.number
)
INSERT INTO {{s}}.audit (actor, action, target, reason, result, origin)
SELECT %(actor)s, %(action)s, consumer_group || '/' || message_id, %(reason)s,
       jsonb_build_object('was', state), %(origin)s::jsonb
  FROM changed ORDER BY number
"""


def _inbox_change(assignments: str, texts: Mapping[str, str]) -> Change:
    """Return the change that updates inbox rows; ``texts`` are the outcomes by the state that a row was in."""

    def change(run: ActRun) -> dict[Target, str]:
        request = run.request
        values = {
            **inbox_columns(run.able),
            "states": [found.state for found in run.able.values()],
            "actor": request.by,
            "action": request.act.name,
            "reason": request.why or None,
            "origin": json.dumps(dict(request.origin)) if request.origin else None,
        }
        execute(run.connection, statement(run.settings.schema, _CHANGE_INBOX, values, change=assignments))
        return {target: texts[found.state or ""] for target, found in run.able.items()}

    return change


_NO_LEASE = "; what the client says that had taken it counts no more"
retry: Change = _inbox_change(
    RETRY,
    {
        "parked": "is due now, with all its attempts",
        "failed": "is due now, with the attempts it has left",
        "taken": f"is due now{_NO_LEASE}",
    },
)
park: Change = _inbox_change(
    """status = 'parked', next_attempt_at = NULL, starts = 0, taken_by = NULL, take_id = NULL,
       error_kind = coalesce(m.error_kind, 'parked by an operator')""",
    {"failed": "is parked", "taken": f"is parked{_NO_LEASE}"},
)
discard: Change = _inbox_change(
    "discarded_at = clock_timestamp()", {"parked": "is discarded; it can be restored until it is pruned"}
)
restore: Change = _inbox_change("discarded_at = NULL", {"discarded": "is parked again"})
