"""Endpoints that list, show and export: messages, bodies, inboxes, halves, sagas, audit, overview, reconciliations."""

from __future__ import annotations

import copy
import csv
import dataclasses
import inspect
import io
import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_type_hints
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import StreamingResponse
from sqlalchemy.exc import SQLAlchemyError

import outbox
from outbox.acts.whole_acts import returned
from outbox.console.api import requests
from outbox.console.api.acts import ReasonBody
from outbox.console.api.requests import IfNoneMatch, Listed, PageQuery, from_body, from_query, problems
from outbox.console.auth import only_reads
from outbox.console.context import API, REVEAL, Context, RequestContext, requires
from outbox.console.problems import Problem
from outbox.errors import DatabaseUnreached, NotFound, OutboxError
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.databases import Databases, is_away
from outbox.operator.health.overview import Overview, TopicLag, shortened
from outbox.operator.health.stats import WINDOWS, Series
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


@router.get("/groups/{group}/{topic:path}/work", responses=problems(404), tags=["groups"])
def work(context: Context, group: str, topic: str, window: Window = "1h", database: str | None = None) -> list[Series]:
    """Return what the handlers of a group did in each minute: consumed, failed, p50 and p95 of their calls."""
    return context.operator.work(topic, group, database, window)


@router.get("/topics", tags=["state"])
def topics(context: Context, page: model.PageRequest = from_query(PageQuery)) -> model.Page[TopicLag]:
    """Return a page of the topics: each one's backlog, and how far the groups have come that are furthest behind."""
    found = context.operator.overview("1h")
    shown = listed(found.topics, page, lambda topic: (topic.topic, topic.database), found.unreachable)
    return dataclasses.replace(shown, items=[topic.with_groups(MOST_GROUPS) for topic in shown.items])


# --- lists and views: the call of the same name -----------------------------------------------------------


#: The calls that return all there is, and by what their pages are sorted.
KEYS: Mapping[str, Callable[[Any], tuple[object, ...]]] = {
    "handlers": lambda row: (row.kind, row.topic, row.group or "", row.name, row.database),
    "workers": lambda row: (not row.alive, row.name, row.id),
    "producers": lambda row: (row.producer_group, not row.active, row.name, row.id),
    "silences": lambda row: (row.begins_at, row.rule, row.id, row.database),
    "locks": lambda row: (row.lock, row.session, row.database),
    "cron_schedules": lambda row: (row.name, row.database),
    "topic_pauses": lambda row: (row.topic, row.database),
    "groups": lambda row: (row.group, row.topic, row.database),
    "schedules": lambda row: (row.name, row.database, row.pairs[:1]),
    "orders": lambda row: (row.schedule, row.topic, row.group),
}


def types_of(call: str, of: str = "operator") -> dict[str, Any]:
    """Return the types of what a call takes and returns: the filter is its ``criteria``, each UUID a part of the path.

    ``of`` names the property of a `RequestContext` that has the call.
    """
    return get_type_hints(_method(call, of))


def _method(call: str, of: str) -> Any:
    return getattr(returned(getattr(RequestContext, of).fget), call)


def _all_of(context: RequestContext, call: str, of: str) -> tuple[list[Any], Collection[str]]:
    """Return the rows of one of the calls in `KEYS`, and which databases can't be reached."""
    operator = context.operator
    if of != "operator":
        return getattr(getattr(context, of), call)(), operator.databases.away
    if call != "groups":
        return of_each(operator, getattr(Operator, call))
    # How far a group is behind takes two databases: it is read over all that can be reached.
    return operator.groups(), of_each(operator, Operator.topic_pauses)[1]


def _with_ids(endpoint: Any, ids: Iterable[str], query: Any) -> Any:
    """Return an endpoint ``(context, query, **ids)`` as FastAPI reads it: each of the ids is a part of its path."""
    return requests.taking(endpoint, {"context": Context, **dict.fromkeys(ids, UUID)}, {"query": query})


