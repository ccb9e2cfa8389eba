"""Retry failed messages that their queue has left behind, one at a time.

An unordered group leaves a message behind when it fails. An ordered one retries it in place, and leaves it behind only
when it is parked; what an operator retries then is retried here. Each retry is two transactions: the first counts a
start and commits, so that a message which kills its worker is found out; the second locks the row, runs the handler and
writes the result. A message that was started less than a second ago is left to its worker; two that counted the same
row all the same meet at the lock, and one of them goes on to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outbox.consumer import key_order, sql
from outbox.consumer.control.gate import Gate
from outbox.consumer.failure import expired_of, record_expiry, record_failure
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.subscription import (
    EVERYTHING,
    AttemptFailed,
    Entry,
    Subscription,
    count_attempt,
    counts_of,
    crashed,
    event_of,
    filter_of,
    handled,
    raise_refused,
    run_handler,
    settle,
    settled,
    to_entry,
)
from outbox.database.at_commit import at_commit
from outbox.database.duty import Duty
from outbox.database.execute import execute, read_source
from outbox.database.session import begin, commit
from outbox.database.sql import GroupQueue, plan_by_index
from outbox.message.answer import HandlerFailure
from outbox.message.model import Counts, Status
from outbox.settings import Settings
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

#: The result of a message that the producer has no more.
PRUNED = HandlerFailure("the producer has pruned this message: nothing to retry", Status.PARKED)


def wake_retries(connection: Connection, schema: str, wakes: Mapping[tuple[str, str], Callable[[], None]]) -> Counts:
    """Wake the retries of the groups that have any: one look for all of them, however many.

    ``wakes`` has what wakes them by group and topic, and isn't empty. Returns no counts: the woken retries have them.
    """
    groups, topics = zip(*wakes, strict=True)
    statements = plan_by_index(), sql.to_retry(schema, groups=list(groups), topics=list(topics))
    for group, topic in read_source(connection, *statements)[1]:
        wakes[group, topic]()
    return Counts()


def holds_retries(connection: Connection, subscription: Subscription, schema: str, gate: Gate) -> bool:
    """Tell whether nothing may be retried now; what threads share is taken for a retry that is due only."""
    if gate.shut(connection):
        return True
    if gate.limited:
        due = sql.due(schema, group=subscription.group, topic=subscription.feed, ordered=subscription.blocks_queue)
        if not read_source(connection, due)[0]:
            return True
    return gate.admitted(connection) == 0


def retry_next(
    connection: Connection,
    source: Connection,
    subscription: Subscription,
    settings: Settings,
    meter: HandlerMeter,
    gate: Gate,
) -> Counts:
    """Retry the group's failed message that is due first; nothing if none is due."""
    schema, group, topic = settings.schema, subscription.group, subscription.feed
    start = sql.start_retry(schema, group=group, topic=topic, ordered=subscription.blocks_queue)
    with begin(connection):
        (due,) = execute(connection, start)
        if not due:
            return Counts()
    message_id, queue, position, attempts, starts, passage = due[0]
    queue_of_group = subscription.queue(schema, queue)
    entry = Entry(position, message_id, None)
    try:
        with begin(connection):
            _, locked = execute(connection, sql.MARK, sql.lock_failed(schema, group, message_id))
            if not locked:
                return Counts(more=True)
            found = find(source, subscription, queue_of_group, message_id, is_filtered=locked[0][1])
            if found is None:
                raise AttemptFailed(entry, attempts + 1, PRUNED)
            entry = found
            # The row lock is held: no other worker runs this message until this transaction ends, so that all the
            # earlier starts were of workers that have died.
            if starts > settings.max_starts:
                raise AttemptFailed(entry, *crashed(subscription, attempts, starts))
            if (ended := _without_handler(connection, queue_of_group, entry, attempts, passage, gate)) is not None:
                if ended.taken:
                    at_commit(connection, *key_order.release_next(subscription, queue_of_group, entry))
                return ended
            run_handler(connection, subscription, [entry], attempts + 1, meter, passage, locked[0][2])
            counts = _close_retry(connection, subscription, queue_of_group, entry, attempts + 1, passage)
            meter.done += 1
            return counts
    except AttemptFailed as failed:
        if failed.failure.unavailable and not gate.is_alone(message_id):
            with begin(connection):
                execute(connection, sql.due_again(schema, group=group, ids=[message_id]))
            gate.unavailable(connection, failed.failure, is_trial=gate.on_trial)
            return Counts()
        row = settle(subscription, failed.entry, failed.attempts, failed.failure, settings.retry_jitter)
        with begin(connection):
            at_commit(connection, *record_failure(subscription, queue_of_group, failed.entry, row, passage))
            if not row.holds:
                at_commit(connection, *key_order.release_next(subscription, queue_of_group, failed.entry))
            if failed.is_answered and gate.on_trial:
                gate.close(connection)
        count_attempt(meter, row)
        emit(event_of(queue_of_group, row, failed.__cause__))
        if row.status != Status.CONSUMED:
            gate.failed(connection, failed.failure.reason)
        return counts_of(row)


