"""Logging in with a token by a page, for people: the token is typed, so it never is in a URL, a log or a history.

What the browser keeps is a cookie that only the console can read and make (see `outbox.console.session`).
"""

from __future__ import annotations

import logging
import re
from typing import Annotated

from fastapi import APIRouter, Form, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment

from outbox.console.console import Console
from outbox.console.log import log
from outbox.console.pages import statics
from outbox.console.problems import Problem
from outbox.console.routing import console_router
from outbox.console.session import COOKIE, Sessions

_PAGE = Environment(autoescape=True).from_string("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in · outbox console</title>
<link rel="icon" type="image/svg+xml" href="{{ icon }}">
<link rel="stylesheet" href="{{ css }}">
</head>
<body class="login">
<main>
<h1>outbox console</h1>
{% if message %}<p class="banner bad" role="alert">{{ message }}</p>
{% endif %}<form method="post" action="{{ action }}">
<input type="hidden" name="next" value="{{ next }}">
<p><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus></p>
<p><button type="submit" class="primary">Log in</button></p>
</form>
<p>Started with <code>outbox console</code>? Its terminal shows the token. Otherwise ask whoever runs the console.</p>
<p>Logged in already? <a href="{{ onward }}">Go on</a>.</p>
</main>
</body>
</html>
""")

#: A path below the console's root: nothing that a browser could take for another host.
_BELOW = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")


def login_routes(console: Console) -> APIRouter:
    """Return the pages for logging in and out; nothing where nobody logs in by a page."""
    router = console_router(
        console, render=lambda request, problem: _page(console, request, problem=problem), public=True
    )
    if console.sessions is not None:
        _add(router, console, console.sessions)
    return router


def _add(router: APIRouter, console: Console, sessions: Sessions) -> None:
    @router.get("/login", include_in_schema=False)
    def login(request: Request, onward: Annotated[str, Query(alias="next")] = "/") -> Response:
        """Show the page for logging in."""
        return _page(console, request, onward)

    @router.post("/login", include_in_schema=False)
    def log_in(
        request: Request, token: Annotated[str, Form()], onward: Annotated[str, Form(alias="next")] = "/"
    ) -> Response:
        """Log in with a token: set the cookie, and go where the person wanted to."""
        facts = console.facts(request)
        cookie = sessions.log_in(token, facts.client)
        if cookie is None:
            log(logging.WARNING, "login.failed", client=facts.client, request_id=facts.request_id)
            return _page(console, request, onward, Problem("unauthenticated", "That isn't a token of this console."))
        log(logging.INFO, "login.succeeded", client=facts.client, request_id=facts.request_id)
        response = RedirectResponse(facts.base + _below(onward), 303)
        response.set_cookie(
            COOKIE,
            cookie,
            max_age=sessions.seconds,
            path=facts.base or "/",
            secure=facts.secure,
            httponly=True,
            samesite="strict",
        )
        return response

    @router.post("/logout", include_in_schema=False)
    def log_out(request: Request) -> Response:
        """Log out: take the cookie away."""
        facts = console.facts(request)
        response = RedirectResponse(console.path(request, "login"), 303)
        response.delete_cookie(COOKIE, path=facts.base or "/", secure=facts.secure, httponly=True, samesite="strict")
        return response


def _page(console: Console, request: Request, onward: str = "/", problem: Problem | None = None) -> Response:
    below = _below(onward)
    content = _PAGE.render(
        icon=console.path(request, "static", statics.by_file()["icon.svg"].name),
        css=console.path(request, "static", statics.by_file()["console.css"].name),
        action=console.path(request, "login"),
        next=below,
        onward=console.facts(request).base + below,
        message=problem.detail if problem else None,
    )
    return HTMLResponse(content, problem.status if problem else 200, dict(problem.headers) if problem else None)


def _below(path: str) -> str:
    return path if _BELOW.fullmatch(path) else "/"
