"""Fence a message off before its local transaction is rolled back, so that it can't take effect; lift a fence again.

A fence is an inbox row with the status `rolled_back`, in a consumer's database. What it may meet there, by group:

- The group has come to the message and has consumed it: too late, and the one who fences is told.
- It failed, or is parked: the row becomes the fence. Whoever runs the handler of a failed message holds its row, so
  this waits for them; what they have made of it counts.
- The group has yet to come to it: the fence is inserted. A handler that runs at this moment inserts the same row with
  its commit, and the primary key lets one of the two through. Are we first: its insert fails, its change is undone with
  it, and it steps over the message. Is it first: the row says that it was consumed.
- The group has passed it without a row, since its filter left it out or it began later: it needs no fence, since a
  group never goes back. Only a message that was sent again would come to it; so who compensates sees to it that it
  wasn't meanwhile, and what was compensated isn't sent again (outbox/dispatch.py).

Groups that start later fence for themselves, before they consume (outbox/consumer/fencing.py).

A fence bears the operation that it was made for. It may be lifted once it is certain, by a commit in the producer's
database, that nobody will compensate for this operation any more.

What a group does at its start about messages whose local transactions are rolled back.

Who compensates fences the groups that it finds, and a group that starts later isn't among them. So each worker looks,
after its group is registered and before it consumes, which messages of the topic stand to be rolled back, or were.
Whichever comes first, the fence is there: either the group was registered when the other one looked for groups, or the
rollback was begun when this one looks for rollbacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.compensate import sql
from outbox.consumer.queue import read_source
from outbox.consumer.sql import Place
from outbox.database.decision import take_lock
from outbox.database.execute import Row, Statement, execute
from outbox.database.sql import wait_at_most
from outbox.dispatch.sql import plan_by_index
from outbox.message.model import Status

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) a fence waits for a handler that holds the row, and the lifting of one for those that hold queues.
PATIENCE = 2.0
LIFT_PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """A rollback as the consumers' databases get to know it: of which message, for which operation, by whom, why.

    ``operation_id`` is None where a message was compensated by nobody's order. ``sends`` are the queue and the position
    of each time that it was sent, the first one first. ``former`` are earlier operations which were to roll it back and
    have ended: their fences are taken over.
    """

    message_id: UUID
    topic: str
    operation_id: UUID | None
    actor: str
    reason: str
    origin: Mapping[str, str] | None
    sends: tuple[tuple[int, int], ...]
    former: tuple[UUID, ...] = ()

    @property
    def queues(self) -> list[int]:
        """The queues in which it was sent."""
        return sorted({queue for queue, _ in self.sends})

    @property
    def operations(self) -> list[UUID]:
        """The operations whose fences are this one's to lift."""
        return [*self.former, *([] if self.operation_id is None else [self.operation_id])]


@dataclass(frozen=True, slots=True)
class Fenced:
    """What came of it: the groups that had ``consumed`` it, and those that are ``fenced`` off now."""

    consumed: list[str]
    fenced: list[str]


@dataclass(slots=True)
class Group:
    """How far a group of a topic has come: position and start by queue; 0 where it is at the beginning."""

    name: str
    positions: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)

    def ahead(self, order: Order) -> tuple[int, int] | None:
        """Return queue and position at which the group will come to the message next; None if it has passed it."""
        return next((send for send in order.sends if send[1] > self.positions.get(send[0], 0)), None)

    def needs_fence(self, order: Order) -> bool:
        """Tell whether the message may yet come to the group."""
        return not order.sends or self.ahead(order) is not None

    def was_to_get(self, order: Order) -> bool:
        """Tell whether the message was sent after the group began."""
        return any(position > self.starts.get(queue, 0) for queue, position in order.sends)

    def fence_for(self, order: Order) -> sql.NewFence:
        """Return the fence where there is no row."""
        queue, position = self.ahead(order) or (0, 0)
        return sql.NewFence(self.name, order.message_id, queue, position, order.operation_id)