def _add_call(call: str, tag: str, path: str = "", of: str = "operator") -> None:
    """Add an endpoint that returns what a call does; the call says itself what it takes, and what its rows are."""
    hints = types_of(call, of)
    key, result = KEYS.get(call), hints.pop("return")
    names = [name for name, hint in hints.items() if hint is UUID]
    # A call that isn't of a list takes nothing more.
    taken = from_query(hints["criteria"], PageQuery) if "criteria" in hints else Depends(lambda: ())
    if key is not None:
        taken, result = from_query(PageQuery), model.Page[get_args(result)[0]]  # type: ignore[misc]  # what it is

    def endpoint(context: Context, query: Any, **ids: UUID) -> Any:
        if key is None:
            return getattr(getattr(context, of), call)(*(ids[name] for name in names), *query)
        rows, unreached = _all_of(context, call, of)
        return listed(rows, query, key, unreached)

    router.add_api_route(
        path or f"/{call.replace('_', '-')}",
        _with_ids(endpoint, names, taken),
        name=call,
        description=(inspect.getdoc(_method(call, of)) or "").partition("\n")[0],
        response_model=result,
        responses=problems(404) if names else {},
        tags=[tag],
    )


for _call in ("handlers", "workers", "producers", "silences", "locks", "system"):
    _add_call(_call, "state")
_add_call("groups", "groups")
_add_call("topic_pauses", "topics", "/topics/paused")
_add_call("cron_schedules", "cron", "/cron")
for _call in ("messages", "halves", "scheduled"):
    _add_call(_call, "messages")
_add_call("inbox", "inbox")
_add_call("audit", "audit")
_add_call("bulk_jobs", "bulk jobs")
_add_call("bulk_job", "bulk jobs", "/bulk-jobs/{bulk_job_id}")
_add_call("bulk_items", "bulk jobs", "/bulk-jobs/{bulk_job_id}/items")
_add_call("bulk_outcome", "bulk jobs", "/bulk-jobs/{bulk_job_id}/outcome")
_add_call("conversation", "messages", "/messages/{message_id}/conversation")
_add_call("flows", "sagas", "/sagas", "sagas")
_add_call("flow", "sagas", "/sagas/{flow_id}", "sagas")
for _call, _path in (
    *(("runs", "/runs"), ("run", "/runs/{run_id}"), ("findings", "/runs/{run_id}/findings")),
    *(("finding", "/runs/{run_id}/findings/{message_id}"), ("schedules", "/schedules"), ("orders", "/orders")),
):
    _add_call(_call, "reconciliations", f"/reconciliations{_path}", "reconciliations")


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


def _export_answers(suffix: str) -> dict[int | str, dict[str, Any]]:
    """Return how the OpenAPI document describes the file of an export."""
    # A client that doesn't know a type hands on the bytes.
    schema = _TEXT if suffix == "csv" else _BYTES
    return {200: {"content": {EXPORT_TYPES[suffix]: {"schema": schema}}}}


def _add_export(call: str, suffix: str, description: str, of: str = "operator") -> None:
    """Add an endpoint that returns all that a list's call does as a file."""
    hints = types_of(call, of)
    names = [name for name, hint in hints.items() if hint is UUID]
    (row,) = get_args(hints["return"])

    def export(context: Context, query: Any, **ids: UUID) -> StreamingResponse:
        (criteria, most), parts = query, [ids[name] for name in names]
        fetch = partial(getattr(getattr(context, of), call), *parts, criteria)
        return streamed("-".join(map(str, (call, *parts))), suffix, every_page(fetch, most.limit), row)

    router.add_api_route(
        f"/export/{'/'.join([call, *(f'{{{name}}}' for name in names)])}.{suffix}",
        _with_ids(export, names, from_query(hints["criteria"], ExportQuery)),
        name=f"{call}_{suffix}",
        description=description,
        response_class=StreamingResponse,
        responses=_export_answers(suffix) | (problems(404) if names else {}),
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
for _suffix in EXPORT_TYPES:
    _found = f"Return the findings of a run that match, in their order, as {_suffix.upper()}."
    _add_export("findings", _suffix, _found, "reconciliations")
