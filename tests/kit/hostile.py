"""What called functions raise and return when they are at their worst: for tests of all that calls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

from greenlet import GreenletExit

from outbox import Park, Retry


class Refused(Exception):
    """The base of exceptions that break what describes them."""


def _broken(*_: object) -> NoReturn:
    raise LookupError("the exception's own code")


def _with(**attributes: Any) -> Callable[[], BaseException]:
    """Return what makes an exception of a class with these attributes."""
    kind: Any = type("Batch", (Refused,), attributes)
    return lambda: kind("refused")


class _Endless(Refused):
    """Another one behind each."""

    __cause__ = property(lambda _: _Endless("behind"))


class _Unnamed(type):
    """A class that doesn't say what it is called."""

    def __getattribute__(cls, name: str) -> Any:
        return _broken() if name in {"__name__", "__qualname__", "__module__"} else super().__getattribute__(name)


class _Anonymous(Refused, metaclass=_Unnamed):
    """One of such a class."""


def _deep() -> BaseException:
    """Return one behind which there are thousands."""
    error: BaseException = ValueError("the first")
    for number in range(3000):
        error, before = ValueError(f"number {number}"), error
        error.__context__ = before
    return error


def _leaves(error: type[BaseException]) -> Callable[[], BaseException]:
    return lambda: error("leave")


#: Exceptions of classes that are no help.
HOSTILE: dict[str, Callable[[], BaseException]] = {
    "a dict of exceptions": _with(exceptions={1: "refused"}),
    "no exceptions": _with(exceptions=None),
    "texts for exceptions": _with(exceptions=["refused", "too"]),
    "exceptions that raise": _with(exceptions=property(_broken)),
    "a cause that raises": _with(__cause__=property(_broken)),
    "a cause without an end": lambda: _Endless("first"),
    "a context that raises": _with(__context__=property(_broken)),
    "a traceback that raises": _with(__traceback__=property(_broken)),
    "notes that raise": _with(__notes__=property(_broken)),
    "notes that are none": _with(__notes__=7),
    "a text that raises": _with(__str__=_broken, __repr__=_broken),
    "a text that is none": _with(__str__=lambda _: 7),
    "a text that exits": _with(__str__=lambda _: (_ for _ in ()).throw(SystemExit(1))),
    "a text of its own": _with(__str__=lambda _: "a\0b\ud800"),
    "a class that raises": _with(__class__=property(_broken)),
    "a class without a name": lambda: _Anonymous("refused"),
    "a module that is none": _with(__module__=7),
    "no attribute at all": _with(__getattribute__=_broken),
    "attributes that raise": _with(__getattr__=_broken),
    "an origin that raises": _with(orig=property(_broken), sqlstate=property(_broken)),
    "a group of them": lambda: BaseExceptionGroup("many", [_with(__cause__=property(_broken))(), SystemExit(1)]),
    "deep": _deep,
}

#: What ends more than a call, if it is let.
LEAVING: dict[str, Callable[[], BaseException]] = {
    kind.__name__: _leaves(kind)
    for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, GreenletExit, StopIteration)
}


async def _coroutine() -> None:
    raise AssertionError("nothing awaits it")


def _generator() -> Iterator[None]:
    yield


async def _asynchronous() -> AsyncIterator[None]:
    yield


class _Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


class _Unshown:
    """What can't be shown, or asked what it is."""

    __class__ = property(_broken)
    __repr__ = _broken


#: What functions return by mistake, and what is said of it.
NO_ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "coroutine": (_coroutine, "returned a coroutine: declare it with 'async def'"),
    "generator": (_generator, "returned a generator, which never ran: let it do its work without 'yield'"),
    "async generator": (_asynchronous, "returned a generator, which never ran"),
    "awaitable": (_Awaitable, "returned a _Awaitable, which nothing waits for"),
    "class Retry": (lambda: Retry, "returned the class Retry: return an object of it"),
    "class Park": (lambda: Park, "returned the class Park: return an object of it"),
    "exception": (lambda: ValueError("no"), "returned an exception of type ValueError: let it raise that"),
    "class of exceptions": (lambda: ValueError, "returned the class ValueError: return an object of it"),
}
#: What a compensation may return, to be recorded; and others may not.
VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "True": (lambda: True, "returned a value of type bool, which is not"),
    "False": (lambda: False, "returned a value of type bool, which is not"),
    "text": (lambda: "done", "returned a value of type str, which is not"),
    "dict": (lambda: {"ok": True}, "returned a value of type dict, which is not"),
    "unshown": (_Unshown, "returned a value of type _Unshown, which is not"),
}
