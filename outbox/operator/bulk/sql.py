"""Build the statements of bulk jobs: they count or write the items, carry them out, end and show them.

A preview and a start evaluate the same `Matched`, so that the items shown are those written, or else a different count
or hash tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import UUID

from outbox.acts.changes import INBOX_STATE, MESSAGE_JOINS, MESSAGE_STATE, ActRequest, MessageStatus
from outbox.database.execute import Row, Statement, statement
from outbox.database.sql import BULK_COUNTS
from outbox.operator.databases import Query
from outbox.operator.look.inbox_sql import GROUPS
from outbox.text import sql_list

# --- the matches of a bulk job ---------------------------------------------------------------------------


#: A query of the matches, and its values: ``place, id, consumer_group, topic, kind, state``. The values ``edge``, a
#: greatest id, and ``until``, a time, bound it to the rows of a moment.
Matched = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class NewBulkJob:
    """A row of `bulk_job`, but for its matches."""

    id: UUID
    request: ActRequest
    selector: Mapping[str, Any]
    rate: float | None
    key: str | None


#: How many of each state come as a sample.
SAMPLE = 5

_HALF_ROW = f"NULL::text AS consumer_group, h.topic, NULL::text AS kind, {MESSAGE_STATE} AS state"

#: Halves by a condition over ``h``, ``o``, ``d`` and ``c`` (`MESSAGE_JOINS`); and those that are undecided.
HALVES = f"""
    SELECT NULL::bigint AS place, h.id, {_HALF_ROW}
      FROM {{s}}.half_message h{MESSAGE_JOINS}
     WHERE ({{where}}) AND (%(edge)s::uuid IS NULL OR h.id <= %(edge)s::uuid)
       AND (%(until)s::timestamptz IS NULL OR h.born_at <= %(until)s::timestamptz)
     LIMIT %(most)s"""
UNDECIDED_HALVES = HALVES.replace("LEFT JOIN {s}.half_check", "JOIN {s}.half_check").replace(
    "{where}", "o.half_id IS NULL AND {where}"
)

#: These halves. What took effect somewhere isn't compensated; only the process that orders it knows other databases.
NAMED_HALVES = f"""
    SELECT place, id, consumer_group, topic, kind,
           CASE WHEN id = ANY (%(delivered)s::uuid[])
                     AND state IN {sql_list(each for each in MessageStatus if each.committed)} THEN 'delivered'
                ELSE state END AS state
      FROM (SELECT w.place, w.id, {_HALF_ROW}
              FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY w (id, place)
              LEFT JOIN {{s}}.half_message h ON h.id = w.id{MESSAGE_JOINS}) n"""

#: Inbox rows ``m`` by a condition.
INBOX = f"""
    SELECT NULL::bigint AS place, m.message_id AS id, m.consumer_group, m.topic, m.error_kind AS kind,
           {INBOX_STATE} AS state
      FROM {{s}}.consumer_message m
     WHERE ({{where}}) AND (%(until)s::timestamptz IS NULL OR m.changed_at <= %(until)s::timestamptz)
     LIMIT %(most)s"""

#: The inbox rows of these groups and messages.
NAMED_INBOX = f"""
    SELECT w.place, w.id, w.consumer_group, m.topic, m.error_kind AS kind,
           CASE WHEN m.message_id IS NULL THEN 'unconsumed' ELSE {INBOX_STATE} END AS state
      FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) WITH ORDINALITY w (consumer_group, id, place)
      LEFT JOIN {{s}}.consumer_message m ON m.consumer_group = w.consumer_group AND m.message_id = w.id"""

_HASH = "hashtextextended(id::text || coalesce('/' || consumer_group, '') || state, 0)"
_COMMON = ", ".join(f"CASE WHEN min({of}) = max({of}) THEN min({of}) END" for of in ("consumer_group", "topic", "kind"))

_SUMMARY = f"""
SELECT state, count(*), sum({_HASH})::text, {_COMMON},
       (array_agg(id ORDER BY id DESC))[1:{SAMPLE}], (array_agg(consumer_group ORDER BY id DESC))[1:{SAMPLE}],
       max(id::text COLLATE "C")::uuid, statement_timestamp(){{more}}
  FROM (SELECT id, state, consumer_group, topic, coalesce(kind, '') AS kind FROM matched) m
 GROUP BY state ORDER BY 2 DESC, 1
