"""Statements that find messages by many conditions; each looks at a window at most, and says where it stopped."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from outbox.store.browse import STATUS
from outbox.store.execute import Statement, in_schema

#: How many messages one search looks at, and how many where it must look each up in other tables, too.
WINDOW = 20_000
STATUS_WINDOW = 5_000
#: How many messages with one key are found by an index on keys; of more, the newest are found soon without it.
OF_KEY = 2_000
#: How many bodies one search reads, of how many bytes together, and how large one may be to be searched.
BODIES = 1_000
BODY_BYTES = 8 * 1024 * 1024
LARGEST_BODY = 1024 * 1024

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LAST_ID = (1 << 128) - 1
# An id has the time of the client's clock at which the message was handed over, ``born_at`` that of the database at the
# flush. So ids lie behind by the length of a transaction, and ahead only where a client's clock is wrong.
_BEHIND = dt.timedelta(days=1)
_AHEAD = dt.timedelta(minutes=5)

_OP = """
      LEFT JOIN LATERAL (SELECT * FROM {s}.op_message WHERE half_id = h.id LIMIT 1) o ON true
      LEFT JOIN LATERAL (SELECT * FROM {s}.scheduled_message WHERE half_id = h.id LIMIT 1) d ON true"""

# The halves of these states are found by a smaller table, however many others there are.
_DRIVERS = (
    ({"undecided"}, "half_check", "true"),
    ({"scheduled"}, "scheduled_message", "recalled_at IS NULL"),
    ({"recalled"}, "scheduled_message", "recalled_at IS NOT NULL"),
    ({"scheduled", "recalled"}, "scheduled_message", "true"),
    ({"rolled_back"}, "op_message", "resolution = 'rollback'"),
)

# Of these, all there are can be counted by an index.
_COUNTED: tuple[set[str], ...] = (set(), {"undecided"}, {"scheduled"}, {"scheduled", "recalled"})

_BY_DRIVER = """
(SELECT half_id FROM (SELECT * FROM {s}.{table} x
                       WHERE half_id < %(below)s::uuid AND half_id >= %(first)s::uuid
                       ORDER BY half_id DESC LIMIT %(window)s) x WHERE {fits}) c
      CROSS JOIN LATERAL (SELECT * FROM {s}.half_message WHERE id = c.half_id LIMIT 1) h"""

_BY_ID = """
(SELECT * FROM {s}.half_message
                 WHERE id < %(below)s::uuid AND id >= %(first)s::uuid
                 ORDER BY id DESC LIMIT %(window)s) h"""

# Written so that the primary key is of no use: the planner might read it to its end instead.
_OF_KEY = """{s}.half_message
                        WHERE key = %(key)s AND {topic}
                          AND coalesce(id < %(below)s::uuid AND id >= %(first)s::uuid, false)"""
_BY_KEY = f"""
(SELECT * FROM (SELECT * FROM {_OF_KEY} OFFSET 0) k ORDER BY id DESC) h"""

_ROW = f"h.id, h.topic, h.key, h.tag, {STATUS} AS status, h.born_at, h.deliver_at, o.decided_by, o.decided_at"

# The end of the window is read in the same snapshot as what is in it.
_LIST = """
WITH found AS MATERIALIZED (
    SELECT {row}
      FROM {from}{op}
     WHERE {where}
     ORDER BY {ordered} DESC LIMIT %(limit)s
), edge AS (
    SELECT {id} AS id FROM {s}.{table}
     WHERE (SELECT count(*) FROM found) < %(limit)s
       AND {id} < %(below)s::uuid AND {id} >= %(first)s::uuid
     ORDER BY {id} DESC OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.id, n.found, f.*
  FROM (SELECT count(*) AS found FROM found) n LEFT JOIN edge e ON {windowed} LEFT JOIN {found} f ON true
 ORDER BY f.id DESC
"""

# What one answer may have of bodies; the first one always comes.
_BODIES = """(SELECT b.* FROM (SELECT found.*, sum(octet_length(body)) OVER (ORDER BY id DESC) - octet_length(body)
                                      AS bytes_before FROM found) b WHERE bytes_before < %(bytes)s)"""

_JSON_BODY = """octet_length(h.body) <= %(largest_body)s AND
       (btrim(split_part(lower(h.content_type), ';', 1)) = 'application/json'
        OR right(btrim(split_part(lower(h.content_type), ';', 1)), 5) = '+json')"""

_COUNT_OF_KEY = f"SELECT count(*) FROM (SELECT FROM {_OF_KEY} LIMIT %(limit)s) k"

_COUNT = "SELECT count(*) FROM (SELECT FROM {s}.{table} WHERE {fits} LIMIT %(limit)s) c"

# An index with all keys in it, which begins with the key, or with the topic and then the key.
_KEY_INDEX = """
SELECT (SELECT array_agg(a.attname::text ORDER BY k.place)
          FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number WHERE k.place <= 2)
  FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_am m ON m.oid = c.relam
 WHERE i.indrelid = '{s}.half_message'::regclass AND i.indisvalid AND i.indisready AND m.amname IN ('btree', 'hash')
   AND coalesce(pg_get_expr(i.indpred, i.indrelid) = '(key IS NOT NULL)', true)
"""

_BODY = "SELECT content_type, body FROM {s}.half_message WHERE id = %s"


# What doesn't ask for a look at each half message that a smaller table leads to.
_NOT_OF_HALF: dict[str, Any] = {"statuses": (), "since": None, "until": None}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages; None (or nothing) looks at all. ``since`` and ``until`` go by ``born_at``.

    ``header`` is a name and its value; with ``json_body`` only those with JSON bodies that aren't too large to search.
    """

    statuses: tuple[str, ...] = ()
    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    producer_group: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    header: tuple[str, str] | None = None
    json_body: bool = False


def where(wanted: Wanted) -> tuple[str, dict[str, object]]:
    """Return the condition that says which are wanted, and its values; the schema is still ``{s}``.

    It is about a half message ``h``, its op ``o`` and its schedule ``d``.
    """
    values: dict[str, object] = {}
    conditions = []
    for name in ("topic", "key", "tag", "producer_group"):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(f"h.{name} = %({name})s")
            values[name] = value
    if wanted.header is not None:
        conditions.append("h.headers @> %(header)s::jsonb")
        values["header"] = json.dumps(dict([wanted.header]))
    if wanted.since is not None:
        conditions.append("h.id >= %(since_id)s::uuid AND h.born_at >= %(since)s")
        values |= {"since": wanted.since, "since_id": first_id(wanted.since)}
    if wanted.until is not None:
        conditions.append("h.id < %(until_id)s::uuid AND h.born_at < %(until)s")
        values |= {"until": wanted.until, "until_id": end_id(wanted.until)}
    if wanted.json_body:
        conditions.append(_JSON_BODY)
        values["largest_body"] = LARGEST_BODY
    if wanted.statuses:
        conditions.append(f"({STATUS}) = ANY (%(statuses)s)")
        values["statuses"] = sorted(set(wanted.statuses))
    return " AND ".join(conditions) or "true", values


def first_id(since: dt.datetime) -> UUID:
    """Return an id below those of all messages born at that time or later."""
    return _id_at(since, -_BEHIND)


def end_id(until: dt.datetime) -> UUID:
    """Return an id above those of all messages born before that time, unless a client's clock is ahead by minutes."""
    return _id_at(until, _AHEAD)


def _id_at(moment: dt.datetime, more: dt.timedelta) -> UUID:
    milliseconds = (moment - _EPOCH + more) // dt.timedelta(milliseconds=1)
    return UUID(int=max(0, min(milliseconds << 80, _LAST_ID)))


def list_messages(
    schema: str, wanted: Wanted, after: UUID | None, limit: int, *, window: int | None = None, by_key: bool = False
) -> Statement:
    """Find messages, the newest id first, below the id ``after``, among the next ``window`` (None: `window_of`).

    ``by_key`` looks at all that have the key, by an index on keys. With ``json_body``, rows have two columns more: the
    body, and one that is of no use; there are as many as may be read at once.

    Rows: ``(end of the window or None, how many were found, id, topic, key, tag, status, born_at, deliver_at,
    decided_by, decided_at)``,
    with an id of None where nothing is found. The end is None where all there are were seen, or ``limit`` were found.
    """
    table, fits = _driver(wanted)
    if by_key:
        table, source = "half_message", _BY_KEY
    else:
        source = _BY_ID if table == "half_message" else _BY_DRIVER
    condition, values = where(wanted)
    sql = (
        _LIST.replace("{from}", source)
        .replace("{op}", _OP)
        .replace("{ordered}", "h.id" if table == "half_message" else "c.half_id")
        .replace("{row}", _ROW + (", h.body" if wanted.json_body else ""))
        .replace("{where}", condition)
        .replace("{windowed}", "false" if by_key else "true")
        .replace("{found}", _BODIES if wanted.json_body else "found")
        .replace("{topic}", _of_topic(wanted))
        .replace("{table}", table)
        .replace("{fits}", fits)
        .replace("{id}", "id" if table == "half_message" else "half_id")
    )
    values |= _range(wanted, after) | {"limit": limit, "window": window or window_of(wanted), "bytes": BODY_BYTES}
    return Statement(in_schema(sql, schema), values)


def window_of(wanted: Wanted) -> int:
    """Return how many messages one search for these looks at."""
    found_by_status = _driver(wanted)[0] != "half_message" and replace(wanted, **_NOT_OF_HALF) == Wanted()
    return WINDOW if found_by_status or not wanted.statuses else STATUS_WINDOW


def _driver(wanted: Wanted) -> tuple[str, str]:
    statuses = set(wanted.statuses)
    return next(((table, fits) for of, table, fits in _DRIVERS if statuses == of), ("half_message", "true"))


def _of_topic(wanted: Wanted) -> str:
    return "true" if wanted.topic is None else "topic = %(topic)s"


def _range(wanted: Wanted, after: UUID | None) -> dict[str, object]:
    below = min(
        (bound for bound in (after, wanted.until and end_id(wanted.until)) if bound), default=UUID(int=_LAST_ID)
    )
    return {"below": below, "first": first_id(wanted.since) if wanted.since else UUID(int=0)}


def count_of_key(schema: str, wanted: Wanted, after: UUID | None, limit: int) -> Statement:
    """Count messages with the key by an index on it, ``limit`` at most. Rows: ``(messages,)``."""
    sql = _COUNT_OF_KEY.replace("{topic}", _of_topic(wanted))
    values: dict[str, object] = {"key": wanted.key, "topic": wanted.topic, "limit": limit}
    return Statement(in_schema(sql, schema), values | _range(wanted, after))


def count(schema: str, wanted: Wanted, limit: int) -> Statement | None:
    """Count what is wanted, ``limit`` at most; None where that is not cheap. Rows: ``(messages,)``."""
    table, fits = _driver(wanted)
    if replace(wanted, statuses=()) != Wanted() or set(wanted.statuses) not in _COUNTED:
        return None
    sql = _COUNT.replace("{table}", table).replace("{fits}", fits)
    return Statement(in_schema(sql, schema), {"limit": limit})


def key_indexes(schema: str) -> Statement:
    """Read by which columns indexes on half messages begin. Rows: ``([first, second],)``, None where there are none."""
    return Statement(in_schema(_KEY_INDEX, schema))


def has_key_index(columns: Sequence[Sequence[str] | None], topic: str | None) -> bool:
    """Tell whether messages with a key (and a topic) are found by one of these indexes."""
    return any(
        names is not None and (names[0] == "key" or (list(names) == ["topic", "key"] and topic is not None))
        for names in columns
    )


def body(schema: str, half_id: UUID) -> Statement:
    """Read a message's body. Rows: ``(content_type, bytes)`` or none."""
    return Statement(in_schema(_BODY, schema), (half_id,))
