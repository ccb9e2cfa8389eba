"""What a message costs doesn't depend on how many topics there are, or ever were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from tests.dispatch.support import run, scalar
from tests.kit import consume_all, declare, wait_until

ROWS = 10_000
#: Messages of so many topics, decided, and their group's offsets.
HALVES = """
INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body)
SELECT md5(n || ' of ' || :topics)::uuid, 'g', 'topic-' || n % :topics, 'application/json', '1'
  FROM generate_series(1, :rows) n
"""
OPS = """
INSERT INTO outbox.op_message (half_id, resolution, decided_by)
SELECT md5(n || ' of ' || :topics)::uuid, CASE WHEN n % 10 = 0 THEN 'rollback' ELSE 'commit' END, 'producer'
  FROM generate_series(1, :rows) n
"""
OFFSETS = """
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
SELECT 'g', 'topic-' || n % :topics, 0, n, :topics FROM generate_series(1, :rows) n
"""
ANALYZE = "ANALYZE outbox.topic, outbox.half_message, outbox.op_message, outbox.message, outbox.consumer_offset"
WAL = "SELECT pg_current_wal_insert_lsn() - '0/0'"
BLOCKS = """
SELECT sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)
           + coalesce(toast_blks_read + toast_blks_hit, 0))::bigint
  FROM pg_statio_all_tables WHERE schemaname = 'outbox'
"""
ALIVE = "SELECT count(*) FROM pg_stat_activity WHERE pid = {}"


def cost(engine: Engine, observer: Connection, act: Callable[[Connection], object]) -> tuple[int, int]:
    """Return the least WAL (bytes) and the least blocks of tables and indexes that an act took of several times."""
    found = []
    for _ in range(4):
        before = scalar(observer, BLOCKS), scalar(observer, WAL)
        with engine.connect() as connection:
            pid = scalar(connection, "SELECT pg_backend_pid()")
            act(connection)
            wal = scalar(observer, WAL)
            connection.detach()
        # Its numbers are told at the end of its process.
        wait_until(lambda pid=pid: not scalar(observer, ALIVE.format(pid)), "it ends")  # type: ignore[misc]
        found.append((int(wal - before[1]), scalar(observer, BLOCKS) - before[0]))
    return min(wal for wal, _ in found), min(blocks for _, blocks in found)


def dispatched(app: Outbox, settings: Settings, connection: Connection, **options: Any) -> None:
    """Send a message, and dispatch it."""
    with connection.begin():
        app.send(connection, "t", 1, **options)
    assert dispatch_once(connection, settings).done == 1


def released(app: Outbox, settings: Settings, connection: Connection) -> None:
    """Send a message for later, and make it one when it is due."""
    dispatched(app, settings, connection, delay=3600)
    run(connection, "UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")
    assert release_due_once(connection, settings).done == 1


def consumed(app: Outbox, settings: Settings, connection: Connection) -> None:
    """Send a message, dispatch it, and have it consumed."""
    dispatched(app, settings, connection)
    assert isinstance(app.engine, Engine)
    consumer = declare(app.engine, "t", "g", lambda message, session: None, settings=settings)
    assert consume_all(consumer, connection, connection).taken == 1


@pytest.mark.parametrize("act", [dispatched, released, consumed])
def test_a_lone_message_costs_the_same_beside_many_topics(
    app: Outbox, engine: Engine, settings: Settings, connection: Connection, act: Callable[..., None]
) -> None:
    """In bytes of WAL and in blocks that are looked at, of all statements together; the sums are kept all the same."""
    one = partial(act, app, settings)
    consumed(app, settings, connection)  # begins the group
    costs = []
    for topics in (1, ROWS):
        for statement in (HALVES, OPS, OFFSETS):
            with connection.begin():
                connection.execute(text(statement), {"topics": topics, "rows": ROWS})
        while dispatch_once(connection, settings).more:
            pass
        with connection.begin():
            connection.execute(text(ANALYZE))
        costs.append(cost(engine, connection, one))
    assert scalar(connection, "SELECT count(*) FROM outbox.topic") > ROWS * 0.8
    few, many = costs
    assert [more <= 1.5 * less for less, more in zip(few, many, strict=True)] == [True, True], (few, many)