"""

_START = f"""
WITH matched AS MATERIALIZED ({{matched}}
), chosen AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY place, id, consumer_group) AS number, matched.*,
           state = ANY (%(able)s::text[]) AS able
      FROM matched WHERE {{chosen}}
), bulk_job AS (
    INSERT INTO {{s}}.bulk_job (id, action, requested_by, reason, options, selector, rate, total, idempotency_key,
                                 origin)
    SELECT %(id)s, %(action)s, %(actor)s, %(reason)s, %(options)s::jsonb, %(selector)s::jsonb, %(rate)s,
           (SELECT count(*) FROM chosen), %(idempotency_key)s, %(origin)s::jsonb
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING id
), item AS (
    INSERT INTO {{s}}.bulk_item (bulk_job_id, number, action, message_id, topic, consumer_group, state, outcome)
    SELECT o.id, c.number, %(action)s, c.id, c.topic, c.consumer_group,
           CASE WHEN able THEN 'pending' ELSE 'skipped' END, CASE WHEN NOT able THEN %(whys)s::jsonb ->> c.state END
      FROM chosen c, bulk_job o
    ON CONFLICT DO NOTHING
    RETURNING 1
){_SUMMARY.replace("{more}", ", (SELECT count(*) FROM chosen), (SELECT count(*) FROM item)")}"""

#: Write down in words what a bulk job does.
DESCRIBE = """
UPDATE {s}.bulk_job SET selector = selector || jsonb_build_object('described', %(described)s::text) WHERE id = %(id)s
"""

#: The messages of inbox rows ``m`` that fit, and the time. Rows: ``(id,)``.
INBOX_IDS = """
SELECT DISTINCT m.message_id
  FROM {s}.consumer_message m
 WHERE ({where}) AND (%(until)s::timestamptz IS NULL OR m.changed_at <= %(until)s::timestamptz)
 LIMIT %(most)s
"""

#: Which of these messages took effect here. Rows: ``(id,)``.
CONSUMED = f"""
WITH RECURSIVE {GROUPS}
SELECT DISTINCT w.id
  FROM unnest(%(ids)s::uuid[]) w (id) CROSS JOIN place p
 WHERE EXISTS (SELECT FROM {{s}}.consumer_message m
                WHERE m.consumer_group = p.consumer_group AND m.message_id = w.id AND m.status = 'consumed')
"""


def summary(schema: str, matched: Matched) -> Statement:
    """Count the matches.

    Rows, one for each state: ``(state, count, hash, common group, topic and kind of error, ids and groups of a sample,
    greatest id, time)``.
    """
    query, values = matched
    return statement(schema, f"WITH matched AS MATERIALIZED ({{matched}}){_SUMMARY}", values, more="", matched=query)


def start(
    schema: str, matched: Matched, new: NewBulkJob, able: Sequence[str], whys: Mapping[str, str], *, all_of_them: bool
) -> Statement:
    """Write a bulk job and its items, unless its key is there; ``all_of_them``: also skipped items, and why.

    Rows as of `summary`, each with ``(items to be, items that were written)``; these differ where the key is there, or
    a message has a compensation already.
    """
    request, (query, bound) = new.request, matched
    values = {
        **bound,
        "able": sorted(able),
        "whys": json.dumps(dict(whys)),
        "id": new.id,
        "action": request.act.name,
        "actor": request.by,
        "reason": request.why,
        "options": json.dumps(dict(request.options)),
        "selector": json.dumps(dict(new.selector)),
        "rate": new.rate,
        "idempotency_key": new.key,
        "origin": json.dumps(dict(request.origin)) if request.origin else None,
    }
    chosen = "true" if all_of_them else "state = ANY (%(able)s::text[])"
    return statement(schema, _START, values, chosen=chosen, matched=query)


# --- how it is carried out -------------------------------------------------------------------------------

#: The oldest bulk jobs of these actions that aren't done; only this one, if one is named.
#: Rows: ``(id, action, requested_by, reason, options, origin, rate, has begun)``.
# Compensations are left to the workers that have them, and acts that only a newer version knows to its workers.
OPEN = """
SELECT id, action, requested_by, reason, options::text, origin::text, rate, started_at IS NOT NULL
  FROM {s}.bulk_job
 WHERE finished_at IS NULL AND action = ANY (%(actions)s::text[]) AND (%(id)s::uuid IS NULL OR id = %(id)s::uuid)
 ORDER BY created_at LIMIT %(limit)s
