"""One message with its whole way: half, checks, op, sends, and what each inbox of each registered database says.

Gather what the registered databases know of one message.

Tell about one message: what happens next, what was done and when, what can be done now and what can't.

The timeline of one message: each step that is on record, over all databases, in the order of time.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.database.execute import Row, execute
from outbox.database.sql import ALIVE, audit
from outbox.errors import MessageNotFound
from outbox.operator import old_halves_sql
from outbox.operator.acts import COMPENSATING, DISCARDED, FENCED, UNCONSUMED, UNKNOWN, refusal, states_for
from outbox.operator.bulk.show import of_message
from outbox.operator.look import audit_sql, inbox_sql, messages_sql
from outbox.operator.look.audit import rows_of, targets_of
from outbox.operator.look.inbox import to_row
from outbox.operator.look.messages_sql import first, named
from outbox.operator.look.redact import Redactor
from outbox.operator.model import Action, Actor, AuditRow, BulkJob, Event, InboxRow, MessageView
from outbox.operator.sql import half_states

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

_MOST_GROUPS = 1_000
_MOST_ACTS = 500
#: What makes a database unseen: it can't be reached, or takes too long.
_UNSEEN = (OperationalError, InterfaceError, PoolTimeout)


@dataclass(slots=True)
class Gathered:
    """What is known of one message; ``home`` is the producer's database that has it.

    ``state`` is its state there (`outbox.operator.acts`), ``workers`` how many live there. ``handlers`` are those that
    living workers have for its topic: kind, group and options. ``unseen`` are databases that couldn't be read, and why.
    """

    id: UUID
    home: Database | None = None
    state: str | None = None
    half: dict[str, Any] | None = None
    raw: bytes = b""
    check: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    op: dict[str, Any] | None = None
    sends: list[dict[str, Any]] = field(default_factory=list)
    scheduled: dict[str, Any] | None = None
    compensation: dict[str, Any] | None = None
    workers: int = 0
    handlers: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)
    inbox: list[InboxRow] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)
    bulk_jobs: list[BulkJob] = field(default_factory=list)
    findings: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    unseen: dict[str, Exception] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Is there any trace of the message?"""
        return bool(self.home or self.inbox or self.audit or self.bulk_jobs or self.findings)

    @property
    def topic(self) -> str | None:
        """Its topic, if anybody knows it."""
        return self.half["topic"] if self.half else next((row.topic for row in self.inbox), None)

    def limit(self, kind: str, group: str | None, name: str, otherwise: int) -> int:
        """Return a number among the options of a handler of its topic, as living workers tell it."""
        told = (options.get(name) for of, in_group, options in self.handlers if (of, in_group) == (kind, group))
        return next((value for value in told if isinstance(value, int)), otherwise)

    @property
    def version(self) -> str:
        """A text that changes when anything about the message does; that it was looked at is nothing about it."""
        check = self.check and {
            name: value for name, value in self.check.items() if name not in {"status", "next_check_in", "being_asked"}
        }
        facts = (
            self.state,
            check,
            self.op,
            self.sends,
            self.scheduled,
            self.compensation,
            [astuple(row) for row in self.inbox],
        )
        return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:24]


def gather(databases: Databases, message_id: UUID) -> Gathered:
    """Ask all databases, first the producers', since what is meant for whom is known there."""
    found = Gathered(message_id)
    for database in databases.having("producer"):
        if found.home is None:
            _ask(database, found, _add_half)
    for database in databases.values():
        _ask(database, found, _add_traces)
    found.inbox.sort(key=lambda row: (row.group, row.database))
    found.audit.sort(key=lambda row: (row.acted_at, row.database, row.id))
    found.bulk_jobs.sort(key=lambda row: row.created_at)
    return found


