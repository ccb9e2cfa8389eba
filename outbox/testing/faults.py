"""Let handlers fail, or the process die, at a chosen point of a message's handling; or run each twice.

A worker may die between a handler's end and the COMMIT. The database forgets that run; a mail that was sent in it is
out, and goes out again with the next run. `running_twice` finds handlers that do something outside the database twice.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from difflib import ndiff
from fnmatch import fnmatchcase
from pprint import pformat
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import event

from outbox.database.at_commit import hook
from outbox.database.engines import OUTBOX_ENGINE, engine_of
from outbox.database.execute import driver_of
from outbox.database.session import JoinedSession, RunningTransaction
from outbox.errors import InvalidHandler
from outbox.message.answer import unfinished
from outbox.testing import sql
from outbox.testing.runners import rolled_back

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.consumer.subscription import Handler, Subscription


#: Before the handler runs; after it has returned, when nothing is committed; when all is committed, and the worker
#: doesn't know it yet.
Point = Literal["before_handler", "after_handler", "after_commit"]
#: Seconds in which the server must notice that a connection is gone.
_GONE_WITHIN = 60.0


class Killed(BaseException):
    """The worker is dead: nothing that follows in it happens."""


@contextmanager
def failing(
    outbox: Outbox,
    topic: str,
    *,
    group: str | None = None,
    error: BaseException | type[BaseException] = RuntimeError,
    point: Literal["before_handler", "after_handler"] = "before_handler",
    times: int | None = None,
) -> Iterator[None]:
    """Have the handlers of a topic (or of one group) raise ``error`` until the block ends, or ``times`` times.

    ``after_handler``: once the handler has done its work, which is undone then.

    Raises:
        InvalidHandler: no such consumer.
    """
    left = float("inf") if times is None else times

    def fail(_: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            raise error

    def around(subscription: Subscription) -> Handler:
        at_start = point == "before_handler"
        return _surrounded(subscription, *((fail, None) if at_start else (None, fail)))

    with replaced_handlers(outbox, around, topic, group):
        yield


@contextmanager
def killing(
    outbox: Outbox, topic: str, *, group: str | None = None, point: Point = "after_handler", process: bool = False
) -> Iterator[None]:
    """Have the worker die when it next comes to this point with a message of the topic; the block ends there.

    Its connection is cut, so that the server undoes what isn't committed, and nothing of what would follow happens. The
    block waits until the server has noticed. After it, the next `drain` is another worker. With ``process``, the whole
    process is killed by SIGKILL: for one that the test has started.

    Raises:
        AssertionError: no handler came to this point.
        InvalidHandler: no such consumer, or the outbox is rolled back: with that transaction, the test's data would go.
            Or its handler runs outside of transactions, so that a death undoes nothing.
    """
    if outbox in rolled_back:
        raise InvalidHandler("killing: what dies takes its transaction along; commit in this test, don't roll it back")
    victims: list[int] = []

    def die(connection: Connection) -> None:
        if process:
            os.kill(os.getpid(), signal.SIGKILL)
        victims.append(driver_of(connection).info.backend_pid)
        connection.invalidate()
        raise Killed(f"{topic}: {point}")

    def around(subscription: Subscription) -> Handler:
        if not subscription.transactional:
            raise InvalidHandler(
                f"killing: group {subscription.group!r} handles {topic!r} outside of transactions, and a death undoes "
                "nothing there; see with running_twice that its handler may be repeated"
            )

        def before(connection: Connection | None) -> None:
            if connection is not None and point == "before_handler" and not victims:
                die(connection)
            if connection is not None and point == "after_commit" and not victims:
                stack.enter_context(_after_commit(connection, die))

        def after(connection: Connection | None) -> None:
            if connection is not None and point == "after_handler" and not victims:
                die(connection)

        return _surrounded(subscription, before, after)

    with ExitStack() as stack, replaced_handlers(outbox, around, topic, group), suppress(Killed):
        yield  # a death ends the block, and not the test
    if not victims:
        raise AssertionError(f"no handler of topic {topic!r} came to {point!r}: was a message of it dispatched?")
    _wait_until_gone(outbox, victims[0])


@contextmanager
def _after_commit(connection: Connection, then: Callable[[Connection], None]) -> Iterator[None]:
    """Call ``then`` when the connection has committed, until the block ends."""
    # The listener that sends the COMMIT comes first: the engine has it already. One that is made like it, for another
    # driver or event loop, tells its own listeners first.
    engine = connection.info.get(OUTBOX_ENGINE, connection.engine)
    hook(engine)

    def on_commit(committed: Connection) -> None:
        if committed is connection:
            then(connection)

    event.listen(engine, "commit", on_commit)
    try:
        yield
    finally:
        event.remove(engine, "commit", on_commit)


def _wait_until_gone(outbox: Outbox, pid: int) -> None:
    """Wait until the server has ended a session, whose locks would keep the next worker from the queue."""
    engine, deadline = engine_of(outbox.engine), time.monotonic() + _GONE_WITHIN
    with engine.connect() as connection:
        while connection.exec_driver_sql(sql.IS_THERE, (pid,)).scalar():
            connection.rollback()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server still has the session {pid} of the worker that was killed")
            time.sleep(0.005)
    if engine is not outbox.engine:
        engine.dispose()


# --- handlers with something around ----------------------------------------------------------------------

#: Gets the connection of a handler; None outside of transactions.
_Step = Callable[["Connection | None"], None]


def _surrounded(subscription: Subscription, before: _Step | None = None, after: _Step | None = None) -> Handler:
    """Return a handler that does something before and after the subscription's own."""
    handler = subscription.function

    # Outside of transactions, the message is all there is.
    def plain_handler(message: Any, *carrier: Any) -> Any:
        if before is not None:
            before(handling_connection())
        answer = handler(message, *carrier)
        if after is not None:
            after(handling_connection())
        return answer

    async def async_handler(message: Any, *carrier: Any) -> Any:
        from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs greenlet

        if before is not None:
            await greenlet_spawn(before, handling_connection())
        answer = await handler(message, *carrier)
        if after is not None:
            await greenlet_spawn(after, handling_connection())
        return answer

    return functools.wraps(handler)(async_handler if subscription.is_async else plain_handler)