"""

#: Keep all others from carrying this bulk job out. Rows: one, or none if another one does.
# Only the worker that has this lock carries the bulk job out: it would not see what another one has just done.
LOCK_RATED = "SELECT id FROM {s}.bulk_job WHERE id = %(id)s AND finished_at IS NULL FOR NO KEY UPDATE SKIP LOCKED"

#: How many items may be tried now. Rows: ``(items,)``.
# So many items as the rate has in a second, but one at least, in the time that these may take.
BUDGET = """
SELECT greatest(w.items - (
           SELECT count(*) FROM {s}.bulk_item
            WHERE bulk_job_id = %(id)s AND attempts > 0
              AND changed_at > clock_timestamp() - make_interval(secs => w.items / %(rate)s::float8)), 0)::int
  FROM (SELECT greatest(floor(%(rate)s::float8), 1) AS items) w
"""

#: Lock the next items that are due, but those of others. Rows: ``(number, message, group, attempts)``.
TAKE = """
SELECT number, message_id, consumer_group, attempts
  FROM {s}.bulk_item
 WHERE bulk_job_id = %(id)s AND state = 'pending' AND number > %(after)s AND next_attempt_at <= clock_timestamp()
 ORDER BY number LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED
"""

#: What an item says while it is leased.
_LEASED = "it is being done"

#: Lease items, which are locked, for so many seconds; that counts as a try. Its number is the lease's.
LEASE = f"""
UPDATE {{s}}.bulk_item
   SET attempts = attempts + 1, outcome = '{_LEASED}', changed_at = clock_timestamp(),
       next_attempt_at = clock_timestamp() + make_interval(secs => %(s)s::float8)
 WHERE bulk_job_id = %(id)s AND number = ANY (%(numbers)s::int[])
"""

#: Cancel what a cancelled bulk job has left of its leases.
CANCEL_LEFT = """
UPDATE {s}.bulk_item
   SET state = 'cancelled', changed_at = clock_timestamp()
 WHERE bulk_job_id = %(id)s AND state = 'pending' AND next_attempt_at <= clock_timestamp()
   AND EXISTS (SELECT FROM {s}.bulk_job WHERE id = %(id)s AND cancelled_at IS NOT NULL)
"""

# Of an item whose lease ran out, another process may have a later one. What wasn't acted on has cost no try.
_GIVE_BACK = f"""
UPDATE {{s}}.bulk_item i
   SET attempts = i.attempts - 1, outcome = NULL, next_attempt_at = clock_timestamp()
  FROM unnest(%(numbers)s::int[], %(before)s::int[]) w (number, before)
 WHERE i.bulk_job_id = %(id)s AND i.number = w.number AND i.attempts = w.before + 1
   AND i.state = 'pending' AND i.outcome = '{_LEASED}'
RETURNING i.number
"""

# The range is for the index: of a bulk job that is younger than the statistics, a hash join would else read all items
# for each batch.
_SETTLE = """
UPDATE {s}.bulk_item i
   SET state = w.state, outcome = w.outcome, attempts = i.attempts + 1, changed_at = clock_timestamp(),
       next_attempt_at = clock_timestamp() + make_interval(secs => w.delay)
  FROM unnest(%(numbers)s::int[], %(states)s::text[], %(outcomes)s::text[], %(delays)s::float8[])
       w (number, state, outcome, delay)
 WHERE i.bulk_job_id = %(id)s AND i.number BETWEEN %(first)s AND %(last)s AND i.number = w.number
   AND i.state = 'pending'
