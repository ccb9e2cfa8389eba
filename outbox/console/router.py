"""`create_console_router`: the console as a part of an application, and `create_console_app`: as one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from fastapi import APIRouter, FastAPI

from outbox.console.api import api_routes
from outbox.console.api.probes import metrics_routes, probe_routes
from outbox.console.auth import Authorizer
from outbox.console.console import Console
from outbox.console.login import login_routes
from outbox.console.opening import opener
from outbox.console.pages import page_routes
from outbox.console.problems import Problem
from outbox.console.routing import console_router
from outbox.console.trust import Trust
from outbox.errors import InvalidSettings

if TYPE_CHECKING:
    from fastapi.routing import APIRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from outbox.console.opening import Bind, Source
    from outbox.operator.look.redact import Redactor
    from outbox.settings import Settings

#: Who may read the metrics: nobody (there are none), who may look, or everybody.
Metrics = Literal["off", "authenticated", "open"]

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_console_router(
    source: Source,
    *,
    authorizer: Authorizer,
    databases: Mapping[str, Bind] | None = None,
    settings: Settings | None = None,
    read_only: bool = False,
    allowed_hosts: Iterable[str] | None = None,
    trusted_origins: Iterable[str] = (),
    trusted_proxies: Iterable[str] = (),
    environment: str | None = None,
    redactor: Redactor | None = None,
    metrics: Metrics = "off",
) -> APIRouter:
    """Return the console as a router: ``app.include_router(create_console_router(…), prefix="/outbox")``.

    ``source`` is the database: an `Outbox`, an engine (sync or async), a URL, several of them by name, or an `Admin`,
    which is used as it is. ``databases`` are further ones by name: those of the consumers. The console connects at
    the first request, with a pool of its own of three connections for each database.

    ``authorizer`` has no default: see `outbox.console.auth`; any FastAPI dependency that returns a `Principal` does.
    The router looks after itself: what the application adds (middleware, dependencies, handlers of errors) isn't
    needed and isn't touched. Don't mount it: include it.

    ``read_only`` refuses every act and reveal, and its transactions can't write. ``allowed_hosts`` are the names under
    which the console is reached beside localhost (``*.example.com``, ``*`` for any). ``trusted_origins`` are
    other sites that may send, ``trusted_proxies`` addresses or networks whose ``X-Forwarded-*`` is believed.
    ``environment`` is shown as a badge. ``redactor`` says how bodies are shown. ``metrics`` turns ``/metrics`` on.

    Raises:
        InvalidSettings: an option that isn't one.
    """
    return router_of(
        build_console(
            source,
            authorizer=authorizer,
            databases=databases,
            settings=settings,
            read_only=read_only,
            allowed_hosts=allowed_hosts,
            trusted_origins=trusted_origins,
            trusted_proxies=trusted_proxies,
            environment=environment,
            redactor=redactor,
        ),
        metrics,
    )


def create_console_app(
    source: Source, *, authorizer: Authorizer, root_path: str = "", metrics: Metrics = "off", **options: Any
) -> FastAPI:
    """Return the console as an application of its own, for any ASGI server.

    ``root_path`` is the prefix that a proxy takes off the path; the other options are those of
    `create_console_router`.

    Raises:
        InvalidSettings: an option that isn't one.
    """
    return app_of(build_console(source, authorizer=authorizer, **options), metrics, root_path)


def build_console(
    source: Source,
    *,
    authorizer: Authorizer,
    databases: Mapping[str, Bind] | None = None,
    settings: Settings | None = None,
    read_only: bool = False,
    allowed_hosts: Iterable[str] | None = None,
    trusted_origins: Iterable[str] = (),
    trusted_proxies: Iterable[str] = (),
    environment: str | None = None,
    redactor: Redactor | None = None,
) -> Console:
    """Return what a console is made of; options and errors as of `create_console_router`."""
    trust = Trust.of(allowed_hosts, trusted_origins, trusted_proxies)
    if getattr(authorizer, "needs_proxies", False) and not trust.proxies:
        raise InvalidSettings(
            "TrustedHeader believes trusted_proxies only, and there are none: name the proxy's address"
        )
    open_admin = opener(source, databases or {}, settings, redactor, read_only=read_only)
    return Console(open_admin, authorizer, trust, read_only=read_only, environment=environment)


def router_of(console: Console, metrics: Metrics = "off") -> APIRouter:
    """Return the router of a console; it closes the console's connections when the application ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        console.open_admin.close()

    parts = (probe_routes(console), metrics_routes(console, metrics), login_routes(console), api_routes(console))
    # Not included one in another: FastAPI would build every route once more for each.
    routes = [route for part in (*parts, page_routes(console)) for route in part.routes]
    return APIRouter(routes=routes, lifespan=lifespan)


def app_of(console: Console, metrics: Metrics = "off", root_path: str = "") -> FastAPI:
    """Return an application with nothing but a console; what isn't there is a problem too, with all headers."""
    router = router_of(console, metrics)
    app = FastAPI(
        title="outbox console",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        routes=router.routes,
        lifespan=router.lifespan_context,
    )
    app.root_path = root_path
    app.router.redirect_slashes = False
    app.router.default = _nothing(console, app.router.default)
    app.state.console = console
    return app


def _nothing(console: Console, default: ASGIApp) -> ASGIApp:
    router = console_router(console, public=True)

    @router.api_route("/{path:path}", methods=_METHODS)
    def nothing() -> None:
        raise Problem("not-found", "there is nothing at this path")

    route = cast("APIRoute", router.routes[0])

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", "")).removeprefix("/")
            scope.update({"endpoint": route.endpoint, "path_params": {"path": path}})
            await route.handle(scope, receive, send)
        else:
            await default(scope, receive, send)

    return answer
