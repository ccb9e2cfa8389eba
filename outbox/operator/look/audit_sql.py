"""Statements that find what operators did; by the target through an index, else within a window."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from outbox.database.execute import Statement, in_schema
from outbox.operator.look.inbox_sql import GROUPS

#: How many acts one search looks at, and how many of one target are ever shown.
WINDOW = 20_000
OF_TARGET = 5_000

_LAST = 2**63 - 1

_ROW = "id, acted_at, actor, action, target, reason, result::text, origin::text"

_LIST = f"""
WITH found AS MATERIALIZED (
    SELECT * FROM (SELECT * FROM {{s}}.audit WHERE id < %(below)s ORDER BY id DESC LIMIT %(window)s) a
     WHERE {{where}}
     ORDER BY id DESC LIMIT %(limit)s
), edge AS (
    SELECT id FROM {{s}}.audit WHERE (SELECT count(*) FROM found) < %(limit)s AND id < %(below)s
     ORDER BY id DESC OFFSET %(window)s - 1 LIMIT 1
)
SELECT e.id, {", ".join(f"f.{column.strip()}" for column in _ROW.split(","))}
  FROM (SELECT 1) one LEFT JOIN edge e ON true LEFT JOIN found f ON true
 ORDER BY f.id DESC
"""

# All of a target at once: in the order of ids, the planner might read the primary key to its end.
_OF_TARGETS = f"""
WITH found AS MATERIALIZED (
    SELECT * FROM {{s}}.audit a WHERE a.target = ANY (%(targets)s) LIMIT {OF_TARGET}
)
SELECT NULL::bigint, {_ROW} FROM found a WHERE id < %(below)s AND {{where}} ORDER BY id DESC LIMIT %(limit)s
"""

_COUNT = "SELECT count(*) FROM (SELECT FROM {s}.audit LIMIT %(limit)s) a"

# What has an inbox row, and what has only been quarantined: groups are known by either.
_KNOWN_GROUPS = f"""
WITH RECURSIVE {GROUPS} SELECT consumer_group FROM place ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which acts; None looks at all. One of ``targets`` must be theirs."""

    actor: str | None = None
    action: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    targets: Sequence[str] | None = None


def list_audit(schema: str, wanted: Wanted, below: int | None, limit: int, window: int = WINDOW) -> Statement:
    """Find acts, the newest id first, below an id.

    Rows: ``(id at which the window ended, id, acted_at, actor, action, target, reason, result, origin)``, the last two
    as JSON texts; with a second id of None where nothing is found.
    """
    values: dict[str, object] = {"below": _LAST if below is None else below, "limit": limit, "window": window}
    conditions = []
    for condition, name in (
        ("a.actor = %(actor)s", "actor"),
        ("a.action = %(action)s", "action"),
        ("a.acted_at >= %(since)s", "since"),
        ("a.acted_at < %(until)s", "until"),
    ):
        if (value := getattr(wanted, name)) is not None:
            conditions.append(condition)
            values[name] = value
    sql = _LIST
    if wanted.targets is not None:
        sql = _OF_TARGETS
        values["targets"] = list(wanted.targets)
    return Statement(in_schema(sql.replace("{where}", " AND ".join(conditions) or "true"), schema), values)


def count(schema: str, limit: int) -> Statement:
    """Count all acts, ``limit`` at most. Rows: ``(acts,)``."""
    return Statement(in_schema(_COUNT, schema), {"limit": limit})


def groups(schema: str) -> Statement:
    """Find the groups that have rows in the inbox. Rows: ``(group,)``."""
    return Statement(in_schema(_KNOWN_GROUPS, schema))