"""


class Settled(NamedTuple):
    """What became of an item; one that stays ``pending`` is due again after ``delay`` seconds."""

    number: int
    state: str
    outcome: str
    delay: float = 0.0


def settle(schema: str, bulk_job_id: UUID, items: Sequence[Settled]) -> Statement:
    """Write what became of items, which are locked, and count the attempt."""
    numbers, states, outcomes, delays = map(list, zip(*items, strict=True))
    values: dict[str, Any] = {"numbers": numbers, "states": states, "outcomes": outcomes, "delays": delays}
    values |= {"id": bulk_job_id, "first": min(numbers), "last": max(numbers)}
    return replace(statement(schema, _SETTLE, values), lossy=("outcomes",))


#: Lock a bulk job. Rows: ``(finished_at, cancelled_at)`` or none.
LOCK = "SELECT finished_at, cancelled_at FROM {s}.bulk_job WHERE id = %(id)s FOR UPDATE"

#: Cancel the open items of a bulk job, which is locked. Rows: ``(number,)``.
# A compensation that has begun has quarantined the message at consumers: a worker releases it there, and ends the item.
# What is leased ends as it ends: it may be done by now.
CANCEL = f"""
WITH marked AS (
    UPDATE {{s}}.bulk_job SET cancelled_at = clock_timestamp(), cancelled_by = %(actor)s WHERE id = %(id)s
)
UPDATE {{s}}.bulk_item
   SET state = 'cancelled', changed_at = clock_timestamp()
 WHERE bulk_job_id = %(id)s AND state = 'pending' AND (action <> 'compensate' OR attempts = 0)
   AND outcome IS DISTINCT FROM '{_LEASED}'
RETURNING number
"""


def give_back(schema: str, bulk_job_id: UUID, leased: Sequence[Row]) -> Statement:
    """Give leased items back, rows of `TAKE`. Rows: ``(number,)`` of those whose lease isn't another one's by now."""
    numbers, before = [row[0] for row in leased], [row[3] for row in leased]
    return statement(schema, _GIVE_BACK, {"id": bulk_job_id, "numbers": numbers, "before": before})


# --- how it is shown -------------------------------------------------------------------------------------

# A finished bulk job has its counts in its row. A compensation is begun by its first attempt.
_ROWS = f"""
-- id action requested_by reason options:json described rate total counts:json created_at started_at finished_at \
cancelled_at cancelled_by state
SELECT id, action, requested_by, reason, options::text, coalesce(selector ->> 'described', action), rate, total,
       coalesce(selector -> 'counts', {BULK_COUNTS})::text AS counts, created_at, began, finished_at, cancelled_at,
       cancelled_by, state
  FROM (SELECT p.*, b.began,
               CASE WHEN p.cancelled_at IS NOT NULL THEN 'cancelled'
                    WHEN p.finished_at IS NULL THEN CASE WHEN b.began IS NULL THEN 'waiting' ELSE 'running' END
                    WHEN (p.selector -> 'counts' ->> 'done')::int = p.total THEN 'done'
                    ELSE 'partly' END AS state
          FROM {{s}}.bulk_job p
         CROSS JOIN LATERAL (
               SELECT CASE WHEN p.started_at IS NULL AND p.action = 'compensate'
                           THEN (SELECT p.created_at FROM {{s}}.bulk_item i
                                  WHERE i.bulk_job_id = p.id AND i.attempts > 0 LIMIT 1)
                           ELSE p.started_at END AS began) b) p"""

#: Bulk jobs, the newest first, below an id.
LIST = Query(f"""{_ROWS}
 WHERE (%(after)s::uuid IS NULL OR id < %(after)s::uuid) AND (%(state)s::text IS NULL OR state = %(state)s)
 ORDER BY id DESC LIMIT %(limit)s
""")

#: A bulk job, or none.
ONE = Query(f"{_ROWS} WHERE id = %(id)s")

#: Find a bulk job. Rows: one, or none.
IS_THERE = "SELECT id FROM {s}.bulk_job WHERE id = %(id)s"

#: The bulk jobs that a message was in, 100 at most.
OF_MESSAGE = Query(f"""{_ROWS}
 WHERE id IN (SELECT bulk_job_id FROM {{s}}.bulk_item WHERE message_id = %(id)s LIMIT 100) ORDER BY created_at
""")

#: The bulk job with an idempotency key.
BY_KEY = """
SELECT id, action, requested_by, reason, options::text, selector::text, rate
  FROM {s}.bulk_job WHERE idempotency_key = %(key)s
"""

#: Items of a bulk job in their order, above a number. Rows: the fields of `BulkItem`.
ITEMS = """
SELECT number, action, message_id, topic, consumer_group, state, outcome, attempts, changed_at
  FROM {s}.bulk_item
 WHERE bulk_job_id = %(id)s AND number > %(after)s AND (%(state)s::text IS NULL OR state = %(state)s)
 ORDER BY number LIMIT %(limit)s
"""
