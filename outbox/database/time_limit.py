"""What takes too long: a function of the application's loses its connection, and a batch is tried with fewer rows.

A batch that is cut off by a limit of the server (``statement_timeout``, ``transaction_timeout``, ``lock_timeout``), or
fails by its size (memory) or one of its rows, would fail so for ever. So it is tried with half of the rows, down to one
(`by_size`). The next one begins with what went well, and takes an eighth more after each that was full.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine

from outbox.database.execute import is_lost, sqlstate
from outbox.errors import InvalidHandler, SchemaError
from outbox.message.model import Counts
from outbox.telemetry.events import BatchTooLarge
from outbox.telemetry.hooks import emit
from outbox.text import message_of

if TYPE_CHECKING:
    from outbox.database.engines import NewRunner, Pass, Runner

T = TypeVar("T", bound="Counts | tuple[int, *tuple[Any, ...]] | None")

# What fails with any number of rows: no connection or no server (08, 28, 3D, 57P), a statement that can't be run (0A,
# 3F, 42), a database that takes no writes; and tables that dispatch isn't to work on (SchemaError).
_WHATEVER_THE_SIZE = re.compile(r"08|0A|25006|28|3D|3F|42|57P")
#: The server's own limits of time: a statement that was cancelled, a transaction that was idle, or open, for too long,
#: and a lock that was waited for.
CUT_OFF = frozenset({"57014", "25P03", "25P04", "55P03"})

#: In so many threads of a process one function may hang; then it isn't called, until one of them has ended.
MOST_LEFT_BEHIND = 5


class FunctionTimedOut(Exception):
    """A function took longer than it may, and was given up."""


@dataclass(slots=True, eq=False)
class TimeLimit:
    """How long (seconds) a function may take, and the threads of this process in which it took longer."""

    seconds: float
    _left_behind: list[Thread] = field(default_factory=list)

    @classmethod
    def checked(cls, what: str, seconds: float) -> TimeLimit:
        """Return the limit that ``what`` declares.

        Raises:
            InvalidHandler: it isn't greater than 0.
        """
        if not seconds > 0:
            raise InvalidHandler(f"{what}: timeout = {seconds!r} must be greater than 0 (seconds)")
        return cls(seconds)

    @property
    def hanging(self) -> int:
        """In how many threads of this process it still runs, although it was given up."""
        for thread in list(self._left_behind):
            if not thread.is_alive():
                self._left_behind.remove(thread)
        return len(self._left_behind)

    @property
    def exhausted(self) -> bool:
        """Does it hang in every thread that it may have?"""
        return self.hanging >= MOST_LEFT_BEHIND

    def run(self, name: str, runner: Runner, one_pass: Pass) -> None:
        """Run a pass that calls the function, in a thread of that name, for as long as it may take.

        A thread can't be ended from outside. What takes longer loses its connection, so that all it did is rolled back
        and it can commit nothing any more; its thread is left behind. A commit that was under way at that moment may
        succeed: whoever tries again has to find that.

        Raises:
            FunctionTimedOut: it took longer; ``runner`` can't be used any more.
            Exception: what the runner raised.
        """
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        variables = copy_context()

        def work() -> None:
            error: BaseException | None = None
            try:
                variables.run(runner.run, one_pass)
            except BaseException as raised:  # it is raised where it is waited for
                error = raised
            ended.put(error)

        thread = Thread(target=work, name=name, daemon=True)
        thread.start()
        try:
            error = ended.get(timeout=self.seconds)
        except Empty:
            self._left_behind.append(thread)
            runner.end()
            raise FunctionTimedOut(f"it took longer than {self.seconds:g} s, and was given up") from None
        if error is not None:
            raise error


@dataclass(slots=True)
class LimitedRunners:
    """The connections on which a pass calls such functions: one for plain ones, one for async ones, when first needed.

    A function that takes too long takes its connection with it; the next one gets another.
    """

    _new_runner: NewRunner
    _open: dict[bool, Runner] = field(default_factory=dict)

    def run(self, limit: TimeLimit, name: str, one_pass: Pass, *, is_async: bool) -> None:
        """Run what calls a function, as `TimeLimit.run` does, and raise what that raises."""
        if is_async not in self._open:
            self._open[is_async] = self._new_runner(is_async)
        try:
            limit.run(name, self._open[is_async], one_pass)
        except FunctionTimedOut:
            del self._open[is_async]
            raise

    def end(self) -> None:
        """Close the connections."""
        for runner in self._open.values():
            runner.end()


# --- batches ---------------------------------------------------------------------------------------------------------


_sizes: WeakKeyDictionary[Engine, dict[tuple[str, ...], int]] = WeakKeyDictionary()


def batch_sizes(engine: Engine) -> dict[tuple[str, ...], int]:
    """Return how many rows a batch of each name takes at most on a database, of those that have failed.

    It outlives the connections: what a batch fails by may cost it its own.
    """
    return _sizes.setdefault(engine, {})


def by_size(bind: Connection | Engine, name: tuple[str, ...], most: int, attempt: Callable[[int], T]) -> T:
    """Have a batch done with so many rows at most, and with half of them while it fails, down to one.

    ``attempt`` gets the number of rows. It returns counts, or first how many it took. It works in transactions of its
    own on ``bind``, and may be called again after any that it has committed. ``name`` begins with what events call it.

    Raises:
        Exception: what one row alone raised, or any number of them would; or the connection was lost: the next batch is
            smaller then, if that may help.
    """
    sizes = batch_sizes(bind.engine)
    while True:
        size = min(sizes.get(name, most), most)
        try:
            result = attempt(size)
        except Exception as error:
            lost = isinstance(bind, Connection) and is_lost(bind)
            if not _fails_by_size(error, lost=lost):
                raise
            sizes[name] = max(size // 2, 1)
            if size == 1:
                raise
            emit(BatchTooLarge(batch=name[0], size=size, reason=message_of(error).partition("\n")[0], error=error))
            if lost:
                raise
        else:
            taken = result.taken if isinstance(result, Counts) else cast("Any", result or (0,))[0]
            if name in sizes and taken >= size:
                sizes[name] = size + max(size // 8, 1)
            return result


def _fails_by_size(error: Exception, *, lost: bool) -> bool:
    """Tell whether fewer rows may help; a lost connection may be the batch's doing, though the server said nothing."""
    state = sqlstate(error) or sqlstate(error.__cause__)
    late = isinstance(error.__cause__, TimeoutError)
    return not isinstance(error, SchemaError) and not _WHATEVER_THE_SIZE.match(state) and bool(state or late or lost)
