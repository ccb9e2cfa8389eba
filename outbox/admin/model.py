"""What `Admin` takes and returns: plain data, which is also what the HTTP endpoints and ``-o json`` show."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from uuid import UUID

T = TypeVar("T")

#: Where a count ends; from there on it means "at least".
COUNT_LIMIT = 10_000
#: The most messages of one operation.
MAX_ITEMS = 100_000
#: The most messages that can be named one by one.
MAX_IDS = 1_000
MAX_PAGE = 500


class Action(enum.StrEnum):
    """What can be done to a message; each is one act, alone or for many at once.

    On the producer's side: ``resend`` (the same id once more), ``recall`` (a scheduled one), ``rollback`` (compensate
    the local transaction), ``check``, ``reset``, ``commit`` and ``abort`` (decide an undecided half). On the
    consumer's, for a group: ``retry``, ``park``, ``discard``, ``restore``.
    """

    RESEND = "resend"
    RECALL = "recall"
    ROLLBACK = "rollback"
    CHECK = "check"
    RESET = "reset"
    COMMIT = "commit"
    ABORT = "abort"
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


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages of the producers; None (or nothing) looks at all.

    ``statuses`` are those of `outbox.messages.MessageStatus`. ``header`` and ``body`` are pairs of a name (of ``body``:
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
class InboxFilter:
    """Which rows of the inboxes. ``statuses``: consumed, failed, parked, rolled_back; ``discarded`` picks among parked.

    ``fingerprint`` is that of a `DeadGroup`, ``error`` a text that the last error must contain.
    """

    database: str | None = None
    statuses: tuple[str, ...] = ()
    group: str | None = None
    topic: str | None = None
    message_id: UUID | None = None
    fingerprint: str | None = None
    error: str | None = None
    attempts_gte: int | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    discarded: bool | None = None


@dataclass(frozen=True, slots=True)
class InboxRow:
    """A message in the inbox of a group; ``last_error`` is its first line in lists, all of it in `MessageView`."""

    database: str
    group: str
    message_id: UUID
    topic: str
    queue: int | None
    position: int | None
    status: str
    attempts: int | None
    next_attempt_at: dt.datetime | None
    error_kind: str | None
    last_error: str | None
    received_at: dt.datetime | None
    changed_at: dt.datetime | None
    discarded_at: dt.datetime | None = None
    fenced_by: UUID | None = None


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Parked messages of one group and topic with one kind of error."""

    fingerprint: str
    database: str
    group: str
    topic: str
    error_kind: str
    count: Total
    first_at: dt.datetime | None
    last_at: dt.datetime | None
    sample: InboxRow


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
    """Which undecided halves; ``status`` is one of `outbox.halves.HalfStatus`."""

    database: str | None = None
    topic: str | None = None
    status: str | None = None
    min_age: float | None = None


@dataclass(frozen=True, slots=True)
class HalfRow:
    """An undecided half in a list; see `outbox.halves.ListedHalf`."""

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


@dataclass(frozen=True, slots=True)
class Event:
    """One step on the way of a message, for its timeline: what happened when, where, by whom."""

    at: dt.datetime
    kind: str
    title: str
    database: str
    detail: str | None = None
    actor: str | None = None


@dataclass(frozen=True, slots=True)
class MessageView:
    """All that the registered databases know of one message.

    ``status`` is that of the producer's side, None where only an inbox knows it. ``next`` says in a sentence what
    happens next. ``version`` changes when anything about it does. ``actions`` maps what can be done now to the groups
    it can be done for (none on the producer's side); ``refused`` maps what can't be done to the reason.
    """

    id: UUID
    database: str | None
    status: str | None
    next: str
    version: str
    half: dict[str, Any] | None
    check: dict[str, Any] | None
    history: list[dict[str, Any]]
    op: dict[str, Any] | None
    sends: list[dict[str, Any]]
    scheduled: dict[str, Any] | None
    compensation: dict[str, Any] | None
    inbox: list[InboxRow]
    audit: list[AuditRow]
    operations: list[OperationRow]
    timeline: list[Event]
    body: Body | None
    actions: dict[str, list[str]]
    refused: dict[str, str]
    findings: list[dict[str, Any]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which audited acts; ``target`` is a message, or what else was acted on."""

    database: str | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Who did what to which target, why, with what result, by which way."""

    database: str
    id: int
    acted_at: dt.datetime
    actor: str
    action: str
    target: str
    reason: str | None
    result: Any
    origin: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Target:
    """One message to act on; ``group`` for acts on an inbox."""

    message_id: UUID
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Selector:
    """What an operation acts on: targets by name, or all that a filter matches. Exactly one of them is given."""

    targets: tuple[Target, ...] | None = None
    messages: MessageFilter | None = None
    inbox: InboxFilter | None = None
    halves: HalfFilter | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What an operation would do. Who starts it gives ``token`` back: it binds selector, action and count."""

    action: Action
    database: str
    matched: Total
    eligible: int
    ineligible: dict[str, int]
    sample: list[Target]
    described: str
    token: str


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation; ``state`` is waiting, running, done, partly (some failed or were skipped), or cancelled."""

    database: str
    id: UUID
    action: str
    state: str
    requested_by: str
    reason: str
    described: str
    options: dict[str, Any]
    rate: float | None
    total: int
    done: int
    skipped: int
    failed: int
    cancelled: int
    pending: int
    created_at: dt.datetime
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    cancelled_at: dt.datetime | None
    cancelled_by: str | None


@dataclass(frozen=True, slots=True)
class OperationItem:
    """One item of an operation, and what became of it."""

    number: int
    action: str
    message_id: UUID
    topic: str | None
    group: str | None
    state: str
    outcome: str | None
    attempts: int
    changed_at: dt.datetime


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
