"""Statements that read what a reconciliation compares: rows of id ranges, and digests of many ranges at once.

They join nothing that needn't be joined: the digests of halves, ops and messages are made table by table, and what
must hold between them is checked by `digest`, which reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.consumer.sql import MATCHES
from outbox.database.execute import Statement, in_schema
from outbox.database.status import message_status

#: First id, and the id before which it ends; None is the end of all ids.
Ids = tuple[UUID, UUID | None]

# Numbered as `outbox.reconcile.rows.ProducerState`, whose module would load the reconciliation's libraries.
_NUMBERS = ("undecided", "rolled_back", "committed", "scheduled", "recalled", "dispatched")
_STATE = message_status(is_message="m.half_id IS NOT NULL", value=lambda status: str(_NUMBERS.index(status)))

# Each part is bounded by itself: the planner doesn't carry a range over from one table to another.
_PRODUCER = f"""
SELECT h.id,
       {_STATE}::int2 AS state,
       coalesce(m.send_number, 0)::int2 AS sends, coalesce(m.queue, 0) AS queue, coalesce(m.position, 0) AS position,
       coalesce(m.visible_at, d.recalled_at, d.deliver_at, o.decided_at, h.born_at) AS at,
       h.body_digest AS digest, coalesce({MATCHES}, false) AS addressed, c.half_id IS NOT NULL AS compensated
  FROM (SELECT * FROM {{s}}.half_message h WHERE h.topic = %(topic)s AND {{h.id}}) h
  LEFT JOIN (SELECT * FROM {{s}}.op_message o WHERE {{o.half_id}}) o ON o.half_id = h.id
  LEFT JOIN (SELECT DISTINCT ON (half_id) * FROM {{s}}.message m WHERE {{m.half_id}}
              ORDER BY half_id, send_number DESC) m ON m.half_id = h.id
  LEFT JOIN (SELECT * FROM {{s}}.scheduled_message d WHERE {{d.half_id}}) d ON d.half_id = h.id
  LEFT JOIN (SELECT * FROM {{s}}.compensation c WHERE {{c.half_id}}) c ON c.half_id = h.id
"""

_INBOX = """
SELECT c.message_id AS id,
       CASE c.status WHEN 'consumed' THEN 1 WHEN 'failed' THEN 2 WHEN 'parked' THEN 3 ELSE 4 END::int2 AS status,
       c.attempts, c.received_at, c.changed_at, c.body_digest AS digest,
       c.status = 'consumed' AND c.last_error IS NOT NULL AS skipped
  FROM {s}.consumer_message c
 WHERE c.consumer_group = %(group)s AND c.topic = %(topic)s AND {c.message_id}
"""

_CONSUMER = "SELECT i.*, (-1)::int8 AS effects FROM (" + _INBOX + ") i"

_CONSUMER_AND_EFFECTS = (
    """
SELECT coalesce(i.id, e.id) AS id, coalesce(i.status, 0)::int2 AS status, coalesce(i.attempts, 0) AS attempts,
       i.received_at, i.changed_at, i.digest, coalesce(i.skipped, false) AS skipped, coalesce(e.effects, 0) AS effects
  FROM ("""
    + _INBOX
    + """) i
  FULL JOIN (SELECT b.{column} AS id, count(*) AS effects FROM {table} b WHERE {b.{column}} GROUP BY 1) e ON e.id = i.id
"""
)

_BOUNDED = re.compile(r'\{([a-z]\.(?:\w+|"\w+"))\}')

#: The first and the last of all ids.
FIRST_ID, LAST_ID = UUID(int=0), UUID(int=2**128 - 1)

_RANGES = "unnest(%(firsts)s::uuid[], %(lasts)s::uuid[]) AS r (first_id, last_id)"

# --- digests ---------------------------------------------------------------------------------------------

# Buckets are numbered from 1 by the ids at which they begin.
_BUCKET = "width_bucket({id}, %(bounds)s::uuid[])"

_HALVES = f"""
SELECT {_BUCKET.replace("{id}", "h.id")}, count(*), {{mix}}({{one}}),
       count(*) FILTER (WHERE h.topic = %(topic)s),
       count(*) FILTER (WHERE h.topic = %(topic)s AND {MATCHES}),
       {{mix}}({{two}}) FILTER (WHERE h.topic = %(topic)s AND {MATCHES})
  FROM {{s}}.half_message h WHERE {{h.id}} GROUP BY 1
