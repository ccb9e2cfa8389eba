"""Show one message over all databases: its rows, its next steps, its timeline, and the acts that can be done."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.acts.changes import Act, Actor, check_audited, message_states, record_of
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import EDIT
from outbox.check.sql import UNANSWERED
from outbox.database.execute import execute, query
from outbox.database.identity import feed_from, source_identity
from outbox.errors import DatabaseUnreached, InvalidMessage
from outbox.message.compression import decompress
from outbox.message.content import COPY_HEADER, ENCODING_HEADER, Codecs
from outbox.operator.bulk import sql
from outbox.operator.bulk.jobs import read_jobs
from outbox.operator.databases import OverDatabases
from outbox.operator.health.workers import HandlerRow, merged, workers_in
from outbox.operator.look import inbox_sql, message_sql
from outbox.operator.look.lists import RETRIED, ActedMessage, audit_row, audit_targets, fates
from outbox.operator.look.message_sql import LARGEST_BODY, PRODUCER_SIDE
from outbox.operator.look.redactor import Body, Redactor
from outbox.operator.model import ActFates, AuditFilter, Event, FailedAttempt, InboxRow, MessageRecord, MessageView
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.message.topic import Topic
    from outbox.operator.databases import Database, Databases

_MOST_GROUPS = 1_000
_MOST_ACTS = 500
#: What makes a database unseen: it can't be reached, or takes too long.
_UNSEEN = (OperationalError, InterfaceError, PoolTimeout)


@dataclass(slots=True, kw_only=True)
class MessageFacts(MessageRecord):
    """Hold the rows of one message in all databases; ``home`` is the producer's database that has it.

    ``state`` is its state there (`outbox.acts.messages`), ``workers`` how many live there. ``handlers`` are those that
    living workers have for its topic. ``earlier`` is what inboxes said of it in earlier passages. ``unseen`` are
    databases that couldn't be read, and why. A body of more than ``largest`` bytes isn't opened: then ``raw`` is what
    is stored of it; None: the limit is that of messages.
    """

    home: Database | None = None
    state: str | None = None
    raw: bytes = b""
    largest: int | None = None
    workers: int = 0
    handlers: list[HandlerRow] = field(default_factory=list)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    unseen: dict[str, Exception] = field(default_factory=dict)
    source: UUID | None = None

    @property
    def known(self) -> bool:
        """Is there any trace of the message?"""
        return bool(self.home or self.inbox or self.audit or self.bulk_jobs or self.findings)

    @property
    def topic(self) -> str | None:
        """Its topic, if a database knows it."""
        return self.half["topic"] if self.half else next((topic_of(row.topic) for row in self.inbox), None)

    @property
    def unread(self) -> str:
        """Which databases couldn't be read, in words."""
        return f"{', '.join(self.unseen)} can't be read now"

    def limit(self, kind: str, group: str | None, name: str, otherwise: int) -> int:
        """Return a number among the options of a handler of its topic, as living workers report it."""
        values = (each.options.get(name) for each in self.handlers if (each.kind, each.group) == (kind, group))
        return next((value for value in values if isinstance(value, int)), otherwise)

    @property
    def version(self) -> str:
        """A text that changes when anything about the message does, but for the audit and the clock."""
        check = self.check and {
            name: value for name, value in self.check.items() if name not in {"status", "next_check_in", "being_asked"}
        }
        # Errors and results may have secrets, which could be guessed by this text; what changes them changes a time.
        inbox = [astuple(replace(row, last_error=None)) for row in self.inbox]
        once = self.raised and self.raised["raised_at"], self.compensation and self.compensation["compensated_at"]
        facts = (self.state, check, self.op, self.sends, self.scheduled, once, inbox)
        return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()[:24]


