"""Retry failed messages, one at a time: those which their queue has left behind.

An unordered group leaves a message behind when it fails. An ordered one retries it in place, and leaves it behind
only when it is parked; what an operator retries then is retried here.

Two transactions each: the first counts a start and commits, so that a message which kills its worker is found
out; the second locks the row, runs the handler and writes the result. Two workers that counted the same row
meet at the lock, and one of them goes on to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.consumer import sql
from outbox.consumer.subscription import (
    AttemptFailed,
    Entry,
    HandlerFailure,
    Subscription,
    counts_of,
    crashed,
    failure_from,
    filter_of,
    run_handler,
    settle,
    to_entry,
)
from outbox.database.at_commit import at_commit
from outbox.database.execute import execute, is_lost, read_source
from outbox.database.session import commit
from outbox.database.sql import GroupQueue
from outbox.message.model import Counts, Status
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection


_PRUNED = HandlerFailure("the producer has pruned this message: nothing to retry", Status.PARKED)


class Retrier:
    """The failed messages of one group."""

    def __init__(self, subscription: Subscription, settings: Settings) -> None:
        self._subscription = subscription
        self._settings = settings

    def next(self, connection: Connection, source: Connection) -> Counts:
        """Retry the message that is due first; nothing if none is due."""
        subscription, settings = self._subscription, self._settings
        schema, group, topic = settings.schema, subscription.group, subscription.topic
        claim = sql.claim_due(schema, group=group, topic=topic, ordered=subscription.ordered)
        with connection.begin():
            (due,) = execute(connection, claim)
            if not due:
                return Counts()
        message_id, queue, position, attempts, claims = due[0]
        queue_of_group = GroupQueue(schema, group, topic, queue)
        entry = Entry(position, message_id, None)
        try:
            if claims > settings.max_claims:
                raise AttemptFailed(entry, attempts, crashed(claims))
            with connection.begin():
                (locked,) = execute(connection, sql.lock_failed(schema, group, message_id))
                if not locked:
                    return Counts(more=True)
                # The row lock is held: nobody else runs this message until this transaction ends. One that was never
                # attempted (its quarantine was released) hasn't been through the group's filter.
                taken = filter_of(subscription) if locked[0][1] else {"tags": None, "keys": None}
                (rows,) = read_source(source, sql.message_by_id(schema, id=message_id, **taken))
                if not rows:
                    raise AttemptFailed(entry, attempts + 1, _PRUNED)
                entry = to_entry(rows[0], subscription, queue)
                if entry.message is None:
                    execute(connection, sql.forget(schema, group, message_id))
                    return Counts(taken=1, more=True)
                return self._attempt(connection, queue_of_group, entry, attempts + 1)
        except AttemptFailed as failed:
            row = settle(subscription, failed.entry, failed.attempts, failed.failure, settings.retry_jitter)
            with connection.begin():
                at_commit(connection, sql.settle(queue_of_group, row))
            return counts_of(row)

    def _attempt(self, connection: Connection, queue_of_group: GroupQueue, entry: Entry, attempt: int) -> Counts:
        run_handler(connection, self._subscription, [entry], attempt)
        row = sql.InboxUpdate(entry.id, entry.position, Status.CONSUMED.value, attempt, entry.digest(), None)
        at_commit(connection, sql.settle(queue_of_group, row))
        try:
            commit(connection)
        except Exception as error:
            if is_lost(connection):
                raise
            raise AttemptFailed(entry, attempt, failure_from(error)) from error
        return Counts(taken=1, done=1, more=True)
