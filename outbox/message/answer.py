"""What called functions may return, declared once for each kind of them, and which exceptions that end them are theirs.

Only a return is a success, and only the return of a value declared here: work that was begun and not awaited, a class
in place of its object, or a value that means nothing tells of a mistake, and its call has failed.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import math
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import CoroutineType
from typing import Any, TypeVar

from outbox.errors import InvalidHandler
from outbox.message.model import Message, Park, Resolution, Retry, Skip, Status, Unavailable
from outbox.text import SEARCHED_CHARS, class_name, shown, storable, summary_of, without

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


# --- what a handler's answer comes to ---------------------------------------------------------------------------------

_MAX_DELAY = 100 * 366 * 86400.0


@dataclass(frozen=True, slots=True)
class HandlerFailure:
    """An attempt whose changes must be undone; ``status`` is where the message goes if nothing else says so.

    ``delay`` in seconds overrides the retry table. ``kind`` is what failures with this cause have in common; made from
    the error if nothing better is known. ``unavailable``: no message would fare better, so it is no attempt;
    then ``delay`` is that before the first trial, and ``pauses`` has an operator decide.
    """

    error: str
    status: Status = Status.FAILED
    delay: float | None = None
    kind: str | None = None
    unavailable: bool = False
    pauses: bool = False

    @property
    def is_answered(self) -> bool:
        """Tell whether it is an answer `Skip` or `Park` (or one that has been given for the handler)."""
        return self.status is not Status.FAILED and self.kind is None

    @property
    def reason(self) -> str:
        """The first line of the error."""
        return self.error.partition("\n")[0]

    def about(self, message: Message | None) -> HandlerFailure:
        """Return it as it may be written down: its error quotes nothing that is masked in the message."""
        if message is None:
            return self
        return replace(self, error=without(self.error[:SEARCHED_CHARS], message.secrets))


def failure_of(answer: Any) -> HandlerFailure | None:
    """Return what a handler's return value says; None is success, and no other value is."""
    if answer is None:
        return None
    if refusal := HANDLER.refusal(answer):
        return HandlerFailure(refusal)
    try:
        if isinstance(answer, Retry | Unavailable):
            return _again(answer)
        return HandlerFailure(storable(answer.reason), Status.PARKED if isinstance(answer, Park) else Status.CONSUMED)
    except Exception as error:  # a class of the application's own, whose attributes aren't there or raise
        mend = "; have its __init__ call that of its base"
        text = f"the handler returned a {class_name(answer)} that can't be read: {summary_of(error)}"
        return HandlerFailure(text + mend)


def failures_of(answer: Any, size: int | None) -> tuple[Sequence[HandlerFailure | None], bool]:
    """Return what the return value of a handler says of each message, and whether it is said of all as a whole.

    ``size`` is the number of messages of a handler that takes a list: it returns None, or an answer for each.
    """
    if size is None or answer is None:
        return [failure_of(answer)] * (size or 1), False
    if isinstance(answer, list | tuple) and len(answer) == size:
        return [failure_of(each) for each in answer], False
    if isinstance(answer, list | tuple):
        wrong = f"the handler returned {len(answer)} answers for {size} messages; return one for each, in their order"
        return [HandlerFailure(wrong)] * size, True
    return [failure_of(answer)] * size, not isinstance(answer, Unavailable)


def _again(answer: Retry | Unavailable) -> HandlerFailure:
    after = answer.after
    seconds = after.total_seconds() if isinstance(after, dt.timedelta) else after
    kind: dict[str, Any] = {}
    if isinstance(answer, Unavailable):
        kind = {"unavailable": True, "pauses": bool(answer.pause)}
    if seconds is None:
        return HandlerFailure(storable(answer.reason), **kind)
    if not isinstance(seconds, int | float) or math.isnan(seconds):
        name = class_name(answer)
        return HandlerFailure(f"the handler returned {name}(after={after!r}); give a timedelta or seconds, or None")
    return HandlerFailure(storable(answer.reason), delay=min(max(float(seconds), 0.0), _MAX_DELAY), **kind)