def gather(databases: Databases, message_id: UUID, largest: int | None = LARGEST_BODY) -> MessageFacts:
    """Read all databases, first the producers': they know the topic, and so which groups a message is meant for.

    ``largest`` is as that of `MessageFacts`.
    """
    unseen = {name: each.error for name, each in databases.away.items()}
    found = MessageFacts(id=message_id, largest=largest, unseen=unseen)
    for database in databases.having("producer"):
        if found.home is None:
            _read(database, found, _add_producer_side)
    for database in databases.values():
        _read(database, found, _add_traces)
    found.inbox.sort(key=lambda row: (row.group, row.database))
    found.attempts.sort(key=lambda each: (each.failed_at, each.group))
    found.audit.sort(key=lambda row: (row.acted_at, row.database, row.id))
    found.bulk_jobs.sort(key=lambda row: row.created_at)
    return found


def _read(database: Database, found: MessageFacts, add: Callable[[Connection, Database, MessageFacts], None]) -> None:
    """Add the rows of a database; one that can't be read is not tried again."""
    if database.name in found.unseen:
        return
    try:
        with database.read_only() as connection:
            add(connection, database, found)
    except _UNSEEN as error:
        found.unseen[database.name] = error


def _add_producer_side(connection: Connection, database: Database, found: MessageFacts) -> None:
    schema = database.schema
    # One byte more shows that there are more.
    values = {"id": found.id, "timeout": database.settings.check_timeout, "most": (found.largest or 2**30) + 1}
    values |= {"unanswered": UNANSWERED}
    statements = [each(schema, **values) for each in PRODUCER_SIDE.values()]
    states, ((found.source, _),), *answers = execute(
        connection, message_states(schema, [found.id]), source_identity(schema), *statements
    )
    known = {part: PRODUCER_SIDE[part].named(rows) for part, rows in zip(PRODUCER_SIDE, answers, strict=True)}
    if not any(known[part] for part in ("half", "op", "check", "history", "compensation")):
        return
    found.home, found.state = database, states[0][1]
    for part, rows in known.items():
        setattr(found, part, rows if part in {"history", "sends", "deliveries"} else next(iter(rows), None))
    if found.half is not None:
        stored, encoding = bytes(found.half.pop("raw")), (found.half["headers"] or {}).get(ENCODING_HEADER)
        found.raw = _opened(stored, encoding, found.largest or database.settings.max_body_bytes)


def _add_traces(connection: Connection, database: Database, found: MessageFacts) -> None:
    schema, message_id = database.schema, found.id
    targets = audit_targets(connection, database, str(message_id))
    (audit,) = execute(connection, message_sql.list_audit(schema, AuditFilter(), targets, None, _MOST_ACTS))
    if "consumer" in database.parts:
        everywhere = inbox_sql.rows_of(schema, inbox_sql.InboxQuery(), message_id, None, _MOST_GROUPS)
        inbox, attempts = execute(connection, everywhere, message_sql.ATTEMPTS(schema, message_id))
        found.attempts += [FailedAttempt(database.name, *attempt) for attempt in attempts]
        rows = [InboxRow(database.name, *row[2:]) for row in inbox]
        found.inbox += rows + _groups_without_row(connection, database, found, {row.group for row in rows})
        groups = [row.group for row in rows]
        earlier = message_sql.EARLIER.read(connection, schema, id=message_id, groups=groups) if groups else []
        found.earlier += [{"database": database.name, **each} for each in earlier]
        findings = message_sql.FINDINGS.read(connection, schema, id=message_id)
        found.findings += [{"database": database.name, **finding} for finding in findings]
    reported = workers_in(connection, database)
    if database is found.home:
        found.workers = sum(worker.works for worker in reported)
    found.handlers += [handler for handler in merged(reported) if handler.topic == found.topic]
    found.audit += [audit_row(database.name, row[1:]) for row in audit if row[1] is not None]
    found.bulk_jobs += read_jobs(connection, database, sql.OF_MESSAGE, id=message_id)


