"""`create_console_app`: the console as an application, and `create_console_router`: the same as a part of another one.

The console is an ordinary FastAPI application: its middlewares, dependencies and handlers of errors are its own. The
router has one route, which passes every request below its prefix on to that application. `serve` serves it by itself,
configured by `OUTBOX_CONSOLE_*` variables or options.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

import outbox
from outbox.console import pages
from outbox.console.api import acts, lists, probes, requests
from outbox.console.auth import AnyOf, Basic, Bearer, TrustedHeader, authentication, hash_token
from outbox.console.connections import OperatorSource
from outbox.console.context import Authorizer, Console, Guard, Principal, RequestContext, Role, Trust, context_of
from outbox.console.events import RequestDenied, RequestFailed, RequestRefused, RequestUnavailable
from outbox.console.problems import Problem, as_problem
from outbox.database.engines import named_urls
from outbox.errors import InvalidSettings
from outbox.message.content import NO_CODECS, Codecs
from outbox.operator.health.overview import why_unreachable
from outbox.operator.look.redactor import Redactor
from outbox.reader import Reader, Seconds, environment, option, variable
from outbox.settings import ConsoleServer, Settings
from outbox.telemetry.hooks import emit
from outbox.text import described, summary_of, trace_of, without_addresses

if TYPE_CHECKING:
    from outbox.console.connections import Source
    from outbox.database.engines import Bind

#: The access to the metrics: there are none, for principals with the permission to view, or for all.
Metrics = Literal["off", "authenticated", "open"]

#: Fixed paths come before those that have an id at the same level.
_API = (lists.router, acts.router, acts.whole_acts, probes.document)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
#: What of a scope isn't the work of the application around the console.
_OF_SERVER = {"type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server",
              "extensions"}  # fmt: skip
_DENIED = {401, 403, 429}
_TRACE_CHARS = 4000
_DESCRIPTION = (
    "Lists return a `next_page_token` for the page after, and refuse one of another filter. Acts take `If-Match`, bulk "
    "jobs `Idempotency-Key`. Errors are problem details (RFC 9457). Requests that change something have the content "
    "type `application/json`."
)


class ConsoleOptions(TypedDict, total=False):
    """Set the options of a console beside its source and authorizer.

    ``databases`` are further ones by name: those of the consumers. ``settings`` default to those of the source, or of
    the environment. ``read_only`` refuses every act and reveal, and its transactions can't write. ``allowed_hosts`` are
    the names under which the console is reached beside localhost (``*.example.com``, ``*`` for any).
    ``trusted_origins`` are other sites that may send, ``trusted_proxies`` addresses or networks whose ``X-Forwarded-*``
    is believed. ``environment`` is shown as a badge. ``redactor`` says how bodies are shown. ``codecs``
    read those of other content types; they default to those of the source. ``metrics`` turns ``/metrics`` on, which is
    off by default; ``metrics_rows`` topics, groups and sagas have gauges of their own there, of each gauge those with
    the highest values, and all others have one together.
    """

    databases: Mapping[str, Bind] | None
    settings: Settings | None
    read_only: bool
    allowed_hosts: Iterable[str] | None
    trusted_origins: Iterable[str]
    trusted_proxies: Iterable[str]
    environment: str | None
    redactor: Redactor | None
    codecs: Codecs | None
    metrics: Metrics
    metrics_rows: int


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
        InvalidSettings: an option's value that isn't one.
        TypeError: an option that there isn't.
    """
    if unknown := options.keys() - ConsoleOptions.__annotations__.keys():
        raise TypeError(f"a console has no option {', '.join(sorted(unknown))}")
    read_only = options.get("read_only", False)
    trust = Trust(options.get("allowed_hosts"), options.get("trusted_origins", ()), options.get("trusted_proxies", ()))
    if getattr(authorizer, "needs_proxies", False) and not trust.proxies:
        raise InvalidSettings(
            "TrustedHeader believes trusted_proxies only, and there are none: name the proxy's address"
        )
    own = options.get("databases"), options.get("settings"), options.get("redactor"), options.get("codecs")
    operators = OperatorSource(source, *own, read_only=read_only)
    shown = options.get("environment"), options.get("metrics_rows", 500)
    console = Console(operators, authorizer, trust, read_only, *shown)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        console.source.close()

    app = _Application(
        title="outbox console",
        version=outbox.__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        generate_unique_id_function=requests.short_name,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=[Middleware(Guard, console, answer)],
        exception_handlers={HTTPException: answer, RequestValidationError: answer},
    )
    app.root_path = root_path
    app.state.console, app.state.badges, app.state.readiness = console, pages.Badges(), probes.Readiness(console)
    known, metrics = [Depends(authentication(authorizer))], options.get("metrics", "off")
    for router in (probes.router, pages.static, *([pages.login] if console.sessions else [])):
        app.include_router(router)
    if metrics != "off":
        app.include_router(probes.metrics, dependencies=known if metrics == "authenticated" else [])
    # These answer to senders that the authorizer knows; the last takes the paths that no other has.
    for router in (*_API, *pages.ROUTERS, pages.unknown):
        app.include_router(router, dependencies=known)
    return app


