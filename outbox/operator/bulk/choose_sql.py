"""Statements that choose what a bulk job acts on: counted for a preview, written as items at its start.

Both evaluate the same `Matched`, so that what was shown is what is written, or else a different count or hash tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outbox.database.execute import Statement, in_schema
from outbox.operator.changes import INBOX_STATE, MESSAGE_JOINS, MESSAGE_STATE, ActRequest, inbox_columns
from outbox.operator.look.inbox_sql import GROUPS
from outbox.operator.model import Target

#: How many of each state come as a sample.
SAMPLE = 5

_HALF_ROW = f"NULL::text AS consumer_group, h.topic, NULL::text AS kind, {MESSAGE_STATE} AS state"

_HALVES = f"""
    SELECT NULL::bigint AS place, h.id, {_HALF_ROW}
      FROM {{from}}
     WHERE {{where}} AND (%(edge)s::uuid IS NULL OR h.id <= %(edge)s::uuid)
     LIMIT %(most)s"""

# What took effect somewhere isn't compensated; only the process that orders it knows other databases.
_NAMED_HALVES = f"""
    SELECT place, id, consumer_group, topic, kind,
           CASE WHEN id = ANY (%(delivered)s::uuid[])
                     AND state IN ('committed', 'dispatched', 'scheduled', 'recalled') THEN 'delivered'
                ELSE state END AS state
      FROM (SELECT w.place, w.id, {_HALF_ROW}
              FROM unnest(%(ids)s::uuid[]) WITH ORDINALITY w (id, place)
              LEFT JOIN {{s}}.half_message h ON h.id = w.id{MESSAGE_JOINS}) n"""

_INBOX = f"""
    SELECT NULL::bigint AS place, m.message_id AS id, m.consumer_group, m.topic, m.error_kind AS kind,
           {INBOX_STATE} AS state
      FROM {{s}}.consumer_message m
     WHERE {{where}} AND (%(edge)s::timestamptz IS NULL OR m.changed_at <= %(edge)s::timestamptz)
     LIMIT %(most)s"""

_NAMED_INBOX = f"""
    SELECT w.place, w.id, w.consumer_group, m.topic, m.error_kind AS kind,
           CASE WHEN m.message_id IS NULL THEN 'unconsumed' ELSE {INBOX_STATE} END AS state
      FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) WITH ORDINALITY w (consumer_group, id, place)
      LEFT JOIN {{s}}.consumer_message m ON m.consumer_group = w.consumer_group AND m.message_id = w.id"""

_HASH = "hashtextextended(id::text || coalesce('/' || consumer_group, '') || state, 0)"

_SUMMARY = f"""
SELECT state, count(*), sum({_HASH})::text, max(id::text COLLATE "C")::uuid, statement_timestamp(),
       min(consumer_group), max(consumer_group), min(topic), max(topic), min(coalesce(kind, '')),
       max(coalesce(kind, '')),
       (array_agg(id ORDER BY id DESC))[1:{SAMPLE}], (array_agg(consumer_group ORDER BY id DESC))[1:{SAMPLE}]{{more}}
  FROM matched GROUP BY state ORDER BY 2 DESC, 1
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

_DESCRIBE = "UPDATE {s}.bulk_job SET selector = selector || jsonb_build_object('described', %s::text) WHERE id = %s"

_INBOX_IDS = """
SELECT DISTINCT m.message_id
  FROM {s}.consumer_message m
 WHERE {where} AND (%(edge)s::timestamptz IS NULL OR m.changed_at <= %(edge)s::timestamptz)
 LIMIT %(most)s
"""

_NOW = "SELECT statement_timestamp()"

_CONSUMED = f"""
WITH RECURSIVE {GROUPS}
SELECT w.id, p.consumer_group
  FROM unnest(%(ids)s::uuid[]) w (id) CROSS JOIN place p
 WHERE EXISTS (SELECT FROM {{s}}.consumer_message m
                WHERE m.consumer_group = p.consumer_group AND m.message_id = w.id AND m.status = 'consumed')
"""