def groups_in(rows: Iterable[tuple[str, int | None, int, int]]) -> list[Group]:
    """Return the rows of `store.reached` as groups."""
    groups: dict[str, Group] = {}
    for name, queue, position, start in rows:
        group = groups.setdefault(name, Group(name))
        if queue is not None:
            group.positions[queue], group.starts[queue] = position, start
    return list(groups.values())


def consumed_by(connection: Connection, schema: str, order: Order) -> list[str]:
    """Return the groups of a database which have consumed the message, in a transaction of its own."""
    with connection.begin():
        (rows,) = execute(connection, sql.inboxes(schema, order.topic, order.message_id))
    return [group for group, status, _ in rows if status == Status.CONSUMED]


def fence(connection: Connection, schema: str, order: Order, *, acknowledged: bool) -> Fenced:
    """Fence the message off in all groups of a database, in a transaction of its own.

    If one of them has consumed it, nothing is written, unless that is ``acknowledged``: then the others are fenced.

    Raises:
        sqlalchemy.exc.DBAPIError: with SQLSTATE 55P03 if somebody has handled it all the while.
    """
    operation_id = order.operation_id
    assert operation_id is not None  # noqa: S101 - only the start of a group fences for nobody
    with connection.begin() as transaction:
        _, rows = execute(connection, wait_at_most(PATIENCE), sql.reached(schema, order.topic, order.queues))
        new = [group.fence_for(order) for group in groups_in(rows) if group.needs_fence(order)]
        # In this order: what is there and wasn't inserted by us is seen by a snapshot of after the waiting.
        inserted, there = execute(
            connection,
            sql.insert(schema, order.topic, new),
            sql.inboxes(schema, order.topic, order.message_id, lock=True),
        )
        consumed = [group for group, status, _ in there if status == Status.CONSUMED]
        if consumed and not acknowledged:
            transaction.rollback()
            return Fenced(consumed, [])
        was = {group: "unconsumed" for group, _ in inserted}
        taken = {
            group: status
            for group, status, by in there
            if status in {Status.FAILED, Status.PARKED}
            or (status == Status.ROLLED_BACK and (by is None or by in order.former))
        }
        was |= {group: status for group, status in taken.items() if status != Status.ROLLED_BACK}
        execute(
            connection,
            sql.take(schema, order.message_id, list(taken), operation_id),
            _told(schema, order, "fence", was),
        )
    return Fenced(consumed, [group for group, status, _ in there if status != Status.CONSUMED])


