"""Statements of operators' acts on messages: in which state each is, locks, and changes with their audit rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from outbox.database.execute import Statement, in_schema

#: The state of a half message ``h`` with its op ``o``, schedule ``d`` and check ``c``.
HALF_STATE = """CASE WHEN h.id IS NULL THEN 'unknown'
            WHEN o.half_id IS NULL THEN CASE WHEN c.fenced THEN 'fenced' ELSE 'undecided' END
            WHEN o.resolution = 'rollback' THEN 'rolled_back'
            WHEN EXISTS (SELECT FROM {s}.compensation x WHERE x.half_id = h.id) THEN 'compensated'
            WHEN EXISTS (SELECT FROM {s}.bulk_item i
                          WHERE i.message_id = h.id AND i.action = 'compensate' AND i.state = 'pending')
                 THEN 'compensating'
            WHEN d.recalled_at IS NOT NULL THEN 'recalled'
            WHEN EXISTS (SELECT FROM {s}.message m WHERE m.half_id = h.id) THEN 'dispatched'
            WHEN d.half_id IS NOT NULL OR h.deliver_at IS NOT NULL THEN 'scheduled'
            ELSE 'committed' END"""

HALF_JOINS = """
  LEFT JOIN {s}.op_message o ON o.half_id = h.id
  LEFT JOIN {s}.scheduled_message d ON d.half_id = h.id
  LEFT JOIN {s}.half_check c ON c.half_id = h.id"""

#: The state of an inbox row ``m``.
INBOX_STATE = "CASE WHEN m.discarded_at IS NULL THEN m.status ELSE 'discarded' END"

_HALF_STATES = f"""
SELECT w.id, {HALF_STATE}, h.topic
  FROM unnest(%(ids)s::uuid[]) w (id)
  LEFT JOIN {{s}}.half_message h ON h.id = w.id{HALF_JOINS}
"""

_INBOX_STATES = f"""
SELECT w.consumer_group, w.id, {INBOX_STATE}, m.topic, m.error_kind
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) w (consumer_group, id)
  CROSS JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                       WHERE consumer_group = w.consumer_group AND message_id = w.id OFFSET 0) m
"""

# A statement of its own, before the change: what a rival did while this one waited is seen. Who skips what others hold
# can tell it from what isn't there.
_LOCK_INBOX = f"""
SELECT w.number::int, l.state,
       EXISTS (SELECT FROM {{s}}.consumer_message e WHERE e.consumer_group = w.consumer_group AND e.message_id = w.id)
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[]) WITH ORDINALITY w (consumer_group, id, number)
  LEFT JOIN LATERAL (SELECT {INBOX_STATE} AS state FROM {{s}}.consumer_message m
                      WHERE m.consumer_group = w.consumer_group AND m.message_id = w.id
                        FOR UPDATE {{skip}}) l ON true
 ORDER BY w.number
"""

_CHANGES = {
    # With all its attempts if it had used them up.
    "retry": """status = 'failed', next_attempt_at = clock_timestamp(),
       attempts = CASE WHEN m.status = 'parked' THEN 0 ELSE m.attempts END,
       claims = CASE WHEN m.status = 'parked' THEN 0 ELSE m.claims END""",
    "park": """status = 'parked', next_attempt_at = NULL, claims = 0,
       error_kind = coalesce(m.error_kind, 'parked by an operator')""",
    "discard": "discarded_at = clock_timestamp()",
    "restore": "discarded_at = NULL",
}

_CHANGE = f"""
WITH changed AS (
    UPDATE {{s}}.consumer_message m
       SET {{change}}, changed_at = clock_timestamp()
      FROM unnest(%(groups)s::text[], %(ids)s::uuid[], %(states)s::text[]) WITH ORDINALITY
           w (consumer_group, id, state, number)
     WHERE m.consumer_group = w.consumer_group AND m.message_id = w.id AND {INBOX_STATE} = w.state
    RETURNING m.consumer_group, m.message_id, w.state, w.number
), recorded AS (
    INSERT INTO {{s}}.audit (actor, action, target, reason, result, origin)
    SELECT %(actor)s, %(action)s, consumer_group || '/' || message_id, %(reason)s,
           jsonb_build_object('was', state), %(origin)s::jsonb
      FROM changed ORDER BY number
)
SELECT consumer_group, message_id FROM changed
"""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an audit row says beside its target: who, what, why, by which way."""

    actor: str
    action: str
    reason: str
    origin: Mapping[str, str]


def half_states(schema: str, ids: Sequence[UUID]) -> Statement:
    """Read in which state these halves are. Rows: ``(id, state, topic)``; state ``unknown`` where there is none."""
    return Statement(in_schema(_HALF_STATES, schema), {"ids": list(ids)})


def inbox_states(schema: str, groups: Sequence[str], ids: Sequence[UUID]) -> Statement:
    """Read in which state these inbox rows are. Rows: ``(group, id, state, topic, error kind)`` of those there are."""
    return Statement(in_schema(_INBOX_STATES, schema), {"groups": list(groups), "ids": list(ids)})


def lock_inbox(schema: str, groups: Sequence[str], ids: Sequence[UUID], *, wait: bool) -> Statement:
    """Lock inbox rows; without ``wait``, only those that nobody else holds.

    Rows: ``(number from 1, state, is there)``, one for each asked; the state is NULL where it isn't locked.
    """
    sql = _LOCK_INBOX.replace("{skip}", "" if wait else "SKIP LOCKED")
    return Statement(in_schema(sql, schema), {"groups": list(groups), "ids": list(ids)})


def change_inbox(
    schema: str, action: str, groups: Sequence[str], ids: Sequence[UUID], states: Sequence[str], said: Recorded
) -> Statement:
    """Do retry, park, discard or restore to inbox rows that are in these states; record each.

    Rows: ``(group, id)`` of those that were changed.
    """
    return Statement(
        in_schema(_CHANGE.replace("{change}", _CHANGES[action]), schema),
        {
            "groups": list(groups),
            "ids": list(ids),
            "states": list(states),
            "actor": said.actor,
            "action": said.action,
            "reason": said.reason or None,
            "origin": json.dumps(dict(said.origin)) if said.origin else None,
        },
    )
