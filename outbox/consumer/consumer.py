"""One group of one topic: all its queues, and the retry of its failures."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from outbox.consumer import sql
from outbox.consumer.queue import QueueConsumer, State
from outbox.consumer.retry import Retrier
from outbox.consumer.subscription import Subscription
from outbox.database.execute import Row, execute, lock_key, read_source
from outbox.database.sql import GroupQueue, take_lock
from outbox.errors import MessagesPruned
from outbox.message.model import Counts
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Transactions on one queue before a pass looks at the next one, so that none starves.
STEPS_PER_QUEUE = 50


class Consumer:
    """The consuming side of one `Subscription`; one object for each consuming thread, not thread-safe.

    Of the methods' two connections, the first is on the consumer's database, the second on the producer's;
    where both are the same, pass the same object twice. Neither may be in a transaction. ``stopping`` is asked
    between transactions, so that a pass over a long queue ends soon when the process is to stop.
    """

    def __init__(
        self, subscription: Subscription, settings: Settings, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.subscription = subscription
        self._settings = settings
        self._stopping = stopping
        self._queues: dict[int, QueueConsumer] = {}
        self._retrier = Retrier(subscription, settings)

    def start(self, connection: Connection, source: Connection) -> None:
        """Make the group ready to consume: to be called before anything else, by each worker.

        A new group gets its first offsets, by the subscription's ``start``; a known group keeps its own. Queues (and
        topics) that come later are read from their first message. After this and before it consumes, a worker
        quarantines for the group what is compensated (`outbox.compensate.quarantine.quarantine_group`).
        """
        subscription, schema = self.subscription, self._settings.schema
        with connection.begin():
            # Two workers of a new group must not start it at two different positions.
            _, known = execute(
                connection,
                take_lock(lock_key("group", schema, subscription.group, subscription.topic)),
                sql.group_is_known(schema, subscription.group, subscription.topic),
            )
            if known[0][0]:
                return
            rows = read_source(source, sql.heads(schema, subscription.topic))[0] or [(0, 0, 1)]
            for queue, last, first in rows:
                place = GroupQueue(schema, subscription.group, subscription.topic, queue)
                position = last if subscription.start == "now" else first - 1
                execute(connection, sql.append_offset(place, position), sql.write_start(place, position))

    def consume_once(self, connection: Connection, source: Connection) -> Counts:
        """Consume what is there, queue by queue; ``more`` if a pass right after this one would find more.

        Raises:
            MessagesPruned: a queue is stuck by that, and there is nothing left to do in the others.
        """
        counts = Counts()
        if self._stopping():
            return counts
        pruned: MessagesPruned | None = None
        waiting = self._waiting_queues(connection, source)
        random.shuffle(waiting)
        ahead = self._read_ahead(source, waiting)
        for queue, position, last in waiting:
            consumer = self._queues[queue]
            try:
                if queue in ahead:
                    consumer.read(ahead[queue], position)
                counts += self._drain(consumer, last, connection, source)
            except MessagesPruned as error:
                pruned = error  # the other queues have nothing to do with it
        if pruned is not None and not counts:
            raise pruned
        return counts

    def _drain(self, consumer: QueueConsumer, last: int, connection: Connection, source: Connection) -> Counts:
        counts = Counts()
        for _ in range(STEPS_PER_QUEUE):
            if self._stopping():
                return counts
            state, step = consumer.step(connection, source)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if state is not State.WORKED or consumer.position >= last:
                return counts
        return counts + Counts(more=True)

    def _waiting_queues(self, connection: Connection, source: Connection) -> list[tuple[int, int, int]]:
        """Return (queue, offset, last position) of the queues whose last position is ahead of the group's offset."""
        schema, group, topic = self._settings.schema, self.subscription.group, self.subscription.topic
        heads = sql.heads(schema, topic)
        if source is connection and self._queues:
            rows, offsets = read_source(source, heads, sql.offsets(schema, group, topic, sorted(self._queues)))
        else:
            (rows,), offsets = read_source(source, heads), []
        unread = [row[0] for row in rows if row[0] not in dict(offsets)]
        if unread:
            offsets += read_source(connection, sql.offsets(schema, group, topic, unread))[0]
        for queue, _, _ in rows:
            if queue not in self._queues:
                self._queues[queue] = QueueConsumer(self.subscription, self._settings, queue)
        position: dict[int, int] = dict(offsets)
        return [(queue, position[queue], last) for queue, last, _ in rows if last > position[queue]]

    def _read_ahead(self, source: Connection, waiting: list[tuple[int, int, int]]) -> dict[int, list[Row]]:
        """Read from all queues at once what this worker hasn't read yet; many queues must not mean many round trips."""
        missing = [
            (queue, position)
            for queue, position, _ in waiting
            if not (self._queues[queue].has_read_ahead and self._queues[queue].position == position)
        ]
        statements = [self._queues[queue].next_messages(position) for queue, position in missing]
        return dict(zip((queue for queue, _ in missing), read_source(source, *statements), strict=True))

    def retry_once(self, connection: Connection, source: Connection, *, limit: int = 100) -> Counts:
        """Retry what is due, at most ``limit`` messages.

        Ordered groups retry in place, in `consume_once`; here they only retry what was parked and given another try.
        """
        counts = Counts()
        for _ in range(limit):
            if self._stopping():
                return counts
            step = self._retrier.next(connection, source)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if not step.more:
                return counts
        return counts + Counts(more=True)
