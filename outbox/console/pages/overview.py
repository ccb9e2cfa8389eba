"""The overview: what needs a human, how things stand, and how they went.

The numbers in the navigation: what waits for a human; counted every few seconds, however many pages are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from outbox.console.charts import COLOURS, Chart, draw
from outbox.errors import OutboxError
from outbox.operator.model import HalfFilter, PageRequest, Series, Total

if TYPE_CHECKING:
    from outbox.console.console import Console
    from outbox.console.pages.view import View

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


def add_routes(router: APIRouter, view: View) -> None:
    """Add the overview."""

    @router.get("/")
    def overview(request: Request, window: str = "1h") -> Response:
        shown = view.console.admin.overview(window)
        return view.page(
            request,
            "overview.html",
            overview=shown,
            charts=charts(shown.series),
            window=window,
            windows=WINDOWS,
            tiles=TILES,
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


_log = logging.getLogger("outbox.console")

#: How long (seconds) the numbers are good.
GOOD_FOR = 10.0
_LIMIT = 500


class Badges:
    """Keeps the numbers for one console."""

    def __init__(self, good_for: float = GOOD_FOR) -> None:
        self._good_for = good_for
        self._numbers: dict[str, Total] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def now(self, console: Console) -> dict[str, Total]:
        """Return the numbers by the names of pages; a page must not fail because they can't be had."""
        with self._lock:
            if time.monotonic() < self._until:
                return self._numbers
            self._until = time.monotonic() + self._good_for
        try:
            self._numbers = _count(console)
        except (OutboxError, SQLAlchemyError) as error:
            _log.warning("the numbers in the navigation can't be counted: %s", type(error).__name__)
            self._numbers = {}
        return self._numbers

    def forget(self) -> None:
        """Count anew at the next page, after somebody has acted."""
        self._until = 0.0


def _count(console: Console) -> dict[str, Total]:
    groups = console.admin.dead_groups(limit=_LIMIT)
    dead = sum(group.count.value for group in groups)
    more = len(groups) == _LIMIT or any(group.count.relation == "gte" for group in groups)
    parked = console.admin.halves(HalfFilter(status="parked"), PageRequest(size=1)).total
    numbers = {"dead": Total(dead, "gte" if more else "eq")}
    return numbers | ({"halves": parked} if parked is not None else {})
