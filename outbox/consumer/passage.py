"""Handle messages again that a group has handled: which of a batch an earlier passage had, and what becomes of them.

A group's first passage of a queue is number 0. An operator's reset, or skip of a backlog, begins another one
(`outbox.operator.groups`): the offset is moved, and knows the number from then on. The inbox isn't touched: its rows
know in which passage they were written. So a row of an earlier one, from behind the position where this one began,
stands for a message that is to be handled again. Its result is written over the row, whose former content is kept in
``reread_message`` by the same transaction. Quarantined, discarded and compensated ones never run again.

**The races** of a message that is handled again. Its row is locked first, without waiting:

- *a retry* of the failed message, or *an operator's act* on it, holds the row: the step ends, and the next one looks
  again. A retry that comes later counts for this passage.
- *a quarantine* waits for the lock, and finds the message consumed. Whether the message is compensated, or about to be,
  is asked once the rows are locked: a compensation that had looked at this inbox before is known to the producer by
  then, and the message is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.consumer import sql
from outbox.database.execute import Row, execute, read_source
from outbox.message.model import Status

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.database.sql import GroupQueue


@dataclass(frozen=True, slots=True)
class Passage:
    """A group's passage of a queue: what an earlier one had from behind ``began`` is handled again."""

    number: int = 0
    began: int = 0


#: What a group begins with.
FIRST_PASSAGE = Passage()


def passage_of(connection: Connection, queue: GroupQueue, number: int) -> Passage:
    """Return a passage by its number, which the offset has."""
    if not number:
        return FIRST_PASSAGE
    (rows,) = execute(connection, sql.passage_began(queue.schema, *queue.values, number))
    return Passage(number, rows[0][0])


def take_earlier(
    connection: Connection, source: Connection, queue: GroupQueue, passage: Passage, known: Mapping[object, Row]
) -> list[UUID] | None:
    """Return which messages are to be handled again, of those that the inbox knows, with their rows locked.

    ``known`` are rows of `sql.known`. None: another transaction has one of the rows.
    """
    ids = sorted(row[0] for row in known.values() if _is_earlier(row, queue, passage))
    if not ids:
        return []
    of_group = {"group": queue.group, "passage": passage.number}
    (locked,) = execute(connection, sql.lock_earlier(queue.schema, ids=ids, **of_group))
    if len(locked) < len(ids):
        return None
    (rows,) = read_source(source, sql.compensated(queue.schema, ids=ids))
    undone = {id_ for (id_,) in rows}
    return [id_ for id_ in ids if id_ not in undone]


def _is_earlier(row: Row, queue: GroupQueue, passage: Passage) -> bool:
    # By the position at which the message was handled: one that was only sent again since wasn't read again.
    _, status, _, _, in_queue, position, discarded, number, _ = row
    return (
        number < passage.number
        and Status(status).reread
        and not discarded
        and in_queue == queue.queue
        and position > passage.began
    )
