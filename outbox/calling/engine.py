"""Call functions of the application: with what they declare to take, and for as long as they may take.

Only a return is a success. A function that works in a transaction of the framework's takes effect together with the
record of its call, or not at all: `RecordedCall`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox.database.execute import is_lost
from outbox.database.session import JoinedSession, commit, wait_for
from outbox.errors import InvalidHandler
from outbox.message.answer import is_from_outside
from outbox.message.model import HANDLED, Counts
from outbox.telemetry.hooks import Calling, observed

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.calling.function import CalledFunction
    from outbox.database.engines import NewRunner, Runner

T = TypeVar("T")

#: In so many threads of a process one function may hang; then it isn't called, until one of them has ended.
MOST_LEFT_BEHIND = 5


class CallFailed(Exception):
    """A called function didn't succeed; all that it did in the framework's transaction is to be undone."""


class FunctionTimedOut(Exception):
    """A called function took longer than it may, and was given up."""


def call(called: CalledFunction, argument: Any, connection: Connection) -> Any:
    """Call a function in the transaction that runs on a connection, if it takes a session; return what it returned.

    What it sent is handed to the connection, to be written at its commit.

    Raises:
        CallFailed: it has undone or ended the transaction, or returned what is no answer of its kind.
        BaseException: what it raised.
    """
    activity, what = Calling(called.decorator, argument), called.kind.what
    if not called.takes_session:
        return _accepted(called, observed(activity, _call_alone, called, argument))
    joined = JoinedSession(connection, is_async=called.is_async)
    try:
        answer = observed(activity, joined.call, called.function, argument)
        if joined.rolled_back:
            raise CallFailed(f"the {what} rolled its session back; let it raise instead")
        if joined.ended:
            raise CallFailed(f"the {what} ended its transaction; let it return or raise instead")
        _accepted(called, answer)
        joined.finish()
    finally:
        joined.close()
    return answer


def call_with(called: CalledFunction, argument: Any, carrier: Any) -> None:
    """Call a function with a session of the application's own, which commits it.

    Raises:
        InvalidHandler: it is async and the session isn't, or it returned what is no answer of its kind.
        BaseException: what it raised.
    """
    if not called.is_async:
        returned = called.function(argument, getattr(carrier, "sync_session", carrier))
    elif hasattr(carrier, "sync_session"):
        returned = wait_for(called.function(argument, carrier))
    else:
        kind = type(carrier).__name__
        raise InvalidHandler(f"{called.what} is async, so call it with an AsyncSession, not with {kind}")
    if refusal := called.kind.refusal(returned):
        raise InvalidHandler(f"{called.what}: {refusal}")


def _accepted(called: CalledFunction, answer: T) -> T:
    if refusal := called.kind.refusal(answer):
        raise CallFailed(refusal)
    return answer


def _call_alone(called: CalledFunction, argument: Any) -> Any:
    token = HANDLED.set(argument)
    try:
        returned = called.function(argument)
        return wait_for(returned) if called.is_async else returned
    finally:
        HANDLED.reset(token)


@dataclass(slots=True, eq=False)
class RecordedCall(ABC, Generic[T]):
    """One call of a function with a `T`, in one transaction with the record of it, which makes it happen once.

    ``held`` tells that it was begun, ``argument`` is there when the function is called, ``done`` tells that all is
    committed, ``error`` how it failed. None of them: there was nothing to do.
    """

    function: CalledFunction
    held: bool = field(default=False, init=False)
    argument: T | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    error: BaseException | None = field(default=None, init=False)

    @abstractmethod
    def begin(self, connection: Connection) -> T | None:
        """Take the record, so that no other worker calls; return what to call with, None if there is nothing to do."""

    def end(self, connection: Connection, argument: T, answer: Any) -> None:
        """Write what is to be committed with the call."""

    def hold(self, connection: Connection, _: Connection | None = None) -> Counts:
        """Make the call on a connection that isn't in a transaction.

        Raises:
            BaseException: the connection was lost, and with it the answer to the COMMIT; or the process or the task
                ends.
        """
        self.held, transaction = True, connection.begin()
        try:
            self.argument = argument = self.begin(connection)
            if argument is not None:
                self.end(connection, argument, call(self.function, argument, connection))
                commit(connection)
                self.done = True
        except BaseException as error:  # also SystemExit: it ends this call, and not those after it
            if is_lost(connection) or is_from_outside(error):
                raise
            self.error = error
        finally:
            if transaction.is_active:
                transaction.rollback()
        return Counts()


def hangs(called: CalledFunction) -> bool:
    """Tell whether a function that was given up still runs in every thread that it may have."""
    for thread in list(called.left_behind):
        if not thread.is_alive():
            called.left_behind.remove(thread)
    return len(called.left_behind) >= MOST_LEFT_BEHIND


@dataclass(slots=True)
class CallRunners:
    """The connections on which a pass makes calls: one for plain functions, one for async ones, when first needed.

    A function that takes too long takes its connection with it; the next one gets another.
    """

    _new_runner: NewRunner
    _open: dict[bool, Runner] = field(default_factory=dict)

    def make(self, recorded: RecordedCall[Any]) -> BaseException | None:
        """Make a call, in a thread of its own, for as long as its function may take; return how it failed.

        A thread can't be ended from outside. A function that takes longer loses its connection, so that all it did is
        rolled back and it can commit nothing any more; its thread is left behind. A commit that was under way at that
        moment may succeed: the worker that tries again has to find that.
        """
        called = recorded.function
        try:
            if hangs(called):
                raise FunctionTimedOut("it hangs in every thread that it may have")
            if called.is_async not in self._open:
                self._open[called.is_async] = self._new_runner(called.is_async)
            self._run(called, self._open[called.is_async], recorded.hold)
        except Exception as error:  # the connection couldn't be opened, or was lost: what it did is undone
            return error
        return recorded.error

    def _run(self, called: CalledFunction, runner: Runner, hold: Callable[..., Counts]) -> None:
        ended: SimpleQueue[BaseException | None] = SimpleQueue()
        variables = copy_context()

        def work() -> None:
            try:
                variables.run(runner.run, hold)
                ended.put(None)
            except BaseException as raised:  # it is raised where it is waited for
                ended.put(raised)

        name = f"outbox-{called.decorator}-{called.topic}"
        thread = Thread(target=work, name=name, daemon=True)
        thread.start()
        try:
            error = ended.get(timeout=called.timeout)
        except Empty:
            called.left_behind.append(thread)
            runner.end()
            del self._open[called.is_async]
            raise FunctionTimedOut(f"it took longer than {called.timeout:g} s, and was given up") from None
        if error is not None:
            raise error

    def end(self) -> None:
        """Close the connections."""
        for runner in self._open.values():
            runner.end()