def _ask(database: Database, found: Gathered, add: Callable[[Connection, Database, Gathered], None]) -> None:
    """Let a database add what it knows; one that can't be read is asked no more."""
    if database.name in found.unseen:
        return
    try:
        with database.looking() as connection:
            add(connection, database, found)
    except _UNSEEN as error:
        found.unseen[database.name] = error


def _add_half(connection: Connection, database: Database, found: Gathered) -> None:
    schema, half_id = database.schema, found.id
    states, halves, checks, history, ops, sends, scheduled, compensations = execute(
        connection,
        half_states(schema, [half_id]),
        messages_sql.half(schema, half_id, body=True),
        old_halves_sql.check_of(schema, half_id),
        old_halves_sql.history_of(schema, half_id, database.settings.check_timeout),
        messages_sql.op_of(schema, half_id),
        *messages_sql.way_of_half(schema, half_id),
    )
    half, op = first(messages_sql.HALF, halves), first(messages_sql.OP, ops)
    if not (half or op or checks or history or compensations):
        return
    if half is not None:
        found.raw = half.pop("raw")
        (((found.workers,),),) = execute(connection, messages_sql.workers(schema, ALIVE))
    found.home, found.state, found.half, found.op = database, states[0][1], half, op
    found.check = first(old_halves_sql.CHECK, checks)
    found.history = named(old_halves_sql.HISTORY, history)
    found.sends = named(messages_sql.SEND, sends)
    found.scheduled = first(messages_sql.SCHEDULED, scheduled)
    found.compensation = first(messages_sql.COMPENSATION, compensations)


def _add_traces(connection: Connection, database: Database, found: Gathered) -> None:
    schema, message_id = database.schema, found.id
    acts = audit_sql.Wanted(targets=targets_of(connection, database, str(message_id)))
    (audit,) = execute(connection, audit_sql.list_audit(schema, acts, None, _MOST_ACTS))
    bulk_jobs = of_message(connection, database, message_id)
    if "consumer" in database.parts:
        inbox, findings = execute(
            connection,
            inbox_sql.rows_of(schema, inbox_sql.Wanted(), message_id, None, _MOST_GROUPS),
            messages_sql.findings_of(schema, message_id),
        )
        rows = [to_row(database.name, row[2:]) for row in inbox]
        found.inbox += rows + _without_row(connection, database, found, {row.group for row in rows})
        found.findings += [(database.name, _finding(finding)) for finding in findings]
    if found.topic is not None:
        (handlers,) = execute(connection, messages_sql.handlers_of(schema, found.topic, ALIVE))
        found.handlers += [(kind, group, json.loads(options or "{}")) for kind, group, options in handlers]
    found.audit += rows_of(database.name, audit)
    found.bulk_jobs += bulk_jobs


def _finding(row: Row) -> dict[str, Any]:
    finding = dict(zip(messages_sql.FINDING, row, strict=True))
    return finding | {"detail": None if finding["detail"] is None else json.loads(finding["detail"])}


def _without_row(connection: Connection, database: Database, found: Gathered, having: set[str]) -> list[InboxRow]:
    """Return a row for each group of the topic whose inbox has none: it has yet to come, or left the message out."""
    if found.half is None or not found.sends:
        return []
    topic, send = found.half["topic"], found.sends[0]
    (reached,) = execute(connection, messages_sql.reached(database.schema, topic, send["queue"]))
    return [
        InboxRow(
            database.name,
            group,
            found.id,
            topic,
            queue=None,
            position=None,
            status="unconsumed" if position < send["position"] else "left_out",
            attempts=None,
            next_attempt_at=None,
            error_kind=None,
            last_error=None,
            received_at=None,
            changed_at=None,
        )
        for group, position in reached
        if group not in having
    ]


_UNDECIDED = {"undecided", FENCED}


def at(moment: dt.datetime) -> str:
    """Return a time for people."""
    return f"{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"


