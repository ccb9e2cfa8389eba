"""The pages: HTML made on the server, over `outbox.operator`; here the login and the files that pages load.

Everything works without JavaScript.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Form, Query, Response
from fastapi.responses import RedirectResponse

from outbox.console.events import LoginEnded, LoginFailed, LoginSucceeded
from outbox.console.pages import acts, lists, overview
from outbox.console.pages.view import Badges, PageView, View, problem_page, static_files
from outbox.console.problems import Problem
from outbox.telemetry.hooks import emit

__all__ = ["ROUTERS", "Badges", "login", "problem_page", "static", "unknown"]

ROUTERS = (overview.router, lists.router, acts.router, lists.reconciliations)

#: Everything else below the console.
unknown: APIRouter = APIRouter(include_in_schema=False)
#: No login is needed for these.
login: APIRouter = APIRouter(include_in_schema=False)
static: APIRouter = APIRouter(include_in_schema=False)


_FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}
#: A path below the console's root: nothing that a browser could take for another host.
_BELOW = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")


@static.get("/static/{name}")
def static_file(name: str) -> Response:
    """Return a static file."""
    file = next((file for file in static_files().values() if file.name == name), None)
    if file is None:
        raise Problem("not-found", f"there is no file {name[:100]!r}; reload the page that links to it")
    return Response(file.content, headers=_FOR_EVER | {"Content-Type": file.content_type})


@login.get("/login")
def login_page(view: View, onward: Annotated[str, Query(alias="next")] = "/") -> Response:
    """Show the page for logging in."""
    return _page(view, onward)


@login.post("/login")
def log_in(view: View, token: Annotated[str, Form()], onward: Annotated[str, Form(alias="next")] = "/") -> Response:
    """Log in with a token: set the cookie, and go on to the page that sent here."""
    context, sessions = view.context, view.context.console.sessions
    opened = sessions.log_in(token, context.client) if sessions else None
    if sessions is None or opened is None:
        emit(LoginFailed(**context.facts))
        return _page(view, onward, Problem("unauthenticated", "That isn't a token of this console."))
    # The event is the login, not an act.
    (cookie, context.identity), context.acts = opened, False
    emit(LoginSucceeded(**context.facts))
    response = RedirectResponse(context.base + _below(onward), 303)
    response.headers["Set-Cookie"] = context.set_cookie(cookie)
    return response


@login.post("/logout")
def log_out(view: View) -> Response:
    """Log out: end the session, and take the cookie away."""
    context, sessions = view.context, view.context.console.sessions
    session = sessions.session(view.request.cookies.get(context.cookie)) if sessions else None
    if sessions and session:
        context.identity, context.acts = session.principal, False
        sessions.end(session, context)
        emit(LoginEnded(**context.facts))
    response = RedirectResponse(context.url("login"), 303)
    response.headers["Set-Cookie"] = context.set_cookie(None)
    return response


def _page(view: PageView, onward: str, problem: Problem | None = None) -> Response:
    return view.render("login.html", problem.status_code if problem else 200, onward=_below(onward), problem=problem)


def _below(path: str) -> str:
    return path if _BELOW.fullmatch(path) else "/"


@unknown.get("/{rest:path}")
def not_found(rest: str) -> Any:
    """Say that there is no such page."""
    raise Problem("not-found", f"there is nothing called {rest[:100]!r} here")
