"""Statements of the check: which halves are due, who asks, what was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.database.decision import fence_key
from outbox.database.execute import Statement, in_schema

# Jumps from topic to topic in the index: a topic that nobody can be asked about costs the others nothing, however many
# of its halves are due.
KNOWN_TOPICS = """
WITH RECURSIVE known AS (
    (SELECT topic FROM {s}.half_check WHERE parked_at IS NULL ORDER BY topic LIMIT 1)
    UNION ALL
    SELECT (SELECT c.topic FROM {s}.half_check c WHERE c.parked_at IS NULL AND c.topic > k.topic
             ORDER BY c.topic LIMIT 1)
      FROM known k WHERE k.topic IS NOT NULL
)"""

_DUE = (
    KNOWN_TOPICS
    + """
SELECT NULL, EXISTS (SELECT FROM {s}.half_check WHERE fenced AND parked_at IS NULL
                        AND next_check_at <= statement_timestamp())
 UNION ALL
SELECT topic, EXISTS (SELECT FROM {s}.half_check c WHERE c.topic = known.topic AND c.parked_at IS NULL AND NOT c.fenced
                         AND c.next_check_at <= statement_timestamp())
  FROM known WHERE topic IS NOT NULL
"""
)

_FENCED = """
SELECT half_id FROM {s}.half_check
 WHERE fenced AND parked_at IS NULL AND next_check_at <= statement_timestamp()
 ORDER BY next_check_at LIMIT %s
   FOR UPDATE SKIP LOCKED
"""

_LOCK = "SELECT topic, fenced FROM {s}.half_check WHERE half_id = %s FOR UPDATE"

# Safe whatever this statement's snapshot shows: a business transaction that committed after it was taken has its op in
# the index, where the insert finds it; one that begins after its fence was found free finds our op when it commits.
_TRY_FENCES = """
WITH tried AS MATERIALIZED (
    SELECT half_id, pg_try_advisory_xact_lock(key) AS free
      FROM unnest(%(ids)s::uuid[], %(keys)s::int8[]) g (half_id, key)
), decided AS (
    INSERT INTO {s}.op_message (half_id, resolution, decided_by)
    SELECT half_id, 'rollback', 'check' FROM tried WHERE free
    ON CONFLICT (half_id) DO NOTHING
    RETURNING half_id
), ended AS (
    DELETE FROM {s}.half_check WHERE half_id IN (SELECT half_id FROM tried WHERE free)
), running AS (
    UPDATE {s}.half_check c
       SET next_check_at = clock_timestamp() + make_interval(secs => %(interval)s), last_answer = 'unknown',
           last_error = %(running)s, checked_at = clock_timestamp()
     WHERE half_id IN (SELECT half_id FROM tried WHERE NOT free)
), history AS (
    INSERT INTO {s}.check_history (half_id, asked, worker, answer, error)
    SELECT t.half_id, 'fence', %(worker)s, CASE WHEN d.half_id IS NULL THEN 'unknown' ELSE 'rollback' END,
           CASE WHEN NOT free THEN %(running)s WHEN d.half_id IS NULL THEN 'decided meanwhile' END
      FROM tried t LEFT JOIN decided d ON d.half_id = t.half_id
)
SELECT count(*) FILTER (WHERE NOT free), (SELECT count(*) FROM decided) FROM tried
"""

# What is due and may still be asked is claimed until the lease ends: the question counts from now on, also if it kills
# whoever asks. What has used up its questions (the last one was never answered) is parked, unless an operator wants it
# asked once more.
_CLAIM = """
WITH due AS MATERIALIZED (
    {due}
), spent AS (
    UPDATE {s}.half_check c
       SET parked_at = clock_timestamp(),
           reason = format(%(reason)s, c.check_times, coalesce(split_part(c.last_error, E'\\n', 1), 'unknown'))
      FROM due d WHERE c.half_id = d.half_id AND d.check_times >= %(max_checks)s AND NOT d.wanted
    RETURNING c.half_id
), claimed AS (
    UPDATE {s}.half_check c
       SET check_times = c.check_times + 1, checked_at = clock_timestamp(), last_answer = 'unknown',
           next_check_at = clock_timestamp() + make_interval(secs => %(lease)s), last_error = %(unanswered)s
      FROM due d WHERE c.half_id = d.half_id AND (d.check_times < %(max_checks)s OR d.wanted)
    RETURNING c.half_id, c.check_times
), asked AS (
    INSERT INTO {s}.check_history (half_id, asked, worker) SELECT half_id, 'checker', %(worker)s FROM claimed
    RETURNING half_id, id
)
SELECT c.half_id, c.check_times, a.id, h.key, h.tag, h.headers::text, h.content_type, h.body, h.born_at,
       extract(epoch FROM clock_timestamp() - h.born_at)::float8, h.id IS NULL
  FROM claimed c JOIN asked a ON a.half_id = c.half_id LEFT JOIN {s}.half_message h ON h.id = c.half_id
 UNION ALL
