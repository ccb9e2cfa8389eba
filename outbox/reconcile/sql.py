"""Statements that read what a reconciliation compares: rows of id ranges, and digests of many ranges at once.

They join nothing that needn't be joined: the digests of halves, ops and messages are made table by table, and what
must hold between them is checked by `plan`, which reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.consumer.sql import MATCHES
from outbox.consumer.subscription import filter_of
from outbox.database.engines import SERVER_KEEP_ALIVE
from outbox.database.execute import Statement, Template, statement
from outbox.database.sql import SKIPPED, TOOK_EFFECT, message_status, open_rows
from outbox.database.tables import SEGMENTED
from outbox.message.model import Status
from outbox.reconcile.job import FIRST_ID, Effect, Pair, Part, Range
from outbox.reconcile.tables import InboxState, ProducerState

_STATE = message_status(
    is_message="m.half_id IS NOT NULL", value=lambda status: str(ProducerState[status.upper()].value)
)
_STATUS = " ".join(f"WHEN '{each}' THEN {InboxState.of(each).value}" for each in Status)

# How the rows contradict each other, numbered as `outbox.reconcile.tables.Torn`. Older sends are few, and looked up.
_TORN = """CASE WHEN h.id IS NULL THEN CASE WHEN m.half_id IS NULL THEN 2 ELSE 1 END
            WHEN m.half_id IS NULL THEN 0
            WHEN o.resolution = 'rollback' THEN 3
            WHEN o.half_id IS NULL THEN 4
            WHEN m.topic <> h.topic OR m.send_number > 1 AND EXISTS (
                 SELECT FROM {s}.message n WHERE n.half_id = h.id AND n.topic <> h.topic) THEN 5
            ELSE 0 END"""

# Each part is bounded by itself: the planner doesn't carry a range over from one table to another. Of a topic is also
# what has no half to tell its topic, unless its message tells another one.
_PRODUCER = f"""
SELECT p.id,
       CASE WHEN h.id IS NULL AND m.half_id IS NOT NULL THEN {ProducerState.DISPATCHED.value}
            ELSE {_STATE} END::int2 AS state,
       coalesce(m.send_number, 0)::int2 AS sends, coalesce(m.queue, 0) AS queue, coalesce(m.position, 0) AS position,
       coalesce(m.visible_at, d.recalled_at, d.deliver_at, o.decided_at, h.born_at) AS at,
       coalesce(h.body_digest, '') AS digest, h.id IS NULL OR coalesce({MATCHES}, false) AS addressed,
       c.half_id IS NOT NULL AS compensated, (-1)::int2 AS opinion, {_TORN}::int2 AS torn
  FROM (SELECT * FROM {{s}}.half_message h WHERE {{h.id}}) h
  FULL JOIN (SELECT * FROM {{s}}.op_message o WHERE {{o.half_id}}) o ON o.half_id = h.id
  FULL JOIN (SELECT DISTINCT ON (half_id) * FROM {{s}}.message m WHERE {{m.half_id}}
              ORDER BY half_id, send_number DESC) m ON m.half_id = coalesce(h.id, o.half_id)
 CROSS JOIN LATERAL (SELECT coalesce(h.id, o.half_id, m.half_id)) p (id)
  LEFT JOIN (SELECT * FROM {{s}}.scheduled_message d WHERE {{d.half_id}}) d ON d.half_id = p.id
  LEFT JOIN (SELECT * FROM {{s}}.compensation c WHERE {{c.half_id}}) c ON c.half_id = p.id
 WHERE h.topic = %(topic)s OR m.topic = %(topic)s OR h.id IS NULL AND m.half_id IS NULL
"""

# The same, table by table. Odd is what contradicts itself, was sent more than once, is scheduled, or was compensated;
# of the others all but few were sent, or rolled back.
_RAW: Mapping[str, str] = {
    "halves": f"""
SELECT h.id, h.body_digest AS digest, coalesce({MATCHES}, false) AS addressed
  FROM {{s}}.half_message h WHERE h.topic = %(topic)s AND {{h.id}}
""",
    "messages": """
