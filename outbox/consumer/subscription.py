"""What a consumer declares: one group of one topic, its handler and its rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from outbox.errors import InvalidHandler
from outbox.message.limits import check_group, check_topic

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

Handler = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Subscription:
    """A named consumer of a topic.

    ``batch`` messages share one transaction; with ``takes_batch`` the handler gets the list itself.
    ``ordered`` retries a failing message in place, before any later one of its queue; when its attempts are
    used up it is parked, or keeps its queue blocked (``on_exhausted``). ``tags`` and ``keys`` filter (a key
    pattern may have ``*``); what they leave out has no inbox row. ``start`` says where a new group begins,
    ``on_pruned`` what happens when messages were pruned before the group read them: raise `MessagesPruned` until a
    human has looked, or go on with the oldest that is kept.
    ``threads`` is the number of consuming threads per worker, each with a connection of its own. ``source`` is
    the producer's database; None: the same as the consumer's. ``model`` is the type that bodies are read as.
    ``retry_delays`` (seconds) has one entry for each retry: its length is the number of retries.

    Raises:
        InvalidHandler: a rule that can't work, or a handler that isn't callable with (message, session).
    """

    topic: str
    group: str
    handler: Handler
    retry_delays: tuple[float, ...]
    batch: int = 1
    takes_batch: bool = False
    ordered: bool = False
    on_exhausted: Literal["park", "block"] = "park"
    tags: frozenset[str] | None = None
    keys: tuple[str, ...] | None = None
    start: Literal["first", "now"] = "first"
    on_pruned: Literal["stop", "skip"] = "stop"
    threads: int = 1
    source: Engine | AsyncEngine | str | None = None
    model: Any = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)
        what = f"consumer of {self.topic!r} in group {self.group!r}"
        if not callable(self.handler):
            raise InvalidHandler(f"{what}: the handler {self.handler!r} is not callable")
        try:
            inspect.signature(self.handler).bind("message", "session")
        except TypeError as error:
            raise InvalidHandler(f"{what}: the handler must take (message, session): {error}") from None
        except ValueError:  # a builtin without a signature: the first call will tell
            pass
        if self.batch < 1 or self.threads < 1:
            raise InvalidHandler(f"{what}: batch = {self.batch} and threads = {self.threads} must be at least 1")
        if self.on_exhausted not in {"park", "block"} or self.start not in {"first", "now"}:
            raise InvalidHandler(
                f"{what}: on_exhausted = {self.on_exhausted!r} must be 'park' or 'block', "
                f"start = {self.start!r} must be 'first' or 'now'"
            )
        if self.on_pruned not in {"stop", "skip"}:
            raise InvalidHandler(f"{what}: on_pruned = {self.on_pruned!r} must be 'stop' or 'skip'")
        if self.on_exhausted == "block" and not self.ordered:
            raise InvalidHandler(f"{what}: on_exhausted='block' needs ordered=True")

    @property
    def is_async(self) -> bool:
        """Is the handler a coroutine function?"""
        call = getattr(type(self.handler), "__call__", None)  # noqa: B004 - an object may be the handler
        return inspect.iscoroutinefunction(self.handler) or inspect.iscoroutinefunction(call)

    @property
    def max_attempts(self) -> int:
        """How often a message is tried before it is parked: once, and once for each retry."""
        return 1 + len(self.retry_delays)


def as_filter(values: Collection[str] | None) -> tuple[str, ...] | None:
    """Return declared tags or keys as a tuple; a lone str would be read letter by letter, so it is refused."""
    if values is None:
        return None
    if isinstance(values, str):
        raise InvalidHandler(f"a filter is a collection of str, not the str {values!r}; write {{{values!r}}}")
    return tuple(values)
