"""Consume one queue of one group: lock, inbox rows, handlers and offset in one transaction.

Nothing is leased: the worker that holds the queue's advisory lock, which ends with the transaction, is its consumer for
this transaction. Entries that were read ahead stay valid as long as the offset in the database is where this worker
left it, since messages never change. A queue that another worker has leased, to handle its messages outside of
transactions (`outbox.consumer.outside`), is left to it until the lease ends. What the rows mean, and what is to be done
next, says a `ConsumerProgress` (`outbox.consumer.progress`); this module reads, runs and writes.

While there is more to do, the round trip of a COMMIT begins the next transaction, with its lock and its look-ups. A
consumer that a notification names a queue to starts with that queue, and reads it in the same round trip.

Crashes leave no trace, because everything rolls back with them. So a worker that takes a queue for the first time (or
after losing its connection) first commits a start beside the offset. One that the next worker finds there had no end;
from then on messages run one by one, each with a start of its own, until the one that kills its worker is
known, and parked. Workers that race for a queue leave starts there as well: so no worker parks a message beside a start
of its own, nor while the newest one may be that of a worker which goes on.

Failures are written down; `outbox.consumer.retry` retries a message when its queue has left it behind. An unordered
group leaves a message behind when it fails, and so does one that is ordered by key, in which later messages of the key
wait (`outbox.consumer.key_order`). An ordered one retries it in place, and leaves it behind only when it is parked.
"""

from __future__ import annotations

import datetime as dt
import enum
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from outbox.consumer import growth, key_order, sql
from outbox.consumer.control.gate import Gate
from outbox.consumer.failure import expired_of, record_expiry, record_failure
from outbox.consumer.log_loss import go_back
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.outside import sql as lease_sql
from outbox.consumer.passage import begun, take_earlier
from outbox.consumer.progress import Batch, Beginning, Choice, ConsumerProgress, KnownRows
from outbox.consumer.retry import holds_retries, retry_next
from outbox.consumer.start import met, start_group
from outbox.consumer.subscription import (
    AttemptFailed,
    Entry,
    Subscription,
    TransactionEnded,
    columns,
    consumed,
    count_attempt,
    counts_of,
    crashed,
    event_of,
    handled,
    raise_refused,
    run_handler,
    settle,
    settled,
)
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, is_lost, read_log, read_source
from outbox.database.session import Transactions, begin
from outbox.database.sql import plan_by_index, try_lock
from outbox.errors import MessagesPruned
from outbox.message.answer import HandlerFailure
from outbox.message.model import Counts, Status, behind
from outbox.settings import Settings
from outbox.telemetry.events import BatchUndone
from outbox.telemetry.hooks import emit, listeners, middlewares_here

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


