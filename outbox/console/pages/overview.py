"""The overview: what needs an operator, how things are, and how they went, as charts without style or script.

The shapes of a chart lie in a box of 100 by 100 that is stretched over the plot. Colours are the style sheet's: a shape
only has the number of one.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Response

from outbox.console.pages.view import View
from outbox.operator.health.series import Series

#: So many series have a colour of their own; the rest share the last.
COLOURS = 6
_LABELS = 4
_ROUND = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


WINDOWS = ("1h", "6h", "24h", "7d")


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
    Tile("failed", "Waiting for a retry", "inbox", {"status": "failed"}),
    Tile("lag", "Worst lag of a group", "inbox"),
    Tile("throughput", "Throughput", "messages", unit="/min"),
    Tile("pending", "Not yet dispatched", "messages", {"status": "committed"}),
    Tile("oldest_pending", "The oldest of them waits", "messages", {"status": "committed"}, unit="s"),
    Tile("undecided", "Undecided halves", "halves"),
    Tile("scheduled", "Scheduled", "scheduled"),
)


router = APIRouter(include_in_schema=False)


@router.get("/")
def overview(view: View, window: str = "1h") -> Response:
    """Show the overview."""
    found = view.operator.overview(window)
    return view.page(
        "overview.html", overview=found, charts=charts(found.series), window=window, windows=WINDOWS, tiles=TILES
    )


def charts(series: Sequence[Series]) -> list[Chart]:
    """Return the charts of the overview, as far as there is anything to draw."""
    by_name = {one.name: one for one in series}

    def named(*names: tuple[str, str]) -> list[Series]:
        return [
            Series(title, by_name[name].unit, by_name[name].times, by_name[name].values)
            for name, title in names
            if name in by_name
        ]

    lags = [one for one in series if one.name.startswith("lag/")]
    # The worst first, as they stand now.
    lags.sort(key=lambda one: -(next((v for v in reversed(one.values) if v is not None), 0)))
    at_producer = named(("backlog", "not yet dispatched"), ("undecided", "undecided"))
    in_inboxes = named(("failed", "waiting for a retry"), ("dead", "dead letters"))
    drawn = (
        draw("throughput", "Messages a minute", named(("throughput", "sent"), ("consumed", "consumed"))),
        draw("backlog", "Waiting at the producer", at_producer, colours=(1, 5)),
        draw("lag", "Lag of the groups", [_lag(one) for one in lags[:COLOURS]]),
        draw("dead", "Trouble in the inboxes", in_inboxes, colours=(3, 4)),
    )
    return [chart for chart in drawn if chart is not None]


def _lag(series: Series) -> Series:
    topic, _, group = series.name.removeprefix("lag/").partition("/")
    return Series(f"{group} of {topic}", series.unit, series.times, series.values)


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
    """A column that shows the values at its time when it is pointed at."""

    x: float
    width: float
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart; ``peak`` is the value at its upper edge, ``labels`` are times under it, ``rows`` its twin as a table."""

    name: str
    title: str
    unit: str
    shapes: tuple[Shape, ...]
    hits: tuple[Hit, ...]
    labels: tuple[str, ...]
    peak: float
    head: tuple[str, ...]
    rows: tuple[tuple[dt.datetime, tuple[float | None, ...]], ...]

    @property
    def known(self) -> bool:
        """Is there any value?"""
        return any(value is not None for _, values in self.rows for value in values)


def draw(
    name: str, title: str, series: Sequence[Series], *, colours: Sequence[int] = range(1, COLOURS + 1)
) -> Chart | None:
    """Return a chart of series that share their times; None where there is nothing to draw: no series, or no times."""
    if not series or not series[0].times:
        return None
    times = series[0].times
    values = [[_finite(value) for value in one.values] for one in series]
    columns = list(zip(*values, strict=True))
    peak = nice(max((value for column in columns for value in column if value is not None), default=0))
    shapes = tuple(
        Shape(one.name, colours[min(index, len(colours) - 1)], *_line(known, peak), _last(known))
        for index, (one, known) in enumerate(zip(series, values, strict=True))
    )
    return Chart(
        name,
        title,
        series[0].unit,
        shapes,
        _hits(times, series, columns),
        _labels(times),
        peak,
        tuple(one.name for one in series),
        tuple(zip(reversed(times), reversed(columns), strict=True)),
    )


def nice(value: float) -> float:
    """Return the least round number that isn't under the value."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next((step * power for step in _ROUND if value <= step * power * (1 + 1e-9)), 10 * power)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else max(0.0, float(value))


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _line(values: Sequence[float | None], peak: float) -> tuple[str, str]:
    """Return a line through the values and the area under it, with a gap where nothing is known."""
    step = 100 / max(1, len(values) - 1)
    lines: list[str] = []
    areas: list[str] = []
    run: list[tuple[float, float]] = []
    for index, value in enumerate([*values, None]):
        if value is not None:
            run.append((index * step, 100 - 100 * value / peak))
        elif run:
            if len(run) == 1:
                # A point alone would be nothing to see.
                run.append((min(100.0, run[0][0] + step / 2), run[0][1]))
            points = "L".join(f"{x:.2f} {y:.2f}" for x, y in run)
            lines.append(f"M{points}")
            areas.append(f"M{run[0][0]:.2f} 100L{points}L{run[-1][0]:.2f} 100Z")
            run = []
    return "".join(lines), "".join(areas)


def _hits(
    times: Sequence[dt.datetime], series: Sequence[Series], columns: Sequence[Sequence[float | None]]
) -> tuple[Hit, ...]:
    step = 100 / len(times)
    return tuple(
        Hit(
            round(step * index, 3),
            round(step, 3),
            "\n".join(
                [moment(time, long=True)]
                + [
                    f"{one.name}: {'unknown' if value is None else f'{value:,.10g} {one.unit}'}"
                    for one, value in zip(series, column, strict=True)
                ]
            ),
        )
        for index, (time, column) in enumerate(zip(times, columns, strict=True))
    )


def _labels(times: Sequence[dt.datetime]) -> tuple[str, ...]:
    count = min(_LABELS, len(times))
    indices = sorted({round(index * (len(times) - 1) / max(1, count - 1)) for index in range(count)})
    long = (times[-1] - times[0]) > dt.timedelta(hours=36)
    return tuple(moment(times[index], long=long) for index in indices)


def moment(time: dt.datetime, *, long: bool) -> str:
    """Return a time for an axis, in UTC."""
    return time.astimezone(dt.UTC).strftime("%d %b %H:%M" if long else "%H:%M")
