"""Statements of segments; and those that look through the ones of a producer, and prune its rows one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from outbox.database.execute import Statement, Template, in_schema, statement
from outbox.database.sql import jumps
from outbox.message.ids import FIRST_BUSINESS_ID

#: What names a row that is kept: its group ("" in a producer's tables) and its message id.
Key = tuple[str, UUID]

#: The database's clock. Rows: ``(ms since 1970,)``.
NOW_MS: Statement = Statement("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8")

# One that is dropped while the catalog is read has a row in the statement's snapshot, and no bounds any more.
_PARTITIONS = """
SELECT c.relname::text, bounds
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid, pg_get_expr(c.relpartbound, c.oid) bounds
 WHERE i.inhparent = '{s}.{table}'::regclass AND bounds IS NOT NULL
"""

# A group is known by its cursor.
_KNOWN = """known AS MATERIALIZED (
    SELECT DISTINCT ON (topic, consumer_group) topic, positions FROM {s}.delivery_cursor
     ORDER BY topic, consumer_group, number DESC
)"""

_OPEN = """NOT d.settled
                AND NOT EXISTS (SELECT FROM {s}.delivery n
                                 WHERE n.half_id = d.half_id AND n.consumer_group = d.consumer_group
                                   AND n.number > d.number)"""

# Of a message that is younger than this, what became of it in each known group has to be settled first.
_MAY_WAIT = "m.visible_at >= clock_timestamp() - make_interval(secs => %(undelivered)s)"
_WAITS = f"""({_MAY_WAIT}
                       AND (EXISTS (SELECT FROM {{s}}.delivery d WHERE d.half_id = m.half_id AND {_OPEN})
                            OR EXISTS (SELECT FROM known k
                                        WHERE k.topic = m.topic
                                          AND m.position > coalesce(k.positions[m.queue + 1], 0))))"""

# A half goes together with its op and its messages, in one statement: no op without its half (a check would take
# an op that is gone for an orphan), no commit op without its message (a re-base would dispatch it again).
#: Deletes the halves ``locked``, with all that is written of them.
DELETE_LOCKED = """messages AS (
    DELETE FROM {s}.message WHERE half_id IN (SELECT half_id FROM locked)
), checks AS (
    DELETE FROM {s}.check_history WHERE half_id IN (SELECT half_id FROM locked)
), scheduled AS (
    DELETE FROM {s}.scheduled_message WHERE half_id IN (SELECT half_id FROM locked)
), deliveries AS (
    DELETE FROM {s}.delivery WHERE half_id IN (SELECT half_id FROM locked)
), errors AS (
    DELETE FROM {s}.half_error WHERE half_id IN (SELECT half_id FROM locked)
), published AS (
    DELETE FROM {s}.published WHERE id IN (SELECT half_id FROM locked)
), ops AS (
    DELETE FROM {s}.op_message WHERE half_id IN (SELECT half_id FROM locked)
), halves AS (
    DELETE FROM {s}.half_message WHERE id IN (SELECT half_id FROM locked) RETURNING id
)"""

# The newest message of a queue stays, since the next position is counted from it.
_DELETE_SETTLED = (
    "WITH "
    + _KNOWN
    + """, old AS MATERIALIZED ({old}), settled AS MATERIALIZED (
    SELECT id FROM old
     WHERE decided_at < clock_timestamp() - make_interval(secs => %(retention)s)
       AND (resolution = 'rollback'
            OR EXISTS (SELECT FROM {s}.scheduled_message d WHERE d.half_id = id AND d.recalled_at IS NOT NULL)
            OR EXISTS (SELECT FROM {s}.message m WHERE m.half_id = id))
       AND NOT EXISTS (
           SELECT FROM {s}.message m
            WHERE m.half_id = id
              AND (m.visible_at >= clock_timestamp() - make_interval(secs => %(retention)s)
                   OR """
    + _WAITS
    + """
                   OR NOT EXISTS (SELECT FROM {s}.message n
                                   WHERE n.topic = m.topic AND n.queue = m.queue AND n.position > m.position)))
), locked AS MATERIALIZED (
    SELECT half_id FROM {s}.op_message WHERE half_id IN (SELECT id FROM settled) FOR UPDATE SKIP LOCKED
), """
    + DELETE_LOCKED
    + """
