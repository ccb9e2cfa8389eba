"""Statements of the check: which halves are due, which worker asks, which answers came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from uuid import UUID

from outbox.database.decision import fence_key
from outbox.database.execute import Statement, Template
from outbox.database.sql import jumps

# A topic that no checker can be asked about costs the others nothing, however many of its halves are due.
#: The topics that have halves to be checked, as ``known``.
KNOWN_TOPICS = "\nWITH RECURSIVE " + jumps("known", "{s}.half_check", "topic", where="parked_at IS NULL")

#: Read which topics are due to an ``asker``; None: to checkers of applications. Rows: ``(topic, halves to ask about)``;
#: topic NULL: are fenced halves due.
due: Template = Template(
    KNOWN_TOPICS
    + """
SELECT NULL, EXISTS (SELECT FROM {s}.half_check WHERE fenced AND parked_at IS NULL
                        AND next_check_at <= statement_timestamp())
 UNION ALL
SELECT topic, EXISTS (SELECT FROM {s}.half_check c WHERE c.topic = known.topic AND c.parked_at IS NULL AND NOT c.fenced
                         AND c.next_check_at <= statement_timestamp() AND c.asker IS NOT DISTINCT FROM %(asker)s)
  FROM known
"""
)

#: Lock fenced halves that are due. Rows: ``(half_id,)``.
due_fenced: Template = Template("""
SELECT half_id FROM {s}.half_check
 WHERE fenced AND parked_at IS NULL AND next_check_at <= statement_timestamp()
 ORDER BY next_check_at LIMIT %s
   FOR UPDATE SKIP LOCKED
""")

#: Lock the check of one half. Rows: ``(topic, fenced, asker)``; none if it is decided.
lock: Template = Template("SELECT topic, fenced, asker FROM {s}.half_check WHERE half_id = %s FOR UPDATE")

# Safe whatever this statement's snapshot shows: a business transaction that committed after it was taken has its op in
# the index, where the insert finds it; one that begins after its fence was found free finds our op when it commits.
_TRY_FENCES = Template("""
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
    RETURNING topic
), running AS (
    UPDATE {s}.half_check c
       SET next_check_at = clock_timestamp() + make_interval(secs => %(interval)s), last_answer = 'unknown',
           last_error = %(running)s, checked_at = clock_timestamp()
     WHERE half_id IN (SELECT half_id FROM tried WHERE NOT free)
    RETURNING topic
), counted AS (
    INSERT INTO {s}.topic_total (topic, checks)
    SELECT topic, count(*) FROM (SELECT topic FROM ended UNION ALL SELECT topic FROM running) t GROUP BY topic
), history AS (
    INSERT INTO {s}.check_history (half_id, asked, worker, answer, error)
    SELECT t.half_id, 'fence', %(worker)s, CASE WHEN d.half_id IS NULL THEN 'unknown' ELSE 'rollback' END,
           CASE WHEN NOT free THEN %(running)s WHEN d.half_id IS NULL THEN 'decided meanwhile' END
      FROM tried t LEFT JOIN decided d ON d.half_id = t.half_id
)
SELECT count(*) FILTER (WHERE NOT free), (SELECT count(*) FROM decided) FROM tried
""")

# A half that is due and may still be asked about is leased until the lease ends: the question counts from now on, also
# if it kills the worker that asks. One that has used up its questions (the last one was never answered) is parked,
# unless an operator wants it asked once more. A check that is left of a decided half goes: its decider may not have
# seen the check, in a snapshot that is older than a rewrite of the table.
_LEASE = """
WITH found AS MATERIALIZED ({due}
), due AS MATERIALIZED (
    SELECT * FROM found f WHERE NOT EXISTS (SELECT FROM {s}.op_message o WHERE o.half_id = f.half_id)
), ended AS (
    DELETE FROM {s}.half_check
     WHERE half_id IN (SELECT half_id FROM found) AND half_id NOT IN (SELECT half_id FROM due)
), spent AS (
    UPDATE {s}.half_check c
       SET parked_at = clock_timestamp(),
           reason = format(%(reason)s, c.check_times, coalesce(split_part(c.last_error, E'\\n', 1), 'unknown'))
      FROM due d WHERE c.half_id = d.half_id AND d.check_times >= %(max_checks)s AND NOT d.wanted
    RETURNING c.half_id, c.check_times, c.reason
), leased AS (
    UPDATE {s}.half_check c
       SET check_times = c.check_times + 1, checked_at = clock_timestamp(), last_answer = 'unknown',
           next_check_at = clock_timestamp() + make_interval(secs => %(lease)s), last_error = %(unanswered)s
      FROM due d WHERE c.half_id = d.half_id AND (d.check_times < %(max_checks)s OR d.wanted)
    RETURNING c.half_id, c.check_times, c.topic
), asked AS (
    INSERT INTO {s}.check_history (half_id, asked, worker) SELECT half_id, 'checker', %(worker)s FROM leased
    RETURNING half_id, id
), counted AS (
    INSERT INTO {s}.topic_total (topic, checks) SELECT topic, count(*) FROM leased GROUP BY topic
)
SELECT c.half_id, c.check_times, a.id, h.key, h.tag, h.headers::text, h.content_type, h.body, h.born_at,
       extract(epoch FROM clock_timestamp() - h.born_at)::float8, h.id IS NULL
  FROM leased c JOIN asked a ON a.half_id = c.half_id
  LEFT JOIN LATERAL (SELECT * FROM {s}.half_message h WHERE h.id = c.half_id OFFSET 0) h ON true
 UNION ALL
