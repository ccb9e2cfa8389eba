"""The report as one HTML file: charts drawn beforehand, no script, and nothing that is loaded from anywhere.

Jinja2 escapes all values, and the page's own policy (CSP) forbids scripts and every request. Of a chart's shapes x and
width are percents, so that it fits every screen, and y is pixels; a shape has the name of a class, whose colour is the
page's.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from outbox.reconcile.job import Outcome
from outbox.reconcile.report import (
    MEANING,
    PairReport,
    ReportDocument,
    amount,
    bound,
    document,
    first_rows,
    sentence_of,
)
from outbox.reconcile.rows import EXACT, JobResult, Lag, MeasureResult, MeasureRow, fixed_ids
from outbox.text import counted, duration, plain

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

#: Widths of a column in seconds; beyond them as many years as it takes.
WIDTHS = (_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 3 * _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 28 * _DAY, 364 * _DAY)

_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Timeline:
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
    is_uuid7 = (heads >> np.uint64(12)) & np.uint64(0xF) == 7
    made = np.where(is_uuid7, (heads >> np.uint64(16)).astype(np.int64) // 1000, -1)
    return np.where(micros == _NEVER, made, micros // 1_000_000)


#: The height of a chart with columns.
HEIGHT = 160.0

#: So many kinds have a colour of their own; the rest share one.
COLOURS = 6
_OTHER = "other"
# As many as fit beside each other on a telephone.
_LABELS = 3
_ROWS = 40


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle with a tooltip."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str


@dataclass(frozen=True, slots=True)
class Label:
    """A text under a chart."""

    x: float
    anchor: str
    text: str


@dataclass(frozen=True, slots=True)
class Columns:
    """A chart of columns: ``highest`` is the number that its height stands for; head and rows are its table."""

    rects: tuple[Rect, ...]
    labels: tuple[Label, ...]
    highest: int
    legend: tuple[tuple[str, str], ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class MeasureBars:
    """One row of a measure: above what was sent, below what became of it; no shapes where a number isn't finite."""

    row: MeasureRow
    sent: tuple[Rect, ...]
    arrived: tuple[Rect, ...]


def colours(kinds: Sequence[Outcome]) -> dict[Outcome, str]:
    """Return the colour of each kind, the gravest first."""
    return {kind: f"c{at}" if at < COLOURS else _OTHER for at, kind in enumerate(kinds)}


def kinds_over_time(timeline: Timeline, colour: Mapping[Outcome, str]) -> Columns:
    """Return the findings by kind and time, one kind upon the other."""
    kinds = sorted(timeline.numbers)
    times = [_charts_moment(start, timeline.width) for start in timeline.starts]
    stacks = [[(kind, timeline.numbers[kind][column]) for kind in kinds] for column in range(len(times))]
    legend = {colour[kind]: kind.label for kind in kinds if colour[kind] != _OTHER}
    if _OTHER in map(colour.__getitem__, kinds):
        legend[_OTHER] = "other kinds"
    return _columns(
        [
            [(colour[kind], number, f"{time}: {number:,} {kind.label}") for kind, number in stack]
            for time, stack in zip(times, stacks, strict=True)
        ],
        _labels(times),
        tuple(legend.items()),
        ("from (UTC)", "kind", "differences"),
        [
            (time, kind.label, f"{number:,}")
            for time, stack in zip(times, stacks, strict=True)
            for kind, number in stack
            if number
        ],
    )


def lags(lag: Lag) -> Columns:
    """Return the histogram of the lag."""
    names = [f"within {bound(limit)}" for limit in lag.bounds] + [f"over {bound(lag.bounds[-1])}"]
    shorts = [f"≤ {bound(limit)}" for limit in lag.bounds] + [f"> {bound(lag.bounds[-1])}"]
    counts = list(zip(names, lag.counts, strict=True))
    return _columns(
        [[("c4", count, f"{name}: {count:,}")] for name, count in counts],
        _labels(shorts, centred=True),
        (),
        ("lag", "messages"),
        [(name, f"{count:,}") for name, count in counts],
    )


def _columns(
    stacks: Sequence[Sequence[tuple[str, int, str]]],
    labels: tuple[Label, ...],
    legend: tuple[tuple[str, str], ...],
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
) -> Columns:
    highest = max((sum(number for _, number, _ in stack) for stack in stacks), default=0)
    step = 100 / max(1, len(stacks))
    rects = []
    for at, stack in enumerate(stacks):
        y = HEIGHT
        for colour, number, title in stack:
            if number:
                # The least of numbers can be seen, even beside a million.
                height = max(1.5, HEIGHT * number / highest)
                y -= height
                rects.append(Rect(step * (at + 0.1), max(0.0, y), step * 0.8, height, colour, title))
    return Columns(tuple(rects), labels, highest, legend, head, tuple(rows))


def _labels(texts: Sequence[str], *, centred: bool = False) -> tuple[Label, ...]:
    """Return a few of the texts, from the first to the last, each under its column."""
    count = min(_LABELS, len(texts))
    columns = sorted({round(at * (len(texts) - 1) / max(1, count - 1)) for at in range(count)})
    step = 100 / max(1, len(texts))
    labels = []
    for at in columns:
        if at == 0 and not (centred and len(texts) == 1):
            labels.append(Label(0, "start", texts[at]))
        elif at == len(texts) - 1:
            labels.append(Label(100, "end", texts[at]))
        else:
            labels.append(Label(step * (at + 0.5), "middle", texts[at]))
    return tuple(labels)


