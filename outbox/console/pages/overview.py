"""The overview with its charts, and what else pages draw: the sequence diagram of a conversation.

The shapes of a chart lie in a box of 100 by 100 that is stretched over the plot. Colours are the style sheet's: a shape
has a number for its colour. A diagram shows the sender, the receiver and the fate of each message, and how it ended.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastapi import APIRouter, Response

from outbox.console.pages.lists import Listing
from outbox.console.pages.view import View
from outbox.operator.backlog import BacklogFilter, BacklogRow, backlogs
from outbox.operator.health.attention import folded
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.health.rules import Diagnosis
from outbox.operator.health.stats import WINDOWS, Series
from outbox.operator.look.conversation import ConversationStep, steps_of
from outbox.operator.look.paging import listed
from outbox.operator.model import Conversation, Page, PageRequest

#: So many series have a colour of their own; the rest share the last.
COLOURS = 6
_LABELS, _GROUPS_DRAWN = 4, 3
_MINUTE, _DAY = dt.timedelta(minutes=1), 24 * 3600
#: The steps (seconds) between the times under a chart of less than some days.
_STEPS = (60, 300, 900, 1800, 3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600, _DAY)
_ROUND = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Tile:
    """One number: where it leads, and whether anything but 0 is bad news."""

    name: str
    title: str
    page: str
    query: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    grave: bool = False


TILES = (
    Tile("dead", "Dead letters", "dead", grave=True),
    Tile("failed", "Retrying", "inbox", {"status": "failed"}),
    Tile("lag", "Highest lag", "groups"),
    Tile("throughput", "Throughput", "messages", unit="/min"),
    Tile("pending", "Undispatched", "messages", {"status": "committed"}),
    Tile("oldest_pending", "Oldest waiting", "messages", {"status": "committed"}, unit="s"),
    Tile("undecided", "Undecided", "halves"),
    Tile("scheduled", "Scheduled", "scheduled"),
)


#: What there is to do about a finding, on the page that shows it.
_TO_DO = {
    "dead": "See and retry",
    "halves": "See and decide",
    "handlers": "See the workers",
    "locks": "See its holder",
    "groups": "See the stopped groups",
    "bulk-jobs": "See the jobs",
    "reconciliations": "See the runs",
    "system": "See the system",
}
#: What acts on that page heal; of all else the finding says what does.
_HEALED_HERE = {"message.parked", "half.parked"}
#: So many findings are shown at once, so many topics and groups on a page of them; the others a click away.
_AT_ONCE, ROWS_SHOWN = 4, 50

router: APIRouter = APIRouter(include_in_schema=False)


def mends(finding: Diagnosis) -> list[str]:
    """Return what mends a finding outside of the console, in steps or choices."""
    return [] if finding.code in _HEALED_HERE else finding.mend.splitlines()


def link_of(finding: Diagnosis) -> tuple[str, tuple[object, ...]]:
    """Return what an operator can do about a finding, and on which page."""
    if finding.page:
        return _TO_DO.get(finding.page, "See them"), (finding.page,)
    if about := finding.details.get("message_id", finding.details.get("half_id")):
        return "See it", ("messages", about)
    return _TO_DO["system"], ("system",)


@router.get("/")
def overview(view: View, window: str = "1h") -> Response:
    """Show the overview."""
    found = view.operator.overview(window, ROWS_SHOWN)

    def fetch(criteria: BacklogFilter, page: PageRequest) -> Page[BacklogRow]:
        return listed(backlogs(found, criteria), page, lambda row: row.order, found.unreachable)

    rows: Listing[BacklogFilter, BacklogRow] = Listing(view, BacklogFilter, fetch, tabs={"window"})
    everything = folded(found.findings[:MOST_ROWS])
    loud, silenced = ([each for each in everything if bool(each.finding.silenced) is so] for so in (False, True))
    shown: dict[str, Any] = {"attention": loud[:_AT_ONCE], "further": loud[_AT_ONCE:], "silenced": silenced}
    shown |= {"left_out": len(found.findings) - MOST_ROWS, "charts": charts(found.series)}
    always = {"tiles": TILES, "mends": mends, "link_of": link_of, "spark": spark}
    shown |= {"window": window, "windows": list(WINDOWS), **always}
    return view.page("overview.html", rows.status, overview=found, list=rows, **shown)


@router.get("/groups/{group}/{topic:path}")
def group_work(view: View, group: str, topic: str, window: str = "1h", database: str | None = None) -> Response:
    """Show what the handlers of a group did in each minute, or in one of each step: a column leads to its messages."""
    *counts, p50, p95 = view.operator.work(topic, group, database, window)
    times = [replace(each, unit="ms", values=[v and v * 1000 for v in each.values]) for each in (p50, p95)]
    where = {"group": group, "topic": topic, "database": database}
    drawn = (
        draw("work", "Consumed and failed in a minute", counts, colours=(1, 4), page="inbox", span=_MINUTE, **where),
        draw("times", "Milliseconds that a call took", times, colours=(2, 5), page="inbox", span=_MINUTE, **where),
    )
    shown: dict[str, Any] = {**where, "window": window, "windows": list(WINDOWS)}
    return view.page("group.html", charts=list(filter(None, drawn)), **shown)


@dataclass(frozen=True, slots=True)
class Shape:
    """One series, drawn: ``line`` and ``area`` are paths, ``last`` is its newest value."""

    name: str
    colour: int
    line: str
    area: str
    last: float | None


@dataclass(frozen=True, slots=True)
class Hit:
    """A column that shows the values at its time when it is pointed at, and leads to the messages of that time."""

    x: float
    width: float
    title: str
    query: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``peak`` is the value at its upper edge, ``rows`` its twin as a table.

    ``labels`` are round times under it, each with its place from the left (0 to 100).
    ``page`` is the list to which its columns lead, empty for none.
    """

    name: str
    title: str
    page: str
    shapes: tuple[Shape, ...]
    hits: tuple[Hit, ...]
    labels: tuple[tuple[float, str], ...]
    peak: float
    rows: tuple[tuple[dt.datetime, tuple[float | None, ...]], ...]

    @property
    def known(self) -> bool:
        """Is there any value?"""
        return any(shape.last is not None for shape in self.shapes)


