"""Consume one queue of one group: lock, inbox rows, handlers and offset in one transaction.

Nothing is leased: whoever holds the queue's advisory lock, which ends with the transaction, is its consumer for
this transaction. What was read ahead stays valid as long as the offset in the database is where this worker
left it, since messages never change. The offset keeps the id of its message: whether the log still has it there is seen
at each read (`outbox.consumer.log_loss`).

Crashes leave no trace of their own, because everything rolls back with them. So a worker that takes a queue for
the first time (or after losing its connection) first commits a claim beside the offset. A claim found there by
the next one says that a start had no end; from then on messages run one by one, each with its own claim, until
the one that kills its worker is known, and parked.

Failed messages that their queue has left behind are retried one at a time. An unordered group leaves a message behind
when it fails. An ordered one retries it in place, and leaves it behind only when it is parked; what an operator retries
then is retried here. Each retry is two transactions: the first counts a start and commits, so that a message which
kills its worker is found out; the second locks the row, runs the handler and writes the result. Two workers that
counted the same row meet at the lock, and one of them goes on to the next.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NoReturn
from uuid import UUID

from outbox.consumer import sql
from outbox.consumer.log_loss import go_back
from outbox.consumer.subscription import (
    AttemptFailed,
    Entry,
    HandlerFailure,
    Subscription,
    TransactionEnded,
    counts_of,
    crashed,
    event_of,
    failure_from,
    filter_of,
    run_handler,
    settle,
    to_entry,
)
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, is_lost, lock_key, read_source, sqlstate
from outbox.database.session import begin, commit
from outbox.database.sql import GroupQueue, number_of, plan_by_index, take_lock
from outbox.errors import MessagesPruned
from outbox.message.model import Counts, Status
from outbox.settings import Settings
from outbox.telemetry.events import BatchUndone, CrashFound, MessagesHandled
from outbox.telemetry.hooks import emit, listeners
from outbox.text import process_name

if TYPE_CHECKING:
    from sqlalchemy import Connection


class State(enum.Enum):
    """How a step left the queue."""

    WORKED = enum.auto()  # there may be more
    EMPTY = enum.auto()
    LOCKED = enum.auto()  # another worker has it
    BLOCKED = enum.auto()  # ordered, and the first message waits for its retry


class _Known(Exception):
    """Undo the transaction, and look again: the inbox has come to know one of the messages meanwhile."""


#: What `sql.known` would say of a message that the inbox doesn't know.
_NO_ROW: Row = (None, None, 0, 0.0)
_UNIQUE_VIOLATION = "23505"


class QueueConsumer:
    """One queue of one group, as one consuming thread sees it. Not thread-safe."""

    def __init__(self, subscription: Subscription, settings: Settings, queue: int) -> None:
        self._subscription = subscription
        self._settings = settings
        self._queue = GroupQueue(settings.schema, subscription.group, subscription.topic, queue)
        self._ahead: deque[Entry] = deque()
        self._position = -1
        self._fresh = True
        self._one_by_one = 0

    @property
    def position(self) -> int:
        """The offset after which this worker would go on; -1 if it doesn't know."""
        return self._position

    @property
    def has_read_ahead(self) -> bool:
        """Are there messages which are read and not yet consumed?"""
        return bool(self._ahead)

    def next_messages(self, position: int) -> Statement:
        """Return the statement that reads ahead from a position, whole batches; its rows are for `read`."""
        batch = self._subscription.batch
        return sql.messages_after(
            self._settings.schema,
            topic=self._subscription.topic,
            queue=self._queue.queue,
            position=position,
            limit=-(-self._settings.read_ahead // batch) * batch,
            bytes=self._settings.read_ahead_bytes,
            **filter_of(self._subscription),
        )

    def read(self, rows: list[Row], position: int, message_id: UUID | None) -> bool:
        """Take what was read ahead after a position. It is used if the group's offset is there at the next step.

        ``message_id`` is that of the message there, as far as it is known. Return False, and take nothing, if the log
        went back: it has another message there, or none and comes to no later one, or repeats a number.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        self._drop_ahead()
        subscription, queue = self._subscription, self._queue.queue
        if position and not rows:
            return False
        if rows and rows[0][0] == position:
            if message_id not in {None, rows[0][1]}:
                return False
            rows = rows[1:]
        # Over the end of an epoch, the number goes on.
        step = 1 if not rows or rows[0][0] == position + 1 else number_of(rows[0][0]) - number_of(position)
        if step < 1:
            return False
        if step > 1 and subscription.on_pruned == "stop":
            first, last = number_of(position) + 1, number_of(rows[0][0]) - 1
            raise MessagesPruned(
                f"group {subscription.group!r} fell behind: of topic {subscription.topic!r}, queue {queue}, the "
                f"messages {first} to {last} were pruned before they were read; find out what they "
                "were (the producer's retention is too short for this group), then go on with on_pruned='skip'"
            )
        self._ahead = deque(to_entry(row, subscription, queue) for row in rows)
        self._position = position
        return True

    def forget(self) -> None:
        """Drop what was read ahead, and claim again at the next step: the connection was lost."""
        self._drop_ahead()
        self._fresh = True

    def _drop_ahead(self) -> None:
        self._ahead.clear()
        self._position = -1

    def step(self, connection: Connection, source: Connection) -> tuple[State, Counts]:
        """Run one transaction: a batch, or a single message where one failed before."""
        try:
            with begin(connection):
                return self._step(connection, source)
        except TransactionEnded as ended:
            counts = Counts(more=True)
            for entry in ended.entries:
                failed = AttemptFailed(entry, ended.attempts, ended.failure)
                failed.__cause__ = ended.__cause__
                state, count = self._record(connection, failed)
                counts += count
            return state, counts
        except AttemptFailed as failed:
            if failed.together > 1:
                # Who of the batch it was is found out one by one.
                self._one_by_one = self._subscription.batch
                self._tell_undone(failed)
                return State.WORKED, Counts(more=True)
            return self._record(connection, failed)
        except _Known:  # another worker has handled one of them: read again what there is
            self._ahead.clear()
            return State.WORKED, Counts(more=True)
        except BaseException as error:
            # What is no Exception ends the thread or the process: a start that had no end.
            if is_lost(connection) or not isinstance(error, Exception):
                self.forget()
            raise

    def _step(self, connection: Connection, source: Connection) -> tuple[State, Counts]:
        size = 1 if self._one_by_one else self._subscription.batch
        candidates = list(islice(self._ahead, size))
        offset = sql.offset(self._settings.schema, *self._queue.values)
        locked, offsets, rows = execute(connection, sql.take_queue(self._queue), offset, self._known(candidates))
        if not locked[0][0]:
            self._drop_ahead()
            return State.LOCKED, Counts()
        position, claims, message_id = offsets[0] if offsets else (0, 0, None)
        if position != self._position or not candidates:
            agrees = self.read(read_source(source, self.next_messages(position))[0], position, message_id)
            candidates = list(islice(self._ahead, size))
            if not candidates:
                moved = not agrees and go_back(connection, source, self._queue, position)
                return (State.WORKED if moved else State.EMPTY), Counts(more=moved)
            (rows,) = execute(connection, self._known(candidates))
        known = {row[0]: row for row in rows}
        if (ended := self._without_handler(connection, candidates[0], known)) is not None:
            return ended
        if self._fresh:
            self._fresh = False
            if claims:
                self._one_by_one = self._subscription.batch
                group, topic, queue = self._queue.values
                found = CrashFound(group=group, topic=topic, queue=queue, position=position, claims=claims)
                after_commit(connection, partial(emit, found))
            self._append_offset(connection, position, claims + 1, message_id)
            return State.WORKED, Counts(more=True)
        if claims > self._settings.max_claims and self._is_to_run(candidates[0], known):
            return self._park_crasher(connection, candidates[0], known, claims)
        return self._consume(connection, candidates, known)

    def _known(self, entries: list[Entry]) -> Statement:
        return sql.known(self._settings.schema, [entry.id for entry in entries], self._queue.group)

    def _append_offset(self, connection: Connection, position: int, claims: int, message_id: UUID | None) -> None:
        values = *self._queue.values, position, claims, message_id
        at_commit(connection, sql.append_offset(self._settings.schema, *values))

    def _without_handler(
        self, connection: Connection, entry: Entry, known: dict[object, Row]
    ) -> tuple[State, Counts] | None:
        """Return how the step ends where the first message isn't to be handled now; None where it may be."""
        row = known.get(entry.id, _NO_ROW)
        if self._is_sent_again(entry, row):
            return self._retry_resent(connection, entry)
        _, status, _, wait, *_ = row
        if self._subscription.ordered and status == Status.FAILED and wait > 0:
            return State.BLOCKED, Counts()
        return None

    def _is_sent_again(self, entry: Entry, row: Row) -> bool:
        """Tell whether this is a newer send of a message that the group has failed or parked."""
        if row is _NO_ROW or entry.message is None or entry.message.send_number == 1:
            return False
        _, status, _, _, queue, position, discarded = row
        tries = status == Status.FAILED or (status == Status.PARKED and not discarded)
        return tries and (queue, position) != (self._queue.queue, entry.position)

    def _retry_resent(self, connection: Connection, entry: Entry) -> tuple[State, Counts]:
        """Have a message that was sent again tried again: by a retry, or (ordered) by the next step.

        In a transaction that does nothing else, so that a handler which fails can't undo it.
        """
        queue = self._queue
        statement = sql.retry_resent(
            queue.schema, group=queue.group, queue=queue.queue, id=entry.id, position=entry.position
        )
        if not execute(connection, statement)[0]:
            # A retry runs its handler, or an operator acts on it. Going past it now would lose this send.
            self._drop_ahead()
            return State.LOCKED, Counts()
        if self._subscription.ordered:
            return State.WORKED, Counts(more=True)
        left = max(self._one_by_one - 1, 0)
        self._append_offset(connection, entry.position, 1 if left else 0, entry.id)
        commit(connection)
        self._advance(entry.position)
        self._one_by_one = left
        return State.WORKED, Counts(taken=1)

    def _park_crasher(
        self, connection: Connection, entry: Entry, known: dict[object, Row], claims: int
    ) -> tuple[State, Counts]:
        _, _, attempts, *_ = known.get(entry.id, _NO_ROW)
        row = settle(self._subscription, entry, attempts, crashed(claims), self._settings.retry_jitter)
        at_commit(connection, *sql.settle_failure(self._queue, row, process_name()))
        after_commit(connection, partial(emit, event_of(self._subscription, self._queue.queue, row, None)))
        self._append_offset(connection, entry.position, 1, entry.id)
        self._one_by_one = max(self._one_by_one, 1)
        self._drop_ahead()
        return State.WORKED, counts_of(row)

    def _is_to_run(self, entry: Entry, known: dict[object, Row]) -> bool:
        if entry.id in known:
            return self._subscription.ordered and known[entry.id][1] == Status.FAILED
        return entry.message is not None

    def _consume(
        self, connection: Connection, candidates: list[Entry], known: dict[object, Row]
    ) -> tuple[State, Counts]:
        todo: dict[object, Entry] = {}
        passed: list[Entry] = []
        attempt, known_failed = 1, False
        for entry in candidates:
            row = known.get(entry.id, _NO_ROW)
            if row is _NO_ROW:
                if entry.message is not None:
                    # A message that was resent may stand in the batch twice.
                    todo.setdefault(entry.id, entry)
            elif self._is_sent_again(entry, row):
                break
            elif row[1] == Status.FAILED and self._subscription.ordered:
                if passed:
                    break
                attempt, known_failed = row[2] + 1, True
                todo[entry.id] = entry
                passed.append(entry)
                break
            passed.append(entry)
        entries = list(todo.values())
        schema, group = self._settings.schema, self._queue.group
        if known_failed and not execute(connection, sql.lock_failed(schema, group, entries[0].id))[0]:
            # Whoever runs a failed message holds its row, as in a retry. Somebody else has it, or has just settled it:
            # what the handler did would stay, though the row says something else.
            self._drop_ahead()
            return State.LOCKED, Counts()
        run_handler(connection, self._subscription, entries, attempt)
        return self._close(connection, entries, passed, attempt, known_failed)

    def _close(
        self, connection: Connection, entries: list[Entry], passed: list[Entry], attempt: int, known_failed: bool
    ) -> tuple[State, Counts]:
        last = passed[-1]
        if known_failed:
            entry = entries[0]
            row = sql.InboxUpdate(entry.id, entry.position, Status.CONSUMED.value, attempt, entry.digest(), None)
            at_commit(connection, sql.MARKED, sql.settle(self._queue, row))
        elif entries:
            ids, positions = [entry.id for entry in entries], [entry.position for entry in entries]
            digests = [entry.digest() for entry in entries]
            at_commit(connection, sql.consumed(self._queue.schema, *self._queue.values, ids, positions, digests))
        left = max(self._one_by_one - len(passed), 0)
        self._append_offset(connection, last.position, 1 if left else 0, last.id)
        try:
            commit(connection)
        except Exception as error:
            self._refused(connection, error, entries, attempt)
        self._advance(last.position)
        self._one_by_one = left
        if known_failed or (entries and listeners.hooks):
            emit(_handled(self._queue, entries, attempt))
        return State.WORKED, Counts(taken=len(passed), done=len(entries))

    def _refused(self, connection: Connection, error: Exception, entries: list[Entry], attempt: int) -> NoReturn:
        """COMMIT failed: because of a row that came in between, a deferred constraint, a decision, or the server."""
        if is_lost(connection) or not entries:
            raise error
        if self._is_known(error):
            raise _Known from error
        if sql.ENDED in str(error):
            raise TransactionEnded(entries, attempt) from error
        raise AttemptFailed(entries[0], attempt, failure_from(error), len(entries)) from error

    def _is_known(self, error: Exception) -> bool:
        """Tell whether the inbox has the row by now. Its one unique index has another name in each partition."""
        diagnosis = getattr(getattr(error, "orig", None), "diag", None)
        table = getattr(diagnosis, "table_name", None) or ""
        ours = getattr(diagnosis, "schema_name", None) == self._settings.schema and table.startswith("consumer_message")
        return ours and sqlstate(error) == _UNIQUE_VIOLATION

    def _record(self, connection: Connection, failed: AttemptFailed) -> tuple[State, Counts]:
        """Write down a failed attempt, in a transaction of its own."""
        entry, subscription = failed.entry, self._subscription
        schema, (group, topic, queue) = self._settings.schema, self._queue.values
        row = settle(subscription, entry, failed.attempts, failed.failure, self._settings.retry_jitter)
        with begin(connection):
            locked, offsets = execute(connection, sql.take_queue(self._queue), sql.offset(schema, group, topic, queue))
            position, _, message_id = offsets[0] if offsets else (0, 0, None)
            if not locked[0][0] or position != self._position:
                # Another worker went on from here; what this message came to is now its affair.
                self._ahead.clear()
                return State.LOCKED, Counts()
            blocked = subscription.ordered and row.status == Status.FAILED
            at_commit(connection, *sql.settle_failure(self._queue, row, process_name()))
            if blocked:
                # This start had an end: whoever takes the queue for the next attempt begins to count anew.
                offset = {"group": group, "topic": topic, "queue": queue, "position": position, "id": message_id}
                at_commit(connection, sql.drop_claims(schema, **offset))
            else:
                self._one_by_one = max(self._one_by_one - 1, 0)
                self._append_offset(connection, entry.position, 1 if self._one_by_one else 0, entry.id)
        if not blocked:
            self._advance(entry.position)
        emit(event_of(subscription, queue, row, failed.__cause__))
        return (State.BLOCKED if blocked else State.WORKED), counts_of(row)

    def _tell_undone(self, failed: AttemptFailed) -> None:
        group, topic, queue = self._queue.values
        reason, error = failed.failure.error.partition("\n")[0], failed.__cause__
        emit(BatchUndone(group=group, topic=topic, queue=queue, size=failed.together, reason=reason, error=error))

    def _advance(self, position: int) -> None:
        while self._ahead and self._ahead[0].position <= position:
            self._ahead.popleft()
        self._position = position


def _handled(queue: GroupQueue, entries: list[Entry], attempt: int) -> MessagesHandled:
    ids = tuple(entry.id for entry in entries)
    return MessagesHandled(group=queue.group, topic=queue.topic, queue=queue.queue, message_ids=ids, attempt=attempt)


_PRUNED = HandlerFailure("the producer has pruned this message: nothing to retry", Status.PARKED)


def _retry_next(connection: Connection, source: Connection, subscription: Subscription, settings: Settings) -> Counts:
    """Retry the group's failed message that is due first; nothing if none is due."""
    schema, group, topic = settings.schema, subscription.group, subscription.topic
    claim = sql.claim_due(schema, group=group, topic=topic, ordered=subscription.ordered)
    with begin(connection):
        (due,) = execute(connection, claim)
        if not due:
            return Counts()
    message_id, queue, position, attempts, claims = due[0]
    queue_of_group = GroupQueue(schema, group, topic, queue)
    entry = Entry(position, message_id, None)
    try:
        if claims > settings.max_claims:
            raise AttemptFailed(entry, attempts, crashed(claims))
        with begin(connection):
            _, locked = execute(connection, sql.MARK, sql.lock_failed(schema, group, message_id))
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
            return _try_again(connection, subscription, queue_of_group, entry, attempts + 1)
    except AttemptFailed as failed:
        row = settle(subscription, failed.entry, failed.attempts, failed.failure, settings.retry_jitter)
        with begin(connection):
            at_commit(connection, *sql.settle_failure(queue_of_group, row, process_name()))
        emit(event_of(subscription, queue, row, failed.__cause__))
        return counts_of(row)


def _try_again(
    connection: Connection, subscription: Subscription, queue_of_group: GroupQueue, entry: Entry, attempt: int
) -> Counts:
    run_handler(connection, subscription, [entry], attempt)
    row = sql.InboxUpdate(entry.id, entry.position, Status.CONSUMED.value, attempt, entry.digest(), None)
    at_commit(connection, sql.MARKED, sql.settle(queue_of_group, row))
    try:
        commit(connection)
    except Exception as error:
        if is_lost(connection):
            raise
        if sql.ENDED in str(error):
            raise TransactionEnded([entry], attempt) from error
        raise AttemptFailed(entry, attempt, failure_from(error)) from error
    emit(_handled(queue_of_group, [entry], attempt))
    return Counts(taken=1, done=1, more=True)


#: A queue to look at: its number, the group's offset, the id of the message there, and the last position.
_Waiting = tuple[int, int, UUID | None, int]

#: Transactions on one queue before a pass looks at the next one, so that none starves.
STEPS_PER_QUEUE = 50


class Consumer:
    """The consuming side of one `Subscription`; one object for each consuming thread, not thread-safe.

    Of the methods' two connections, the first is on the consumer's database, the second on the producer's;
    where both are the same, pass the same object twice. Neither may be in a transaction. ``stopping`` is asked
    between transactions, so that a pass over a long queue ends soon when the process is to stop.
    """

    def __init__(
        self, subscription: Subscription, settings: Settings, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.subscription = subscription
        self._settings = settings
        self._stopping = stopping
        self._queues: dict[int, QueueConsumer] = {}

    def start(self, connection: Connection, source: Connection) -> None:
        """Make the group ready to consume: to be called before anything else, by each worker.

        A new group gets its first offsets, by the subscription's ``start``; a known group keeps its own. Queues (and
        topics) that come later are read from their first message. After this and before it consumes, a worker
        quarantines for the group what is compensated (`outbox.compensate.quarantine.quarantine_group`).
        """
        subscription, schema = self.subscription, self._settings.schema
        pair = subscription.group, subscription.topic
        with begin(connection):
            # Two workers of a new group must not start it at two different positions.
            lock = take_lock(lock_key("group", schema, *pair))
            _, known = execute(connection, lock, sql.group_is_known(schema, *pair))
            if known[0][0]:
                return
            if subscription.start == "now":
                (rows,) = read_source(source, sql.heads(schema, topic=subscription.topic))
                beginnings = [(queue, last, last_id) for queue, last, last_id, _ in rows]
            else:
                (rows,) = read_source(source, sql.beginnings(schema, topic=subscription.topic))
                beginnings = [(queue, first - 1, None) for queue, first in rows]
            for queue, position, message_id in beginnings or [(0, 0, None)]:
                at = (*pair, queue, position)
                execute(connection, sql.append_offset(schema, *at, 0, message_id), sql.write_start(schema, *at))

    def consume_once(self, connection: Connection, source: Connection) -> Counts:
        """Consume what is there, queue by queue; ``more`` if a pass right after this one would find more.

        Raises:
            MessagesPruned: a queue is stuck by that, and there is nothing left to do in the others.
        """
        counts = Counts()
        if self._stopping():
            return counts
        pruned: MessagesPruned | None = None
        waiting = self._waiting_queues(connection, source)
        random.shuffle(waiting)
        ahead = self._read_ahead(source, waiting)
        for queue, position, message_id, last in waiting:
            consumer = self._queues[queue]
            try:
                if queue in ahead:
                    consumer.read(ahead[queue], position, message_id)
                counts += self._drain(consumer, last, connection, source)
            except MessagesPruned as error:
                pruned = error  # the other queues have nothing to do with it
        if pruned is not None and not counts:
            raise pruned
        return counts

    def _drain(self, consumer: QueueConsumer, last: int, connection: Connection, source: Connection) -> Counts:
        counts = Counts()
        for _ in range(STEPS_PER_QUEUE):
            if self._stopping():
                return counts
            state, step = consumer.step(connection, source)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if state is not State.WORKED or consumer.position >= last:
                return counts
        return counts + Counts(more=True)

    def _waiting_queues(self, connection: Connection, source: Connection) -> list[_Waiting]:
        """Return the queues whose last position is ahead of the group's offset, or isn't what it has read there."""
        schema, group, topic = self._settings.schema, self.subscription.group, self.subscription.topic
        heads = sql.heads(schema, topic=topic)
        if source is connection and self._queues:
            offset = sql.offsets(schema, group=group, topic=topic, queues=sorted(self._queues))
            _, rows, offsets = read_source(source, plan_by_index(), heads, offset)
        else:
            (_, rows), offsets = read_source(source, plan_by_index(), heads), []
        known = {row[0] for row in offsets}
        if unread := [row[0] for row in rows if row[0] not in known]:
            offsets += read_source(connection, sql.offsets(schema, group=group, topic=topic, queues=unread))[0]
        offset_of = {row[0]: row[1:] for row in offsets}
        waiting = []
        for queue, last, last_id, is_standby in rows:
            if queue not in self._queues:
                self._queues[queue] = QueueConsumer(self.subscription, self._settings, queue)
            position, message_id = offset_of[queue]
            # An offset that is ahead may have been moved since the queue's end was read: a step looks again.
            went_back = message_id not in {None, last_id} if last == position else last < position and not is_standby
            if last > position or went_back:
                waiting.append((queue, position, message_id, last))
        return waiting

    def _read_ahead(self, source: Connection, waiting: list[_Waiting]) -> dict[int, list[Row]]:
        """Read from all queues at once what this worker hasn't read yet; many queues must not mean many round trips."""
        missing = [
            (queue, position)
            for queue, position, _, _ in waiting
            if not (self._queues[queue].has_read_ahead and self._queues[queue].position == position)
        ]
        if not missing:
            return {}
        statements = [self._queues[queue].next_messages(position) for queue, position in missing]
        _, *rows = read_source(source, plan_by_index(), *statements)
        return dict(zip((queue for queue, _ in missing), rows, strict=True))

    def retry_once(self, connection: Connection, source: Connection, *, limit: int = 100) -> Counts:
        """Retry what is due, at most ``limit`` messages.

        Ordered groups retry in place, in `consume_once`; here they only retry what was parked and given another try.
        """
        counts = Counts()
        for _ in range(limit):
            if self._stopping():
                return counts
            step = _retry_next(connection, source, self.subscription, self._settings)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if not step.more:
                return counts
        return counts + Counts(more=True)