def _groups_without_row(
    connection: Connection, database: Database, found: MessageFacts, having: set[str]
) -> list[InboxRow]:
    """Return a row for each group of the topic whose inbox has none: it has yet to come, or left the message out."""
    if found.half is None or not found.sends:
        return []
    at = {name: found.sends[0][name] for name in ("queue", "position")}
    topic = found.half["topic"]
    if found.source is not None:
        topic = feed_from(connection, database.schema, topic, found.source)
    unknown = [None] * 6
    return [
        InboxRow(database.name, group, found.id, topic, None, None, status, *unknown)
        for group, status in query(connection, database.schema, message_sql.REACHED, topic=topic, **at)
        if group not in having
    ]


def _at(moment: dt.datetime) -> str:
    """Return a time as operators read it."""
    return f"{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _next_at_producer(found: MessageFacts) -> Iterator[str]:
    """Yield what keeps the message from its consumers, if anything does."""
    op, check, undoing = found.op or {}, found.check, found.compensation
    if undoing is not None:
        yield f"compensated on {_at(undoing['compensated_at'])} by {undoing['function']}"
    elif found.state == "compensating":
        yield "its local transaction is being compensated"
    elif found.state == "replaced":
        yield "replaced: a copy with another body was sent instead of it"
    elif found.state in {"undecided", "fenced"}:
        yield _next_check(found) if check else "undecided"
    elif op.get("resolution") == "rollback":
        yield f"rolled back by the {op['decided_by']} on {_at(op['decided_at'])}: it is never sent"
    elif found.state == "recalled" and found.scheduled:
        yield f"recalled by {found.scheduled['recalled_by']}: it is not sent"
    elif found.state == "scheduled" and (found.scheduled or {}).get("held_topic"):
        yield "held: the dispatch of its topic is paused, or messages held before it are still to go out"
    elif found.state == "scheduled":
        due = (found.scheduled or found.half or {})["deliver_at"]
        yield f"scheduled for {_at(due)}"
    elif found.state == "committed":
        yield "committed: a worker dispatches it next"


def _next_check(found: MessageFacts) -> str:
    check = found.check or {}
    limit = found.limit("checker", None, "max_checks", found.home.settings.max_checks if found.home else 0)
    if check["parked_at"] is not None:
        return f"waits for an operator: its half is parked ({check['reason']})"
    if check["fenced"]:
        return f"undecided: the fence of its transaction is tried at {_at(check['next_check_at'])}"
    if check["being_asked"]:
        return f"undecided: check {check['check_times']} of {limit} is being asked"
    return f"undecided: check {check['check_times'] + 1} of {limit} at {_at(check['next_check_at'])}"


def _next_in_groups(found: MessageFacts, databases: Databases) -> Iterator[str]:
    """Yield the next steps in the inboxes, the most urgent first."""
    rows = {state: [row for row in found.inbox if _state(row) == state] for state in ("unconsumed", *_IN_INBOX)}
    if parked := rows["parked"]:
        yield f"waits for an operator: parked by {_groups(parked)}"
    for row in rows["failed"]:
        retries = found.limit("consumer", row.group, "retries", len(databases[row.database].settings.retry_delays))
        due = f" at {_at(row.next_attempt_at)}" if row.next_attempt_at else ""
        yield f"retry {row.attempts} of {retries} by {row.group}{due}"
    for row in rows["waiting"]:
        yield f"waits in {_groups([row])} for message {row.waits_for}, which is before it in its key"
    for row in rows["taken"]:
        until = f" until {_at(row.next_attempt_at)}" if row.next_attempt_at else ""
        yield f"taken by {row.taken_by or 'a client'} of {row.group}{until}"
    if unconsumed := rows["unconsumed"]:
        yield f"comes next to {_groups(unconsumed)}"
    for state in ("quarantined", "discarded", "expired", "consumed", "left_out"):
        if rows[state]:
            yield f"{_IN_INBOX[state]} {_groups(rows[state])}"
    if found.state == "dispatched" and not found.inbox:
        none = "no group of its topic is known here"
        yield f"dispatched; {f'what groups did with it is unknown: {found.unread}' if found.unseen else none}"


