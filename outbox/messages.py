"""Find messages, and follow one from the half to the inboxes. Reads only."""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.store import browse as store
from outbox.store.browse import WINDOW, Filter
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import Row, execute
from outbox.store.stats import look_only

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

__all__ = ["WINDOW", "Filter", "MessageStatus", "Page", "Way", "add_inboxes", "list_messages", "way_of"]

_SECONDS = 10.0


class MessageStatus(enum.StrEnum):
    """How far a message has come on the producer's side."""

    UNDECIDED = "undecided"
    ROLLED_BACK = "rolled_back"
    COMMITTED = "committed"
    DISPATCHED = "dispatched"
    SCHEDULED = "scheduled"
    RECALLED = "recalled"


@dataclass(frozen=True, slots=True)
class Listed:
    """A message in a list."""

    id: UUID
    topic: str
    key: str | None
    tag: str | None
    born_at: dt.datetime
    deliver_at: dt.datetime | None
    status: str
    decided_by: str | None
    decided_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, the newest id first.

    ``next`` is the id to go on after; None at the end. ``exhausted``: the page isn't full since the search stopped
    after `WINDOW` messages; going on after ``next`` may find more.
    """

    messages: list[Listed]
    next: UUID | None
    exhausted: bool


@dataclass(slots=True)
class Way:
    """All that is known of one message; parts that aren't there are None or empty.

    ``inbox`` has an entry for each group of the topic that is known in the databases asked. Beside the statuses of
    an inbox row, an entry's status may be ``unconsumed`` (the group hasn't come so far) or ``left_out`` (it has, but
    there is no row: its filter left the message out, or the row was pruned).
    """

    id: UUID
    half: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    op: dict[str, Any] | None = None
    sends: list[dict[str, Any]] = field(default_factory=list)
    scheduled: dict[str, Any] | None = None
    compensation: dict[str, Any] | None = None
    inbox: list[dict[str, Any]] = field(default_factory=list)
    audit: list[dict[str, Any]] = field(default_factory=list)
    raw: bytes | None = None

    @property
    def known(self) -> bool:
        """Is there any trace of the message?"""
        return bool(self.half or self.op or self.inbox or self.audit or self.compensation)


_HALF = ("id", "producer_group", "topic", "key", "tag", "headers", "content_type", "body_bytes")
_CHECK = ("fenced", "next_check_at", "check_times", "last_answer", "last_error", "checked_at", "parked_at", "reason")
_OP = ("resolution", "decided_by", "decided_at", "sequence", "xid")
_SEND = ("send_number", "queue", "position", "visible_at")
_SCHEDULED = ("deliver_at", "recalled_at", "recalled_by")
_COMPENSATION = ("function", "requested_by", "reason", "result", "compensated_at")
_AUDIT = ("acted_at", "actor", "action", "reason", "result")
_INBOX = (
    "group",
    "topic",
    "queue",
    "position",
    "status",
    "attempts",
    "claims",
    "next_attempt_at",
    "body_digest",
    "last_error",
    "received_at",
    "changed_at",
)


def list_messages(
    connection: Connection, settings: Settings, wanted: Filter, *, after: UUID | None = None, limit: int = 50
) -> Page:
    """Return the newest messages of the producer's tables that fit; ``after`` is ``next`` of the page before."""
    with connection.begin():
        *_, rows = execute(
            connection,
            look_only(_SECONDS),
            plan_by_index(),
            store.list_halves(settings.schema, wanted, after, limit, WINDOW),
        )
    found = [Listed(*row[:-2]) for row in rows if row[0] is not None]
    searched, last = rows[0][-2:]
    if len(found) == limit:
        return Page(found, found[-1].id, exhausted=False)
    return Page(found, last if searched == WINDOW else None, exhausted=searched == WINDOW)


def way_of(
    connection: Connection, settings: Settings, message_id: UUID, parts: Collection[str], *, body: bool = False
) -> Way:
    """Return all that the tables of these parts in one database know of a message."""
    way = Way(message_id)
    schema = settings.schema
    with connection.begin():
        execute(connection, look_only(_SECONDS), plan_by_index())
        if "producer" in parts:
            _add_producer(connection, schema, way, body)
        (audit,) = execute(connection, store.audit_of(schema, str(message_id)))
        way.audit += _named(_AUDIT, audit)
        if "consumer" in parts:
            _add_inboxes(connection, schema, way)
    return way


def add_inboxes(connection: Connection, settings: Settings, way: Way) -> None:
    """Add what the consumer's tables of another database know of a message."""
    with connection.begin():
        execute(connection, look_only(_SECONDS), plan_by_index())
        _add_inboxes(connection, settings.schema, way)
        (audit,) = execute(connection, store.audit_of(settings.schema, str(way.id)))
        way.audit += _named(_AUDIT, audit)


def _add_producer(connection: Connection, schema: str, way: Way, body: bool) -> None:
    halves, checks, ops, sends, scheduled, compensations = execute(
        connection, store.half(schema, way.id, body=body), *store.way_of_half(schema, way.id)
    )
    for row in halves:
        *columns, raw, deliver_at, born_at, status = row
        half = dict(zip(_HALF, columns, strict=True))
        half["headers"] = _json(half["headers"])
        way.half = {**half, "deliver_at": deliver_at, "born_at": born_at, "status": status}
        way.raw = raw
    way.check = _first(_CHECK, checks)
    way.op = _first(_OP, ops)
    way.sends = _named(_SEND, sends)
    way.scheduled = _first(_SCHEDULED, scheduled)
    way.compensation = _first(_COMPENSATION, compensations)


def _add_inboxes(connection: Connection, schema: str, way: Way) -> None:
    (rows,) = execute(connection, store.inbox_of(schema, way.id))
    entries = _named(_INBOX, rows)
    if way.half and way.sends:
        send = way.sends[0]
        (reached,) = execute(connection, store.reached(schema, way.half["topic"], send["queue"]))
        have = {entry["group"] for entry in entries}
        for group, position in reached:
            if group not in have:
                status = "unconsumed" if position < send["position"] else "left_out"
                entries.append({**dict.fromkeys(_INBOX), "group": group, "status": status})
    way.inbox += entries


def _first(names: Sequence[str], rows: list[Row]) -> dict[str, Any] | None:
    return next(iter(_named(names, rows)), None)


def _named(names: Sequence[str], rows: list[Row]) -> list[dict[str, Any]]:
    named = [dict(zip(names, row, strict=True)) for row in rows]
    for row in named:
        if "result" in row:
            row["result"] = _json(row["result"])
    return named


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
