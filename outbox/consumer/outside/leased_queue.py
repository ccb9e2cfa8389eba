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

import math
import time
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.consumer import key_order, sql
from outbox.consumer.control.gate import Gate
from outbox.consumer.failure import database_time, expired_of, expires_at, record_failure
from outbox.consumer.log_loss import go_back
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.outside import sql as lease_sql
from outbox.consumer.outside.calls import Call
from outbox.consumer.outside.sql import LEASE_SECONDS
from outbox.consumer.passage import begun, take_earlier
from outbox.consumer.progress import Choice, ConsumerProgress, KnownRows
from outbox.consumer.retry import PRUNED, find
from outbox.consumer.subscription import (
    Entry,
    Subscription,
    count_attempt,
    counts_of,
    crashed,
    event_of,
    handled,
    known_rows,
    settle,
    settled,
)
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import Row, Statement, execute, is_lost, read_log
from outbox.database.session import begin
from outbox.database.sql import plan_by_index, take_lock, try_lock
from outbox.errors import MessagesPruned
from outbox.message.answer import HandlerFailure
from outbox.message.model import Counts, Status
from outbox.settings import Settings
from outbox.telemetry.hooks import emit, listeners, middlewares_here
from outbox.text import process_name

if TYPE_CHECKING:
    import datetime as dt

    from sqlalchemy import Connection

    from outbox.consumer.sql import InboxUpdate

#: A lease is renewed when so much of its time (seconds) is left.
_RENEW_LEFT = LEASE_SECONDS * 2 / 3


class LeaseLapsed(Exception):
    """Another worker has a newer term: what this one knows of the queue counts no more."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease by its ``term``; it ends at the latest at ``ends``, by the clock of this process that only goes forward.

    Up to ``suspect_until`` one of the messages may be what killed a worker, up to ``doubt_until`` an earlier worker may
    have begun messages of which the inbox knows nothing.
    """

    term: int = 0
    ends: float = 0.0
    suspect_until: int = 0
    doubt_until: int = 0

    @property
    def renew_at(self) -> float:
        """When it is to be renewed, by the same clock."""
        return self.ends - _RENEW_LEFT


@dataclass(slots=True, eq=False)
class _Slot:
    """A message after the offset; ``settled``: it needs nothing more. ``skipped``: its handler isn't called.

    ``waits``: that it waits for an earlier message of its key is yet to be written. ``again``: an earlier passage had
    it. ``alone``: it failed together with others. ``expires`` is a time of the clock that only goes forward.
    """

    entry: Entry
    attempt: int = 1
    expires: float = math.inf
    settled: bool = False
    skipped: bool = False
    waits: bool = False
    again: bool = False
    alone: bool = False

    def skip(self, *, waits: bool = False) -> None:
        """Go past it without a call."""
        self.settled, self.skipped, self.waits = True, True, waits


class _Results(NamedTuple):
    """What is to be written of a queue: of its calls, and of messages ``passed`` or ``waiting``; the offset ``after``.

    ``blocked``: an ordered group is to wait for a retry.
    """

    updates: Sequence[tuple[Call, InboxUpdate]]
    passed: Sequence[_Slot]
    waiting: Sequence[_Slot]
    after: ConsumerProgress
    blocked: bool