_IN_INBOX = {
    "parked": "parked by",
    "failed": "failed in",
    "waiting": "waits in",
    "taken": "taken in",
    "quarantined": "quarantined in",
    "discarded": "discarded in",
    "expired": "expired in",
    "consumed": "consumed by",
    "left_out": "left out by",
}


def _state(row: InboxRow) -> str:
    return "discarded" if row.discarded_at is not None else row.status


def _groups(rows: list[InboxRow]) -> str:
    names = sorted({row.group for row in rows})
    return f"group {names[0]}" if len(names) == 1 else f"groups {', '.join(names)}"


def actions_of(found: MessageFacts) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the acts that can be done now, with their groups; and those that can't, with the reason."""
    able: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    states = {row: _state(row) for row in found.inbox}
    for name, act in ACTS.items():
        if act.part == "producer":
            if (why := _refusal(act, found)) is None:
                able[name] = []
            else:
                refused[name] = why
        elif groups := sorted({row.group for row, state in states.items() if state in act.from_states}):
            able[name] = groups
        else:
            refused[name] = _refusal_in_groups(act, states, found)
    return able, refused


def _refusal(act: Act, found: MessageFacts) -> str | None:
    if found.home is None and found.unseen:
        return f"its state isn't known: {found.unread}"
    state = found.state or "unknown"
    if state not in act.from_states:
        return act.refusal(state)
    # Without any worker, it isn't known what they have: the act can be ordered, and waits for a worker.
    if act.handler and found.workers and act.handler not in {each.kind for each in found.handlers}:
        return (
            f"no worker that runs has a {act.handler} for topic {found.topic}; register one with @outbox.{act.handler}"
        )
    return None


def _refusal_in_groups(act: Act, states: dict[InboxRow, str], found: MessageFacts) -> str:
    if found.unseen:
        return f"its state in all groups isn't known: {found.unread}"
    reasons: dict[str, list[str]] = {}
    for row, state in states.items():
        reasons.setdefault(act.refusal("unconsumed" if state == "left_out" else state), []).append(row.group)
    if len(reasons) == 1:
        return next(iter(reasons))
    whys = (f"{', '.join(sorted(set(groups)))}: {why}" for why, groups in reasons.items())
    return "; ".join(whys) or act.refusal("unconsumed")


def _outcomes(databases: Databases, found: MessageFacts) -> Iterator[ActFates]:
    """Yield the last retry in each group and the last resend, and what became of the message since."""
    last = {(row.database, row.action, row.target): row for row in found.audit if row.action in RETRIED}
    for row in last.values():
        group = row.target.rpartition("/")[0] or None
        acted = ActedMessage(row.action, found.id, group, found.topic, row.acted_at)
        try:
            ((since,), unreached) = fates(databases, databases[row.database], [acted])
        except _UNSEEN as error:
            found.unseen.setdefault(row.database, error)
            continue
        for name in unreached:
            found.unseen.setdefault(name, DatabaseUnreached([name]))
        yield ActFates(row.action, row.actor, row.acted_at, since)


_ANSWERED = {"commit": "it committed", "rollback": "it rolled back", "unknown": "unknown"}


def timeline(found: MessageFacts) -> list[Event]:
    """Return the events of a message; of the same moment, the one written first comes first."""
    events = [*_at_producer(found), *_in_inboxes(found), *_in_earlier_passages(found), *_by_operators(found)]
    # One statement writes half and op, and may stamp the op first.
    born = found.half["born_at"] if found.half else None
    return sorted(events, key=lambda event: event.at if born is None else max(event.at, born))


