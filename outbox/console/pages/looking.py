"""The pages with lists: messages, dead letters, halves, schedule, inboxes, audit; and what all of it runs on."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from outbox.admin.model import Action
from outbox.console.pages import fields
from outbox.console.pages.fields import Fields
from outbox.console.pages.listing import listing
from outbox.errors import OperationNotFound
from outbox.halves import HalfStatus
from outbox.messages import MessageStatus

if TYPE_CHECKING:
    from outbox.console.pages.view import View

_TIMES = {"within": "within", "since": "since", "until": "until"}
_MESSAGES = MappingProxyType(
    {"status": "status", "topic": "topic", "key": "key", "tag": "tag", "producer_group": "producer", "header": "header",
     "body": "body", "database": "database", **_TIMES}
)  # fmt: skip
_INBOX = MappingProxyType(
    {"status": "status", "group": "group", "topic": "topic", "message": "message", "error": "error",
     "attempts": "attempts at least", "fingerprint": "kind of error", "discarded": "discarded", "database": "database",
     **_TIMES}
)  # fmt: skip
_DISCARDED = MappingProxyType({"tab": "", "group": "group", "topic": "topic", "database": "database"})
_HALVES = MappingProxyType({"status": "status", "topic": "topic", "age": "minutes old", "database": "database"})
_SCHEDULED = MappingProxyType({"topic": "topic", "recalled": "", "database": "database"})
_AUDIT = MappingProxyType(
    {"actor": "who", "action": "action", "target": "target", "database": "database", **_TIMES}
)  # fmt: skip

#: The most groups of dead letters on the page.
_GROUPS = 200


def add_routes(router: APIRouter, view: View) -> None:
    """Add the pages with lists."""
    console = view.console

    @router.get("/messages")
    def messages(request: Request) -> Response:
        found = listing(
            console,
            request,
            "messages",
            _MESSAGES,
            lambda f, page: console.admin.messages(fields.message_filter(f), page),
        )  # fmt: skip
        return view.page(
            request, "messages.html", found.status, list=found, statuses=list(MessageStatus), spans=fields.SPANS
        )

    @router.get("/dead")
    def dead(request: Request, tab: str = "open") -> Response:
        if tab == "discarded":
            found = listing(
                console, request, "inbox", _DISCARDED,
                lambda f, page: console.admin.inbox(fields.inbox_filter(f), page),
                given={"status": "parked", "discarded": "yes"},
            )  # fmt: skip
            return view.page(request, "discarded.html", found.status, list=found)
        asked = Fields.of_query(request.url.query)
        where = {name: asked.text(name) for name in ("database", "group", "topic")}
        groups = console.admin.dead_groups(**where, limit=_GROUPS)
        return view.page(request, "dead.html", groups=groups, where=where, limit=_GROUPS)

    @router.get("/halves")
    def halves(request: Request) -> Response:
        found = listing(
            console, request, "halves", _HALVES, lambda f, page: console.admin.halves(fields.half_filter(f), page)
        )
        return view.page(request, "halves.html", found.status, list=found, statuses=list(HalfStatus))

    @router.get("/scheduled")
    def scheduled(request: Request) -> Response:
        found = listing(
            console, request, "messages", _SCHEDULED,
            lambda f, page: console.admin.scheduled(fields.scheduled_filter(f), page),
        )  # fmt: skip
        return view.page(request, "scheduled.html", found.status, list=found)

    @router.get("/inbox")
    def inbox(request: Request) -> Response:
        found = listing(
            console, request, "inbox", _INBOX, lambda f, page: console.admin.inbox(fields.inbox_filter(f), page)
        )
        statuses = ("consumed", "failed", "parked", "rolled_back")
        return view.page(request, "inbox.html", found.status, list=found, statuses=statuses, spans=fields.SPANS)

    @router.get("/handlers")
    def handlers(request: Request) -> Response:
        return view.page(request, "handlers.html", handlers=console.admin.handlers(), workers=console.admin.workers())

    @router.get("/audit")
    def audit(request: Request) -> Response:
        found = listing(
            console, request, "audit", _AUDIT, lambda f, page: console.admin.audit(fields.audit_filter(f), page)
        )
        return view.page(request, "audit.html", found.status, list=found, actions=list(Action), spans=fields.SPANS)

    @router.get("/system")
    def system(request: Request) -> Response:
        return view.page(request, "system.html", system=console.admin.system())

    @router.get("/jump")
    def jump(request: Request, q: str = "") -> Response:
        text = q.strip()
        try:
            wanted = UUID(text)
        except ValueError:
            return RedirectResponse(console.path(request, "messages", key=text), 303)
        try:
            return RedirectResponse(console.path(request, "operations", console.admin.operation(wanted).id), 303)
        except OperationNotFound:
            return RedirectResponse(console.path(request, "messages", wanted), 303)