SELECT (SELECT count(*) FROM old), (SELECT count(*) FROM halves),
       (SELECT min(decided_at) FROM old) >= clock_timestamp() - make_interval(secs => %(retention)s),
       (SELECT {last} LIMIT 1)
"""
)


def _delete_settled(old: str, last: str) -> Template:
    """Return what deletes those of some halves that are settled; ``last`` selects where to go on, from ``old``."""
    return Template(_DELETE_SETTLED.replace("{old}", old).replace("{last}", last))


# Ids begin with the client's time, which only bounds the scan; the database's own time of the decision decides.
#: Delete decided halves older than ``retention`` seconds among the next ``limit`` after an id and before another one.
#: Those stay that are younger than ``undelivered`` seconds, and that a known group has yet to consume.
#: Rows: ``(looked at, deleted, all of them are too young, last id looked at)``.
settled_halves: Template = _delete_settled(
    """
    SELECT h.id, o.resolution, o.decided_at
      FROM {s}.half_message h JOIN {s}.op_message o ON o.half_id = h.id
     WHERE h.id > %(after)s AND h.id < %(end)s
     ORDER BY h.id LIMIT %(limit)s
""",
    last="id FROM old ORDER BY id DESC",
)

# Transactions are numbered about in the order of their decisions. The id is written out, so that the planner reads the
# DEFAULT partition alone.
#: Do the same with halves of business strings, which are looked at by the transactions that decided them, and by their
#: ids. Rows: ``(looked at, deleted, all of them are too young, the last transaction and id, as texts)``.
settled_business_halves: Template = _delete_settled(
    f"""
    SELECT h.id, o.resolution, o.decided_at, o.xid
      FROM {{s}}.op_message o JOIN {{s}}.half_message h ON h.id = o.half_id
     WHERE o.half_id >= '{FIRST_BUSINESS_ID}'
       AND (o.xid, o.half_id) > (%(xid)s::text::xid8, %(after)s::text::uuid)
     ORDER BY o.xid, o.half_id LIMIT %(limit)s
""",
    last="ARRAY[xid::text, id::text] FROM old ORDER BY xid DESC, id DESC",
)

# The queues that have messages in a segment.
_QUEUES = f"WITH RECURSIVE {jumps('queue_of', '{message}', 'topic', 'queue')}"

# The same as in `settled_halves`, for a whole segment at once: by the index of open halves, and by that of the queues.
# A group that gets its first cursor while a segment is emptied isn't waited for yet.
#: Read which messages of a segment known groups have yet to consume, some ``limit``. Rows: ``(id,)``.
UNDELIVERED: str = (
    _QUEUES
    + f", {_KNOWN}"
    + f"""
(SELECT half_id FROM {{delivery}} d
  WHERE {_OPEN} AND EXISTS (SELECT FROM {{s}}.message m WHERE m.half_id = d.half_id AND {_MAY_WAIT})
  LIMIT %(limit)s)
 UNION
(SELECT m.half_id
   FROM known k JOIN queue_of q ON q.topic = k.topic
  CROSS JOIN LATERAL (SELECT half_id FROM {{message}} m
                       WHERE m.topic = q.topic AND m.queue = q.queue
                         AND m.position > coalesce(k.positions[q.queue + 1], 0) AND {_MAY_WAIT}
                       LIMIT %(limit)s) m
  LIMIT %(limit)s)
