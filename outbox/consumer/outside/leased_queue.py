"""One queue that a worker has leased for a group, to handle its messages outside of transactions.

A lease is committed before any message of the queue is begun, has a term, and ends by the database's clock unless it is
renewed. A worker that takes a queue over writes a newer term. All that is written about the queue is written under its
advisory lock, by the worker that finds the newest term to be its own: results of an older term are refused, so that the
new worker handles those messages again. That is the worst that happens.

A lease also says up to where messages may have been begun (``started``; 0 if none is in doubt). It is committed before
the inbox is looked at, and a quarantine is committed before its worker looks at the leases: one of both sees the other.

Messages end in any order. Each gets its inbox row when it has ended, and the offset moves over those that have ended
without a gap. If a worker dies, those after the offset that have no row are handled again. One of them may be what
killed it: so up to ``started`` they are handled one by one, and their starts counted beside the offset, until the one
that kills its workers is known, and parked.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.consumer import key_order, sql
from outbox.consumer.consumer import QueueConsumer
from outbox.consumer.control.gate import Gate
from outbox.consumer.expiry import database_time, event_of_expiry, expired_of, expiry_of, has_expired
from outbox.consumer.failure import record_failure
from outbox.consumer.growth import Reach
from outbox.consumer.log_loss import go_back
from outbox.consumer.outside import sql as lease_sql
from outbox.consumer.outside.calls import Call
from outbox.consumer.outside.sql import LEASE_SECONDS
from outbox.consumer.passage import FIRST_PASSAGE, passage_of, take_earlier
from outbox.consumer.retry import PRUNED
from outbox.consumer.subscription import (
    EVERYTHING,
    Entry,
    Subscription,
    count_attempt,
    counts_of,
    crashed,
    event_of,
    filter_of,
    handled,
    known_rows,
    settle,
    to_entry,
)
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, read_log, read_source
from outbox.database.session import begin
from outbox.database.sql import GroupQueue, plan_by_index, take_lock, try_lock
from outbox.message.model import Counts, Status
from outbox.settings import Settings
from outbox.telemetry.events import CrashFound
from outbox.telemetry.hooks import emit, listeners, middlewares_here
from outbox.text import process_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.consumer.sql import InboxUpdate

#: A lease is renewed when so much of its time (seconds) is left.
_RENEW_LEFT = LEASE_SECONDS * 2 / 3
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class LeaseLapsed(Exception):
    """Another worker has a newer term: what this one knows of the queue counts no more."""


@dataclass(slots=True)
class _Slot:
    """A message after the offset; ``settled``: it needs nothing more. ``skipped``: its handler isn't called."""

    id: UUID
    settled: bool = False
    skipped: bool = False


