"""Find handlers that do something outside the database twice, when a message is handled twice.

A worker may die between a handler's end and the COMMIT. The database forgets that run; a mail that was sent in it is
out, and goes out again with the next run.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import ndiff
from fnmatch import fnmatchcase
from pprint import pformat
from typing import TYPE_CHECKING, Any

from outbox.database.session import JoinedSession
from outbox.message.answer import unfinished
from outbox.testing.faults import handling_connection, replaced_handlers

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.consumer.subscription import Handler, Subscription

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