class QueueConsumer:
    """One queue of one group, as one consuming thread sees it. Not thread-safe."""

    def __init__(
        self, subscription: Subscription, settings: Settings, queue: int, meter: HandlerMeter, gate: Gate
    ) -> None:
        self._subscription = subscription
        self._settings = settings
        self._meter = meter
        self._gate = gate
        #: How far the group has come, as this worker knows it: what is read ahead follows it.
        self.progress: ConsumerProgress = ConsumerProgress(subscription.queue(settings.schema, queue))
        self.transactions: Transactions = Transactions()
        self._ahead: deque[Entry] = deque()
        self._goes_on = False
        # What becomes of the messages of this step.
        self._batch = Batch()

    @property
    def has_read_ahead(self) -> bool:
        """Are there messages which are read and not yet consumed?"""
        return bool(self._ahead)

    def first_time(self, rows: Sequence[Row] | None) -> dt.datetime | None:
        """Return when the first message that waits came into the queue, by rows read ahead or those of before."""
        if rows is not None:
            return next((row[3] for row in rows if row[0] > self.progress.position), None)
        return next((entry.message.visible_at for entry in self._ahead if entry.message), None)

    def next_messages(self) -> Statement:
        """Return the statement that reads ahead, whole batches; its rows are for `read`."""
        batch = self._subscription.batch
        limit = -(-self._settings.read_ahead // batch) * batch
        return self.progress.next_messages(self._subscription, self._settings, limit)

    def read(self, rows: list[Row]) -> bool:
        """Take the messages read ahead. They are used if the group's offset is there at the next step.

        Return False, and take nothing, if the log went back.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        self._ahead.clear()
        entries = self.progress.read(rows, self._subscription)
        if entries:
            self.progress = self.progress._replace(end=max(self.progress.end, entries[-1].position))
            self._ahead.extend(entries)
        return entries is not None

    def come_to(self, progress: ConsumerProgress) -> None:
        """Take note of the group's progress: entries read ahead behind another offset are of no use."""
        if progress.position != self.progress.position:
            self._ahead.clear()
        self.progress = progress

    def _leave(self, state: State = State.LOCKED) -> tuple[State, Counts]:
        """Forget where the group is: another worker may move it on, or the log went back behind it."""
        self.come_to(self.progress._replace(position=-1))
        return state, Counts(more=state is State.WORKED)

    def step(
        self, connection: Connection, source: Connection, most: int | None = None, *, goes_on: bool = False
    ) -> tuple[State, Counts]:
        """Run one transaction: a batch of at most so many messages, or a single message where one failed before.

        ``goes_on``: the caller makes another step, for which a transaction may begin already, or ends `transactions`.
        """
        self._goes_on = goes_on
        try:
            with self.transactions.next(connection) as rows:
                return self._step(connection, source, most, rows)
        except TransactionEnded as ended:
            counts = Counts(more=True)
            for entry in ended.entries:
                failed = AttemptFailed(entry, ended.attempts, ended.failure)
                failed.__cause__ = ended.__cause__
                state, count = self._record(connection, failed)
                counts += count
            return state, counts
        except AttemptFailed as failed:
            if not failed.is_of_entry:
                # One by one, the message of the batch that failed is found.
                self.progress = self.progress._replace(one_by_one=self._subscription.batch)
                group, topic, queue = self.progress.of.values
                reason, size, error = failed.failure.reason, failed.together, failed.__cause__
                emit(BatchUndone(group=group, topic=topic, queue=queue, size=size, reason=reason, error=error))
                return State.WORKED, Counts(more=True)
            return self._record(connection, failed)
        except _Known:  # another worker has handled one of them: read again what there is
            self._ahead.clear()
            return State.WORKED, Counts(more=True)
        except BaseException as error:
            # An error that is no Exception ends the thread or the process: a start that had no end.
            if is_lost(connection) or not isinstance(error, Exception):
                self.come_to(self.progress._replace(position=-1, started=None))
            raise

    def _step(
        self, connection: Connection, source: Connection, most: int | None, rows: list[list[Row]] | None
    ) -> tuple[State, Counts]:
        """Take the queue, read, choose, begin, handle and write, in the transaction that has begun."""
        before, size = self.progress.position, min(self._subscription.batch, most or self._subscription.batch)
        size = 1 if self.progress.one_by_one else size
        entries = list(islice(self._ahead, size))
        reads = rows is None and not entries and source is connection and before >= 0
        if rows is None:
            rows = execute(connection, *(self._read_statements(size) if reads else self._first_statements(entries)))
        locked, offsets, *rows = rows
        offset = offsets[0] if offsets else sql.NO_OFFSET
        if not self._take(connection, locked, offset):
            return self._leave()
        if not entries or self.progress.position != before:
            if not reads or self.progress.position != before:
                rows = read_log(connection, source, self.next_messages())
            ahead, *rows = rows
            agrees = self.read(ahead)
            entries = list(islice(self._ahead, size))
            if not agrees and go_back(connection, source, self.progress):
                return self._leave(State.WORKED)
            if not entries:
                return State.EMPTY, Counts()
            rows = rows or execute(connection, *self.progress.inbox_of(entries, self._subscription))
        inbox = KnownRows.of(rows)
        left = take_earlier(connection, source, self.progress, inbox) if self.progress.passage else inbox
        if left is None:  # a retry, or an operator's act, has one of them
            return self._leave()
        self._batch = self.progress.batch(entries, left, ordered=self._subscription.blocks_queue)
        return self._begin(connection, entries[0], is_new=offset[5]) or self._consume(connection)

    def _take(self, connection: Connection, locked: list[Row], offset: Row) -> bool:
        """Come to the newest offset, in the transaction that has tried to lock the queue; False if another has it."""
        is_held = offset[4]
        if is_held or not locked[0][0]:
            return False
        if is_held is False:
            # Its worker is gone. If it comes back, it finds a newer term than its own.
            execute(connection, lease_sql.end_lease(self._settings.schema, *self.progress.of.values))
        progress = self.progress.at(offset)
        if progress is not self.progress:
            self.come_to(progress if progress.passage == self.progress.passage else begun(connection, progress))
        return True

    def _first_statements(self, entries: list[Entry]) -> list[Statement]:
        """Return what a transaction begins with: it takes the queue, and reads its offset, and of these messages."""
        of = self.progress.of
        inbox = self.progress.inbox_of(entries, self._subscription)
        return [try_lock(of.lock, sql.MARKING), sql.offset(of.schema, *of.values), *inbox]

    def _read_statements(self, size: int) -> list[Statement]:
        """Return what a transaction begins with that also reads: where the log is in the consumer's database."""
        statements = [*self._first_statements([])[:2], self.next_messages()]
        # What holds back a key is asked when the keys are known.
        return (
            statements
            if self._subscription.by_key
            else [*statements, self.progress.known_after(self._subscription, size)]
        )

    def _begin(self, connection: Connection, first: Entry, *, is_new: bool) -> tuple[State, Counts] | None:
        """Return how the step ends where its messages aren't to be handled now; None where they are."""
        progress, batch, size = self.progress, self._batch, self._subscription.batch
        if not batch.passed:
            return self._resend(connection, first) if batch.stop is Choice.RESENT else (State.BLOCKED, Counts())
        if progress.started is not None and not progress.starts:
            return None
        beginning = progress.begin(
            runs=batch.run[:1] == batch.passed[:1], is_new=is_new, most=self._settings.max_starts
        )
        if beginning is Beginning.GO_ON:
            return None
        if beginning is Beginning.LEAVE:
            return self._leave()
        if beginning is Beginning.PARK:
            started = -1 if progress.started is None else progress.started
            self.progress = progress._replace(started=started, one_by_one=size)
            crash = crashed(self._subscription, batch.attempt - 1, progress.total)
            row, after = self._write_failure(connection, first, *crash, 0)
            after_commit(connection, partial(self._tell_failure, row, after, None))
            return (State.WORKED if after else State.BLOCKED), counts_of(row)
        if progress.starts and not is_new:
            after_commit(connection, partial(emit, progress.crash()))
        one_by_one = size if progress.starts else progress.one_by_one
        at_commit(connection, progress._replace(starts=progress.total).append())
        self.progress = progress._replace(started=progress.position, one_by_one=one_by_one)
        return State.WORKED, Counts(more=True)

    def _resend(self, connection: Connection, entry: Entry) -> tuple[State, Counts]:
        """Have a message that was sent again tried again: by a retry, or (ordered) by the next step.

        In a transaction that does nothing else, so that a handler which fails can't undo it.
        """
        if not execute(connection, self.progress.resend(entry))[0]:
            return self._leave()  # a retry runs its handler, or an operator acts on it
        if self._subscription.blocks_queue:
            return State.WORKED, Counts(more=True)
        self._batch = Batch(passed=[entry])
        return self._close(connection, [])

    def _consume(self, connection: Connection) -> tuple[State, Counts]:
        """Handle the batch."""
        of, batch, passage, entries = self.progress.of, self._batch, self.progress.passage, self._batch.run
        if batch.is_retry and not execute(connection, sql.lock_failed(of.schema, of.group, entries[0].id))[0]:
            # A worker that runs a failed message holds its row, as in a retry. Another one has it, or has just settled
            # it: what the handler did would stay, though the row says something else.
            return self._leave()
        expired = expired_of(connection, entries) if any(entry.can_expire for entry in entries) else {}
        if expired:
            entries = [entry for entry in entries if entry.id not in expired]
        if entries and self._gate.on_trial and not self._gate.begins_trial(connection):
            return State.LOCKED, Counts()
        # One by one, each statement waits for its answer: a failure is told where it happens.
        pipelined = self._subscription.pipeline and not (self.progress.one_by_one or self._gate.on_trial)
        how = batch.attempt, self._meter, passage, batch.first_failed_at
        run_handler(connection, self._subscription, entries, *how, pipelined=pipelined)
        for entry in expired.values():
            record_expiry(connection, of, entry, batch.attempt - 1, passage)
        if batch.wait:
            at_commit(connection, *key_order.wait(of, batch.wait, passage, batch.again))
        return self._close(connection, entries)

    def _close(self, connection: Connection, entries: Sequence[Entry]) -> tuple[State, Counts]:
        """Commit with the inbox rows of messages that were handled, and the offset behind those that are done with."""
        of, batch, attempt, last = self.progress.of, self._batch, self._batch.attempt, self._batch.passed[-1]
        if batch.is_retry and entries:
            row = settled(entries[0], Status.CONSUMED, attempt)
            at_commit(connection, sql.MARKED, *sql.settle(of, row, self.progress.passage))
        elif entries:
            at_commit(connection, *consumed(of, self.progress.passage, entries, batch.again))
        if batch.inline:
            ids, positions, _ = columns(batch.inline)
            values = {"group": of.group, "queue": of.queue, "passage": self.progress.passage}
            at_commit(connection, sql.give_positions(of.schema, ids=ids, positions=positions, **values))
        after = self.progress.past(last, len(batch.passed))
        at_commit(connection, after.append())
        goes_on = self._goes_on and not (after.one_by_one or self._gate.limited or last.position == after.end)
        until = len(batch.passed) + self._subscription.batch
        following = list(islice(self._ahead, len(batch.passed), until)) if goes_on else ()
        try:
            self.transactions.commit(connection, *(self._first_statements(following) if following else ()))
        except Exception as error:
            if sql.is_inbox_conflict(error, of.schema):
                raise _Known from error
            raise_refused(connection, error, entries, attempt)
        self._advance(after)
        self._meter.done += len(entries)
        if entries and (batch.is_retry or listeners.hooks or middlewares_here.get()):
            emit(handled(of, entries, attempt))
        return State.WORKED, Counts(taken=len(batch.passed), done=len(entries))

    def _record(self, connection: Connection, failed: AttemptFailed) -> tuple[State, Counts]:
        """Write down a failed attempt, in a transaction of its own; or stop the group, where that was no attempt."""
        entry, of = failed.entry, self.progress.of
        is_attempt = not failed.failure.unavailable or self._gate.is_alone(entry.id)
        with begin(connection):
            locked, offsets = execute(connection, *self._first_statements([])[:2])
            offset = offsets[0] if offsets else sql.NO_OFFSET
            if offset[0] != self.progress.position or not self._take(connection, locked, offset):
                # Another worker went on from here; what this message came to is now its affair.
                self._ahead.clear()
                return State.LOCKED, Counts()
            if is_attempt:
                # Messages that wait had no part in the failure, and are passed with it.
                waiting = [each for each in self._batch.wait if offset[0] < each.position < entry.position]
                at_commit(connection, *key_order.wait(of, waiting, self.progress.passage, self._batch.again))
                row, after = self._write_failure(connection, entry, failed.attempts, failed.failure, 1)
                if failed.is_answered and self._gate.on_trial:
                    self._gate.close(connection)
            else:
                at_commit(connection, self.progress.drop_starts())
        if not is_attempt:
            self._gate.unavailable(connection, failed.failure, is_trial=self._gate.on_trial)
            return State.BLOCKED, Counts()
        self._tell_failure(row, after, failed.__cause__)
        if row.status != Status.CONSUMED:
            self._gate.failed(connection, failed.failure.reason)
        return (State.WORKED if after else State.BLOCKED), counts_of(row)

    def _write_failure(
        self, connection: Connection, entry: Entry, attempts: int, failure: HandlerFailure, taken: int
    ) -> tuple[sql.InboxUpdate, ConsumerProgress | None]:
        """Write a failed attempt at the COMMIT, and the offset behind it; None where the queue waits for its retry."""
        progress, subscription = self.progress, self._subscription
        row = settle(subscription, entry, attempts, failure, self._settings.retry_jitter)
        at_commit(connection, *record_failure(subscription, progress.of, entry, row, progress.passage))
        if subscription.blocks_queue and row.status == Status.FAILED:
            at_commit(connection, progress.drop_starts())
            return row, None
        after = progress.past(entry, taken)
        at_commit(connection, after.append())
        return row, after

    def _tell_failure(self, row: sql.InboxUpdate, after: ConsumerProgress | None, error: BaseException | None) -> None:
        if after is not None:
            self._advance(after)
        count_attempt(self._meter, row)
        emit(event_of(self.progress.of, row, error))

    def _advance(self, after: ConsumerProgress) -> None:
        """Go past what is done with."""
        while self._ahead and self._ahead[0].position <= after.position:
            self._ahead.popleft()
        self.progress = after


#: How long (seconds) a consumer goes on with the queues that it is told of, until it looks at all of them again.
ALL_QUEUES_EVERY = 0.1

#: Transactions on one queue before a pass looks at the next one, so that none starves.
STEPS_PER_QUEUE = 50


class Consumer:
    """The consuming side of one `Subscription`; one object for each consuming thread, not thread-safe.

    Of the methods' two connections, the first is on the consumer's database, the second on the producer's;
    where both are the same, pass the same object twice. Neither may be in a transaction. ``stopping`` is asked
    between transactions, so that a pass over a long queue ends soon when the process is to stop; and so is the ``gate``
    whether the group is paused, or as fast as it may be, or stopped by its breaker.
    """

    def __init__(
        self, subscription: Subscription, settings: Settings, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.subscription: Subscription = subscription
        self._settings = settings
        self._stopping = stopping
        self._queues: dict[int, QueueConsumer] = {}
        self._woken_for: set[int | None] = set()
        self._all_due_at = -math.inf
        #: What the handler does here, and how far behind the group is.
        self.meter: HandlerMeter = HandlerMeter()
        self.gate: Gate = Gate(subscription, settings, self._queues.keys())
        # Was the last trial one of a retry? One that fails by itself is due again at once: it must not have each trial.
        self._tried_retry = False

    def start(self, connection: Connection, source: Connection) -> None:
        """Make the group ready to consume: to be called before anything else, by each worker.

        A new group gets its first offsets, by the subscription's ``start``; a known group keeps its own. Queues (and
        topics) that come later are read from their first message. After this and before it consumes, a worker
        quarantines the compensated messages for the group (`outbox.compensate.quarantine.quarantine_group`).

        Raises:
            MessagesPruned: messages from behind the start were pruned, and the subscription says to stop then.
        """
        self.subscription = met(connection, source, self.subscription, self._settings.schema)
        start_group(connection, source, self.subscription, self._settings.schema)

    def find_source(self, connection: Connection, source: Connection) -> None:
        """Find out on new connections whether these lead to the source of before; begin with another one, if not.

        Raises:
            MessagesPruned: as of `start`.
        """
        found = met(connection, source, self.subscription, self._settings.schema)
        if found.feed != self.subscription.feed:
            self.subscription = found
            self._queues.clear()
            start_group(connection, source, found, self._settings.schema)

    def wake(self, queue: int | None = None) -> None:
        """Take note that a queue has new messages, or (None) that any may have them; from any thread."""
        self._woken_for.add(queue)

    def end(self) -> None:
        """Do nothing: handlers run in a pass."""

    def consume_once(self, connection: Connection, source: Connection) -> Counts:
        """Consume the messages that are there, queue by queue; ``more`` if a pass right after this one would find more.

        Raises:
            MessagesPruned: a queue is stuck by that, and there is nothing left to do in the others.
        """
        counts = Counts()
        if self._stopping():
            return counts
        pruned: MessagesPruned | None = None
        # What another thread adds meanwhile is for the next pass.
        woken = {self._woken_for.pop() for _ in range(len(self._woken_for))}
        all_due_at, self._all_due_at = self._all_due_at, -math.inf
        ahead: dict[QueueConsumer, list[Row]] = {}
        knows = time.monotonic() < all_due_at and woken and woken <= self._queues.keys()
        is_named = knows and source is connection and not self.gate.limited
        if is_named:
            # The first transaction of each looks and reads by itself.
            queues = [consumer for queue, consumer in self._queues.items() if queue in woken]
        else:
            all_due_at = time.monotonic() + ALL_QUEUES_EVERY
            queues = self.waiting_queues(connection, source)
            random.shuffle(queues)
            # From all at once: many queues must not mean many round trips.
            if missing := [consumer for consumer in queues if not consumer.has_read_ahead]:
                statements = [consumer.next_messages() for consumer in missing]
                ahead = dict(zip(missing, read_log(connection, source, plan_by_index(), *statements)[1:], strict=True))
            self.measure_lag(queues, (each.first_time(ahead.get(each)) for each in queues))
        for consumer in queues:
            last = None if is_named else consumer.progress.end
            try:
                if consumer in ahead:
                    consumer.read(ahead[consumer])
                counts += self._drain(consumer, last, connection, source)
            except MessagesPruned as error:
                pruned = error  # the other queues have nothing to do with it
            finally:
                consumer.transactions.end()
        if pruned is not None and not counts:
            raise pruned
        self._all_due_at = -math.inf if counts.more else all_due_at
        return counts

    def _drain(self, consumer: QueueConsumer, last: int | None, connection: Connection, source: Connection) -> Counts:
        """Consume a queue up to a position, and its read entries; None: those that the first transaction reads."""
        counts = Counts()
        for _ in range(STEPS_PER_QUEUE):
            if self._stopping():
                return counts
            most = None
            # What has begun already was admitted with the one before.
            if not consumer.transactions.has_begun or self.gate.looks:
                consumer.transactions.end()
                if (most := self.gate.admitted(connection)) == 0:
                    return counts
            state, step = consumer.step(connection, source, most, goes_on=True)
            self.gate.handled(step)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            reached = step.taken > 0 if last is None else consumer.progress.position >= last
            if state is not State.WORKED or (reached and not consumer.has_read_ahead):
                return counts
        return counts + Counts(more=True)

    def waiting_queues(self, connection: Connection, source: Connection) -> list[QueueConsumer]:
        """Return the queues that have messages which the group may read now, or not what it has read there."""
        schema, group, topic = self._settings.schema, self.subscription.group, self.subscription.topic
        heads, feed = sql.heads(schema, topic=topic), self.subscription.feed
        if source is connection and self._queues:
            offset = sql.offsets(schema, group=group, topic=feed, queues=sorted(self._queues))
            _, rows, offsets = read_source(source, plan_by_index(), heads, offset)
        else:
            (_, rows), offsets = read_source(source, plan_by_index(), heads), []
        known = {row[0] for row in offsets}
        if unread := [row[0] for row in rows if row[0] not in known]:
            offsets += read_source(connection, sql.offsets(schema, group=group, topic=feed, queues=unread))[0]
        offset_of = {row[0]: row[1:] for row in offsets}
        reaches: dict[int, growth.Reach] = {}
        if rows and (growths := rows[0][-1]):
            positions = {queue: position for queue, (position, _) in offset_of.items()}
            reaches = growth.reaches(source, schema, topic, growth.read(growths), positions)
        waiting = []
        for queue, last, last_id, is_standby, _ in rows:
            if (consumer := self._queues.get(queue)) is None:
                consumer = QueueConsumer(self.subscription, self._settings, queue, self.meter, self.gate)
                self._queues[queue] = consumer
            position, message_id = offset_of[queue]
            reach = reaches.get(queue, growth.UNBOUNDED)
            end = last if reach.end is None else min(last, reach.end)
            consumer.come_to(consumer.progress._replace(position=position, message_id=message_id, reach=reach, end=end))
            if consumer.progress.is_behind(last, last_id, is_standby=is_standby):
                waiting.append(consumer)
        return waiting

    def measure_lag(self, waiting: list[QueueConsumer], first_times: Iterable[dt.datetime | None]) -> None:
        """Note how many messages wait, and since when the first of them does."""
        self.meter.lag = sum(behind(each.progress.position, each.progress.end) for each in waiting)
        self.meter.waiting_since = min((each for each in first_times if each is not None), default=None)
        self.meter.measured_at = time.monotonic()

    def retry_once(self, connection: Connection, source: Connection, *, limit: int = 100) -> Counts:
        """Retry the messages that are due, at most ``limit`` messages.

        Ordered groups retry in place, in `consume_once`; here they only retry parked messages, at an operator's order.
        Of a group that is ordered by key, the messages that waited for one that is settled now follow, in their order.
        """
        counts = Counts()
        key_order.release(connection, source, self.subscription, self._settings.schema)
        if self.gate.on_trial and self._tried_retry:
            self._tried_retry = False
            return counts
        for _ in range(limit):
            if self._stopping() or holds_retries(connection, self.subscription, self._settings.schema, self.gate):
                return counts
            self._tried_retry = self.gate.on_trial
            step = retry_next(connection, source, self.subscription, self._settings, self.meter, self.gate)
            self.gate.handled(step)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if not step.more:
                return counts
        return counts + Counts(more=True)
