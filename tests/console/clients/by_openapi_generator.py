"""An operator's program with the client of openapi-generator: classes, pydantic, urllib3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from pydantic_client import ApiClient, Configuration
from pydantic_client.api import ActsOnInboxApi, BulkJobsApi, ConsoleApi, ExportApi, InboxApi, MessagesApi
from pydantic_client.exceptions import ApiException
from pydantic_client.models import (
    InboxFilter,
    InboxRow,
    OrderBody,
    PreviewBody,
    Problem,
    ReasonBody,
    RetryBody,
    SelectorBody,
)


def heal(url: str, token: str, group: str) -> dict[str, object]:
    """Retry a group's first parked message, then order that all the others are; return what was seen on the way."""
    with _connected(url, token) as client:
        me = ConsoleApi(client).meta()
        first, *others = _parked(client, group)

        messages = MessagesApi(client)
        tag = f'"{messages.message(first.message_id).version}"'
        try:
            messages.message(first.message_id, if_none_match=tag)
            unchanged = False
        except ApiException as error:
            unchanged = error.status == 304
        masked = messages.payload(first.message_id)
        body = messages.raw_payload(first.message_id, ReasonBody())

        acts, because = ActsOnInboxApi(client), RetryBody(reason="the mail server is back")
        try:
            acts.retry(group, first.message_id, because, if_match='"0"')
            stale = None
        except ApiException as error:
            stale = _problem(error)
        acted = acts.retry(group, first.message_id, because, if_match=tag)

        jobs, selector = BulkJobsApi(client), SelectorBody(inbox=InboxFilter(group=group, status=["parked"]))
        preview = jobs.preview_bulk_job(PreviewBody(action="retry", selector=selector))
        ordered = OrderBody(action="retry", selector=selector, reason="and all the others", token=preview.token)
        job, again = (jobs.order_bulk_job(ordered, idempotency_key="by-openapi-generator") for _ in range(2))

        exported = ExportApi(client).messages_ndjson()
        try:
            messages.message(UUID(int=1))
            unknown = None
        except ApiException as error:
            unknown = _problem(error)
    with _connected(url, f"not {token}") as client:
        try:
            ConsoleApi(client).meta()
            stranger = None
        except ApiException as error:
            stranger = _problem(error)
    assert stale is not None
    assert unknown is not None
    assert stranger is not None
    return {
        "role": me.role,
        "others": [row.message_id for row in others],
        "unchanged": unchanged,
        "bytes": bytes(body),
        "masked": masked.revealed is False,
        "stale": (stale.status, stale.type, stale.title),
        "retried": str(first.message_id) in acted.outcome,
        "selected": preview.eligible,
        "one job": job.id == again.id,
        "job": (job.action, job.total),
        "exported": len(exported.splitlines()),
        "unknown": unknown.status,
        "stranger": stranger.status,
    }


@contextmanager
def _connected(url: str, token: str) -> Iterator[ApiClient]:
    client = ApiClient(Configuration(host=url, access_token=token))
    yield client
    # The client's own context closes nothing.
    client.rest_client.pool_manager.clear()


def _problem(error: ApiException) -> Problem:
    assert isinstance(error.data, Problem)
    return error.data


def _parked(client: ApiClient, group: str) -> Iterator[InboxRow]:
    """Return the parked messages of a group, page by page."""
    token: str | None = None
    while True:
        page = InboxApi(client).inbox(group=group, status=["parked"], page_size=2, page_token=token)
        yield from page.items
        if not page.next_page_token:
            return
        token = page.next_page_token
