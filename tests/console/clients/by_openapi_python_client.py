"""An operator's program with the client of openapi-python-client: functions, attrs, httpx."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from uuid import UUID

from attrs_client import AuthenticatedClient
from attrs_client.api.acts_on_inbox import retry
from attrs_client.api.bulk_jobs import order_bulk_job, preview_bulk_job
from attrs_client.api.console import meta
from attrs_client.api.export import messages_ndjson
from attrs_client.api.inbox import inbox
from attrs_client.api.messages import message, payload, raw_payload
from attrs_client.models import (
    ActSentence,
    Body,
    BulkJob,
    InboxFilter,
    InboxFilterStatusItem,
    InboxRow,
    InboxRowPage,
    InboxStatusItem,
    MessageView,
    Meta,
    OrderBody,
    Preview,
    PreviewBody,
    Problem,
    ReasonBody,
    RetryBody,
    SelectorBody,
)


def heal(url: str, token: str, group: str) -> dict[str, object]:
    """Retry a group's first parked message, then order that all the others are; return what was seen on the way."""
    with AuthenticatedClient(url, token) as client:
        me = meta.sync(client=client)
        assert isinstance(me, Meta)
        first, *others = _parked(client, group)

        shown = message.sync_detailed(first.message_id, client=client)
        assert isinstance(shown.parsed, MessageView)
        unchanged = message.sync_detailed(first.message_id, client=client, if_none_match=shown.headers["ETag"])
        masked = payload.sync(first.message_id, client=client)
        assert isinstance(masked, Body)
        body = raw_payload.sync(first.message_id, client=client, body=ReasonBody())
        assert not isinstance(body, Problem | None)

        because = RetryBody(reason="the mail server is back")
        stale = retry.sync(group, first.message_id, client=client, body=because, if_match='"0"')
        assert isinstance(stale, Problem)
        acted = retry.sync(group, first.message_id, client=client, body=because, if_match=shown.headers["ETag"])
        assert isinstance(acted, ActSentence)

        selector = SelectorBody(inbox=InboxFilter(group=group, status=[InboxFilterStatusItem.PARKED]))
        preview = preview_bulk_job.sync(client=client, body=PreviewBody("retry", selector))
        assert isinstance(preview, Preview)
        ordered = OrderBody("retry", selector, reason="and all the others", token=preview.token)
        job = order_bulk_job.sync(client=client, body=ordered, idempotency_key="by-openapi-python-client")
        again = order_bulk_job.sync(client=client, body=ordered, idempotency_key="by-openapi-python-client")
        assert isinstance(job, BulkJob)
        assert isinstance(again, BulkJob)

        exported = messages_ndjson.sync(client=client)
        assert not isinstance(exported, Problem | None)
        unknown = message.sync(UUID(int=1), client=client)
        assert isinstance(unknown, Problem)
    with AuthenticatedClient(url, f"not {token}") as client:
        stranger = meta.sync(client=client)
        assert isinstance(stranger, Problem)
    return {
        "role": me.role,
        "others": [row.message_id for row in others],
        "unchanged": unchanged.status_code == HTTPStatus.NOT_MODIFIED,
        "bytes": body.payload.read(),
        "masked": masked.revealed is False,
        "stale": (stale.status, stale.type_, stale.title),
        "retried": str(first.message_id) in acted.outcome,
        "selected": preview.eligible,
        "one job": job.id == again.id,
        "job": (job.action, job.total),
        "exported": len(exported.payload.readlines()),
        "unknown": unknown.status,
        "stranger": stranger.status,
    }


def _parked(client: AuthenticatedClient, group: str) -> Iterator[InboxRow]:
    """Return the parked messages of a group, page by page."""
    token: str | None = None
    while True:
        page = inbox.sync(client=client, group=group, status=[InboxStatusItem.PARKED], page_size=2, page_token=token)
        assert isinstance(page, InboxRowPage)
        yield from page.items
        if not page.next_page_token:
            return
        token = page.next_page_token