def _charts_moment(start: dt.datetime, width: int) -> str:
    return start.strftime("%Y-%m-%d" if width >= 86400 else "%m-%d %H:%M")


def measure_bars(measure: MeasureResult) -> list[tuple[str, list[MeasureBars]]]:
    """Return the rows of a measure that the page shows, by value, with their shapes."""
    shown = first_rows(measure, _ROWS)
    return [
        (value, _bars([row for row in shown if row.value == value]))
        for value in dict.fromkeys(row.value for row in shown)
    ]


def _bars(rows: Sequence[MeasureRow]) -> list[MeasureBars]:
    ends = [end for row in rows if _finite(row) for end in (Decimal(), *_ends(row))]
    low, high = min(ends, default=Decimal()), max(ends, default=Decimal())

    def at(value: Decimal) -> float:
        return float((value - low) / (high - low) * 100) if high > low else 0.0

    return [MeasureBars(row, *_two_bars(row, at)) if _finite(row) else MeasureBars(row, (), ()) for row in rows]


def _two_bars(row: MeasureRow, at: Callable[[Decimal], float]) -> tuple[tuple[Rect, ...], tuple[Rect, ...]]:
    sent, consumed, known = _ends(row)
    zero = Decimal()

    def rect(begin: Decimal, end: Decimal, colour: str, title: str) -> tuple[Rect, ...]:
        if begin == end:
            return ()
        first, last = sorted((at(begin), at(end)))
        return (Rect(first, 0, max(0.4, last - first), 0, colour, title),)

    return rect(zero, sent, "sent", f"producer, without what was rolled back: {sent:,f}"), (
        *rect(zero, consumed, "consumed", f"consumer: {consumed:,f}"),
        *rect(consumed, known, "flight", f"in flight: {row.in_flight:,f}"),
        *rect(known, sent, "unexplained", f"unexplained: {row.unexplained:,f}"),
    )


def _ends(row: MeasureRow) -> tuple[Decimal, Decimal, Decimal]:
    return (
        EXACT.subtract(row.producer, row.rolled_back),
        row.consumer,
        EXACT.add(row.consumer, row.in_flight),
    )


def _finite(row: MeasureRow) -> bool:
    return all(number.is_finite() for number in (row.producer, row.rolled_back, row.consumer, row.in_flight))


#: The greatest number of findings on the page, and of repairs, over all pairs.
LIMIT = 500


@dataclass(frozen=True, slots=True)
class PairPage:
    """What the page shows of a pair, beside its report: its charts, and the colours of its kinds."""

    report: PairReport
    colours: dict[Outcome, str]
    time: Columns | None
    undated: int
    lag: Columns | None


@dataclass(frozen=True, slots=True)
class MeasurePage:
    """What the page shows of a measure."""

    measure: MeasureResult
    values: list[tuple[str, list[MeasureBars]]]
    left_out: int
    left_out_adds_up: bool


def write_html(path: Path, result: JobResult, limit: int = LIMIT) -> None:
    """Write the page, at once and whole: a temporary file beside it is renamed."""
    text = render(result, limit)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def render(result: JobResult, limit: int = LIMIT) -> str:
    """Return the page, with at most so many findings and repairs."""
    report = document(result, limit)
    return _template().render(
        report=report,
        result=result,
        tiles=_tiles(report),
        pairs=[_pair(pair) for pair in report.pairs],
        measures=[_measure(measure) for measure in result.measures],
        no_difference=[outcome for outcome in Outcome if not outcome.differs],
        consumed=Outcome.CONSUMED,
        in_flight=Outcome.IN_FLIGHT,
        chart_height=HEIGHT,
    )


def _pair(report: PairReport) -> PairPage:
    pair = report.result
    times = timeline(pair.findings, pair.begun_at)
    colour_of = colours(list(pair.differences))
    return PairPage(
        report,
        colour_of,
        kinds_over_time(times, colour_of) if times else None,
        times.undated if times else pair.findings.num_rows,
        lags(pair.lag) if pair.lag and pair.lag.total else None,
    )


def _measure(measure: MeasureResult) -> MeasurePage:
    values = measure_bars(measure)
    shown = [bar.row for _, bars in values for bar in bars]
    wrong = sum(bool(row.unexplained) for row in shown)
    return MeasurePage(measure, values, len(measure.rows) - len(shown), wrong == len(measure.unexplained))


def _tiles(report: ReportDocument) -> list[tuple[str, int, str, str]]:
    """Return the numbers at the head of the page: name, number, what it counts, tone."""
    result, verdict = report.result, report.verdict
    counts = sum((pair.counts for pair in result.pairs), Counter[Outcome]())
    unexplained = [measure for measure in result.measures if not measure.in_sync]

    def tone(number: int) -> str:
        return "bad" if number else "good"

    tiles = [
        ("compared", counts.total(), "messages", ""),
        ("in flight", counts[Outcome.IN_FLIGHT], "not late", ""),
        ("differences", verdict.differences, "found", tone(verdict.differences)),
        ("left", verdict.left, "neither repaired nor healed", tone(verdict.left)),
    ]
    if result.measures:
        note = f"of {len(result.measures)} don't add up"
        tiles.append(("measures", len(unexplained), note, tone(len(unexplained))))
    return [*tiles, ("rows read", sum(pair.plan.rows_read for pair in result.pairs), "one by one", "")]


@cache
def _template() -> Template:
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
        "moment": _moment,
        "number": lambda value: f"{value:,}",
    }
    environment.globals |= {"MEANING": MEANING, "sentence_of": sentence_of}
    return environment.get_template("report.html.j2")


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