SELECT m.half_id AS id, m.queue, m.position, m.visible_at AS at
  FROM {s}.message m WHERE m.topic = %(topic)s AND m.send_number = 1 AND {m.half_id}
""",
    "rolled back": """
SELECT o.half_id AS id, o.decided_at AS at FROM {s}.op_message o WHERE o.resolution = 'rollback' AND {o.half_id}
""",
    # What the sums of hashes say is the same isn't joined.
    "odd": """
WITH half AS MATERIALIZED (
    SELECT count(*) AS n, sum(uuid_hash_extended(h.id, 0)) AS hashes FROM {s}.half_message h WHERE {h.id}
), op AS MATERIALIZED (
    SELECT count(*) AS n, sum(uuid_hash_extended(o.half_id, 0)) AS hashes,
           count(*) FILTER (WHERE o.resolution = 'commit') AS commits,
           sum(uuid_hash_extended(o.half_id, 0)) FILTER (WHERE o.resolution = 'commit') AS commit_hashes
      FROM {s}.op_message o WHERE {o.half_id}
), sent AS MATERIALIZED (
    SELECT count(*) FILTER (WHERE m.send_number = 1) AS n, count(*) FILTER (WHERE m.send_number > 1) AS again,
           sum(uuid_hash_extended(m.half_id, 0)) FILTER (WHERE m.send_number = 1) AS hashes
      FROM {s}.message m WHERE {m.half_id}
)
SELECT o.half_id AS id FROM {s}.op_message o
 WHERE {o.half_id} AND (SELECT (half.n, half.hashes) IS DISTINCT FROM (op.n, op.hashes) FROM half, op)
   AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = o.half_id AND {h.id})
 UNION ALL
SELECT m.half_id FROM {s}.message m
 WHERE {m.half_id}
   AND (SELECT (op.commits, op.commit_hashes) IS DISTINCT FROM (sent.n, sent.hashes) FROM op, sent)
   AND NOT EXISTS (SELECT FROM {s}.op_message o WHERE o.half_id = m.half_id AND o.resolution = 'commit' AND {o.half_id})
 UNION ALL
SELECT m.half_id FROM {s}.message m WHERE m.send_number > 1 AND {m.half_id} AND (SELECT again > 0 FROM sent)
 UNION ALL
SELECT c.half_id FROM {s}.compensation c WHERE {c.half_id}
 UNION ALL
SELECT d.half_id FROM {s}.scheduled_message d WHERE {d.half_id}
""",
}

_INBOX = f"""
SELECT c.message_id AS id,
       CASE c.status {_STATUS} END::int2 AS status,
       c.attempts, c.received_at, c.changed_at, c.body_digest AS digest,
       c.status = 'expired' OR c.status = 'consumed' AND c.last_error IS NOT NULL AS skipped
  FROM {{s}}.consumer_message c
 WHERE c.consumer_group = %(group)s AND c.topic = %(feed)s AND {{c.message_id}}
"""

_CONSUMER = f"SELECT i.*, (-1)::int8 AS effects FROM ({_INBOX}) i"

_CONSUMER_AND_EFFECTS = f"""
SELECT coalesce(i.id, e.id) AS id, coalesce(i.status, 0)::int2 AS status, coalesce(i.attempts, 0) AS attempts,
       i.received_at, i.changed_at, i.digest, coalesce(i.skipped, false) AS skipped, coalesce(e.effects, 0) AS effects
  FROM ({_INBOX}) i
  FULL JOIN (SELECT b.{{column}} AS id, count(*) AS effects FROM {{table}} b WHERE {{b.{{column}}}} GROUP BY 1) e
         ON e.id = i.id
