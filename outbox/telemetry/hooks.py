"""What an event is, and the one place where one is told: its record in the log, and the hooks.

Those that there are: `outbox.telemetry.events`. An error in a hook breaks nothing. Three kinds of hooks, all of the
whole process, as loggers are:

- a `Hook` gets each `TelemetryEvent` after the COMMIT that made it true, and `HalfDeciding` before a decision's;
- an `Observer` is around each call of the application's functions: handlers, checkers, compensations;
- a `SendHook` sees each message when it is sent, and may add headers.

A `Middleware` is all three, for what one `Outbox` does. Workers say for which one they work (`work_for`).

They run in the thread of whatever they are told, so they must not block. What succeeds all the time is told only while
there is a hook: a batch of messages costs nothing more where nothing listens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, dataclass_transform
from uuid import UUID

from outbox.message.answer import CalledKind, is_from_outside
from outbox.text import fields_of, shown, tellable

if TYPE_CHECKING:
    from outbox.message.model import HalfMessage, Message, Orphan


E = TypeVar("E", bound="TelemetryEvent")
T = TypeVar("T")
H = TypeVar("H")

logger: logging.Logger = logging.getLogger("outbox.telemetry")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryEvent:
    """Something that happened; ``code`` names its kind, ``area`` is the end of its logger's name.

    ``text`` is the sentence of its record, a format of `facts`. ``usual_level`` is that of `logging`.
    """

    code: ClassVar[str]
    area: ClassVar[str]
    usual_level: ClassVar[int]
    text: ClassVar[str]

    error: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def level(self) -> int:
        """The level of its record. An outage is one line in the log, not one for each try: then it is ``repeated``."""
        return logging.DEBUG if getattr(self, "repeated", False) else self.usual_level

    @property
    def shows_traceback(self) -> bool:
        """Does its record show the traceback? Repetitions of one outage don't."""
        return self.error is not None and not getattr(self, "repeated", False)

    def facts(self) -> dict[str, Any]:
        """Return its fields but for the error, with ids as texts: what its record and JSON hold."""
        return {name: _plain(value) for name, value in fields_of(self).items() if name != "error"}


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


@dataclass_transform(kw_only_default=True, frozen_default=True)
def event(code: str, area: str, level: int, text: str) -> Callable[[type[E]], type[E]]:
    """Declare an event: a frozen dataclass, whose fields are given by name."""

    def declare(kind: type[E]) -> type[E]:
        declared = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        declared.code, declared.area, declared.usual_level, declared.text = code, area, level, text
        return declared

    return declare


# --- hooks ---------------------------------------------------------------------------------------------------------


class Hook(Protocol):
    """Gets each event."""

    def __call__(self, event: TelemetryEvent, /) -> None:
        """Take note of an event; whatever it raises is logged, and goes no further."""


@dataclass(slots=True)
class Handling:
    """A call of a handler: with one message, or with the list. ``answer`` is there when it has returned."""

    group: str
    topic: str
    queue: int
    messages: Sequence[Message]
    answer: Any = None


@dataclass(slots=True)
class Calling:
    """A call of a checker, a compensation or a callback, which ``decorator`` of the `Outbox` has declared."""

    decorator: str
    argument: Orphan | Message
    answer: Any = None


Activity = Handling | Calling


class Observer(Protocol):
    """Is around calls of the application's functions."""

    def __call__(self, activity: Activity, /) -> AbstractContextManager[object]:
        """Return a context that is entered before the call, and left after it with its exception, if any."""


@dataclass(frozen=True, slots=True)
class Sending:
    """What a `SendHook` adds to a message: headers, and a function to call once its transaction has committed.

    A driver's own connection doesn't tell of its COMMIT: then it is called when the message is written.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    committed: Callable[[], None] | None = None


class SendHook(Protocol):
    """Sees each message when it is sent or prepared."""

    def __call__(self, half: HalfMessage, /) -> Sending | None:
        """Return what to add. The message may yet be rolled back: then ``committed`` is never called."""


class Middleware:
    """What an application puts around all that one `Outbox` sends and handles (`Outbox.use`): override what you need.

    The methods are called in the thread of whatever they are about, so they must not block. What they raise is logged,
    and goes no further: no message is lost or delayed by it, and none is handled twice.
    """

    def on_send(self, half: HalfMessage, /) -> Sending | None:
        """See a message when it is sent or prepared; return what to add to it, as a `SendHook`."""

    def around(self, activity: Activity, /) -> AbstractContextManager[object]:  # noqa: ARG002 - for classes that override it
        """Return a context around the call of a handler, or of another function of the application's.

        As an `Observer`: it sees what the function returns and raises, and can't change that. It may be a generator
        with `contextlib.contextmanager`.
        """
        return nullcontext()

    def on_event(self, event: TelemetryEvent, /) -> None:
        """Take note of an event, as a `Hook`: of what a worker does for this Outbox, or of its sends."""


class Registry(Generic[H]):
    """Hooks of one kind, in the order in which they were added."""

    def __init__(self) -> None:
        self.hooks: tuple[H, ...] = ()
        self._guard = threading.Lock()

    def add(self, hook: H) -> Callable[[], None]:
        """Add one; return the function that takes it away."""
        with self._guard:
            self.hooks = (*self.hooks, hook)
        return lambda: self._remove(hook)

    def _remove(self, hook: H) -> None:
        with self._guard:
            self.hooks = tuple(each for each in self.hooks if each is not hook)


# Code that tells of success, or is on a message's way, first looks whether there are any: ``listeners.hooks``.
listeners: Registry[Hook] = Registry()
observers: Registry[Observer] = Registry()
send_hooks: Registry[SendHook] = Registry()
#: The middlewares of the Outbox that the calling code works for; looked at like ``listeners.hooks``.
middlewares_here: ContextVar[tuple[Middleware, ...]] = ContextVar("outbox_middlewares", default=())
#: Hooks whose last call failed: a hook that fails with each message is one line in the log.
_failing: set[tuple[int, str]] = set()


def add_hook(hook: Hook) -> Callable[[], None]:
    """Have a hook told of all events from now on; return the function that ends it."""
    return listeners.add(hook)


def add_observer(observer: Observer) -> Callable[[], None]:
    """Have an observer around all calls from now on; return the function that ends it."""
    return observers.add(observer)


def add_send_hook(hook: SendHook) -> Callable[[], None]:
    """Have a hook see all messages that are sent from now on; return the function that ends it."""
    return send_hooks.add(hook)


@contextmanager
def work_for(middlewares: Registry[Middleware]) -> Iterator[None]:
    """Have the middlewares that an Outbox uses see what happens in a with block, instead of another Outbox's."""
    token = middlewares_here.set(middlewares.hooks)
    try:
        yield
    finally:
        middlewares_here.reset(token)


