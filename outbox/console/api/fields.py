"""The filters of lists, as queries and as parts of bodies. Unknown fields are refused, not ignored.

Conditions of requests: entity tags, and keys that make a repeated order the same order.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated
from uuid import UUID

from fastapi import Header
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from outbox.console.permissions import Principal
from outbox.errors import InvalidRequest
from outbox.message.model import Status
from outbox.operator.acts import ACTS, act_named
from outbox.operator.model import (
    MAX_PAGE,
    AuditFilter,
    BulkItemState,
    BulkJobState,
    HalfFilter,
    HalfStatus,
    InboxFilter,
    MessageFilter,
    MessageStatus,
    PageRequest,
    ScheduledFilter,
)

PREFIX = "/api/v1"

#: What PostgreSQL can store and nobody needs more of.
Text = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00]*$")]
Reason = Annotated[str, StringConstraints(max_length=2000, pattern=r"^[^\x00]*$")]
#: ``name=value``; what must be equal.
Pair = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00=]+=[^\x00]*$")]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Token = Annotated[str, StringConstraints(max_length=4000)]


#: The name of an act.
ActName = Annotated[
    str,
    AfterValidator(lambda name: act_named(name).name),
    WithJsonSchema({"type": "string", "enum": list(ACTS)}),
]


class Strict(BaseModel):
    """Takes the fields that it has, and no other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Paged(Strict):
    """Which page of a list; more than 500 at once are not given."""

    page_size: Annotated[int, Field(ge=1, le=100_000)] = 50
    page_token: Token | None = None

    def page(self) -> PageRequest:
        """Return the page as the service layer takes it."""
        return PageRequest(min(self.page_size, MAX_PAGE), self.page_token)


class Messages(Strict):
    """Which messages of the producers. ``header`` and ``body`` are ``name=value``, as in ``body=order.id=42``."""

    database: Text | None = None
    status: list[MessageStatus] = []
    topic: Text | None = None
    key: Text | None = None
    tag: Text | None = None
    producer_group: Text | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    header: Pair | None = None
    body: Pair | None = None

    def filter(self) -> MessageFilter:
        """Return the filter as the service layer takes it."""
        return MessageFilter(
            database=self.database,
            status=tuple(self.status),
            topic=self.topic,
            key=self.key,
            tag=self.tag,
            producer_group=self.producer_group,
            since=self.since,
            until=self.until,
            header=_pair(self.header),
            body=_pair(self.body),
        )


class MessagesPaged(Messages, Paged):
    """Which messages, and which page of them."""


class MessagesExported(Messages):
    """Which messages to export, the newest first, and how many at most."""

    limit: Annotated[int, Field(ge=1, le=100_000)] = 10_000


class Inbox(Strict):
    """Which rows of the inboxes; ``fingerprint`` is that of a group of dead letters, ``error`` is part of the error."""

    database: Text | None = None
    status: list[Status] = []
    group: Text | None = None
    topic: Text | None = None
    message_id: UUID | None = None
    fingerprint: Text | None = None
    error: Text | None = None
    attempts_gte: Count | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    discarded: bool | None = None

    def filter(self) -> InboxFilter:
        """Return the filter as the service layer takes it."""
        return InboxFilter(status=tuple(self.status), **self.model_dump(exclude={"status", "page_size", "page_token"}))


class InboxPaged(Inbox, Paged):
    """Which rows of the inboxes, and which page of them."""


class Dead(Strict):
    """Which dead letters; discarded ones are asked for by ``discarded=true``."""

    database: Text | None = None
    group: Text | None = None
    topic: Text | None = None
    fingerprint: Text | None = None
    error: Text | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    discarded: bool = False

    def filter(self) -> InboxFilter:
        """Return the filter as the service layer takes it."""
        return InboxFilter(status=(Status.PARKED,), **self.model_dump(exclude={"page_size", "page_token"}))


class DeadPaged(Dead, Paged):
    """Which dead letters, and which page of them."""


class DeadGroups(Strict):
    """Which groups of dead letters, and how many at most."""

    database: Text | None = None
    group: Text | None = None
    topic: Text | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 200


class Halves(Strict):
    """Which undecided halves; ``min_age`` is in seconds."""

    database: Text | None = None
    topic: Text | None = None
    status: HalfStatus | None = None
    min_age: Annotated[float, Field(ge=0, le=1e9)] | None = None

    def filter(self) -> HalfFilter:
        """Return the filter as the service layer takes it."""
        return HalfFilter(self.database, self.topic, self.status, self.min_age)


class HalvesPaged(Halves, Paged):
    """Which undecided halves, and which page of them."""


class ScheduledPaged(Paged):
    """Which scheduled messages, and which page of them."""

    database: Text | None = None
    topic: Text | None = None
    recalled: bool = False

    def filter(self) -> ScheduledFilter:
        """Return the filter as the service layer takes it."""
        return ScheduledFilter(self.database, self.topic, self.recalled)


class Audit(Strict):
    """Which audited acts."""

    database: Text | None = None
    actor: Text | None = None
    action: Text | None = None
    target: Text | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    def filter(self) -> AuditFilter:
        """Return the filter as the service layer takes it."""
        return AuditFilter(self.database, self.actor, self.action, self.target, self.since, self.until)


class AuditPaged(Audit, Paged):
    """Which audited acts, and which page of them."""


class AuditExported(Audit):
    """Which audited acts to export, the newest first, and how many at most."""

    limit: Annotated[int, Field(ge=1, le=100_000)] = 10_000


class BulkJobs(Paged):
    """Which bulk jobs, and which page of them."""

    database: Text | None = None
    state: BulkJobState | None = None


class Items(Paged):
    """Which items of a bulk job, and which page of them."""

    state: BulkItemState | None = None


def _pair(text: str | None) -> tuple[str, str] | None:
    name, _, value = (text or "").partition("=")
    return (name, value) if text else None


IfMatch = Annotated[str | None, Header(description="The entity tag that you saw; if it has changed: 412.")]
IfNoneMatch = Annotated[str | None, Header(description="The entity tag that you have; if it is still so: 304.")]
IdempotencyKey = Annotated[str | None, Header(description="Makes a repeated order the same order.")]

_TAG = re.compile(r'\s*(?:W/)?"([^"]*)"\s*')
_KEY = re.compile(r"[\x21-\x7e]{1,200}")


def etag(version: str) -> str:
    """Return the entity tag of a version."""
    return f'"{version}"'


def is_known(if_none_match: str | None, version: str) -> bool:
    """Tell whether the caller has this version already."""
    return (if_none_match or "").strip() == "*" or version in _TAG.findall(if_none_match or "")


def expected_version(if_match: str | None) -> str | None:
    """Return the version that the caller has seen; None where any will do.

    Raises:
        InvalidRequest: the header isn't one entity tag.
    """
    if if_match is None or if_match.strip() == "*":
        return None
    match = _TAG.fullmatch(if_match)
    if not match:
        raise InvalidRequest('the header If-Match must be one entity tag, as in "1f4c", or *', "header.if-match")
    return match[1]


def order_key(principal: Principal, idempotency_key: str | None) -> str | None:
    """Return the key of an order, bound to who orders: nobody gets at another one's bulk job.

    Raises:
        InvalidRequest: the header isn't 1 to 200 printable characters without spaces.
    """
    if idempotency_key is None:
        return None
    if not _KEY.fullmatch(idempotency_key):
        raise InvalidRequest(
            "the header Idempotency-Key must be 1 to 200 printable ASCII characters", "header.idempotency-key"
        )
    return f"{hashlib.sha256(principal.id.encode()).hexdigest()[:16]}:{idempotency_key}"
