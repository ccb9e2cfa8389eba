"""What every list and act takes: an action and its actor, pages and counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

#: Where a count ends; from there on it means "at least".
COUNT_LIMIT = 10_000
#: The most messages of one bulk job.
MAX_ITEMS = 100_000
#: The most messages that can be named one by one.
MAX_IDS = 1_000
MAX_PAGE = 500


class Action(enum.StrEnum):
    """What can be done to a message; each is one act, alone or for many at once.

    On the producer's side: ``resend`` (the same id once more), ``recall`` (a scheduled one), ``compensate`` (undo
    the local transaction), ``check``, ``reset``, ``commit`` and ``rollback`` (decide an undecided half). On the
    consumer's, for a group: ``retry``, ``park``, ``discard``, ``restore``.
    """

    RESEND = "resend"
    RECALL = "recall"
    COMPENSATE = "compensate"
    CHECK = "check"
    RESET = "reset"
    COMMIT = "commit"
    ROLLBACK = "rollback"
    RETRY = "retry"
    PARK = "park"
    DISCARD = "discard"
    RESTORE = "restore"

    @property
    def part(self) -> Literal["producer", "consumer"]:
        """The side whose database it is done in."""
        return "consumer" if self in {Action.RETRY, Action.PARK, Action.DISCARD, Action.RESTORE} else "producer"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who does it, and by which way: ``origin`` has ``via`` (console, cli), and what else is known (ip, request_id)."""

    name: str
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Total:
    """How many there are: ``value`` exactly (``eq``), or at least (``gte``)."""

    value: int
    relation: Literal["eq", "gte"] = "eq"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which page of a list: after the ``token`` of the page before; ``size`` 1 to 500."""

    size: int = 50
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list.

    ``next_page_token`` is None at the end. ``complete`` is False where the search stopped at its limit before the page
    was full: going on may find more. ``total`` is None where it isn't known cheaply.
    """

    items: list[T]
    next_page_token: str | None = None
    total: Total | None = None
    complete: bool = True
    searched: int | None = None
