"""Statements of the producer: half messages with their checks and ops, and the counts of flow control.

Flow control finds the topics that have reached a limit, at a cost that doesn't grow with the messages waiting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from uuid import UUID

from outbox.database.duty import DECIDE, SEND, Duty
from outbox.database.execute import Statement, Template, in_schema
from outbox.database.sql import jumps
from outbox.message.content import SENDER_HEADER
from outbox.message.model import HalfMessage, Preparation
from outbox.text import process_name

_HALF = "id, producer_group, topic, key, tag, headers, content_type, body, deliver_at"

# One message a transaction is the common case, and scalars cost the client much less than arrays of one.
_SEND_ONE = """
WITH half AS (
    INSERT INTO {s}.half_message (id, producer_group, topic, key, tag, headers, content_type, body, sender)
    VALUES (%(id)b, %(producer_group)s, %(topic)s, %(key)s, %(tag)s, %(headers)s::text::jsonb, %(content_type)s,
            %(body)b, %(sender)s)
)
INSERT INTO {s}.op_message (half_id, resolution, decided_by) VALUES (%(id)b, 'commit', 'producer')
"""

# The op is written by a trigger, at the COMMIT.
_SEND_LATE = f"""
INSERT INTO {{s}}.half_message (sender, queue, {_HALF}, at_commit)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s::text::jsonb, %s, %s,
        coalesce(%s::timestamptz, clock_timestamp() + make_interval(secs => %s)), true)
"""

_SENT_COLUMNS = (
    """id, producer_group, topic, key, tag, headers, content_type, body, deliver_at, delay, fenced, immunity, asker"""
)
_ARRAYS = """%b::uuid[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::text[],
                         %b::bytea[], %s::timestamptz[], %s::float8[], %s::bool[], %s::float8[], %s::text[]"""


_INSERT = f"""
    INSERT INTO {{s}}.half_message (sender, queue, {_HALF})
    SELECT sender, queue, id, producer_group, topic, key, tag, headers::jsonb, content_type, body,
           coalesce(deliver_at, clock_timestamp() + make_interval(secs => delay))
      FROM given"""


_UNCHECKED = """, unchecked AS (
    INSERT INTO {s}.half_check (half_id, topic, fenced, next_check_at, asker)
    SELECT id, topic, fenced, clock_timestamp() + make_interval(secs => immunity), asker FROM given
     WHERE fenced IS NOT NULL{and_new}
)"""
#: Not of a message that is to be sent once, and is there.
_AND_NEW = " AND (NOT once OR id IN (SELECT id FROM first))"


_SEND = f"""
WITH given AS (
    SELECT %s::text AS sender, * FROM unnest(%s::int[], {_ARRAYS})
    WITH ORDINALITY AS g (queue, {_SENT_COLUMNS}, number)
), half AS ({_INSERT} ORDER BY number
){_UNCHECKED.replace("{and_new}", "")}
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by)
SELECT id, 'commit', 'producer' FROM given WHERE fenced IS NULL ORDER BY number
"""


# Messages to be sent once are inserted in the order of the ids: two transactions that send the same can't wait for each
# other. Ops have the order of the sends. Without a conflict target, so that it needs no right to read more than the id.
_SEND_ONCE = f"""
WITH given AS MATERIALIZED (
    SELECT %s::text AS sender, * FROM unnest(%s::bool[], %s::int[], {_ARRAYS})
    WITH ORDINALITY AS g (once, queue, {_SENT_COLUMNS}, number)
), first AS ({_INSERT} WHERE once ORDER BY id
    ON CONFLICT DO NOTHING RETURNING id
), half AS ({_INSERT} WHERE NOT once ORDER BY number
){_UNCHECKED.replace("{and_new}", _AND_NEW)}, op AS (
    INSERT INTO {{s}}.op_message (half_id, resolution, decided_by)
    SELECT id, 'commit', 'producer' FROM given WHERE fenced IS NULL{_AND_NEW} ORDER BY number
)
SELECT id FROM given WHERE once AND id NOT IN (SELECT id FROM first)
"""

# A call has one half, and raises once. Without a conflict target, so that it needs no right to read the table.
#: Store with a half what its function raised: ``half_id``, ``kind`` and ``error``.
store_error: Template = Template(
    """
