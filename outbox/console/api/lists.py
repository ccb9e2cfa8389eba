"""Endpoints that list, show and export: messages and their bodies, inboxes, halves, audit, workers, overview."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

import outbox
from outbox.console.api.requests import (
    PREFIX,
    ExportQuery,
    IfNoneMatch,
    Listed,
    PageQuery,
    etag,
    from_body,
    from_query,
    is_known,
    problems,
)
from outbox.console.auth import only_reads
from outbox.console.context import Context, RequestContext
from outbox.console.guard import check_origin
from outbox.console.permissions import REVEAL
from outbox.errors import MessageNotFound
from outbox.message.model import Status
from outbox.operator.health.overview import Overview, TopicLag
from outbox.operator.health.system import System
from outbox.operator.health.workers import HandlerRow, WorkerRow
from outbox.operator.model import (
    MAX_PAGE,
    AuditFilter,
    AuditRow,
    Body,
    DeadGroup,
    HalfFilter,
    HalfRow,
    InboxFilter,
    InboxRow,
    MessageFilter,
    MessageRow,
    MessageView,
    Page,
    PageRequest,
    ScheduledFilter,
    ScheduledRow,
)
from outbox.reader import option, plain
from outbox.text import csv_cell

T = TypeVar("T")
Messages = tuple[MessageFilter, ExportQuery]
Audited = tuple[AuditFilter, ExportQuery]
Window = Literal["1h", "6h", "24h", "7d"]

router = APIRouter(prefix=PREFIX, responses=problems())

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It is still as you have it"}}


@dataclass(frozen=True, slots=True)
class ConsoleDatabase:
    """A database of this console; ``parts`` is empty where it couldn't be reached yet."""

    name: str
    parts: list[str]
    reached: bool


@dataclass(frozen=True, slots=True)
class Meta:
    """What this console is, and what the client may do in it."""

    version: str
    environment: str | None
    read_only: bool
    principal: str
    name: str
    role: str
    permissions: list[str]
    databases: list[ConsoleDatabase]


@dataclass(frozen=True, slots=True)
class DeadGroupsQuery:
    """Which groups of dead letters, and how many at most."""

    database: str | None = option(None, "Only of this database.", most=1000)
    group: str | None = option(None, "Only of this group of consumers.", most=1000)
    topic: str | None = option(None, "Only this topic.", most=1000)
    limit: int = option(200, "The most groups.", least=1, most=1000)


@router.get("/meta", tags=["console"])
def meta(context: Context) -> Meta:
    """Return what this console is, and what you may do in it."""
    principal, console = context.principal, context.console
    opened = context.operator.databases
    return Meta(
        version=outbox.__version__,
        environment=console.environment,
        read_only=console.read_only,
        principal=principal.id,
        name=principal.name,
        role=principal.role,
        permissions=sorted(each for each in principal.permissions if context.may(each)),
        databases=[
            *(ConsoleDatabase(name, sorted(database.parts), True) for name, database in opened.items()),
            *(ConsoleDatabase(name, [], False) for name in console.source.missing),
        ],
    )


@router.get("/overview", tags=["state"])
def overview(context: Context, window: Window = "1h") -> Overview:
    """Return the state of everything: numbers, problems in sentences, topics with their lag, charts."""
    return context.operator.overview(window)


@router.get("/topics", tags=["state"])
def topics(context: Context) -> list[TopicLag]:
    """Return each topic's backlog, and how far each of its groups has come."""
    return context.operator.overview("1h").topics


@router.get("/handlers", tags=["state"])
def handlers(context: Context) -> list[HandlerRow]:
    """Return what is registered on the living workers."""
    return context.operator.handlers()


@router.get("/workers", tags=["state"])
def workers(context: Context) -> list[WorkerRow]:
    """Return the workers that run or were not ended in order."""
    return context.operator.workers()


@router.get("/system", tags=["state"])
def system(context: Context) -> System:
    """Return versions, revisions, tables and settings."""
    return context.operator.system()


@router.get("/messages", tags=["messages"])
def messages(context: Context, query: Listed[MessageFilter] = from_query(MessageFilter, PageQuery)) -> Page[MessageRow]:
    """Return the messages that match, the newest first."""
    return context.operator.messages(*query)


@router.post("/messages/query", responses=problems(415), tags=["messages"])
@only_reads
def query_messages(
    context: Context, query: Listed[MessageFilter] = from_body(MessageFilter, PageQuery)
) -> Page[MessageRow]:
    """Return the messages that match, the newest first; the conditions are in the body."""
    return context.operator.messages(*query)


@router.get(
    "/messages/{message_id}", response_model=MessageView, responses=problems(404) | _NOT_MODIFIED, tags=["messages"]
)
def message(
    context: Context, message_id: UUID, response: Response, if_none_match: IfNoneMatch = None
) -> MessageView | Response:
    """Return all that is known of a message; its entity tag is what an act's If-Match takes."""
    view = context.operator.message(message_id)
    if is_known(if_none_match, view.version):
        return Response(status_code=304, headers={"ETag": etag(view.version)})
    response.headers["ETag"] = etag(view.version)
    return view