def create_console_router(
    source: Source, *, authorizer: Authorizer, documented_in: FastAPI | None = None, **options: Unpack[ConsoleOptions]
) -> APIRouter:
    """Return the console as a router: ``app.include_router(create_console_router(…), prefix="/outbox")``.

    The parameters are those of `create_console_app`, without ``root_path``. The console protects itself: it needs
    nothing of the application around it (middleware, dependencies, handlers of errors) and changes nothing there.
    ``documented_in`` is the application whose OpenAPI document describes the console's endpoints as well, for every
    reader of that document. By default none does.

    Raises:
        As `create_console_app`.
    """
    app = create_console_app(source, authorizer=authorizer, root_path="", **options)
    router = APIRouter(route_class=_BelowPrefix, lifespan=app.router.lifespan_context)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def console_below() -> Response:
        return _PassedOn(app)

    if documented_in is not None:
        mark = f"console {secrets.token_hex(16)}"
        # Behind the route above, so it is in the document only.
        router.add_api_route("/{path:path}", console_below, operation_id=mark)
        requests.describe_in(documented_in, app, mark)
    return router


class _Application(FastAPI):
    """The console, whose document also says how to log in, and has the schema of all problems once."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        if self.openapi_schema is None:
            requests.complete(super().openapi(), getattr(self.state.console.authorizer, "schemes", {}))
        return self.openapi_schema or {}


async def answer(request: Request, error: Exception) -> Response:
    """Return the answer to a request that met an error, and log the error."""
    context, problem = context_of(request), as_problem(error)
    if problem is None or problem.status_code == 500:
        _tell_failure(context, error)
        text = f"an unexpected error; the console's log has it under request id {context.request_id}"
        problem = Problem("internal", text)
    elif problem.status_code >= 500:
        emit(RequestUnavailable(**context.facts, reason=summary_of(error), error=error))
    elif problem.status_code >= 400:
        kind = RequestDenied if problem.status_code in _DENIED else RequestRefused
        emit(kind(**context.facts, problem=problem.slug, detail=str(problem.detail)))
    if context.identity and not context.addresses:
        problem.detail = without_addresses(problem.detail)
        problem.errors = without_addresses(list(problem.errors))
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
            _tell_failure(context, fault)
    return problem.as_json(instance=context.base + context.path, request_id=context.request_id)


def _tell_failure(context: RequestContext, error: Exception) -> None:
    trace = trace_of(error)[-_TRACE_CHARS:]
    emit(RequestFailed(**context.facts, traceback=trace, error=error))


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
            routers = [probes.router, probes.metrics, pages.static, pages.login, *_API, *pages.ROUTERS]
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


# --- a console of its own ---------------------------------------------------------------------------------

PREFIX = "OUTBOX_CONSOLE_"
#: The `ConsoleOptions` that a console's configuration has by the same names.
_SAME = ("read_only", "allowed_hosts", "trusted_origins", "trusted_proxies", "metrics", "metrics_rows")
_ENTRY = f"name:role:hash, separated by blanks or lines, where role is one of {', '.join(Role)}"


def _entries(text: str) -> list[tuple[str, Role, str]]:
    entries = []
    for number, word in enumerate(text.replace(",", " ").split(), 1):
        parts = word.rsplit(":", 2)
        if len(parts) != 3 or parts[1] not in set(Role):
            raise ValueError(f"{_ENTRY}; entry {number} isn't")
        entries.append((parts[0], Role(parts[1]), parts[2]))
    return entries


def named_databases(text: str) -> dict[str, str]:
    """Return URLs by name: each is ``name=url``, or an URL, which then has the name of its database.

    Raises:
        ValueError: two have the same name, or a URL can't be read; it isn't quoted, for it may have a password.
    """
    databases: dict[str, str] = {}
    for own_name, url in named_urls(text):
        try:
            name = own_name or make_url(url).database or "outbox"
        except (ArgumentError, ValueError):  # the latter of a port
            raise ValueError("name=url, or a URL like postgresql+psycopg://host/name; one can't be read") from None
        if name in databases:
            raise ValueError(f"name=url with each name once; two databases are named {name!r}")
        databases[name] = url
    return databases


@dataclass(frozen=True, slots=True)
class ConsoleConfig(ConsoleServer):
    """All options of a console of its own; see `create_console_router` for those of the same name.

    ``databases`` are URLs by name. ``users`` maps names to ``(hash, role)``, ``tokens`` hashes to principals.

    Raises:
        InvalidSettings: an option that isn't one.
    """

    databases: Mapping[str, str] = option(
        help="NAME=URL, separated by blanks or lines; else OUTBOX_DATABASE_URL.", parse=named_databases, secret=True
    )
    trusted_origins: tuple[str, ...] = option((), "Other sites that may send.")
    users: Mapping[str, Any] = option(
        help="NAME:ROLE:HASH, by `outbox console hash-password`.",
        factory=dict,
        parse=lambda text: {name: (hashed, role) for name, role, hashed in _entries(text)},
        secret=True,
    )
    tokens: Mapping[str, Principal] = option(
        help="NAME:ROLE:HASH, by `outbox console token`.",
        factory=dict,
        parse=lambda text: {hashed: Principal.of(name, role) for name, role, hashed in _entries(text)},
        secret=True,
    )
    user_header: str | None = option(None, "The header in which a trusted proxy names the user.")
    user_roles: Mapping[str, Role] = option(help="NAME=ROLE of the users of that header.", factory=dict)
    user_default_role: Role | None = option(None, "The role of all other users of that header.")
    session_key: str | None = option(None, "Makes sessions outlive a restart.", secret=True)
    session_idle: Seconds = option(3600.0, "How long a session lives without use.", above=0)
    payload: Literal["hidden", "masked", "full"] = option("masked", "How bodies are shown.")
    metrics: Metrics = option("off", "The access to /metrics.")
    metrics_rows: int = option(500, "How many topics, and groups, have gauges of their own there.", least=1)

    def __post_init__(self) -> None:
        Reader().check(self)
        if not self.databases:
            raise InvalidSettings("no database: set OUTBOX_DATABASE_URL, or OUTBOX_CONSOLE_DATABASES=name=url …")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidSettings(f"root_path {self.root_path!r} must begin with a slash, and not end with one")
        if self.user_header and not self.trusted_proxies:
            raise InvalidSettings(f"user_header {self.user_header!r} is believed of trusted_proxies only; name them")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the console."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> ConsoleConfig:
        """Return the configuration of the environment; ``overrides`` that aren't None go before it.

        Each field is a variable ``OUTBOX_CONSOLE_…``; a secret one can be in a file that ``OUTBOX_CONSOLE_…_FILE``
        names. Lists are separated by commas or white space.

        Raises:
            InvalidSettings: a variable that can't be read, or isn't one; names it, and of a secret not its value.
        """
        # No default in the signature: help() would print the environment of the process.
        environ = os.environ if environ is None else environ
        values = environment(cls, PREFIX, environ) | {
            name: value for name, value in overrides.items() if value is not None
        }
        if not values.get("databases") and (url := variable("OUTBOX_DATABASE_URL", environ)):
            try:
                values["databases"] = named_databases(url)
            except ValueError as error:
                raise InvalidSettings(f"OUTBOX_DATABASE_URL must be {error}") from None
        return cls(**({"databases": {}} | values))


def serve(
    config: ConsoleConfig,
    *,
    settings: Settings | None = None,
    codecs: Codecs = NO_CODECS,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the console until the process is stopped.

    ``settings`` default to those of the environment. Without users, tokens or a user header it makes up a token for
    this run and announces it (``announce``; default: standard error). The token is typed into the page: a link with it
    would end up in histories and logs.

    Raises:
        InvalidSettings: there is no authentication, and other machines could reach the console; or the address is in
            use.
        SchemaMissing, SchemaOutdated, sqlalchemy.exc.DBAPIError: no database can be used.
    """
    import uvicorn  # noqa: PLC0415 - only a server needs it

    announce = announce or partial(print, file=sys.stderr, flush=True)
    authorizer, token = authorizer_of(config)
    app = app_of(config, authorizer, settings, codecs)
    console = app.state.console
    # A fault of all databases is an error now, and not at the first request.
    for name, database in console.source().databases.items():
        parts = " and ".join(sorted(database.parts, reverse=True))
        announce(f"{name} ({parts}): {described(database.engine.url, database.schema)}")
    for name, error in console.source.missing.items():
        announce(f"{name} can't be used yet, and is tried again: {why_unreachable(error)}")
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        raise InvalidSettings(f"can't listen on {config.host} port {config.port}: {error.strerror}") from None
    with listener:
        host, port = listener.getsockname()[:2]
        announce(f"outbox console: http://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}/")
        if token:
            announce(f"Log in with this token, which is good until the console stops:\n\n    {token}\n")
        if not config.is_local:
            announce("The connection isn't encrypted: put a proxy with TLS in front.")
            if config.allowed_hosts is None:
                announce("It answers to localhost only: name the hosts under which it is reached (allowed_hosts).")
        # What proxies say is believed as trusted_proxies has it, not as uvicorn has it.
        options = uvicorn.Config(
            app, log_level="warning", access_log=False, proxy_headers=False, server_header=False, lifespan="on"
        )
        uvicorn.Server(options).run(sockets=[listener])


