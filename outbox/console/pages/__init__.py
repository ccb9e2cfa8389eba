"""The pages: HTML made on the server, over `outbox.operator`. Everything works without JavaScript."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from outbox.console.pages import bulk_jobs, lists, message, overview
from outbox.console.pages.login import login, static
from outbox.console.pages.view import Badges, problem_page
from outbox.console.problems import Problem

__all__ = ["ROUTERS", "Badges", "login", "problem_page", "static", "unknown"]

ROUTERS = (overview.router, lists.router, message.router, bulk_jobs.router)

#: Everything else below the console.
unknown = APIRouter(include_in_schema=False)


@unknown.get("/{rest:path}")
def not_found(rest: str) -> Any:
    """Say that there is no such page."""
    raise Problem("not-found", f"there is nothing called {rest[:100]!r} here")
