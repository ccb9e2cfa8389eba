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

from typing import TYPE_CHECKING

from outbox.consumer import sql
from outbox.database.execute import execute, read_source

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.consumer.progress import ConsumerProgress, KnownRows


def begun(connection: Connection, progress: ConsumerProgress) -> ConsumerProgress:
    """Return the progress of a group that knows where its passage began."""
    if not progress.passage:
        return progress
    (rows,) = execute(connection, sql.passage_began(progress.of.schema, *progress.of.values, progress.passage))
    return progress._replace(began=rows[0][0])


def take_earlier(
    connection: Connection, source: Connection, progress: ConsumerProgress, inbox: KnownRows
) -> KnownRows | None:
    """Return the inbox without the messages that are to be handled again, whose rows are locked from then on.

    None: another transaction has one of the rows.
    """
    ids = sorted(id_ for id_, row in inbox.known.items() if progress.is_earlier(row))
    if not ids:
        return inbox
    schema = progress.of.schema
    (locked,) = execute(
        connection, sql.lock_earlier(schema, ids=ids, group=progress.of.group, passage=progress.passage)
    )
    if len(locked) < len(ids):
        return None
    (rows,) = read_source(source, sql.compensated(schema, ids=ids))
    again = set(ids).difference(id_ for (id_,) in rows)
    return inbox._replace(known={id_: row for id_, row in inbox.known.items() if id_ not in again}, again=again)