"""

_OPS = f"""
SELECT {_BUCKET.replace("{id}", "o.half_id")}, count(*), {{mix}}({{one}}),
       count(*) FILTER (WHERE o.resolution = 'commit'), {{mix}}({{one}}) FILTER (WHERE o.resolution = 'commit')
  FROM {{s}}.op_message o WHERE {{o.half_id}} GROUP BY 1
"""

_MESSAGES = f"""
SELECT {_BUCKET.replace("{id}", "m.half_id")}, count(*), {{mix}}({{one}}), max(m.send_number)
  FROM {{s}}.message m WHERE {{m.half_id}} GROUP BY 1
"""

_ROLLED_BACK = f"""
SELECT {_BUCKET.replace("{id}", "h.id")}, count(*), count(*) FILTER (WHERE {MATCHES}),
       {{mix}}({{two}}) FILTER (WHERE {MATCHES})
  FROM (SELECT half_id FROM {{s}}.op_message o WHERE o.resolution = 'rollback' AND {{o.half_id}}) o
  JOIN {{s}}.half_message h ON h.id = o.half_id AND h.topic = %(topic)s
 GROUP BY 1
"""

_COMPENSATED = f"""
SELECT DISTINCT {_BUCKET.replace("{id}", "c.half_id")} FROM {{s}}.compensation c WHERE {{c.half_id}}
"""

_INBOXES = f"""
SELECT {_BUCKET.replace("{id}", "c.message_id")}, count(*),
       count(*) FILTER (WHERE c.status = 'consumed' AND c.last_error IS NULL), {{mix}}({{two}}), {{mix}}({{one}})
  FROM {{s}}.consumer_message c
 WHERE c.consumer_group = %(group)s AND c.topic = %(topic)s AND {{c.message_id}} GROUP BY 1
"""

_EFFECTS = f"""
SELECT {_BUCKET.replace("{id}", "b.{column}")}, count(*), {{mix}}({{one}}) FROM {{table}} b WHERE {{b.{{column}}}}
 GROUP BY 1
"""

# --- what the outcome depends on besides -----------------------------------------------------------------

_OFFSETS = """
SELECT queue, max(position) FROM {s}.consumer_offset WHERE consumer_group = %s AND topic = %s GROUP BY 1
"""

_STARTS = "SELECT queue, position FROM {s}.consumer_start WHERE consumer_group = %s AND topic = %s"

_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::int8"

# The first row of evenly spaced pages; a page whose first row is gone gives none.
_SAMPLE = """
WITH p AS (SELECT pg_relation_size('{s}.{table}') / current_setting('block_size')::int8 AS pages)
SELECT {id} FROM {s}.{table}
 WHERE ctid = ANY (ARRAY(
       SELECT format('(%%s,1)', i * pages / least(%(points)s, pages))::tid
         FROM p, generate_series(0, least(%(points)s, pages) - 1) i))
"""

# Some rows of each range, in no order that matters.
_SAMPLE_RANGES = f"""
SELECT id FROM (
    SELECT x.id, row_number() OVER () AS n
      FROM {_RANGES}
     CROSS JOIN LATERAL (SELECT {{id}} AS id FROM {{s}}.{{table}}
                          WHERE {{id}} >= r.first_id AND {{id}} <= r.last_id OFFSET 0) x) y
 WHERE n %% %(step)s = 0
"""

# As the planner reckons: as dense as at the last ANALYZE, and as big as it is now.
_SIZE = """
SELECT coalesce(greatest(reltuples, 0) / nullif(relpages, 0) * pg_relation_size(oid)
                / current_setting('block_size')::int8, 0)::int8, pg_relation_size(oid)
  FROM pg_class WHERE oid = %s::regclass
"""

_EXPORT = "SELECT pg_export_snapshot()"

_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"

# Time-outs that are set for the role or the database are meant for services; the snapshot idles while others read.
_PLAN_FOR_SCANS = """
SELECT set_config('jit', 'off', true), set_config('work_mem', '64MB', true), set_config('statement_timeout', '0', true),
       set_config('idle_in_transaction_session_timeout', '0', true)
