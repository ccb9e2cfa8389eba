"""Consume outside of transactions: many handlers at a time, none of them inside a transaction or under a lock.

For effects that no rollback undoes: a call to a payment provider, a mail. A worker leases queues by commits
(`LeasedQueue`), begins handlers in threads or as tasks (`Calls`), and writes what came of them in short transactions.
Nothing is held open in the database while a handler runs.

One thread does all that touches the database: it writes the results that there are, renews leases, begins what may
begin, and waits. A worker keeps as few leases as it can use, so that others have the remaining queues: it reads a queue
on only when there is no other one to go to, and gives up the lease of one in which it has nothing to do.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outbox.consumer import key_order
from outbox.consumer import sql as consumer_sql
from outbox.consumer.consumer import Consumer, QueueConsumer
from outbox.consumer.outside import sql
from outbox.consumer.outside.calls import Call, CallContext, Calls
from outbox.consumer.outside.leased_queue import LeasedQueue, LeaseLapsed, read_on, write_results
from outbox.consumer.progress import ConsumerProgress
from outbox.consumer.subscription import Subscription
from outbox.database.execute import Row, is_lost, read_source
from outbox.errors import MessagesPruned
from outbox.message.model import Counts
from outbox.settings import Settings
from outbox.telemetry.events import BatchUndone, HandlerHangs, LeaseLost
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    import datetime as dt

    from sqlalchemy import Connection

#: How often (seconds) a waiting pass asks whether it is to stop.
_POLL = 0.05
#: How often (seconds) a pass that goes on and on tells that it works.
_PROGRESS = 1.0
#: How many failed messages are begun at a time.
_RETRIES = 100
#: After how long (seconds) a pass asks again for a queue that another worker had.
_REFUSED = 0.2
#: For how long (seconds) it is good enough since when messages wait in queues that this worker can't lease now.
_AGE = 1.0


def consumer_of(subscription: Subscription, settings: Settings, context: CallContext | None = None) -> Consumer:
    """Return the consuming side of a subscription, for one thread that runs its passes by hand, and ends it."""
    if subscription.transactional:
        return Consumer(subscription, settings)
    return OutsideConsumer(subscription, settings, context=context)


class OutsideConsumer(Consumer):
    """The consuming side of one `Subscription` without transactions; one for each worker, used by one thread.

    A pass ends when nothing runs and nothing can be begun; when ``stopping`` says so, it begins nothing, and waits for
    what runs. ``consumes``: it begins messages that are new, ``retries``: those that are due again.
    """

    def __init__(
        self,
        subscription: Subscription,
        settings: Settings,
        stopping: Callable[[], bool] = lambda: False,
        *,
        context: CallContext | None = None,
        consumes: bool = True,
        retries: bool = False,
    ) -> None:
        super().__init__(subscription, settings, stopping)
        self._consumes = consumes
        self._retries = retries
        self._calls = Calls(subscription, self.meter, context)
        self._leased: dict[int, LeasedQueue] = {}
        # Until when not to ask for the lease of a queue that another worker has.
        self._refused: dict[int, float] = {}
        # Set when there may be new messages. Else, when to look for them, and for retries that are due, by the clock
        # that only goes forward.
        self._news = threading.Event()
        self._next_read = 0.0
        self._next_retries = 0.0 if retries else math.inf
        # Since when messages wait in queues that this worker can't lease now, and when to look again.
        self._unleased: list[dt.datetime] = []
        self._next_ages = 0.0
        self._all_hang = False
        self._is_cut = False
        # Why the results of a queue can't be written in this pass, in which the others go on.
        self._stuck: Exception | None = None
        # The call that is tried while the group's breaker is open: nothing else is begun as long as it runs.
        self._trial: Call | None = None
        #: Called now and then while a pass runs, when it has written to the database.
        self.on_progress: Callable[[], None] = lambda: None
        self._has_progressed = False
        self._next_progress = 0.0

    def find_source(self, connection: Connection, source: Connection) -> None:
        """Do the same; what runs of another source is handled again when that comes back: its leases end."""
        before = self.subscription.feed
        super().find_source(connection, source)
        if self.subscription.feed != before:
            self._calls.give_up([call for queue in self._leased.values() for call in queue.in_flight])
            self._leased.clear()

    def wake(self, queue: int | None = None) -> None:  # noqa: ARG002 - it looks at all of them
        """Have a pass that waits look for new messages; from any thread."""
        self._news.set()
        self._calls.wake()

    def end(self) -> None:
        """Give up the calls that run, since the worker ends; from any thread.

        What came of it is never written: another worker handles it again.
        """
        self._is_cut = True
        self._calls.end()

    def consume_once(self, connection: Connection, source: Connection) -> Counts:
        """Handle the messages that are there, until nothing runs and nothing can be begun.

        Raises:
            MessagesPruned: a queue is stuck by that, and there is nothing left to do in the others.
        """
        return self._work(connection, source, _RETRIES)

    def retry_once(self, connection: Connection, source: Connection, *, limit: int = 100) -> Counts:
        """Begin the retries that are due, at most ``limit`` messages at a time, and go on like `consume_once`."""
        self._next_retries = 0.0
        return self._work(connection, source, limit)

    # --- a pass ---------------------------------------------------------------------------------------------

    def _work(self, connection: Connection, source: Connection, retries: int) -> Counts:
        counts = Counts()
        failure: Exception | None = None
        pruned: MessagesPruned | None = None
        self._news.set()
        self._refused.clear()
        try:
            self._resume(connection)
            while not self._is_cut:
                counts += self._write(connection)
                self._tell_progress()
                if failure is None and not self._stopping():
                    try:
                        self._begin(connection, source, retries)
                    except MessagesPruned as error:
                        pruned = error
                    except Exception as error:
                        if is_lost(connection):
                            raise
                        failure = error  # calls that run have nothing to do with it
                if not any(queue.in_flight for queue in self._leased.values()):
                    if not any(queue.has_news for queue in self._leased.values()):
                        break
                    self._news.set()
                    continue
                self._collect(_POLL)
            else:
                self._calls.give_up([call for queue in self._leased.values() for call in queue.in_flight])
                return counts
            self._leave(connection, [queue for queue in self._leased.values() if not queue.is_stuck])
        except Exception:
            # The next pass goes on with these calls. If it comes too late, another worker may have the queues by then.
            for queue in self._leased.values():
                self._calls.expire(queue.in_flight, max(queue.lease.ends - time.monotonic(), 0.0))
            raise
        failure = failure or self._stuck
        if failure is None and not counts:
            failure = pruned
        if failure is not None:
            raise failure
        return counts

    def _collect(self, timeout: float) -> None:
        """Wait for calls to end, at most so many seconds, and hand them to their queues."""
        undone: dict[int, list[Call]] = {}
        for call in self._calls.wait(timeout):
            if (queue := self._leased.get(call.queue)) is not None:
                queue.ended(call)
                if call.undone:
                    undone.setdefault(call.queue, []).append(call)
        group, topic = self.subscription.group, self.subscription.feed
        for number, calls in undone.items():
            reason = calls[0].failure.reason if calls[0].failure else ""
            size, error = len(calls), calls[0].error
            emit(BatchUndone(group=group, topic=topic, queue=number, size=size, reason=reason, error=error))
        self._tell_hanging()

    def _resume(self, connection: Connection) -> None:
        """Go on with the calls of a pass that failed, in those queues that no other worker has taken over."""
        self._stuck = None
        for queue in list(self._leased.values()):
            queue.is_stuck = False
            with self._unless_lost(queue):
                queue.renew(connection)
                self._has_progressed = True
                self._calls.expire(queue.in_flight, None)
        self._collect(0.0)

    def _tell_progress(self) -> None:
        """Tell that the pass works: under a steady load it has no end that would."""
        if self._has_progressed and time.monotonic() >= self._next_progress:
            self._has_progressed, self._next_progress = False, time.monotonic() + _PROGRESS
            self.on_progress()

    def _tell_hanging(self) -> None:
        hang = self._calls.hanging >= self.subscription.concurrency
        if hang and not self._all_hang:
            group, topic = self.subscription.group, self.subscription.topic
            emit(HandlerHangs(group=group, topic=topic, count=self._calls.hanging))
        self._all_hang = hang

    # --- leases ---------------------------------------------------------------------------------------------

    def _write(self, connection: Connection) -> Counts:
        """Write what came of calls, and renew leases that need it."""
        counts, results = Counts(), {}
        for queue in [each for each in self._leased.values() if not each.is_stuck]:
            with self._unless_lost(queue):
                if (its := queue.results(connection)) is not None:
                    results[queue] = its
        if results:
            counts, lapsed, stuck = write_results(connection, results)
            self._stuck = stuck or self._stuck
            for queue in lapsed:
                self._lose(queue)
        for queue in list(self._leased.values()):
            if queue in results and queue.may_read():  # there was no space for it before
                self._news.set()
            if queue.released:  # nothing else wakes it, and its key may have many that wait for it
                self._next_retries, queue.released = 0.0, False
            if queue.lease.renew_at <= time.monotonic():
                with self._unless_lost(queue):
                    queue.renew(connection)
                    self._has_progressed = True
        self._has_progressed |= bool(counts)
        return counts

    def _leave(self, connection: Connection, queues: list[LeasedQueue]) -> None:
        """Give up the leases of queues in which nothing is to be done."""
        for queue in queues:
            with self._unless_lost(queue):
                queue.give_up(connection)
                del self._leased[queue.number]

    @contextmanager
    def _unless_lost(self, queue: LeasedQueue) -> Iterator[None]:
        """End the block where another worker turns out to have the queue."""
        try:
            yield
        except LeaseLapsed:  # what that means for its messages is told
            self._lose(queue)

    def _lose(self, queue: LeasedQueue) -> None:
        del self._leased[queue.number]
        calls, results = queue.in_flight, len(queue.running) - len(queue.in_flight)
        self._calls.give_up(calls)
        if calls or results:
            group, topic = self.subscription.group, self.subscription.feed
            emit(LeaseLost(group=group, topic=topic, queue=queue.number, calls=len(calls), results=results))

    def _lease(
        self, connection: Connection, source: Connection, progress: ConsumerProgress, *, reads: bool = True
    ) -> bool:
        """Lease a queue; False if another worker has it, or there is nothing to begin."""
        queue = LeasedQueue(self.subscription, self._settings, progress, self.meter, self.gate)
        if taken := queue.take(connection, source, reads=reads):
            self._leased[queue.number] = queue
        return taken

    # --- beginning ------------------------------------------------------------------------------------------

    def _begin(self, connection: Connection, source: Connection, retries: int) -> None:
        if self._trial is not None and not any(self._trial.entry.id in each.running for each in self._leased.values()):
            self._trial = None
            self.gate.trial_ended()
        last = self.gate.on_trial and self._tried_retry
        if not last:
            self._begin_retries(connection, source, retries)
        self._begin_new(connection, source)
        if last:
            self._begin_retries(connection, source, retries)

    def _begin_retries(self, connection: Connection, source: Connection, most: int) -> None:
        if self._trial is None and time.monotonic() >= self._next_retries and self._calls.free > 0:
            if self.gate.shut(connection):
                return
            self._next_retries = time.monotonic() + self._settings.retry_interval if self._retries else math.inf
            self._begin_due(connection, source, min(most, self._calls.free))

    def _begin_new(self, connection: Connection, source: Connection) -> None:
        is_shut = self._trial is not None or self.gate.shut(connection)
        self._begin_read(connection)
        if not self._consumes or self._calls.free <= 0 or self._trial is not None:
            return
        if time.monotonic() < self._next_read and not self._news.is_set():
            return
        # Before the messages are read: a notification after that sets it again.
        self._news.clear()
        self._next_read = time.monotonic() + min(_REFUSED, self._settings.idle_wait)
        waiting = self.waiting_queues(connection, source)
        self.measure_lag(waiting, self._ages(source, waiting, is_shut=is_shut))
        if is_shut:
            return
        random.shuffle(waiting)
        for _ in self._read_more(connection, source, [consumer.progress for consumer in waiting]):
            self._begin_read(connection)
            if self._calls.free <= 0 or self._trial is not None or self.gate.shut(connection):
                self._news.set()
                return
        if any(self._has_more(consumer.progress) for consumer in waiting):
            self._news.set()

    def _ages(self, source: Connection, waiting: list[QueueConsumer], *, is_shut: bool) -> Iterable[dt.datetime | None]:
        """Return since when the first messages wait, in this worker's queues and in those that it can't lease now."""
        others = {
            each.progress.number: each.progress.position
            for each in waiting
            if each.progress.number not in self._leased and (is_shut or not self._has_more(each.progress))
        }
        if not others:
            self._unleased, self._next_ages = [], 0.0
        elif time.monotonic() >= self._next_ages:
            self._next_ages = time.monotonic() + _AGE
            first = {"queues": list(others), "positions": list(others.values())}
            times = consumer_sql.first_times(self._settings.schema, topic=self.subscription.topic, **first)
            self._unleased = [since for (since,) in read_source(source, times)[0]]
        return [*self._unleased, *(queue.waiting_since for queue in self._leased.values())]

    def _begin_read(self, connection: Connection) -> None:
        """Begin the messages that were read and may be begun."""
        queues = list(self._leased.values())
        if self.gate.on_trial:  # what stands first in one of them may be what fails
            random.shuffle(queues)
        for queue in queues:
            # What workers share is asked for only where there is a message.
            while self._calls.free > 0 and self._trial is None and queue.has_call:
                if (most := self.gate.admitted(connection)) == 0:
                    break
                batch = self.subscription.batch
                if calls := queue.next_calls(batch if most is None else min(most, batch)):
                    self._start(calls)

    def _start(self, calls: Sequence[Call]) -> None:
        self.gate.began(len(calls))
        if self.gate.on_trial:
            calls[0].is_trial, self._trial, self._tried_retry = True, calls[0], calls[0].retries
        self._calls.start(calls)

    def _has_more(self, progress: ConsumerProgress) -> bool:
        """Tell whether there is more to read in a queue that this worker may have."""
        if (queue := self._leased.get(progress.number)) is not None:
            return queue.may_read(progress.end)
        return self._refused.get(progress.number, 0.0) <= time.monotonic()

    def _read_more(self, connection: Connection, source: Connection, waiting: list[ConsumerProgress]) -> Iterator[None]:
        """Read from queues, one after the other, those first of which this worker has no lease."""
        more = list(filter(self._has_more, waiting))
        others = [progress for progress in more if progress.number not in self._leased]
        if others:
            self._leave(connection, [queue for queue in self._leased.values() if queue.is_idle])
        pruned: MessagesPruned | None = None
        for progress in others:
            try:
                if not self._lease(connection, source, progress):
                    self._refused[progress.number] = time.monotonic() + _REFUSED
            except MessagesPruned as error:
                pruned = error  # the other queues have nothing to do with it
            yield
        numbers = {progress.number for progress in others}
        leased = {self._leased[each.number]: each for each in more if each.number in self._leased.keys() - numbers}
        if leased:
            lapsed, error_of_one = read_on(connection, source, leased)
            pruned = pruned or error_of_one
            for queue in lapsed:
                self._lose(queue)
            yield
        if pruned is not None:
            raise pruned

    def _begin_due(self, connection: Connection, source: Connection, limit: int) -> None:
        """Begin to retry failed messages that are due."""
        subscription = self.subscription
        key_order.release(connection, source, subscription, self._settings.schema)
        running = [message_id for queue in self._leased.values() for message_id in queue.running]
        due = {"ordered": subscription.blocks_queue, "running": running, "limit": limit}
        due_of = sql.due(self._settings.schema, group=subscription.group, topic=subscription.feed, **due)
        (rows,) = read_source(connection, due_of)
        if rows and (most := self.gate.admitted(connection)) is not None:
            rows = rows[:most]
        by_queue: dict[int, list[Row]] = {}
        for row in rows:
            by_queue.setdefault(row[0], []).append(row)
        for number, its_rows in by_queue.items():
            if number not in self._leased:
                of = subscription.queue(self._settings.schema, number)
                if not self._lease(connection, source, ConsumerProgress(of), reads=False):
                    continue
            queue = self._leased[number]
            with self._unless_lost(queue):
                for call in queue.start_due(connection, source, its_rows):
                    self._start([call])
