"""The pages with lists: their filter, which is in the URL, and the links to their other pages."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from outbox.console.pages.view import PageView, View
from outbox.errors import BulkJobNotFound, InvalidRequest
from outbox.message.model import Status
from outbox.operator.acts import AUDITED, Act
from outbox.operator.model import (
    MAX_PAGE,
    AuditFilter,
    HalfFilter,
    HalfStatus,
    InboxFilter,
    MessageFilter,
    MessageStatus,
    Page,
    PageRequest,
    ScheduledFilter,
)
from outbox.reader import Reader, grouped, option, shape_of

T = TypeVar("T")
F = TypeVar("F")
#: Names and texts, as a URL or a form has them; a name may come several times.
Pairs = list[tuple[str, str]]

#: Periods that can be picked instead of a moment.
PERIODS = MappingProxyType(
    {
        "15m": ("last 15 minutes", dt.timedelta(minutes=15)),
        "1h": ("last hour", dt.timedelta(hours=1)),
        "24h": ("last 24 hours", dt.timedelta(hours=24)),
        "7d": ("last 7 days", dt.timedelta(days=7)),
        "30d": ("last 30 days", dt.timedelta(days=30)),
    }
)
#: How many pages one can go back.
_TRAIL = 20
_FIRST = "first"
#: The most groups of dead letters on the page.
_GROUPS = 200

READER = Reader("text", error=InvalidRequest, zone=dt.UTC)


def pairs_of(query: str) -> Pairs:
    """Return the names and texts of a query; an empty text counts as none."""
    pairs = parse_qsl(query, keep_blank_values=False, max_num_fields=200)
    return [(name, text.strip()) for name, text in pairs if text.strip()]


def read(kind: type[F], pairs: Pairs) -> F:
    """Return the dataclass that these fields are, the others are left out; ``within`` is a period that begins now.

    Raises:
        InvalidRequest: a text that isn't a value; names the field.
    """
    return READER.read(kind, grouped(_with_moment(only(kind, pairs))))


async def _form_pairs(request: Request) -> Pairs:
    form = await request.form()
    return [(name, text.strip()) for name, text in form.multi_items() if isinstance(text, str) and text.strip()]


#: The parameter by which an endpoint gets the fields of a form; an empty text counts as none.
FormPairs = Annotated[Pairs, Depends(_form_pairs)]


def options_of(act: Act, pairs: Pairs) -> dict[str, Any]:
    """Return the options of an act that are set in a form.

    Raises:
        InvalidRequest: a text that isn't a value; names the option.
    """
    texts = dict(pairs)
    options: dict[str, Any] = {}
    for each in act.options:
        try:
            options |= {each.name: each.type(texts[each.name])} if each.name in texts else {}
        except ValueError:
            raise InvalidRequest(f"{each.name} = {texts[each.name][:80]!r} must be a number", each.name) from None
    return options


def only(kind: type, pairs: Pairs) -> Pairs:
    """Return the fields that a dataclass has."""
    names = {name for each in shape_of(kind) for name in (each.name, *each.option.aliases)}
    names |= {"within"} if "since" in names else set()
    return [(name, text) for name, text in pairs if name in names]


def _with_moment(pairs: Pairs) -> Pairs:
    """Return the same fields with a moment in place of a period, so that they mean the same a minute later."""
    period = dict(pairs).get("within")
    if period is None:
        return pairs
    if period not in PERIODS:
        raise InvalidRequest(f"within = {period!r} must be one of {', '.join(PERIODS)}", "within")
    since = (dt.datetime.now(dt.UTC) - PERIODS[period][1]).replace(microsecond=0)
    return [pair for pair in pairs if pair[0] not in {"within", "since"}] + [("since", since.isoformat())]


@dataclass(frozen=True, slots=True)
class Paging:
    """Which page of a list: its size, the token after which it begins, and the tokens of the pages before."""

    size: int = option(50, least=1, most=MAX_PAGE)
    after: str | None = option(None)
    trail: tuple[str, ...] = option(())


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of a list with its filter.

    ``values`` are those of the filter's fields, ``applied`` is for each of them its name, its text and the URL without
    it. ``before`` and ``after`` are the URLs of the pages beside this one. ``filter`` selects the same rows again, for
    a bulk job on all of them. ``fault`` says what is wrong with the filter; then there are no rows.
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
    kind: type[F],
    fetch: Callable[[F, PageRequest], Page[T]],
    *,
    tabs: Collection[str] = (),
    fixed: Mapping[str, str] | None = None,
) -> Listing[T]:
    """Return the page of a list that the URL requests.

    ``kind`` is the filter. ``tabs`` are its fields that select a tab of the page: they aren't cleared with the filter.
    The page itself sets ``fixed`` fields.
    """
    everything = pairs_of(view.request.url.query)
    shown = [pair for pair in everything if pair in only(kind, [pair]) or pair[0] in tabs]
    criteria = [pair for pair in shown if pair[0] not in (fixed or {})] + list((fixed or {}).items())
    fault = None
    paging = Paging()
    try:
        paging = READER.read(Paging, grouped(only(Paging, everything)))
        page = fetch(read(kind, criteria), PageRequest(paging.size, paging.after))
        selector = urlencode(_with_moment(only(kind, criteria)))
    except InvalidRequest as error:
        fault, page, selector = str(error), Page([]), ""
    turn = _Turn(view.context.url(*view.context.path.strip("/").split("/")), shown, paging)
    many = {each.name for each in shape_of(cast(Any, kind)) if each.many}
    return Listing(
        of,
        page,
        {name: [text for other, text in shown if other == name] if name in many else value for name, value in shown},
        [
            (name.replace("_", " "), PERIODS[text][0] if name == "within" and text in PERIODS else text,
             turn.to([pair for pair in shown if pair != (name, text)]))
            for name, text in shown
            if name not in tabs
        ],
        turn.to([pair for pair in shown if pair[0] in tabs]),
        turn.to(shown) if paging.after else None,
        turn.back(),
        turn.on(page.next_page_token),
        selector,
        fault,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Turn:
    """Makes the URLs of other pages of the same list, whose filter is ``shown``."""

    here: str
    shown: Pairs
    paging: Paging

    def to(self, pairs: Pairs, *more: tuple[str, str]) -> str:
        size = [("size", str(self.paging.size))] if self.paging.size != Paging().size else []
        query = urlencode([*pairs, *size, *more])
        return self.here + (f"?{query}" if query else "")

    def back(self) -> str | None:
        if not self.paging.trail:
            return None
        *rest, last = self.paging.trail[-_TRAIL:]
        token = [] if last == _FIRST else [("after", last)]
        return self.to(self.shown, *token, *(("trail", each) for each in rest))

    def on(self, following: str | None) -> str | None:
        if following is None:
            return None
        trail = [*self.paging.trail, self.paging.after or _FIRST][-_TRAIL:]
        return self.to(self.shown, ("after", following), *(("trail", each) for each in trail))


router = APIRouter(include_in_schema=False)


@router.get("/messages")
def messages(view: View) -> Response:
    """Show the messages of the producers."""
    found = listing(view, "messages", MessageFilter, view.operator.messages)
    return view.page("messages.html", found.status, list=found, statuses=list(MessageStatus), periods=PERIODS)


@router.get("/dead")
def dead(view: View, tab: str = "open") -> Response:
    """Show the dead letters in groups, or the discarded ones as a list."""
    if tab == "discarded":
        fixed = {"status": "parked", "discarded": "yes"}
        found = listing(view, "inbox", InboxFilter, view.operator.inbox, tabs={"tab"}, fixed=fixed)
        return view.page("discarded.html", found.status, list=found)
    criteria = read(InboxFilter, pairs_of(view.request.url.query))
    where = {"database": criteria.database, "group": criteria.group, "topic": criteria.topic}
    groups = view.operator.dead_groups(**where, limit=_GROUPS)
    return view.page("dead.html", groups=groups, where=where, limit=_GROUPS)


@router.get("/halves")
def halves(view: View) -> Response:
    """Show the undecided halves."""
    found = listing(view, "halves", HalfFilter, view.operator.halves)
    return view.page("halves.html", found.status, list=found, statuses=list(HalfStatus))


@router.get("/scheduled")
def scheduled(view: View) -> Response:
    """Show the scheduled messages, or the recalled ones."""
    found = listing(view, "messages", ScheduledFilter, view.operator.scheduled, tabs={"recalled"})
    return view.page("scheduled.html", found.status, list=found)


@router.get("/inbox")
def inbox(view: View) -> Response:
    """Show the rows of the inboxes."""
    found = listing(view, "inbox", InboxFilter, view.operator.inbox)
    return view.page("inbox.html", found.status, list=found, statuses=list(Status), periods=PERIODS)


@router.get("/handlers")
def handlers(view: View) -> Response:
    """Show the workers and what is registered on them."""
    return view.page("handlers.html", handlers=view.operator.handlers(), workers=view.operator.workers())


@router.get("/audit")
def audit(view: View) -> Response:
    """Show what operators did."""
    found = listing(view, "audit", AuditFilter, view.operator.audit)
    return view.page("audit.html", found.status, list=found, actions=AUDITED, periods=PERIODS)


@router.get("/system")
def system(view: View) -> Response:
    """Show versions, revisions, tables and settings."""
    return view.page("system.html", system=view.operator.system())


@router.get("/jump")
def jump(view: View, q: str = "") -> Response:
    """Lead to the bulk job or the message of an id, else to the messages of a key."""
    text, url = q.strip(), view.context.url
    try:
        found = UUID(text)
    except ValueError:
        return RedirectResponse(url("messages", key=text), 303)
    try:
        return RedirectResponse(url("bulk-jobs", view.operator.bulk_job(found).id), 303)
    except BulkJobNotFound:
        return RedirectResponse(url("messages", found), 303)