"""
)

# Settled is the same as in `settled_halves`, for a whole segment at once. What lacks its half stays, as it does there.
#: Look a producer's segment through. Rows: ``(snapshot, halves, ids to be kept, topics, queues, last positions)``; of
#: the ids ``limit`` at most, and maybe None, as the queues may be.
SURVEY: str = (
    _QUEUES
    + """, ends AS MATERIALIZED (
    SELECT topic, queue,
           (SELECT max(position) FROM {message} m WHERE m.topic = p.topic AND m.queue = p.queue) AS last,
           (SELECT half_id FROM {s}.message m WHERE m.topic = p.topic AND m.queue = p.queue
             ORDER BY position DESC LIMIT 1) AS newest
      FROM queue_of p
), limits AS MATERIALIZED (
    SELECT clock_timestamp() - make_interval(secs => %(retention)s) AS young
), survivor AS MATERIALIZED (
    SELECT h.id
      FROM {half_message} h CROSS JOIN limits
      LEFT JOIN {op_message} o ON o.half_id = h.id
      LEFT JOIN (SELECT half_id, max(visible_at) AS visible_at FROM {message} GROUP BY half_id) m ON m.half_id = h.id
      LEFT JOIN {s}.scheduled_message d ON d.half_id = h.id
     WHERE (o.decided_at < young
            AND (o.resolution = 'rollback' OR d.recalled_at IS NOT NULL OR m.half_id IS NOT NULL)
            AND (d.half_id IS NULL OR d.recalled_at IS NOT NULL)
            AND (m.half_id IS NULL OR m.visible_at < young)) IS NOT TRUE
    UNION
    SELECT newest FROM ends WHERE newest >= %(first)s AND newest < %(end)s
    UNION
    SELECT half_id FROM {op_message} o WHERE NOT EXISTS (SELECT FROM {half_message} h WHERE h.id = o.half_id)
    UNION
    SELECT half_id FROM {message} m WHERE NOT EXISTS (SELECT FROM {half_message} h WHERE h.id = m.half_id)
    LIMIT %(limit)s
)
SELECT pg_current_snapshot()::text, (SELECT count(*) FROM {half_message}), (SELECT array_agg(id) FROM survivor),
       (SELECT array_agg(topic) FROM ends), (SELECT array_agg(queue) FROM ends), (SELECT array_agg(last) FROM ends)
"""
)

# All that can have made a half of the segment unsettled since the survey, or be new in it; each by an index, since the
# segment is locked meanwhile. An op's transaction wasn't in the survey's snapshot. A half that is new without an op has
# a check. A message that is new (sent again, released, made by a repair) is behind the end that its queue had in the
# segment: positions only grow, and the batches that append them come one after another.
#: Read what must be kept besides, since a survey. Rows: ``("", id)``.
CHANGED: str = (
    _QUEUES
    + """
SELECT '', half_id FROM {op_message} WHERE xid >= pg_snapshot_xmax(%(snapshot)s::pg_snapshot)
 UNION
SELECT '', half_id FROM {op_message} WHERE xid = ANY (ARRAY(SELECT pg_snapshot_xip(%(snapshot)s::pg_snapshot)))
 UNION
SELECT '', half_id FROM {s}.half_check WHERE half_id >= %(first)s AND half_id < %(end)s
 UNION
SELECT '', half_id FROM {s}.scheduled_message
 WHERE half_id >= %(first)s AND half_id < %(end)s AND recalled_at IS NULL
 UNION
SELECT '', n.half_id
  FROM queue_of p
  LEFT JOIN unnest(%(topics)s::text[], %(queues)s::int[], %(lasts)s::int8[]) e (topic, queue, last)
         ON e.topic = p.topic AND e.queue = p.queue
 CROSS JOIN LATERAL (SELECT half_id FROM {message} m
                      WHERE m.topic = p.topic AND m.queue = p.queue AND m.position > coalesce(e.last, 0)) n