class LeasedQueue:
    """One queue of one group, as the worker sees it that has the lease, or is about to take it. Not thread-safe.

    What writes raises `LeaseLapsed` if another worker has the queue now, and what reads `MessagesPruned` if the next
    message is gone, and the subscription says to stop then.
    """

    def __init__(
        self,
        subscription: Subscription,
        settings: Settings,
        progress: ConsumerProgress,
        meter: HandlerMeter,
        gate: Gate,
    ) -> None:
        self._subscription = subscription
        self._settings = settings
        self._meter = meter
        self._gate = gate
        self._of = progress.of
        self._names = {"group": progress.of.group, "topic": progress.of.topic, "queue": progress.of.queue}
        # How far the group has come, and how far the queue was read.
        self._progress = self._read = progress
        #: The lease, as far as this worker knows.
        self.lease: Lease = Lease()
        # What was read and isn't passed yet, by position; of that, what is yet to be called.
        self._slots: dict[int, _Slot] = {}
        self._ahead: list[_Slot] = []
        self._in_flight: dict[UUID, Call] = {}
        self._results: list[Call] = []
        # Of messages for which something wasn't available: the retries, what was said, and whether one was a trial.
        self._unavailable_retries: list[UUID] = []
        self._unavailable: HandlerFailure | None = None
        self._unavailable_trial = False
        #: Did the last write make a message due that had waited for another one of its key?
        self.released: bool = False
        #: Can't its results be written, in this pass? Then nothing more is begun there.
        self.is_stuck: bool = False

    @property
    def number(self) -> int:
        """The number of the queue."""
        return self._progress.number

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
        its = self._results or self._unavailable is not None or any(True for _ in self._prefix())
        return bool(its) and not self.is_stuck

    @property
    def is_idle(self) -> bool:
        """Is there nothing that runs, waits to be called, or is to be written?"""
        return not (self._in_flight or self._ahead or self._results or self._slots)

    @property
    def waiting_since(self) -> dt.datetime | None:
        """When the first message that was read and isn't done with came into the queue; None: there is none."""
        entries = [*(call.entry for call in self._in_flight.values()), *(slot.entry for slot in self._ahead)]
        return min((entry.message.visible_at for entry in entries if entry.message), default=None)

    def may_read(self, end: int | None = None) -> bool:
        """Tell whether there is more to read, in a queue that ends at a position, and space for it; None: as known."""
        end = self._read.end if end is None else end
        # Not for a few: a read costs what it costs.
        return 2 * len(self._slots) <= self._settings.read_ahead and self._read.position < end and not self.is_stuck

    # --- the lease ------------------------------------------------------------------------------------------

    def take(self, connection: Connection, source: Connection, *, reads: bool = True) -> bool:
        """Lease the queue; with ``reads`` only if there is something to read. False if another worker has it."""
        began = time.monotonic()
        with begin(connection):
            locked, rows = execute(connection, try_lock(self._of.lock), self._newest())
            term, _, is_taken, is_held, started = rows[0][4:]
            if not locked[0][0] or (is_taken and is_held):
                return False
            progress = self._progress = self._read = begun(connection, self._progress.at(rows[0]))
            entries = self._entries_after(connection, source) if reads else []
            if entries is None:
                go_back(connection, source, progress)
            if reads and not (entries and self._may_begin(connection, entries[0])):
                return False
            doubt_until = started if started is not None and started > progress.position else 0
            if is_taken and doubt_until:
                progress = self._progress = progress._replace(starts=progress.starts + 1)
                after_commit(connection, partial(emit, progress.crash()))
            # There is an offset where there is a lease: transactional workers see the lease by it.
            if is_taken or progress.position == 0:
                execute(connection, progress.append())
            # A message whose call an operator stopped by moving the group has killed no worker.
            suspect_until = doubt_until if progress.starts else 0
            self.lease = Lease((term or 0) + 1, began + LEASE_SECONDS, suspect_until, doubt_until)
            execute(connection, self._renewed(0, entries[-1].position if entries else progress.position))
        accept(connection, source, {self: entries or []})
        if progress.starts > self._settings.max_starts and self._ahead:
            self._crash(self._call(self._ahead.pop(0)), progress.starts)
        return True

    def renew(self, connection: Connection) -> None:
        """Move the end of the lease."""
        began = time.monotonic()
        with begin(connection):
            execute(connection, self._renewed(self._lock(connection) + 1, self._read.position))
        self.lease = replace(self.lease, ends=began + LEASE_SECONDS)

    def give_up(self, connection: Connection) -> None:
        """Leave the queue, in which nothing runs, to others."""
        with begin(connection):
            self._lock(connection)
            execute(connection, self._renewed(0, 0, ends=True))

    def _newest(self) -> Statement:
        return lease_sql.progress(self._of.schema, **self._names)

    def _renewed(self, renewal: int, started: int, *, ends: bool = False) -> Statement:
        """Append the lease, by which messages up to a position may have been begun; or its end."""
        if self._progress.position < self.lease.doubt_until:
            started = max(started, self.lease.doubt_until)
        values = {"term": self.lease.term + ends, "renewal": renewal, "started": started}
        until = {"worker": None, "seconds": 0.0} if ends else {"worker": process_name(), "seconds": LEASE_SECONDS}
        return lease_sql.append_lease(self._of.schema, **self._names, **values, **until)

    def _lock(self, connection: Connection) -> int:
        """Lock the queue, and make sure that the newest lease is ours; return the number of its renewal.

        Raises:
            LeaseLapsed: it isn't.
        """
        _, rows = execute(connection, take_lock(self._of.lock), self._newest())
        return self._renewal_of(rows)

    def _renewal_of(self, rows: Sequence[Row]) -> int:
        term, renewal = rows[0][4:6]
        if term != self.lease.term:
            raise LeaseLapsed(f"term {self.lease.term} is over: the newest one is {term}")
        return int(renewal)

    # --- reading --------------------------------------------------------------------------------------------

    def _entries_after(self, connection: Connection, source: Connection) -> list[Entry] | None:
        """Read what follows what was read; None if the log went back behind it."""
        _, rows = read_log(connection, source, plan_by_index(), self._next_messages())
        return self._read.read(rows, self._subscription)

    def _next_messages(self) -> Statement:
        # Messages that are read may have been begun, as far as others know: so not much more than runs at once.
        limit = min(self._settings.read_ahead, 2 * self._subscription.concurrency * self._subscription.batch)
        return self._read.next_messages(self._subscription, self._settings, limit)

    def _may_begin(self, connection: Connection, first: Entry) -> bool:
        """Tell whether the first message can be handled now, or passed: an ordered group waits for its retry."""
        if not self._subscription.blocks_queue:
            return True
        _, rows = execute(connection, plan_by_index(), known_rows(self._of, [first]))
        return all(row[1] != Status.FAILED or row[3] <= 0 or row[7] < self._progress.passage for row in rows)

    def _accept(
        self, connection: Connection, source: Connection, entries: Sequence[Entry], rows: list[list[Row]]
    ) -> None:
        """Take the entries read, by rows of the inbox; up to one that has to be read once more, later."""
        inbox = take_earlier(connection, source, self._progress, KnownRows.of(rows))
        if inbox is None:  # an operator's act has one of them
            return
        can_expire = any(entry.can_expire for entry in entries)
        # How far the clock of this process, which only goes forward, is before the database's.
        ahead = database_time(connection).timestamp() - time.monotonic() if can_expire else 0.0
        there = {slot.entry.id for slot in self._slots.values()}
        held = {*inbox.held, *(slot.entry.key for slot in self._slots.values() if slot.waits)}
        for entry in entries:
            slot = None if entry.id in there else self._accept_one(connection, entry, inbox._replace(held=held))
            if slot is None:
                break
            if (at := expires_at(entry)) is not None:
                slot.expires = at.timestamp() - ahead
            self._slots[entry.position] = slot
            there.add(entry.id)
            self._read = self._read.past(entry)

    def _accept_one(self, connection: Connection, entry: Entry, inbox: KnownRows) -> _Slot | None:
        """Return what becomes of a message; None if it has to be read once more."""
        row, ordered = inbox.known.get(entry.id, sql.NO_ROW), self._subscription.blocks_queue
        choice = self._progress.choice(entry, row, inbox.held, ordered=ordered)
        if choice is Choice.STOP:
            return None
        if choice is Choice.RESENT and (not execute(connection, self._progress.resend(entry))[0] or ordered):
            return None
        slot = _Slot(entry, row[2] + 1, again=entry.id in inbox.again)
        if choice is Choice.RUN and entry.message is not None:
            entry.message.first_failed_at, entry.message.passage = row[8], self._progress.passage
            self._ahead.append(slot)
        else:
            slot.skip(waits=choice is Choice.WAIT)
        return slot

    # --- calls ----------------------------------------------------------------------------------------------

    def next_calls(self, most: int) -> list[Call]:
        """Return up to so many messages to be handled next together; their calls are in flight from then on.

        Messages of one key wait for each other, unless the group is declared with ``ordered=False``; a group that is
        ordered, and one that looks for what has killed a worker, handles one message of the queue at a time. What has
        expired is passed over, which is its result. A trial is made with a message that wasn't tried in vain already.
        """
        if self._gate.on_trial:
            slots = sorted(self._possible(), key=lambda slot: self._gate.unavailable_for(slot.entry.id))[:1]
        else:
            slots = []
            for slot in islice(self._possible(), most):
                if slot.alone and slots:
                    break
                slots.append(slot)
                if slot.alone:
                    break
        calls: list[Call] = []
        for slot in slots:
            call = self._call(slot)
            if slot.expires > time.monotonic():
                self._in_flight[call.entry.id] = call
                calls.append(call)
            else:
                self._expire(call)
        if taken := {slot.entry.position for slot in slots}:
            self._ahead = [slot for slot in self._ahead if slot.entry.position not in taken]
        return calls

    @property
    def has_call(self) -> bool:
        """May a message be handled now?"""
        return next(self._possible(), None) is not None

    def _possible(self) -> Iterator[_Slot]:
        """Yield the messages that may be handled now, together: the first of each key of which none runs."""
        if self.is_stuck:
            return
        if self._subscription.blocks_queue or self._progress.position < self.lease.suspect_until:
            yield from () if self._in_flight or self._results else self._ahead[:1]
            return
        overlap = self._subscription.keys_overlap
        busy = set() if overlap else {call.message.key for call in self._in_flight.values()}
        for slot in self._ahead:
            if (key := slot.entry.key) is None or overlap:
                yield slot
            elif key not in busy:
                busy.add(key)
                yield slot

    def _is_busy(self, entry: Entry) -> bool:
        if entry.key is None or self._subscription.keys_overlap:
            return False
        return any(call.message.key == entry.key for call in self._in_flight.values())

    def _call(self, slot: _Slot) -> Call:
        return Call(self.number, slot.entry, slot.attempt)

    def _expire(self, call: Call) -> None:
        call.attempt, call.too_old, call.failure = call.attempt - 1, True, None
        self._results.append(call)

    def _crash(self, call: Call, starts: int) -> None:
        call.attempt, call.failure = crashed(self._subscription, call.attempt - 1, starts)
        self._results.append(call)

    def start_due(self, connection: Connection, source: Connection, rows: Sequence[Row]) -> list[Call]:
        """Count a start of failed messages, by rows of `lease_sql.due`; return their calls, in flight from then on."""
        schema, group = self._of.schema, self._of.group
        calls, left_out = self._candidates(source, rows)
        with begin(connection):
            self._lock(connection)
            for message_id in left_out:
                execute(connection, sql.forget(schema, group, message_id))
            entries = [call.entry for call in calls if call.entry.can_expire]
            expired = expired_of(connection, entries) if entries else {}
            for call in [call for call in calls if call.entry.id in expired]:
                self._expire(call)
                calls.remove(call)
            ids, lease = [call.entry.id for call in calls], self._subscription.timeout_seconds + LEASE_SECONDS
            start = lease_sql.start_due(schema, group=group, ids=ids, seconds=lease)
            started: dict[UUID, int] = dict(execute(connection, start)[0])
        started_calls = []
        for call in calls:
            starts = started.get(call.entry.id, 0)
            if starts > self._settings.max_starts:
                self._crash(call, starts)
            elif starts:
                self._in_flight[call.entry.id] = call
                started_calls.append(call)
        return started_calls

    def _candidates(self, source: Connection, rows: Sequence[Row]) -> tuple[list[Call], list[UUID]]:
        """Return calls of what may be retried now, and the ids of what the filter leaves out."""
        calls: list[Call] = []
        left_out: list[UUID] = []
        keys: set[str] = set()
        for _, message_id, position, attempts, _, never_attempted, first_failed_at in rows:
            entry = find(source, self._subscription, self._of, message_id, is_filtered=never_attempted)
            if entry is None:
                lost = Entry(position, message_id, None)
                self._results.append(Call(self.number, lost, attempts + 1, retries=True, failure=PRUNED))
            elif entry.message is None:
                left_out.append(message_id)
            elif not self._is_busy(entry) and entry.key not in keys:
                if entry.key is not None and not self._subscription.keys_overlap:
                    keys.add(entry.key)
                entry.message.first_failed_at, entry.message.passage = first_failed_at, self._progress.passage
                calls.append(Call(self.number, entry, attempts + 1, retries=True))
        return calls, left_out

    def ended(self, call: Call) -> None:
        """Take note that a call has ended; what came of it is written by `write_results`.

        One that has expired is begun again, as the same attempt; a retry, when it is due again. So is one that was
        undone with others, from then on alone, and one for which something isn't available.
        """
        if self._in_flight.pop(call.entry.id, None) is None:
            return
        failure, counts = call.failure, not (call.has_expired or call.undone)
        if counts and failure is not None and failure.unavailable and not self._gate.is_alone(call.entry.id):
            earlier, counts = self._unavailable, False
            if earlier is not None:
                delay = max(failure.delay or 0.0, earlier.delay or 0.0)
                failure = replace(earlier, delay=delay, pauses=failure.pauses or earlier.pauses)
            self._unavailable, self._unavailable_trial = failure, self._unavailable_trial or call.is_trial
            if call.retries:
                self._unavailable_retries.append(call.entry.id)
        if counts:
            self._results.append(call)
        elif not call.retries:
            slot = self._slots[call.entry.position]
            slot.alone |= call.undone
            insort(self._ahead, slot, key=lambda slot: slot.entry.position)

    # --- what came of them ----------------------------------------------------------------------------------

    def results(self, connection: Connection) -> _Results | None:
        """Return what is to be written of the calls that have ended; the breaker is opened by them at once."""
        self._open_breaker(connection)
        updates = [(call, self._update_of(call)) for call in self._results]
        self._hold_back({update.key for _, update in updates if update.holds})
        blocked = self._mark(updates)
        passed = list(self._prefix())
        if not updates and not passed:
            return None
        waiting = [slot for slot in self._slots.values() if slot.waits] if self._subscription.by_key else []
        after = self._progress
        if passed:
            last = passed[-1].entry
            after = after.past(last)._replace(starts=int(last.position < self.lease.suspect_until))
        return _Results(updates, passed, waiting, after, blocked)

    def _write_results(self, connection: Connection, results: _Results) -> None:
        """Have results written by the COMMIT of the transaction that has locked the queue."""
        updates, passed, waiting, after, blocked = results
        self._write(connection, updates)
        if any(call.is_trial and (call.failure is None or call.failure.is_answered) for call, _ in updates):
            self._gate.close(connection)
        if waiting:
            # After what they wait for.
            again = {slot.entry.id for slot in waiting if slot.again}
            entries = [slot.entry for slot in waiting]
            at_commit(connection, sql.MARK, *key_order.wait(self._of, entries, after.passage, again))
        if passed:
            at_commit(connection, after.append())
        elif blocked and after.starts:
            # This start had an end.
            at_commit(connection, after.drop_starts())

    def _written(self, connection: Connection, results: _Results) -> Counts:
        """Forget results that are written, and tell of them."""
        updates, passed, waiting, after, blocked = results
        self.released = self._subscription.by_key and any(call.retries and not row.holds for call, row in updates)
        self._progress = after
        for slot in passed:
            del self._slots[slot.entry.position]
        for slot in waiting:
            slot.waits = False
        self._results.clear()
        if blocked:
            # Wait for the retry of the first message: entries read after it are read again then.
            self._ahead.clear()
            self._slots.clear()
            self._progress = self._read = after._replace(starts=0)
        if any(update.status == Status.CONSUMED for _, update in updates):
            self._gate.succeeded()
        elif failures := [call.failure for call, _ in updates if call.failure]:
            # The breaker opens if there were failures alone, and one too many.
            self._gate.failed(connection, failures[-1].reason)
        return self._tell(updates) + Counts(taken=sum(slot.skipped for slot in passed))

    def _open_breaker(self, connection: Connection) -> None:
        """Stop the group where something wasn't available to its messages, whose retries are due as before."""
        if (failure := self._unavailable) is None:
            return
        if self._unavailable_retries:
            again = sql.due_again(self._of.schema, group=self._of.group, ids=self._unavailable_retries)
            with begin(connection):
                self._lock(connection)
                execute(connection, again)
        self._gate.unavailable(connection, failure, is_trial=self._unavailable_trial)
        self._unavailable_retries, self._unavailable, self._unavailable_trial = [], None, False

    def _hold_back(self, keys: Collection[str | None]) -> None:
        """Have the entries read of these keys wait: messages of them have failed."""
        for slot in self._ahead:
            if slot.entry.key is not None and slot.entry.key in keys:
                slot.skip(waits=True)
        self._ahead = [slot for slot in self._ahead if not slot.skipped]

    def _update_of(self, call: Call) -> InboxUpdate:
        if call.failure is None:
            return settled(call.entry, Status.EXPIRED if call.too_old else Status.CONSUMED, call.attempt)
        return settle(self._subscription, call.entry, call.attempt, call.failure, self._settings.retry_jitter)

    def _mark(self, updates: Sequence[tuple[Call, InboxUpdate]]) -> bool:
        """Mark messages that need nothing more in the queue; True if an ordered group is to wait for a retry."""
        blocked = False
        for call, update in updates:
            if not call.retries and (slot := self._slots.get(call.entry.position)) is not None:
                slot.settled = not (self._subscription.blocks_queue and update.status == Status.FAILED)
                blocked |= not slot.settled
        return blocked

    def _prefix(self) -> Iterator[_Slot]:
        """Return the messages after the offset that need nothing more, up to the first that does."""
        return takewhile(lambda slot: slot.settled, self._slots.values())

    def _write(self, connection: Connection, updates: Sequence[tuple[Call, InboxUpdate]]) -> None:
        passage = self._progress.passage
        done = [update for call, update in updates if call.failure is None and not call.too_old]
        if done and passage:
            of_passage = {"group": self._of.group, "passage": passage}
            at_commit(connection, sql.keep_earlier(self._of.schema, ids=[each.id for each in done], **of_passage))
        if done:
            columns = {
                "ids": [update.id for update in done],
                "positions": [update.position for update in done],
                "attempts": [update.attempts for update in done],
                "digests": [update.digest for update in done],
            }
            at_commit(connection, lease_sql.consumed(self._of.schema, **self._names, passage=passage, **columns))
        for call, update in updates:
            if call.too_old:
                at_commit(connection, *sql.settle(self._of, update, passage))
            elif call.failure is not None:
                at_commit(connection, *record_failure(self._subscription, self._of, call.entry, update, passage))
            if call.retries and not update.holds:
                at_commit(connection, *key_order.release_next(self._subscription, self._of, call.entry))

    def _tell(self, updates: Sequence[tuple[Call, InboxUpdate]]) -> Counts:
        counts, first = Counts(), []
        for call, update in updates:
            if not call.too_old:
                count_attempt(self._meter, update)
            if call.too_old or call.failure is not None:
                emit(event_of(self._of, update, call.error))
            elif call.attempt > 1:
                emit(handled(self._of, [call.entry], call.attempt))
            else:
                first.append(call.entry)
            counts += counts_of(update)
        if first and (listeners.hooks or middlewares_here.get()):
            emit(handled(self._of, first, 1))
        return replace(counts, more=False)


