"""Endpoints that list and show: messages, inboxes, halves, schedule, audit, workers, and how things are."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Response

import outbox
from outbox.console.api import fields
from outbox.console.api.answers import Database, Meta, problems
from outbox.console.api.fields import PREFIX, IfNoneMatch, etag, is_known
from outbox.console.auth import only_reads
from outbox.console.context import Context
from outbox.operator.health.overview import Overview, TopicLag
from outbox.operator.health.system import System
from outbox.operator.health.workers import HandlerRow, WorkerRow
from outbox.operator.model import AuditRow, DeadGroup, HalfRow, InboxRow, MessageRow, MessageView, Page, ScheduledRow

Window = Literal["1h", "6h", "24h", "7d"]

router = APIRouter(prefix=PREFIX, responses=problems())

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It is still as you have it"}}


@router.get("/meta", tags=["console"])
def meta(context: Context) -> Meta:
    """Return what this console is, and what you may do in it."""
    principal, console = context.principal, context.console
    opened = context.admin.databases
    return Meta(
        version=outbox.__version__,
        environment=console.environment,
        read_only=console.read_only,
        principal=principal.id,
        name=principal.name,
        role=principal.role,
        permissions=sorted(each for each in principal.permissions if context.may(each)),
        databases=[
            *(Database(name, sorted(database.parts), True) for name, database in opened.items()),
            *(Database(name, [], False) for name in console.source.missing),
        ],
    )


@router.get("/overview", tags=["state"])
def overview(context: Context, window: Window = "1h") -> Overview:
    """Return how things are: numbers, problems in sentences, topics with their lag, charts."""
    return context.admin.overview(window)


@router.get("/topics", tags=["state"])
def topics(context: Context) -> list[TopicLag]:
    """Return each topic's backlog, and how far each of its groups has come."""
    return context.admin.overview("1h").topics


@router.get("/handlers", tags=["state"])
def handlers(context: Context) -> list[HandlerRow]:
    """Return what is registered on the living workers."""
    return context.admin.handlers()


@router.get("/workers", tags=["state"])
def workers(context: Context) -> list[WorkerRow]:
    """Return the workers that run or were not ended in order."""
    return context.admin.workers()


@router.get("/system", tags=["state"])
def system(context: Context) -> System:
    """Return what all of this runs on."""
    return context.admin.system()


@router.get("/messages", tags=["messages"])
def messages(context: Context, query: Annotated[fields.MessagesPaged, Query()]) -> Page[MessageRow]:
    """Return the messages that match, the newest first."""
    return context.admin.messages(query.filter(), query.page())


@router.post("/messages/query", responses=problems(415), tags=["messages"])
@only_reads
def query_messages(context: Context, query: fields.MessagesPaged) -> Page[MessageRow]:
    """Return the messages that match, the newest first; the conditions are in the body."""
    return context.admin.messages(query.filter(), query.page())


@router.get(
    "/messages/{message_id}", response_model=MessageView, responses=problems(404) | _NOT_MODIFIED, tags=["messages"]
)
def message(
    context: Context, message_id: UUID, response: Response, if_none_match: IfNoneMatch = None
) -> MessageView | Response:
    """Return all that is known of a message; its entity tag is what an act's If-Match takes."""
    view = context.admin.message(message_id)
    if is_known(if_none_match, view.version):
        return Response(status_code=304, headers={"ETag": etag(view.version)})
    response.headers["ETag"] = etag(view.version)
    return view


@router.get("/halves", tags=["state"])
def halves(context: Context, query: Annotated[fields.HalvesPaged, Query()]) -> Page[HalfRow]:
    """Return undecided halves, the oldest first."""
    return context.admin.halves(query.filter(), query.page())


@router.get("/scheduled", tags=["state"])
def scheduled(context: Context, query: Annotated[fields.ScheduledPaged, Query()]) -> Page[ScheduledRow]:
    """Return scheduled messages, the next due first."""
    return context.admin.scheduled(query.filter(), query.page())


@router.get("/inbox", tags=["inbox"])
def inbox(context: Context, query: Annotated[fields.InboxPaged, Query()]) -> Page[InboxRow]:
    """Return the inbox rows that match, the newest message first."""
    return context.admin.inbox(query.filter(), query.page())


@router.get("/dead", tags=["inbox"])
def dead(context: Context, query: Annotated[fields.DeadPaged, Query()]) -> Page[InboxRow]:
    """Return dead letters, the newest message first; or the discarded ones."""
    return context.admin.inbox(query.filter(), query.page())


@router.get("/dead/groups", tags=["inbox"])
def dead_groups(context: Context, query: Annotated[fields.DeadGroups, Query()]) -> list[DeadGroup]:
    """Return dead letters by group, topic and kind of error, the biggest first."""
    return context.admin.dead_groups(database=query.database, group=query.group, topic=query.topic, limit=query.limit)


@router.get("/audit", tags=["state"])
def audit(context: Context, query: Annotated[fields.AuditPaged, Query()]) -> Page[AuditRow]:
    """Return what operators did, the newest first."""
    return context.admin.audit(query.filter(), query.page())
