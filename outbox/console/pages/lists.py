"""The pages with lists: their filter, which is in the URL, and the links to their other pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from outbox.console.pages import fields
from outbox.console.pages.fields import PERIODS, Fields, fixed
from outbox.console.pages.view import PageView, View
from outbox.errors import BulkJobNotFound, InvalidRequest, UnknownDatabase
from outbox.operator.acts import AUDITED
from outbox.operator.model import MAX_PAGE, HalfStatus, MessageStatus, Page, PageRequest

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
    a bulk job on all of them. ``fault`` tells what is wrong with the filter; then there are no rows.
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
    view: PageView,
    of: str,
    labels: Mapping[str, str],
    fetch: Callable[[Fields, PageRequest], Page[T]],
    *,
    fixed_fields: Mapping[str, str] | None = None,
) -> Listing[T]:
    """Return the page of a list that the URL asks for.

    ``labels`` names the fields of its filter, those without a text are no part of what can be cleared. The page itself
    sets ``fixed_fields``.
    """
    everything = Fields.of_query(view.request.url.query)
    asked = everything.only(list(labels))
    wanted = Fields([*asked.pairs(), *(fixed_fields or {}).items()])
    fault = None
    try:
        size = everything.count("size", least=1, most=MAX_PAGE) or ROWS
        page = fetch(wanted, PageRequest(size, everything.text("after")))
        selector = fixed(wanted).query()
    except (InvalidRequest, UnknownDatabase) as error:
        fault, page, size, selector = str(error), Page([]), ROWS, ""
    here = view.context.url(*view.context.path.strip("/").split("/"))
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
    return PERIODS[value][0] if name == "within" and value in PERIODS else value


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


router = APIRouter(include_in_schema=False)


@router.get("/messages")
def messages(view: View) -> Response:
    """Show the messages of the producers."""
    found = listing(view, "messages", _MESSAGES, lambda f, page: view.admin.messages(fields.message_filter(f), page))
    return view.page("messages.html", found.status, list=found, statuses=list(MessageStatus), spans=PERIODS)


@router.get("/dead")
def dead(view: View, tab: str = "open") -> Response:
    """Show the dead letters in groups, or the discarded ones as a list."""
    if tab == "discarded":
        found = listing(
            view,
            "inbox",
            _DISCARDED,
            lambda f, page: view.admin.inbox(fields.inbox_filter(f), page),
            fixed_fields={"status": "parked", "discarded": "yes"},
        )
        return view.page("discarded.html", found.status, list=found)
    query = Fields.of_query(view.request.url.query)
    where = {name: query.text(name) for name in ("database", "group", "topic")}
    groups = view.admin.dead_groups(**where, limit=_GROUPS)
    return view.page("dead.html", groups=groups, where=where, limit=_GROUPS)


@router.get("/halves")
def halves(view: View) -> Response:
    """Show the undecided halves."""
    found = listing(view, "halves", _HALVES, lambda f, page: view.admin.halves(fields.half_filter(f), page))
    return view.page("halves.html", found.status, list=found, statuses=list(HalfStatus))


@router.get("/scheduled")
def scheduled(view: View) -> Response:
    """Show the scheduled messages, or the recalled ones."""
    found = listing(
        view, "messages", _SCHEDULED, lambda f, page: view.admin.scheduled(fields.scheduled_filter(f), page)
    )
    return view.page("scheduled.html", found.status, list=found)


@router.get("/inbox")
def inbox(view: View) -> Response:
    """Show the rows of the inboxes."""
    found = listing(view, "inbox", _INBOX, lambda f, page: view.admin.inbox(fields.inbox_filter(f), page))
    statuses = ("consumed", "failed", "parked", "rolled_back")
    return view.page("inbox.html", found.status, list=found, statuses=statuses, spans=PERIODS)


@router.get("/handlers")
def handlers(view: View) -> Response:
    """Show the workers and what is registered on them."""
    return view.page("handlers.html", handlers=view.admin.handlers(), workers=view.admin.workers())


@router.get("/audit")
def audit(view: View) -> Response:
    """Show what operators did."""
    found = listing(view, "audit", _AUDIT, lambda f, page: view.admin.audit(fields.audit_filter(f), page))
    return view.page("audit.html", found.status, list=found, actions=list(AUDITED), spans=PERIODS)


@router.get("/system")
def system(view: View) -> Response:
    """Show what all of this runs on."""
    return view.page("system.html", system=view.admin.system())


@router.get("/jump")
def jump(view: View, q: str = "") -> Response:
    """Lead to the bulk job or the message of an id, else to the messages of a key."""
    text, url = q.strip(), view.context.url
    try:
        found = UUID(text)
    except ValueError:
        return RedirectResponse(url("messages", key=text), 303)
    try:
        return RedirectResponse(url("bulk-jobs", view.admin.bulk_job(found).id), 303)
    except BulkJobNotFound:
        return RedirectResponse(url("messages", found), 303)