"""

# Without statistics, or with stale ones, the planner expects a handful of rows, and would go through a whole subquery
# for each of them.
_PLAN_FOR_ROWS = "SELECT set_config('enable_nestloop', 'off', true)"


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

_PROBE_ID = "'0192a4c3-8f21-7a1b-9c3d-5e6f7a8b9c0d'::uuid"


@dataclass(frozen=True, slots=True)
class Between:
    """A topic and a group, with the filter of its subscription; ``keys`` are LIKE patterns.

    ``effects`` are the (quoted) names of a business table and its column with the message id.
    """

    topic: str
    group: str
    tags: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    effects: tuple[str, str] | None = None

    @property
    def values(self) -> dict[str, object]:
        """Return what the statements bind."""
        lists = {"tags": self.tags, "keys": self.keys}
        return {
            "topic": self.topic,
            "group": self.group,
            **{name: None if value is None else list(value) for name, value in lists.items()},
        }


def producer_rows(schema: str, between: Between, ranges: Sequence[Ids]) -> Statement:
    """Read the halves of a topic with all that became of them. Columns: those of `outbox.reconcile.rows.PRODUCER`."""
    return _over(_PRODUCER, schema, between, ranges)


def consumer_rows(schema: str, between: Between, ranges: Sequence[Ids]) -> Statement:
    """Read a group's inbox, with the effects if a table of them is named. Columns: those of `rows.CONSUMER`."""
    return _over(_CONSUMER_AND_EFFECTS if between.effects else _CONSUMER, schema, between, ranges)


def producer_digests(
    schema: str, between: Between, ranges: Sequence[Ids], bounds: Sequence[UUID], mixing: Mixing
) -> list[Statement]:
    """Digest the producer's tables by bucket; bucket n begins with the n-th of ``bounds``.

    Rows, in this order: halves ``(bucket, halves, mix of ids, of the topic, addressed, mix of addressed)``; ops
    ``(bucket, ops, mix, commits, mix)``; messages ``(bucket, messages, mix, greatest send number)``; rolled back of
    the topic ``(bucket, halves, addressed, mix of addressed)``; compensated ``(bucket,)``.
    """
    return [
        _digest(sql, schema, between, ranges, bounds)
        for sql in (
            _mixed(_HALVES, mixing, "h.id", "h.body_digest"),
            _mixed(_OPS, mixing, "o.half_id"),
            _mixed(_MESSAGES, mixing, "m.half_id"),
            _mixed(_ROLLED_BACK, mixing, "h.id", "h.body_digest"),
            _COMPENSATED,
        )
    ]


def consumer_digests(
    schema: str, between: Between, ranges: Sequence[Ids], bounds: Sequence[UUID], mixing: Mixing
) -> list[Statement]:
    """Digest the inbox by bucket, and the effects if a table of them is named.

    Rows: inbox ``(bucket, rows, consumed and not skipped, mix, mix of ids)``; effects ``(bucket, rows, mix of ids)``.
    """
    statements = [_mixed(_INBOXES, mixing, "c.message_id", "c.body_digest")]
    if between.effects:
        statements.append(_mixed(_EFFECTS, mixing, f"b.{between.effects[1]}"))
    return [_digest(sql, schema, between, ranges, bounds) for sql in statements]


def offsets(schema: str, group: str, topic: str) -> Statement:
    """Read how far a group has come. Rows: ``(queue, position)``."""
    return Statement(in_schema(_OFFSETS, schema), (group, topic))


def starts(schema: str, group: str, topic: str) -> Statement:
    """Read where a group began. Rows: ``(queue, position)``."""
    return Statement(in_schema(_STARTS, schema), (group, topic))


def clock() -> Statement:
    """Read the database's clock. Rows: ``(microseconds since 1970,)``."""
    return Statement(_CLOCK)


def sample(schema: str, table: str, column: str, points: int) -> Statement:
    """Read ids at evenly spaced pages of a table (of ours). Rows: ``(id,)``, about ``points`` of them, in no order."""
    return Statement(in_schema(_SAMPLE, schema).replace("{table}", table).replace("{id}", column), {"points": points})


def sample_ranges(schema: str, table: str, column: str, ranges: Sequence[Ids], step: int) -> Statement:
    """Read every ``step``-th id of ranges of a table (of ours), by its index. Rows: ``(id,)``, in no order."""
    sql = in_schema(_SAMPLE_RANGES, schema).replace("{table}", table).replace("{id}", column)
    return Statement(sql, {**_bounds(ranges), "step": step})