INSERT INTO {s}.half_error (half_id, error_kind, error) VALUES (%(half_id)s, %(kind)s, %(error)s)
ON CONFLICT DO NOTHING
""",
    lossy=("kind", "error"),
)

#: At most so many ops are looked at. While more are undispatched, counts are estimates from so many of them.
SAMPLED = 2_000
#: An estimate stands on at least so many ops of the topic that were found.
FOUND = 10
SAMPLE: Mapping[str, int] = {"looked_at": SAMPLED, "found": FOUND}

# As `plan_by_index` of the passes, and why: outbox/database/sql.py. But here the transaction is the caller's, whose
# deferred triggers have yet to run: their settings are kept under names of ours, and set again.
_PLANNER = "unnest('{enable_seqscan,enable_bitmapscan,jit}'::text[]) name"

# A snapshot shows a table as empty that was truncated since. Its catalog has the file of before, the function the new.
#: Have the planner use indexes until `PLAN_BACK`. Rows: ``(…, …, can count)``, all alike; a REPEATABLE READ transaction
#: can't count if its snapshot is older than ``seconds``, or than a table's truncation.
plan_by_index_until_back: Template = Template(f"""
SELECT set_config('outbox.' || name, current_setting(name), true), set_config(name, 'off', true),
       CASE WHEN current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            THEN clock_timestamp() < transaction_timestamp() + make_interval(secs => %(seconds)s)
                 AND NOT EXISTS (SELECT FROM pg_class c
                                  WHERE relnamespace = '{{s}}'::regnamespace AND relkind = 'r'
                                    AND relfilenode IS DISTINCT FROM pg_relation_filenode(c.oid))
            ELSE true END
  FROM {_PLANNER}
""")

#: Have the planner work as before `plan_by_index_until_back`.
PLAN_BACK: Statement = Statement(f"SELECT set_config(name, current_setting('outbox.' || name), true) FROM {_PLANNER}")

# Backwards: decided halves are dead in the index until a vacuum can take them, and mostly older than those that wait.
_TOPICS = jumps("known", "{s}.half_check", "topic", where="parked_at IS NULL", then=["next_check_at"], backwards=True)
#: Find topics with ``least`` undecided halves at least, parked ones aside, counted to ``limit`` in each.
#: Rows: ``(topic, halves)``.
undecided: Template = Template(f"""
WITH RECURSIVE {_TOPICS}, counted AS MATERIALIZED (
    SELECT topic, (SELECT count(*) FROM (SELECT FROM {{s}}.half_check c
                    WHERE c.topic = known.topic AND c.parked_at IS NULL
                    ORDER BY c.next_check_at DESC LIMIT %(limit)s) w) AS waiting
      FROM known
)
SELECT topic, waiting FROM counted WHERE waiting >= %(least)s
""")

# Ops have no topic, but a sequence without large gaps: between the last one that is surely dispatched and the newest,
# one is drawn at random from each of at most LOOKED_AT stretches of equal length; each one found stands for a stretch.
# Up to that many, a stretch is one op, and the count exact.
#
# The cursor: outbox/dispatch/dispatch_pass.py. Ops of before its snapshot have a lower sequence than those after, and
# of those before, the ones with the highest xids are about the newest. Where they tell nothing (in flight then, pruned
# since, of another cluster), the stretches begin earlier: dispatched ops among them are looked at, and not counted.
#
# Subqueries in the select list are looked up row by row, by index, whatever the planner believes.
#: Find topics with ``least`` committed ops at least that are no message yet. Rows: ``(topic, ops)``.
#:
#: Looks at ``looked_at`` ops of all topics together at most (`SAMPLED`). While no more than that wait, the numbers are
#: exact, but for transactions that were committing at the very moment of a dispatch. Else they are estimates, and a
#: topic is only found if it has about ``found / looked_at`` of the ops that wait (`FOUND`).
undispatched: Template = Template("""
WITH cursor AS MATERIALIZED (
    SELECT next_xid, in_flight, after_sequence, base_sequence
      FROM (SELECT * FROM {s}.dispatch_cursor ORDER BY id DESC LIMIT 1) c
     WHERE system_identifier = (SELECT system_identifier FROM pg_control_system())
), dispatched AS MATERIALIZED (
    SELECT coalesce(after_sequence, nullif(greatest(
           (SELECT max(sequence) FROM (SELECT sequence, xid FROM {s}.op_message
                                        WHERE xid < next_xid ORDER BY xid DESC LIMIT 100) o
             WHERE xid <> ALL (in_flight)),
           (SELECT max(sequence) FROM (SELECT sequence FROM {s}.op_message
                                        WHERE xid < in_flight[1] ORDER BY xid DESC LIMIT 100) o),
           base_sequence), 0)) AS until
      FROM cursor
), stretch AS MATERIALIZED (
    SELECT first, last, (last - first) / %(looked_at)s + 1 AS length
      FROM (SELECT coalesce((SELECT until FROM dispatched) + 1,
                            (SELECT sequence FROM {s}.op_message ORDER BY sequence LIMIT 1)) AS first,
                   (SELECT sequence FROM {s}.op_message ORDER BY sequence DESC LIMIT 1) AS last) s
     WHERE last - first + 1 >= %(least)s
), drawn AS MATERIALIZED (
    SELECT begin + floor(random() * length)::bigint AS sequence
      FROM stretch, generate_series(first, last, length) begin
), op AS MATERIALIZED (
    SELECT (SELECT o.half_id FROM {s}.op_message o WHERE o.sequence = drawn.sequence AND o.resolution = 'commit') AS id
      FROM drawn
), waiting AS MATERIALIZED (
    SELECT CASE WHEN (SELECT m.position FROM {s}.message m WHERE m.half_id = op.id LIMIT 1) IS NULL
                 AND (SELECT d.deliver_at FROM {s}.scheduled_message d WHERE d.half_id = op.id) IS NULL
                THEN (SELECT h.topic FROM {s}.half_message h WHERE h.id = op.id) END AS topic
      FROM op WHERE id IS NOT NULL
)
SELECT topic, count(*) * length
  FROM waiting, stretch
 WHERE topic IS NOT NULL
 GROUP BY topic, length
