"""Statements of operators' acts: each writes what was done, in the transaction of the act."""

from __future__ import annotations

import json
from collections.abc import Mapping

from outbox.store.execute import Statement, in_schema

_AUDIT = """
INSERT INTO {s}.audit (actor, action, target, reason, result, origin)
VALUES (%s, %s, %s, %s, %s::jsonb, %s::jsonb)
"""

_WAIT = "SELECT set_config('lock_timeout', %s, true)"


def wait_at_most(seconds: float) -> Statement:
    """For this transaction, let no statement wait longer for a lock."""
    return Statement(_WAIT, (f"{max(int(seconds * 1000), 1)}ms",))


def audit(
    schema: str,
    actor: str,
    action: str,
    target: str,
    reason: str,
    result: object = None,
    origin: Mapping[str, str] | None = None,
) -> Statement:
    """Record who did what to which target, why, with what result, and by which way it came."""
    shown = None if result is None else json.dumps(result, default=str)
    return Statement(
        in_schema(_AUDIT, schema), (actor, action, target, reason, shown, json.dumps(dict(origin)) if origin else None)
    )