def size(schema: str, table: str) -> Statement:
    """Read about how big a table is. Rows: ``(rows, bytes)``; 0 rows if it never was analyzed."""
    return Statement(_SIZE, (f'"{schema}".{table}',))


def read_in_one_snapshot() -> Statement:
    """Make this transaction read only, with one snapshot for all that it reads; it must be the first statement."""
    return Statement(_SNAPSHOT)


def export_snapshot() -> Statement:
    """Offer the snapshot of this transaction to others, as long as it is open. Rows: ``(name,)``."""
    return Statement(_EXPORT)


def import_snapshot(name: str) -> Statement:
    """Have this transaction see what `export_snapshot` offered under this name."""
    return Statement("SET TRANSACTION SNAPSHOT %(name)s", {"name": name})


def plan_for_scans() -> Statement:
    """For this transaction, give sorts and hashes room, and compile nothing."""
    return Statement(_PLAN_FOR_SCANS)


def plan_for_rows() -> Statement:
    """For this transaction, have the rows of both sides read by joins whose time doesn't depend on the statistics."""
    return Statement(_PLAN_FOR_ROWS)


def plan_for_rows_of_session() -> Statement:
    """Do as `plan_for_scans` and `plan_for_rows` for all that a connection of our own does from now on."""
    return Statement(f"{_PLAN_FOR_SCANS};{_PLAN_FOR_ROWS}".replace("true)", "false)"))


def as_array(ids: Sequence[UUID]) -> str:
    """Return ids as PostgreSQL reads an array: psycopg would take seven times as long for thousands of them."""
    return f"{{{','.join(map(str, ids))}}}"


def probe(mixing: Mixing) -> Statement:
    """Compute what a hash gives on this server. Rows: ``(number, number)``."""
    digest = r"'\x00112233445566778899aabbccddeeff'::bytea"
    one, two = (text.replace("{id}", _PROBE_ID).replace("{digest}", digest) for text in (mixing.one, mixing.two))
    return Statement(f"SELECT {one}, {two}")


def _over(sql: str, schema: str, between: Between, ranges: Sequence[Ids]) -> Statement:
    """Bound a statement by ranges, where it says ``{h.id}``.

    One range is written out, which the planner can reckon with; several are joined, each a subquery of its own: the
    ``OFFSET 0`` keeps the planner from turning that round, and looking for the range of each row.
    """
    if between.effects:
        sql = sql.replace("{table}", between.effects[0]).replace("{column}", between.effects[1])
    if len(ranges) == 1:
        ((first, end),) = ranges
        # A bound that bounds nothing costs a seventh of a digest.
        bounds = ["{id} >= %(first)s::uuid"] * (first != FIRST_ID) + ["{id} < %(end)s::uuid"] * (end is not None)
        sql = _with_bound(sql, " AND ".join(bounds) or "true")
        values: dict[str, object] = {"first": first, "end": end}
    else:
        inner = _with_bound(sql, "{id} >= r.first_id AND {id} <= r.last_id")
        sql = f"SELECT x.* FROM {_RANGES} CROSS JOIN LATERAL ({inner} OFFSET 0) x"
        values = _bounds(ranges)
    return Statement(in_schema(sql, schema), between.values | values)


def _bounds(ranges: Sequence[Ids]) -> dict[str, object]:
    lasts = [LAST_ID if end is None else UUID(int=end.int - 1) for _, end in ranges]
    return {"firsts": [first for first, _ in ranges], "lasts": lasts}


def _with_bound(sql: str, bound: str) -> str:
    return _BOUNDED.sub(lambda match: bound.replace("{id}", match[1]), sql)


def _mixed(sql: str, mixing: Mixing, id_: str, digest: str = "") -> str:
    return (
        sql.replace("{mix}", mixing.mix)
        .replace("{one}", mixing.one)
        .replace("{two}", mixing.two)
        .replace("{id}", id_)
        .replace("{digest}", digest)
    )


def _digest(sql: str, schema: str, between: Between, ranges: Sequence[Ids], bounds: Sequence[UUID]) -> Statement:
    statement = _over(sql, schema, between, ranges)
    return Statement(statement.sql, {**dict(statement.values), "bounds": as_array(bounds)})