def next_of(found: Gathered, databases: Databases) -> str:
    """Return in a sentence what happens next; what waits for a human comes first."""
    told = list(_next_at_producer(found)) or list(_next_in_groups(found, databases))
    return "; ".join(told) or "nothing more is known: its half message is in no database that could be read"


def _next_at_producer(found: Gathered) -> Iterator[str]:
    """Yield what keeps the message from its consumers, if anything does."""
    op, check, undoing = found.op or {}, found.check, found.compensation
    if undoing is not None:
        yield f"rolled back (compensated) on {at(undoing['compensated_at'])} by {undoing['function']}"
    elif found.state == COMPENSATING:
        yield "its local transaction is being compensated"
    elif found.state in _UNDECIDED:
        yield _next_check(found) if check else "undecided"
    elif op.get("resolution") == "rollback":
        yield f"rolled back by the {op['decided_by']} on {at(op['decided_at'])}: it is never sent"
    elif found.state == "recalled" and found.scheduled:
        yield f"recalled by {found.scheduled['recalled_by']}: it is not sent"
    elif found.state == "scheduled":
        due = (found.scheduled or found.half or {})["deliver_at"]
        yield f"scheduled for {at(due)}"
    elif found.state == "committed":
        yield "committed: a worker dispatches it next"


def _next_check(found: Gathered) -> str:
    check = found.check or {}
    limit = found.limit("checker", None, "max_checks", found.home.settings.max_checks if found.home else 0)
    if check["parked_at"] is not None:
        return f"waits for a human: its half is parked ({check['reason']})"
    if check["fenced"]:
        return f"undecided: the fence of its transaction is tried at {at(check['next_check_at'])}"
    if check["being_asked"]:
        return f"undecided: check {check['check_times']} of {limit} is being asked"
    return f"undecided: check {check['check_times'] + 1} of {limit} at {at(check['next_check_at'])}"


def _next_in_groups(found: Gathered, databases: Databases) -> Iterator[str]:
    """Yield what is to come in the inboxes, the most urgent first."""
    rows = {word: [row for row in found.inbox if _word(row) == word] for word in _IN_ORDER}
    if parked := rows["parked"]:
        yield f"waits for a human: parked by {_groups(parked)}"
    for row in rows["failed"]:
        retries = found.limit("consumer", row.group, "retries", len(databases[row.database].settings.retry_delays))
        due = f" at {at(row.next_attempt_at)}" if row.next_attempt_at else ""
        yield f"retry {row.attempts} of {retries} by {row.group}{due}"
    if unconsumed := rows[UNCONSUMED]:
        yield f"comes next to {_groups(unconsumed)}"
    for word, what in _ENDED.items():
        if rows[word]:
            yield f"{what} {_groups(rows[word])}"
    if found.state == "dispatched" and not found.inbox:
        yield "dispatched; no group of its topic is known here"


_ENDED = {
    "quarantined": "quarantined in",
    DISCARDED: "discarded in",
    "consumed": "consumed by",
    "left_out": "left out by",
}
_IN_ORDER = ("parked", "failed", UNCONSUMED, *_ENDED)


def _word(row: InboxRow) -> str:
    return DISCARDED if row.discarded_at is not None else row.status


def _groups(rows: list[InboxRow]) -> str:
    names = sorted({row.group for row in rows})
    return f"group {names[0]}" if len(names) == 1 else f"groups {', '.join(names)}"


def actions_of(found: Gathered) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what can be done now, with the groups it can be done for; and what can't, with the reason."""
    able: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for action in Action:
        if action.part == "producer":
            if (why := _refusal(action, found)) is None:
                able[action.value] = []
            else:
                refused[action.value] = why
            continue
        rows = {row: _word(row) for row in found.inbox}
        groups = sorted({row.group for row, word in rows.items() if word in states_for(action, {})})
        if groups:
            able[action.value] = groups
        else:
            refused[action.value] = _refusal_in_groups(action, rows)
    return able, refused


