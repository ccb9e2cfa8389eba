"""Find messages, and follow one from the half to the inboxes. Reads only."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.sql import plan_by_index, read_only
from outbox.operator import old_halves_sql
from outbox.operator.look import messages_sql
from outbox.operator.look.messages_sql import BROWSE_WINDOW, Filter, first, named

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.settings import Settings

__all__ = ["BROWSE_WINDOW", "Filter", "MessageStatus", "Page", "Way", "add_inboxes", "list_messages", "way_of"]

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

    ``history`` has an entry for each check of its half, ``check`` tells how that goes on while it is undecided.
    ``inbox`` has an entry for each group of the topic that is known in the databases asked. Beside the statuses of
    an inbox row, an entry's status may be ``unconsumed`` (the group hasn't come so far) or ``left_out`` (it has, but
    there is no row: its filter left the message out, or the row was pruned).
    """

    id: UUID
    half: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
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
        return bool(self.half or self.op or self.history or self.inbox or self.audit or self.compensation)


def list_messages(
    connection: Connection, settings: Settings, wanted: Filter, *, after: UUID | None = None, limit: int = 50
) -> Page:
    """Return the newest messages of the producer's tables that fit; ``after`` is ``next`` of the page before."""
    with connection.begin():
        *_, rows = execute(
            connection,
            read_only(_SECONDS),
            plan_by_index(),
            messages_sql.list_halves(settings.schema, wanted, after, limit, BROWSE_WINDOW),
        )
    found = [Listed(*row[:-2]) for row in rows if row[0] is not None]
    searched, last = rows[0][-2:]
    if len(found) == limit:
        return Page(found, found[-1].id, exhausted=False)
    return Page(found, last if searched == BROWSE_WINDOW else None, exhausted=searched == BROWSE_WINDOW)


def way_of(
    connection: Connection, settings: Settings, message_id: UUID, parts: Collection[str], *, body: bool = False
) -> Way:
    """Return all that the tables of these parts in one database know of a message."""
    way = Way(message_id)
    schema = settings.schema
    with connection.begin():
        execute(connection, read_only(_SECONDS), plan_by_index())
        if "producer" in parts:
            _add_producer(connection, settings, way, body)
        _add_audit(connection, schema, way, [str(message_id)])
        if "consumer" in parts:
            _add_inboxes(connection, schema, way)
    return way


def add_inboxes(connection: Connection, settings: Settings, way: Way) -> None:
    """Add what the consumer's tables of another database know of a message."""
    with connection.begin():
        execute(connection, read_only(_SECONDS), plan_by_index())
        _add_inboxes(connection, settings.schema, way)
        _add_audit(connection, settings.schema, way, [str(way.id)])


def _add_producer(connection: Connection, settings: Settings, way: Way, body: bool) -> None:
    schema, half_id = settings.schema, way.id
    halves, checks, history, ops, sends, scheduled, compensations = execute(
        connection,
        messages_sql.half(schema, half_id, body=body),
        old_halves_sql.check_of(schema, half_id),
        old_halves_sql.history_of(schema, half_id, settings.check_timeout),
        messages_sql.op_of(schema, half_id),
        *messages_sql.way_of_half(schema, half_id),
    )
    if half := first(messages_sql.HALF, halves):
        way.raw = half.pop("raw")
        way.half = half
    way.check = first(old_halves_sql.CHECK, checks)
    way.history = named(old_halves_sql.HISTORY, history)
    way.op = first(messages_sql.OP, ops)
    way.sends = named(messages_sql.SEND, sends)
    way.scheduled = first(messages_sql.SCHEDULED, scheduled)
    way.compensation = first(messages_sql.COMPENSATION, compensations)


def _add_inboxes(connection: Connection, schema: str, way: Way) -> None:
    (rows,) = execute(connection, messages_sql.inbox_of(schema, way.id))
    entries = named(messages_sql.INBOX, rows)
    if way.half and way.sends:
        send = way.sends[0]
        (reached,) = execute(connection, messages_sql.reached(schema, way.half["topic"], send["queue"]))
        have = {entry["group"] for entry in entries}
        for group, position in reached:
            if group not in have:
                status = "unconsumed" if position < send["position"] else "left_out"
                entries.append({**dict.fromkeys(messages_sql.INBOX), "group": group, "status": status})
    way.inbox += entries
    # What was done to it in an inbox has the group in its target.
    _add_audit(connection, schema, way, [f"{entry['group']}/{way.id}" for entry in entries])


def _add_audit(connection: Connection, schema: str, way: Way, targets: list[str]) -> None:
    for rows in execute(connection, *(messages_sql.audit_of(schema, target) for target in targets)) if targets else ():
        way.audit += named(messages_sql.AUDIT, rows)