"""
)

# Of halves that are gone. While a half is there, its history is.
#: Delete the rows in other tables of the halves from ``first`` to ``end`` that are gone.
left_over: Template = Template("""
WITH histories AS (
    DELETE FROM {s}.check_history c
     WHERE half_id >= %(first)s AND half_id < %(end)s
       AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = c.half_id)
), errors AS (
    DELETE FROM {s}.half_error e
     WHERE half_id >= %(first)s AND half_id < %(end)s
       AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = e.half_id)
), deliveries AS (
    DELETE FROM {s}.delivery e
     WHERE half_id >= %(first)s AND half_id < %(end)s
       AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = e.half_id)
), published AS (
    DELETE FROM {s}.published p
     WHERE id >= %(first)s AND id < %(end)s AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = p.id)
)
DELETE FROM {s}.scheduled_message d
 WHERE half_id >= %(first)s AND half_id < %(end)s AND recalled_at IS NOT NULL
   AND NOT EXISTS (SELECT FROM {s}.half_message h WHERE h.id = d.half_id)
""")


# --- of all sides ----------------------------------------------------------------------------------------------------


def partitions(schema: str, table: str) -> Statement:
    """Read the partitions of a table. Rows: ``(name, bounds)``."""
    return statement(schema, _PARTITIONS, {}, table=table)


def row_security(schema: str, tables: Collection[str]) -> Statement:
    """Tell whether row security hides something from this role. Rows: ``(it may,)``."""
    active = " OR ".join(f"row_security_active('{{s}}.{table}'::regclass)" for table in tables)
    return Statement(in_schema(f"SELECT {active}", schema))


def at_most(schema: str, leaves: Mapping[str, str], limit: int) -> Statement:
    """Count the rows of a segment's fullest partition, to a limit. Rows: ``(rows,)``."""
    counts = ", ".join(f"(SELECT count(*) FROM (SELECT FROM {{s}}.{name} LIMIT {limit}) x)" for name in leaves.values())
    return Statement(in_schema(f"SELECT greatest({counts})", schema))


def create(schema: str, table: str, leaf: str) -> Statement:
    """Make a table that can be attached."""
    like = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING INDEXES INCLUDING STORAGE"
    return Statement(in_schema(f"CREATE TABLE {{s}}.{leaf} (LIKE {{s}}.{table} {like})", schema))


def moved(schema: str, names: Mapping[str, str], columns: str, values: Mapping[str, object]) -> Statement:
    """Move the rows of a range out of the DEFAULT partition."""
    template = """
WITH moved AS (
    DELETE FROM {s}.{table}_default WHERE {column} >= %(first)s AND {column} < %(end)s RETURNING {columns}
)
INSERT INTO {s}.{leaf} ({columns}) SELECT {columns} FROM moved
"""
    return statement(schema, template, values, **names, columns=columns)


def attach(schema: str, names: Mapping[str, str], first: UUID, end: UUID) -> Statement:
    """Make a table a partition."""
    bounds = f"FROM ('{first}') TO ('{end}')"
    sql = f"ALTER TABLE {{s}}.{names['table']} ATTACH PARTITION {{s}}.{names['leaf']} FOR VALUES {bounds}"
    return Statement(in_schema(sql, schema))


_CHECK = "segments_ahead"


def _defaults(tables: Collection[str]) -> str:
    return ", ".join(f"'{{s}}.{table}_default'::regclass" for table in tables)


def size(schema: str, tables: Collection[str]) -> Statement:
    """Read how large the DEFAULT partitions are, dead rows and all. Rows: ``(bytes,)``."""
    sql = f"SELECT sum(pg_relation_size(oid))::int8 FROM unnest(ARRAY[{_defaults(tables)}]) oid"
    return Statement(in_schema(sql, schema))


def refusals(schema: str, tables: Collection[str]) -> Statement:
    """Read the CHECK of the DEFAULT partitions. Rows: ``(table, its text, it was validated)``."""
    sql = f"""
SELECT regexp_replace(c.relname, '_default$', ''), pg_get_constraintdef(k.oid), k.convalidated
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
 WHERE k.conname = '{_CHECK}' AND k.contype = 'c' AND k.conrelid IN ({_defaults(tables)})
 ORDER BY array_position(ARRAY[{_defaults(tables)}], c.oid::regclass)
"""
    return Statement(in_schema(sql, schema))