SELECT half_id, NULL, check_times, reason, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM spent
"""

_DUE_OF_TOPIC = """
    SELECT half_id, check_times, last_answer IS NULL AS wanted FROM {s}.half_check
     WHERE topic = %(topic)s AND parked_at IS NULL AND NOT fenced AND next_check_at <= statement_timestamp()
       AND asker IS NOT DISTINCT FROM %(asker)s
     ORDER BY next_check_at LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED"""
_LEASE_OF_TOPIC = Template(_LEASE.replace("{due}", _DUE_OF_TOPIC))

# Asked by hand, parked or not: only not while a checker is being asked. The caller holds the lock already: the snapshot
# of a statement that waits for it wouldn't show the question for which it waited.
_THIS_ONE = """
    SELECT half_id, check_times, true AS wanted FROM {s}.half_check c
     WHERE half_id = %(half_id)s AND NOT fenced AND asker IS NOT DISTINCT FROM %(asker)s
       AND NOT EXISTS (SELECT FROM {s}.check_history a
                        WHERE a.half_id = c.half_id AND a.asked = 'checker' AND a.answer IS NULL
                          AND a.asked_at > clock_timestamp() - make_interval(secs => %(lease)s))
       FOR UPDATE"""
_LEASE_THIS = Template(_LEASE.replace("{due}", _THIS_ONE))

# A question is closed when it is answered or given up, and when another one is put: no later answer to it counts.
_ANSWER = """
UPDATE {s}.check_history q SET answer = %(answer)s, seconds = %(seconds)s, error = %(error)s
 WHERE half_id = %(half_id)s AND id = %(id)s AND answer IS NULL
   AND NOT EXISTS (SELECT FROM {s}.check_history later WHERE later.half_id = q.half_id AND later.id > q.id)
RETURNING half_id"""
#: Record the answer to one question. Rows: one unless the question was closed before.
answered: Template = Template(_ANSWER, lossy=("error",))

# Of the lease that was answered only: another one meanwhile has raised the counter, and wins; a reset has lowered it.
# A parked half stays so when it was asked about by hand. The transaction that holds the lock is deciding, and may take
# its time: if it leaves the half undecided after all, the lease ends by itself.
#: Record that there is no verdict, set the next check, or park. Rows: ``(parked, reason, checks)`` if the lease
#: still stands.
unknown: Template = Template(
    f"""
WITH closed AS ({_ANSWER}
), mine AS MATERIALIZED (
    SELECT half_id FROM {{s}}.half_check WHERE half_id = %(half_id)s AND check_times <= %(checks)s
       FOR UPDATE SKIP LOCKED
)
UPDATE {{s}}.half_check
   SET next_check_at = clock_timestamp() + make_interval(secs => %(interval)s), last_error = %(error)s,
       parked_at = coalesce(parked_at, CASE WHEN check_times >= %(max_checks)s THEN clock_timestamp() END),
       reason = coalesce(reason, CASE WHEN check_times >= %(max_checks)s
                                      THEN format(%(reason)s, check_times,
                                                  coalesce(split_part(%(error)s, E'\\n', 1), 'unknown')) END)
 WHERE half_id IN (SELECT half_id FROM mine) AND half_id IN (SELECT half_id FROM closed)
