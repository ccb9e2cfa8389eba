"""Consumers that read a topic over and over, for rounds of a fixed time: ours, and one by hand."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from sqlalchemy import Connection

from outbox import Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription

TOPIC = "transfer"

_READ = """
SELECT m.position, m.half_id, m.visible_at, h.key, h.tag, h.headers, h.content_type, h.body, h.born_at
  FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id
 WHERE m.topic = %s AND m.queue = %s AND m.position > %s
 ORDER BY m.position LIMIT %s
"""
INBOX = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
SELECT %s, id, %s, %s, position, 'consumed', 1, digest
  FROM unnest(%b::uuid[], %b::bigint[], %b::bytea[]) AS m (id, position, digest)
"""
OFFSET = """
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) VALUES (%s, %s, %s, %s, 0)
"""

Row = tuple[Any, ...]
_number = itertools.count()


def new_group() -> str:
    """Return the name of a group that hasn't read anything yet."""
    return f"group-{next(_number)}"


class Ours:
    """Our consumer; when all is read, a new group starts from the first message."""

    def __init__(
        self,
        connection: Connection,
        source: Connection,
        settings: Settings,
        handler: Callable[..., Any],
        batch: int,
        *,
        takes_batch: bool = False,
        pipeline: bool = False,
    ) -> None:
        self._connection, self._source, self._settings = connection, source, settings
        self._handler, self._batch, self._takes_batch, self._pipeline = handler, batch, takes_batch, pipeline
        self._until = 0.0
        self._consumer = self._new()

    def round(self, seconds: float) -> float:
        """Consume for so long; return messages a second."""
        began, done = time.perf_counter(), 0
        self._until = began + seconds
        while not self._over():
            counts = self._consumer.consume_once(self._connection, self._source)
            assert not counts.failed, "the handler failed"
            done += counts.done
            if not counts and not counts.more:
                self._consumer = self._new()
        return done / (time.perf_counter() - began)

    def all(self) -> None:
        """Consume the messages there."""
        self._until = float("inf")
        while counts := self._consumer.consume_once(self._connection, self._source):
            assert not counts.failed, "the handler failed"

    def _over(self) -> bool:
        return time.perf_counter() > self._until

    def _new(self) -> Consumer:
        subscription = Subscription(
            TOPIC,
            self._handler,
            group=new_group(),
            retry_delays=self._settings.retry_delays,
            batch=self._batch,
            takes_batch=self._takes_batch,
            pipeline=self._pipeline,
        )
        consumer = Consumer(subscription, self._settings, self._over)
        consumer.start(self._connection, self._source)
        return consumer


class ByHand:
    """The same queries and the same rows with psycopg; ``act`` does what the handler does, before they are written."""

    def __init__(
        self,
        raw: psycopg.Connection[Any],
        queues: int,
        batch: int,
        act: Callable[[psycopg.Connection[Any], list[Row]], None],
    ) -> None:
        self._raw, self._act = raw, act
        self._batches = _batches(raw, queues, batch)

    def round(self, seconds: float) -> float:
        """Consume for so long; return messages a second."""
        began, done = time.perf_counter(), 0
        while time.perf_counter() < began + seconds:
            group, queue, rows = next(self._batches)
            self._act(self._raw, rows)
            positions = [row[0] for row in rows]
            digests = [hashlib.sha256(row[7]).digest()[:16] for row in rows]
            self._raw.execute(INBOX, (group, TOPIC, queue, [row[1] for row in rows], positions, digests))
            self._raw.execute(OFFSET, (group, TOPIC, queue, positions[-1]))
            self._raw.commit()
            done += len(rows)
        return done / (time.perf_counter() - began)


def first_rows(raw: psycopg.Connection[Any], count: int) -> list[Row]:
    """Return messages of the first queue, for callers that only need some."""
    rows = raw.execute(_READ, (TOPIC, 0, 0, count), binary=True).fetchall()
    raw.commit()
    return rows


def _batches(raw: psycopg.Connection[Any], queues: int, batch: int) -> Iterator[tuple[str, int, list[Row]]]:
    while True:
        group = new_group()
        for queue in range(queues):
            position = 0
            while rows := raw.execute(_READ, (TOPIC, queue, position, batch), binary=True).fetchall():
                yield group, queue, rows
                position = rows[-1][0]