"""

_NAMED = re.compile(r"%\((\w+)\)s")

_BOUNDED = re.compile(r'\{([a-z]\.(?:\w+|"\w+"))\}')

_RANGES = "unnest(%(firsts)s::uuid[], %(lasts)s::uuid[]) AS r (first_id, last_id)"

# --- digests ---------------------------------------------------------------------------------------------

# Buckets are numbered from 1 by the ids at which they begin.
_BUCKET = "width_bucket({id}, %(bounds)s::uuid[])"

# One scan serves all pairs, each with columns of its own.
_HALVES = """
SELECT {bucket}, count(*), {mix}({one}){of_pairs} FROM {s}.half_message h WHERE {h.id} GROUP BY 1
"""

_OPS = """
SELECT {bucket}, count(*), {mix}({one}),
       count(*) FILTER (WHERE o.resolution = 'commit'), {mix}({one}) FILTER (WHERE o.resolution = 'commit')
  FROM {s}.op_message o WHERE {o.half_id} GROUP BY 1
"""

# A time ahead of the clock counts as a resend: the bucket is read.
_MESSAGES = """
SELECT {bucket}, count(*), {mix}({one}),
       max(m.send_number + (m.visible_at > statement_timestamp())::int){sent_of_pairs}
  FROM {s}.message m WHERE {m.half_id} GROUP BY 1
"""

_ROLLED_BACK = """
SELECT {bucket}{of_pairs}
  FROM (SELECT half_id FROM {s}.op_message o WHERE o.resolution = 'rollback' AND {o.half_id}) o
  JOIN {s}.half_message h ON h.id = o.half_id AND h.topic = ANY (%(topics)s::text[])
 GROUP BY 1
"""

#: How many columns each pair has of its own: in the digests of halves and of what was rolled back, and of messages.
COLUMNS_OF_PAIR, COLUMNS_SENT = 4, 2

_OF_PAIR = f""",
       count(*) FILTER (WHERE h.topic = %(topic)s),
       count(*) FILTER (WHERE h.topic = %(topic)s AND {MATCHES}),
       {{mix}}({{two}}) FILTER (WHERE h.topic = %(topic)s AND {MATCHES}),
       {{mix}}({{one}}) FILTER (WHERE h.topic = %(topic)s)"""

_SENT_OF_PAIR = """,
       count(*) FILTER (WHERE m.topic = %(topic)s), {mix}({one}) FILTER (WHERE m.topic = %(topic)s)"""

_COMPENSATED = "SELECT DISTINCT {bucket} FROM {s}.compensation c WHERE {c.half_id}"

_INBOXES = """
SELECT {bucket}, count(*), count(*) FILTER (WHERE c.status = 'consumed' AND c.last_error IS NULL
                                               AND greatest(c.received_at, c.changed_at) <= statement_timestamp()),
       {mix}({two}), {mix}({one})
  FROM {s}.consumer_message c
 WHERE c.consumer_group = %(group)s AND c.topic = %(feed)s AND {c.message_id} GROUP BY 1
"""

_EFFECTS = "SELECT {bucket}, count(*), {mix}({one}) FROM {table} b WHERE {b.{column}} GROUP BY 1"

_EFFECTS_OF = "SELECT DISTINCT b.{column} FROM {table} b WHERE b.{column} = ANY (%(ids)s::uuid[])"

# Each with its id, and the digest of the body.
_DIGESTS: dict[Part, list[tuple[str, str, str]]] = {
    "producer": [
        (_HALVES, "h.id", "h.body_digest"),
        (_OPS, "o.half_id", ""),
        (_MESSAGES, "m.half_id", ""),
        (_ROLLED_BACK, "h.id", "h.body_digest"),
        (_COMPENSATED, "c.half_id", ""),
    ],
    "consumer": [(_INBOXES, "c.message_id", "c.body_digest"), (_EFFECTS, "b.{column}", "")],
}

# --- what the outcome depends on besides -----------------------------------------------------------------

_POSITIONS = """
SELECT queue, max(position) FROM {s}.{table} WHERE consumer_group = %(group)s AND topic = %(topic)s GROUP BY 1
"""

_SKIPPED = f"WITH {SKIPPED} SELECT queue, former, position FROM skipped WHERE former < position ORDER BY 1, 2, 3"

_AGAIN = open_rows(TOOK_EFFECT)

_LOST = "SELECT DISTINCT unnest(message_ids) FROM {s}.log_loss WHERE consumer_group = %(group)s AND topic = %(topic)s"

#: Reads the database's clock. Rows: ``(microseconds since 1970,)``.
CLOCK = Statement("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8")

# A standby has what its primary wrote until the last transaction that was replayed, or, where all that was received is,
# until the primary was last heard of. Roles without pg_read_all_stats don't see when that was.
#: Reads the database's clock, and how far a standby is behind its primary by it. Rows: ``(microseconds since 1970,
#: microseconds or NULL)``; NULL on a primary.
CLOCK_AND_LAG = Statement("""
SELECT (extract(epoch FROM now) * 1000000)::int8,
       CASE WHEN pg_is_in_recovery() THEN greatest((extract(epoch FROM now - coalesce(
            greatest(pg_last_xact_replay_timestamp(),
                     (SELECT last_msg_send_time FROM pg_stat_wal_receiver
                       WHERE latest_end_lsn <= pg_last_wal_replay_lsn())),
            (SELECT checkpoint_time FROM pg_control_checkpoint()))) * 1000000)::int8, 0) END
  FROM clock_timestamp() AS now
