"""Endpoints that give all that fits as one file, page by page: as JSON lines, or as CSV that a spreadsheet may open."""

from __future__ import annotations

import csv
import dataclasses
import datetime as dt
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from outbox.admin.model import MAX_PAGE, AuditRow, MessageRow, Page, PageRequest
from outbox.console.api import fields
from outbox.console.api.answers import problems
from outbox.console.console import Console
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
