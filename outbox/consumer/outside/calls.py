"""Calls of a handler outside of transactions, many at a time: plain functions in threads, async ones as tasks.

Nothing here knows of a database. The pass of a consumer starts runs of the handler, each with one message or with a
list of them, and waits for those that have ended; so what it does about them it does in its own thread. A run that
takes too long is given up: a task is cancelled, a thread can't be. Until it really ends it hangs, and keeps its part of
the ``concurrency``.

While there is no connection to the database, no pass waits. So tasks are given an expiry then, which their loop keeps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy.util import await_only, greenlet_spawn

from outbox.consumer.meter import HandlerMeter
from outbox.consumer.subscription import Entry, Subscription, count_call, failure_from
from outbox.database.engines import start_loop
from outbox.message.answer import HandlerFailure, failures_of
from outbox.message.model import HANDLED, Message
from outbox.telemetry.hooks import Handling, middlewares_here, observed, observers

#: Of a call that says nothing of its end: only a return is a success, and it has to be said.
_UNSAID = HandlerFailure("the call of the handler ended, and nothing tells how")
# Seconds in which the tasks of a loop of our own must end.
_END_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class CallContext:
    """The frame of each run: ``active`` is entered; async handlers run on ``loop``, with copies of ``variables``.

    Without a loop they run on one of their own.
    """

    active: Callable[[], AbstractContextManager[object]] = nullcontext
    loop: asyncio.AbstractEventLoop | None = None
    variables: Context | None = None

    def copy(self) -> Context:
        """Return the context variables of a run."""
        return (self.variables or copy_context()).copy()


@dataclass(slots=True, eq=False)
class Call:
    """A message of a queue with which the handler is called, and what came of it: ``failure`` None is success.

    ``retries``: a failed message that the queue has left behind. ``too_old``: the message had expired, so that the
    handler wasn't called. ``undone``: it failed together with others, so that it isn't known which of them is at fault.
    ``has_expired``: it was cancelled since the worker might have lost the queue, which is no attempt. ``is_trial``: it
    decides whether the group's breaker is closed. ``run`` is there while it runs.
    """

    queue: int
    entry: Entry
    attempt: int
    retries: bool = False
    failure: HandlerFailure | None = _UNSAID
    error: BaseException | None = None
    too_old: bool = False
    undone: bool = False
    has_expired: bool = False
    is_trial: bool = False
    run: HandlerRun | None = field(default=None, repr=False)

    @property
    def message(self) -> Message:
        """The message."""
        assert self.entry.message is not None  # noqa: S101 - what a filter leaves out isn't called
        return self.entry.message


@dataclass(slots=True, eq=False)
class HandlerRun:
    """One run of the handler, with one message, or with several of one queue.

    ``began`` and ``deadline`` are times of the clock that only goes forward, ``seconds`` is how long it took.
    ``expires_at`` is a time of the loop that its task runs on.
    """

    calls: Sequence[Call]
    argument: Message | list[Message]
    began: float = field(default_factory=time.monotonic)
    deadline: float = 0.0
    seconds: float = 0.0
    expires_at: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    limit: asyncio.Timeout | None = field(default=None, repr=False)

    def take(self, answer: Any, error: BaseException | None) -> None:
        """Take what the handler has returned or raised."""
        self.seconds = time.monotonic() - self.began
        failures: Sequence[HandlerFailure | None] = ()
        undone = error is not None
        if error is None:
            try:
                failures, undone = failures_of(answer, len(self.calls) if isinstance(self.argument, list) else None)
            except BaseException as raised:  # the answer's own code
                error, undone = raised, True
        if error is not None:
            failures = [failure_from(error, [call.entry for call in self.calls])] * len(self.calls)
        for call, failure in zip(self.calls, failures, strict=True):
            call.error, call.failure = error, failure and failure.about(call.entry.message)
            call.has_expired = failure is not None and self.limit is not None and self.limit.expired()
            call.undone = undone and len(self.calls) > 1 and not call.has_expired


class Calls:
    """The runs of one handler. Used by one thread, but for `wake`."""

    def __init__(self, subscription: Subscription, meter: HandlerMeter, context: CallContext | None = None) -> None:
        self._meter = meter
        self._timeout = subscription.timeout_seconds
        self._concurrency = subscription.concurrency
        self._takes_batch = subscription.takes_batch
        self._ended: SimpleQueue[HandlerRun | None] = SimpleQueue()
        kind = _TaskStarter if subscription.is_async else _ThreadStarter
        self._starter: _ThreadStarter = kind(subscription, context or CallContext(), self._ended.put)
        self._running: set[HandlerRun] = set()
        self._hanging: set[HandlerRun] = set()

    @property
    def free(self) -> int:
        """How many more may run."""
        return self._concurrency - len(self._running) - len(self._hanging)

    @property
    def hanging(self) -> int:
        """How many run on that were given up."""
        return len(self._hanging)

    def start(self, calls: Sequence[Call]) -> None:
        """Run the handler with the messages of these calls, which are of one queue."""
        messages = [call.message for call in calls]
        run = HandlerRun(calls, messages if self._takes_batch else messages[0])
        run.deadline = run.began + self._timeout
        for call, message in zip(calls, messages, strict=True):
            call.run, call.entry.began, message.attempt = run, run.began, call.attempt
        self._running.add(run)
        self._count_in_flight()
        try:
            self._starter.start(run)
        except RuntimeError as error:  # no thread could be started, or the application has closed its loop
            run.take(None, error)
            self._ended.put(run)

    def wait(self, timeout: float) -> list[Call]:
        """Wait until one has ended, at most so many seconds; return those that have, or have taken too long."""
        if self._running:
            timeout = min(timeout, min(run.deadline for run in self._running) - time.monotonic())
        ended: list[Call] = []
        with suppress(Empty):
            run = self._ended.get(timeout=timeout) if timeout > 0 else self._ended.get_nowait()
            while True:
                if run in self._running:
                    self._running.remove(run)
                    count_call(self._meter, run.seconds)
                    ended += run.calls
                elif run is not None:
                    self._hanging.discard(run)
                for call in run.calls if run is not None else ():
                    call.run = None  # no circle is left
                run = self._ended.get_nowait()
        ended += self._overdue()
        self._count_in_flight()
        return ended

    def expire(self, calls: Iterable[Call], seconds: float | None) -> None:
        """Have tasks end after so many seconds, whether the worker waits for them or not; None: that is called off."""
        for run in {call.run for call in calls if call.run}:
            self._starter.expire(run, seconds)

    def give_up(self, calls: Iterable[Call]) -> None:
        """Cancel the runs of calls; their results are of no interest any more."""
        for run in {call.run for call in calls if call.run}:
            if run in self._running:
                self._running.remove(run)
                self._hanging.add(run)
                self._starter.cancel(run)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        self._ended.put(None)

    def end(self) -> None:
        """End a `wait`, and the loop that tasks run on if it is our own; from any thread."""
        self.wake()
        self._starter.end()

    def _count_in_flight(self) -> None:
        self._meter.in_flight = sum(len(run.calls) for run in (*self._running, *self._hanging))

    def _overdue(self) -> list[Call]:
        now = time.monotonic()
        overdue = [run for run in self._running if run.deadline <= now]
        self.give_up(call for run in overdue for call in run.calls)
        for run in overdue:
            count_call(self._meter, now - run.began)
        text = f"the handler took longer than {self._timeout:g} s, and was given up"
        failure = HandlerFailure(text, kind="the handler timed out")
        # Other objects: the run itself may yet end, and say something else.
        return [
            Call(call.queue, call.entry, call.attempt, call.retries, failure, undone=len(run.calls) > 1)
            for run in overdue
            for call in run.calls
        ]


def _handling(subscription: Subscription, run: HandlerRun) -> Handling:
    messages = [call.message for call in run.calls]
    return Handling(subscription.group, subscription.topic, run.calls[0].queue, messages)


class _ThreadStarter:
    """Calls a plain function, each time in a thread of its own, which the end of the process doesn't wait for.

    A thread ends by itself, and can't be ended from outside.
    """

    def __init__(self, subscription: Subscription, context: CallContext, ended: Callable[[HandlerRun], None]) -> None:
        self._subscription = subscription
        self._context = context
        self._ended = ended

    def start(self, run: HandlerRun) -> None:
        """Start a run; it is handed over when it has ended."""
        arguments = self._context.copy().run, self._run_handler, run
        threading.Thread(target=arguments[0], args=arguments[1:], name="outbox-handler", daemon=True).start()

    def _run_handler(self, run: HandlerRun) -> None:
        answer, raised = None, None
        try:
            HANDLED.set(run.argument)
            with self._context.active():
                if observers.hooks or middlewares_here.get():
                    activity = _handling(self._subscription, run)
                    answer = observed(activity, self._subscription.function, run.argument)
                else:
                    answer = self._subscription.function(run.argument)
        except BaseException as error:  # also SystemExit: it ends an attempt, and not the worker
            raised = error
        try:
            run.take(answer, raised)
        finally:
            self._ended(run)

    def cancel(self, run: HandlerRun) -> None:
        """Have a run end, as far as that can be done."""

    def expire(self, run: HandlerRun, seconds: float | None) -> None:
        """Have a run end by itself after so many seconds, as far as that can be done; None: no more."""

    def end(self) -> None:
        """Start nothing more."""


class _TaskStarter(_ThreadStarter):
    """Calls an async function, each time as a task of the application's event loop, or of one of its own."""

    def __init__(self, subscription: Subscription, context: CallContext, ended: Callable[[HandlerRun], None]) -> None:
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

    def start(self, run: HandlerRun) -> None:
        loop, variables = self._loop, self._context.copy()
        loop.call_soon_threadsafe(self._begin, loop, run, variables)

    def _begin(self, loop: asyncio.AbstractEventLoop, run: HandlerRun, variables: Context) -> None:
        run.task = loop.create_task(self._run(run), context=variables)
        self._tasks.add(run.task)
        run.task.add_done_callback(lambda task: self._done(run, task))

    async def _run(self, run: HandlerRun) -> None:
        answer, raised = None, None
        try:
            HANDLED.set(run.argument)
            with self._context.active():
                async with asyncio.timeout_at(run.expires_at) as run.limit:
                    answer = await self._answer(run)
        except BaseException as error:  # SystemExit would end the loop
            raised = error
        run.take(answer, raised)

    async def _answer(self, run: HandlerRun) -> Any:
        handler = self._subscription.function
        if not (observers.hooks or middlewares_here.get()):
            return await handler(run.argument)
        # Observers are no coroutines.
        activity = _handling(self._subscription, run)
        return await greenlet_spawn(observed, activity, lambda argument: await_only(handler(argument)), run.argument)

    def _done(self, run: HandlerRun, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        try:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if error is not None:  # it was cancelled before it began, or its outcome wasn't taken
                run.take(None, error)
        finally:
            self._ended(run)

    def cancel(self, run: HandlerRun) -> None:
        with suppress(RuntimeError):  # the application has closed its loop
            self._loop.call_soon_threadsafe(self._cancel, run)

    @staticmethod
    def _cancel(run: HandlerRun) -> None:
        if run.task is not None:
            run.task.cancel()

    def expire(self, run: HandlerRun, seconds: float | None) -> None:
        with suppress(RuntimeError):  # the application has closed its loop
            self._loop.call_soon_threadsafe(self._expire, run, seconds)

    def _expire(self, run: HandlerRun, seconds: float | None) -> None:
        # The task may not have begun yet.
        run.expires_at = None if seconds is None else self._loop.time() + seconds
        if run.limit is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                run.limit.reschedule(run.expires_at)

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
