"""Messages in the inboxes of the consumers, and dead letters by their kind."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from uuid import UUID

from outbox.operator.model.asked import Total


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
    quarantined_by: UUID | None = None


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
