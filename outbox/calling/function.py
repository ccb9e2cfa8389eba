"""Functions of the application that the framework calls: one declaration of them all, and one registry.

A kind of functions is a class below `CalledFunction`, in the folder of the duty that calls it: what it takes, what it
may return, and its own options. An `Outbox` keeps all that were declared in one `CalledFunctions`. The module
`outbox.calling.engine` calls them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, ClassVar, Self, TypeVar

from outbox.errors import InvalidHandler
from outbox.message.answer import CalledKind
from outbox.message.content import Codecs, check_seconds, check_topic
from outbox.settings import Settings
from outbox.text import function_name

C = TypeVar("C")

#: The options that are lengths of time: timedeltas, or seconds.
_DURATIONS = frozenset({"after", "immunity", "interval", "timeout"})


def check_function(what: str, function: Callable[..., Any], *forms: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first of these forms of arguments that a function of the application's can be called with.

    Raises:
        InvalidHandler: it can't be called with any of them.
    """
    if not callable(function):
        raise InvalidHandler(f"{what} {function!r} is not callable")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: the first call will tell
        return forms[-1]
    why = ""
    for form in forms:
        try:
            signature.bind(*form)
        except TypeError as error:
            why = why or str(error)
        else:
            return form
    possible = " or ".join(f"({', '.join(form)})" for form in forms)
    raise InvalidHandler(f"{what} must take {possible}: {why}")


def is_async(function: Callable[..., Any]) -> bool:
    """Is it a coroutine function, or an object that is called like one?"""
    call = getattr(type(function), "__call__", None)  # noqa: B004 - an object may be the function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A function of the application that the framework calls, as it was declared for a topic.

    ``function`` is sync or async; it takes a session if it has a parameter for one. ``model`` is the type that bodies
    are read as, ``codecs`` read those of other content types. ``timeout`` is how long (seconds) a call may take; None:
    as long as it wants. ``beside`` are all functions of its application. ``left_behind`` are the threads of this
    process in which it took longer.

    A class below says in ``decorator`` what of the `Outbox` declares it, in ``kind`` what it may return, in ``forms``
    what it may be called with, and in ``settings`` which option has its default from which setting.

    Raises:
        InvalidHandler: the function can't be called so, or an option can't work.
        InvalidMessage: the topic isn't a name.
    """

    decorator: ClassVar[str]
    kind: ClassVar[CalledKind]
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("message", "session"),)
    settings: ClassVar[Mapping[str, str]] = {}
    #: How a second function is declared beside the first.
    mend: ClassVar[str] = ""

    topic: str
    function: Callable[..., Any]
    model: Any = None
    codecs: Codecs = field(default_factory=Codecs, repr=False)
    timeout: float | None = None
    beside: CalledFunctions | None = field(default=None, repr=False, compare=False)
    is_async: bool = field(init=False)
    takes_session: bool = field(init=False)
    left_behind: list[Thread] = field(init=False, default_factory=list, repr=False, compare=False)

    @classmethod
    def declare(
        cls, settings: Settings, topic: str, function: Callable[..., Any], model: Any, codecs: Codecs, **options: Any
    ) -> Self:
        """Return it with options as users write them; those that are None are as the settings have them.

        Raises:
            InvalidHandler: as the class.
            InvalidMessage: as the class; or a duration isn't one.
        """
        values = {name: getattr(settings, setting) for name, setting in cls.settings.items()}
        for name, value in options.items():
            if value is not None or name not in cls.settings:
                values[name] = check_seconds(name, value) if name in _DURATIONS and value is not None else value
        declared = cls(topic, function, model, codecs, **values)
        declared.check_with(settings)
        return declared

    def __post_init__(self) -> None:
        self.check_topic()
        form = check_function(f"{self.what}: the {self.kind.what}", self.function, *self.possible())
        object.__setattr__(self, "takes_session", form[-1] == "session")
        object.__setattr__(self, "is_async", is_async(self.function))
        self.check()
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidHandler(f"{self.what}: timeout = {self.timeout!r} must be greater than 0 (seconds)")

    def possible(self) -> tuple[tuple[str, ...], ...]:
        """Return the forms of arguments with which it may be called."""
        return self.forms

    def check_topic(self) -> None:
        """Raise InvalidMessage if its topic isn't a name."""
        check_topic(self.topic)

    def check(self) -> None:
        """Raise InvalidHandler if an option of its own can't work."""

    def check_with(self, settings: Settings) -> None:
        """Raise InvalidHandler if it can't work with these settings."""

    @property
    def what(self) -> str:
        """What it is called in texts: its decorator, and what it is declared for."""
        return f"{self.decorator} of {self.topic!r}"

    @property
    def key(self) -> Hashable:
        """What there is one function of its kind for."""
        return self.topic

    @property
    def name(self) -> str:
        """What the function is called."""
        return function_name(self.function)


class CalledFunctions:
    """The functions that an application has declared, by their kinds; `Outbox` and its tenants share one."""

    def __init__(self) -> None:
        self._by_kind: dict[type[Any], dict[Any, Any]] = {}

    def of(self, kind: type[C]) -> dict[Any, C]:
        """Return those of a kind by their keys, which those declared later join."""
        return self._by_kind.setdefault(kind, {})

    def add(self, declared: CalledFunction) -> None:
        """Keep a function.

        Raises:
            InvalidHandler: there is one of its kind and key already.
        """
        functions = self.of(type(declared))
        if (earlier := functions.get(declared.key)) is not None:
            raise InvalidHandler(f"{declared.what} is declared already: {earlier.name}{declared.mend}")
        functions[declared.key] = declared

    def __iter__(self) -> Iterator[CalledFunction]:
        for functions in list(self._by_kind.values()):
            yield from list(functions.values())
