"""What the pages of the console, its endpoints and the command line ask the service layer for."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from benchmarks.console_fill import CONVERSATIONS
from outbox.acts.changes import MessageStatus, Target
from outbox.message.model import Status
from outbox.operator.model import (
    AuditFilter,
    BulkItemFilter,
    BulkItemState,
    BulkJobFilter,
    BulkJobState,
    HalfFilter,
    HalfStatus,
    InboxFilter,
    MessageFate,
    MessageFilter,
    PageRequest,
    ScheduledFilter,
    Selector,
)
from outbox.operator.operator import Operator

_STATUSES = ("undecided", "rolled_back", "committed", "dispatched", "scheduled", "recalled")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a page."""

    page: str
    what: str
    call: Callable[[], Any]


def cases(admin: Operator) -> Iterator[Case]:
    """Return all calls, with conditions that find much, little, and nothing."""
    now = dt.datetime.now(dt.UTC)
    for window in ("1h", "6h", "24h", "7d"):
        yield Case("overview", f"over {window}", partial(admin.overview, window))
    yield from _messages(admin, now)
    yield from _ways(admin)
    yield from _dead(admin)
    yield from _inbox(admin, now)
    yield from _paged("halves", "all", admin.halves, HalfFilter())
    for name, wanted in (
        ("parked", HalfFilter(status=HalfStatus.PARKED)),
        ("orphans of a topic", HalfFilter(topic="refund", status=HalfStatus.ORPHAN)),
        ("older than an hour", HalfFilter(min_age=3600.0)),
    ):
        yield from _paged("halves", name, admin.halves, wanted)
    yield from _paged("scheduled", "all", admin.scheduled, ScheduledFilter())
    yield from _paged("scheduled", "recalled, of a topic", admin.scheduled, ScheduledFilter("bank_a", "refund", True))
    yield from _audit(admin, now)
    yield from _bulk_jobs(admin)
    yield Case("handlers", "all", admin.handlers)
    yield Case("handlers", "workers", admin.workers)
    yield Case("system", "all", admin.system)
    yield from _previews(admin)


def _paged(page: str, name: str, look: Callable[[Any, PageRequest], Any], wanted: Any) -> Iterator[Case]:
    """Return the first page of a list, and one behind nine others."""
    yield Case(page, name, partial(look, wanted, PageRequest()))
    token = None
    for _ in range(9):
        token = look(wanted, PageRequest(size=500, token=token)).next_page_token
        if token is None:
            return
    yield Case(page, f"{name}, behind nine pages of 500", partial(look, wanted, PageRequest(token=token)))


def _messages(admin: Operator, now: dt.datetime) -> Iterator[Case]:
    day_ago, yesterday = now - dt.timedelta(hours=13), now - dt.timedelta(hours=12)
    for name, wanted in (
        ("all", MessageFilter()),
        *((f"status {status}", MessageFilter(status=(MessageStatus(status),))) for status in _STATUSES),
        ("status committed or scheduled", MessageFilter(status=(MessageStatus.COMMITTED, MessageStatus.SCHEDULED))),
        ("a topic with many", MessageFilter(topic="transfer")),
        ("a topic with few", MessageFilter(topic="refund")),
        ("a topic with none", MessageFilter(topic="nothing")),
        ("a key with many", MessageFilter(key="account-77")),
        ("a key with none", MessageFilter(key="nobody")),
        ("a tag", MessageFilter(tag="late")),
        ("a header", MessageFilter(header=("trace", "abc"))),
        ("a value in the body", MessageFilter(body=("receiver", "78"))),
        ("a value in no body", MessageFilter(body=("receiver", "nobody"))),
        ("an hour of yesterday", MessageFilter(since=day_ago, until=yesterday)),
        ("a topic with few in an hour of yesterday", MessageFilter(topic="refund", since=day_ago, until=yesterday)),
        (
            "rolled back in an hour of yesterday",
            MessageFilter(status=(MessageStatus.ROLLED_BACK,), since=day_ago, until=yesterday),
        ),
    ):
        yield from _paged("messages", name, admin.messages, wanted)
    unconsumed = MessageFilter(group="bank_b", status=(MessageFate.UNCONSUMED,))
    yield from _paged("messages", "unconsumed by a group", admin.messages, unconsumed)


def _ways(admin: Operator) -> Iterator[Case]:
    for status in _STATUSES:
        found = admin.messages(MessageFilter(status=(MessageStatus(status),)), PageRequest(size=1)).items
        if found:
            yield Case("message", status, partial(admin.message, found[0].id))
    for first, messages in CONVERSATIONS.items():
        yield Case("conversation", f"of {messages:,} messages", partial(admin.conversation, first))
    for status in ("parked", "failed", "consumed"):
        (row,) = admin.inbox(InboxFilter(status=(Status(status),)), PageRequest(size=1)).items
        yield Case("message", f"{status} in an inbox", partial(admin.message, row.message_id))
        yield Case("message", f"body of one {status}", partial(admin.body, row.message_id))


