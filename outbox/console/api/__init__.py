"""The HTTP endpoints: what `outbox.operator` does, as JSON under ``/api/v1``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from outbox.console.api import acts, bulk_jobs, lists, probes
from outbox.console.problems import Problem

#: Fixed paths come before those that have an id at the same level.
ROUTERS = (lists.router, bulk_jobs.router, acts.router, probes.document)

#: Everything else under ``/api``.
unknown = APIRouter(include_in_schema=False)


@unknown.get("/api/{rest:path}")
def not_found(rest: str) -> Any:
    """Say that there is no such endpoint."""
    raise Problem("not-found", f"there is nothing called {rest[:100]!r} here")