""")

# A side's table that has a row for each message, its id, and by what its rows are found by id: the index of the inbox
# begins with the group.
_TABLES: dict[Part, tuple[str, str, str]] = {
    "producer": ("half_message", "id", "true"),
    "consumer": ("consumer_message", "message_id", "consumer_group = %(group)s"),
}


def _templates(sql: str) -> dict[Part, Template]:
    return {
        part: Template(sql.replace("{table}", table).replace("{id}", id_).replace("{own}", own))
        for part, (table, id_, own) in _TABLES.items()
    }


# A table's partitions; a table without any is none of its own.
_LEAVES = """(SELECT relid FROM pg_partition_tree('{s}.{table}') WHERE isleaf
        UNION SELECT oid FROM pg_class WHERE oid = '{s}.{table}'::regclass AND relkind = 'r') l"""

#: Read the ids at evenly spaced pages of a side: the first row of each, the same of each partition; a page whose first
#: row is gone gives none. Rows: ``(id,)``, about as many as there are ``points``, in no order.
SAMPLE = _templates(f"""
WITH p AS (
    SELECT sum(pages)::int8 AS pages, max(pages) AS longest
      FROM (SELECT pg_relation_size(relid) / current_setting('block_size')::int8 AS pages
              FROM {_LEAVES}) n
)
SELECT {{id}} FROM {{s}}.{{table}}
 WHERE ctid = ANY (ARRAY(
       SELECT format('(%%s,1)', i * pages / least(%(points)s, pages))::tid
         FROM p, generate_series(0, least(%(points)s, pages) - 1) i
        WHERE i * pages / least(%(points)s, pages) < longest))
""")

#: Read each ``step``-th id of ranges (`bounds_of`) of a side, by its index; of the inbox those of a ``group``. Rows:
#: ``(id,)``, in no order that matters.
SAMPLE_RANGES = _templates(f"""
SELECT id FROM (
    SELECT x.id, row_number() OVER () AS n
      FROM {_RANGES}
     CROSS JOIN LATERAL (SELECT {{id}} AS id FROM {{s}}.{{table}}
                          WHERE {{own}} AND {{id}} >= r.first_id AND {{id}} <= r.last_id OFFSET 0) x) y
 WHERE n %% %(step)s = 0
""")

#: Read where ranges end that begin with ids (``firsts``) and have so many ``rows`` of a side, by its index; of the
#: inbox those of a ``group``. Rows: ``(first, end)``; NULL is the end of the table.
RANGE_ENDS = _templates("""
SELECT p.id, (SELECT {id} FROM {s}.{table} WHERE {own} AND {id} >= p.id ORDER BY {id} OFFSET %(rows)s LIMIT 1)
  FROM unnest(%(firsts)s::uuid[]) AS p (id)