@dataclass(frozen=True, slots=True)
class Matched:
    """A query of what is matched, and its values: ``place, id, consumer_group, topic, kind, state``.

    ``edge`` bounds it to what there was at a moment: a greatest id, for an inbox a time.
    """

    sql: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NewBulkJob:
    """A row of `bulk_job`, but for what it acts on."""

    id: UUID
    request: ActRequest
    selector: Mapping[str, Any]
    rate: float | None
    key: str | None


def halves(source: str, where: str, values: Mapping[str, Any], edge: UUID | None, most: int) -> Matched:
    """Match halves of ``source``, which has ``h``, ``o``, ``d`` and ``c`` (`MESSAGE_JOINS`), by a condition."""
    sql = _HALVES.replace("{from}", source).replace("{where}", f"({where})")
    return Matched(sql, {**values, "edge": edge, "most": most})


def named_halves(ids: Sequence[UUID], delivered: Sequence[UUID]) -> Matched:
    """Match these halves; those that took effect somewhere already are in state ``delivered``."""
    return Matched(_NAMED_HALVES, {"ids": list(ids), "delivered": list(delivered)})


def inbox(where: str, values: Mapping[str, Any], edge: object, most: int) -> Matched:
    """Match inbox rows ``m`` by a condition."""
    return Matched(_INBOX.replace("{where}", f"({where})"), {**values, "edge": edge, "most": most})


def named_inbox(targets: Sequence[Target]) -> Matched:
    """Match the inbox rows of these groups and messages."""
    return Matched(_NAMED_INBOX, inbox_columns(targets))


def ids(schema: str, matched: Matched) -> Statement:
    """Read which messages are matched. Rows: ``(id,)``."""
    return Statement(in_schema(f"SELECT id FROM ({matched.sql}) m", schema), dict(matched.values))


def summary(schema: str, matched: Matched) -> Statement:
    """Count what is matched.

    Rows, one for each state: ``(state, count, hash, greatest id, time, least and greatest group, topic and kind, ids
    and groups of a sample)``.
    """
    sql = f"WITH matched AS MATERIALIZED ({matched.sql}){_SUMMARY.replace('{more}', '')}"
    return Statement(in_schema(sql, schema), dict(matched.values))


def start(
    schema: str, matched: Matched, new: NewBulkJob, able: Sequence[str], whys: Mapping[str, str], *, all_of_them: bool
) -> Statement:
    """Write a bulk job and its items, unless its key is there; ``all_of_them``: also what is skipped, and why.

    Rows as of `summary`, each with ``(items to be, items that were written)``; these differ where the key is there, or
    a message has a compensation already.
    """
    request = new.request
    sql = _START.replace("{matched}", matched.sql).replace(
        "{chosen}", "true" if all_of_them else "state = ANY (%(able)s::text[])"
    )
    return Statement(
        in_schema(sql, schema),
        {
            **matched.values,
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
        },
    )


def describe(schema: str, bulk_job_id: UUID, described: str) -> Statement:
    """Write down in words what a bulk job does."""
    return Statement(in_schema(_DESCRIBE, schema), (described, bulk_job_id))


def inbox_ids(schema: str, where: str, values: Mapping[str, Any], edge: object, most: int) -> Statement:
    """Read the messages of inbox rows ``m`` that fit. Rows: ``(id,)``."""
    return Statement(
        in_schema(_INBOX_IDS.replace("{where}", f"({where})"), schema), {**values, "edge": edge, "most": most}
    )


def now() -> Statement:
    """Read the database's clock. Rows: ``(time,)``."""
    return Statement(_NOW)


def consumed(schema: str, ids: Sequence[UUID]) -> Statement:
    """Read which of these messages took effect here. Rows: ``(id, group)``."""
    return Statement(in_schema(_CONSUMED, schema), {"ids": list(ids)})
