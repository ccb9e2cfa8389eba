"""Consume one queue of one group: lock, inbox rows, handlers and offset in one transaction.

Nothing is leased: the worker that holds the queue's advisory lock, which ends with the transaction, is its consumer for
this transaction. Entries that were read ahead stay valid as long as the offset in the database is where this worker
left it, since messages never change. The offset keeps the id of its message: whether the log still has it there is seen
at each read (`outbox.consumer.log_loss`). A queue that another worker has leased, to handle its messages outside of
transactions (`outbox.consumer.outside`), is left to it until the lease ends.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.consumer import growth, key_order, sql
from outbox.consumer.control.gate import Gate
from outbox.consumer.expiry import expired_of, record_expiry
from outbox.consumer.failure import record_failure
from outbox.consumer.log_loss import go_back
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.outside import sql as lease_sql
from outbox.consumer.passage import FIRST_PASSAGE, passage_of, take_earlier
from outbox.consumer.retry import holds_retries, retry_next
from outbox.consumer.start import met, start_group
from outbox.consumer.subscription import (
    AttemptFailed,
    Entry,
    Subscription,
    TransactionEnded,
    consumed,
    count_attempt,
    counts_of,
    crashed,
    event_of,
    filter_of,
    handled,
    known_rows,
    raise_refused,
    run_handler,
    settle,
    to_entry,
)
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, is_lost, read_log, read_source
from outbox.database.session import Transactions, begin, commit
from outbox.database.sql import GroupQueue, plan_by_index, try_lock
from outbox.errors import MessagesPruned
from outbox.message.model import Counts, Status, behind, number_of
from outbox.settings import Settings
from outbox.telemetry.events import BatchUndone, CrashFound
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
        #: The last position of the queue, as far as it is known.
        self.end: int | None = None
        self.meter: HandlerMeter = meter
        self._subscription = subscription
        self._settings = settings
        self._gate = gate
        self._queue = GroupQueue(settings.schema, subscription.group, subscription.feed, queue)
        self._ahead: deque[Entry] = deque()
        self._position = -1
        self._fresh = True
        self._started_after = -1  # the position beside which this worker has written its start
        self._one_by_one = 0
        self.transactions: Transactions = Transactions()
        self._next: list[Entry] = []  # whose rows the transaction has looked up that began with the last COMMIT
        self._goes_on = False
        self._passage = FIRST_PASSAGE
        self._earlier: frozenset[UUID] = frozenset()  # messages of this step that are handled again
        self._waiting: list[Entry] = []
        #: How far the group may read, if its topic got more queues.
        self.reach: growth.Reach = growth.UNBOUNDED

    @property
    def position(self) -> int:
        """The offset after which this worker would go on; -1 if it doesn't know."""
        return self._position

    @property
    def has_read_ahead(self) -> bool:
        """Are there messages which are read and not yet consumed?"""
        return bool(self._ahead)

    @property
    def next_visible_at(self) -> dt.datetime | None:
        """When the first message that is read and not yet consumed came into the queue; None: not known."""
        return next((entry.message.visible_at for entry in self._ahead if entry.message), None)

    def next_messages(self, position: int) -> Statement:
        """Return the statement that reads ahead from a position, whole batches; its rows are for `read`."""
        if position < self.reach.position:
            # The group was moved back: the next pass finds out how far it may read.
            self.reach = growth.Reach(0, position, position)
        batch = self._subscription.batch
        return sql.messages_after(
            self._settings.schema,
            topic=self._subscription.topic,
            queue=self._queue.queue,
            position=position,
            limit=-(-self._settings.read_ahead // batch) * batch,
            bytes=self._settings.read_ahead_bytes,
            grown=self.reach.grown,
            **filter_of(self._subscription),
        )

    def read(self, rows: list[Row], position: int, message_id: UUID | None) -> bool:
        """Take the entries read ahead after a position. They are used if the group's offset is there at the next step.

        ``message_id`` is that of the message there, as far as it is known. Return False, and take nothing, if the log
        went back: it has another message there, or none and comes to no later one, or repeats a number.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        self._drop_ahead()
        subscription, queue = self._subscription, self._queue.queue
        if position and not rows:
            # What stood before a growth can't be lost: a log that knows the growth has had it.
            return self.reach.end is not None
        if rows and rows[0][0] == position:
            if message_id not in {None, rows[0][1]}:
                return False
            rows = rows[1:]
        # Over the end of an epoch, the number goes on.
        step = 1 if not rows or rows[0][0] == position + 1 else number_of(rows[0][0]) - number_of(position)
        if step < 1:
            return False
        if step > 1 and subscription.on_pruned == "stop":
            raise MessagesPruned.unread(subscription.group, subscription.topic, queue, number_of(position), step - 1)
        self.end = max(self.end or 0, rows[-1][0] if rows else 0)
        self._ahead = deque(to_entry(row, subscription, queue, self.end) for row in rows)
        self._position = position
        return True

    def expect(self, position: int) -> None:
        """Take note of the group's offset: entries read ahead after another one are of no use."""
        if position != self._position:
            self._drop_ahead()
            self._position = position

    def take_ahead(self) -> list[Entry]:
        """Return the entries read ahead, and forget them."""
        entries = list(self._ahead)
        self._drop_ahead()
        return entries

    def forget(self) -> None:
        """Drop the entries read ahead, and start again at the next step: the connection was lost."""
        self._drop_ahead()
        self._fresh = True
        self._started_after = -1

    def _drop_ahead(self) -> None:
        self._ahead.clear()
        self._position = -1

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
                self._one_by_one = self._subscription.batch
                group, topic, queue = self._queue.values
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
                self.forget()
            raise

    def _step(
        self, connection: Connection, source: Connection, most: int | None, rows: list[list[Row]] | None
    ) -> tuple[State, Counts]:
        size = 1 if self._one_by_one else min(self._subscription.batch, most or self._subscription.batch)
        candidates = list(islice(self._ahead, size)) if rows is None else self._next
        reads = rows is None and not candidates and source is connection and self._position >= 0
        if rows is None:
            first = self._read_statements(size) if reads else self._first_statements(candidates)
            rows = execute(connection, *first)
        locked, offsets, *inbox = rows
        position, starts, message_id, passage, is_held, _ = offset = offsets[0] if offsets else sql.NO_OFFSET
        if is_held or not locked[0][0]:
            self._drop_ahead()
            return State.LOCKED, Counts()
        if is_held is False:
            # Its worker is gone. If it comes back, it finds a newer term than its own.
            execute(connection, lease_sql.end_lease(self._settings.schema, *self._queue.values))
        if passage != self._passage.number:
            self._passage = passage_of(connection, self._queue, passage)
        if position != self._position or not candidates:
            if not reads or position != self._position:
                inbox = read_log(connection, source, self.next_messages(position))
            ahead, *inbox = inbox
            agrees = self.read(ahead, position, message_id)
            candidates = list(islice(self._ahead, size))
            if not candidates:
                moved = not agrees and go_back(connection, source, self._queue, position)
                return (State.WORKED if moved else State.EMPTY), Counts(more=moved)
            inbox = inbox or execute(connection, *self._inbox_of(candidates))
        known = {row[0]: row for row in inbox[0]}
        held = {key for rows in inbox[1:] for (key,) in rows}
        if self._passage.number:
            earlier = take_earlier(connection, source, self._queue, self._passage, known)
            if earlier is None:  # a retry, or an operator's act, has one of them
                self._drop_ahead()
                return State.LOCKED, Counts()
            self._earlier = frozenset(earlier)
            known = {id_: row for id_, row in known.items() if id_ not in self._earlier}
        if (ended := self._without_handler(connection, candidates[0], known)) is not None:
            return ended
        started = self._start(connection, candidates[0], known, held, offset) if self._fresh or starts else None
        return started or self._consume(connection, candidates, known, held)

    def _first_statements(self, entries: list[Entry]) -> list[Statement]:
        """Return what a transaction begins with: it takes the queue, and reads its offset, and of these messages."""
        offset = sql.offset(self._settings.schema, *self._queue.values)
        return [try_lock(self._queue.lock, sql.MARKING), offset, *self._inbox_of(entries)]

    def _read_statements(self, size: int) -> list[Statement]:
        """Return what a transaction begins with that also reads: where the log is in the consumer's database."""
        group, _, queue = self._queue.values
        statements = [*self._first_statements([])[:2], self.next_messages(self._position)]
        if not self._subscription.by_key:  # what holds back a key is asked when the keys are known
            at = self._subscription.topic, queue, self._position, size, group
            statements.append(sql.known_after(self._queue.schema, *at))
        return statements

    def _inbox_of(self, entries: list[Entry]) -> list[Statement]:
        """Return what reads the inbox rows of messages, and which of their keys are held back."""
        keys = key_order.keys_of(entries) if self._subscription.by_key else []
        return [known_rows(self._queue, entries), *([key_order.held(self._queue, keys)] if keys else [])]

    def _append_offset(self, connection: Connection, position: int, starts: int, message_id: UUID | None) -> None:
        values = *self._queue.values, position, starts, message_id, self._passage.number
        at_commit(connection, sql.append_offset(self._settings.schema, *values))
        if starts:
            self._started_after = position

    def _without_handler(
        self, connection: Connection, entry: Entry, known: dict[object, Row]
    ) -> tuple[State, Counts] | None:
        """Return how the step ends where the first message isn't to be handled now; None where it may be."""
        row = known.get(entry.id, sql.NO_ROW)
        if self.is_sent_again(entry, row):
            return self._retry_resent(connection, entry)
        if self._subscription.blocks_queue and row[1] == Status.FAILED and row[3] > 0:
            return State.BLOCKED, Counts()
        return None

    def is_sent_again(self, entry: Entry, row: Row) -> bool:
        """Tell whether this is a newer send of a message that the group has failed or parked."""
        if row is sql.NO_ROW or entry.message is None or entry.message.send_number == 1:
            return False
        _, status, _, _, queue, position, discarded, *_ = row
        tries = status == Status.FAILED or (status == Status.PARKED and not discarded)
        return tries and (queue, position) != (self._queue.queue, entry.position)

    def _retry_resent(self, connection: Connection, entry: Entry) -> tuple[State, Counts]:
        """Have a message that was sent again tried again: by a retry, or (ordered) by the next step.

        In a transaction that does nothing else, so that a handler which fails can't undo it.
        """
        of = self._queue
        again = {"group": of.group, "queue": of.queue, "id": entry.id, "position": entry.position}
        if not execute(connection, sql.retry_resent(of.schema, **again))[0]:
            # A retry runs its handler, or an operator acts on it. Going past it now would lose this send.
            self._drop_ahead()
            return State.LOCKED, Counts()
        if self._subscription.blocks_queue:
            return State.WORKED, Counts(more=True)
        left = max(self._one_by_one - 1, 0)
        self._append_offset(connection, entry.position, 1 if left else 0, entry.id)
        commit(connection)
        self._advance(entry.position)
        self._one_by_one = left
        return State.WORKED, Counts(taken=1)

    def _start(
        self, connection: Connection, entry: Entry, known: dict[object, Row], held: set[str], offset: Row
    ) -> tuple[State, Counts] | None:
        """Write down a start, or park ``entry``, at which too many had no end; None if neither is to be done."""
        _, starts, before, *_, is_new = offset
        total = starts + (1 if self._fresh else 0)
        # A worker that has started here itself lives, and goes on: those that lost the race to it are no crash.
        is_over = total > self._settings.max_starts and self._started_after != self._position
        if is_over and self._is_to_run(entry, known, held):
            if is_new:  # and so may live the one that wrote it, between two transactions
                self._drop_ahead()
                return State.LOCKED, Counts()
            self._fresh, self._one_by_one = False, self._subscription.batch
            return self._settle_crasher(connection, entry, known, total, before)
        if not self._fresh:
            return None
        self._fresh = False
        if starts:
            self._one_by_one = self._subscription.batch
            if not is_new:
                group, topic, queue = self._queue.values
                found = CrashFound(group=group, topic=topic, queue=queue, position=self._position, starts=starts)
                after_commit(connection, partial(emit, found))
        self._append_offset(connection, self._position, total, before)
        return State.WORKED, Counts(more=True)

    def _settle_crasher(
        self, connection: Connection, entry: Entry, known: dict[object, Row], starts: int, before: UUID | None
    ) -> tuple[State, Counts]:
        """Park a message that kills its worker; or have it tried again later, where nothing may go past it."""
        subscription = self._subscription
        attempts, failure = crashed(subscription, known.get(entry.id, sql.NO_ROW)[2], starts)
        row = settle(subscription, entry, attempts, failure, self._settings.retry_jitter)
        at_commit(connection, *record_failure(subscription, self._queue, entry, row, self._passage.number))
        after_commit(connection, partial(emit, event_of(subscription, self._queue.queue, row, None)))
        after_commit(connection, partial(count_attempt, self.meter, row))
        if subscription.blocks_queue and row.status == Status.FAILED:
            self._drop_starts(connection, self._position, before)
            return State.BLOCKED, counts_of(row)
        self._append_offset(connection, entry.position, 1, entry.id)
        self._drop_ahead()
        return State.WORKED, counts_of(row)

    def _drop_starts(self, connection: Connection, position: int, message_id: UUID | None) -> None:
        """Forget that messages were started: the next worker that takes the queue begins to count anew."""
        group, topic, queue = self._queue.values
        offset = {"group": group, "topic": topic, "queue": queue, "position": position, "id": message_id}
        at_commit(connection, sql.drop_starts(self._settings.schema, **offset, passage=self._passage.number))

    def _is_to_run(self, entry: Entry, known: dict[object, Row], held: set[str]) -> bool:
        if entry.id in known:
            return self._subscription.blocks_queue and known[entry.id][1] == Status.FAILED
        return entry.message is not None and entry.key not in held

    def _consume(
        self, connection: Connection, candidates: list[Entry], known: dict[object, Row], held: set[str]
    ) -> tuple[State, Counts]:
        # By the numbers of their ids: the hash of a UUID is a call of Python's.
        todo: dict[int, Entry] = {}
        waiting: dict[int, Entry] = {}
        passed: list[Entry] = []
        attempt, known_failed, first_failed_at = 1, False, None
        for entry in candidates:
            row = known.get(entry.id, sql.NO_ROW) if known else sql.NO_ROW
            if row is sql.NO_ROW:
                if entry.message is not None:
                    # A message that was resent may stand in the batch twice.
                    (waiting if held and entry.key in held else todo).setdefault(entry.id.int, entry)
            elif self.is_sent_again(entry, row):
                break
            elif row[1] == Status.FAILED and self._subscription.blocks_queue:
                if passed:
                    break
                attempt, known_failed, first_failed_at = row[2] + 1, True, row[8]
                todo[entry.id.int] = entry
                passed.append(entry)
                break
            passed.append(entry)
        of, entries, self._waiting = self._queue, list(todo.values()), list(waiting.values())
        if known_failed and not execute(connection, sql.lock_failed(of.schema, of.group, entries[0].id))[0]:
            # A worker that runs a failed message holds its row, as in a retry. Another one has it, or has just settled
            # it: what the handler did would stay, though the row says something else.
            self._drop_ahead()
            return State.LOCKED, Counts()
        expired = expired_of(connection, entries) if any(entry.can_expire for entry in entries) else {}
        if expired:
            entries = [entry for entry in entries if entry.id not in expired]
        if entries and self._gate.on_trial and not self._gate.begins_trial(connection):
            return State.LOCKED, Counts()
        # One by one, each statement waits for its answer: a failure is told where it happens.
        pipelined = self._subscription.pipeline and not (self._one_by_one or self._gate.on_trial)
        how = attempt, self.meter, self._passage.number, first_failed_at
        run_handler(connection, self._subscription, entries, *how, pipelined=pipelined)
        for entry in expired.values():
            record_expiry(connection, self._queue, entry, attempt - 1, self._passage.number)
        if self._waiting:
            at_commit(connection, *key_order.wait(self._queue, self._waiting, self._passage.number, self._earlier))
        return self._close(connection, entries, passed, attempt, known_failed)

    def _close(
        self, connection: Connection, entries: list[Entry], passed: list[Entry], attempt: int, known_failed: bool
    ) -> tuple[State, Counts]:
        last = passed[-1]
        if known_failed and entries:
            entry = entries[0]
            row = sql.InboxUpdate(entry.id, entry.position, Status.CONSUMED.value, attempt, entry.digest(), None)
            at_commit(connection, sql.MARKED, *sql.settle(self._queue, row, self._passage.number))
        elif entries:
            at_commit(connection, *consumed(self._queue, self._passage.number, entries, self._earlier))
        left = max(self._one_by_one - len(passed), 0)
        self._append_offset(connection, last.position, 1 if left else 0, last.id)
        goes_on = self._goes_on and not left and not self._gate.limited and last.position != self.end
        self._next = list(islice(self._ahead, len(passed), len(passed) + self._subscription.batch)) if goes_on else []
        try:
            self.transactions.commit(connection, *(self._first_statements(self._next) if self._next else ()))
        except Exception as error:
            if sql.is_inbox_conflict(error, self._settings.schema):
                raise _Known from error
            raise_refused(connection, error, entries, attempt)
        self._advance(last.position)
        self._one_by_one = left
        self.meter.done += len(entries)
        if entries and (known_failed or listeners.hooks or middlewares_here.get()):
            emit(handled(self._queue, entries, attempt))
        return State.WORKED, Counts(taken=len(passed), done=len(entries))

    def _record(self, connection: Connection, failed: AttemptFailed) -> tuple[State, Counts]:
        """Write down a failed attempt, in a transaction of its own."""
        entry, subscription, of = failed.entry, self._subscription, self._queue
        row = settle(subscription, entry, failed.attempts, failed.failure, self._settings.retry_jitter)
        with begin(connection):
            taking = try_lock(of.lock, sql.MARKING)
            locked, offsets = execute(connection, taking, sql.offset(of.schema, *of.values))
            position, _, message_id, passage, is_held, _ = offsets[0] if offsets else sql.NO_OFFSET
            if not locked[0][0] or is_held or position != self._position:
                # Another worker went on from here; what this message came to is now its affair.
                self._ahead.clear()
                return State.LOCKED, Counts()
            if passage != self._passage.number:
                self._passage = passage_of(connection, of, passage)
            blocked = subscription.blocks_queue and row.status == Status.FAILED
            # Messages that wait had no part in the failure, and are passed with it.
            waiting = [each for each in self._waiting if position < each.position < entry.position]
            at_commit(connection, *key_order.wait(of, waiting, passage, self._earlier))
            at_commit(connection, *record_failure(subscription, of, entry, row, passage))
            if row.status == Status.CONSUMED and self._gate.on_trial:  # skipped: the handler works
                self._gate.close(connection)
            if blocked:
                # This start had an end: the worker that takes the queue for the next attempt begins to count anew.
                self._drop_starts(connection, position, message_id)
            else:
                self._one_by_one = max(self._one_by_one - 1, 0)
                self._append_offset(connection, entry.position, 1 if self._one_by_one else 0, entry.id)
        if not blocked:
            self._advance(entry.position)
        count_attempt(self.meter, row)
        emit(event_of(subscription, of.queue, row, failed.__cause__))
        if row.status != Status.CONSUMED:
            self._gate.failed(connection, failed.failure.reason)
        return (State.BLOCKED if blocked else State.WORKED), counts_of(row)

    def _advance(self, position: int) -> None:
        while self._ahead and self._ahead[0].position <= position:
            self._ahead.popleft()
        self._position = position


#: A queue to look at: its number, the group's offset, the id of the message there, and the last position.
WaitingQueue = tuple[int, int, UUID | None, int]

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
        self.subscription = subscription
        self._settings = settings
        self._stopping = stopping
        self._queues: dict[int, QueueConsumer] = {}
        self._woken_for: set[int | None] = set()
        self._all_due_at = -math.inf
        #: What the handler does here, and how far behind the group is.
        self.meter: HandlerMeter = HandlerMeter()
        self.gate: Gate = Gate(subscription, settings, self._queues.keys())

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
        queues: Sequence[tuple[int, int, UUID | None, int | None]]
        ahead: dict[int, list[Row]] = {}
        knows = time.monotonic() < all_due_at and woken and woken <= self._queues.keys()
        if knows and source is connection and not self.gate.limited:
            # The first transaction of each looks and reads by itself.
            queues = [(queue, 0, None, None) for queue in self._queues if queue in woken]
        else:
            all_due_at = time.monotonic() + ALL_QUEUES_EVERY
            queues = waiting = self.waiting_queues(connection, source)
            random.shuffle(waiting)
            ahead = self._read_ahead(connection, source, waiting)
            self.measure_lag(waiting, self._first_times(waiting, ahead))
        for queue, position, message_id, last in queues:
            consumer = self._queues[queue]
            consumer.end = consumer.end if last is None else last
            try:
                if queue in ahead:
                    consumer.read(ahead[queue], position, message_id)
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
            reached = step.taken > 0 if last is None else consumer.position >= last
            if state is not State.WORKED or (reached and not consumer.has_read_ahead):
                return counts
        return counts + Counts(more=True)

    def waiting_queues(self, connection: Connection, source: Connection) -> list[WaitingQueue]:
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
            if queue not in self._queues:
                self._queues[queue] = QueueConsumer(self.subscription, self._settings, queue, self.meter, self.gate)
            position, message_id = offset_of[queue]
            self._queues[queue].expect(position)
            # An offset that is ahead may have been moved since the queue's end was read: a step looks again.
            went_back = message_id not in {None, last_id} if last == position else last < position and not is_standby
            reach = self._queues[queue].reach = reaches.get(queue, growth.UNBOUNDED)
            end = last if reach.end is None else min(last, reach.end)
            if end > position or went_back:
                waiting.append((queue, position, message_id, end))
        return waiting

    def reach_of(self, queue: int) -> growth.Reach:
        """Return how far the group may read a queue, as the last look at its queues found."""
        return self._queues[queue].reach if queue in self._queues else growth.UNBOUNDED

    def _read_ahead(self, here: Connection, source: Connection, waiting: list[WaitingQueue]) -> dict[int, list[Row]]:
        """Read from all queues at once what this worker hasn't read yet; many queues must not mean many round trips."""
        missing = [
            (queue, position)
            for queue, position, _, _ in waiting
            if not (self._queues[queue].has_read_ahead and self._queues[queue].position == position)
        ]
        if not missing:
            return {}
        statements = [self._queues[queue].next_messages(position) for queue, position in missing]
        _, *rows = read_log(here, source, plan_by_index(), *statements)
        return dict(zip((queue for queue, _ in missing), rows, strict=True))

    def _first_times(self, waiting: list[WaitingQueue], ahead: Mapping[int, list[Row]]) -> Iterator[dt.datetime | None]:
        """Yield when the first message that waits in each queue came into it, as far as it was read."""
        for queue, position, _, _ in waiting:
            rows = (row[3] for row in ahead.get(queue, ()) if row[0] > position)
            yield next(rows, None) if queue in ahead else self._queues[queue].next_visible_at

    def measure_lag(self, waiting: list[WaitingQueue], first_times: Iterable[dt.datetime | None]) -> None:
        """Note how many messages wait, and since when the first of them does."""
        self.meter.lag = sum(behind(position, last) for _, position, _, last in waiting)
        self.meter.waiting_since = min((each for each in first_times if each is not None), default=None)
        self.meter.measured_at = time.monotonic()

    def retry_once(self, connection: Connection, source: Connection, *, limit: int = 100) -> Counts:
        """Retry the messages that are due, at most ``limit`` messages.

        Ordered groups retry in place, in `consume_once`; here they only retry parked messages, at an operator's order.
        Of a group that is ordered by key, the messages that waited for one that is settled now follow, in their order.
        """
        counts = Counts()
        key_order.release(connection, source, self.subscription, self._settings.schema)
        for _ in range(limit):
            if self._stopping() or holds_retries(connection, self.subscription, self._settings.schema, self.gate):
                return counts
            step = retry_next(connection, source, self.subscription, self._settings, self.meter, self.gate)
            self.gate.handled(step)
            counts += Counts(step.taken, step.done, step.failed, step.parked)
            if not step.more:
                return counts
        return counts + Counts(more=True)
