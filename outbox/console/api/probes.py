"""Endpoints for machines: is the console alive and ready, metrics for Prometheus, and the OpenAPI document."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from outbox.console.context import API, PROBES, Console, Context
from outbox.console.events import NotReady
from outbox.console.problems import Problem
from outbox.database.execute import execute
from outbox.database.sql import NOW
from outbox.errors import pip_install
from outbox.operator.health.overview import Overview
from outbox.telemetry.hooks import emit
from outbox.text import summary_of

try:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
except ImportError as _missing:
    raise ImportError(f"the console's metrics need prometheus-client: {pip_install('console')}") from _missing

from outbox.telemetry.prometheus import (  # the same extra
    CONTENT_TYPE,
    MOST_ROWS,
    OF_GROUPS,
    OF_SAGAS,
    OF_TOPICS,
    GaugeOfStats,
    gauged,
)

#: Errors at these paths are answered as JSON.
PATHS = (*PROBES, "/metrics")
#: How long (seconds) an answer about readiness is reused: any client may ask, as often as it likes.
_REUSED_FOR = 2.0

#: Every client may call these; they tell no detail.
router: APIRouter = APIRouter(include_in_schema=False)
#: Public or not, as the console's ``metrics`` has it.
metrics: APIRouter = APIRouter(include_in_schema=False)
document: APIRouter = APIRouter(prefix=API, include_in_schema=False)


class Readiness:
    """Finds out whether every database of a console answers, at most once in two seconds."""

    def __init__(self, console: Console) -> None:
        self._console, self._lock = console, threading.Lock()
        self._ready, self._failed, self._at = False, False, float("-inf")

    def now(self) -> bool:
        """Return whether every database answers."""
        with self._lock:
            if time.monotonic() - self._at > _REUSED_FOR:
                try:
                    for database in self._console.source().databases.values():
                        with database.read_only(1.0) as connection:
                            execute(connection, NOW)
                    self._ready, self._failed = not self._console.source.missing, False
                except Exception as error:
                    emit(NotReady(reason=summary_of(error), repeated=self._failed, error=error))
                    self._ready, self._failed = False, True
                self._at = time.monotonic()
            return self._ready


@router.get("/healthz")
def healthz() -> JSONResponse:
    """Answer: the process is alive."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
def readyz(request: Request) -> JSONResponse:
    """Answer whether every database answers."""
    if not request.app.state.readiness.now():
        raise Problem("unavailable", "not ready", headers={"Retry-After": "5"})
    return JSONResponse({"status": "ok"})


@metrics.get("/metrics")
def numbers(context: Context) -> Response:
    """Return the gauges in the text format of Prometheus."""
    found = exposition(context.operator.overview("1h"), context.console.metrics_rows)
    return Response(found, media_type=CONTENT_TYPE)


@document.get("/openapi.json")
def openapi(request: Request, context: Context) -> JSONResponse:
    """Return the OpenAPI document."""
    return JSONResponse(request.app.openapi() | {"servers": [{"url": context.base or "/"}]})


#: The gauges of topics, of groups and of sagas, by their labels.
_GAUGES: Mapping[tuple[str, ...], Sequence[GaugeOfStats]] = {
    ("database", "topic"): OF_TOPICS,
    ("database", "group", "topic"): OF_GROUPS,
    ("database", "saga"): OF_SAGAS,
}


def exposition(overview: Overview, most: int = MOST_ROWS) -> bytes:
    """Return the gauges of ``most`` topics, groups and sagas, and of the others together; without unknown numbers."""
    registry = CollectorRegistry()
    groups = [group for topic in overview.topics for group in topic.groups]
    measured: list[Sequence[Any]] = [overview.topics, groups, overview.sagas]
    for (labels, gauges), rows in zip(_GAUGES.items(), measured, strict=True):
        for each in gauges:
            gauge = Gauge(each.name, each.text, labels, registry=registry)
            numbers = ((tuple(getattr(row, label) for label in labels), getattr(row, each.field)) for row in rows)
            for of, value in gauged(each, [row for row in numbers if row[1] is not None], most):
                gauge.labels(*of).set(value)
    alive = sum(worker.alive for worker in overview.workers)
    if alive or not overview.unreachable:
        Gauge("outbox_workers_alive", "Workers that reported lately", registry=registry).set(alive)
    unreachable = Gauge("outbox_databases_unreachable", "Databases that didn't answer", registry=registry)
    unreachable.set(len(overview.unreachable))
    return generate_latest(registry)