def handling_connection() -> Connection | None:
    """Return the connection in whose transaction the calling handler runs; None outside of transactions."""
    running = RunningTransaction.of_caller()
    return None if running is None else running.connection


@contextmanager
def replaced_handlers(
    outbox: Outbox, around: Callable[[Subscription], Handler], topic: str | None = None, group: str | None = None
) -> Iterator[None]:
    """Put other handlers in the place of an outbox's own until the block ends.

    Raises:
        InvalidHandler: no consumer of this topic and group.
    """
    chosen = {
        key: subscription
        for key, subscription in outbox.subscriptions.items()
        if topic in {None, subscription.topic} and group in {None, subscription.group}
    }
    if not chosen:
        what = f"consumer of {topic!r}" if topic else "consumer"
        raise InvalidHandler(f"this Outbox has no {what}{f' in group {group!r}' if group else ''}")
    for key, subscription in chosen.items():
        outbox.subscriptions[key] = replace(subscription, function=around(subscription))
    try:
        yield
    finally:
        outbox.subscriptions.update(chosen)


#: What the interpreter tells of the world outside (Python's table of audit events), with how many leading arguments are
#: objects that say nothing.
_EVENTS = {
    **dict.fromkeys(("socket.connect", "socket.sendto", "socket.sendmsg", "http.client.send", "smtplib.send"), 1),
    **dict.fromkeys(
        ("urllib.Request", "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "sqlite3.connect"), 0
    ),
    **dict.fromkeys(
        ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"), 0
    ),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_recorded: ContextVar[list[str] | None] = ContextVar("outbox_recorded", default=None)
_hooked: list[bool] = []


class NotIdempotent(AssertionError):
    """Handlers that did something outside the database once more when they were run again."""


@contextmanager
def running_twice(
    outbox: Outbox, *, outside: Callable[[], Any] | None = None, ignore: Collection[str] = ()
) -> Iterator[None]:
    """Run each handler twice for a message until the block ends, and point out those that do more by the second run.

    The first run is undone, as by a worker that dies before its COMMIT; not that of a handler outside of transactions.
    Found is what both runs do: connections that are opened, programs that are started, files that are written, as far
    as the interpreter tells of it (its audit events); ``ignore`` has patterns of what may be repeated, such as
    ``"socket.connect(*, 6379))"``. And what ``outside`` returns, such as the mails of a stand-in: it must be after the
    second run what it was after the first.

    Raises:
        NotIdempotent: at the end of the block, with what each handler did twice.
        InvalidHandler: the outbox has no consumer.
    """
    reports: list[str] = []
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_hear)

    def around(subscription: Subscription) -> Handler:
        return _Twice(subscription, outside, tuple(ignore), reports).handler()

    with replaced_handlers(outbox, around):
        yield
    if reports:
        raise NotIdempotent(
            "handlers aren't idempotent outside the database. Each was run twice for one message, of which the first "
            "run was undone, as by a crash before the COMMIT:\n" + "\n".join(reports)
        )


@dataclass(slots=True)
class _Effects:
    """What one run did outside."""

    events: list[str] = field(default_factory=list)
    state: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class _Twice:
    """One handler, run twice."""

    subscription: Subscription
    outside: Callable[[], Any] | None
    ignore: tuple[str, ...]
    reports: list[str]

    def handler(self) -> Handler:
        """Return the handler to be called in its place."""
        if not self.subscription.transactional:
            return self._async_outside_twice if self.subscription.is_async else self._outside_twice

        # With the handler's own declaration of what it takes.
        @functools.wraps(self.subscription.function)
        def handler(message: Any, carrier: Any) -> Any:
            return self._twice(message, carrier)

        @functools.wraps(self.subscription.function)
        async def async_handler(message: Any, carrier: Any) -> Any:
            return await self._async_twice(message, carrier)

        return async_handler if self.subscription.is_async else handler

    def _twice(self, message: Any, carrier: Any) -> Any:
        first, second = _Effects(), _Effects()
        self._run_undone(message, first)
        try:
            with self._recorded(second):
                return self.subscription.function(message, carrier)
        finally:
            self._compare(message, first, second)

    async def _async_twice(self, message: Any, carrier: Any) -> Any:
        from sqlalchemy.util import greenlet_spawn  # noqa: PLC0415 - needs greenlet

        first, second = _Effects(), _Effects()
        await greenlet_spawn(self._run_undone, message, first)
        try:
            with self._recorded(second):
                return await self.subscription.function(message, carrier)
        finally:
            self._compare(message, first, second)

    def _run_undone(self, message: Any, run: _Effects) -> None:
        """Run the handler in a savepoint of the running transaction, and undo that."""
        connection, takes = handling_connection(), self.subscription.takes
        assert connection is not None  # noqa: S101 - the handler runs in a transaction
        with connection.begin_nested() as undone:
            joined = JoinedSession(connection, is_async=takes.is_async, takes=takes)
            try:
                with self._recorded(run, raising=False):
                    unfinished(joined.call(self.subscription.function, message))
                    joined.flush()
            finally:
                joined.close()
                undone.rollback()

    def _outside_twice(self, message: Any) -> Any:
        first, second = _Effects(), _Effects()
        with self._recorded(first, raising=False):
            unfinished(self.subscription.function(message))
        try:
            with self._recorded(second):
                return self.subscription.function(message)
        finally:
            self._compare(message, first, second)

    async def _async_outside_twice(self, message: Any) -> Any:
        first, second = _Effects(), _Effects()
        with self._recorded(first, raising=False):
            await self.subscription.function(message)
        try:
            with self._recorded(second):
                return await self.subscription.function(message)
        finally:
            self._compare(message, first, second)

    @contextmanager
    def _recorded(self, run: _Effects, *, raising: bool = True) -> Iterator[None]:
        token = _recorded.set(run.events)
        try:
            yield
        except Exception as error:
            run.error = error
            if raising:
                raise
        finally:
            _recorded.reset(token)
            run.state = copy.deepcopy(self.outside()) if self.outside else None

    def _is_ignored(self, event: str) -> bool:
        return any(fnmatchcase(event, pattern) for pattern in self.ignore)

    def _compare(self, message: Any, first: _Effects, second: _Effects) -> None:
        repeated = [event for event in dict.fromkeys(first.events) if event in second.events]
        lines = [f"    done in both runs: {event}" for event in repeated if not self._is_ignored(event)]
        if first.state != second.state:
            lines.append("    outside, the second run changed something (- after the first, + after the second):")
            one, other = (pformat(run.state, width=100).splitlines() for run in (first, second))
            lines += [f"      {line.rstrip()}" for line in ndiff(one, other)]
        if second.error is not None and first.error is None:
            lines.append(f"    the first run returned, the second raised {second.error!r}")
        if lines:
            ids = ", ".join(str(each.id) for each in (message if isinstance(message, list) else [message]))
            name = getattr(self.subscription.function, "__qualname__", repr(self.subscription.function))
            of = f"group {self.subscription.group!r} of topic {self.subscription.topic!r}"
            self.reports.append("\n".join([f"  {name} ({of}), message {ids}:", *lines]))


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Record what the running handler does. This is called for everything that happens in the process."""
    if event not in _EVENTS or (events := _recorded.get()) is None:
        return
    if event == "open" and not _is_written(args):
        return
    shown = args[:2] if event == "open" else args[_EVENTS[event] :]
    events.append(f"{event}({', '.join(repr(each)[:80] for each in shown)})")


def _is_written(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & _WRITES)
