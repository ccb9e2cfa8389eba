"""Endpoints for machines beside the API: is it alive, is it ready, and (where it is turned on) metrics."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from outbox.console.console import Console
from outbox.console.log import log
from outbox.console.problems import Problem
from outbox.console.routing import console_router, for_probes
from outbox.store.execute import execute
from outbox.store.stats import now

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
    from outbox.console.metrics import CONTENT_TYPE, exposition  # noqa: PLC0415 - an extra of its own

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
