"""Endpoints that find messages and show one with its whole way."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Response

from outbox.admin.model import MessageRow, MessageView, Page
from outbox.console.api import answers, fields
from outbox.console.api.answers import problems
from outbox.console.conditions import IfNoneMatch, etag, is_known
from outbox.console.console import Console
from outbox.console.routing import only_reads

_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It is still as you have it"}}


def add_routes(router: APIRouter, console: Console) -> None:
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
