"""All pages of a console as one router.

The files that pages load: all of them ours or vendored, each under a name that changes with what is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from starlette.routing import Match

from outbox.console import problems
from outbox.console.pages import acting, bulk, listing, message, overview
from outbox.console.pages import message as operations
from outbox.console.pages.overview import Badges
from outbox.console.pages.view import View
from outbox.console.routing import Render, console_router

if TYPE_CHECKING:
    from starlette.types import Scope

    from outbox.console.console import Console

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Static:
    """A file: ``name`` has the digest of what is in it, so that browsers may keep it for ever."""

    name: str
    content_type: str
    content: bytes


@cache
def by_file() -> dict[str, Static]:
    """Return the static files by the names that templates know them by."""
    files = {}
    for file in resources.files("outbox.console").joinpath("static").iterdir():
        stem, _, kind = file.name.rpartition(".")
        if kind in _TYPES:
            content = file.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:12]
            files[file.name] = Static(f"{stem}.{digest}.{kind}", _TYPES[kind], content)
    return files


@cache
def by_name() -> dict[str, Static]:
    """Return the static files by the names under which they are served."""
    return {static.name: static for static in by_file().values()}


_FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}


def page_routes(console: Console) -> APIRouter:
    """Return the routes of the pages, and of what they load; errors are told by a page of their own."""
    view = View(console, Badges())
    pages = console_router(console, render=view.problem)
    for part in (overview, listing, message, acting, bulk, operations):
        part.add_routes(pages, view)
    router = APIRouter(include_in_schema=False)
    router.include_router(_static_routes(console))
    router.include_router(pages)
    router.include_router(_lost(console, None, "/api/{rest:path}"))
    router.include_router(_lost(console, view.problem, "/{rest:path}"))
    return router


def _lost(console: Console, render: Render | None, path: str) -> APIRouter:
    """Return the route of whatever else is asked for below the console."""
    router = console_router(console, render=render)
    plain = router.route_class

    class Lost(plain):  # type: ignore[valid-type, misc]
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            match, child = super().matches(scope)
            if match is not Match.NONE and not _is_own(scope, console) and _has_no_prefix(scope, child):
                # What isn't ours belongs to the application.
                return Match.NONE, {}
            return match, child

    router.route_class = Lost

    @router.get(path)
    def lost(rest: str) -> Response:
        raise problems.Problem("not-found", f"there is nothing called {rest[:100]!r} here")

    return router


def _has_no_prefix(scope: Scope, child: Scope) -> bool:
    asked = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
    rest = child["path_params"]["rest"]
    return asked in {f"/{rest}", f"/api/{rest}"}


def _is_own(scope: Scope, console: Console) -> bool:
    """Tell whether the application is nothing but the console."""
    return getattr(scope["app"].state, "console", None) is console


def _static_routes(console: Console) -> APIRouter:
    """Return the route of the static files, which whoever isn't logged in needs to see the login."""
    router = console_router(console, public=True)

    @router.get("/static/{name}")
    def static(name: str) -> Response:
        if (file := by_name().get(name)) is None:
            raise problems.Problem("not-found", f"there is no file {name[:100]!r}; reload the page that wants it")
        return Response(file.content, headers=_FOR_EVER | {"Content-Type": file.content_type})

    return router