def authorizer_of(config: ConsoleConfig) -> tuple[Authorizer, str | None]:
    """Return the authorizer, and the token that was made up where nothing is configured.

    Raises:
        InvalidSettings: nothing is configured, and others than this machine could reach the console.
    """
    found: list[Any] = []
    if config.user_header:
        found.append(TrustedHeader(config.user_header, roles=config.user_roles, default=config.user_default_role))
    if config.tokens:
        found.append(Bearer(config.tokens, session_key=config.session_key, idle=config.session_idle))
    if config.users:
        found.append(Basic(config.users))
    if found:
        return (found[0] if len(found) == 1 else AnyOf(*found)), None
    if not config.is_local:
        raise InvalidSettings(
            f"host {config.host!r} can be reached from other machines, and there is no authentication: set "
            "OUTBOX_CONSOLE_USERS or OUTBOX_CONSOLE_TOKENS (or their _FILE), or listen on 127.0.0.1"
        )
    token, user = secrets.token_urlsafe(24), "console"
    with contextlib.suppress(OSError, KeyError):  # in a container, a user may have no more than a number
        user = getpass.getuser()
    return Bearer({hash_token(token): Principal.of(user, Role.ADMIN)}, idle=config.session_idle), token


def app_of(
    config: ConsoleConfig, authorizer: Authorizer, settings: Settings | None = None, codecs: Codecs = NO_CODECS
) -> FastAPI:
    """Return the application of a configuration; it hasn't connected yet. Errors are those of `create_console_app`."""
    options: Any = {name: getattr(config, name) for name in ("root_path", *_SAME)}
    options |= {"environment": config.env, "redactor": Redactor(config.payload), "settings": settings, "codecs": codecs}
    return create_console_app(config.databases, authorizer=authorizer, **options)