""")

#: Read about how big a side is, as the planner reckons: as dense as at the last ANALYZE, and as big as it is now. Rows:
#: ``(rows, bytes)``; 0 rows if it never was analyzed.
SIZE = _templates(f"""
SELECT coalesce(sum(greatest(reltuples, 0) / nullif(relpages, 0) * pg_relation_size(oid)
                    / current_setting('block_size')::int8), 0)::int8, sum(pg_relation_size(oid))::int8
  FROM {_LEAVES} JOIN pg_class ON oid = relid
""")

#: Makes this transaction read only, with one snapshot for all that it reads; it must be the first statement.
READ_IN_ONE_SNAPSHOT = Statement("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
#: Has texts come in the encoding of Arrow, in place of that of the database: its driver leaves them as they come.
AS_UTF8 = Statement("SET LOCAL client_encoding TO 'UTF8'")
# Prune truncates tables, which also takes their rows from snapshots that were taken before. It waits for this lock.
# Deliveries aren't read: the inbox itself is; nor is what was published.
_TRUNCATED: dict[Part, tuple[str, ...]] = {
    "producer": (*(table for table in SEGMENTED["producer"] if table not in {"delivery", "published"}), "half_check"),
    "consumer": (*SEGMENTED["consumer"], "consumer_offset"),
}
#: Keeps rows where they are as long as this transaction is open; to come before its first query.
KEEP = {
    part: Template(f"LOCK TABLE {', '.join(f'{{s}}.{table}' for table in tables)} IN ACCESS SHARE MODE")
    for part, tables in _TRUNCATED.items()
}
#: Has this transaction wait for a lock no longer than half a second, and then as long as its session does. Neither is a
#: query, which would take the snapshot.
WAIT_A_MOMENT = Statement("SET LOCAL lock_timeout = '500ms'")
WAIT_AS_EVER = Statement("SET LOCAL lock_timeout TO DEFAULT")
#: Rows: ``(is it a standby?,)``.
IS_STANDBY = Statement("SELECT pg_is_in_recovery()")
#: Ask whether the server answers.
NOTHING = Statement("SELECT 1")
#: Offers the snapshot of this transaction to others, as long as it is open. Rows: ``(name,)``.
EXPORT_SNAPSHOT = Statement("SELECT pg_export_snapshot()")
#: Have this transaction see the snapshot offered under a name.
IMPORT_SNAPSHOT = "SET TRANSACTION SNAPSHOT %(name)s"

_SET = """
SELECT set_config(name, value, true) FROM unnest(%(names)s::text[], %(values)s::text[]) AS s (name, value)
"""
#: For this transaction, has the rows of both sides read by joins whose time doesn't depend on the statistics. Without
#: them, or with stale ones, the planner expects a handful of rows, and would go through a whole subquery for each.
PLAN_FOR_ROWS = Statement("SELECT set_config('enable_nestloop', 'off', true)")
PLAN_AS_EVER = Statement("SET LOCAL enable_nestloop TO DEFAULT")


def settings(name: str, seconds: float) -> Statement:
    """Return what has a transaction read much, under a name and with an end.

    It gives sorts and hashes enough memory, and compiles nothing. Time-outs of the role or the database are meant for
    services, and the snapshot idles while others read: in their place no statement and no pause takes longer than
    ``seconds``, since until then vacuum removes nothing it sees. The server tests a host that fell silent.
    """
    limit = f"{int(seconds * 1000)}ms"
    values = {
        "jit": "off",
        "work_mem": "64MB",
        "statement_timeout": limit,
        "idle_in_transaction_session_timeout": limit,
        "application_name": name,
        # A policy that hides rows is an error then, in place of rows that are missing; names and texts are written as
        # our statements mean them, in place of what the database sets.
        "row_security": "off",
        "quote_all_identifiers": "off",
        "standard_conforming_strings": "on",
        **SERVER_KEEP_ALIVE,
    }
    return Statement(_SET, {"names": list(values), "values": list(values.values())})


@dataclass(frozen=True, slots=True)
class Mixing:
    """How the rows of a bucket become one number: by functions that both servers have, with the same results.

    ``mix`` is the aggregate; ``one`` and ``two`` hash an id, and an id with a digest.
    """

    mix: str
    one: str
    two: str
    xor: bool


#: PostgreSQL 14+: fast, but not documented, so that both servers are asked for the same value first.
FAST = Mixing("bit_xor", "uuid_hash_extended({id}, 0)", "hash_record_extended(({id}, {digest}), 0)", xor=True)
PORTABLE = Mixing(
    "sum",
    "('x' || substr(md5({id}::text), 1, 16))::bit(64)::int8",
    "('x' || substr(md5({id}::text || coalesce(encode({digest}, 'hex'), '')), 1, 16))::bit(64)::int8",
    xor=False,
)

#: What the fast hashes give on this server. Rows: ``(number, number)``.
FAST_VALUES = Statement(
    f"SELECT {FAST.one}, {FAST.two}".format(
        id="'0192a4c3-8f21-7a1b-9c3d-5e6f7a8b9c0d'::uuid", digest=r"'\x00112233445566778899aabbccddeeff'::bytea"
    )
)


# Keys are compared across databases by their text, which must not depend on how either of them is configured.
_LIMITS = """
SELECT set_config('statement_timeout', %(limit)s, true), set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true), set_config('IntervalStyle', 'iso_8601', true),
       set_config('bytea_output', 'hex', true), set_config('extra_float_digits', '1', true)
