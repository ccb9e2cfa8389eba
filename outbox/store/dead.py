"""Statements that group dead letters (parked, and not discarded) by group, topic and kind of error."""

from __future__ import annotations

from outbox.store.execute import Statement, in_schema
from outbox.store.find_inbox import SHORT_ROW, UNCLASSIFIED

#: How many groups of dead letters a search knows, and how many rows it counts in all of them together.
MOST = 1_000
_COUNTED = 50_000
#: How many rows at either end of a group tell when its first and its last was parked.
_ENDS = 50

_KIND = f"coalesce(c.error_kind, '{UNCLASSIFIED}'::text)"
_DEAD = "c.status = 'parked' AND c.discarded_at IS NULL"

# Jumps from kind to kind in the index; how it says what comes next: see outbox/store/find_inbox.py.
_KINDS = f"""
WITH RECURSIVE kind AS (
    (SELECT c.consumer_group, c.topic, {_KIND} AS kind, 1 AS number FROM {{s}}.consumer_message c
      WHERE {_DEAD} {{first}} ORDER BY c.consumer_group, c.topic, {_KIND} LIMIT 1)
    UNION ALL
    SELECT n.*, k.number + 1 FROM kind k CROSS JOIN LATERAL (
        SELECT c.consumer_group, c.topic, {_KIND} FROM {{s}}.consumer_message c
         WHERE {_DEAD} AND {{next}}
         ORDER BY c.consumer_group, c.topic, {_KIND} LIMIT 1) n
     WHERE k.number < %(most)s
), chosen AS MATERIALIZED (
    SELECT consumer_group, topic, kind FROM kind WHERE {{of_topic}}
)"""

_NEXT = f"(c.consumer_group, c.topic, {_KIND}) > (k.consumer_group, k.topic, k.kind)"
_NEXT_OF_GROUP = f"c.consumer_group = k.consumer_group AND (c.topic, {_KIND}) > (k.topic, k.kind)"
_NEXT_OF_TOPIC = f"c.consumer_group = k.consumer_group AND c.topic = k.topic AND {_KIND} > k.kind"

_LIST = f"{_KINDS} SELECT consumer_group, topic, kind FROM chosen"

_THESE = f"{_DEAD} AND c.consumer_group = k.consumer_group AND c.topic = k.topic AND {_KIND} = k.kind"

_COUNTS = f"""{_KINDS}
SELECT k.consumer_group, k.topic, k.kind, n.count, n.most
  FROM chosen k CROSS JOIN LATERAL (
    SELECT count(*) AS count, (SELECT least(%(limit)s, greatest(%(counted)s / count(*), 100)) FROM chosen) AS most
      FROM (SELECT FROM {{s}}.consumer_message c WHERE {_THESE}
             LIMIT (SELECT least(%(limit)s, greatest(%(counted)s / count(*), 100)) FROM chosen)) c) n
 ORDER BY n.count DESC, 1, 2, 3 LIMIT %(groups)s
"""

_DETAILS = f"""
SELECT k.number, e.first, e.last, {SHORT_ROW}
  FROM unnest(%(consumer_groups)s::text[], %(topics)s::text[], %(kinds)s::text[]) WITH ORDINALITY
       k (consumer_group, topic, kind, number)
  CROSS JOIN LATERAL (
    SELECT * FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id DESC LIMIT 1) m
  CROSS JOIN LATERAL (
    SELECT min(changed_at) AS first, max(changed_at) AS last FROM (
        (SELECT changed_at FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id LIMIT %(ends)s)
        UNION ALL
        (SELECT changed_at FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id DESC LIMIT %(ends)s)) t) e
 ORDER BY k.number
"""


def kinds(schema: str, group: str | None = None, topic: str | None = None) -> Statement:
    """Find which kinds of dead letters there are, `MOST` at most. Rows: ``(group, topic, kind)``."""
    return _statement(_LIST, schema, group, topic, {})


def counts(schema: str, group: str | None, topic: str | None, groups: int, limit: int) -> Statement:
    """Count dead letters by their kind, the most first, ``groups`` kinds at most.

    Rows: ``(group, topic, kind, count, where the count stopped at most)``; the more kinds, the sooner it stops.
    """
    return _statement(_COUNTS, schema, group, topic, {"groups": groups, "limit": limit, "counted": _COUNTED})


def details(schema: str, groups: list[str], topics: list[str], kinds: list[str]) -> Statement:
    """Read the newest of each kind, and when the first and the last were parked, as told by the oldest and newest ids.

    Rows: ``(number from 1, first, last, group, id, topic, …)`` as of `outbox.store.find_inbox.list_inbox`; none for a
    kind that has gone meanwhile.
    """
    ends = max(1, min(_ENDS, 10_000 // max(len(groups), 1)))
    values = {"consumer_groups": groups, "topics": topics, "kinds": kinds, "ends": ends}
    return Statement(in_schema(_DETAILS, schema), values)


def _statement(sql: str, schema: str, group: str | None, topic: str | None, values: dict[str, object]) -> Statement:
    first, coming, of_topic = "", _NEXT, "true"
    if group is not None:
        first, coming = "AND c.consumer_group = %(group)s", _NEXT_OF_GROUP
        if topic is not None:
            first, coming = f"{first} AND c.topic = %(topic)s", _NEXT_OF_TOPIC
    elif topic is not None:
        of_topic = "topic = %(topic)s"
    sql = sql.replace("{first}", first).replace("{next}", coming).replace("{of_topic}", of_topic)
    return Statement(in_schema(sql, schema), values | {"group": group, "topic": topic, "most": MOST})
