"""Consume: inbox row and offset, with a handler that does nothing, against the same statements by hand."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, at_least, compared, interleave, rate
from outbox import Message, Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription

TOPIC = "transfer"
BATCH = 200

READ = """
SELECT m.position, m.half_id, m.visible_at, h.key, h.tag, h.headers, h.content_type, h.body, h.born_at
  FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id
 WHERE m.topic = %s AND m.queue = %s AND m.position > %s
 ORDER BY m.position LIMIT %s
"""
INBOX = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
SELECT %s, id, %s, %s, position, 'consumed', 1, digest
  FROM unnest(%s::uuid[], %s::bigint[], %s::bytea[]) AS m (id, position, digest)
"""
OFFSET = """
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, claims) VALUES (%s, %s, %s, %s, 0)
"""

Row = tuple[Any, ...]
_number = itertools.count()


def run(lab: Lab) -> Iterator[Figure]:
    """Measure with producer and consumer in one database, and in two."""
    settings = Settings()
    count, rounds = lab.scale(50_000, 5_000), lab.scale(7, 2)
    lab.say("consume: filling")
    fill.messages(lab.engine("main"), TOPIC, count, settings)
    with lab.engine("main").connect() as one, lab.engine("other").connect() as two, lab.psycopg("main") as raw:
        one.commit()
        two.commit()
        lab.say("consume: no-op handler")
        results = interleave(
            {
                "ours": lambda: consumed(one, one, new_group(_nothing, BATCH, settings), settings, count),
                "two databases": lambda: consumed(two, one, new_group(_nothing, BATCH, settings), settings, count),
                "hand": lambda: rate(count, partial(_by_hand, raw, new_name(), settings.queues)),
            },
            rounds,
        )
    what = f"no-op handler, batch={BATCH}"
    yield at_least(what, "messages", results["ours"], 30_000)
    yield compared(what, "messages", results["ours"], "the same statements by hand", results["hand"], 0.7)
    yield at_least(f"{what}, consumer in another database", "messages", results["two databases"], 30_000)


def new_name() -> str:
    """Return the name of a group that hasn't read anything yet."""
    return f"group-{next(_number)}"


def new_group(handler: Any, batch: int, settings: Settings, *, takes_batch: bool = False) -> Consumer:
    """Return a consumer of a new group."""
    subscription = Subscription(TOPIC, new_name(), handler, settings.retry_delays, batch=batch, takes_batch=takes_batch)
    return Consumer(subscription, settings)


def consumed(connection: Connection, source: Connection, consumer: Consumer, settings: Settings, count: int) -> float:
    """Consume at least ``count`` messages; return messages a second."""
    consumer.start(connection, source)
    done = 0
    began = time.perf_counter()
    while done < count:
        counts = consumer.consume_once(connection, source)
        assert counts.done or counts.more, "the queues are empty"
        assert not counts.failed, "the handler failed"
        done += counts.done
    return done / (time.perf_counter() - began)


def rows_of(raw: psycopg.Connection[Any], group: str, queues: int, batch: int) -> Iterator[tuple[int, list[Row]]]:
    """Yield batch after batch of all queues, for consumers by hand; each writes what `settle` writes, and commits."""
    for queue in range(queues):
        position = 0
        while rows := raw.execute(READ, (TOPIC, queue, position, batch), binary=True).fetchall():
            yield queue, rows
            position = rows[-1][0]
    raw.commit()


def settle(raw: psycopg.Connection[Any], group: str, queue: int, rows: list[Row]) -> None:
    """Write the inbox rows and the offset."""
    ids = [row[1] for row in rows]
    positions = [row[0] for row in rows]
    digests = [hashlib.sha256(row[7]).digest()[:16] for row in rows]
    raw.execute(INBOX, (group, TOPIC, queue, ids, positions, digests))
    raw.execute(OFFSET, (group, TOPIC, queue, positions[-1]))


def _by_hand(raw: psycopg.Connection[Any], group: str, queues: int) -> None:
    for queue, rows in rows_of(raw, group, queues, BATCH):
        settle(raw, group, queue, rows)
        raw.commit()


def _nothing(message: Message, session: Session) -> None:
    pass


BENCHMARK = Benchmark(run, ("main", "other"))
