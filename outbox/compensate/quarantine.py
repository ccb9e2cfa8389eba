"""Quarantine a message before its local transaction is compensated, so that it takes no effect; release it again.

A quarantine is an inbox row with the status `quarantined`, in a consumer's database. What it may meet there, by group:

- The group has come to the message and has consumed it: too late, which the caller gets to know.
- It failed, waits for an earlier message of its key, or is parked: the row becomes the quarantine. A consumer that runs
  the handler of a failed message holds its row, so this waits for it; what the consumer has made of the message counts.
- The group has yet to come to it: the quarantine is inserted. A handler that runs at this moment inserts the same row
  with its commit, and the primary key lets one of the two through. If this insert comes first, the consumer's insert
  fails; its transaction rolls back, and the consumer skips the message. If the consumer's comes first, the row says
  that the message was consumed.
- The group has passed it without a row, since its filter left it out or it began later: it needs no quarantine, since a
  group never goes back. Only a message that was sent again would come to it; so a worker that compensates sees to it
  that it wasn't meanwhile, and a compensated message isn't sent again (outbox/dispatch/dispatch_pass.py).

A handler outside of transactions takes effect before its row is written. Its worker commits up to where it may begin
messages, and then looks at the inbox; a quarantine is committed, and then its worker looks at those leases. So one of
them sees the other; if both do, or it can't be told, the compensation waits until the message has ended.

Groups that start later quarantine for themselves, before they consume (`quarantine_group`).

A quarantine bears the bulk job that it was made for. It may be released once it is certain, by a commit in the
producer's database, that no worker will compensate for this bulk job any more.

A worker that compensates quarantines the groups that it finds, and a group that starts later isn't among them. So each
worker looks, after its group is registered and before it consumes, which messages of the topic stand to be
compensated, or were. Whichever comes first, the quarantine is there: either the group was registered when the other
worker looked for groups, or the compensation was begun when this one looks for compensations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self
from uuid import UUID

from outbox.compensate import sql
from outbox.compensate.compensation import BUSY, Postponed
from outbox.database.execute import Row, Statement, execute, read_source
from outbox.database.identity import feed_from
from outbox.database.sql import GroupQueue, audit, plan_by_index, take_lock, wait_at_most
from outbox.message.model import Status
from outbox.text import topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) a quarantine waits for a handler that holds the row, and a release for those that hold queues.
PATIENCE = 2.0
RELEASE_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class QuarantineOrder:
    """A compensation as the consumers' databases get to know it: of which message, for which bulk job, its actor, why.

    ``bulk_job_id`` is None where a message was compensated without an order. ``sends`` are the queue and the position
    of each time that it was sent, the first one first. ``former`` are earlier bulk jobs which were to roll it back and
    have ended: their quarantines are taken over. ``source`` is the id of the database that sent it; None: ``topic`` is
    the name under which the consumers' database keeps it (`outbox.database.identity`).
    """

    message_id: UUID
    topic: str
    bulk_job_id: UUID | None
    actor: str
    reason: str
    origin: Mapping[str, str] | None
    sends: tuple[tuple[int, int], ...]
    former: tuple[UUID, ...] = ()
    source: UUID | None = None

    def read_by(self, connection: Connection, schema: str) -> Self:
        """Return it with the name under which the consumers' database of a connection keeps its topic."""
        if self.source is None:
            return self
        return replace(self, topic=feed_from(connection, schema, self.topic, self.source), source=None)

    @property
    def queues(self) -> list[int]:
        """The queues in which it was sent."""
        return sorted({queue for queue, _ in self.sends})

    @property
    def bulk_jobs(self) -> list[UUID]:
        """The bulk jobs whose quarantines are this one's to release."""
        return [*self.former, *([] if self.bulk_job_id is None else [self.bulk_job_id])]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """What came of it: the groups that had ``consumed`` it, and those that are ``quarantined`` off now."""

    consumed: list[str]
    quarantined: list[str]


@dataclass(slots=True)
class GroupProgress:
    """How far a group of a topic has come: position and start by queue; 0 where it is at the beginning."""

    name: str
    positions: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)

    def ahead(self, order: QuarantineOrder) -> tuple[int, int] | None:
        """Return queue and position at which the group will come to the message next; None if it has passed it."""
        return next((send for send in order.sends if send[1] > self.positions.get(send[0], 0)), None)

    def was_to_get(self, order: QuarantineOrder) -> bool:
        """Tell whether the message was sent after the group began."""
        return any(position > self.starts.get(queue, 0) for queue, position in order.sends)


