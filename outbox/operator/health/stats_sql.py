"""Statements that count, for people who look: each stops at a limit, so that looking never costs more than work."""

from __future__ import annotations

from outbox.database.execute import Statement, in_schema
from outbox.dispatch.sql import Cursor

# Oldest first: ids begin with the time.
_UNDECIDED = """
SELECT c.topic, count(*), count(c.parked_at), count(*) FILTER (WHERE due),
       count(*) FILTER (WHERE due AND c.checked_at IS NULL),
       extract(epoch FROM clock_timestamp() - min(h.born_at))::float8
  FROM (SELECT *, parked_at IS NULL AND next_check_at <= statement_timestamp() AS due
          FROM {s}.half_check ORDER BY half_id LIMIT %(limit)s) c
  LEFT JOIN LATERAL (SELECT born_at FROM {s}.half_message WHERE id = c.half_id LIMIT 1) h ON true
 GROUP BY c.topic ORDER BY c.topic
"""

_SCHEDULED = """
SELECT h.topic, count(*), min(d.deliver_at)
  FROM (SELECT half_id, deliver_at FROM {s}.scheduled_message
         WHERE recalled_at IS NULL ORDER BY deliver_at, half_id LIMIT %(limit)s) d
  JOIN {s}.half_message h ON h.id = d.half_id
 GROUP BY h.topic ORDER BY h.topic
"""

_HEADS = """
SELECT t.name, q, coalesce((SELECT max(position) FROM {s}.message m WHERE m.topic = t.name AND m.queue = q), 0)
  FROM {s}.topic t, generate_series(0, t.queues - 1) q
 ORDER BY 1, 2
"""

_OP = "SELECT half_id, resolution, decided_at FROM {s}.op_message"

# Where the newest cursor has not been yet; what these mean: outbox/dispatch.py.
_SINCE_SNAPSHOT = (
    f"{_OP} WHERE xid >= %(next_xid)s::xid8 AND sequence > %(base)s",
    f"{_OP} WHERE xid = ANY (%(in_flight)s::xid8[]) AND sequence > %(base)s",
)
_REST_OF_CUT = (
    f"{_OP} WHERE sequence > %(after)s AND (xid >= %(next_xid)s::xid8 OR xid = ANY (%(in_flight)s::xid8[]))",
    f"{_OP} WHERE xid >= pg_snapshot_xmax(%(target)s::pg_snapshot) AND sequence > %(base)s",
    f"{_OP} WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(target)s::pg_snapshot))) AND sequence > %(base)s",
)
_REST_OF_REBASE = (
    f"{_OP} WHERE sequence > %(after)s AND sequence <= %(until)s ORDER BY sequence",
    *_SINCE_SNAPSHOT,
)
_NEWEST = (f"{_OP} ORDER BY sequence DESC",)

_UNDISPATCHED = """
SELECT h.topic, count(*), extract(epoch FROM clock_timestamp() - min(o.decided_at))::float8
  FROM (SELECT DISTINCT half_id, decided_at FROM ({candidates}) c
         WHERE resolution = 'commit'
           AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = c.half_id)
           AND NOT EXISTS (SELECT FROM {s}.scheduled_message d WHERE d.half_id = c.half_id)
         LIMIT %(limit)s) o
  JOIN {s}.half_message h ON h.id = o.half_id
 GROUP BY h.topic ORDER BY h.topic
"""

# Jumps from place to place in the primary key: the table has a row for each batch.
PLACES = """
WITH RECURSIVE place AS (
    (SELECT consumer_group, topic, queue FROM {s}.consumer_offset
      ORDER BY consumer_group, topic, queue LIMIT 1)
    UNION ALL
    SELECT n.* FROM place p CROSS JOIN LATERAL (
        SELECT consumer_group, topic, queue FROM {s}.consumer_offset o
         WHERE (o.consumer_group, o.topic, o.queue) > (p.consumer_group, p.topic, p.queue)
         ORDER BY consumer_group, topic, queue LIMIT 1) n
)"""

