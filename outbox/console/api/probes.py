"""Endpoints for machines beside the API: is it alive, is it ready, and (where it is turned on) metrics.

How things stand, as Prometheus reads it: what only a look at the tables can tell, never per message.

The OpenAPI document of the endpoints, for who is logged in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

import outbox
from outbox.console.console import Console
from outbox.console.problems import Problem, log
from outbox.console.routing import console_router, for_probes
from outbox.database.execute import execute
from outbox.errors import pip_install
from outbox.operator.health.stats_sql import now
from outbox.operator.model import Overview

if TYPE_CHECKING:
    from outbox.console.router import Metrics

#: How long (seconds) an answer is good: anybody may ask.
_GOOD_FOR = 2.0


def probe_routes(console: Console) -> APIRouter:
    """Return ``/healthz`` and ``/readyz``, which everybody may ask, and which tell no detail."""
    router = console_router(console, public=True)
    readiness = _Readiness(console)

    @router.get("/healthz", include_in_schema=False)
    @for_probes
    def healthz() -> JSONResponse:
        """Tell that the process answers."""
        return JSONResponse({"status": "ok"})

    @router.get("/readyz", include_in_schema=False)
    @for_probes
    def readyz() -> JSONResponse:
        """Tell whether every database answers."""
        if not readiness.now():
            raise Problem("unavailable", "not ready", headers={"Retry-After": "5"})
        return JSONResponse({"status": "ok"})

    return router


def metrics_routes(console: Console, metrics: Metrics) -> APIRouter:
    """Return ``/metrics``, or nothing where they are off."""
    router = console_router(console, public=metrics == "open")
    if metrics == "off":
        return router

    @router.get("/metrics", include_in_schema=False)
    def numbers() -> Response:
        """Return how things stand, as Prometheus reads it."""
        return Response(exposition(console.admin.overview("1h")), media_type=CONTENT_TYPE)

    return router


class _Readiness:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._ready, self._at = False, float("-inf")

    def now(self) -> bool:
        with self._lock:
            if time.monotonic() - self._at > _GOOD_FOR:
                self._ready, self._at = self._look(), time.monotonic()
            return self._ready

    def _look(self) -> bool:
        try:
            for database in self._console.admin.databases.values():
                with database.looking(1.0) as connection:
                    execute(connection, now())
        except Exception as error:
            log(logging.WARNING, "console.not_ready", reason=str(error))
            return False
        return not self._console.missing


try:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
except ImportError as error:
    raise ImportError(f"the console's metrics need prometheus-client: {pip_install('console')}") from error

#: That of the text format, version 0.0.4.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOPIC = ("database", "topic")
_GROUP = ("database", "group", "topic")


def exposition(overview: Overview) -> bytes:
    """Return the gauges of all topics and groups; what isn't known is left out."""
    registry = CollectorRegistry()

    def gauge(
        name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float | None]]
    ) -> None:
        one = Gauge(name, text, labels, registry=registry)
        for names, value in values:
            if value is not None:
                (one.labels(*names) if labels else one).set(value)

    of_topics = {
        "outbox_pending_messages": ("Committed, and not dispatched yet", "undispatched"),
        "outbox_oldest_pending_age_seconds": ("Age of the oldest that isn't dispatched yet", "oldest_undispatched"),
        "outbox_undecided_halves": ("Half messages without a decision", "undecided"),
        "outbox_parked_halves": ("Half messages over their checks, which need a human", "parked_halves"),
        "outbox_scheduled_messages": ("Messages that wait for their time", "scheduled"),
    }
    for name, (text, field) in of_topics.items():
        gauge(name, text, _TOPIC, (((t.database, t.topic), getattr(t, field)) for t in overview.topics))
    groups = [group for topic in overview.topics for group in topic.groups]
    of_groups = {
        "outbox_dead_messages": ("Parked messages of a group, which need a human", "parked"),
        "outbox_failed_messages": ("Messages of a group that will be retried", "failed"),
        "outbox_lag_messages": ("Messages that a group has not come to", "lag"),
        "outbox_oldest_due_retry_age_seconds": ("How long the oldest retry of a group is due", "oldest_due"),
    }
    for name, (text, field) in of_groups.items():
        gauge(name, text, _GROUP, (((g.database, g.group, g.topic), getattr(g, field)) for g in groups))
    alive = sum(worker.alive for worker in overview.workers)
    gauge("outbox_workers_alive", "Workers that reported lately", (), [((), alive)])
    gauge("outbox_databases_unreachable", "Databases that didn't answer", (), [((), len(overview.unseen))])
    return generate_latest(registry)


_DESCRIPTION = (
    "Lists give a `next_page_token` for the page after, and refuse one of another filter. Acts take `If-Match`, orders "
    "`Idempotency-Key`. Errors are problem details (RFC 9457). Requests that change something have the content type "
    "`application/json`."
)


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoint."""
    documents: dict[str, dict[str, Any]] = {}

    @router.get("/openapi.json", include_in_schema=False)
    def openapi(request: Request) -> JSONResponse:
        """Return the OpenAPI document."""
        base = console.facts(request).base
        if not documents:
            documents["it"] = get_openapi(
                title="outbox console",
                version=outbox.__version__,
                openapi_version="3.1.0",
                description=_DESCRIPTION,
                routes=router.routes,
            )
        return JSONResponse(documents["it"] | {"servers": [{"url": base or "/"}]})
