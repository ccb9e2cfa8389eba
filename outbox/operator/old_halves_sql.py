"""Statements that find undecided halves, and read how one was checked; all by index, or within a window."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from outbox.check.sql import UNANSWERED
from outbox.database.execute import Statement, in_schema
from outbox.operator.look.messages_sql import BROWSE_WINDOW

#: What the columns of the statements below are called by those who show them.
LISTED = ("id", "topic", "key", "status", "born_at", "age", "fenced", "checks", "being_asked", "last_answer",
          "last_error", "checked_at", "next_check_at", "next_check_in", "parked_at", "reason")  # fmt: skip
CHECK = ("status", "fenced", "check_times", "being_asked", "last_answer", "last_error", "checked_at", "next_check_at",
         "next_check_in", "parked_at", "reason")  # fmt: skip
HISTORY = ("asked_at", "asked", "worker", "answer", "seconds", "error", "state")

#: How an undecided half stands, by its check ``c``; see `outbox.operator.old_halves.HalfStatus`.
STATUS = """CASE WHEN c.parked_at IS NOT NULL THEN 'parked'
            WHEN c.next_check_at <= statement_timestamp() THEN 'orphan'
            WHEN c.checked_at IS NULL THEN 'immune'
            ELSE 'waiting' END"""

# Written when the question is put, and kept until it is answered. Once the claim has run out, whoever asked is dead.
_BEING_ASKED = "(c.last_error IS NOT DISTINCT FROM %(unanswered)s AND c.next_check_at > statement_timestamp())"
_FIRST_LINE = "split_part(c.last_error, E'\\n', 1)"
_LAST = f"""{_BEING_ASKED}, CASE WHEN NOT {_BEING_ASKED} THEN c.last_answer END,
       CASE WHEN NOT {_BEING_ASKED} THEN {_FIRST_LINE} END, c.checked_at, c.next_check_at,
       extract(epoch FROM c.next_check_at - statement_timestamp())::float8, c.parked_at, c.reason"""

# Ids begin with the time: the oldest come first. Each half message is looked up by itself: a merge of the two tables
# would first read past all that were decided before.
_LIST = f"""
SELECT c.half_id, c.topic, h.key, {STATUS}, h.born_at,
       extract(epoch FROM statement_timestamp() - h.born_at)::float8, c.fenced, c.check_times, {_LAST}
  FROM (SELECT * FROM {{s}}.half_check WHERE %(after)s::uuid IS NULL OR half_id > %(after)s::uuid
         ORDER BY half_id LIMIT %(window)s) c
  LEFT JOIN LATERAL (SELECT key, born_at FROM {{s}}.half_message WHERE id = c.half_id LIMIT 1) h ON true
 WHERE (%(topic)s::text IS NULL OR c.topic = %(topic)s)
   AND (%(status)s::text IS NULL OR {STATUS} = %(status)s)
   AND (%(age)s::float8 IS NULL OR h.born_at <= statement_timestamp() - make_interval(secs => %(age)s))
 ORDER BY c.half_id LIMIT %(limit)s
"""

_WINDOW_END = """
SELECT half_id FROM {s}.half_check
 WHERE %(after)s::uuid IS NULL OR half_id > %(after)s::uuid
 ORDER BY half_id OFFSET %(window)s - 1 LIMIT 1
"""

_CHECK = f"""
SELECT {STATUS}, c.fenced, c.check_times, {_LAST.replace(_FIRST_LINE, "c.last_error")}
  FROM {{s}}.half_check c WHERE c.half_id = %(id)s
"""

# Without an answer: asked just now, or the claim of the latest question stands. A decision deletes the claim, and who
# was being asked at that moment may still be at it.
_HISTORY = """
SELECT a.asked_at, a.asked, a.worker, a.answer, a.seconds, a.error,
       CASE WHEN a.answer IS NOT NULL THEN 'answered'
            WHEN a.asked_at > statement_timestamp() - make_interval(secs => %(timeout)s)
                 OR a.back = 1 AND c.next_check_at > statement_timestamp() THEN 'being_asked'
            ELSE 'no_answer' END
  FROM (SELECT *, row_number() OVER (ORDER BY id DESC) AS back FROM {s}.check_history
         WHERE half_id = %(id)s ORDER BY id DESC LIMIT 1000) a
  LEFT JOIN {s}.half_check c ON c.half_id = a.half_id
 ORDER BY a.id
"""

_COUNT_PARKED = """
SELECT count(*) FROM (SELECT FROM {s}.half_check
                       WHERE parked_at IS NOT NULL AND (%(topic)s::text IS NULL OR topic = %(topic)s)
                       LIMIT %(limit)s) p
"""


@dataclass(frozen=True, slots=True)
class HalfFilter:
    """Which undecided halves to look for; None looks at all. ``age`` is the least, in seconds."""

    topic: str | None = None
    status: str | None = None
    age: float | None = None


def list_undecided(
    schema: str, wanted: HalfFilter, after: UUID | None, limit: int, window: int = BROWSE_WINDOW
) -> Statement:
    """Find undecided halves, the oldest first, above the id ``after``, among the next ``window``. Rows: as `LISTED`."""
    return Statement(
        in_schema(_LIST, schema),
        {
            "topic": wanted.topic,
            "status": wanted.status,
            "age": wanted.age,
            "after": after,
            "limit": limit,
            "window": window,
            "unanswered": UNANSWERED,
        },
    )


def window_end(schema: str, after: UUID | None, window: int = BROWSE_WINDOW) -> Statement:
    """Find where a search ends that found too little. Rows: ``(half_id,)``; none if it saw all there are."""
    return Statement(in_schema(_WINDOW_END, schema), {"after": after, "window": window})


def check_of(schema: str, half_id: UUID) -> Statement:
    """Read how the check of an undecided half stands. Rows: as `CHECK`."""
    return Statement(in_schema(_CHECK, schema), {"id": half_id, "unanswered": UNANSWERED})


def history_of(schema: str, half_id: UUID, timeout: float) -> Statement:
    """Read the last 1000 checks of a half, decided or not. Rows: as `HISTORY`.

    One without an answer is taken for being asked until ``timeout`` seconds have passed, or its claim has run out.
    """
    return Statement(in_schema(_HISTORY, schema), {"id": half_id, "timeout": timeout})


def count_parked(schema: str, topic: str | None, limit: int) -> Statement:
    """Count parked halves, ``limit`` at most. Rows: ``(halves,)``."""
    return Statement(in_schema(_COUNT_PARKED, schema), {"topic": topic, "limit": limit})