SELECT half_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM spent
"""

_DUE_OF_TOPIC = """
    SELECT half_id, check_times, last_answer IS NULL AS wanted FROM {s}.half_check
     WHERE topic = %(topic)s AND parked_at IS NULL AND NOT fenced AND next_check_at <= statement_timestamp()
     ORDER BY next_check_at LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED"""

# Asked by hand, parked or not: only not while somebody is being asked. The caller holds the lock already: the snapshot
# of a statement that waits for it wouldn't show the question for which it waited.
_THIS_ONE = """
    SELECT half_id, check_times, true AS wanted FROM {s}.half_check c
     WHERE half_id = %(half_id)s AND NOT fenced
       AND NOT EXISTS (SELECT FROM {s}.check_history a
                        WHERE a.half_id = c.half_id AND a.asked = 'checker' AND a.answer IS NULL
                          AND a.asked_at > clock_timestamp() - make_interval(secs => %(lease)s))
       FOR UPDATE"""

# A question is closed when it is answered or given up, and when another one is put: no later answer to it counts.
_ANSWER = """
UPDATE {s}.check_history q SET answer = %(answer)s, seconds = %(seconds)s, error = %(error)s
 WHERE half_id = %(half_id)s AND id = %(id)s AND answer IS NULL
   AND NOT EXISTS (SELECT FROM {s}.check_history later WHERE later.half_id = q.half_id AND later.id > q.id)
RETURNING half_id"""

# Of the claim that was answered only: another one meanwhile has raised the counter, and wins; a reset has lowered it.
# What is parked stays so when it was asked by hand. Whoever holds the lock is deciding, and may take his time: if he
# leaves the half undecided after all, the claim ends by itself.
_UNKNOWN = f"""
WITH closed AS ({_ANSWER}
), mine AS MATERIALIZED (
    SELECT half_id FROM {{s}}.half_check WHERE half_id = %(half_id)s AND check_times <= %(claim)s
       FOR UPDATE SKIP LOCKED
)
UPDATE {{s}}.half_check
   SET next_check_at = clock_timestamp() + make_interval(secs => %(interval)s), last_error = %(error)s,
       parked_at = coalesce(parked_at, CASE WHEN check_times >= %(max_checks)s THEN clock_timestamp() END),
       reason = coalesce(reason, CASE WHEN check_times >= %(max_checks)s
                                      THEN format(%(reason)s, check_times, coalesce(%(summary)s, 'unknown')) END)
 WHERE half_id IN (SELECT half_id FROM mine) AND half_id IN (SELECT half_id FROM closed)
RETURNING parked_at IS NOT NULL
"""

_UNASKED = """
WITH mine AS MATERIALIZED (
    SELECT half_id FROM {s}.half_check WHERE half_id = %(half_id)s AND check_times = %(claim)s
       FOR UPDATE SKIP LOCKED
), asked AS (
    DELETE FROM {s}.check_history WHERE half_id IN (SELECT half_id FROM mine) AND id = %(id)s
)
UPDATE {s}.half_check SET check_times = check_times - 1, next_check_at = clock_timestamp(), last_answer = NULL
 WHERE half_id IN (SELECT half_id FROM mine)