def _dead(admin: Operator) -> Iterator[Case]:
    yield Case("dead letters", "groups", admin.dead_groups)
    yield Case("dead letters", "groups of a topic", partial(admin.dead_groups, group="bank_b", topic="transfer"))
    yield Case("dead letters", "groups of none", partial(admin.dead_groups, topic="nothing"))
    kinds = admin.dead_groups()
    for name, kind in (("the biggest kind", kinds[0]), ("the smallest kind", kinds[-1])):
        yield from _paged("dead letters", name, admin.inbox, InboxFilter(fingerprint=kind.fingerprint))
    discarded = InboxFilter(status=(Status.PARKED,), discarded=True)
    yield from _paged("dead letters", "discarded", admin.inbox, discarded)


def _inbox(admin: Operator, now: dt.datetime) -> Iterator[Case]:
    day_ago, yesterday = now - dt.timedelta(hours=13), now - dt.timedelta(hours=12)
    (row,) = admin.inbox(InboxFilter(status=(Status.PARKED,)), PageRequest(size=1)).items
    for name, wanted in (
        ("all", InboxFilter()),
        *(
            (f"status {each}", InboxFilter(status=(Status(each),)))
            for each in ("consumed", "failed", "parked", "quarantined")
        ),
        ("a group", InboxFilter(group="bank_b")),
        ("a group with none", InboxFilter(group="nobody")),
        ("a topic with none", InboxFilter(topic="refund")),
        ("one message", InboxFilter(message_id=row.message_id)),
        ("parked with an error", InboxFilter(status=(Status.PARKED,), error="does not exist")),
        ("parked with an error that none has", InboxFilter(status=(Status.PARKED,), error="nobody")),
        ("an error that none has", InboxFilter(error="nobody")),
        ("many attempts", InboxFilter(attempts_gte=10)),
        ("parked after many attempts", InboxFilter(status=(Status.PARKED,), attempts_gte=18)),
        ("an hour of yesterday", InboxFilter(since=day_ago, until=yesterday)),
        ("parked in an hour of yesterday", InboxFilter(status=(Status.PARKED,), since=day_ago, until=yesterday)),
    ):
        yield from _paged("inbox", name, admin.inbox, wanted)


def _audit(admin: Operator, now: dt.datetime) -> Iterator[Case]:
    (row,) = admin.audit(AuditFilter(), PageRequest(size=1)).items
    for name, wanted in (
        ("all", AuditFilter()),
        ("an operator", AuditFilter(actor="operator-7")),
        ("nobody", AuditFilter(actor="nobody")),
        ("a kind of act", AuditFilter(action="compensate")),
        ("a message", AuditFilter(target=row.target)),
        ("a day", AuditFilter(since=now - dt.timedelta(days=9), until=now - dt.timedelta(days=8))),
    ):
        yield from _paged("audit", name, admin.audit, wanted)


def _bulk_jobs(admin: Operator) -> Iterator[Case]:
    yield Case("bulk_jobs", "all", partial(admin.bulk_jobs, BulkJobFilter(), PageRequest()))
    for state in BulkJobState:
        yield Case("bulk_jobs", state, partial(admin.bulk_jobs, BulkJobFilter(state=state), PageRequest()))
    (running,) = admin.bulk_jobs(BulkJobFilter(state=BulkJobState.RUNNING), PageRequest(size=1)).items
    (done,) = admin.bulk_jobs(BulkJobFilter(state=BulkJobState.DONE), PageRequest(size=1)).items
    for name, row in (("one under way", running), ("one that is done", done)):
        yield Case("bulk_job", name, partial(admin.bulk_job, row.id))
        yield Case("bulk_job", f"items of {name}", partial(admin.bulk_items, row.id, BulkItemFilter(), PageRequest()))
        failed = partial(admin.bulk_items, row.id, BulkItemFilter(BulkItemState.FAILED), PageRequest())
        yield Case("bulk_job", f"failed items of {name}", failed)


def _previews(admin: Operator) -> Iterator[Case]:
    kinds = admin.dead_groups()
    ids: list[UUID] = [
        row.message_id for row in admin.inbox(InboxFilter(status=(Status.PARKED,)), PageRequest(500)).items
    ]
    few = Selector(targets=tuple(Target(id_, "bank_b") for id_ in ids[:50]))
    many = Selector(targets=tuple(Target(id_, "bank_b") for id_ in ids))
    yield Case("preview", "retry 50 by name", partial(admin.preview, "retry", few))
    yield Case("preview", "retry 500 by name", partial(admin.preview, "retry", many))
    smallest = Selector(inbox=InboxFilter(fingerprint=kinds[-1].fingerprint))
    yield Case("preview", "retry the smallest kind", partial(admin.preview, "retry", smallest))
    biggest = Selector(inbox=InboxFilter(fingerprint=kinds[0].fingerprint))
    yield Case("preview", "retry the biggest kind", partial(admin.preview, "retry", biggest))
    parked = Selector(inbox=InboxFilter(status=(Status.PARKED,), discarded=False))
    yield Case("preview", "retry all that is parked", partial(admin.preview, "retry", parked))
    refunds = Selector(messages=MessageFilter(topic="refund"))
    yield Case("preview", "resend a topic with few", partial(admin.preview, "resend", refunds))
