"""The pages with lists: their filter, which is in the URL, and the links to their other pages."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl, urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from outbox.acts.changes import Act, MessageStatus
from outbox.acts.whole_acts import AUDITED
from outbox.console.api.lists import KEYS, of_each, types_of
from outbox.console.pages.view import PageView, View
from outbox.errors import DatabaseUnreached, InvalidRequest, NotFound
from outbox.flow.saga import SagaStatus
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.look.paging import listed, numbers_near
from outbox.operator.model import MAX_PAGE, MessageView, Page, PageRequest
from outbox.operator.operator import Operator
from outbox.reader import Reader, grouped, option, shape_of
from outbox.reconcile.record.orders import ReconciliationOrders, RunOrder
from outbox.reconcile.record.views import MOST_LEFT, FindingFilter, FindingView, RunFilter, RunState, Schedule

T = TypeVar("T")
F = TypeVar("F")
#: Names and texts, as a URL or a form has them; a name may come several times.
Pairs = list[tuple[str, str]]

#: Periods that can be picked instead of a moment.
PERIODS = {
    "15m": ("last 15 minutes", dt.timedelta(minutes=15)),
    "1h": ("last hour", dt.timedelta(hours=1)),
    "24h": ("last 24 hours", dt.timedelta(hours=24)),
    "7d": ("last 7 days", dt.timedelta(days=7)),
    "30d": ("last 30 days", dt.timedelta(days=30)),
}
#: How many pages one can go back.
_TRAIL = 20
_MOST_FIELDS = 200
_FIRST = "first"
#: So many runs of a pair tell how it went over the nights.
_NIGHTS = 30
#: The most groups of dead letters on the page.
MOST_GROUPS = 200

READER = Reader("text", error=InvalidRequest, zone=dt.UTC)


def pairs_of(query: str) -> Pairs:
    """Return the names and texts of a query; an empty text counts as none."""
    try:
        pairs = parse_qsl(query, keep_blank_values=False, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has more than {_MOST_FIELDS} fields", "query") from None
    return [(name, text.strip()) for name, text in pairs if text.strip()]


def read(kind: type[F], pairs: Pairs) -> F:
    """Return the dataclass that these fields are, the others are left out; ``within`` is a period that ends now."""
    return READER.read(kind, grouped(_readable(kind, pairs)))


async def _form_pairs(request: Request) -> Pairs:
    form = await request.form()
    return [(name, text.strip()) for name, text in form.multi_items() if isinstance(text, str) and text.strip()]


#: The parameter by which an endpoint gets the fields of a form; an empty text counts as none.
FormPairs = Annotated[Pairs, Depends(_form_pairs)]


def options_of(act: Act, pairs: Pairs) -> dict[str, Any]:
    """Return the options of an act that are set in a form."""
    return {each.name: True for each in act.options if each.name in dict(pairs)}


def names_of(kind: Any) -> set[str]:
    """Return the names of the fields that a dataclass has, and of the period that stands for one."""
    names = {name for each in shape_of(kind) for name in (each.name, *each.option.aliases)}
    return names | ({"within"} if "since" in names else set())


def _readable(kind: Any, pairs: Pairs) -> Pairs:
    """Return the fields that a dataclass has; a period is a moment, so that it means the same a minute later."""
    names = names_of(kind)
    pairs = [pair for pair in pairs if pair[0] in names]
    if (period := dict(pairs).get("within")) is None:
        return pairs
    if period not in PERIODS:
        raise InvalidRequest(f"within = {period!r} must be one of {', '.join(PERIODS)}", "within")
    since = (dt.datetime.now(dt.UTC) - PERIODS[period][1]).replace(microsecond=0)
    return [pair for pair in pairs if pair[0] not in {"within", "since"}] + [("since", since.isoformat())]


@dataclass(frozen=True, slots=True)
class Paging:
    """Which page of a list: its size, its number, or the token after which it begins and those of the pages before."""

    size: int = option(50, least=1, most=MAX_PAGE)
    page: int = option(1)
    after: str | None = option(None)
    trail: tuple[str, ...] = option(())


class Listing(Generic[F, T]):
    """The page of a list that the URL requests, with its filter, which is a ``kind``.

    ``tabs`` are fields of it that select a tab of the page: they aren't cleared with the filter. The page itself sets
    ``fixed`` fields. ``values`` are those of the filter's fields, ``applied`` is for each of them its name, its text
    and the URL without it. ``before`` and ``after`` are the URLs of the pages beside this one. ``filter`` selects the
    same rows again, for a bulk job on all of them, ``shown`` those of its periods whenever it is read. ``fault`` says
    what is wrong with the filter, if it is.
    """

    def __init__(
        self,
        view: PageView,
        kind: type[F],
        fetch: Callable[[F, PageRequest], Page[T]],
        *,
        tabs: Collection[str] = (),
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        everything, fixed = pairs_of(view.request.url.query), fixed or {}
        shown = [(name, text) for name, text in everything if name in names_of(kind) or name in tabs]
        criteria = [pair for pair in shown if pair[0] not in fixed] + list(fixed.items())
        self.page: Page[T] = Page([])
        self.filter: str = ""
        self.shown: str = urlencode(shown)
        self.fault: str = ""
        paging = Paging()
        try:
            paging = read(Paging, everything)
            self.page = fetch(read(kind, criteria), PageRequest(paging.size, paging.after, paging.page))
            self.filter = urlencode(_readable(kind, criteria))
        except InvalidRequest as error:
            self.fault = view.operator.shown(str(error))
        here = view.context.url(*view.context.path.strip("/").split("/"))
        size = [("size", str(paging.size))] if paging.size != Paging().size else []

        def to(pairs: Pairs, after: str = _FIRST, trail: Sequence[str] = ()) -> str:
            """Return the URL of the page after a token, of the rows that these fields select."""
            token = [] if after == _FIRST else [("after", after)]
            query = urlencode([*pairs, *size, *token, *(("trail", each) for each in trail[-_TRAIL:])])
            return here + (f"?{query}" if query else "")

        many = {each.name for each in shape_of(cast(Any, kind)) if each.many}
        trail, following = paging.trail[-_TRAIL:], self.page.next_page_token
        self.values: dict[str, list[str] | str] = {
            n: [text for name, text in shown if name == n] if n in many else value for n, value in shown
        }
        self.applied: list[tuple[str, str, str]] = [
            (name.replace("_", " "), PERIODS[text][0] if name == "within" and text in PERIODS else text,
             to([pair for pair in shown if pair != (name, text)]))
            for name, text in shown
            if name not in tabs
        ]  # fmt: skip

        def numbered(page: int) -> str:
            """Return the URL of the page of a number."""
            return to([*shown, ("page", str(page))] if page > 1 else shown)

        numbers = [] if paging.after else numbers_near(paging.page, paging.size, self.page.total)
        #: The pages that can be gone to by their numbers, None in place of those that are left out.
        self.numbers: list[tuple[int, str] | None] = [
            None if each is None else (each, numbered(each)) for each in numbers
        ]
        self.number: int = paging.page
        self.size: int = paging.size
        self.clear: str = to([pair for pair in shown if pair[0] in tabs])
        self.first: str | None = to(shown) if paging.after else None
        self.before: str | None = to(shown, trail[-1], trail[:-1]) if trail else None
        if self.number > 1 and not self.fault:
            self.before = numbered(self.number - 1)
        self.after: str | None = to(shown, following, [*trail, paging.after or _FIRST]) if following else None

    @property
    def status(self) -> int:
        """The HTTP status of the page."""
        return 422 if self.fault else 200


@dataclass(frozen=True, slots=True)
class Unfiltered:
    """The filter of a list that has none."""


def listing_of(view: PageView, call: str, rows: Sequence[T], unreached: Collection[str]) -> Listing[Unfiltered, T]:
    """Return the page that the URL requests of all that a call has returned."""
    return Listing(view, Unfiltered, lambda _, page: listed(rows, page, KEYS[call], unreached))


router: APIRouter = APIRouter(include_in_schema=False)


def _add_list(
    call: str, tabs: Collection[str] = (), *, further: str = "", of: str = "operator", name: str = "", **shown: Any
) -> None:
    """Add the page of a list that a call returns, with what else is ``shown``, and the call ``further`` on its rows."""
    kind, name = types_of(call, of)["criteria"], name or call.replace("_", "-")

    def show(view: View) -> Response:
        found: Listing[Any, Any] = Listing(view, kind, getattr(getattr(view.context, of), call), tabs=tabs)
        more = {further: getattr(view.operator, further)(found.page.items)} if further else {}
        more |= {"suggested": view.operator.names()} if "topic" in names_of(kind) else {}
        more |= {"saved": view.operator.saved_filters(name, view.context.actor.name), "of": name}
        return view.page(f"{name.replace('-', '_')}.html", found.status, list=found, **shown, **more)

    router.add_api_route(f"/{name}", show)


_add_list("messages", further="fates_of", statuses=[*MessageStatus, *model.MessageFate], periods=PERIODS)
_add_list("halves", statuses=list(model.HalfStatus))
_add_list("scheduled", tabs={"recalled"})
_add_list("inbox", statuses=list(Status), periods=PERIODS)
_add_list("bulk_jobs", states=list(model.BulkJobState))
_add_list("flows", tabs={"overdue", "open"}, of="sagas", name="sagas", statuses=list(SagaStatus))


@router.get("/dead")
def dead(view: View, tab: str = "open") -> Response:
    """Show the dead letters in groups, or the discarded ones as a list."""
    if tab == "discarded":
        fixed = {"status": "parked", "discarded": "yes"}
        found = Listing(view, model.InboxFilter, view.operator.inbox, tabs={"tab"}, fixed=fixed)
        return view.page("discarded.html", found.status, list=found)
    criteria = read(model.InboxFilter, pairs_of(view.request.url.query))
    where = {"database": criteria.database, "group": criteria.group, "topic": criteria.topic}
    groups, unreached = of_each(
        view.operator, lambda each: each.dead_groups(**where, limit=MOST_GROUPS), criteria.database
    )
    groups.sort(key=lambda group: -group.count.value)
    return view.page("dead.html", groups=groups[:MOST_GROUPS], where=where, limit=MOST_GROUPS, unreached=unreached)


@router.get("/sagas/{flow_id}")
def flow(view: View, flow_id: UUID) -> Response:
    """Show a flow with its commands."""
    return view.page("saga.html", view=view.context.sagas.flow(flow_id))


@router.get("/audit")
def audit(view: View) -> Response:
    """Show what operators did; a bulk job as its order and its end, unless its messages are searched for.

    The file that it leads to has the messages of bulk jobs as well.
    """
    names = dict(pairs_of(view.request.url.query))
    fixed = {} if names.keys() & {"each", "target", "action"} else {"summed": "yes"}
    found = Listing(view, model.AuditFilter, view.operator.audit, tabs={"each"}, fixed=fixed)
    file = urlencode([pair for pair in pairs_of(found.filter) if pair[0] not in fixed])
    return view.page("audit.html", found.status, list=found, file=file, actions=AUDITED, periods=PERIODS)


@router.get("/handlers")
def handlers(view: View) -> Response:
    """Show the workers with their functions, and the processes that send."""
    registered, unreached = of_each(view.operator, Operator.handlers)
    running, _ = of_each(view.operator, Operator.workers)
    running.sort(key=lambda row: not row.alive)
    sending, _ = of_each(view.operator, Operator.producers)
    topics = {kind: {row.topic for row in registered if row.kind == kind} for kind in ("consumer", "compensation")}
    found = listing_of(view, "handlers", registered, unreached)
    shown = {"workers": running, "producers": sending, "without": []}
    if not unreached:
        shown["without"] = sorted(topics["consumer"] - topics["compensation"])
    return view.page("handlers.html", found.status, list=found, most=MOST_ROWS, **shown)


def _add_rows(path: str, call: Callable[[Operator], Iterable[Any]]) -> None:
    """Add the page of all rows that an operator's call returns, of each database."""

    def show(view: View) -> Response:
        found = listing_of(view, call.__name__, *of_each(view.operator, call))
        return view.page(f"{path}.html", found.status, list=found)

    router.add_api_route(f"/{path}", show)