_OFFSETS = (
    PLACES
    + """
SELECT p.consumer_group, p.topic, p.queue,
       (SELECT max(position) FROM {s}.consumer_offset o
         WHERE o.consumer_group = p.consumer_group AND o.topic = p.topic AND o.queue = p.queue)
  FROM place p
 ORDER BY 1, 2, 3
"""
)

_FAILURES = (
    PLACES
    + """
SELECT g.consumer_group, g.topic,
       (SELECT count(*) FROM (SELECT FROM {s}.consumer_message m
         WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'failed' LIMIT %(limit)s) f),
       (SELECT count(*) FROM (SELECT FROM {s}.consumer_message m
         WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'parked' AND discarded_at IS NULL
         LIMIT %(limit)s) f),
       (SELECT extract(epoch FROM clock_timestamp() - min(next_attempt_at))::float8
          FROM {s}.consumer_message m
         WHERE m.consumer_group = g.consumer_group AND m.topic = g.topic AND status = 'failed'
           AND next_attempt_at <= statement_timestamp())
  FROM (SELECT DISTINCT consumer_group, topic FROM place) g
 ORDER BY 1, 2
"""
)

_LOOK_ONLY = """
SELECT set_config('transaction_read_only', 'on', true), set_config('statement_timeout', %s, true)
"""


def look_only(seconds: float) -> Statement:
    """For this transaction, write nothing and let no statement run longer than ``seconds``."""
    return Statement(_LOOK_ONLY, (f"{int(seconds * 1000)}ms",))


def now() -> Statement:
    """Read the database's clock. Rows: ``(time,)``."""
    return Statement("SELECT clock_timestamp()")


def undecided(schema: str, limit: int) -> Statement:
    """Count undecided halves, ``limit`` at most.

    Rows: ``(topic, halves, of them parked, of them due for a check, of these never asked, age of the oldest in s)``.
    """
    return Statement(in_schema(_UNDECIDED, schema), {"limit": limit})


def scheduled(schema: str, limit: int) -> Statement:
    """Count scheduled messages, ``limit`` at most. Rows: ``(topic, messages, next deliver_at)``."""
    return Statement(in_schema(_SCHEDULED, schema), {"limit": limit})


def heads(schema: str) -> Statement:
    """Read the end of each queue. Rows: ``(topic, queue, last position)``."""
    return Statement(in_schema(_HEADS, schema))


def undispatched(schema: str, cursor: Cursor | None, limit: int) -> Statement:
    """Count committed ops that are no message yet, ``limit`` at most. Rows: ``(topic, ops, age of the oldest in s)``.

    After a restore into another cluster, before the first dispatch, only the newest ``limit`` ops are looked at.
    """
    sources: tuple[str, ...]
    if cursor is None or cursor.restored:
        sources = _NEWEST
    elif cursor.until_sequence is None:
        sources = _SINCE_SNAPSHOT
    else:
        sources = _REST_OF_REBASE if cursor.target is None else _REST_OF_CUT
    candidates = " UNION ALL ".join(f"({source} LIMIT %(limit)s)" for source in sources)
    values: dict[str, object] = {"limit": limit}
    if cursor is not None:
        values |= {
            "next_xid": cursor.next_xid,
            "in_flight": cursor.in_flight,
            "target": cursor.target,
            "after": cursor.after_sequence,
            "until": cursor.until_sequence,
            "base": cursor.base_sequence,
        }
    return Statement(in_schema(_UNDISPATCHED.replace("{candidates}", candidates), schema), values)


def offsets(schema: str) -> Statement:
    """Read how far each group has come. Rows: ``(group, topic, queue, position)``."""
    return Statement(in_schema(_OFFSETS, schema))


def failures(schema: str, limit: int) -> Statement:
    """Count failed messages, and parked ones that aren't discarded; ``limit`` of each at most.

    Rows: ``(group, topic, failed, parked, seconds that the oldest due retry waits)``.
    """
    return Statement(in_schema(_FAILURES, schema), {"limit": limit})