"""

_LIMITS = "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s, true)"

_STATE = """
SELECT h.topic, o.resolution, o.decided_by, o.decided_at, c.half_id IS NOT NULL, coalesce(c.fenced, false),
       c.parked_at IS NOT NULL
  FROM {s}.half_message h
  LEFT JOIN {s}.op_message o ON o.half_id = h.id
  LEFT JOIN {s}.half_check c ON c.half_id = h.id
 WHERE h.id = %s
"""

_HURRY = "UPDATE {s}.half_check SET next_check_at = statement_timestamp() WHERE parked_at IS NULL"

# At once, but not while somebody is being asked: not before that claim ends.
_AT_ONCE = """CASE WHEN (SELECT q.answer IS NULL FROM {s}.check_history q
                         WHERE q.half_id = half_check.half_id ORDER BY q.id DESC LIMIT 1)
                   THEN next_check_at ELSE clock_timestamp() END"""

_SET_BACK = f"check_times = 0, next_check_at = {_AT_ONCE}, parked_at = NULL, reason = NULL"

_RESET = f"UPDATE {{s}}.half_check SET {_SET_BACK} WHERE half_id = %s RETURNING half_id"

# Who holds the lock of a half is deciding it.
_RESET_PARKED = f"""
WITH parked AS MATERIALIZED (
    SELECT half_id FROM {{s}}.half_check
     WHERE parked_at IS NOT NULL AND (%(topic)s::text IS NULL OR topic = %(topic)s)
       AND (%(after)s::uuid IS NULL OR half_id > %(after)s::uuid)
     ORDER BY half_id LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
), reset AS (
    UPDATE {{s}}.half_check SET {_SET_BACK} WHERE half_id IN (SELECT half_id FROM parked)
), recorded AS (
    INSERT INTO {{s}}.audit (actor, action, target, reason)
    SELECT %(actor)s, 'reset', half_id::text, %(reason)s FROM parked
)
SELECT half_id FROM parked ORDER BY half_id
"""

# Without a last answer it is asked once, whatever the counter says.
_ONCE_MORE = f"""
UPDATE {{s}}.half_check
   SET next_check_at = {_AT_ONCE}, parked_at = NULL, reason = NULL, last_answer = NULL
 WHERE half_id = %s
