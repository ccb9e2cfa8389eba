"""What a group does at its start about messages whose local transactions are rolled back.

Who compensates fences the groups that it finds, and a group that starts later isn't among them. So each worker looks,
after its group is registered and before it consumes, which messages of the topic stand to be rolled back, or were.
Whichever comes first, the fence is there: either the group was registered when the other one looked for groups, or the
rollback was begun when this one looks for rollbacks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outbox import fences
from outbox.consumer.reading import read_source
from outbox.fences import Order, groups_in
from outbox.store import compensate
from outbox.store import fence as store
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import Row, execute

if TYPE_CHECKING:
    from sqlalchemy import Connection


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
    (rows,) = read_source(source, compensate.rollbacks(schema, topic))
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
        _, rows = execute(connection, plan_by_index(), store.reached(schema, topic, queues, group))
        new = [each.fence_for(order) for each in groups_in(rows) for order in orders if each.needs_fence(order)]
        if not new:
            return False
        (inserted,) = execute(connection, store.insert(schema, topic, new))
        ids = {message_id for _, message_id in inserted}
        done = [order for order in orders if order.message_id in ids]
        if done:
            execute(connection, *fences.told_of_start(schema, group, done))
    return bool(done)


def _lift(connection: Connection, schema: str, group: str, orders: list[Order]) -> None:
    if not orders:
        return
    with connection.begin():
        (rows,) = execute(connection, store.of_group(schema, group, [order.message_id for order in orders]))
    ids = {message_id for (message_id,) in rows}
    for order in orders:
        if order.message_id in ids:
            fences.lift(connection, schema, order, group=group)
