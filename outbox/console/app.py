"""`create_console_app`: the console as an application, and `create_console_router`: the same as a part of another one.

The console is an ordinary FastAPI application: its middlewares, dependencies and handlers of errors are its own. The
router has one route, which passes every request below its prefix on to that application.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match

import outbox
from outbox.console import api, pages
from outbox.console.api import probes
from outbox.console.auth import authentication
from outbox.console.connections import OperatorSource
from outbox.console.context import Authorizer, Console, Trust, context_of
from outbox.console.guard import Guard
from outbox.console.problems import Problem, as_problem, log, log_failure
from outbox.errors import InvalidSettings

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from outbox.console.connections import Source
    from outbox.database.engines import Bind
    from outbox.operator.look.redact import Redactor
    from outbox.settings import Settings

#: Who may read the metrics: there are none, principals with the permission to view, or everybody.
Metrics = Literal["off", "authenticated", "open"]

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
#: What of a scope isn't the work of the application around the console.
_OF_SERVER = {"type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server",
              "extensions"}  # fmt: skip
_DENIED = {401, 403, 429}
_DESCRIPTION = (
    "Lists return a `next_page_token` for the page after, and refuse one of another filter. Acts take `If-Match`, bulk "
    "jobs `Idempotency-Key`. Errors are problem details (RFC 9457). Requests that change something have the content "
    "type `application/json`."
)


class ConsoleOptions(TypedDict, total=False):
    """What can be said of a console beside its source and authorizer.

    ``databases`` are further ones by name: those of the consumers. ``settings`` default to those of the source, or of
    the environment. ``read_only`` refuses every act and reveal, and its transactions can't write. ``allowed_hosts`` are
    the names under which the console is reached beside localhost (``*.example.com``, ``*`` for any).
    ``trusted_origins`` are other sites that may send, ``trusted_proxies`` addresses or networks whose ``X-Forwarded-*``
    is believed. ``environment`` is shown as a badge. ``redactor`` says how bodies are shown. ``metrics`` turns
    ``/metrics`` on, which is off by default.
    """

    databases: Mapping[str, Bind] | None
    settings: Settings | None
    read_only: bool
    allowed_hosts: Iterable[str] | None
    trusted_origins: Iterable[str]
    trusted_proxies: Iterable[str]
    environment: str | None
    redactor: Redactor | None
    metrics: Metrics


def create_console_app(
    source: Source, *, authorizer: Authorizer, root_path: str = "", **options: Unpack[ConsoleOptions]
) -> FastAPI:
    """Return the console as an application of its own, for any ASGI server.

    ``source`` is the database: an `Outbox`, an engine (sync or async), a URL, several of them by name, or an
    `Operator`, which is used as it is. The console connects at the first request, with a pool of its own of three
    connections for each database, and closes its connections when the application ends.

    ``authorizer`` has no default: see `outbox.console.auth`; any FastAPI dependency that returns a `Principal` does.
    ``root_path`` is the prefix that a proxy takes off the path. ``options`` are `ConsoleOptions`.

    Raises:
        InvalidSettings: an option that isn't one.
    """
    if unknown := options.keys() - ConsoleOptions.__annotations__.keys():
        raise TypeError(f"a console has no option {', '.join(sorted(unknown))}")
    read_only = options.get("read_only", False)
    trust = Trust(options.get("allowed_hosts"), options.get("trusted_origins", ()), options.get("trusted_proxies", ()))
    if getattr(authorizer, "needs_proxies", False) and not trust.proxies:
        raise InvalidSettings(
            "TrustedHeader believes trusted_proxies only, and there are none: name the proxy's address"
        )
    operators = OperatorSource(
        source, options.get("databases"), options.get("settings"), options.get("redactor"), read_only=read_only
    )
    console = Console(operators, authorizer, trust, read_only=read_only, environment=options.get("environment"))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        console.source.close()

    app = FastAPI(
        title="outbox console",
        version=outbox.__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[Middleware(Guard, console, answer)],
        exception_handlers={HTTPException: answer, RequestValidationError: answer},
    )
    app.root_path = root_path
    app.state.console, app.state.badges, app.state.readiness = console, pages.Badges(), probes.Readiness(console)
    for_all = [probes.router, pages.static]
    for_all += [pages.login] if console.sessions else []
    metrics = options.get("metrics", "off")
    for_all += [probes.metrics] if metrics == "open" else []
    for router in for_all:
        app.include_router(router)
    # These answer to senders whom the authorizer knows; the last takes what no other has.
    for_known = [*api.ROUTERS, *pages.ROUTERS, pages.unknown]
    for_known[:0] = [probes.metrics] if metrics == "authenticated" else []
    known = [Depends(authentication(authorizer))]
    for router in for_known:
        app.include_router(router, dependencies=known)
    return app


def create_console_router(source: Source, *, authorizer: Authorizer, **options: Unpack[ConsoleOptions]) -> APIRouter:
    """Return the console as a router: ``app.include_router(create_console_router(…), prefix="/outbox")``.

    The parameters are those of `create_console_app`, without ``root_path``. The console protects itself: it needs
    nothing of the application around it (middleware, dependencies, handlers of errors) and changes nothing there.

    Raises:
        InvalidSettings: an option that isn't one.
    """
    app = create_console_app(source, authorizer=authorizer, root_path="", **options)
    router = APIRouter(route_class=_BelowPrefix, lifespan=app.router.lifespan_context)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def console_below() -> Response:
        return _PassedOn(app)

    return router


async def answer(request: Request, error: Exception) -> Response:
    """Return what the sender of a request is shown of an error, and log it if an operator should know."""
    context, problem = context_of(request), as_problem(error)
    if problem is None or problem.status_code == 500:
        log_failure(error, **context.log_fields)
        text = f"an unexpected error; the console's log has it under request id {context.request_id}"
        problem = Problem("internal", text)
    elif problem.slug == "unavailable":
        log(logging.WARNING, "console.unavailable", reason=str(error), **context.log_fields)
    elif problem.status_code in _DENIED:
        log(logging.WARNING, "authz.denied", problem=problem.slug, detail=problem.detail, **context.log_fields)
    if problem.status_code < 400:
        return Response(status_code=problem.status_code, headers=problem.headers)
    if not context.path.startswith(("/api/", "/static/", *probes.PATHS)):
        if problem.slug == "unauthenticated" and context.console.sessions and "Basic" not in str(problem.headers):
            if "hx-request" in request.headers:
                # A part of a page must not be replaced by the whole page for the login.
                return Response(status_code=problem.status_code, headers={"HX-Redirect": context.url("login")})
            onward = context.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(context.url("login", next=onward if request.method == "GET" else None), 303)
        try:
            return pages.problem_page(request, problem)
        except Exception as fault:
            log_failure(fault, **context.log_fields)
    return problem.as_json(instance=context.base + context.path, request_id=context.request_id)


class _PassedOn(Response):
    """Passes a request on to the console, whose root is the prefix under which the router was included."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__()
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix, below = _cut(scope, scope["path_params"]["path"])
        root = scope.get("root_path", "").rstrip("/") + prefix
        passed_on = {name: value for name, value in scope.items() if name in _OF_SERVER}
        await self.app(passed_on | {"root_path": root, "path": root + below}, receive, send)


class _BelowPrefix(APIRoute):
    """Matches everything below the prefix; where there is none, only what the console has a route for."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for the console; the others are the application's."""
        match, child = super().matches(scope)
        if match is Match.FULL:
            prefix, below = _cut(scope, child["path_params"]["path"])
            shortened = {"type": "http", "method": "GET", "path": below}
            routers = [probes.router, probes.metrics, pages.static, pages.login, *api.ROUTERS, *pages.ROUTERS]
            routes = [route for router in routers for route in router.routes]
            if not prefix and not any(route.matches(shortened)[0] is not Match.NONE for route in routes):
                return Match.NONE, {}
        return match, child


def _cut(scope: Scope, rest: str) -> tuple[str, str]:
    """Return the prefix under which the console was included, and the path below it."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    if root and path.startswith(root + "/"):
        path = path[len(root) :]
    return path[: len(path) - len(rest) - 1], f"/{rest}"
