"""Endpoints that list, show and export: messages, bodies, inboxes, halves, bulk jobs, sagas, audit, overview."""

from __future__ import annotations

import copy
import csv
import dataclasses
import inspect
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_type_hints
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError

import outbox
from outbox.console.api import requests
from outbox.console.api.acts import ReasonBody
from outbox.console.api.requests import IfNoneMatch, Listed, PageQuery, from_body, from_query, problems
from outbox.console.auth import only_reads
from outbox.console.context import API, REVEAL, Context, RequestContext, requires
from outbox.console.problems import Problem
from outbox.errors import DatabaseUnreached, NotFound, OutboxError
from outbox.flow.views import FlowFilter, FlowRow, FlowView
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.databases import Databases, is_away
from outbox.operator.health.overview import Overview, TopicLag, shortened
from outbox.operator.health.stats import WINDOWS
from outbox.operator.look.paging import every_page, listed
from outbox.operator.look.redactor import Body
from outbox.operator.operator import Operator
from outbox.reader import option, plain
from outbox.text import csv_cell

_TEXT = {"type": "string"}
_BYTES = _TEXT | {"format": "binary"}

Window = Annotated[str, Query(pattern=f"^({'|'.join(WINDOWS)})$", json_schema_extra={"enum": list(WINDOWS)})]