"""


def limits(seconds: float) -> Statement:
    """For this transaction, let no statement run longer, and have the same text for the same value everywhere."""
    return Statement(_LIMITS, {"limit": f"{int(seconds * 1000)}ms"})


def values_of(pair: Pair) -> dict[str, object]:
    """Return what the statements bind of a pair."""
    return {"topic": pair.topic, "feed": pair.feed, "group": pair.group, **filter_of(pair)}


def rows(part: Part, schema: str, pair: Pair, ranges: Sequence[Range]) -> Statement:
    """Read the halves of a topic with all that became of them; or a group's inbox, with the effects if it has some.

    Columns: those of `outbox.reconcile.rows.PRODUCER`, or of `rows.CONSUMER`.
    """
    consumer = _CONSUMER_AND_EFFECTS if pair.effect else _CONSUMER
    return _over(_PRODUCER if part == "producer" else consumer, schema, pair.effect, ranges, values_of(pair))


def raw(schema: str, pair: Pair, ranges: Sequence[Range]) -> dict[str, Statement]:
    """Read the producer's tables for a topic one by one; what can't be told so is among the ids of the ``odd``.

    Columns: halves ``id, digest, addressed``; messages ``id, queue, position, at``, of their first send; rolled back
    ``id, at``, of any topic; odd ``id``, of any topic, and perhaps several times.
    """
    values = values_of(pair)
    return {name: _over(template, schema, None, ranges, values) for name, template in _RAW.items()}


def producer_digests(
    schema: str, pairs: Sequence[Pair], ranges: Sequence[Range], bounds: Sequence[UUID], mixing: Mixing
) -> list[Statement]:
    """Digest the tables of the producer by bucket, for all pairs at once; bucket n begins with the n-th of ``bounds``.

    Rows, in this order: halves ``(bucket, halves, mix of ids, *of each pair)``; ops ``(bucket, ops, mix, commits,
    mix)``; messages ``(bucket, messages, mix, greatest send number, *sent of each pair)``; rolled back ``(bucket, *of
    each pair)``; compensated ``(bucket,)``. Of each pair: ``of the topic, addressed, mix of addressed, mix of the
    topic's``; sent of each pair: ``of the topic, mix of the topic's``.
    """
    values: dict[str, object] = {"topics": sorted({pair.topic for pair in pairs})}
    for number, pair in enumerate(pairs):
        values |= {f"{name}_{number}": value for name, value in values_of(pair).items()}
    columns = {
        name: "".join(_NAMED.sub(rf"%(\g<1>_{number})s", template) for number in range(len(pairs)))
        for name, template in (("of_pairs", _OF_PAIR), ("sent_of_pairs", _SENT_OF_PAIR))
    }
    return _digests("producer", schema, None, ranges, bounds, mixing, values, columns)


def consumer_digests(
    schema: str, pair: Pair, ranges: Sequence[Range], bounds: Sequence[UUID], mixing: Mixing
) -> list[Statement]:
    """Digest what a consumer has of a pair, by bucket as `producer_digests`.

    Rows of the inbox ``(bucket, rows, consumed and not skipped, mix, mix of ids)``; and, if a table of them is named,
    of the effects ``(bucket, rows, mix of ids)``.
    """
    return _digests("consumer", schema, pair, ranges, bounds, mixing, values_of(pair), {})


def _digests(
    part: Part,
    schema: str,
    pair: Pair | None,
    ranges: Sequence[Range],
    bounds: Sequence[UUID],
    mixing: Mixing,
    values: Mapping[str, object],
    columns: Mapping[str, str],
) -> list[Statement]:
    effect = None if pair is None else pair.effect
    mixed = {**columns, "bucket": _BUCKET, "mix": mixing.mix, "one": mixing.one, "two": mixing.two}
    bound = {**values, "bounds": as_array(bounds)}
    return [
        _over(template, schema, effect, ranges, bound, **mixed, id=id_, digest=digest)
        for template, id_, digest in _DIGESTS[part]
        if effect or template is not _EFFECTS
    ]


def effects_of(effect: Effect, ids: Sequence[UUID]) -> Statement:
    """Read which of these ids a business table has. Rows: ``(id,)``."""
    table, column = effect.quoted
    return Statement(_EFFECTS_OF.format(table=table, column=column), {"ids": as_array(ids)})


def positions(schema: str, pair: Pair) -> list[Statement]:
    """Read how far a group has come, and where it began; what was lost; what it skips; what took effect, and waits now.

    Rows of the first two: ``(queue, position)``, of the fourth: ``(queue, after, up to)``, of the others: ``(id,)``.
    """
    names = {"group": pair.group, "topic": pair.feed, "feed": pair.feed}
    tables = [statement(schema, _POSITIONS, names, table=table) for table in ("consumer_offset", "consumer_start")]
    return [*tables, *(statement(schema, each, names) for each in (_LOST, _SKIPPED, _AGAIN))]


def as_array(ids: Sequence[UUID]) -> str:
    """Return ids as PostgreSQL reads an array: psycopg would take seven times as long for thousands of them."""
    return f"{{{','.join(map(str, ids))}}}"


def _over(
    template: str,
    schema: str,
    effect: Effect | None,
    ranges: Sequence[Range],
    values: Mapping[str, object],
    **parts: str,
) -> Statement:
    """Return the statement of a template that is bounded by ranges, where it says ``{h.id}``.

    One range is written out, which the planner can reckon with, and so are ranges of one id each; others are joined,
    each a subquery of its own: the ``OFFSET 0`` keeps the planner from turning that round, and looking for the range
    of each row.
    """
    if effect:
        parts["table"], parts["column"] = effect.quoted
    sql = statement(schema, template, {}, **parts).sql
    if len(ranges) == 1:
        ((first, end),) = ranges
        # A bound that bounds nothing costs a seventh of a digest.
        bounds = [r"\1 >= %(first)s::uuid"] * (first != FIRST_ID) + [r"\1 < %(end)s::uuid"] * (end is not None)
        sql = _BOUNDED.sub(" AND ".join(bounds) or "true", sql)
        bound: dict[str, object] = {"first": first, "end": end}
    elif all(each.first == each.last for each in ranges):
        sql, bound = (
            _BOUNDED.sub(r"\1 = ANY (%(ids)s::uuid[])", sql),
            {"ids": as_array([each.first for each in ranges])},
        )
    else:
        inner = _BOUNDED.sub(r"\1 >= r.first_id AND \1 <= r.last_id", sql)
        sql = f"SELECT x.* FROM {_RANGES} CROSS JOIN LATERAL ({inner} OFFSET 0) x"
        bound = bounds_of(ranges)
    return Statement(sql, {**values, **bound})


def bounds_of(ranges: Sequence[Range]) -> dict[str, object]:
    """Return what statements bind that join many ranges."""
    return {"firsts": [each.first for each in ranges], "lasts": [each.last for each in ranges]}