def _at_producer(found: MessageFacts) -> Iterator[Event]:
    if found.home is None:
        return
    name, half, op = found.home.name, found.half, found.op
    if half:
        yield Event(half["born_at"], "written", "Half message written", name, actor=half["producer_group"])
    if (raised := found.raised) is not None:
        title = f"Its function raised {raised['error_kind']}"
        yield Event(raised["raised_at"], "raised", title, name, raised["error"].partition("\n")[0])
    if op:
        word = "Committed" if op["resolution"] == "commit" else "Rolled back"
        yield Event(op["decided_at"], word.lower().replace(" ", "_"), f"{word} by the {op['decided_by']}", name)
    for send in found.sends:
        again = "" if send["send_number"] == 1 else f" again (send {send['send_number']})"
        where = f"queue {send['queue']}, position {send['position']}"
        yield Event(send["visible_at"], "dispatched", f"Dispatched{again}", name, where)
    for delivery in (each for each in found.deliveries if each["recorded_at"]):  # of a cursor's, it isn't kept
        title = f"Known to be {delivery['status'].replace('_', ' ')} in group {delivery['group']}"
        yield Event(delivery["recorded_at"], "confirmed", title, name, delivery["reason"])
    scheduled = found.scheduled or {}
    if scheduled.get("recalled_at"):
        yield Event(scheduled["recalled_at"], "recalled", "Recalled", name, actor=scheduled["recalled_by"])
    if (undoing := found.compensation) is not None:
        title, at = f"Local transaction compensated by {undoing['function']}", undoing["compensated_at"]
        yield Event(at, "compensated", title, name, undoing["reason"], undoing["requested_by"])
    for check in found.history:
        answer = _ANSWERED.get(check["answer"], "no answer" if check["state"] == "no_answer" else "being asked")
        asker = "its fence" if check["asked"] == "fence" else "the checker"
        yield Event(check["asked_at"], "checked", f"Asked {asker}: {answer}", name, check["error"], check["worker"])
    if found.check and found.check["parked_at"] is not None:
        yield Event(found.check["parked_at"], "half_parked", "Half parked", name, found.check["reason"])


def _in_inboxes(found: MessageFacts) -> Iterator[Event]:
    for row in found.inbox:
        if row.received_at is None or row.changed_at is None:
            continue
        # At the first attempt it was consumed when it was first handled; what waits or is too old had no attempt.
        if (row.attempts or 0) > (1 if row.status == "consumed" else 0):
            yield Event(row.received_at, "received", f"First handled by group {row.group}", row.database)
        first_line = (row.last_error or "").partition("\n")[0] or None
        times = f" ({row.attempts} attempts)" if (row.attempts or 0) > 1 else ""
        title = f"{_IN_INBOX.get(row.status, row.status).capitalize()} group {row.group}{times}"
        # The discard has changed the row; the time of its parking is in the audit, or nowhere.
        if row.discarded_at is None:
            yield Event(row.changed_at, row.status, title, row.database, first_line)
        else:
            yield Event(row.discarded_at, "discarded", f"Discarded in group {row.group}", row.database, first_line)


def _in_earlier_passages(found: MessageFacts) -> Iterator[Event]:
    for each in found.earlier:
        done = _IN_INBOX.get(each["status"], each["status"]).capitalize()
        title = f"{done} group {each['group']}, in passage {each['passage']}"
        yield Event(each["changed_at"], each["status"], title, each["database"], each["error"])


def _by_operators(found: MessageFacts) -> Iterator[Event]:
    for act in found.audit:
        of_group = f" in group {group}" if (group := act.target.rpartition("/")[0]) else ""
        yield Event(act.acted_at, "act", f"{act.action}{of_group}", act.database, act.reason, act.actor)
    for finding in found.findings:
        if finding["started_at"] is not None:
            detail = None if finding["detail"] is None else json.dumps(finding["detail"], ensure_ascii=False)
            title = f"Reconciliation found it {finding['kind']} for group {finding['group']}"
            yield Event(finding["started_at"], "found", title, finding["database"], detail)


