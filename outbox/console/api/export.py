"""Endpoints that give all that fits as one file, page by page: as JSON lines, or as CSV that a spreadsheet may open.

Endpoints that give the body of a message: masked, or as it is to those who may, which the audit records.
"""

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

from outbox.console import security
from outbox.console.api import answers, fields
from outbox.console.api.answers import problems
from outbox.console.console import Console
from outbox.console.permissions import Permission
from outbox.errors import MessageNotFound
from outbox.operator.model import MAX_PAGE, AuditRow, Body, MessageRow, Page, PageRequest
from outbox.text import csv_cell

T = TypeVar("T")

_NDJSON, _CSV = "application/x-ndjson", "text/csv; charset=utf-8"


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""

    @router.get(
        "/export/messages.ndjson", response_class=StreamingResponse, responses=_content(_NDJSON), tags=["export"]
    )
    def messages_ndjson(wanted: Annotated[fields.MessagesExported, Query()]) -> StreamingResponse:
        """Return the messages that fit, without their bodies, the newest first: one JSON object a line."""
        rows = _all(lambda page: console.admin.messages(wanted.filter(), page), wanted.limit)
        return _file(map(_json_line, rows), _NDJSON, "messages.ndjson")

    @router.get("/export/messages.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
    def messages_csv(wanted: Annotated[fields.MessagesExported, Query()]) -> StreamingResponse:
        """Return the messages that fit, without their bodies, the newest first, as CSV."""
        rows = _all(lambda page: console.admin.messages(wanted.filter(), page), wanted.limit)
        return _file(_csv_lines(MessageRow, rows), _CSV, "messages.csv")

    @router.get("/export/audit.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
    def audit_csv(wanted: Annotated[fields.AuditExported, Query()]) -> StreamingResponse:
        """Return what operators did, the newest first, as CSV."""
        rows = _all(lambda page: console.admin.audit(wanted.filter(), page), wanted.limit)
        return _file(_csv_lines(AuditRow, rows), _CSV, "audit.csv")


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


def _content(media_type: str) -> dict[int | str, dict[str, Any]]:
    file: dict[int | str, dict[str, Any]] = {200: {"content": {media_type: {"schema": {"type": "string"}}}}}
    return problems() | file


_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


def add_payload_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""

    @router.get(
        "/messages/{message_id}/payload", response_model=answers.Body, responses=problems(404), tags=["messages"]
    )
    def payload(message_id: UUID, request: Request, reveal: bool = False) -> Body:
        """Return the body of a message, masked; with ``reveal`` as it is, which is audited."""
        if reveal:
            _may_reveal(request)
        actor = console.actor_of(request) if reveal else None
        body = console.admin.message(message_id, reveal=actor).body
        if body is None:
            raise MessageNotFound(f"no registered database has the body of message {message_id}; was it pruned?")
        return body

    @router.get(
        "/messages/{message_id}/payload/raw",
        response_class=Response,
        responses=problems(404) | _BYTES,
        tags=["messages"],
    )
    def raw(message_id: UUID, request: Request) -> Response:
        """Return the bytes of the body as a file, which is audited."""
        _may_reveal(request)
        console.admin.message(message_id, reveal=console.actor_of(request))
        _, content = console.admin.body(message_id)
        # Never with a type that a browser would show.
        headers = {"Content-Disposition": f'attachment; filename="{message_id}.bin"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    def _may_reveal(request: Request) -> None:
        console.demand(request, Permission.REVEAL)
        # It is recorded, so no other site may make a browser ask for it.
        security.check_origin(console.trust, request.headers, console.facts(request))
