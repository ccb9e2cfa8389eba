"""How things stand: workers, handlers, backlog and lag, databases."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as it was last seen; ``alive`` if that was within three of its reports. ``duties`` by name: health."""

    database: str
    id: UUID
    name: str
    version: str
    roles: list[str]
    started_at: dt.datetime
    seen_at: dt.datetime
    alive: bool
    duties: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HandlerRow:
    """What is registered for a topic on the living workers: a ``kind`` of consumer, checker or compensation."""

    database: str
    kind: str
    topic: str
    name: str
    group: str | None
    options: dict[str, Any]
    workers: list[str]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a human, in a sentence; ``page`` and ``query`` say where it is seen."""

    severity: Literal["problem", "warning"]
    text: str
    page: str
    query: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, for a chart: one for each of ``times``, None where nothing is known."""

    name: str
    unit: str
    times: list[dt.datetime]
    values: list[float | None]


@dataclass(frozen=True, slots=True)
class TopicLag:
    """A topic's backlog on the producer's side, and the lag of each of its groups."""

    database: str
    topic: str
    queues: int
    messages: int
    undecided: int
    parked_halves: int
    undispatched: int
    oldest_undispatched: float | None
    scheduled: int
    groups: list[GroupLag]


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group has come; ``lag`` is None where the producer's database isn't registered."""

    database: str
    group: str
    topic: str
    consumed: int
    lag: int | None
    failed: int
    oldest_due: float | None
    parked: int


@dataclass(frozen=True, slots=True)
class Overview:
    """How things stand; ``tiles`` by name, a count that stopped at its limit is in ``capped``."""

    at: dt.datetime
    tiles: dict[str, float | None]
    capped: list[str]
    problems: list[Problem]
    topics: list[TopicLag]
    series: list[Series]
    workers: list[WorkerRow]
    unseen: list[str]


@dataclass(frozen=True, slots=True)
class TableSize:
    """One table of ours."""

    name: str
    rows: int
    bytes: int
    dead_rows: int
    vacuumed_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class DatabaseView:
    """One registered database, for the system page; the URL has no password."""

    name: str
    url: str
    parts: list[str]
    server_version: str | None
    revisions: dict[str, str | None]
    code_revisions: dict[str, str]
    oldest_transaction: float | None
    tables: list[TableSize]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class System:
    """What the console runs on."""

    version: str
    databases: list[DatabaseView]
    settings: dict[str, Any]
