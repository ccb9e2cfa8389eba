"""The report as one HTML file: charts drawn beforehand, no script, and nothing that is loaded from anywhere.

Jinja2 escapes all values, and the page's own policy (CSP) forbids scripts and every request. Of a chart's shapes x and
width are percents, so that it fits every screen, and y is pixels; a shape has the name of a class, whose colour is the
page's.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from outbox.destination import Destination, whole_at
from outbox.reconcile.job import Outcome
from outbox.reconcile.measure.result import EXACT, MeasureResult, MeasureRow
from outbox.reconcile.report import (
    amount,
    backlog_of,
    bound,
    cost_of,
    first_rows,
    listed_of,
    reports,
    sentence_of,
    verdict,
)
from outbox.reconcile.rows import JobResult, Lag, fixed_ids
from outbox.text import counted, duration, key_text, plain

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

#: Widths of a column in seconds; beyond them as many years as it takes.
WIDTHS = (_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 3 * _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 28 * _DAY, 364 * _DAY)

_NEVER = np.iinfo(np.int64).min


class Timeline(NamedTuple):
    """``numbers[kind][i]`` findings are from ``starts[i]`` on, for ``width`` seconds; ``undated`` have no time."""

    width: int
    starts: tuple[dt.datetime, ...]
    numbers: dict[Outcome, tuple[int, ...]]
    undated: int


def timeline(findings: pa.Table, now: dt.datetime, most: int = 48) -> Timeline | None:
    """Return when findings came about, in at most so many columns; None if no finding has a time.

    A finding's time is `Finding.since`, else the time at which its id was made; nothing is later than ``now``.
    """
    if not findings.num_rows:
        return None
    seconds = np.minimum(_seconds(findings), int(now.timestamp()))
    dated = seconds >= 0
    if not dated.any():
        return None
    seconds, outcomes = seconds[dated], findings["outcome"].to_numpy()[dated]
    first, last = int(seconds.min()), int(seconds.max())
    width = next(
        (width for width in WIDTHS if last // width - first // width < most),
        WIDTHS[-1] * -(-(last - first + 1) // (WIDTHS[-1] * (most - 1))),
    )
    begin = first // width
    columns = last // width - begin + 1
    bins = seconds // width - begin
    return Timeline(
        width,
        tuple(dt.datetime.fromtimestamp((begin + column) * width, dt.UTC) for column in range(columns)),
        {
            Outcome(kind): tuple(np.bincount(bins[outcomes == kind], minlength=columns).tolist())
            for kind in np.unique(outcomes).tolist()
        },
        int((~dated).sum()),
    )


def _seconds(findings: pa.Table) -> np.ndarray[Any, Any]:
    """Return the times of findings in seconds since 1970; negative where there is none."""
    known = pc.max_element_wise(findings["at"].cast(pa.int64()), findings["changed_at"].cast(pa.int64()))
    micros = pc.fill_null(known, int(_NEVER)).to_numpy()
    heads = np.ascontiguousarray(fixed_ids(findings)).view(">u8")[::2]
    has_time = np.isin((heads >> np.uint64(12)) & np.uint64(0xF), (7, 8))
    made = np.where(has_time, (heads >> np.uint64(16)).astype(np.int64) // 1000, -1)
    return np.where(micros == _NEVER, made, micros // 1_000_000)


#: The height of a chart with columns.
HEIGHT = 160.0

#: So many kinds have a colour of their own; the rest share one.
COLOURS = 6
_OTHER = "other"


class Rect(NamedTuple):
    """A rectangle with a tooltip."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str


class Columns(NamedTuple):
    """A chart of columns: ``highest`` is the number that its height stands for; head and rows are its table.

    A label is its x, its anchor and its text; an entry of the legend a colour and a name.
    """

    rects: list[Rect]
    labels: list[tuple[float, str, str]]
    highest: int
    legend: list[tuple[str, str]]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class MeasureBars(NamedTuple):
    """One row of a measure: above what was sent, below what became of it; no shapes where a number isn't finite."""

    row: MeasureRow
    sent: tuple[Rect, ...] = ()
    arrived: tuple[Rect, ...] = ()


def colours(kinds: Sequence[Outcome]) -> dict[Outcome, str]:
    """Return the colour of each kind, the gravest first."""
    return {kind: f"c{at}" if at < COLOURS else _OTHER for at, kind in enumerate(kinds)}


def kinds_over_time(timeline: Timeline, colour: Mapping[Outcome, str]) -> Columns:
    """Return the findings by kind and time, one kind upon the other."""
    kinds = sorted(timeline.numbers)
    form = "%Y-%m-%d" if timeline.width >= _DAY else "%m-%d %H:%M"
    times = [start.strftime(form) for start in timeline.starts]
    found = [
        (column, time, kind, number)
        for column, time in enumerate(times)
        for kind in kinds
        if (number := timeline.numbers[kind][column])
    ]
    shapes = [
        (column, number, colour[kind], f"{time}: {number:,} {kind.label}") for column, time, kind, number in found
    ]
    legend = {colour[kind]: "other kinds" if colour[kind] == _OTHER else kind.label for kind in kinds}
    rows = [(time, kind.label, f"{number:,}") for _, time, kind, number in found]
    return _columns(times, shapes, list(legend.items()), ("from (UTC)", "kind", "differences"), rows)


