"""Calls of a handler outside of transactions, many at a time: plain functions in threads, async ones as tasks.

Nothing here knows of a database. The pass of a consumer starts calls, and waits for those that have ended; so what it
does about them it does in its own thread. A call that takes too long is given up: a task is cancelled, a thread can't
be. Until it really ends it hangs, and keeps its part of the ``concurrency``.

While there is no connection to the database, no pass waits. So tasks are given an expiry then, which their loop keeps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy.util import await_only, greenlet_spawn

from outbox.consumer.meter import HandlerMeter
from outbox.consumer.subscription import (
    Entry,
    HandlerFailure,
    Subscription,
    count_call,
    failure_from,
    failure_of,
)
from outbox.database.engines import start_loop
from outbox.message.model import HANDLED, Message
from outbox.telemetry.hooks import Handling, middlewares_here, observed, observers

#: Of a call that says nothing of its end: only a return is a success, and it has to be said.
_UNSAID = HandlerFailure("the call of the handler ended, and nothing tells how")
# Seconds in which the tasks of a loop of our own must end.
_END_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class CallContext:
    """The frame of each call: ``active`` is entered; async handlers run on ``loop``, with copies of ``variables``.

    Without a loop they run on one of their own.
    """

    active: Callable[[], AbstractContextManager[object]] = nullcontext
    loop: asyncio.AbstractEventLoop | None = None
    variables: Context | None = None

    def copy(self) -> Context:
        """Return the context variables of a call."""
        return (self.variables or copy_context()).copy()


@dataclass(slots=True, eq=False)
class Call:
    """A call of the handler with one message of a queue, and what came of it: ``failure`` None is success.

    ``retries``: a failed message that the queue has left behind. ``too_old``: the message had expired, so that the
    handler wasn't called. ``deadline`` is a time of the clock that only goes forward. ``seconds`` is how long it took.
    ``is_trial``: it decides whether the group's breaker is closed. ``expires_at`` is a time of the loop that its task
    runs on.
    """

    queue: int
    entry: Entry
    attempt: int
    retries: bool = False
    failure: HandlerFailure | None = _UNSAID
    error: BaseException | None = None
    deadline: float = 0.0
    seconds: float = 0.0
    too_old: bool = False
    is_trial: bool = False
    expires_at: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    limit: asyncio.Timeout | None = field(default=None, repr=False)

    @property
    def message(self) -> Message:
        """The message."""
        assert self.entry.message is not None  # noqa: S101 - what a filter leaves out isn't called
        return self.entry.message

    @property
    def has_expired(self) -> bool:
        """Tell whether it was cancelled since the worker might have lost the queue: that is no attempt."""
        return self.failure is not None and self.limit is not None and self.limit.expired()

    def take(self, answer: Any, error: BaseException | None) -> None:
        """Take what the handler has returned or raised."""
        self.seconds = time.monotonic() - (self.entry.began or time.monotonic())
        if error is None:
            try:
                self.failure = failure_of(answer)
            except BaseException as raised:  # the answer's own code
                error = raised
        if error is not None:
            self.error, self.failure = error, failure_from(error, [self.entry])
        self.failure = self.failure and self.failure.about(self.entry)


class Calls:
    """The calls of one handler that run. Used by one thread, but for `wake`."""

    def __init__(self, subscription: Subscription, meter: HandlerMeter, context: CallContext | None = None) -> None:
        self._meter = meter
        self._timeout = subscription.timeout_seconds
        self._concurrency = subscription.concurrency
        self._ended: SimpleQueue[Call | None] = SimpleQueue()
        kind = _TaskStarter if subscription.is_async else _ThreadStarter
        self._starter: _ThreadStarter = kind(subscription, context or CallContext(), self._ended.put)
        self._running: set[Call] = set()
        self._hanging: set[Call] = set()

    @property
    def free(self) -> int:
        """How many more may run."""
        return self._concurrency - len(self._running) - len(self._hanging)

    @property
    def hanging(self) -> int:
        """How many run on that were given up."""
        return len(self._hanging)

    def start(self, call: Call) -> None:
        """Call the handler."""
        call.message.attempt = call.attempt
        call.entry.began = time.monotonic()
        call.deadline = call.entry.began + self._timeout
        self._running.add(call)
        self._count_in_flight()
        try:
            self._starter.start(call)
        except RuntimeError as error:  # no thread could be started, or the application has closed its loop
            call.take(None, error)
            self._ended.put(call)

    def wait(self, timeout: float) -> list[Call]:
        """Wait until one has ended, at most so many seconds; return those that have, or have taken too long."""
        if self._running:
            timeout = min(timeout, min(call.deadline for call in self._running) - time.monotonic())
        ended: list[Call] = []
        with suppress(Empty):
            call = self._ended.get(timeout=timeout) if timeout > 0 else self._ended.get_nowait()
            while True:
                if call in self._running:
                    self._running.remove(call)
                    count_call(self._meter, call.seconds)
                    ended.append(call)
                elif call is not None:
                    self._hanging.discard(call)
                call = self._ended.get_nowait()
        ended += self._overdue()
        self._count_in_flight()
        return ended

    def expire(self, calls: Iterable[Call], seconds: float | None) -> None:
        """Have tasks end after so many seconds, whether the worker waits for them or not; None: that is called off."""
        for call in calls:
            self._starter.expire(call, seconds)

    def give_up(self, calls: Iterable[Call]) -> None:
        """Cancel calls; their results are of no interest any more."""
        for call in calls:
            if call in self._running:
                self._running.remove(call)
                self._hanging.add(call)
                self._starter.cancel(call)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        self._ended.put(None)

    def end(self) -> None:
        """End a `wait`, and the loop that tasks run on if it is our own; from any thread."""
        self.wake()
        self._starter.end()

    def _count_in_flight(self) -> None:
        self._meter.in_flight = len(self._running) + len(self._hanging)

    def _overdue(self) -> list[Call]:
        now = time.monotonic()
        overdue = [call for call in self._running if call.deadline <= now]
        self.give_up(overdue)
        for call in overdue:
            count_call(self._meter, now - call.deadline + self._timeout)
        text = f"the handler took longer than {self._timeout:g} s, and was given up"
        failure = HandlerFailure(text, kind="the handler timed out")
        # Another object: the call itself may yet end, and say something else.
        return [Call(call.queue, call.entry, call.attempt, call.retries, failure) for call in overdue]


def _handling(subscription: Subscription, call: Call) -> Handling:
    return Handling(subscription.group, subscription.topic, call.queue, [call.message])


class _ThreadStarter:
    """Calls a plain function, each time in a thread of its own, which the end of the process doesn't wait for.

    A thread ends by itself, and can't be ended from outside.
    """

    def __init__(self, subscription: Subscription, context: CallContext, ended: Callable[[Call], None]) -> None:
        self._subscription = subscription
        self._context = context
        self._ended = ended

    def start(self, call: Call) -> None:
        """Start a call; it is handed over when it has ended."""
        arguments = self._context.copy().run, self._call, call
        threading.Thread(target=arguments[0], args=arguments[1:], name="outbox-handler", daemon=True).start()

    def _call(self, call: Call) -> None:
        answer, raised = None, None
        try:
            HANDLED.set(call.message)
            with self._context.active():
                if observers.hooks or middlewares_here.get():
                    activity = _handling(self._subscription, call)
                    answer = observed(activity, self._subscription.function, call.message)
                else:
                    answer = self._subscription.function(call.message)
        except BaseException as error:  # also SystemExit: it ends an attempt, and not the worker
            raised = error
        try:
            call.take(answer, raised)
        finally:
            self._ended(call)

    def cancel(self, call: Call) -> None:
        """Have a call end, as far as that can be done."""

    def expire(self, call: Call, seconds: float | None) -> None:
        """Have a call end by itself after so many seconds, as far as that can be done; None: no more."""

    def end(self) -> None:
        """Start nothing more."""


class _TaskStarter(_ThreadStarter):
    """Calls an async function, each time as a task of the application's event loop, or of one of its own."""

    def __init__(self, subscription: Subscription, context: CallContext, ended: Callable[[Call], None]) -> None:
        super().__init__(subscription, context, ended)
        self._own: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._context.loop is not None:
            return self._context.loop
        if self._own is None:
            self._own = start_loop("outbox-handler-loop")
        return self._own[0]

    def start(self, call: Call) -> None:
        loop, variables = self._loop, self._context.copy()
        loop.call_soon_threadsafe(self._begin, loop, call, variables)

    def _begin(self, loop: asyncio.AbstractEventLoop, call: Call, variables: Context) -> None:
        call.task = loop.create_task(self._run(call), context=variables)
        self._tasks.add(call.task)
        call.task.add_done_callback(lambda task: self._done(call, task))

    async def _run(self, call: Call) -> None:
        answer, raised = None, None
        try:
            HANDLED.set(call.message)
            with self._context.active():
                async with asyncio.timeout_at(call.expires_at) as call.limit:
                    answer = await self._answer(call)
        except BaseException as error:  # SystemExit would end the loop
            raised = error
        call.take(answer, raised)

    async def _answer(self, call: Call) -> Any:
        handler = self._subscription.function
        if not (observers.hooks or middlewares_here.get()):
            return await handler(call.message)
        # Observers are no coroutines.
        activity = _handling(self._subscription, call)
        return await greenlet_spawn(observed, activity, lambda message: await_only(handler(message)), call.message)

    def _done(self, call: Call, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        try:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None:  # it was cancelled before it began, or its outcome wasn't taken
                call.take(None, error)
        finally:
            self._ended(call)

    def cancel(self, call: Call) -> None:
        with suppress(RuntimeError):  # the application has closed its loop
            self._loop.call_soon_threadsafe(self._cancel, call)

    @staticmethod
    def _cancel(call: Call) -> None:
        if call.task is not None:
            call.task.cancel()

    def expire(self, call: Call, seconds: float | None) -> None:
        with suppress(RuntimeError):  # the application has closed its loop
            self._loop.call_soon_threadsafe(self._expire, call, seconds)

    def _expire(self, call: Call, seconds: float | None) -> None:
        # The task may not have begun yet.
        call.expires_at = None if seconds is None else self._loop.time() + seconds
        if call.limit is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                call.limit.reschedule(call.expires_at)

    def end(self) -> None:
        if self._context.loop is not None:
            with suppress(RuntimeError):  # the application has closed it, and with it all of its tasks
                self._context.loop.call_soon_threadsafe(self._cancel_all)
        elif self._own is not None:
            loop, thread = self._own
            self._own = None
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(loop.stop)
            thread.join(_END_TIMEOUT)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()