_add_rows("cron", Operator.cron_schedules)
_add_rows("locks", Operator.locks)
_add_rows("silences", Operator.silences)


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
    except (NotFound, DatabaseUnreached):
        # The page of the message says what can't be reached, if that is where it would be.
        return RedirectResponse(url("messages", found), 303)


# --- reconciliations -----------------------------------------------------------------------------------

reconciliations: APIRouter = APIRouter(prefix="/reconciliations", include_in_schema=False)

#: What a finding's facts are called, on the side that has them, where that isn't their name.
_NAMES = {"at": "Since", "effects": "Rows in the business table", "received_at": "Received", "changed_at": "Changed"}


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a side: as it was found, and as it is now; None where that side doesn't say it."""

    name: str
    found: Any
    now: Any


def _timetables(operator: Operator) -> list[tuple[Schedule, list[RunOrder]]]:
    """Return the reconciliations that workers have, each with the orders that wait."""
    reconciliations = ReconciliationOrders(operator.databases)
    orders = reconciliations.orders()

    def waiting(row: Schedule) -> list[RunOrder]:
        return [each for each in orders if each.schedule == row.name and (each.topic, each.group) in row.pairs[:1]]

    return [(each, waiting(each)) for each in reconciliations.schedules()]


@reconciliations.get("")
def runs(view: View) -> Response:
    """Show the runs, and what workers run by a timetable."""
    found = Listing(view, RunFilter, view.context.reconciliations.runs)
    schedules, unreached = of_each(view.operator, _timetables)
    shown = {"schedules": schedules, "most": MOST_ROWS, "unreached": unreached}
    shown |= {"states": list(RunState), "most_left": MOST_LEFT}
    return view.page("reconciliations.html", found.status, list=found, **shown)