# --- several queues of a worker, in one transaction ------------------------------------------------------------------


def _renewals(
    connection: Connection, queues: Iterable[LeasedQueue], lapsed: list[LeasedQueue]
) -> dict[LeasedQueue, int]:
    """Lock queues; return the renewals of those leases that are the newest. The others are added to ``lapsed``."""
    # In the order in which all transactions lock several.
    ordered, renewals = sorted(queues, key=lambda queue: queue._of.lock), dict[LeasedQueue, int]()
    locking = [statement for queue in ordered for statement in (take_lock(queue._of.lock), queue._newest())]
    for queue, rows in zip(ordered, execute(connection, *locking)[1::2], strict=True):
        try:
            renewals[queue] = queue._renewal_of(rows)
        except LeaseLapsed:  # what that means for its messages is told
            lapsed.append(queue)
    return renewals


def read_on(
    connection: Connection, source: Connection, queues: Mapping[LeasedQueue, ConsumerProgress]
) -> tuple[list[LeasedQueue], MessagesPruned | None]:
    """Read what follows in queues, as far as the group may read by the newest look at them.

    Return the queues that another worker has by now, and the error of one in which messages were pruned.
    """
    began, lapsed, pruned = time.monotonic(), list[LeasedQueue](), None
    for queue, newest in queues.items():
        at = queue._read
        queue._read = newest.at((at.position, at.starts, at.message_id, at.passage))
    found: dict[LeasedQueue, list[Entry]] = {}
    with begin(connection):
        renewals = _renewals(connection, queues, lapsed)
        _, *ahead = read_log(connection, source, plan_by_index(), *(queue._next_messages() for queue in renewals))
        for queue, rows in zip(renewals, ahead, strict=True):
            try:
                if entries := queue._read.read(rows, queue._subscription):
                    found[queue] = entries
            except MessagesPruned as error:  # the other queues have nothing to do with it
                pruned = error
        if found:
            execute(connection, *(queue._renewed(renewals[queue] + 1, it[-1].position) for queue, it in found.items()))
    for queue in found:
        queue.lease = replace(queue.lease, ends=began + LEASE_SECONDS)
    accept(connection, source, found)
    return lapsed, pruned


