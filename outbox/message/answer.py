"""What called functions may return, declared once for each kind of them, and which exceptions that end them are theirs.

Only a return is a success, and only the return of a value declared here: work that was begun and not awaited, a class
in place of its object, or a value that means nothing tells of a mistake, and its call has failed.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, TypeVar

from outbox.errors import InvalidHandler
from outbox.message.model import Park, Resolution, Retry, Skip, Unavailable
from outbox.text import class_name, shown

T = TypeVar("T")
_NO_TYPE = type(None)
_ANSWERS = (Retry, Park, Skip, Unavailable)
#: The texts about work that never ran, and about other things returned by mistake.
_NEVER_RAN = (
    ((Generator, AsyncGenerator), "a generator, which never ran: let it do its work without 'yield'"),
    ((CoroutineType,), "a coroutine: declare it with 'async def', and await what it calls"),
    ((Awaitable,), "a {}, which nothing waits for: declare it with 'async def', and await that"),
)
_MISTAKES = (
    *_NEVER_RAN,
    ((type,), "the class {}: return an object of it, such as Retry(reason=…)"),
    ((BaseException,), "an exception of type {}: let it raise that"),
    (_ANSWERS, "a {}, which only handlers may; let it raise to be tried again"),
)


def unfinished(returned: object, among: Iterable[tuple[tuple[type, ...], str]] = _NEVER_RAN) -> str | None:
    """Return the text about work that was returned and never ran; None of all else. A coroutine is closed."""
    coroutine: Any = returned
    if type(returned) is CoroutineType and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        coroutine.close()  # or Python warns that it was never awaited
    # Its own type is asked: a value may lie about its class, or fail where it is asked.
    return next((text.format(class_name(returned)) for kinds, text in among if issubclass(type(returned), kinds)), None)


def finished(what: str, returned: T) -> T:
    """Return what a function has returned that may return any value.

    Raises:
        InvalidHandler: it is work that never ran.
    """
    if (why := unfinished(returned)) is not None:
        raise InvalidHandler(f"{what} returned {why}")
    return returned


@dataclass(frozen=True, slots=True)
class CalledKind:
    """A kind of called functions: what one is called in errors, and the types of what it may return.

    With ``records`` it may return any other value, too, that isn't there by mistake. ``expects`` names the answers.
    """

    what: str
    expects: str = "None, the only thing that it may return; let it raise where it has failed"
    types: tuple[type, ...] = (_NO_TYPE,)
    records: bool = False

    def refusal(self, returned: object) -> str | None:
        """Return why a returned value is no answer of such a function, and the mend; None if it is one."""
        if issubclass(type(returned), self.types):
            return None
        if (why := unfinished(returned, _MISTAKES)) is None:
            if self.records:
                return None
            value = shown(returned) if self is CHECKER else f"a value of type {class_name(returned)}"
            why = f"{value}, which is not {self.expects}"
        return f"the {self.what} returned {why}"


HANDLER = CalledKind(
    "handler", "an answer: return None, Retry(…), Park(…), Skip(…) or Unavailable(…)", (_NO_TYPE, *_ANSWERS)
)
CHECKER = CalledKind("checker", "a Resolution", (Resolution,))
COMPENSATION = CalledKind("compensation", records=True)
CALLBACK = CalledKind("callback")
SCHEDULED = CalledKind("schedule's function", records=True)
FUNCTION = CalledKind("function")


def is_from_outside(error: BaseException) -> bool:
    """Tell whether an exception came to a called function from outside, rather than from its own code.

    Python raises KeyboardInterrupt in the main thread, whatever runs there; a cancelled task gets CancelledError where
    it waits, and a coroutine that is closed GeneratorExit: it belongs to no task any more.
    """
    kind, task = type(error), None
    if issubclass(kind, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    with suppress(RuntimeError):  # no event loop runs in this thread
        task = asyncio.current_task()
    if issubclass(kind, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    greenlet = sys.modules.get("greenlet")  # async functions run in one
    inside = greenlet is not None and greenlet.getcurrent().parent is not None
    return issubclass(kind, GeneratorExit) and inside and task is None
