"""A function of the application's that takes too long loses its connection."""

from __future__ import annotations

from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from outbox.errors import InvalidHandler

if TYPE_CHECKING:
    from outbox.database.engines import NewRunner, Pass, Runner

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

        A thread can't be ended from outside. A function that takes longer loses its connection, so that all it did is
        rolled back and it can commit nothing any more; its thread is left behind. A commit that was under way at that
        moment may succeed: the worker that tries again has to find that.

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
