"""What became of messages since operators acted on them: read from the inboxes and the producers, written nowhere."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from outbox.database.execute import Template, execute, query
from outbox.database.sql import GROUP_QUEUES
from outbox.operator.acts import ACTS
from outbox.operator.changes import message_states
from outbox.operator.databases import is_away
from outbox.operator.model import FateSince

if TYPE_CHECKING:
    from outbox.operator.databases import Database, Databases

#: The acts after which groups have a message in their hands.
RETRIED = frozenset({"retry", "resend"})
_IN_GROUPS = frozenset({"resend", *(act.name for act in ACTS.values() if act.noun == "inbox")})

_KNOWN = f"{GROUP_QUEUES} SELECT DISTINCT topic, consumer_group FROM place ORDER BY 1, 2"

# A retry makes a message due, and so does a resend when its group comes to it: only an attempt since then says that it
# has failed again. A message that is still parked from before waits for its group to come to the resend.
_SINCE: Template = Template("""
SELECT w.number::int - 1, w.consumer_group,
       CASE WHEN m.message_id IS NULL THEN 'unconsumed'
            WHEN m.discarded_at IS NOT NULL THEN 'discarded'
            WHEN m.status IN ('consumed', 'quarantined') THEN m.status
            WHEN a.failed_at IS NOT NULL THEN m.status
            WHEN m.status = 'parked' AND m.changed_at > w.acted_at THEN 'parked'
            ELSE 'pending' END,
       m.changed_at, m.error_kind, left(split_part(m.last_error, E'\\n', 1), 1000)
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[], %(times)s::timestamptz[]) WITH ORDINALITY
       w (consumer_group, id, acted_at, number)
  LEFT JOIN LATERAL (SELECT * FROM {s}.consumer_message
                      WHERE consumer_group = w.consumer_group AND message_id = w.id LIMIT 1) m ON true
  LEFT JOIN LATERAL (SELECT failed_at FROM {s}.attempt_history h
                      WHERE h.message_id = w.id AND h.consumer_group = w.consumer_group AND h.failed_at > w.acted_at
                      ORDER BY failed_at DESC LIMIT 1) a ON true
 ORDER BY w.number
""")
_WITH_ERROR = frozenset({"failed", "parked", "discarded"})


@dataclass(frozen=True, slots=True)
class ActedMessage:
    """A message on which an act was done: in the inbox of a group, or (None) at its producer; when, by the database."""

    action: str
    message_id: UUID
    group: str | None
    topic: str | None
    acted_at: dt.datetime


def fates(
    databases: Databases, home: Database, acted: Sequence[ActedMessage]
) -> tuple[list[list[FateSince]], list[str]]:
    """Return what became of messages since acts that were done in a database, and which databases couldn't be read.

    After an act on an inbox: in that group. After a resend: in each group of the topic that a registered database
    knows; there the clocks of two databases are compared. After all other acts: at the producer.
    """
    found: list[list[FateSince]] = [[] for _ in acted]
    unreached = list(databases.away)
    by_producer = [number for number, each in enumerate(acted) if each.action not in _IN_GROUPS]
    if by_producer:
        with home.reading() as connection:
            ids = [acted[number].message_id for number in by_producer]
            (rows,) = execute(connection, message_states(home.schema, ids))
        states = {message_id: state for message_id, state, _ in rows}
        for number in by_producer:
            found[number].append(FateSince(home.name, None, states[acted[number].message_id], None, None, None))
    for database in databases.having("consumer"):
        numbers = [
            number
            for number, each in enumerate(acted)
            if each.action in _IN_GROUPS and (each.group is None or database is home)
        ]
        if not numbers:
            continue
        try:
            for number, fate in _in_groups(database, numbers, acted):
                found[number].append(fate)
        except SQLAlchemyError as error:
            if not is_away(error):
                raise
            unreached.append(database.name)
    return found, unreached


def _in_groups(
    database: Database, numbers: Iterable[int], acted: Sequence[ActedMessage]
) -> list[tuple[int, FateSince]]:
    schema, groups_of = database.schema, defaultdict(list)
    with database.reading() as connection:
        if any(acted[number].group is None for number in numbers):
            for topic, group in query(connection, schema, _KNOWN):
                groups_of[topic].append(group)
        pairs = [
            (number, group)
            for number in numbers
            for group in ([acted[number].group] if acted[number].group else groups_of[acted[number].topic])
        ]
        values = {
            "groups": [group for _, group in pairs],
            "ids": [acted[number].message_id for number, _ in pairs],
            "times": [acted[number].acted_at for number, _ in pairs],
        }
        (rows,) = execute(connection, _SINCE(schema, **values))
    return [
        (
            pairs[row][0],
            FateSince(database.name, group, status, at, *((kind, error) if status in _WITH_ERROR else (None, None))),
        )
        for row, group, status, at, kind, error in rows
    ]
