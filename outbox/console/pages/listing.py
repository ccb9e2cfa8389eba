"""A list on a page: its filter, which is in the URL, and how one turns its pages.

The pages with lists: messages, dead letters, halves, schedule, inboxes, audit; and what all of it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from outbox.console.pages import fields
from outbox.console.pages.fields import SPANS, Fields, fixed
from outbox.errors import BulkJobNotFound, InvalidRequest, UnknownDatabase
from outbox.operator.model import MAX_PAGE, Action, Page, PageRequest
from outbox.operator.old_halves import HalfStatus
from outbox.operator.old_messages import MessageStatus

if TYPE_CHECKING:
    from outbox.console.console import Console
    from outbox.console.pages.view import View

T = TypeVar("T")

#: Rows on a page, if nobody says otherwise, and how many pages one can go back.
ROWS = 50
_TRAIL = 20
_FIRST = "first"


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of a list with its filter.

    ``values`` are those of the filter's fields, ``applied`` is for each of them its name, its text and the URL without
    it. ``before`` and ``after`` are the URLs of the pages beside this one. ``filter`` selects the same rows again, for
    an operation on all of them. ``fault`` tells what is wrong with the filter; then there are no rows.
    """

    of: str
    page: Page[T]
    values: Mapping[str, Any]
    applied: list[tuple[str, str, str]]
    clear: str
    first: str | None
    before: str | None
    after: str | None
    filter: str
    fault: str | None = None

    @property
    def status(self) -> int:
        """The HTTP status of the page."""
        return 422 if self.fault else 200


def listing(
    console: Console,
    request: Request,
    of: str,
    labels: Mapping[str, str],
    fetch: Callable[[Fields, PageRequest], Page[T]],
    *,
    given: Mapping[str, str] | None = None,
) -> Listing[T]:
    """Return the page of a list that the URL asks for.

    ``labels`` names the fields of its filter, those without a text are no part of what can be cleared. ``given`` are
    fields that the page sets itself.
    """
    everything = Fields.of_query(request.url.query)
    asked = everything.only(list(labels))
    wanted = Fields([*asked.pairs(), *(given or {}).items()])
    fault = None
    try:
        size = everything.count("size", least=1, most=MAX_PAGE) or ROWS
        page = fetch(wanted, PageRequest(size, everything.text("after")))
        selector = fixed(wanted).query()
    except (InvalidRequest, UnknownDatabase) as error:
        fault, page, size, selector = str(error), Page([]), ROWS, ""
    here = console.path(request, *console.facts(request).path.strip("/").split("/"))
    turn = _Turn(here, asked, {"size": str(size)} if size != ROWS else {}, everything.texts("trail")[-_TRAIL:])
    return Listing(
        of,
        page,
        _values(asked),
        [
            (labels[name], _text(name, value), turn.to(asked.without(name, value)))
            for name, value in asked.pairs()
            if labels[name]
        ],
        turn.to(Fields([pair for pair in asked.pairs() if not labels[pair[0]]])),
        turn.to(asked) if everything.text("after") else None,
        turn.back(),
        turn.on(everything.text("after"), page.next_page_token),
        selector,
        fault,
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    """Makes the URLs of other pages of the same list. ``trail`` are the tokens of the pages before this one."""

    here: str
    asked: Fields
    size: Mapping[str, str]
    trail: tuple[str, ...]

    def to(self, fields: Fields, *more: tuple[str, str]) -> str:
        pairs = [*fields.pairs(), *self.size.items(), *more]
        return self.here + (f"?{urlencode(pairs)}" if pairs else "")

    def back(self) -> str | None:
        if not self.trail:
            return None
        *rest, last = self.trail
        token = [] if last == _FIRST else [("after", last)]
        return self.to(self.asked, *token, *(("trail", each) for each in rest))

    def on(self, current: str | None, following: str | None) -> str | None:
        if following is None:
            return None
        trail = [*self.trail, current or _FIRST][-_TRAIL:]
        return self.to(self.asked, ("after", following), *(("trail", each) for each in trail))


def _values(fields: Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in fields.pairs():
        if name == "status":
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return values


def _text(name: str, value: str) -> str:
    return SPANS[value][0] if name == "within" and value in SPANS else value


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
        except BulkJobNotFound:
            return RedirectResponse(console.path(request, "messages", wanted), 303)
