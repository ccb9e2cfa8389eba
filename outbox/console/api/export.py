"""Endpoints that return files: everything that matches a filter, page by page, and the body of one message."""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from outbox.console.api import fields
from outbox.console.api.answers import problems
from outbox.console.api.fields import PREFIX
from outbox.console.context import Context, RequestContext
from outbox.console.guard import check_origin
from outbox.console.permissions import Permission
from outbox.errors import MessageNotFound
from outbox.operator.model import MAX_PAGE, AuditRow, Body, MessageRow, Page, PageRequest
from outbox.text import csv_cell

T = TypeVar("T")

_NDJSON, _CSV = "application/x-ndjson", "text/csv; charset=utf-8"


router = APIRouter(prefix=PREFIX, responses=problems())


def _content(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


@router.get("/export/messages.ndjson", response_class=StreamingResponse, responses=_content(_NDJSON), tags=["export"])
def messages_ndjson(context: Context, query: Annotated[fields.MessagesExported, Query()]) -> StreamingResponse:
    """Return the messages that match, without their bodies, the newest first: one JSON object a line."""
    rows = _all(lambda page: context.admin.messages(query.filter(), page), query.limit)
    return _file(map(_json_line, rows), _NDJSON, "messages.ndjson")


@router.get("/export/messages.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
def messages_csv(context: Context, query: Annotated[fields.MessagesExported, Query()]) -> StreamingResponse:
    """Return the messages that match, without their bodies, the newest first, as CSV."""
    rows = _all(lambda page: context.admin.messages(query.filter(), page), query.limit)
    return _file(_csv_lines(MessageRow, rows), _CSV, "messages.csv")


@router.get("/export/audit.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
def audit_csv(context: Context, query: Annotated[fields.AuditExported, Query()]) -> StreamingResponse:
    """Return what operators did, the newest first, as CSV."""
    rows = _all(lambda page: context.admin.audit(query.filter(), page), query.limit)
    return _file(_csv_lines(AuditRow, rows), _CSV, "audit.csv")


@router.get("/messages/{message_id}/payload", responses=problems(404), tags=["messages"])
def payload(context: Context, message_id: UUID, request: Request, reveal: bool = False) -> Body:
    """Return the body of a message, masked; with ``reveal`` as it is, which is audited."""
    if reveal:
        _demand_reveal(context, request)
    body = context.admin.message(message_id, reveal=context.actor if reveal else None).body
    if body is None:
        raise MessageNotFound(f"no registered database has the body of message {message_id}; was it pruned?")
    return body


@router.get(
    "/messages/{message_id}/payload/raw",
    response_class=Response,
    responses=problems(404) | {200: {"content": {"application/octet-stream": {}}}},
    tags=["messages"],
)
def raw(context: Context, message_id: UUID, request: Request) -> Response:
    """Return the bytes of the body as a file, which is audited."""
    _demand_reveal(context, request)
    context.admin.message(message_id, reveal=context.actor)
    _, content = context.admin.body(message_id)
    # Never with a type that a browser would show.
    headers = {"Content-Disposition": f'attachment; filename="{message_id}.bin"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _demand_reveal(context: RequestContext, request: Request) -> None:
    context.demand(Permission.REVEAL)
    # A reveal is recorded, so no other site may make a browser request one.
    check_origin(context.console.trust, request.headers, context)


def _all(get: Callable[[PageRequest], Page[T]], limit: int) -> Iterator[T]:
    """Return the rows of all pages. The first is read at once, so that what is wrong with the request is told."""
    first = get(PageRequest(min(limit, MAX_PAGE)))

    def pages() -> Iterator[T]:
        page = first
        yield from page.items
        while page.next_page_token:
            page = get(PageRequest(MAX_PAGE, page.next_page_token))
            yield from page.items

    return itertools.islice(pages(), limit)


def _json_line(row: Any) -> str:
    return json.dumps(dataclasses.asdict(row), default=_as_json) + "\n"


def _as_json(value: object) -> str:
    return value.isoformat() if isinstance(value, dt.datetime) else str(value)


def _csv_lines(kind: type[T], rows: Iterator[T]) -> Iterator[str]:
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    yield _csv_line(names)
    for row in rows:
        yield _csv_line([csv_cell(getattr(row, name)) for name in names])


def _csv_line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


def _file(lines: Iterator[str], media_type: str, name: str) -> StreamingResponse:
    # Each part is made by a thread: one for many lines costs less than one for each.
    parts = iter(lambda: "".join(itertools.islice(lines, MAX_PAGE)), "")
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(parts, media_type=media_type, headers=disposition)
