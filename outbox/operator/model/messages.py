"""Messages of the producers: in lists, undecided, and scheduled."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages of the producers; None (or nothing) looks at all.

    ``statuses`` are those of `MessageStatus`. ``header`` and ``body`` are pairs of a name (of ``body``:
    a path like ``order.id``) and the text that it must equal. ``since`` and ``until`` go by ``born_at``.
    """

    database: str | None = None
    statuses: tuple[str, ...] = ()
    topic: str | None = None
    key: str | None = None
    tag: str | None = None
    producer_group: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    header: tuple[str, str] | None = None
    body: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in a list."""

    database: str
    id: UUID
    topic: str
    key: str | None
    tag: str | None
    status: str
    born_at: dt.datetime
    deliver_at: dt.datetime | None
    decided_by: str | None
    decided_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a message as it may be shown.

    ``text`` is None for what is no text, or hidden; ``masked`` names the paths whose values were masked; ``truncated``
    tells that there is more.
    """

    content_type: str
    size: int
    text: str | None
    masked: tuple[str, ...] = ()
    truncated: bool = False
    revealed: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledFilter:
    """Which scheduled messages."""

    database: str | None = None
    topic: str | None = None
    recalled: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A message that waits for its time, or was recalled."""

    database: str
    id: UUID
    topic: str
    key: str | None
    deliver_at: dt.datetime
    recalled_at: dt.datetime | None
    recalled_by: str | None


@dataclass(frozen=True, slots=True)
class HalfFilter:
    """Which undecided halves; ``status`` is one of `outbox.operator.old_halves.HalfStatus`."""

    database: str | None = None
    topic: str | None = None
    status: str | None = None
    min_age: float | None = None


@dataclass(frozen=True, slots=True)
class HalfRow:
    """An undecided half in a list; see `outbox.operator.old_halves.ListedHalf`."""

    database: str
    id: UUID
    topic: str
    key: str | None
    status: str
    born_at: dt.datetime | None
    age: float | None
    fenced: bool
    checks: int
    being_asked: bool
    last_answer: str | None
    last_error: str | None
    checked_at: dt.datetime | None
    next_check_at: dt.datetime
    parked_at: dt.datetime | None
    reason: str | None
