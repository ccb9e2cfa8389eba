"""Endpoints that do one thing to one message; those on an inbox are in `inbox`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response

from outbox.admin.model import Action, Target
from outbox.console.api import answers, bodies
from outbox.console.api.answers import Acted, problems
from outbox.console.conditions import IfMatch, etag, expected_version
from outbox.console.console import Console

_SUMMARIES = {
    Action.RESEND: "Send a dispatched message once more, with the same id",
    Action.RECALL: "Take a scheduled message back",
    Action.CHECK: "Have an undecided half checked now",
    Action.RESET: "Give a parked half all of its checks again",
    Action.COMMIT: "Decide an undecided half: commit",
    Action.ABORT: "Decide an undecided half: roll back",
}


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""
    for action, summary in _SUMMARIES.items():
        router.add_api_route(
            f"/messages/{{message_id}}/{action}",
            _on_message(console, action),
            methods=["POST"],
            name=f"{action}_message",
            summary=summary,
            dependencies=[console.requires(action)],
            response_model=answers.ActedOn,
            responses=problems(404, 409, 412, 415),
            tags=["acts"],
        )


def _on_message(console: Console, action: Action) -> Callable[..., Any]:
    def act(
        message_id: UUID, body: bodies.Act, request: Request, response: Response, if_match: IfMatch = None
    ) -> Acted:
        return do(console, action, Target(message_id), body, request, response, if_match)

    return act


def do(
    console: Console,
    action: Action,
    target: Target,
    body: bodies.Act,
    request: Request,
    response: Response,
    if_match: str | None,
) -> Acted:
    """Do one thing to one message, and return what came of it with the message as it is now."""
    outcome = console.admin.act(
        action,
        target,
        actor=console.actor_of(request),
        reason=body.reason,
        options=body.options(),
        version=expected_version(if_match),
        database=body.database,
    )
    view = console.admin.message(target.message_id)
    response.headers["ETag"] = etag(view.version)
    return Acted(outcome, view)