RETURNING parked_at IS NOT NULL, reason, check_times
""",
    lossy=("error",),
)

#: Give a lease back: no checker was asked.
unasked: Template = Template("""
WITH mine AS MATERIALIZED (
    SELECT half_id FROM {s}.half_check WHERE half_id = %(half_id)s AND check_times = %(checks)s
       FOR UPDATE SKIP LOCKED
), asked AS (
    DELETE FROM {s}.check_history WHERE half_id IN (SELECT half_id FROM mine) AND id = %(id)s
), given_back AS (
    UPDATE {s}.half_check SET check_times = check_times - 1, next_check_at = clock_timestamp(), last_answer = NULL
     WHERE half_id IN (SELECT half_id FROM mine)
    RETURNING topic
)
INSERT INTO {s}.topic_total (topic, checks) SELECT topic, -1 FROM given_back
""")

#: Set the next check of all undecided halves to now, but for those that are parked.
hurry: Template = Template("UPDATE {s}.half_check SET next_check_at = statement_timestamp() WHERE parked_at IS NULL")

# At once, but not while a checker is being asked: not before that lease ends.
_AT_ONCE = """CASE WHEN (SELECT q.answer IS NULL FROM {s}.check_history q
                         WHERE q.half_id = half_check.half_id ORDER BY q.id DESC LIMIT 1)
                   THEN next_check_at ELSE clock_timestamp() END"""

_SET_BACK = f"check_times = 0, next_check_at = {_AT_ONCE}, parked_at = NULL, reason = NULL"

#: Set a half's counter back, and its next check to now. Rows: one if it is undecided.
reset: Template = Template(f"UPDATE {{s}}.half_check SET {_SET_BACK} WHERE half_id = %s RETURNING half_id")

# Without a last answer it is asked once, whatever the counter says.
#: Have a half checked now; a parked one exactly once more. Rows: one if it is undecided.
once_more: Template = Template(f"""
UPDATE {{s}}.half_check
   SET next_check_at = {_AT_ONCE}, parked_at = NULL, reason = NULL, last_answer = NULL
 WHERE half_id = %s
RETURNING half_id
""")

#: Filled in by PostgreSQL's format(): how often, and what came of the last one.
PARK_REASON = "no verdict in %s checks; the last one: %s"
RUNNING = "its transaction is still running"
UNANSWERED = "asked, and no answer came: the worker died or was cut off"
_TEXTS = {"reason": PARK_REASON, "unanswered": UNANSWERED}


@dataclass(frozen=True, slots=True)
class Question:
    """What a lease must know: how to park (``max_checks``), how long the asker may take (``lease``, in seconds).

    ``asker`` is whose halves are leased, if they aren't those of the checkers of applications.
    """

    max_checks: int
    lease: float
    worker: str
    asker: str | None = None


def try_fences(schema: str, half_ids: Sequence[UUID], interval: float, worker: str) -> Statement:
    """Roll back the halves whose fence is free. Rows: ``(still running, rolled back)``, one."""
    keys = [fence_key(schema, half_id) for half_id in half_ids]
    return _TRY_FENCES(schema, ids=list(half_ids), keys=keys, interval=interval, worker=worker, running=RUNNING)


def lease(schema: str, topic: str, limit: int, question: Question) -> Statement:
    """Lease due halves of a topic, and park those whose questions are used up.

    Rows: ``(half_id, checks, history id, key, tag, headers, content_type, body, born_at, age in s, half is gone)``;
    checks NULL: parked, and then the next two are how often it was asked, and the reason.
    """
    return _LEASE_OF_TOPIC(schema, topic=topic, limit=limit, **_TEXTS, **asdict(question))


def lease_this(schema: str, half_id: UUID, question: Question) -> Statement:
    """Lease one half, parked or not, unless its checker is being asked. Rows: as of `lease`."""
    return _LEASE_THIS(schema, half_id=half_id, **_TEXTS, **asdict(question))