def lags(lag: Lag) -> Columns:
    """Return the histogram of the lag."""
    last = bound(lag.bounds[-1])
    names = [*(f"within {bound(limit)}" for limit in lag.bounds), f"over {last}"]
    shorts = [*(f"≤ {bound(limit)}" for limit in lag.bounds), f"> {last}"]
    rows = [(name, f"{count:,}") for name, count in zip(names, lag.counts, strict=True)]
    shapes = [(column, lag.counts[column], "c4", ": ".join(row)) for column, row in enumerate(rows)]
    return _columns(shorts, shapes, [], ("lag", "messages"), rows)


def _columns(
    texts: Sequence[str],
    shapes: Sequence[tuple[int, int, str, str]],
    legend: list[tuple[str, str]],
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
) -> Columns:
    """Return the chart of shapes (column, number, colour, title), those of a column upon each other."""
    totals = [0] * len(texts)
    for column, number, _, _ in shapes:
        totals[column] += number
    step = 100 / len(texts)
    tops = [HEIGHT] * len(texts)
    rects = []
    for column, number, colour, title in shapes:
        if number:
            # The least of numbers can be seen, even beside a million.
            height = max(1.5, HEIGHT * number / max(totals))
            tops[column] -= height
            rects.append(Rect(step * (column + 0.1), max(0.0, tops[column]), step * 0.8, height, colour, title))
    # The first text, the middle one and the last: as many as fit beside each other on a telephone.
    last = len(texts) - 1
    ends = {last: (100.0, "end"), 0: (0.0, "start")}
    labels = [(*ends.get(at, (step * (at + 0.5), "middle")), texts[at]) for at in sorted({0, round(last / 2), last})]
    return Columns(rects, labels, max(totals), legend, head, tuple(rows))


def measure_bars(measure: MeasureResult) -> list[tuple[str, list[MeasureBars]]]:
    """Return the rows of a measure that the page shows, by value, with their shapes."""
    shown = first_rows(measure, ROWS)
    return [
        (value, _bars([row for row in shown if row.value == value]))
        for value in dict.fromkeys(row.value for row in shown)
    ]


def _bars(rows: Sequence[MeasureRow]) -> list[MeasureBars]:
    finite = [_ends(row) for row in rows if _is_finite(row)]
    low, high = (choose((Decimal(), *(end for ends in finite for end in ends))) for choose in (min, max))

    def rects(*parts: tuple[Decimal, Decimal, str, str]) -> tuple[Rect, ...]:
        shapes = []
        for begin, end, colour, title in parts:
            if begin != end:
                first, last = sorted(float((value - low) / (high - low) * 100) for value in (begin, end))
                shapes.append(Rect(first, 0, max(0.4, last - first), 0, colour, title))
        return tuple(shapes)

    def bars(row: MeasureRow) -> MeasureBars:
        sent, consumed, known = _ends(row)
        return MeasureBars(
            row,
            rects((Decimal(), sent, "sent", f"producer, without what was rolled back: {sent:,f}")),
            rects(
                (Decimal(), consumed, "consumed", f"consumer: {consumed:,f}"),
                (consumed, known, "flight", f"in flight: {row.in_flight:,f}"),
                (known, sent, "unexplained", f"unexplained: {row.unexplained:,f}"),
            ),
        )

    return [bars(row) if _is_finite(row) else MeasureBars(row) for row in rows]


def _ends(row: MeasureRow) -> tuple[Decimal, Decimal, Decimal]:
    """Return the sums sent to stay, consumed, and consumed or in flight."""
    return EXACT.subtract(row.producer, row.rolled_back), row.consumer, EXACT.add(row.consumer, row.in_flight)


def _is_finite(row: MeasureRow) -> bool:
    return all(number.is_finite() for number in (row.producer, row.rolled_back, row.consumer, row.in_flight))


#: The greatest number of findings on the page, and of repairs, over all pairs; and of rows of a measure.
LIMIT = 500
ROWS = 40


def write_html(path: Destination, result: JobResult, limit: int = LIMIT) -> None:
    """Write the page, at once and whole."""
    with whole_at(path) as file:
        file.write(render(result, limit).encode())


def render(result: JobResult, limit: int = LIMIT) -> str:
    """Return the page, with at most so many findings and repairs."""
    totals = sum((pair.counts for pair in result.pairs), Counter[Outcome]())
    page = template("report.html.j2")
    return page.render(result=result, verdict=verdict(result), reports=reports(result, limit), totals=totals)


@cache
def template(name: str) -> Template:
    """Return a template of this package by its name."""
    environment = Environment(
        loader=PackageLoader("outbox.reconcile.report"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": amount,
        "code": _code,
        "counted": counted,
        "duration": duration,
        "key_text": key_text,
        "moment": _moment,
        "number": "{:,}".format,
    }
    functions = (backlog_of, colours, cost_of, kinds_over_time, lags, listed_of, measure_bars, sentence_of, timeline)
    environment.globals |= {each.__name__: each for each in functions} | {"Outcome": Outcome, "chart_height": HEIGHT}
    return environment.get_template(name)


def _finalize(value: object) -> object:
    # Control characters as well: copied from the page into a terminal, they mustn't steer it.
    return plain(value) if type(value) is str else value


def _code(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    return Markup().join(
        Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(text.split("`"))
    )


def _moment(moment: dt.datetime | None) -> str:
    return "" if moment is None else moment.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S") + " UTC"
