"""Endpoints that give the body of a message: masked, or as it is to those who may, which the audit records."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from outbox.admin.model import Body
from outbox.console import guard
from outbox.console.api import answers
from outbox.console.api.answers import problems
from outbox.console.console import Console
from outbox.console.permissions import Permission
from outbox.errors import MessageNotFound

_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


def add_routes(router: APIRouter, console: Console) -> None:
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
        guard.check_origin(console.trust, request.headers, console.facts(request))
