"""Endpoints of the inboxes and their dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request, Response

from outbox.console.api import acts, answers, fields
from outbox.console.api.acts import do
from outbox.console.api.answers import Acted, problems
from outbox.console.api.fields import IfMatch
from outbox.console.console import Console
from outbox.operator.model import Action, DeadGroup, InboxRow, Page, Target

Group = Annotated[str, Path(max_length=120, pattern=r"^[%|a-zA-Z0-9_-]+$")]

_SUMMARIES = {
    Action.RETRY: "Handle a parked or failed message again, now",
    Action.PARK: "Set a failed message aside",
    Action.DISCARD: "Put a parked message away; it can be restored until it is pruned",
    Action.RESTORE: "Take a discarded message back among the parked ones",
}


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoints."""

    @router.get("/inbox", response_model=answers.InboxPage, responses=problems(), tags=["inbox"])
    def inbox(wanted: Annotated[fields.InboxPaged, Query()]) -> Page[InboxRow]:
        """Return the inbox rows that fit, the newest message first."""
        return console.admin.inbox(wanted.filter(), wanted.page())

    @router.get("/dead", response_model=answers.InboxPage, responses=problems(), tags=["inbox"])
    def dead(wanted: Annotated[fields.DeadPaged, Query()]) -> Page[InboxRow]:
        """Return dead letters, the newest message first; or the discarded ones."""
        return console.admin.inbox(wanted.filter(), wanted.page())

    @router.get("/dead/groups", response_model=answers.DeadGroups, responses=problems(), tags=["inbox"])
    def dead_groups(wanted: Annotated[fields.DeadGroups, Query()]) -> list[DeadGroup]:
        """Return dead letters by group, topic and kind of error, the biggest first."""
        return console.admin.dead_groups(
            database=wanted.database, group=wanted.group, topic=wanted.topic, limit=wanted.limit
        )

    for action, summary in _SUMMARIES.items():
        router.add_api_route(
            f"/inbox/{{group}}/{{message_id}}/{action}",
            _on_inbox(console, action),
            methods=["POST"],
            name=f"{action}_in_inbox",
            summary=summary,
            dependencies=[console.requires(action)],
            response_model=answers.ActedOn,
            responses=problems(404, 409, 412, 415),
            tags=["inbox"],
        )


def _on_inbox(console: Console, action: Action) -> Callable[..., Any]:
    def act(
        group: Group,
        message_id: UUID,
        body: acts.Act,
        request: Request,
        response: Response,
        if_match: IfMatch = None,
    ) -> Acted:
        return do(console, action, Target(message_id, group), body, request, response, if_match)

    return act
