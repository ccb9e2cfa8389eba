"""Statements of the measures: what the business tables add up to, and what the bodies of messages carry.

The user chooses their columns, so they are put together here, from names that were checked and paths that are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from outbox.consumer.sql import MATCHES
from outbox.database.execute import Statement
from outbox.message.content import ENCODING_HEADER

#: What a body may have under a value, as text: what Python and PostgreSQL read as the same decimal.
NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?"
#: Its longest text.
NUMBER_CHARS = 1000

# Keys are compared across databases by their text, which must not depend on how either of them is configured.
_LIMITS = """
SELECT set_config('statement_timeout', %s, true), set_config('TimeZone', 'UTC', true),
       set_config('DateStyle', 'ISO, YMD', true), set_config('IntervalStyle', 'iso_8601', true),
       set_config('bytea_output', 'hex', true), set_config('extra_float_digits', '1', true)
"""

#: Half messages by their ids, as far as they are meant for the group. Rows: ``(id, content type, body, encoding)``.
HALVES_OF = f"""
SELECT h.id, h.content_type, h.body, h.headers ->> '{ENCODING_HEADER}' AS encoding
  FROM {{s}}.half_message h WHERE h.id = ANY (%(ids)b::uuid[]) AND {MATCHES}"""

#: How many of them are still there. Rows: ``(halves,)``.
COUNT_HALVES = "SELECT count(*) FROM {s}.half_message WHERE id = ANY (%(ids)b::uuid[])"

#: The half messages of a topic, from one id to another, that were committed and not taken back, as far as they are
#: meant for the group, which began after some positions, by queue. Where the newest send lies: a message that was sent
#: before the group began, and again since, is one of its own. Rows: as `HALVES_OF`.
SETTLED_HALVES = f"""
SELECT h.id, h.content_type, h.body, h.headers ->> '{ENCODING_HEADER}' AS encoding
  FROM {{s}}.half_message h JOIN {{s}}.op_message o ON o.half_id = h.id
 WHERE h.id BETWEEN %(first)s AND %(last)s AND h.topic = %(topic)s AND o.resolution = 'commit'
   AND {MATCHES}
   AND NOT EXISTS (SELECT FROM {{s}}.compensation c WHERE c.half_id = h.id)
   AND NOT EXISTS (SELECT FROM {{s}}.scheduled_message d WHERE d.half_id = h.id AND d.recalled_at IS NOT NULL)
   AND (cardinality(%(queues)s::int[]) = 0 OR NOT EXISTS (
       SELECT FROM (SELECT m.queue, m.position FROM {{s}}.message m
                     WHERE m.half_id = h.id ORDER BY m.send_number DESC LIMIT 1) n
         JOIN unnest(%(queues)s::int[], %(positions)s::bigint[]) AS s (queue, position) ON s.queue = n.queue
        WHERE n.position <= s.position))"""

#: The id that so many half messages precede. Rows: ``(id,)`` or none.
BATCH_END = """
SELECT id FROM {s}.half_message WHERE id BETWEEN %(first)s AND %(last)s ORDER BY id OFFSET %(batch)s LIMIT 1
"""

# OFFSET 0: a body is parsed once, and judged once, however many columns are taken from it (half the time). CASE: never,
# where it isn't said to be JSON, or is compressed, which the client reads then.
_SUMS = """
WITH half AS ({halves}
), part AS (
    SELECT {parts}
      FROM half h CROSS JOIN LATERAL (
           SELECT CASE WHEN h.encoding IS NULL AND (h.content_type = 'application/json'
                         OR lower(btrim(split_part(h.content_type, ';', 1))) ~ '(^application/json|[+]json)$')
                       THEN convert_from(h.body, 'UTF8')::jsonb END AS body OFFSET 0) b
    OFFSET 0
), judged AS (
    SELECT *, coalesce({good}, false) AS good FROM part OFFSET 0
)
SELECT good, count(*){columns} FROM judged GROUP BY good{keys}
"""

_IS_NUMBER = f"""jsonb_typeof({{c}}) IN ('number', 'string') AND {{c}} #>> '{{}}' ~ '^{NUMBER}$'
                 AND length({{c}} #>> '{{}}') <= {NUMBER_CHARS}"""


def limits(seconds: float) -> Statement:
    """For this transaction, let no statement run longer, and have the same text for the same value everywhere."""
    return Statement(_LIMITS, (f"{int(seconds * 1000)}ms",))


def bodies(halves: Statement, after: UUID, limit: int) -> Statement:
    """Read the next bodies. Rows: ``(id, content type, body, encoding)``, by id."""
    columns = "id, content_type, body, encoding"
    sql = f"SELECT {columns} FROM ({halves.sql}) h WHERE id > %(after)s ORDER BY id LIMIT %(limit)s"
    return Statement(sql, {**dict(halves.values), "after": after, "limit": limit})


def body_sums(halves: Statement, by: Sequence[Sequence[str]], values: Sequence[Sequence[str] | None]) -> Statement:
    """Add up what bodies carry; ``by`` and ``values`` are paths in them, None counts.

    Rows: ``(readable, messages, *key, *sums)``; those that aren't readable have neither key nor sums. A body that
    is said to be JSON, and isn't, makes the statement fail.
    """
    key = {f"k{number}": list(path) for number, path in enumerate(by)}
    added = {f"v{number}": None if path is None else list(path) for number, path in enumerate(values)}
    paths = {column: path for column, path in (key | added).items() if path is not None}
    good = [f"jsonb_typeof({column}) NOT IN ('object', 'array')" for column in key]
    good += [_IS_NUMBER.replace("{c}", column) for column in added if column in paths]
    keys = [f", CASE WHEN good THEN {column} #>> '{{}}' END" for column in key]
    sums = [
        f", sum(CASE WHEN good THEN ({column} #>> '{{}}')::numeric END)" if path else ", count(*)::numeric"
        for column, path in added.items()
    ]
    sql = _SUMS.format(
        halves=halves.sql,
        parts=", ".join(f"b.body #> %({column})s::text[] AS {column}" for column in paths) or "h.id",
        good=" AND ".join(good) or "true",
        columns="".join([*keys, *sums]),
        keys="".join(keys),
    )
    return Statement(sql, {**dict(halves.values), **paths})


def select_columns(select: str) -> str:
    """Return the SQL that gives the columns of a user's SELECT and no row."""
    return f"SELECT * FROM (\n{select}\n) AS measured LIMIT 0"


def select_sums(select: str, by: Sequence[str], values: Sequence[str]) -> str:
    """Return the SQL that adds up a user's SELECT. Rows: ``(*key, *sums)``."""
    key = [f'"{column}"::text' for column in by]
    added = [f'coalesce(sum("{column}"), 0)::numeric' for column in values]
    grouped = f" GROUP BY {', '.join(key)}" if key else ""
    return f"SELECT {', '.join([*key, *added])} FROM (\n{select}\n) AS measured{grouped}"