def accept(connection: Connection, source: Connection, found: Mapping[LeasedQueue, Sequence[Entry]]) -> None:
    """Take entries that were read, by what the inbox says of them; of each queue up to one to be read once more."""
    statements = {queue: queue._read.inbox_of(it, queue._subscription) for queue, it in found.items() if it}
    if statements:
        with begin(connection):
            _, *rows = execute(connection, plan_by_index(once=True), *chain.from_iterable(statements.values()))
            left = iter(rows)
            for queue, its in statements.items():
                queue._accept(connection, source, found[queue], list(islice(left, len(its))))


def write_results(
    connection: Connection, results: Mapping[LeasedQueue, _Results]
) -> tuple[Counts, list[LeasedQueue], DBAPIError | None]:
    """Write what came of the calls of queues, and move the offsets: in one transaction.

    Return the counts, the queues that another worker has by now, and the error of one that is stuck. What fails
    together is written queue by queue, so that one doesn't stop the others. Of one that fails by itself nothing is
    forgotten: to write it once more, in the next pass, does no harm.

    Raises:
        DBAPIError: the connection was lost.
    """
    counts, lapsed = Counts(), list[LeasedQueue]()
    try:
        with begin(connection):
            renewals = _renewals(connection, results, lapsed)
            for queue in renewals:
                queue._write_results(connection, results[queue])
    except DBAPIError as error:
        if is_lost(connection):
            raise
        if len(results) == 1:
            next(iter(results)).is_stuck = True
            return counts, lapsed, error
        stuck = None
        for queue, its in results.items():
            written, lost, failure = write_results(connection, {queue: its})
            counts, lapsed, stuck = counts + written, lapsed + lost, failure or stuck
        return counts, lapsed, stuck
    return sum((queue._written(connection, results[queue]) for queue in renewals), counts), lapsed, None