def occupied(schema: str, tables: Mapping[str, str], ranges: Sequence[tuple[UUID, UUID]]) -> Statement:
    """Tell in which ranges of ids the DEFAULT partitions have rows. Rows: ``(first,)``."""
    some = " OR ".join(
        f"EXISTS (SELECT FROM {{s}}.{table}_default WHERE {column} >= r.first AND {column} < r.behind)"
        for table, column in tables.items()
    )
    firsts, ends = zip(*ranges, strict=True)
    template = f"SELECT first FROM unnest(%s::uuid[], %s::uuid[]) r (first, behind) WHERE {some}"
    return Statement(in_schema(template, schema), (list(firsts), list(ends)))


def refuse(schema: str, table: str, column: str, ranges: Sequence[tuple[UUID, UUID]]) -> Statement:
    """Add a CHECK to a DEFAULT partition that lets in no id of the ranges; the rows that are there aren't read."""
    check = " AND ".join(f"({column} < '{first}' OR {column} >= '{end}')" for first, end in ranges)
    sql = f"ALTER TABLE {{s}}.{table}_default ADD CONSTRAINT {_CHECK} CHECK ({check}) NOT VALID"
    return Statement(in_schema(sql, schema))


def validate(schema: str, table: str) -> Statement:
    """Validate that CHECK: all rows are read, and no transaction that reads or writes waits."""
    return Statement(in_schema(f"ALTER TABLE {{s}}.{table}_default VALIDATE CONSTRAINT {_CHECK}", schema))


def let_in(schema: str, table: str) -> Statement:
    """Drop that CHECK."""
    return Statement(in_schema(f"ALTER TABLE {{s}}.{table}_default DROP CONSTRAINT IF EXISTS {_CHECK}", schema))


def make_survivors(schema: str, table: str) -> Statement:
    """Make a table for the rows to be kept, for this transaction."""
    return Statement(in_schema(f"CREATE TEMP TABLE survivors_{table} (LIKE {{s}}.{table}) ON COMMIT DROP", schema))


def copy_survivors(leaf: str, table: str, condition: str, columns: str, keys: Collection[Key]) -> Statement:
    """Copy the rows that ``condition`` finds by ``key_group`` and ``key_id`` to where they are kept. Rows: one each."""
    sql = f"""
INSERT INTO pg_temp.survivors_{table} ({columns})
SELECT {columns} FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) k (key_group, key_id)
 CROSS JOIN LATERAL (SELECT {columns} FROM {leaf} WHERE {condition} OFFSET 0) m
RETURNING 1
"""
    return Statement(sql, {"groups": [group for group, _ in keys], "ids": [id_ for _, id_ in keys]})


def put_back(leaf: str, table: str, columns: str) -> Statement:
    """Copy them back."""
    return Statement(f"INSERT INTO {leaf} ({columns}) SELECT {columns} FROM pg_temp.survivors_{table}")


def fold(schema: str, table: str, leaf: str, columns: str | None) -> list[Statement]:
    """Take a partition out, write these columns of its rows, if any, into the table again, and drop it."""
    again = f"INSERT INTO {{s}}.{table} ({columns}) SELECT {columns} FROM {{s}}.{leaf}"
    return [
        Statement(in_schema(sql, schema))
        for sql in (
            f"ALTER TABLE {{s}}.{table} DETACH PARTITION {{s}}.{leaf}",
            *([again] if columns else []),
            f"DROP TABLE {{s}}.{leaf}",
        )
    ]


def of_segment(template: str, schema: str, leaves: Mapping[str, str], values: Mapping[str, object]) -> Statement:
    """Return a statement in which each ``{table}`` stands for its partition."""
    return statement(schema, template, values, **{table: f"{{s}}.{leaf}" for table, leaf in leaves.items()})