def _missing(groups: Iterable[GroupProgress], orders: Sequence[QuarantineOrder]) -> list[sql.NewQuarantine]:
    """Return a quarantine for each message that may yet come to a group; there may be a row instead of it."""
    return [
        sql.NewQuarantine(group.name, order.message_id, *(group.ahead(order) or (0, 0)), order.bulk_job_id)
        for group in groups
        for order in orders
        if not order.sends or group.ahead(order) is not None
    ]


def groups_in(rows: Iterable[tuple[str, int | None, int, int]]) -> list[GroupProgress]:
    """Return the rows of `sql.reached` as groups."""
    groups: dict[str, GroupProgress] = {}
    for name, queue, position, start in rows:
        group = groups.setdefault(name, GroupProgress(name))
        if queue is not None:
            group.positions[queue], group.starts[queue] = position, start
    return list(groups.values())


def consumed_by(connection: Connection, schema: str, order: QuarantineOrder) -> list[str]:
    """Return the groups of a database which have consumed the message, in a transaction of its own."""
    order = order.read_by(connection, schema)
    with connection.begin():
        (rows,) = execute(connection, sql.inboxes(schema, order.topic, order.message_id))
    return [group for group, _, _, took_effect in rows if took_effect]


def quarantine(connection: Connection, schema: str, order: QuarantineOrder, *, acknowledged: bool) -> Quarantined:
    """Quarantine the message in all groups of a database, in a transaction of its own.

    If one of them has consumed it, nothing is written, unless that is ``acknowledged``: then the others are.

    Raises:
        sqlalchemy.exc.DBAPIError: with SQLSTATE 55P03 if another transaction has held it all the while.
        Postponed: a worker may be handling it outside of transactions.
    """
    order = order.read_by(connection, schema)
    assert order.bulk_job_id is not None  # noqa: S101 - only the start of a group quarantines without an order
    with connection.begin() as transaction:
        _, rows = execute(connection, wait_at_most(PATIENCE), _reached(schema, order))
        # In this order: rows that are there and weren't inserted by us are seen by a snapshot of after the waiting.
        inserted, there = execute(
            connection,
            sql.insert(schema, order.topic, _missing(groups_in(rows), [order])),
            sql.inboxes(schema, order.topic, order.message_id, lock=True),
        )
        consumed = [group for group, _, _, took_effect in there if took_effect]
        if consumed and not acknowledged:
            transaction.rollback()
            return Quarantined(consumed, [])
        values = {"topic": order.topic, "id": order.message_id}
        (retried,) = execute(connection, sql.retried(schema, **values, groups=[group for group, *_ in there]))
        if retried:
            transaction.rollback()
            raise _in_flight(retried)
        was = {group: "unconsumed" for group, _ in inserted}
        taken = {
            group: status
            for group, status, by, _ in there
            if Status(status).open or (status == Status.QUARANTINED and (by is None or by in order.former))
        }
        was |= {group: status for group, status in taken.items() if status != Status.QUARANTINED}
        take = sql.take(schema, id=order.message_id, groups=list(taken), bulk_job=order.bulk_job_id)
        execute(connection, take, *_audits(schema, order, "quarantine", was))
    if not acknowledged:
        queues, positions = zip(*order.sends, strict=True) if order.sends else ((), ())
        sends = {"queues": list(queues), "positions": list(positions), "group": None}
        with connection.begin():
            (begun,) = execute(connection, sql.in_flight(schema, **values, **sends))
        if begun:
            raise _in_flight(begun)
    return Quarantined(consumed, [group for group, status, *_ in there if status != Status.CONSUMED])


def _in_flight(rows: Sequence[Row]) -> Postponed:
    groups = ", ".join(group for (group,) in rows)
    return Postponed(f"a handler of {groups} may be at work on the message, outside of transactions", BUSY)


