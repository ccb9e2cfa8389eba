"""Find messages that a relay has published and that never came, without the producer's database.

The positions of a queue are dense, and a relay publishes them as ``sequence``. An intake notes which of them it has
stored, as ranges; what lies between two ranges for longer than `GRACE` is missing: parked by the relay, left out by an
operator, or lost on the way. It is told once, and found by the doctor until it comes, or until the broker and the inbox
have forgotten it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outbox.database.execute import Statement, Template, execute, lock_key
from outbox.database.session import begin
from outbox.database.sql import try_lock
from outbox.message.model import NUMBER_BITS, Counts
from outbox.telemetry.events import IntakeGap
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.relay.intake.source import Received
    from outbox.settings import Settings

#: How much later (seconds) than the messages behind it one may come: partitions of a broker are read at their own pace.
GRACE = 600.0
#: How often (seconds) ranges are joined, and gaps are told.
JOIN_EVERY = 60.0

_INSERT: Template = Template("""
INSERT INTO {s}.intake_range (topic, source, published, queue, first, last)
SELECT %(topic)s, * FROM unnest(%(sources)s::text[], %(published)s::text[], %(queues)s::int[], %(firsts)s::bigint[],
                                %(lasts)s::bigint[])
""")

# Over the end of an epoch, positions jump: each epoch is by itself.
_OF_QUEUE = f"topic, source, published, queue, first >> {NUMBER_BITS}"
#: Ranges, each with the last position ``before`` it in its queue and epoch; NULL: it is the first.
SPANS = f"""
SELECT *, max(last) OVER (PARTITION BY {_OF_QUEUE} ORDER BY first, last, id
                          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
  FROM {{s}}.intake_range"""

# What came first behind a gap says since when it is one. A gap that is older than what anything here remembers is none.
_JOIN: Template = Template(
    f"""
WITH spans AS ({SPANS}
), parts AS (
    SELECT *, before IS NULL OR (first > before + 1
              AND stored_at > clock_timestamp() - make_interval(secs => %(retention)s)) AS begins FROM spans
), islands AS (
    SELECT *, count(*) FILTER (WHERE begins) OVER (PARTITION BY {_OF_QUEUE} ORDER BY first, last, id) AS island
      FROM parts
), joined AS (
    SELECT topic, source, published, queue, min(first) AS first, max(last) AS last, array_agg(id) AS ids,
           (array_agg(stored_at ORDER BY first, stored_at))[1] AS stored_at,
           (array_agg(told ORDER BY first, told DESC))[1] AS told,
           (array_agg(before ORDER BY first, last, id))[1] AS before
      FROM islands GROUP BY {_OF_QUEUE}, island
), changed AS (
    SELECT *, due AS tells FROM (
        SELECT *, before IS NOT NULL AND NOT told
                  AND stored_at < clock_timestamp() - make_interval(secs => %(grace)s) AS due FROM joined) j
     WHERE due OR cardinality(ids) > 1
), gone AS (
    DELETE FROM {{s}}.intake_range WHERE id IN (SELECT unnest(ids) FROM changed)
), put AS (
    INSERT INTO {{s}}.intake_range (topic, source, published, queue, first, last, stored_at, told)
    SELECT topic, source, published, queue, first, last, stored_at, told OR tells FROM changed
)
SELECT topic, source, published, queue, min(before + 1), max(first - 1), sum(first - before - 1)::int8
  FROM changed WHERE tells GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
""".replace(f"GROUP BY {_OF_QUEUE}", f"GROUP BY topic, source, published, queue, first >> {NUMBER_BITS}")
)


def ranges_of(schema: str, topic: str, received: Sequence[Received]) -> Statement | None:
    """Return what notes the positions of messages that are stored in a topic; None where none has any."""
    found = sorted({each.published for each in received if each.published is not None})
    if not found:
        return None
    rows: list[list[object]] = []
    for source, published, queue, position in found:
        if rows and rows[-1][:3] == [source, published, queue] and rows[-1][4] == position - 1:
            rows[-1][4] = position
        else:
            rows.append([source, published, queue, position, position])
    names = "sources", "published", "queues", "firsts", "lasts"
    return _INSERT(schema, topic=topic, **dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def join_once(connection: Connection, settings: Settings, grace: float = GRACE) -> Counts:
    """Join ranges that have nothing between them, and tell of gaps that are older than ``grace`` (seconds)."""
    schema = settings.schema
    with begin(connection):
        (locked,) = execute(connection, try_lock(lock_key("intake gaps", schema)))
        if not locked[0][0]:
            return Counts()
        (gaps,) = execute(connection, _JOIN(schema, grace=grace, retention=settings.inbox_retention))
    for topic, source, published, queue, first, last, missing in gaps:
        of = {"topic": topic, "source": source, "published": published, "queue": queue}
        emit(IntakeGap(**of, first=first, last=last, missing=missing))
    return Counts(done=len(gaps))