@reconciliations.get("/{run_id}")
def run(view: View, run_id: UUID) -> Response:
    """Show a run: its differences by kind, the sums, and the findings."""
    reconciliations = view.context.reconciliations
    found = reconciliations.run(run_id)
    findings = Listing(view, FindingFilter, lambda criteria, page: reconciliations.findings(run_id, criteria, page))
    of_pair = RunFilter(database=found.run.database, topic=found.run.topic, group=found.run.group)
    before = reconciliations.runs(of_pair, PageRequest(size=_NIGHTS)).items
    # As far as this run, the oldest first.
    nights = [each.differences or 0 for each in before if each.started_at <= found.run.started_at][::-1]
    producers = view.operator.producers_of(found.run.topic)
    shown = {"view": found, "run": found.run, "list": findings, "nights": nights, "producers": producers}
    return view.page("reconciliation_run.html", findings.status, **shown)


@reconciliations.get("/{run_id}/findings/{message_id}")
def finding(view: View, run_id: UUID, message_id: UUID) -> Response:
    """Show both sides of a finding, as they were and as they are, and what can be done."""
    found = view.context.reconciliations.finding(run_id, message_id)
    message = _message(view, message_id)
    producer, consumer = _facts(found, message)
    return view.page("finding.html", found=found, run=found.run, message=message, producer=producer, consumer=consumer)


def _message(view: PageView, message_id: UUID) -> MessageView | None:
    """Return the message as it is now; None if nothing but its findings is left of it."""
    try:
        message = view.operator.message(message_id)
    except NotFound:  # the page says so
        return None
    return message if message.half or message.inbox or message.unseen else None


def _facts(found: FindingView, message: MessageView | None) -> tuple[list[Fact], list[Fact]]:
    """Return the facts of the producer's side and of the consumer's, side by side with how they are now."""
    now: dict[str, Any] = {}
    if message is not None:
        last = message.sends[-1] if message.sends else {}
        now = {"state": message.status, "sends": last.get("send_number"), "at": last.get("visible_at")}
        now |= {name: last.get(name) for name in ("queue", "position")}
        now["compensated"] = message.compensation is not None or None
        for row in message.inbox:
            if (row.group, row.database) == (found.run.group, found.run.database):
                now |= {name: getattr(row, name) for name in ("status", "attempts", "received_at", "changed_at")}

    def facts(side: Mapping[str, Any]) -> list[Fact]:
        return [Fact(_NAMES.get(name, name.capitalize()), value, now.get(name)) for name, value in side.items()]

    return facts(found.producer), facts(found.consumer)
