"""Charts as shapes: where lines lie, what has gaps, what is told when one points at it."""

from __future__ import annotations

import datetime as dt
import math

import pytest

from outbox.console.pages.overview import Chart, draw, nice
from outbox.operator.health.stats import Series

NOON = dt.datetime(2026, 5, 24, 12, tzinfo=dt.UTC)


def series(*values: float | None, name: str = "sent", minutes: int = 1) -> Series:
    """A series that begins at noon."""
    times = [NOON + dt.timedelta(minutes=minutes * number) for number in range(len(values))]
    return Series(name, "a minute", times, list(values))


def drawn(*of: Series) -> Chart:
    """The chart of these series."""
    chart = draw("throughput", "Messages", of)
    assert chart is not None
    return chart


@pytest.mark.parametrize(
    ("value", "edge"),
    [(0, 1), (-3, 1), (0.3, 0.3), (1, 1), (7, 8), (8.1, 10), (99, 100), (568, 600), (1001, 1200), (10_000, 10_000)],
)
def test_the_upper_edge_is_round(value: float, edge: float) -> None:
    """It is never under the highest value, and close enough that the chart isn't empty."""
    assert math.isclose(nice(value), edge)


def test_a_line_goes_through_its_values() -> None:
    """x from the left to the right edge, y from the bottom; the area is closed at the bottom."""
    (shape,) = drawn(series(0, 5, 10)).shapes
    assert shape.line == "M0 100L50 50L100 0"
    assert shape.area == "M0 100L0 100L50 50L100 0L100 100Z"
    assert shape.last == 10


def test_what_is_unknown_is_a_gap() -> None:
    """Nothing is drawn over it, what is told of it is that it's unknown; a point alone is a short line."""
    chart = drawn(series(1, None, math.nan, 4))
    (shape,) = chart.shapes
    assert shape.line.count("M") == 2
    assert all("NaN" not in path and "nan" not in path for path in (shape.line, shape.area))
    assert "sent: unknown" in chart.hits[1].title
    assert "sent: 4 a minute" in chart.hits[3].title
    assert chart.rows[1][1] == (None,)


def test_nothing_known_is_said() -> None:
    """A chart without any value knows that; without times there is none."""
    assert not drawn(series(None, None)).known
    assert draw("x", "X", []) is None
    assert draw("x", "X", [series()]) is None


def test_several_series_share_the_scale() -> None:
    """The highest of all is the edge; each has its colour, and its column in the table."""
    chart = drawn(series(1, 2), series(30, 40, name="consumed"))
    assert chart.peak == 40
    assert [shape.colour for shape in chart.shapes] == [1, 2]
    assert [shape.name for shape in chart.shapes] == ["sent", "consumed"]
    assert chart.rows[0] == (NOON + dt.timedelta(minutes=1), (2, 40))


@pytest.mark.parametrize(
    ("after", "minutes", "count", "labels"),
    [
        (0, 1, 61, [(0, "12:00"), (25, "12:15"), (50, "12:30"), (75, "12:45"), (100, "13:00")]),
        (343, 1, 61, [(3.33, "17:45"), (28.33, "18:00"), (53.33, "18:15"), (78.33, "18:30")]),
        (343, 5, 73, [(4.72, "18:00"), (38.06, "20:00"), (71.39, "22:00")]),
        (343, 15, 97, [(1.18, "18:00"), (26.18, "25 May"), (51.18, "06:00"), (76.18, "12:00")]),
        (343, 120, 85, [(3.74, "25 May"), (32.31, "27 May"), (60.88, "29 May"), (89.45, "31 May")]),
        (0, 1, 1, [(0, "12:00")]),
    ],
)
def test_the_axis_names_round_times(after: int, minutes: int, count: int, labels: list[tuple[float, str]]) -> None:
    """However odd the first is: each lies where its time does, a midnight is its day."""
    times = [NOON + dt.timedelta(minutes=after + minutes * number) for number in range(count)]
    chart = draw("x", "X", [Series("sent", "a minute", times, [1.0] * count)])
    assert chart is not None
    assert list(chart.labels) == labels


def test_columns_to_point_at_cover_the_chart() -> None:
    """Side by side without a gap, each with the time in UTC."""
    hits = drawn(series(1, 2, 3, 4)).hits
    assert [(hit.x, hit.width) for hit in hits] == [(0, 25), (25, 25), (50, 25), (75, 25)]
    assert hits[0].title.startswith("24 May 12:00")


def test_a_column_leads_to_the_messages_of_its_time() -> None:
    """From the value before it to its own, or the span that its value stands for."""
    chart = drawn(series(1, 2, minutes=5))
    until = NOON + dt.timedelta(minutes=5)
    assert chart.hits[1].query == {"since": f"{NOON:%Y-%m-%dT%H:%MZ}", "until": f"{until:%Y-%m-%dT%H:%MZ}"}
    of_a_minute = draw("x", "X", [series(1, 2, minutes=5)], span=dt.timedelta(minutes=1))
    assert of_a_minute is not None
    assert of_a_minute.hits[1].query == {"since": "2026-05-24T12:04Z", "until": "2026-05-24T12:05Z"}