def release(
    connection: Connection, schema: str, order: QuarantineOrder, *, group: str | None = None, doubt: bool = False
) -> None:
    """Release the order's quarantines in a database, in a transaction of its own; ``group`` None: of all groups.

    A parked message is parked again, a failed one is due now. A group that was yet to come to the message comes to it
    as if nothing had been; one that has stepped over the quarantine meanwhile has it due now, like a failed message.

    With ``doubt``, that is also done for each group which has passed the message without a row: its quarantine may have
    been released when no worker knew that the message was out. (A message that a filter has left out stays so: see
    outbox/consumer/consumer.py.)

    Raises:
        sqlalchemy.exc.DBAPIError: with SQLSTATE 55P03 if the groups' queues are busy all the while.
    """
    order = order.read_by(connection, schema)
    with connection.begin():
        _, rows = execute(connection, wait_at_most(RELEASE_PATIENCE), _reached(schema, order, group))
        names = [each.name for each in groups_in(rows)]
        ours = {"id": order.message_id, "groups": names, "bulk_jobs": order.bulk_jobs}
        (quarantines,) = execute(connection, sql.of_bulk_jobs(schema, **ours))
        inserted = {name for name, was in quarantines if was == "unconsumed"}
        if not quarantines and not doubt:
            return
        # A worker that consumes a queue has seen the quarantine, or not: none is in between while we hold its lock.
        queues = [
            GroupQueue(schema, name, order.topic, queue)
            for name in (names if doubt else inserted)
            for queue in order.queues
        ]
        # In one order everywhere.
        execute(connection, *map(take_lock, sorted(queue.lock for queue in queues)))
        rows, there = execute(
            connection, _reached(schema, order, group), sql.inboxes(schema, order.topic, order.message_id)
        )
        with_row = {name for name, *_ in there} - inserted
        passed = [
            each.name
            for each in groups_in(rows)
            if order.sends
            and each.ahead(order) is None
            and (each.name in inserted or (doubt and each.name not in with_row and each.was_to_get(order)))
        ]
        queue, position = order.sends[0] if order.sends else (0, 0)
        due = sql.make_due(
            schema, topic=order.topic, id=order.message_id, queue=queue, position=position, groups=passed
        )
        returned, dropped, due_now = execute(connection, sql.give_back(schema, **ours), sql.drop(schema, **ours), due)
        now: dict[str, str] = dict(dropped) | dict(returned) | dict(due_now)
        execute(connection, *_audits(schema, order, "release", now))


def _reached(schema: str, order: QuarantineOrder, group: str | None = None) -> Statement:
    return sql.reached(schema, topic=order.topic, queues=order.queues, group=group)


def _audits(schema: str, order: QuarantineOrder, action: str, by_group: Mapping[str, str]) -> list[Statement]:
    """Return the audit's records of the act in each group."""
    word = "was" if action == "quarantine" else "is"
    audited = {group: {word: status, "bulk_job": order.bulk_job_id} for group, status in by_group.items()}
    return [
        audit(schema, order.actor, action, f"{group}/{order.message_id}", order.reason, result, order.origin)
        for group, result in audited.items()
    ]


def quarantine_group(connection: Connection, source: Connection, schema: str, group: str, feed: str) -> None:
    """Quarantine compensated messages for a registered group; release those of compensations that will not be.

    ``source`` is on the producer's database, and only read. ``feed`` is the name under which the group keeps its topic.
    """
    ongoing, withdrawn = _compensations(source, schema, feed)
    if ongoing and _quarantine(connection, schema, group, feed, ongoing):
        # One of them may have been withdrawn meanwhile, and its quarantines released, before ours was there.
        _, withdrawn = _compensations(source, schema, feed)
    _release(connection, schema, group, withdrawn)


def _compensations(source: Connection, schema: str, feed: str) -> tuple[list[QuarantineOrder], list[QuarantineOrder]]:
    """Return the compensations of a topic that stand, and those that were begun and will not be."""
    ongoing: list[QuarantineOrder] = []
    withdrawn: list[QuarantineOrder] = []
    (rows,) = read_source(source, sql.compensations(schema, topic=topic_of(feed)))
    for message_id, bulk_job_id, stands, actor, reason, origin, queues, positions, former in rows:
        came, sends = json.loads(origin) if origin else None, tuple(zip(queues, positions, strict=True))
        order = QuarantineOrder(message_id, feed, bulk_job_id, actor, reason, came, sends, tuple(former))
        (ongoing if stands else withdrawn).append(order)
    return ongoing, withdrawn


def _quarantine(connection: Connection, schema: str, group: str, topic: str, orders: list[QuarantineOrder]) -> bool:
    queues = sorted({queue for order in orders for queue in order.queues})
    with connection.begin():
        reached = sql.reached(schema, topic=topic, queues=queues, group=group)
        _, rows = execute(connection, plan_by_index(), reached)
        (inserted,) = execute(connection, sql.insert(schema, topic, _missing(groups_in(rows), orders)))
        ids = {message_id for _, message_id in inserted}
        done = [order for order in orders if order.message_id in ids]
        was = {group: "unconsumed"}
        execute(connection, *(record for order in done for record in _audits(schema, order, "quarantine", was)))
    return bool(done)


def _release(connection: Connection, schema: str, group: str, orders: list[QuarantineOrder]) -> None:
    if not orders:
        return
    of_group = sql.of_group(schema, group=group, ids=[order.message_id for order in orders])
    with connection.begin():
        (rows,) = execute(connection, of_group)
    ids = {message_id for (message_id,) in rows}
    for order in orders:
        if order.message_id in ids:
            release(connection, schema, order, group=group)