def _refusal(action: Action, found: Gathered) -> str | None:
    if found.home is None and found.unseen:
        return f"nobody knows its state: {', '.join(found.unseen)} can't be read now"
    state = found.state or UNKNOWN
    if state not in states_for(action, {}):
        return refusal(action, state)
    # Without any worker, nobody knows what they have: it can be ordered, and waits for one.
    if action is Action.COMPENSATE and found.workers and "compensation" not in {kind for kind, *_ in found.handlers}:
        return f"no worker that runs has a compensation for topic {found.topic}; register one with @outbox.compensation"
    return None


def _refusal_in_groups(action: Action, rows: dict[InboxRow, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for row, word in rows.items():
        reasons.setdefault(refusal(action, UNCONSUMED if word == "left_out" else word), []).append(row.group)
    if len(reasons) == 1:
        return next(iter(reasons))
    whys = (f"{', '.join(sorted(set(groups)))}: {why}" for why, groups in reasons.items())
    return "; ".join(whys) or refusal(action, UNCONSUMED)


_ANSWERED = {"commit": "it committed", "rollback": "it rolled back", "unknown": "unknown"}
_IN_INBOX = {
    "consumed": "Consumed by",
    "failed": "Failed in",
    "parked": "Parked by",
    "quarantined": "Quarantined in",
}


def timeline(found: Gathered) -> list[Event]:
    """Return what happened to a message; at the same moment, what comes first on its way comes first."""
    events = [*_at_producer(found), *_checks(found), *_in_inboxes(found), *_by_people(found)]
    # One statement writes half and op, and may stamp the op first.
    born = found.half["born_at"] if found.half else None
    return sorted(events, key=lambda event: event.at if born is None else max(event.at, born))


def _at_producer(found: Gathered) -> Iterator[Event]:
    if found.home is None:
        return
    name, half, op = found.home.name, found.half, found.op
    if half:
        yield Event(half["born_at"], "written", "Half message written", name, actor=half["producer_group"])
    if op:
        word = "Committed" if op["resolution"] == "commit" else "Rolled back"
        yield Event(op["decided_at"], word.lower().replace(" ", "_"), f"{word} by the {op['decided_by']}", name)
    for send in found.sends:
        again = "" if send["send_number"] == 1 else f" again (send {send['send_number']})"
        place = f"queue {send['queue']}, position {send['position']}"
        yield Event(send["visible_at"], "dispatched", f"Dispatched{again}", name, place)
    scheduled = found.scheduled or {}
    if scheduled.get("recalled_at"):
        yield Event(scheduled["recalled_at"], "recalled", "Recalled", name, actor=scheduled["recalled_by"])
    if (undoing := found.compensation) is not None:
        yield Event(
            undoing["compensated_at"],
            "compensated",
            f"Local transaction rolled back by {undoing['function']}",
            name,
            undoing["reason"],
            undoing["requested_by"],
        )


def _checks(found: Gathered) -> Iterator[Event]:
    if found.home is None:
        return
    name = found.home.name
    for check in found.history:
        answer = _ANSWERED.get(check["answer"], "no answer" if check["state"] == "no_answer" else "being asked")
        asked = "its fence" if check["asked"] == "fence" else "the checker"
        yield Event(check["asked_at"], "checked", f"Asked {asked}: {answer}", name, check["error"], check["worker"])
    if found.check and found.check["parked_at"] is not None:
        yield Event(found.check["parked_at"], "half_parked", "Half parked", name, found.check["reason"])


def _in_inboxes(found: Gathered) -> Iterator[Event]:
    for row in found.inbox:
        if row.received_at is None or row.changed_at is None:
            continue
        if row.status != "consumed" or (row.attempts or 0) > 1:
            yield Event(row.received_at, "received", f"First handled by group {row.group}", row.database)
        first_line = (row.last_error or "").partition("\n")[0] or None
        times = f" ({row.attempts} attempts)" if (row.attempts or 0) > 1 else ""
        title = f"{_IN_INBOX.get(row.status, row.status)} group {row.group}{times}"
        # What was discarded was changed by that; when it had been parked is in the audit, or nowhere.
        if row.discarded_at is None:
            yield Event(row.changed_at, row.status, title, row.database, first_line)
        else:
            yield Event(row.discarded_at, "discarded", f"Discarded in group {row.group}", row.database, first_line)


def _by_people(found: Gathered) -> Iterator[Event]:
    for act in found.audit:
        of_group = f" in group {group}" if (group := act.target.rpartition("/")[0]) else ""
        yield Event(act.acted_at, "act", f"{act.action}{of_group}", act.database, act.reason, act.actor)
    for name, finding in found.findings:
        if finding["started_at"] is not None:
            detail = None if finding["detail"] is None else json.dumps(finding["detail"], ensure_ascii=False)
            title = f"Reconciliation found it {finding['kind']} for group {finding['group']}"
            yield Event(finding["started_at"], "found", title, name, detail)


def message(databases: Databases, message_id: UUID, redactor: Redactor, *, reveal: Actor | None = None) -> MessageView:
    """Return all that is known of a message. With ``reveal``, unmasked; that is in the audit before it is returned.

    A database that can't be read is named in ``unseen``, and what it knows is missing.

    Raises:
        MessageNotFound: no database knows it, and all could be read.
        sqlalchemy.exc.DBAPIError: none of those that could be read knows it; or the reveal can't be audited.
    """
    found = gather(databases, message_id)
    if not found.known:
        raise next(iter(found.unseen.values()), _not_found(databases, message_id))
    if reveal is not None and found.home is not None:
        with found.home.acting() as connection:
            statement = audit(found.home.schema, reveal.name, "reveal", str(message_id), "", None, reveal.origin)
            execute(connection, statement)
    return _view(databases, found, redactor, revealed=reveal is not None)


def version_of(databases: Databases, message_id: UUID) -> str:
    """Return a text that is another one whenever anything about the message has changed."""
    return gather(databases, message_id).version


def raw_body(databases: Databases, message_id: UUID) -> tuple[str, bytes]:
    """Return content type and bytes of a message as they are.

    Raises:
        MessageNotFound: no producer's database has it.
    """
    for database in databases.having("producer"):
        with database.looking() as connection:
            (rows,) = execute(connection, messages_sql.body(database.schema, message_id))
        if rows:
            content_type, body = rows[0]
            return content_type, bytes(body)
    raise _not_found(databases, message_id)


def _view(databases: Databases, found: Gathered, redactor: Redactor, *, revealed: bool) -> MessageView:
    actions, refused = actions_of(found)
    half, body, compensation = found.half, None, found.compensation
    if half is not None:
        body = redactor.body(half["content_type"], bytes(found.raw), reveal=revealed)
        half = {**half, "headers": redactor.headers(half["headers"], reveal=revealed)}
    if compensation is not None:
        compensation = {**compensation, "result": redactor.document(compensation["result"], reveal=revealed)}
    return MessageView(
        id=found.id,
        database=found.home.name if found.home else None,
        status=half["status"] if half else None,
        next=next_of(found, databases),
        version=found.version,
        half=half,
        check=found.check,
        history=found.history,
        op=found.op,
        sends=found.sends,
        scheduled=found.scheduled,
        compensation=compensation,
        inbox=found.inbox,
        audit=found.audit,
        bulk_jobs=found.bulk_jobs,
        timeline=timeline(found),
        body=body,
        actions=actions,
        refused=refused,
        findings=[{"database": name, **finding} for name, finding in found.findings],
        unseen=list(found.unseen),
    )


def _not_found(databases: Databases, message_id: UUID) -> MessageNotFound:
    return MessageNotFound(
        f"no registered database ({', '.join(databases)}) knows message {message_id}; "
        "is it in another one, or was it pruned?"
    )