RETURNING half_id
"""

#: Filled in by PostgreSQL's format(): how often, and what came of the last one.
PARK_REASON = "no verdict in %s checks; the last one: %s"
RUNNING = "its transaction is still running"
UNANSWERED = "asked, and no answer came: the worker died or was cut off"


@dataclass(frozen=True, slots=True)
class Question:
    """What a claim must know: how to park (``max_checks``), how long the asker may take (``lease``, in seconds)."""

    max_checks: int
    lease: float
    worker: str


def due(schema: str) -> Statement:
    """Read what is due. Rows: ``(topic, halves to ask a checker about)``; topic NULL: are fenced halves due."""
    return Statement(in_schema(_DUE, schema))


def due_fenced(schema: str, limit: int) -> Statement:
    """Lock fenced halves that are due. Rows: ``(half_id,)``."""
    return Statement(in_schema(_FENCED, schema), (limit,))


def lock(schema: str, half_id: UUID) -> Statement:
    """Lock the check of one half. Rows: ``(topic, fenced)``; none if it is decided."""
    return Statement(in_schema(_LOCK, schema), (half_id,))


def try_fences(schema: str, half_ids: Sequence[UUID], interval: float, worker: str) -> Statement:
    """Roll back the halves whose fence is free. Rows: ``(still running, rolled back)``, one."""
    keys = [fence_key(schema, half_id) for half_id in half_ids]
    return Statement(
        in_schema(_TRY_FENCES, schema),
        {"ids": list(half_ids), "keys": keys, "interval": interval, "worker": worker, "running": RUNNING},
    )


def claim(schema: str, topic: str, limit: int, question: Question) -> Statement:
    """Claim due halves of a topic, and park those whose questions are used up.

    Rows: ``(half_id, claim, history id, key, tag, headers, content_type, body, born_at, age in s, half is gone)``;
    claim NULL: parked.
    """
    return _claim(schema, _DUE_OF_TOPIC, {"topic": topic, "limit": limit}, question)


def claim_this(schema: str, half_id: UUID, question: Question) -> Statement:
    """Claim one half, parked or not, unless its checker is being asked. Rows: as of `claim`."""
    return _claim(schema, _THIS_ONE, {"half_id": half_id}, question)


def _claim(schema: str, which: str, values: dict[str, object], question: Question) -> Statement:
    values |= {
        "max_checks": question.max_checks,
        "lease": question.lease,
        "worker": question.worker,
        "reason": PARK_REASON,
        "unanswered": UNANSWERED,
    }
    return Statement(in_schema(_CLAIM.replace("{due}", which), schema), values)


def answered(
    schema: str, half_id: UUID, history_id: int, answer: str, seconds: float | None, error: str | None
) -> Statement:
    """Record the answer to one question. Rows: one unless the question was closed before."""
    return Statement(
        in_schema(_ANSWER, schema),
        {"half_id": half_id, "id": history_id, "answer": answer, "seconds": seconds, "error": error},
    )


def unknown(
    schema: str,
    half_id: UUID,
    history_id: int,
    claim: int,
    interval: float,
    max_checks: int,
    seconds: float,
    error: str | None,
) -> Statement:
    """Record that there is no verdict, set the next check, or park. Rows: ``(parked,)`` if the claim still stands."""
    return Statement(
        in_schema(_UNKNOWN, schema),
        {
            "half_id": half_id,
            "id": history_id,
            "claim": claim,
            "interval": interval,
            "max_checks": max_checks,
            "answer": "unknown",
            "seconds": seconds,
            "error": error,
            "summary": error.partition("\n")[0] if error else None,
            "reason": PARK_REASON,
        },
    )


def unasked(schema: str, half_id: UUID, claim: int, history_id: int) -> Statement:
    """Give a claim back: nobody was asked."""
    return Statement(in_schema(_UNASKED, schema), {"half_id": half_id, "claim": claim, "id": history_id})


def limit_checker(seconds: float, lock_seconds: float) -> Statement:
    """For this transaction, let no statement take longer, and none wait longer for a lock."""
    return Statement(_LIMITS, (f"{max(int(seconds * 1000), 1)}ms", f"{max(int(lock_seconds * 1000), 1)}ms"))


def hurry(schema: str) -> Statement:
    """Set the next check of all undecided halves to now, but for those that are parked."""
    return Statement(in_schema(_HURRY, schema))


def state(schema: str, half_id: UUID) -> Statement:
    """Read how a half stands.

    Rows: ``(topic, resolution, decided_by, decided_at, has a check, fenced, parked)``; none if there is no such half.
    """
    return Statement(in_schema(_STATE, schema), (half_id,))


def reset(schema: str, half_id: UUID) -> Statement:
    """Set a half's counter back, and its next check to now. Rows: one if it is undecided."""
    return Statement(in_schema(_RESET, schema), (half_id,))


def reset_parked(schema: str, topic: str | None, after: UUID | None, limit: int, actor: str, reason: str) -> Statement:
    """Reset parked halves, ``limit`` at most, above the id ``after``, and record it. Rows: ``(half_id,)``, in order."""
    return Statement(
        in_schema(_RESET_PARKED, schema),
        {"topic": topic, "after": after, "limit": limit, "actor": actor, "reason": reason},
    )


def once_more(schema: str, half_id: UUID) -> Statement:
    """Have a half checked now; a parked one exactly once more. Rows: one if it is undecided."""
    return Statement(in_schema(_ONCE_MORE, schema), (half_id,))
