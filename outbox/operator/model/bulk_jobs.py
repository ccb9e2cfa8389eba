"""Bulk jobs, what they act on, and the audit."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from outbox.operator.model.asked import Action, Total
from outbox.operator.model.inbox import InboxFilter
from outbox.operator.model.messages import HalfFilter, MessageFilter


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
    """What a bulk job acts on: targets by name, or all that a filter matches. Exactly one of them is given."""

    targets: tuple[Target, ...] | None = None
    messages: MessageFilter | None = None
    inbox: InboxFilter | None = None
    halves: HalfFilter | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What a bulk job would do. Who starts it gives ``token`` back: it binds selector, action and count."""

    action: Action
    database: str
    matched: Total
    eligible: int
    ineligible: dict[str, int]
    sample: list[Target]
    described: str
    token: str


@dataclass(frozen=True, slots=True)
class BulkJob:
    """A bulk job; ``state`` is waiting, running, done, partly (some failed or were skipped), or cancelled."""

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
class BulkItem:
    """One item of a bulk job, and what became of it."""

    number: int
    action: str
    message_id: UUID
    topic: str | None
    group: str | None
    state: str
    outcome: str | None
    attempts: int
    changed_at: dt.datetime