@router.get("/halves", tags=["messages"])
def halves(context: Context, query: Listed[HalfFilter] = from_query(HalfFilter, PageQuery)) -> Page[HalfRow]:
    """Return undecided halves, the oldest first."""
    return context.operator.halves(*query)


@router.get("/scheduled", tags=["messages"])
def scheduled(
    context: Context, query: Listed[ScheduledFilter] = from_query(ScheduledFilter, PageQuery)
) -> Page[ScheduledRow]:
    """Return scheduled messages, the next due first."""
    return context.operator.scheduled(*query)


@router.get("/inbox", tags=["inbox"])
def inbox(context: Context, query: Listed[InboxFilter] = from_query(InboxFilter, PageQuery)) -> Page[InboxRow]:
    """Return the inbox rows that match, the newest message first."""
    return context.operator.inbox(*query)


@router.get("/dead", tags=["inbox"])
def dead(
    context: Context, query: Listed[InboxFilter] = from_query(InboxFilter, PageQuery, without=("status",))
) -> Page[InboxRow]:
    """Return dead letters, the newest message first; or the discarded ones."""
    criteria, page = query
    return context.operator.inbox(replace(criteria, status=(Status.PARKED,), discarded=bool(criteria.discarded)), page)


@router.get("/dead/groups", tags=["inbox"])
def dead_groups(context: Context, query: DeadGroupsQuery = from_query(DeadGroupsQuery)) -> list[DeadGroup]:
    """Return dead letters by group, topic and kind of error, the biggest first."""
    return context.operator.dead_groups(
        database=query.database, group=query.group, topic=query.topic, limit=query.limit
    )


@router.get("/audit", tags=["audit"])
def audit(context: Context, query: Listed[AuditFilter] = from_query(AuditFilter, PageQuery)) -> Page[AuditRow]:
    """Return what operators did, the newest first."""
    return context.operator.audit(*query)


# --- files: everything that matches, and bodies ----------------------------------------------------------

_NDJSON, _CSV = "application/x-ndjson", "text/csv; charset=utf-8"


def _content(media_type: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


@router.get("/export/messages.ndjson", response_class=StreamingResponse, responses=_content(_NDJSON), tags=["export"])
def messages_ndjson(context: Context, query: Messages = from_query(MessageFilter, ExportQuery)) -> StreamingResponse:
    """Return the messages that match, without their bodies, the newest first: one JSON object a line."""
    rows = _all(lambda page: context.operator.messages(query[0], page), query[1].limit)
    return _file(map(_json_line, rows), _NDJSON, "messages.ndjson")


@router.get("/export/messages.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
def messages_csv(context: Context, query: Messages = from_query(MessageFilter, ExportQuery)) -> StreamingResponse:
    """Return the messages that match, without their bodies, the newest first, as CSV."""
    rows = _all(lambda page: context.operator.messages(query[0], page), query[1].limit)
    return _file(_csv_lines(MessageRow, rows), _CSV, "messages.csv")


@router.get("/export/audit.csv", response_class=StreamingResponse, responses=_content(_CSV), tags=["export"])
def audit_csv(context: Context, query: Audited = from_query(AuditFilter, ExportQuery)) -> StreamingResponse:
    """Return what operators did, the newest first, as CSV."""
    rows = _all(lambda page: context.operator.audit(query[0], page), query[1].limit)
    return _file(_csv_lines(AuditRow, rows), _CSV, "audit.csv")


@router.get("/messages/{message_id}/payload", responses=problems(404), tags=["messages"])
def payload(context: Context, message_id: UUID, request: Request, reveal: bool = False) -> Body:
    """Return the body of a message, masked; with ``reveal`` as it is, which is audited."""
    if reveal:
        _demand_reveal(context, request)
    body = context.operator.message(message_id, reveal=context.actor if reveal else None).body
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
    context.operator.message(message_id, reveal=context.actor)
    _, content = context.operator.body(message_id)
    # Never with a type that a browser would show.
    headers = {"Content-Disposition": f'attachment; filename="{message_id}.bin"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _demand_reveal(context: RequestContext, request: Request) -> None:
    context.demand(REVEAL)
    # A reveal is recorded, so no other site may make a browser request one.
    check_origin(context.console.trust, request.headers, context)


def _all(get: Callable[[PageRequest], Page[T]], limit: int) -> Iterator[T]:
    """Return the rows of all pages. The first is read at once, so that a wrong request is still refused."""
    first = get(PageRequest(min(limit, MAX_PAGE)))

    def pages() -> Iterator[T]:
        page = first
        yield from page.items
        while page.next_page_token:
            page = get(PageRequest(MAX_PAGE, page.next_page_token))
            yield from page.items

    return itertools.islice(pages(), limit)


def _json_line(row: Any) -> str:
    return json.dumps(plain(row)) + "\n"


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
