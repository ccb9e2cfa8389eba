"""What a compensation declares: how the local transaction behind a message of a topic is undone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.errors import InvalidHandler
from outbox.message.content import check_topic

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine


@dataclass(frozen=True, slots=True)
class Compensation:
    """The compensation of a topic.

    ``function(message, session)``, sync or async, undoes in the session's transaction what was done when the message
    was sent. ``consumers`` are the databases, beside the producer's own, in which groups consume the topic. ``model``
    is the type that bodies are read as.

    Raises:
        InvalidHandler: a function that can't be called so, or consumers that are none.
        InvalidMessage: the topic isn't a name.
    """

    topic: str
    function: Callable[..., Any]
    model: Any = None
    # A URL may hold a password.
    consumers: tuple[Engine | AsyncEngine | str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_topic(self.topic)
        what = f"compensation of {self.topic!r}"
        if not callable(self.function):
            raise InvalidHandler(f"{what}: {self.function!r} is not callable")
        try:
            inspect.signature(self.function).bind("message", "session")
        except TypeError as error:
            raise InvalidHandler(f"{what}: {self.name} must take (message, session): {error}") from None
        except ValueError:  # a builtin without a signature: the first call will tell
            pass
        for number, consumer in enumerate(self.consumers, 1):
            _check_database(f"{what}: number {number} of consumers", consumer)

    @property
    def name(self) -> str:
        """What the function is called."""
        module = getattr(self.function, "__module__", None)
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{module}.{name}" if module else name

    @property
    def is_async(self) -> bool:
        """Is the function a coroutine function?"""
        call = getattr(type(self.function), "__call__", None)  # noqa: B004 - an object may be the function
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


def as_databases(
    topic: str, consumers: Collection[Engine | AsyncEngine | str]
) -> tuple[Engine | AsyncEngine | str, ...]:
    """Return declared databases as a tuple; a lone one is refused, as a URL would be read letter by letter."""
    if isinstance(consumers, str) or not isinstance(consumers, Collection):
        raise InvalidHandler(f"compensation of {topic!r}: consumers is a collection of databases; write [database]")
    return tuple(consumers)


def _check_database(what: str, given: object) -> None:
    from sqlalchemy import Engine, make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    if isinstance(given, str):
        try:
            make_url(given)
        except ArgumentError:
            raise InvalidHandler(f"{what} is no URL of a database; write postgresql://user@host/database") from None
        return
    # An AsyncEngine has one inside; asking its class would import what may not be installed.
    if not isinstance(getattr(given, "sync_engine", given), Engine):
        raise InvalidHandler(f"{what} must be an engine, an async engine or a URL, not {type(given).__name__}")