HAVING count(*) * length >= %(least)s AND (length = 1 OR count(*) >= %(found)s)
""")

#: Read how many queues topics have. Rows: ``(topic, queues)``, none for one that wasn't used or declared yet.
queues_of: Template = Template("SELECT name, queues FROM {s}.topic WHERE name = ANY (%s)")


def write_halves(schema: str, halves: Sequence[tuple[HalfMessage, Preparation | None]]) -> Statement:
    """Write all half messages of a transaction: sent ones with their op(commit), prepared ones with their check."""
    if len(halves) == 1 and halves[0][1] is None and (values := _plain_values(halves[0][0])) is not None:
        return Statement(in_schema(_SEND_ONE, schema), values)
    rows = [(half.queue, *_sent_values(half, prep)) for half, prep in halves]
    return Statement(in_schema(_SEND, schema), [_sender(os.getpid()), *map(list, zip(*rows, strict=True))])


def write_once(
    schema: str, halves: Sequence[tuple[HalfMessage, Preparation | None]], once: Collection[UUID]
) -> Statement:
    """Do as `write_halves`, but leave out those of ``once`` whose id is there already. Rows: ``(id,)`` of these.

    It waits for transactions that are sending the same.
    """
    rows = [(half.id in once, half.queue, *_sent_values(half, prep)) for half, prep in halves]
    return Statement(in_schema(_SEND_ONCE, schema), [_sender(os.getpid()), *map(list, zip(*rows, strict=True))])


def write_late(schema: str, half: HalfMessage, *, once: bool = False) -> Statement:
    """Write a half message before the COMMIT, which then draws the sequence of its op(commit).

    ``once``: unless its id is there already. Rows: ``(id,)`` if it was written.
    """
    sql = f"{_SEND_LATE}ON CONFLICT DO NOTHING RETURNING id" if once else _SEND_LATE
    return Statement(in_schema(sql, schema), (_sender(os.getpid()), half.queue, *_columns(half)))


def _sent_values(half: HalfMessage, preparation: Preparation | None) -> tuple[object, ...]:
    """Return the values of `_SENT_COLUMNS`."""
    if preparation is None:
        return *_columns(half), None, None, None
    return *_columns(half), preparation.fenced, preparation.immunity, preparation.asker


def _columns(half: HalfMessage) -> tuple[object, ...]:
    """Return the values of `_HALF`, and the delay."""
    names = half.producer_group, half.topic, half.key, half.tag
    return half.id, *names, _headers(half), half.content_type, half.body, half.deliver_at, half.delay


def _plain_values(half: HalfMessage) -> dict[str, object] | None:
    """Return the values of `_SEND_ONE`; None for a message that comes to a queue of its own, or later."""
    if half.queue is not None or half.deliver_at is not None or half.delay is not None:
        return None
    return {
        "id": half.id,
        "producer_group": half.producer_group,
        "topic": half.topic,
        "key": half.key,
        "tag": half.tag,
        "headers": _headers(half),
        "content_type": half.content_type,
        "body": half.body,
        "sender": _sender(os.getpid()),
    }


def _headers(half: HalfMessage) -> str | None:
    own = {name: value for name, value in half.headers.items() if name != SENDER_HEADER}
    return json.dumps(own, ensure_ascii=False) if own else None


@cache
def _sender(_pid: int) -> str:
    """Return the name of this process, of which a fork has another one."""
    return process_name()


DUTIES = (
    Duty(
        "send",
        "Writes half messages and ops with the transactions of an application.",
        f"""
        producer: producer
        {SEND}
        SELECT(id) INSERT UPDATE(seen_at) ON producer_process
        """,
    ),
    Duty(
        "decide",
        "Decides prepared halves.",
        f"""
        producer: producer
        {DECIDE}
        INSERT ON half_error
        """,
    ),
)
