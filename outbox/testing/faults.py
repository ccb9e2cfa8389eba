"""Let handlers fail, or the process die, at a chosen point of a message's handling."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import event

from outbox.database.at_commit import hook
from outbox.database.engines import OUTBOX_ENGINE, engine_of
from outbox.database.execute import driver_of
from outbox.database.session import RunningTransaction
from outbox.errors import InvalidHandler
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
