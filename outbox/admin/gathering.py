"""Gather what the registered databases know of one message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.admin.audit import rows_of, targets_of
from outbox.admin.inbox import to_row
from outbox.admin.model import AuditRow, InboxRow, OperationRow
from outbox.admin.operations.show import of_message
from outbox.report import ALIVE
from outbox.store import browse, browse_halves, find_audit, find_inbox, find_way
from outbox.store.acts import half_states
from outbox.store.browse import first, named
from outbox.store.execute import Row, execute

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.admin.databases import Database, Databases

_MOST_GROUPS = 1_000
_MOST_ACTS = 500
#: What makes a database unseen: it can't be reached, or takes too long.
_UNSEEN = (OperationalError, InterfaceError, PoolTimeout)


@dataclass(slots=True)
class Gathered:
    """What is known of one message; ``home`` is the producer's database that has it.

    ``state`` is its state there (`outbox.admin.states`), ``workers`` how many live there. ``handlers`` are those that
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
    operations: list[OperationRow] = field(default_factory=list)
    findings: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    unseen: dict[str, Exception] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Is there any trace of the message?"""
        return bool(self.home or self.inbox or self.audit or self.operations or self.findings)

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
    found.operations.sort(key=lambda row: row.created_at)
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
        browse.half(schema, half_id, body=True),
        browse_halves.check_of(schema, half_id),
        browse_halves.history_of(schema, half_id, database.settings.check_timeout),
        browse.op_of(schema, half_id),
        *browse.way_of_half(schema, half_id),
    )
    half, op = first(browse.HALF, halves), first(browse.OP, ops)
    if not (half or op or history or compensations):
        return
    if half is not None:
        found.raw = half.pop("raw")
        (((found.workers,),),) = execute(connection, find_way.workers(schema, ALIVE))
    found.home, found.state, found.half, found.op = database, states[0][1], half, op
    found.check = first(browse_halves.CHECK, checks)
    found.history = named(browse_halves.HISTORY, history)
    found.sends = named(browse.SEND, sends)
    found.scheduled = first(browse.SCHEDULED, scheduled)
    found.compensation = first(browse.COMPENSATION, compensations)


def _add_traces(connection: Connection, database: Database, found: Gathered) -> None:
    schema, message_id = database.schema, found.id
    acts = find_audit.Wanted(targets=targets_of(connection, database, str(message_id)))
    (audit,) = execute(connection, find_audit.list_audit(schema, acts, None, _MOST_ACTS))
    operations = of_message(connection, database, message_id)
    if "consumer" in database.parts:
        inbox, findings = execute(
            connection,
            find_inbox.rows_of(schema, find_inbox.Wanted(), message_id, None, _MOST_GROUPS),
            find_way.findings_of(schema, message_id),
        )
        rows = [to_row(database.name, row[2:]) for row in inbox]
        found.inbox += rows + _without_row(connection, database, found, {row.group for row in rows})
        found.findings += [(database.name, _finding(finding)) for finding in findings]
    if found.topic is not None:
        (handlers,) = execute(connection, find_way.handlers_of(schema, found.topic, ALIVE))
        found.handlers += [(kind, group, json.loads(options or "{}")) for kind, group, options in handlers]
    found.audit += rows_of(database.name, audit)
    found.operations += operations


def _finding(row: Row) -> dict[str, Any]:
    finding = dict(zip(find_way.FINDING, row, strict=True))
    return finding | {"detail": None if finding["detail"] is None else json.loads(finding["detail"])}


def _without_row(connection: Connection, database: Database, found: Gathered, having: set[str]) -> list[InboxRow]:
    """Return a row for each group of the topic whose inbox has none: it has yet to come, or left the message out."""
    if found.half is None or not found.sends:
        return []
    topic, send = found.half["topic"], found.sends[0]
    (reached,) = execute(connection, browse.reached(database.schema, topic, send["queue"]))
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
