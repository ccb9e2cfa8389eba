"""Endpoints that show how things stand: overview, topics, halves, scheduled messages, workers, audit, system.

Endpoints that find messages and show one with its whole way.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

import outbox
from outbox.console.api import answers, fields
from outbox.console.api.answers import Database, Meta, problems
from outbox.console.api.fields import IfNoneMatch, etag, is_known
from outbox.console.console import Console
from outbox.console.routing import only_reads
from outbox.operator.model import (
    AuditRow,
    HalfRow,
    HandlerRow,
    MessageRow,
    MessageView,
    Overview,
    Page,
    ScheduledRow,
    System,
    TopicLag,
    WorkerRow,
)

Window = Literal["1h", "6h", "24h", "7d"]


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""

    @router.get("/meta", response_model=answers.About, responses=problems(), tags=["console"])
    def meta(request: Request) -> Meta:
        """Return what this console is, and what you may do in it."""
        principal = console.principal_of(request)
        opened = console.admin.databases
        return Meta(
            version=outbox.__version__,
            environment=console.environment,
            read_only=console.read_only,
            principal=principal.id,
            name=principal.name,
            role=principal.role,
            permissions=sorted(each for each in principal.permissions if console.may(request, each)),
            databases=[
                *(Database(name, sorted(database.parts), True) for name, database in opened.items()),
                *(Database(name, [], False) for name in console.missing),
            ],
        )

    @router.get("/overview", response_model=answers.Overview, responses=problems(), tags=["looking"])
    def overview(window: Window = "1h") -> Overview:
        """Return how things stand: numbers, problems in sentences, topics with their lag, charts."""
        return console.admin.overview(window)

    @router.get("/topics", response_model=answers.Topics, responses=problems(), tags=["looking"])
    def topics() -> list[TopicLag]:
        """Return each topic's backlog, and how far each of its groups has come."""
        return console.admin.overview("1h").topics

    @router.get("/halves", response_model=answers.HalfPage, responses=problems(), tags=["looking"])
    def halves(wanted: Annotated[fields.HalvesPaged, Query()]) -> Page[HalfRow]:
        """Return undecided halves, the oldest first."""
        return console.admin.halves(wanted.filter(), wanted.page())

    @router.get("/scheduled", response_model=answers.ScheduledPage, responses=problems(), tags=["looking"])
    def scheduled(wanted: Annotated[fields.ScheduledPaged, Query()]) -> Page[ScheduledRow]:
        """Return scheduled messages, the next due first."""
        return console.admin.scheduled(wanted.filter(), wanted.page())

    @router.get("/handlers", response_model=answers.Handlers, responses=problems(), tags=["looking"])
    def handlers() -> list[HandlerRow]:
        """Return what is registered on the living workers."""
        return console.admin.handlers()

    @router.get("/workers", response_model=answers.Workers, responses=problems(), tags=["looking"])
    def workers() -> list[WorkerRow]:
        """Return the workers that run or were not ended in order."""
        return console.admin.workers()

    @router.get("/audit", response_model=answers.AuditPage, responses=problems(), tags=["looking"])
    def audit(wanted: Annotated[fields.AuditPaged, Query()]) -> Page[AuditRow]:
        """Return what operators did, the newest first."""
        return console.admin.audit(wanted.filter(), wanted.page())

    @router.get("/system", response_model=answers.System, responses=problems(), tags=["looking"])
    def system() -> System:
        """Return what all of this runs on."""
        return console.admin.system()


_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It is still as you have it"}}


def add_message_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""

    @router.get("/messages", response_model=answers.MessagePage, responses=problems(), tags=["messages"])
    def messages(wanted: Annotated[fields.MessagesPaged, Query()]) -> Page[MessageRow]:
        """Return the messages that fit, the newest first."""
        return console.admin.messages(wanted.filter(), wanted.page())

    @router.post("/messages/query", response_model=answers.MessagePage, responses=problems(415), tags=["messages"])
    @only_reads
    def query(wanted: fields.MessagesPaged) -> Page[MessageRow]:
        """Return the messages that fit, the newest first; the conditions are in the body."""
        return console.admin.messages(wanted.filter(), wanted.page())

    @router.get(
        "/messages/{message_id}",
        response_model=answers.Message,
        responses=problems(404) | _NOT_MODIFIED,
        tags=["messages"],
    )
    def message(message_id: UUID, response: Response, if_none_match: IfNoneMatch = None) -> MessageView | Response:
        """Return all that is known of a message; its entity tag is what an act's If-Match takes."""
        view = console.admin.message(message_id)
        if is_known(if_none_match, view.version):
            return Response(status_code=304, headers={"ETag": etag(view.version)})
        response.headers["ETag"] = etag(view.version)
        return view