def spark(values: Sequence[float | None]) -> str:
    """Return values over time as a small line, with a gap where nothing is known."""
    return _line(values, nice(max((each for each in values if each is not None), default=0)))[0]


def charts(series: Sequence[Series]) -> list[Chart]:
    """Return the charts of the overview, as far as there is anything to draw."""
    by_name = {one.name: one for one in series}

    def named(**titles: str) -> list[Series]:
        return [replace(by_name[name], name=title) for name, title in titles.items() if name in by_name]

    # The worst first, as they stand now.
    lags = sorted((one for one in series if one.name.startswith("lag/")), key=lambda one: -(_last(one.values) or 0))
    groups = []
    for one in lags[:_GROUPS_DRAWN]:
        topic, _, group = one.name.removeprefix("lag/").rpartition("/")
        groups.append(replace(one, name=f"{group} of {topic}"))
    in_inboxes = named(failed="retrying", dead="parked")
    decided = named(committed="committed", rolled_back="rolled back", checks="checks")
    at_producer = named(backlog="undispatched", undecided="undecided")
    drawn = (
        draw("throughput", "Messages a minute", named(throughput="sent", consumed="consumed"), page="messages"),
        draw("lag", "Lag by group", groups),
        draw("dead", "Failed and parked", in_inboxes, colours=(3, 4), page="inbox"),
        draw("backlog", "Waiting at the producer", at_producer, colours=(1, 5)),
        draw("decided", "Decisions and checks a minute", decided, colours=(2, 4, 5), page="messages"),
    )
    return [chart for chart in drawn if chart is not None]


def draw(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    colours: Sequence[int] = range(1, COLOURS + 1),
    page: str = "",
    span: dt.timedelta | None = None,
    **where: str | None,
) -> Chart | None:
    """Return a chart of series that share their times; None where there is nothing to draw: no series, or no times.

    Each value stands for the ``span`` before its time; None: for all since the value before it.
    """
    if not series or not series[0].times:
        return None
    times = series[0].times
    # A number that isn't finite is unknown.
    values = [
        [None if value is None or not math.isfinite(value) else max(0.0, value) for value in one.values]
        for one in series
    ]
    rows = tuple(zip(times, zip(*values, strict=True), strict=True))
    width, before = 100 / len(times), span or (times[1] - times[0] if len(times) > 1 else _MINUTE)

    def hit(index: int, time: dt.datetime, column: Sequence[float | None]) -> Hit:
        lines = (
            f"{one.name}: {'unknown' if value is None else f'{value:,.10g} {one.unit}'}"
            for one, value in zip(series, column, strict=True)
        )
        # A page has hundreds of these links: as short as they can be, of whole minutes.
        query = {**where, "since": f"{time - before:%Y-%m-%dT%H:%MZ}", "until": f"{time:%Y-%m-%dT%H:%MZ}"}
        title = "\n".join([time.astimezone(dt.UTC).strftime("%d %b %H:%M"), *lines])
        return Hit(round(width * index, 3), round(width, 3), title, query)

    peak = nice(max((value for known in values for value in known if value is not None), default=0))
    return Chart(
        name,
        title,
        page,
        shapes=tuple(
            Shape(one.name, colours[min(index, len(colours) - 1)], *_line(known, peak), _last(known))
            for index, (one, known) in enumerate(zip(series, values, strict=True))
        ),
        hits=tuple(hit(index, *row) for index, row in enumerate(rows)),
        labels=_labels(times),
        peak=peak,
        rows=rows[::-1],
    )