def lift(connection: Connection, schema: str, order: Order, *, group: str | None = None, doubt: bool = False) -> None:
    """Lift the order's fences in a database, in a transaction of its own; ``group`` None: of all groups.

    What was parked is parked again, what had failed is due now. A group that was yet to come to the message comes to it
    as if nothing had been; one that has stepped over the fence meanwhile has it due now, like a failed message.

    With ``doubt``, that is also done for each group which has passed the message without a row: its fence may have been
    lifted when nobody knew that the message was out. (What a filter has left out stays so: see
    outbox/consumer/retrying.py.)

    Raises:
        sqlalchemy.exc.DBAPIError: with SQLSTATE 55P03 if the groups' queues are busy all the while.
    """
    with connection.begin():
        _, rows = execute(connection, wait_at_most(LIFT_PATIENCE), _reached(schema, order, group))
        names = [each.name for each in groups_in(rows)]
        (fences,) = execute(connection, sql.of_operations(schema, order.message_id, names, order.operations))
        inserted = {name for name, was in fences if was == "unconsumed"}
        if not fences and not doubt:
            return
        # Who consumes a queue has seen the fence, or not: nobody is in between while we hold its lock.
        _lock_queues(connection, schema, order, names if doubt else inserted)
        rows, there = execute(
            connection,
            _reached(schema, order, group),
            sql.inboxes(schema, order.topic, order.message_id),
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
        given_back, dropped, due = execute(
            connection,
            sql.give_back(schema, order.message_id, names, order.operations),
            sql.drop(schema, order.message_id, names, order.operations),
            sql.make_due(schema, order.topic, order.message_id, queue, position, passed),
        )
        now: dict[str, str] = dict(dropped) | dict(given_back) | dict(due)
        execute(connection, _told(schema, order, "unfence", now))


def _reached(schema: str, order: Order, group: str | None) -> Statement:
    return sql.reached(schema, order.topic, order.queues, group)


def _lock_queues(connection: Connection, schema: str, order: Order, groups: Iterable[str]) -> None:
    """Take the locks of those who consume; in one order everywhere."""
    places = (Place(schema, group, order.topic, queue) for group in groups for queue in order.queues)
    if keys := sorted(place.lock for place in places):
        execute(connection, *(take_lock(key) for key in keys))


def _told(schema: str, order: Order, action: str, by_group: Mapping[str, str]) -> Statement:
    """Return the record of what was done in each group."""
    word = "was" if action == "fence" else "is"
    told: dict[str, Mapping[str, object]] = {
        f"{group}/{order.message_id}": {word: status, "operation": order.operation_id}
        for group, status in by_group.items()
    }
    return sql.audit(schema, order.actor, action, order.reason, order.origin, told)


def told_of_start(schema: str, group: str, orders: Sequence[Order]) -> list[Statement]:
    """Return the records of the fences that a group has made at its start."""
    return [_told(schema, order, "fence", {group: "unconsumed"}) for order in orders]


def fence_group(connection: Connection, source: Connection, schema: str, group: str, topic: str) -> None:
    """Fence a registered group off from what is rolled back; lift what is left of rollbacks that will not be.

    ``source`` is on the producer's database, and only read.
    """
    standing, withdrawn = _rollbacks(source, schema, topic)
    if standing and _fence(connection, schema, group, topic, standing):
        # One of them may have been withdrawn meanwhile, and its fences lifted, before ours was there.
        _, withdrawn = _rollbacks(source, schema, topic)
    _lift(connection, schema, group, withdrawn)


def _rollbacks(source: Connection, schema: str, topic: str) -> tuple[list[Order], list[Order]]:
    """Return the rollbacks of a topic that stand, and those that were begun and will not be."""
    (rows,) = read_source(source, sql.rollbacks(schema, topic))
    orders = [(row[2], _order(row, topic)) for row in rows]
    return [order for stands, order in orders if stands], [order for stands, order in orders if not stands]


def _order(row: Row, topic: str) -> Order:
    message_id, operation_id, _, actor, reason, origin, queues, positions, former = row
    return Order(
        message_id,
        topic,
        operation_id,
        actor,
        reason,
        json.loads(origin) if origin else None,
        tuple(zip(queues, positions, strict=True)),
        tuple(former),
    )


def _fence(connection: Connection, schema: str, group: str, topic: str, orders: list[Order]) -> bool:
    queues = sorted({queue for order in orders for queue in order.queues})
    with connection.begin():
        _, rows = execute(connection, plan_by_index(), sql.reached(schema, topic, queues, group))
        new = [each.fence_for(order) for each in groups_in(rows) for order in orders if each.needs_fence(order)]
        if not new:
            return False
        (inserted,) = execute(connection, sql.insert(schema, topic, new))
        ids = {message_id for _, message_id in inserted}
        done = [order for order in orders if order.message_id in ids]
        if done:
            execute(connection, *told_of_start(schema, group, done))
    return bool(done)


def _lift(connection: Connection, schema: str, group: str, orders: list[Order]) -> None:
    if not orders:
        return
    with connection.begin():
        (rows,) = execute(connection, sql.of_group(schema, group, [order.message_id for order in orders]))
    ids = {message_id for (message_id,) in rows}
    for order in orders:
        if order.message_id in ids:
            lift(connection, schema, order, group=group)