class LeasedQueue:
    """One queue of one group, as the worker sees it that has the lease, or is about to take it. Not thread-safe."""

    def __init__(
        self, subscription: Subscription, settings: Settings, reader: QueueConsumer, queue: int, gate: Gate
    ) -> None:
        self._subscription = subscription
        self._settings = settings
        self._queue = GroupQueue(settings.schema, subscription.group, subscription.feed, queue)
        self._reader = reader
        self._gate = gate
        self._names = {"group": subscription.group, "topic": subscription.feed, "queue": queue}
        self._term = 0
        self._ends = 0.0
        # The offset, and up to where the queue was read: positions, and the ids of the messages there.
        self._offset: tuple[int, UUID | None] = (0, None)
        self._read: tuple[int, UUID | None] = (0, None)
        # Starts after the offset that had no end, and up to where one of the messages may be the reason. Up to where an
        # earlier worker may have begun messages of which the inbox knows nothing.
        self._starts = 0
        self._suspect_until = 0
        self._doubt_until = 0
        self._passage = FIRST_PASSAGE
        # What time the database's clock had when this process's clock, which only goes forward, began.
        self._began_at = _EPOCH
        self._slots: dict[int, _Slot] = {}
        self._ahead: list[tuple[Entry, int]] = []
        # Messages that an earlier one of their key holds back, as is yet to be written; those that are handled again.
        self._waiting: list[Entry] = []
        self._earlier: set[UUID] = set()
        self._in_flight: dict[UUID, Call] = {}
        self._results: list[Call] = []
        #: Did the last write make a message due that had waited for another one of its key?
        self.released: bool = False

    @property
    def number(self) -> int:
        """The number of the queue."""
        return self._queue.queue

    @property
    def ends(self) -> float:
        """When the lease ends at the latest, by the clock of this process that only goes forward."""
        return self._ends

    @property
    def renew_at(self) -> float:
        """When the lease is to be renewed, by the same clock."""
        return self._ends - _RENEW_LEFT

    @property
    def read_position(self) -> int:
        """The position up to which the queue was read."""
        return self._read[0]

    @property
    def in_flight(self) -> list[Call]:
        """The calls that run."""
        return list(self._in_flight.values())

    @property
    def running(self) -> list[UUID]:
        """The messages that run, or whose results are yet to be written."""
        return [*self._in_flight, *(call.entry.id for call in self._results)]

    @property
    def has_news(self) -> bool:
        """Is there anything to write: the result of a call, or that the offset has moved?"""
        return bool(self._results) or any(True for _ in self._prefix())

    @property
    def is_idle(self) -> bool:
        """Is there nothing that runs, waits to be called, or is to be written?"""
        return not (self._in_flight or self._ahead or self._results or self._slots)

    @property
    def waiting_since(self) -> dt.datetime | None:
        """When the first message that was read and isn't done with came into the queue; None: there is none."""
        calls = (call.entry for call in self._in_flight.values())
        waiting = (
            entry.message.visible_at for entry in [*calls, *(entry for entry, _ in self._ahead)] if entry.message
        )
        return min(waiting, default=None)

    @property
    def has_space(self) -> bool:
        """May more be read?"""
        return len(self._slots) < self._settings.read_ahead

    # --- the lease ------------------------------------------------------------------------------------------

    def take(self, connection: Connection, source: Connection, *, reads: bool = True) -> bool:
        """Lease the queue; with ``reads`` only if there is something to read. False if another worker has it.

        Raises:
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        began = time.monotonic()
        with begin(connection):
            locked, rows = execute(connection, try_lock(self._queue.lock), self._progress())
            position, starts, message_id, passage, term, _, is_taken, is_held, started = rows[0]
            if not locked[0][0] or (is_taken and is_held):
                return False
            self._passage = passage_of(connection, self._queue, passage)
            entries = self._next_entries(connection, source, position, message_id) if reads else []
            if reads and not (entries and self._may_begin(connection, entries[0])):
                return False
            doubt_until = started if started is not None and started > position else 0
            if is_taken and doubt_until:
                starts += 1
                group, topic, queue = self._queue.values
                found = CrashFound(group=group, topic=topic, queue=queue, position=position, starts=starts)
                after_commit(connection, partial(emit, found))
            # There is an offset where there is a lease: transactional workers see the lease by it.
            if is_taken or position == 0:
                execute(connection, self._offset_at(position, starts, message_id))
            self._term, self._doubt_until = (term or 0) + 1, doubt_until
            # A message whose call an operator stopped by moving the group has killed no worker.
            self._suspect_until = doubt_until if starts else 0
            self._offset = self._read = position, message_id
            self._append(connection, 0, entries[-1].position if entries else position)
        self._ends, self._starts = began + LEASE_SECONDS, starts
        self._accept(connection, source, entries)
        if starts > self._settings.max_starts and self._ahead:
            entry, attempt = self._ahead.pop(0)
            attempt, failure = crashed(self._subscription, attempt - 1, starts)
            self._results.append(Call(self.number, entry, attempt, failure=failure))
        return True

    def read_on(self, connection: Connection, source: Connection, end: int, reach: Reach) -> None:
        """Read what follows, as far as the group may read, in a queue that ends at a position.

        Raises:
            LeaseLapsed: another worker has the queue now.
            MessagesPruned: the next message is gone, and the subscription says to stop then.
        """
        began = time.monotonic()
        self._reader.end, self._reader.reach = end, reach
        with begin(connection):
            renewal = self._lock(connection)
            entries = self._entries_after(connection, source, *self._read) or []
            if not entries:
                return
            self._append(connection, renewal + 1, entries[-1].position)
        self._ends = began + LEASE_SECONDS
        self._accept(connection, source, entries)

    def renew(self, connection: Connection) -> None:
        """Move the end of the lease.

        Raises:
            LeaseLapsed: another worker has the queue now.
        """
        began = time.monotonic()
        with begin(connection):
            self._append(connection, self._lock(connection) + 1, self._read[0])
        self._ends = began + LEASE_SECONDS

    def give_up(self, connection: Connection) -> None:
        """Leave the queue, in which nothing runs, to others.

        Raises:
            LeaseLapsed: another worker has the queue now.
        """
        with begin(connection):
            self._lock(connection)
            execute(connection, self._lease(self._term + 1, 0, None, 0, 0.0))

    def _progress(self) -> Statement:
        return lease_sql.progress(self._queue.schema, **self._names)

    def _offset_at(self, position: int, starts: int, message_id: UUID | None) -> Statement:
        values = *self._queue.values, position, starts, message_id, self._passage.number
        return sql.append_offset(self._queue.schema, *values)

    def _append(self, connection: Connection, renewal: int, started: int) -> None:
        execute(connection, self._lease(self._term, renewal, process_name(), started, LEASE_SECONDS))

    def _lease(self, term: int, renewal: int, worker: str | None, started: int, seconds: float) -> Statement:
        if self._offset[0] < self._doubt_until:
            started = max(started, self._doubt_until)
        values = {"term": term, "renewal": renewal, "worker": worker, "started": started, "seconds": seconds}
        return lease_sql.append_lease(self._queue.schema, **self._names, **values)

    def _lock(self, connection: Connection) -> int:
        """Lock the queue, and make sure that the newest lease is ours; return the number of its renewal."""
        _, rows = execute(connection, take_lock(self._queue.lock), self._progress())
        term, renewal = rows[0][4:6]
        if term != self._term:
            raise LeaseLapsed(f"term {self._term} is over: the newest one is {term}")
        return int(renewal)

    # --- reading --------------------------------------------------------------------------------------------

    def _entries_after(
        self, connection: Connection, source: Connection, position: int, message_id: UUID | None
    ) -> list[Entry] | None:
        """Read what follows a position; None if the log went back behind it."""
        _, rows = read_log(connection, source, plan_by_index(), self._reader.next_messages(position))
        return self._reader.take_ahead() if self._reader.read(rows, position, message_id) else None

    def _next_entries(
        self, connection: Connection, source: Connection, position: int, message_id: UUID | None
    ) -> list[Entry]:
        entries = self._entries_after(connection, source, position, message_id)
        if entries is None:
            go_back(connection, source, self._queue, position)
        return entries or []

    def _may_begin(self, connection: Connection, first: Entry) -> bool:
        """Tell whether the first message can be handled now, or passed: an ordered group waits for its retry."""
        if not self._subscription.blocks_queue:
            return True
        (rows,) = execute(connection, known_rows(self._queue, [first]))
        waits = [wait for _, status, _, wait, *_ in rows if status == Status.FAILED]
        return not waits or waits[0] <= 0 or rows[0][7] < self._passage.number

    def _accept(self, connection: Connection, source: Connection, entries: Sequence[Entry]) -> None:
        """Take the entries read, by what the inbox says of them; up to one that has to be read once more, later."""
        if not entries:
            return
        with begin(connection):
            rows, *held_rows = execute(connection, known_rows(self._queue, entries), *self._held(entries))
            known = {row[0]: row for row in rows}
            if any(entry.can_expire for entry in entries):
                self._began_at = database_time(connection) - dt.timedelta(seconds=time.monotonic())
            held = {key for rows in held_rows for (key,) in rows} | {entry.key for entry in self._waiting}
            earlier = take_earlier(connection, source, self._queue, self._passage, known)
            if earlier is None:  # an operator's act has one of them
                return
            for id_ in earlier:
                del known[id_]
            self._earlier.update(earlier)
            there = {slot.id for slot in self._slots.values()}
            for entry in entries:
                row = known.get(entry.id, sql.NO_ROW)
                if entry.id in there or not self._accept_one(connection, entry, row, held):
                    break
                there.add(entry.id)
                self._read = entry.position, entry.id

    def _held(self, entries: Sequence[Entry]) -> list[Statement]:
        keys = key_order.keys_of(entries) if self._subscription.by_key else []
        return [key_order.held(self._queue, keys)] if keys else []

    def _accept_one(self, connection: Connection, entry: Entry, row: Row, held: Collection[str | None]) -> bool:
        slot, ordered = _Slot(entry.id, settled=True, skipped=True), self._subscription.blocks_queue
        if row is sql.NO_ROW and entry.key is not None and entry.key in held:
            self._waiting.append(entry)
        elif row is sql.NO_ROW or (ordered and row[1] == Status.FAILED and row[3] <= 0):
            if entry.message is not None:
                slot.settled = slot.skipped = False
                entry.message.first_failed_at, entry.message.passage = row[8], self._passage.number
                self._ahead.append((entry, row[2] + 1))
        elif self._reader.is_sent_again(entry, row):
            queue = self._queue
            again = {"group": queue.group, "queue": queue.queue, "id": entry.id, "position": entry.position}
            if not execute(connection, sql.retry_resent(queue.schema, **again))[0] or ordered:
                return False
        elif ordered and row[1] == Status.FAILED:
            return False
        self._slots[entry.position] = slot
        return True

    # --- calls ----------------------------------------------------------------------------------------------

    def next_call(self) -> Call | None:
        """Return the message to be handled next, if one may be now; its call is in flight from then on.

        Messages of one key wait for each other, unless the group is declared with ``ordered=False``; a group that is
        ordered, and one that looks for what has killed a worker, handles one message of the queue at a time. What has
        expired is passed over, which is its result.
        """
        while (call := self._take_next()) is not None:
            if not (call.entry.can_expire and has_expired(call.entry, self._database_time())):
                self._in_flight[call.entry.id] = call
                return call
            self._expire(call)
        return None

    def _database_time(self) -> dt.datetime:
        return self._began_at + dt.timedelta(seconds=time.monotonic())

    def _expire(self, call: Call) -> None:
        call.attempt, call.too_old, call.failure = call.attempt - 1, True, None
        self._results.append(call)

    def _take_next(self) -> Call | None:
        if (index := self._next_index()) is None:
            return None
        entry, attempt = self._ahead.pop(index)
        return Call(self.number, entry, attempt)

    @property
    def has_call(self) -> bool:
        """May a message be handled now?"""
        return self._next_index() is not None

    def _next_index(self) -> int | None:
        alone = self._subscription.blocks_queue or self._offset[0] < self._suspect_until
        if alone and (self._in_flight or self._results):
            return None
        return next((index for index, (entry, _) in enumerate(self._ahead) if not self._is_busy(entry)), None)

    def _is_busy(self, entry: Entry) -> bool:
        key = entry.message.key if entry.message else None
        if key is None or self._subscription.keys_overlap:
            return False
        return any(call.message.key == key for call in self._in_flight.values())

    def start_due(self, connection: Connection, source: Connection, rows: Sequence[Row]) -> list[Call]:
        """Count a start of failed messages, by rows of `lease_sql.due`; return their calls, in flight from then on.

        Raises:
            LeaseLapsed: another worker has the queue now.
        """
        schema, group = self._queue.schema, self._queue.group
        calls, left_out = self._candidates(source, rows)
        with begin(connection):
            self._lock(connection)
            for message_id in left_out:
                execute(connection, sql.forget(schema, group, message_id))
            if any(call.entry.can_expire for call in calls):
                expired = expired_of(connection, [call.entry for call in calls])
                for call in calls:
                    if call.entry.id in expired:
                        self._expire(call)
                calls = [call for call in calls if not call.too_old]
            ids, lease = [call.entry.id for call in calls], self._subscription.timeout_seconds + LEASE_SECONDS
            start = lease_sql.start_due(schema, group=group, ids=ids, seconds=lease)
            started: dict[UUID, int] = dict(execute(connection, start)[0])
        begun = []
        for call in calls:
            starts = started.get(call.entry.id, 0)
            if starts > self._settings.max_starts:
                call.attempt, call.failure = crashed(self._subscription, call.attempt - 1, starts)
                self._results.append(call)
            elif starts:
                self._in_flight[call.entry.id] = call
                begun.append(call)
        return begun

    def _candidates(self, source: Connection, rows: Sequence[Row]) -> tuple[list[Call], list[UUID]]:
        """Return calls of what may be retried now, and the ids of what the filter leaves out."""
        calls: list[Call] = []
        left_out: list[UUID] = []
        keys: set[str] = set()
        for _, message_id, position, attempts, _, never_attempted, first_failed_at in rows:
            # One that was never attempted (its quarantine was released) hasn't been through the group's filter.
            taken = filter_of(self._subscription) if never_attempted else EVERYTHING
            (found,) = read_source(source, sql.message_by_id(self._queue.schema, id=message_id, **taken))
            if not found:
                lost = Entry(position, message_id, None)
                self._results.append(Call(self.number, lost, attempts + 1, retries=True, failure=PRUNED))
                continue
            entry = to_entry(found[0], self._subscription, self.number)
            if entry.message is None:
                left_out.append(message_id)
            elif not self._is_busy(entry) and entry.message.key not in keys:
                if entry.message.key is not None and not self._subscription.keys_overlap:
                    keys.add(entry.message.key)
                entry.message.first_failed_at, entry.message.passage = first_failed_at, self._passage.number
                calls.append(Call(self.number, entry, attempts + 1, retries=True))
        return calls, left_out

    def ended(self, call: Call) -> None:
        """Take note that a call has ended; what came of it is written by `write_results`.

        One that has expired is begun again, as the same attempt; a retry, when it is due again.
        """
        if self._in_flight.pop(call.entry.id, None) is None:
            return
        if not call.has_expired:
            self._results.append(call)
        elif not call.retries:
            self._ahead.append((call.entry, call.attempt))
            self._ahead.sort(key=lambda each: each[0].position)

    # --- what came of them ----------------------------------------------------------------------------------

    def write_results(self, connection: Connection) -> Counts:
        """Write what came of the calls that have ended, and move the offset: in one transaction.

        If that fails, nothing is forgotten: to write it once more does no harm.

        Raises:
            LeaseLapsed: another worker has the queue now; it handles again what this one has.
        """
        updates = [(call, self._update_of(call)) for call in self._results]
        self._hold_back({update.key for _, update in updates if update.holds})
        blocked = self._mark(updates)
        passed = list(self._prefix())
        if not updates and not passed:
            return Counts()
        with begin(connection):
            self._lock(connection)
            self._write(connection, updates)
            if any(call.is_trial and update.status == Status.CONSUMED for call, update in updates):
                self._gate.close(connection)
            if self._waiting:
                # After what they wait for.
                waiting = key_order.wait(self._queue, self._waiting, self._passage.number, self._earlier)
                at_commit(connection, sql.MARK, *waiting)
            if passed:
                position, slot = passed[-1]
                starts = 1 if position < self._suspect_until else 0
                at_commit(connection, self._offset_at(position, starts, slot.id))
            elif blocked and self._starts:
                # This start had an end.
                position, message_id = self._offset
                values = self._names | {"position": position, "id": message_id, "passage": self._passage.number}
                at_commit(connection, sql.drop_starts(self._queue.schema, **values))
        self.released = self._subscription.by_key and any(call.retries and not row.holds for call, row in updates)
        if passed:
            self._offset, self._starts = (position, slot.id), starts
        for position, _ in passed:
            del self._slots[position]
        self._results.clear()
        self._waiting.clear()
        if blocked:
            self._block()
        self._tell_gate(connection, updates)
        return self._tell(updates) + Counts(taken=sum(slot.skipped for _, slot in passed))

    def _hold_back(self, keys: Collection[str | None]) -> None:
        """Have the entries read of these keys wait: messages of them have failed."""
        for entry, _ in [each for each in self._ahead if each[0].key is not None and each[0].key in keys]:
            self._waiting.append(entry)
            slot = self._slots[entry.position]
            slot.settled = slot.skipped = True
        self._ahead = [each for each in self._ahead if not self._slots[each[0].position].skipped]

    def _update_of(self, call: Call) -> InboxUpdate:
        entry = call.entry
        if call.too_old:
            return expiry_of(entry, call.attempt)
        if call.failure is None:
            return sql.InboxUpdate(entry.id, entry.position, Status.CONSUMED.value, call.attempt, entry.digest(), None)
        return settle(self._subscription, entry, call.attempt, call.failure, self._settings.retry_jitter)

    def _mark(self, updates: Sequence[tuple[Call, InboxUpdate]]) -> bool:
        """Mark messages that need nothing more in the queue; True if an ordered group is to wait for a retry."""
        blocked = False
        for call, update in updates:
            slot = None if call.retries else self._slots.get(call.entry.position)
            if slot is None:
                continue
            waits = self._subscription.blocks_queue and update.status == Status.FAILED
            slot.settled, blocked = not waits, blocked or waits
        return blocked

    def _prefix(self) -> Iterator[tuple[int, _Slot]]:
        """Yield the messages after the offset that need nothing more, up to the first that does."""
        for position, slot in self._slots.items():
            if not slot.settled:
                return
            yield position, slot

    def _write(self, connection: Connection, updates: Sequence[tuple[Call, InboxUpdate]]) -> None:
        passage = self._passage.number
        done = [update for call, update in updates if call.failure is None and not call.too_old]
        if done and passage:
            of_passage = {"group": self._queue.group, "passage": passage}
            at_commit(connection, sql.keep_earlier(self._queue.schema, ids=[each.id for each in done], **of_passage))
        if done:
            columns = {
                "ids": [update.id for update in done],
                "positions": [update.position for update in done],
                "attempts": [update.attempts for update in done],
                "digests": [update.digest for update in done],
            }
            at_commit(connection, lease_sql.consumed(self._queue.schema, **self._names, passage=passage, **columns))
        for call, update in updates:
            if call.too_old:
                at_commit(connection, *sql.settle(self._queue, update, passage))
            elif call.failure is not None:
                at_commit(connection, *record_failure(self._subscription, self._queue, call.entry, update, passage))
            if call.retries and not update.holds:
                at_commit(connection, *key_order.release_next(self._subscription, self._queue, call.entry))

    def _block(self) -> None:
        """Wait for the retry of the first message: entries read after it are read again then."""
        self._ahead.clear()
        self._slots.clear()
        self._read, self._starts = self._offset, 0

    def _tell_gate(self, connection: Connection, updates: Sequence[tuple[Call, InboxUpdate]]) -> None:
        """Have the breaker opened if there were failures alone, and one too many."""
        failures = [call.failure for call, update in updates if call.failure and update.status != Status.CONSUMED]
        if any(update.status == Status.CONSUMED for _, update in updates):
            self._gate.succeeded()
        elif failures:
            self._gate.failed(connection, failures[-1].reason)

    def _tell(self, updates: Sequence[tuple[Call, InboxUpdate]]) -> Counts:
        counts, first, meter = Counts(), [], self._reader.meter
        for call, update in updates:
            if call.too_old:
                emit(event_of_expiry(self._queue, call.entry, call.attempt))
                counts += Counts(taken=1)
                continue
            if call.failure is not None:
                count_attempt(meter, update)
                emit(event_of(self._subscription, self.number, update, call.error))
                one = counts_of(update)
                counts += Counts(one.taken, one.done, one.failed, one.parked)
                continue
            counts += Counts(taken=1, done=1)
            meter.done += 1
            if call.attempt > 1:
                emit(handled(self._queue, [call.entry], call.attempt))
            else:
                first.append(call.entry)
        if first and (listeners.hooks or middlewares_here.get()):
            emit(handled(self._queue, first, 1))
        return counts
