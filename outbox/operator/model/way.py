"""One message with its whole way, over all databases."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from outbox.operator.model.bulk_jobs import AuditRow, BulkJob
from outbox.operator.model.inbox import InboxRow
from outbox.operator.model.messages import Body


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
    bulk_jobs: list[BulkJob]
    timeline: list[Event]
    body: Body | None
    actions: dict[str, list[str]]
    refused: dict[str, str]
    findings: list[dict[str, Any]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