def nice(value: float) -> float:
    """Return the least round number that isn't under the value."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next((step * power for step in _ROUND if value <= step * power * (1 + 1e-9)), 10 * power)


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _line(values: Sequence[float | None], peak: float) -> tuple[str, str]:
    """Return a line through the values and the area under it, with a gap where nothing is known."""
    step = 100 / max(1, len(values) - 1)
    line = area = ""
    points = [
        None if value is None else (round(index * step, 2), round(100 - 100 * value / peak, 2))
        for index, value in enumerate(values)
    ]
    for known, group in itertools.groupby(points, key=lambda point: point is not None):
        run = [point for point in group if point is not None]
        if not known:
            continue
        if len(run) == 1:
            # A point alone would be nothing to see.
            run.append((min(100.0, run[0][0] + step / 2), run[0][1]))
        path = "L".join(f"{x:g} {y:g}" for x, y in run)
        line += f"M{path}"
        area += f"M{run[0][0]:g} 100L{path}L{run[-1][0]:g} 100Z"
    return line, area


def _labels(times: Sequence[dt.datetime]) -> tuple[tuple[float, str], ...]:
    """Return where the round times of an axis lie, and how they are written: in UTC, a midnight as its day."""
    first, last = int(times[0].timestamp()), int(times[-1].timestamp())
    least = (last - first) / _LABELS
    step = next((each for each in _STEPS if each >= least), _DAY * math.ceil(least / _DAY))
    return tuple(
        (
            round(100 * (at - first) / max(last - first, 1), 2),
            dt.datetime.fromtimestamp(at, dt.UTC).strftime("%H:%M" if at % _DAY else "%d %b"),
        )
        for at in range(-(-first // step) * step, last + 1, step)
    )


#: Sizes, in the units of the picture.
_COLUMN, _ROW, _TOP, _MARGIN = 190, 46, 60, 95
#: How many steps of a conversation a page has: each is drawn, and a row.
STEPS = 100


@dataclass(frozen=True, slots=True)
class Arrow(ConversationStep):
    """A step of a conversation, drawn: ``x`` and ``to`` are where the arrow begins and ends."""

    x: int = 0
    to: int = 0
    y: int = 0

    @property
    def is_loop(self) -> bool:
        """Does the arrow end where it begins?"""
        return self.x == self.to

    @property
    def middle(self) -> int:
        """Where the label stands."""
        return self.x + _COLUMN // 2 + 20 if self.is_loop else (self.x + self.to) // 2

    @property
    def head(self) -> str:
        """The corners of the arrow's head."""
        back, y = (7, self.y + 14) if self.is_loop else (-7 if self.to > self.x else 7, self.y)
        return f"{self.to},{y} {self.to + back},{y - 4} {self.to + back},{y + 4}"


class Diagram:
    """The picture of a conversation: where the ``lifelines`` of groups are, by their names, and ``steps`` in order.

    It has one ``page`` (from 1) of so many ``pages``: of ``count`` steps those after the first ``before``.
    """

    def __init__(self, conversation: Conversation, page: int = 1) -> None:
        every = steps_of(conversation.messages)
        self.count: int = len(every)
        self.pages: int = max(-(-self.count // STEPS), 1)
        self.page: int = min(page, self.pages)
        self.before: int = (self.page - 1) * STEPS
        steps = every[self.before : self.before + STEPS]
        names = dict.fromkeys(name for step in steps for name in (step.source, step.target) if name is not None)
        self.lifelines: dict[str, int] = {name: _MARGIN + number * _COLUMN for number, name in enumerate(names)}
        self.steps: list[Arrow] = []
        for number, step in enumerate(steps):
            x = self.lifelines[step.source]
            nowhere = x if step.status == "compensated" else x + _COLUMN // 2
            to = nowhere if step.target is None else self.lifelines[step.target]
            facts = {each.name: getattr(step, each.name) for each in fields(step)}
            self.steps.append(Arrow(**facts, x=x, to=to, y=_TOP + (number + 1) * _ROW))
        self.width: int = 2 * _MARGIN + max(len(names) - 1, 0) * _COLUMN + _COLUMN // 2
        self.height: int = _TOP + (len(steps) + 1) * _ROW