#: The types of the files that there are, by the ends of their names.
EXPORT_TYPES = {"csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}

#: How many of its groups are shown with a topic, in a list of them.
MOST_GROUPS = 20
#: How long (seconds) the pages of one export are read for.
EXPORT_SECONDS = 300.0

T = TypeVar("T")

router: APIRouter = APIRouter(prefix=API, responses=problems())


@dataclass(frozen=True, slots=True)
class ConsoleDatabase:
    """A database of this console; ``parts`` is empty where it couldn't be reached yet."""

    name: str
    parts: list[str]
    reached: bool


@dataclass(frozen=True, slots=True)
class Meta:
    """Describe this console, and the permissions of the client."""

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


@dataclass(frozen=True, slots=True)
class ExportQuery:
    """How much to export."""

    limit: int = option(10_000, "The most rows.", least=1, most=100_000)


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


def of_each(
    operator: Operator, read: Callable[[Operator], Iterable[T]], only: str | None = None
) -> tuple[list[T], list[str]]:
    """Return what is read of each database by itself, and the names of those that can't be reached.

    ``only`` limits it to one of them. If none can be reached, the error is raised.
    """
    found: list[T] = []
    unreached, errors = operator.databases.away_for(only), []
    databases = operator.databases.having(None, only)
    for database in databases:
        try:
            one = copy.copy(operator)
            one.databases = Databases([database])
            found += read(one)
        except (OutboxError, SQLAlchemyError) as error:
            if not is_away(error):
                raise
            unreached.append(database.name)
            errors.append(error)
    if len(errors) == len(databases):
        raise errors[0]
    return found, unreached


@router.get("/overview", tags=["state"])
def overview(context: Context, window: Window = "1h") -> Overview:
    """Return the state of everything: numbers, problems in sentences, topics with their lag, charts."""
    return shortened(context.operator.overview(window))


@router.get("/topics", tags=["state"])
def topics(context: Context, page: model.PageRequest = from_query(PageQuery)) -> model.Page[TopicLag]:
    """Return a page of the topics: each one's backlog, and how far the groups have come that are furthest behind."""
    found = context.operator.overview("1h")
    shown = listed(found.topics, page, lambda topic: (topic.topic, topic.database), found.unreachable)
    return dataclasses.replace(shown, items=[topic.with_groups(MOST_GROUPS) for topic in shown.items])


# --- lists: the operator's call of the same name ----------------------------------------------------------


def all_of(operator: Operator, call: str) -> tuple[list[Any], list[str]]:
    """Return the rows of one of the calls in `KEYS`, and which databases can't be reached."""
    if call != "groups":
        return of_each(operator, getattr(Operator, call))
    # How far a group is behind takes two databases: it is read over all that can be reached.
    return operator.groups(), of_each(operator, Operator.topic_pauses)[1]


def _add_call(call: str, tag: str, path: str = "") -> None:
    """Add an endpoint that returns what a call does; the call says itself what its filter and its rows are."""
    described, hints = inspect.getdoc(getattr(Operator, call)) or "", types_of(call)
    key, returned = KEYS.get(call), hints["return"]
    # A call that isn't of a list takes nothing.
    taken = from_query(hints["criteria"], PageQuery) if "criteria" in hints else Depends(lambda: ())
    if key is not None:
        taken, returned = from_query(PageQuery), model.Page[get_args(returned)[0]]  # type: ignore[misc]  # what it is

    def endpoint(context: Context, query: Any = taken) -> Any:
        if key is None:
            return getattr(context.operator, call)(*query)
        rows, unreached = all_of(context.operator, call)
        return listed(rows, query, key, unreached)

    router.add_api_route(
        path or f"/{call.replace('_', '-')}",
        endpoint,
        name=call,
        description=described.partition("\n")[0],
        response_model=returned,
        tags=[tag],
    )


#: The calls that return all there is, and by what their pages are sorted.
KEYS: Mapping[str, Callable[[Any], tuple[object, ...]]] = {
    "handlers": lambda row: (row.kind, row.topic, row.group or "", row.name, row.database),
    "workers": lambda row: (not row.alive, row.name, row.id),
    "producers": lambda row: (row.producer_group, not row.active, row.name, row.id),
    "locks": lambda row: (row.lock, row.session, row.database),
    "topic_pauses": lambda row: (row.topic, row.database),
    "groups": lambda row: (row.group, row.topic, row.database),
}


def types_of(call: str) -> dict[str, Any]:
    """Return the types of what an operator's call takes and returns: the filter is its ``criteria``."""
    return get_type_hints(getattr(Operator, call))


_add_call("handlers", "state")
_add_call("workers", "state")
_add_call("producers", "state")
_add_call("locks", "state")
_add_call("groups", "groups")
_add_call("topic_pauses", "topics", "/topics/paused")
_add_call("system", "state")
_add_call("messages", "messages")
_add_call("halves", "messages")
_add_call("scheduled", "messages")
_add_call("inbox", "inbox")
_add_call("audit", "audit")
_add_call("bulk_jobs", "bulk jobs")


@router.get("/dead", tags=["inbox"])
def dead_letters(
    context: Context, query: Listed[model.InboxFilter] = from_query(model.InboxFilter, PageQuery, without=("status",))
) -> model.Page[model.InboxRow]:
    """Return dead letters, the newest message first; or the discarded ones."""
    criteria, page = query
    parked = dataclasses.replace(criteria, status=(Status.PARKED,), discarded=bool(criteria.discarded))
    return context.operator.inbox(parked, page)


@router.get("/dead/groups", tags=["inbox"])
def dead_groups(context: Context, query: DeadGroupsQuery = from_query(DeadGroupsQuery)) -> list[model.DeadGroup]:
    """Return dead letters by group, topic and kind of error, the biggest first."""
    if away := context.operator.databases.away_for(query.database):
        raise DatabaseUnreached(away)
    return context.operator.dead_groups(**dataclasses.asdict(query))


@router.get("/bulk-jobs/{bulk_job_id}", responses=problems(404), tags=["bulk jobs"])
def bulk_job(context: Context, bulk_job_id: UUID) -> model.BulkJob:
    """Return a bulk job, and how far it is."""
    return context.operator.bulk_job(bulk_job_id)


@router.get("/bulk-jobs/{bulk_job_id}/items", responses=problems(404), tags=["bulk jobs"])
def bulk_items(
    context: Context,
    bulk_job_id: UUID,
    query: Listed[model.BulkItemFilter] = from_query(model.BulkItemFilter, PageQuery),
) -> model.Page[model.BulkItem]:
    """Return the items of a bulk job in their order, and what became of each."""
    criteria, page = query
    return context.operator.bulk_items(bulk_job_id, page, state=criteria.state)


@router.get("/bulk-jobs/{bulk_job_id}/outcome", responses=problems(404), tags=["bulk jobs"])
def bulk_outcome(context: Context, bulk_job_id: UUID) -> model.BulkOutcome:
    """Return what became of the messages of a bulk job since, counted over the first 10,000 items that are done."""
    return context.operator.bulk_outcome(bulk_job_id)


# Not by GET: a reveal is recorded, and nothing that follows links may do it.
_REVEALS: dict[str, Any] = {"dependencies": [requires(REVEAL)], "responses": problems(404, 415), "tags": ["messages"]}

# --- one message -----------------------------------------------------------------------------------------


@router.post("/messages/query", responses=problems(415), tags=["messages"])
@only_reads
def query_messages(
    context: Context, query: Listed[model.MessageFilter] = from_body(model.MessageFilter, PageQuery)
) -> model.Page[model.MessageRow]:
    """Return the messages that match, the newest first; the conditions are in the body."""
    return context.operator.messages(*query)


@router.get(
    "/messages/{message_id}",
    response_model=model.MessageView,
    responses=problems(404) | {304: {"description": "It is still as you have it"}},
    tags=["messages"],
)
def message(
    context: Context, message_id: UUID, response: Response, if_none_match: IfNoneMatch = None
) -> model.MessageView | Response:
    """Return all that is known of a message; its entity tag is what an act's If-Match takes."""
    view = context.operator.message(message_id)
    response.headers["ETag"] = requests.etag(view.version)
    if requests.is_known(if_none_match, view.version):
        return Response(status_code=304, headers=response.headers)
    return view


@router.get("/messages/{message_id}/conversation", responses=problems(404), tags=["messages"])
def conversation(context: Context, message_id: UUID) -> model.Conversation:
    """Return the chain of messages that a message belongs to, in the order in which they were sent."""
    return context.operator.conversation(message_id)


@router.get("/messages/{message_id}/payload", responses=problems(404), tags=["messages"])
def payload(context: Context, message_id: UUID) -> Body:
    """Return the body of a message, masked."""
    return _body(context, message_id)


@router.post("/messages/{message_id}/payload/reveal", **_REVEALS)
def reveal_payload(context: Context, message_id: UUID, body: ReasonBody = from_body(ReasonBody)) -> Body:
    """Return the body of a message as it is, which is audited."""
    return _body(context, message_id, reveal=context.actor, why=body.reason)


def _body(context: RequestContext, message_id: UUID, **reveal: Any) -> Body:
    body = context.operator.message(message_id, **reveal).body
    if body is None:
        raise NotFound(f"no registered database has the body of message {message_id}; was it pruned?")
    return body


@router.post(
    "/messages/{message_id}/payload/raw",
    response_class=Response,
    **_REVEALS
    | {"responses": problems(404, 415) | {200: {"content": {"application/octet-stream": {"schema": _BYTES}}}}},
)
def raw_payload(context: Context, message_id: UUID, body: ReasonBody = from_body(ReasonBody)) -> Response:
    """Return the bytes of the body as a file, which is audited."""
    context.operator.message(message_id, reveal=context.actor, why=body.reason)
    _, content = context.operator.body(message_id)
    # Never with a type that a browser would show.
    headers = {"Content-Disposition": f'attachment; filename="{message_id}.bin"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


# --- files with everything that matches --------------------------------------------------------------------


def streamed(name: str, suffix: str, pages: Iterator[list[Any]], kind: Any) -> StreamingResponse:
    """Return pages of rows, which are a ``kind`` each, as a file: ``csv``, or ``ndjson``, a JSON object a line."""
    names = [each.name for each in dataclasses.fields(kind)]

    def parts() -> Iterator[str]:
        left = EXPORT_SECONDS
        while left > 0:
            began = time.monotonic()
            if (rows := next(pages, None)) is None:
                return
            left -= time.monotonic() - began
            # Also where there is nothing: between two parts others have the slot, and a client that has gone is seen.
            if suffix == "csv":
                yield _csv([csv_cell(getattr(row, name)) for name in names] for row in rows)
            else:
                yield "".join(json.dumps(plain(each)) + "\n" for each in rows)
        detail = f"the export was read for {EXPORT_SECONDS:g} s, and isn't at its end: narrow the time range"
        raise Problem("query-timeout", detail)

    made = parts()
    # The first is read at once, so that a wrong request is still refused.
    first = [*([_csv([names])] if suffix == "csv" else []), *itertools.islice(made, 1)]
    disposition = {"Content-Disposition": f'attachment; filename="{name}.{suffix}"'}
    return StreamingResponse(itertools.chain(first, made), media_type=EXPORT_TYPES[suffix], headers=disposition)


def export_answers(suffix: str) -> dict[int | str, dict[str, Any]]:
    """Return how the OpenAPI document describes the file of an export."""
    # A client that doesn't know a type hands on the bytes.
    schema = _TEXT if suffix == "csv" else _BYTES
    return {200: {"content": {EXPORT_TYPES[suffix]: {"schema": schema}}}}


def _add_export(call: str, suffix: str, description: str) -> None:
    types = types_of(call)
    (row,) = get_args(types["return"])

    def export(context: Context, query: Any = from_query(types["criteria"], ExportQuery)) -> StreamingResponse:
        criteria, most = query
        pages = every_page(lambda page: getattr(context.operator, call)(criteria, page), most.limit)
        return streamed(call, suffix, pages, row)

    router.add_api_route(
        f"/export/{call}.{suffix}",
        export,
        name=f"{call}_{suffix}",
        description=description,
        response_class=StreamingResponse,
        responses=export_answers(suffix),
        tags=["export"],
    )


def _csv(rows: Iterable[Iterable[str]]) -> str:
    lines = io.StringIO()
    csv.writer(lines).writerows(rows)
    return lines.getvalue()


_FOUND = "Return the messages that match, without their bodies, the newest first"
_add_export("messages", "ndjson", f"{_FOUND}: one JSON object a line.")
_add_export("messages", "csv", f"{_FOUND}, as CSV.")
_add_export("audit", "csv", "Return what operators did, the newest first, as CSV.")


@router.get("/sagas", tags=["sagas"])
def flows(context: Context, query: Listed[FlowFilter] = from_query(FlowFilter, PageQuery)) -> model.Page[FlowRow]:
    """Return the flows of sagas that match, the newest first."""
    return context.sagas.flows(*query)


@router.get("/sagas/{flow_id}", responses=problems(404), tags=["sagas"])
def flow(context: Context, flow_id: UUID) -> FlowView:
    """Return a flow, and the commands that it has sent."""
    return context.sagas.flow(flow_id)
