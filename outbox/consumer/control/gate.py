"""Whether a consuming thread may handle messages now, and how many: a group can be paused, slowed down, or broken.

What holds a group back are rows of its database, which each thread looks at every `READ_EVERY` seconds, between two
transactions: a handler that runs goes on to its end. A message on its way writes none of them.

**Rate.** Threads share a group's rate by grants, which are appended one behind the other in time: a thread that has one
may handle so many messages at once, the next grant begins when they would have taken their time. A grant is for as
many messages as the thread needed before, for a quarter of a second at most, and lapses with the time that it is for.
A thread that dies takes its grant with it.

**Breaker.** The thread that counts the failure that is one too many opens it, and all see it at their next look. When
a trial is due, one thread takes it by a commit, so that a thread which dies over it is followed by another one after
``trial_after``. The transaction that handles the trial's message also holds a lock, so that no second trial runs beside
one which takes longer than that; and it closes the breaker, so that the success and what follows from it are one. A
handler outside of transactions has no such lock: the next trial is due after its time limit at the earliest.

A handler that answers `Unavailable` opens it at once, also where none is declared. Which message is tried must not be
left to chance then: one that fails by itself, and is always the first in its queue, would keep the group for ever. So a
thread counts for each message how often it was answered so while others were handled: `Gate.is_alone`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from outbox.consumer.control import sql
from outbox.consumer.control.sql import FIRST_TRIAL_AFTER
from outbox.database.at_commit import after_commit, at_commit
from outbox.database.execute import execute, lock_key, read_source
from outbox.database.session import begin
from outbox.database.sql import COMMIT_SYNCHRONOUSLY, audit, take_lock, try_lock
from outbox.telemetry.events import BreakerClosed, BreakerOpened, BreakerTried
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

    from outbox.consumer.subscription import Subscription
    from outbox.database.execute import Row
    from outbox.message.answer import HandlerFailure
    from outbox.message.model import Counts
    from outbox.settings import Settings

#: How often (seconds) a thread looks at what holds its group back.
READ_EVERY = 0.5
#: The time (seconds) that one grant is for, and that a group may make up after a delay.
_GRANT_SECONDS = 0.25
_CREDIT_SECONDS = 0.1
#: The longest time (seconds) that a handler can put off the next trial.
LONGEST_TRIAL_WAIT = 3600.0
#: A message to which something wasn't available so often, while others were handled, has failed by itself.
ALONE = 10
# Whose act a pause is that a handler asks for.
_HANDLER = "handler"
# So many messages at most are known to a thread by that.
_MOST_UNAVAILABLE = 10_000

_NEVER = float("inf")


class Gate:
    """What one consuming thread of a group may do; not thread-safe. Connections are on the consumer's database.

    ``queues`` are those of the topic that the thread knows of, also those that it comes to know later. ``clock``
    returns seconds that only go forward: by it the thread knows when to look again, and that a grant or a trial of its
    own has lapsed. Everything else goes by the database's clock.
    """

    def __init__(
        self,
        subscription: Subscription,
        settings: Settings,
        queues: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._subscription = subscription
        self._schema = settings.schema
        self._pair = subscription.group, subscription.topic
        self._queues = queues
        self._clock = clock
        self._read_at = -_NEVER
        self._paused = self._open = False
        self._rate = subscription.rate
        self._trial_at = self._trial_until = -_NEVER
        self._grant_at = self._grant_until = -_NEVER
        self._granted = self._used = 0
        self._needs = 1
        self._succeeded_at = -_NEVER
        # How often each message was alone with that something wasn't available to it, and when last.
        self._unavailable: dict[UUID, tuple[int, float]] = {}

    @property
    def limited(self) -> bool:
        """Tell whether it has a rate, or an open breaker: then no thread should ask without a message."""
        return self._open or self._rate is not None

    @property
    def on_trial(self) -> bool:
        """Is the message that was admitted a trial?"""
        return self._open

    def unavailable_for(self, message_id: UUID) -> int:
        """Return how often something wasn't available to a message while others were handled."""
        return self._unavailable.get(message_id, (0, 0.0))[0]

    def is_alone(self, message_id: UUID) -> bool:
        """Take notice that something wasn't available to a message; tell whether it is known to fail by itself."""
        count, last = self._unavailable.pop(message_id, (0, -_NEVER))
        count += self._succeeded_at > last
        if count > ALONE:
            return True
        self._unavailable[message_id] = count, self._clock()
        if len(self._unavailable) > _MOST_UNAVAILABLE:
            del self._unavailable[next(iter(self._unavailable))]
        return False

    @property
    def wait(self) -> float:
        """Seconds until it may open, or until a thread has to look; infinity where it is open."""
        now = self._clock()
        opens_at = self._opens_at(now)
        return _NEVER if opens_at <= now else max(min(opens_at, self._read_at) - now, 0.0)

    @property
    def looks(self) -> bool:
        """Does `admitted` look into the database now, or write there?"""
        return self.limited or self._clock() >= self._read_at

    def shut(self, connection: Connection) -> bool:
        """Tell whether nothing may be handled now, without taking anything of what threads share.

        ``connection`` must not be in a transaction, here and below, unless that is one which is rolled back anyway.
        """
        now = self._clock()
        if now >= self._read_at:
            self._read(connection, now)
        return self._opens_at(now) > now

    def admitted(self, connection: Connection) -> int | None:
        """Return how many messages may be handled by the next transaction: 0, none now; None, any number."""
        if self.shut(connection):
            return 0
        if self._open:
            return 1 if self._has_trial(connection) else 0
        return None if self._rate is None else self._left_of_grant(connection, self._rate)

    def handled(self, counts: Counts) -> None:
        """Take notice of what came of a transaction."""
        if messages := counts.done + counts.failed + counts.parked:
            self.began(messages)
            if counts.done:
                self.succeeded()
            if self._open:
                self.trial_ended()

    def began(self, messages: int) -> None:
        """Take notice that so many messages are handled of those that were admitted."""
        self._used += messages

    def trial_ended(self) -> None:
        """Take notice that the trial has ended; the row knows how."""
        self._trial_until = self._read_at = -_NEVER

    def succeeded(self) -> None:
        """Take notice of a success.

        The offset may not show it: other messages ended with it, or came after it that expired, or wait for others.
        """
        self._succeeded_at = self._clock()

    def failed(self, connection: Connection, because: str) -> None:
        """Open the breaker if this failure, which has been committed, is one too many.

        Another thread may have opened it meanwhile, which this one sees before its next message.
        """
        breaker = self._subscription.breaker
        if breaker is None or self._open:
            return
        window, trial_after = breaker.seconds
        group, topic = self._pair
        values = {"group": group, "topic": topic, "queues": sorted(self._queues), "because": because}
        limits = {
            "failures": breaker.failures,
            "window": min(window, self._clock() - self._succeeded_at),
            "trial_after": trial_after,
        }
        with begin(connection):
            _, opened = execute(connection, COMMIT_SYNCHRONOUSLY, sql.trip(self._schema, **values, **limits))
        self._tell_opened(opened, breaker.failures, because)

    def unavailable(self, connection: Connection, failure: HandlerFailure, *, is_trial: bool) -> None:
        """Open the breaker since something isn't available; where it is open, put off the next trial.

        ``is_trial``: by a trial; a call that began before may only put it off further.
        """
        self._trial_until = -_NEVER
        group, topic = self._pair
        values = {"group": group, "topic": topic, "because": failure.reason}
        how = {"after": min(failure.delay or 0.0, LONGEST_TRIAL_WAIT), "is_trial": is_trial}
        with begin(connection):
            open_now, put_off = sql.open_now(self._schema, **values), sql.put_off(self._schema, **values, **how)
            _, opened, _ = execute(connection, COMMIT_SYNCHRONOUSLY, open_now, put_off)
            if failure.pauses:
                pause = sql.pause(self._schema, group=group, topics=[topic], by=_HANDLER, why=failure.reason)
                if execute(connection, pause)[0]:
                    execute(connection, audit(self._schema, _HANDLER, "pause_group", group, failure.reason, [topic]))
        self._tell_opened(opened, 0, failure.reason)

    def _tell_opened(self, opened: Sequence[Row], failures: int, because: str) -> None:
        self._read_at = -_NEVER
        if opened:
            group, topic = self._pair
            emit(BreakerOpened(group=group, topic=topic, failures=failures, reason=because))

    def begins_trial(self, connection: Connection) -> bool:
        """Take the lock that no two trials hold, in the transaction that is to handle the message of this one.

        If that transaction commits, the breaker is closed with it.
        """
        group, topic = self._pair
        ((taken, *_),) = execute(connection, try_lock(lock_key("trial", group, topic, self._schema), "true"))[0]
        if taken:
            self.close(connection)
        return bool(taken)

    def close(self, connection: Connection) -> None:
        """Close the breaker with the running transaction, in which the trial has succeeded."""
        group, topic = self._pair
        at_commit(connection, sql.close(self._schema, group, topic))
        after_commit(connection, partial(emit, BreakerClosed(group=group, topic=topic)))

    def _opens_at(self, now: float) -> float:
        """Return when something may be handled, as far as this thread knows."""
        if self._paused:
            return _NEVER
        if self._open:
            return now if now < self._trial_until else self._trial_at
        return now if self._has_left(now) else self._grant_at

    def _has_left(self, now: float) -> bool:
        return self._rate is None or (self._used < self._granted and now < self._grant_until)

    def _read(self, connection: Connection, now: float) -> None:
        self._read_at = now + READ_EVERY
        (rows,) = read_source(connection, sql.control(self._schema, *self._pair))
        self._paused, rate, is_open, trial_in = rows[0] if rows else (False, None, False, None)
        self._open = is_open
        self._trial_at = now + trial_in if self._open else -_NEVER
        rate = self._subscription.rate if rate is None else rate
        if rate != self._rate:
            self._rate, self._grant_at = rate, -_NEVER

    def _has_trial(self, connection: Connection) -> bool:
        """Tell whether this thread has the trial, which it takes if it is due."""
        now, breaker = self._clock(), self._subscription.breaker
        if now < self._trial_until:
            return True
        group, topic = self._pair
        trial_after = FIRST_TRIAL_AFTER if breaker is None else breaker.seconds[1]
        if not self._subscription.transactional:  # no lock keeps a rival away as long as it runs
            trial_after = max(trial_after, self._subscription.timeout_seconds)
        with begin(connection):
            take = sql.take_trial(self._schema, group=group, topic=topic, trial_after=trial_after)
            _, taken = execute(connection, COMMIT_SYNCHRONOUSLY, take)
        self._trial_at = now + trial_after
        if taken:
            self._trial_until = now + trial_after
            emit(BreakerTried(group=group, topic=topic))
        return bool(taken)

    def _left_of_grant(self, connection: Connection, rate: float) -> int:
        """Return how many messages of this thread's grant are left; of a new one if it is used or has lapsed."""
        now = self._clock()
        if not self._has_left(now):
            if self._granted:
                # One that was used up was too small; of one that has lapsed, so many were needed.
                self._needs = self._granted * 2 if self._used >= self._granted else self._used
            messages = max(min(self._needs, int(rate * _GRANT_SECONDS)), 1)
            group, topic = self._pair
            values = {"group": group, "topic": topic, "messages": messages, "rate": rate, "credit": _CREDIT_SECONDS}
            lock = take_lock(lock_key("rate", group, topic, self._schema))
            with begin(connection):
                longest = 2 * max(_GRANT_SECONDS, 1 / rate)
                _, ((granted, seconds),) = execute(connection, lock, sql.grant(self._schema, **values, longest=longest))
            self._granted, self._used = (messages if granted else 0), 0
            self._grant_until = now + max(messages / rate, _GRANT_SECONDS)
            self._grant_at = -_NEVER if granted else now + seconds
        return self._granted - self._used