def find(
    source: Connection, subscription: Subscription, of: GroupQueue, message_id: UUID, *, is_filtered: bool
) -> Entry | None:
    """Return a message that is to be retried, as it was sent first; None if it is pruned.

    ``is_filtered``: it was never attempted (its quarantine was released), and hasn't been through the group's filter.
    """
    taken = filter_of(subscription) if is_filtered else EVERYTHING
    (rows,) = read_source(source, sql.message_by_id(of.schema, id=message_id, **taken))
    return to_entry(rows[0], subscription, of.queue) if rows else None


def _without_handler(
    connection: Connection, queue_of_group: GroupQueue, entry: Entry, attempts: int, passage: int, gate: Gate
) -> Counts | None:
    """Return how a retry ends whose message isn't to be handled, or not now; None where it is."""
    if entry.message is None:
        execute(connection, sql.forget(queue_of_group.schema, queue_of_group.group, entry.id))
        return Counts(taken=1, more=True)
    if entry.can_expire and expired_of(connection, [entry]):
        record_expiry(connection, queue_of_group, entry, attempts, passage)
        return Counts(taken=1, more=True)
    return Counts() if gate.on_trial and not gate.begins_trial(connection) else None


def _close_retry(
    connection: Connection,
    subscription: Subscription,
    queue_of_group: GroupQueue,
    entry: Entry,
    attempt: int,
    passage: int,
) -> Counts:
    row = settled(entry, Status.CONSUMED, attempt)
    at_commit(connection, sql.MARKED, *sql.settle(queue_of_group, row, passage))
    at_commit(connection, *key_order.release_next(subscription, queue_of_group, entry))
    try:
        commit(connection)
    except Exception as error:
        raise_refused(connection, error, [entry], attempt)
    emit(handled(queue_of_group, [entry], attempt))
    return Counts(taken=1, done=1, more=True)


DUTIES = (
    # A worker plans both for each subscription, on the lanes that its threads share.
    Duty(
        "consume",
        "Hands messages to the handlers of groups.",
        """
        producer: consumer
        SELECT ON bulk_job bulk_item compensation topic topic_growth message half_message
        SELECT(half_id resolution) ON op_message
        consumer: consumer
        SELECT INSERT UPDATE DELETE ON consumer_message consumer_offset
        SELECT INSERT ON consumer_lease rate_grant
        SELECT INSERT UPDATE ON consumer_start group_control
        INSERT ON reread_message log_loss audit
        SELECT ON consumer_passage
        SELECT INSERT UPDATE ON message_source
        SELECT INSERT DELETE ON attempt_history
        """,
        role="consume",
        functions="subscriptions",
    ),
    Duty("retry", "Hands failed messages to their handlers again, when they are due.", role="retry"),
)
