"""Where the shapes of the page's charts lie. x and width are percents, so that a chart fits every screen; y is pixels.

Colours are the page's: a shape only has the name of a class.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from outbox.reconcile.model import Outcome
from outbox.reconcile.report.facts import first_rows
from outbox.reconcile.report.sentences import bound
from outbox.reconcile.report.timeline import Timeline
from outbox.reconcile.result import EXACT, Lag, MeasureResult, MeasureRow

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
class Bars:
    """One row of a measure: above what was sent, below what became of it; no shapes where a number isn't finite."""

    row: MeasureRow
    sent: tuple[Rect, ...]
    arrived: tuple[Rect, ...]


def colours(kinds: Sequence[Outcome]) -> dict[Outcome, str]:
    """Return the colour of each kind, the gravest first."""
    return {kind: f"c{place}" if place < COLOURS else _OTHER for place, kind in enumerate(kinds)}


def kinds_over_time(timeline: Timeline, colour: Mapping[Outcome, str]) -> Columns:
    """Return the findings by kind and time, one kind upon the other."""
    kinds = sorted(timeline.numbers)
    times = [_moment(start, timeline.width) for start in timeline.starts]
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
    for place, stack in enumerate(stacks):
        y = HEIGHT
        for colour, number, title in stack:
            if number:
                # The least of numbers can be seen, even beside a million.
                height = max(1.5, HEIGHT * number / highest)
                y -= height
                rects.append(Rect(step * (place + 0.1), max(0.0, y), step * 0.8, height, colour, title))
    return Columns(tuple(rects), labels, highest, legend, head, tuple(rows))


def _labels(texts: Sequence[str], *, centred: bool = False) -> tuple[Label, ...]:
    """Return a few of the texts, from the first to the last, each under its column."""
    count = min(_LABELS, len(texts))
    places = sorted({round(place * (len(texts) - 1) / max(1, count - 1)) for place in range(count)})
    step = 100 / max(1, len(texts))
    labels = []
    for place in places:
        if place == 0 and not (centred and len(texts) == 1):
            labels.append(Label(0, "start", texts[place]))
        elif place == len(texts) - 1:
            labels.append(Label(100, "end", texts[place]))
        else:
            labels.append(Label(step * (place + 0.5), "middle", texts[place]))
    return tuple(labels)


def _moment(start: dt.datetime, width: int) -> str:
    return start.strftime("%Y-%m-%d" if width >= 86400 else "%m-%d %H:%M")


def measure_bars(measure: MeasureResult) -> list[tuple[str, list[Bars]]]:
    """Return the rows of a measure that the page shows, by value, with their shapes."""
    shown = first_rows(measure, _ROWS)
    return [
        (value, _bars([row for row in shown if row.value == value]))
        for value in dict.fromkeys(row.value for row in shown)
    ]


def _bars(rows: Sequence[MeasureRow]) -> list[Bars]:
    ends = [end for row in rows if _finite(row) for end in (Decimal(), *_ends(row))]
    low, high = min(ends, default=Decimal()), max(ends, default=Decimal())

    def at(value: Decimal) -> float:
        return float((value - low) / (high - low) * 100) if high > low else 0.0

    return [Bars(row, *_two_bars(row, at)) if _finite(row) else Bars(row, (), ()) for row in rows]


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