class MessageViews(OverDatabases):
    """Show one message to an operator; ``codecs`` read bodies.

    ``topics`` say what bodies may be, as far as this process knows them.
    """

    codecs: Codecs
    topics: Mapping[str, Topic[Any]]

    def message(self, message_id: UUID, *, reveal: Actor | None = None, why: str = "") -> MessageView:
        """Return all that is known of a message; ``reveal`` has its body unmasked, which is audited first.

        A database that can't be read is named in ``unseen``, and its rows are missing.

        Raises:
            NotFound: no database knows it, and all could be read.
            sqlalchemy.exc.DBAPIError: none of those that could be read knows it; or the reveal can't be audited.
        """
        found = gather(self.databases, message_id, None if reveal else LARGEST_BODY)
        if not found.known:
            raise next(iter(found.unseen.values()), self.not_found(message_id))
        if reveal is not None and found.home is not None:
            check_audited(reveal, why)
            with found.home.acting() as connection:
                execute(connection, record_of(found.home.schema, "reveal", reveal, why, message_id))
        return self.shown_texts(_view(self.databases, found, self.redactor, self.codecs, revealed=reveal is not None))

    def body(self, message_id: UUID) -> tuple[str, bytes]:
        """Return content type and bytes of a message's body as it was sent; the caller must have audited it.

        A body that can't be decompressed is as it is stored.

        Raises:
            NotFound: no producer's database has it.
        """
        for database in self.databases.having("producer"):
            with database.read_only() as connection:
                rows = query(connection, database.schema, message_sql.BODY, id=message_id)
            if rows:
                content_type, stored, encoding = rows[0]
                return content_type, _opened(bytes(stored), encoding, database.settings.max_body_bytes)
        raise self.not_found(message_id)


def _opened(stored: bytes, encoding: str | None, limit: int) -> bytes:
    """Return a body as it was sent; as it is stored, where it can't be decompressed to at most ``limit`` bytes."""
    if encoding is None:
        return stored
    try:
        return decompress(stored, encoding, limit)
    except InvalidMessage:  # the operator sees that it is damaged
        return stored


def _id_in(text: str | None) -> UUID | None:
    """Return the id that a header has; any sender may have written it."""
    try:
        return UUID(text) if text else None
    except ValueError:
        return None


def _view(
    databases: Databases, found: MessageFacts, redactor: Redactor, codecs: Codecs, *, revealed: bool
) -> MessageView:
    actions, refused = actions_of(found)
    half, body, compensation = found.half, None, found.compensation
    # What waits for an operator comes first.
    coming = list(_next_at_producer(found)) or list(_next_in_groups(found, databases))
    if half is not None:
        if found.largest and len(found.raw) > found.largest:
            body = Body(half["content_type"], None, None, truncated=True)
        else:
            body = redactor.body(half["content_type"], found.raw, reveal=revealed, codecs=codecs)
        stored = None if body.size is None else half["body_bytes"]
        half = {**half, "headers": redactor.headers(half["headers"], reveal=revealed), "body_bytes": stored}
    if compensation is not None:
        compensation = {**compensation, "result": redactor.document(compensation["result"], reveal=revealed)}
    shown = {each.name: getattr(found, each.name) for each in fields(MessageRecord)}
    shown["audit"] = [replace(row, result=redactor.audited(row.result, reveal=revealed)) for row in found.audit]
    outcomes = list(_outcomes(databases, found))
    view = MessageView(
        **(shown | {"half": half, "compensation": compensation}),
        database=found.home.name if found.home else None,
        status=half["status"] if half else None,
        next="; ".join(coming) or "nothing more is known: its half message is in no database that could be read",
        version=found.version,
        timeline=timeline(found),
        body=body,
        actions=actions,
        refused=refused,
        outcomes=outcomes,
        copy_of=_id_in(half["headers"].get(COPY_HEADER)) if half else None,
        copies=[UUID(row.result["copy"]) for row in found.audit if row.action == EDIT.name],
        unseen=list(found.unseen),
    )
    if half is None or found.half is None:
        return view
    headers = found.half["headers"] or {}
    return redactor.texts(view, headers, half["content_type"], found.raw, codecs, reveal=revealed)
