"""Halves and ops as producers left them, written by the server itself, and what waits of them."""

from __future__ import annotations

from sqlalchemy import Engine

from tests.kit import Tables

#: What these tests write beside the tables that every test of this folder finds empty.
FURTHER_TABLES = tuple(
    f"{schema}.{table}"
    for schema in ("outbox", "second")
    for table in ("message", "scheduled_message", "dispatch_cursor", "consumer_message", "consumer_offset")
)

_COMMITTED = """
WITH given AS MATERIALIZED (SELECT gen_random_uuid() AS id, n FROM generate_series(1, :count) n
), half AS (
    INSERT INTO {s}.half_message (id, producer_group, topic, content_type, body)
    SELECT id, 'default', topics[n % cardinality(topics) + 1], 'application/json', '{{"number": 0}}'
      FROM given, CAST(:topics AS text[]) topics ORDER BY n
)
INSERT INTO {s}.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM given ORDER BY n
"""

_PREPARED = """
WITH given AS MATERIALIZED (SELECT gen_random_uuid() AS id FROM generate_series(1, :count)
), half AS (
    INSERT INTO {s}.half_message (id, producer_group, topic, content_type, body)
    SELECT id, 'default', :topic, 'application/json', '{{"number": 0}}' FROM given
)
INSERT INTO {s}.half_check (half_id, topic, fenced, next_check_at, parked_at, reason)
SELECT id, :topic, :fenced, clock_timestamp() - interval '1 second', CASE WHEN :parked THEN clock_timestamp() END,
       CASE WHEN :parked THEN 'test' END
  FROM given
"""

_WAITING = """
SELECT h.topic, count(*) FROM {s}.op_message o JOIN {s}.half_message h ON h.id = o.half_id
 WHERE o.resolution = 'commit' AND NOT EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id)
   AND NOT EXISTS (SELECT FROM {s}.scheduled_message d WHERE d.half_id = h.id)
 GROUP BY h.topic
"""


def send_many(engine: Engine, count: int, *topics: str, schema: str = "outbox") -> None:
    """Commit messages of these topics, in turn, in one transaction."""
    Tables(engine).run(_COMMITTED.format(s=schema), count=count, topics=list(topics or ("t",)))


def prepare_many(
    engine: Engine, count: int, topic: str = "t", *, schema: str = "outbox", parked: bool = False, fenced: bool = False
) -> None:
    """Prepare halves, due for a check, or parked."""
    values = {"count": count, "topic": topic, "parked": parked, "fenced": fenced}
    Tables(engine).run(_PREPARED.format(s=schema), **values)


def waiting(engine: Engine, schema: str = "outbox") -> dict[str, int]:
    """Count what is committed and not dispatched by topic, the slow way."""
    return dict(Tables(engine).rows(_WAITING.format(s=schema)))