def emit(event: TelemetryEvent) -> None:
    """Tell an event: one record, then the hooks, then the middlewares. Raise nothing of theirs."""
    _guarded(record, record, event)  # filters and factories of records are the application's
    for hook in listeners.hooks:
        _guarded(hook, hook, event)
    for middleware in middlewares_here.get():
        _guarded(middleware, middleware.on_event, event)


def record(event: TelemetryEvent) -> None:
    """Write an event's record: ``outbox_event`` is its code, and each of its facts an attribute."""
    log = logging.getLogger(f"outbox.{event.area}")
    if log.isEnabledFor(event.level):
        facts, error = event.facts(), event.error if event.shows_traceback else None
        error = error and tellable(error)
        extra = facts | {"outbox_event": event.code}
        # An empty dict would count as an argument that the text has no place for.
        arguments = (facts,) if facts else ()
        log.log(event.level, event.text, *arguments, exc_info=error, extra=extra, stacklevel=4)


def sending(half: HalfMessage, middlewares: Registry[Middleware]) -> list[Sending]:
    """Return what the send hooks, and the middlewares of its Outbox, add to a message."""
    added = [_guarded(hook, hook, half, kind=_SENDS) for hook in send_hooks.hooks]
    added += [_guarded(middleware, middleware.on_send, half, kind=_SENDS) for middleware in middlewares.hooks]
    return [each for each in added if each is not None]


def committed(added: Sequence[Sending]) -> None:
    """Call the functions that wait for the COMMIT."""
    for each in added:
        if each.committed is not None:
            _guarded(each.committed, each.committed)


def observed(activity: Activity, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of the application's with all observers around it; return what it returns, raise what it raises.

    An observer can't swallow what the function raises. Those of the process are outermost, then each in its order.
    """
    around: list[tuple[object, Observer]] = [(observer, observer) for observer in observers.hooks]
    around += [(middleware, middleware.around) for middleware in middlewares_here.get()]
    entered = []
    for observer, enter in around:
        manager = _guarded(observer, _enter, enter, activity, kind=_OBSERVES)
        if manager is not None:
            entered.append((observer, manager))
    raised: BaseException | None = None
    try:
        activity.answer = answer = function(*arguments)
    except BaseException as error:
        raised = error
        raise
    finally:
        for observer, manager in reversed(entered):
            trace = None if raised is None else raised.__traceback__
            kind = None if raised is None else type(raised)
            _guarded(observer, manager.__exit__, kind, raised, trace, kind=_OBSERVES)
    return answer


def _enter(observer: Observer, activity: Activity) -> AbstractContextManager[object]:
    manager = observer(activity)
    if refusal := _OBSERVES.refusal(manager):
        raise TypeError(refusal)
    manager.__enter__()
    return manager


_HOOK, _OBSERVES = CalledKind("hook"), CalledKind("observer", records=True)
_SENDS = CalledKind("hook", "a Sending or None", (type(None), Sending))


def _guarded(hook: object, function: Callable[..., T], *arguments: Any, kind: CalledKind = _HOOK) -> T | None:
    """Call a hook's function; that it raises, or returns what it may not, is logged once in a row of failures."""
    # Entering an observer may succeed while leaving it fails.
    key = id(hook), getattr(function, "__name__", "")
    try:
        result = function(*arguments)
        if result is not None and (refusal := kind.refusal(result)):
            raise TypeError(refusal)
    except BaseException as error:  # also SystemExit: what a hook does ends nothing else
        if is_from_outside(error):
            raise
        _failed(hook, key, error)
        return None
    if _failing:
        _failing.discard(key)
    return result


def _failed(hook: object, key: tuple[int, str], error: BaseException) -> None:
    level, extra = logging.DEBUG if key in _failing else logging.ERROR, {"outbox_event": "hook.failed"}
    _failing.add(key)
    with suppress(Exception):  # the log itself may be what fails: then there is nothing left that could tell it
        text = "a hook failed, and will be called again: %s"
        logger.log(level, text, shown(hook), exc_info=tellable(error), extra=extra)
