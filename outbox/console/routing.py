"""The routes of the console, which look after themselves: guard, headers and errors hold wherever they are included.

The dependency that finds out who asks, whichever authorizer a console has.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import quote
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from outbox.console import problems, security
from outbox.console.console import SCOPE_KEY, Console, Facts
from outbox.console.permissions import Permission, Principal
from outbox.console.problems import Problem, as_problem, log, log_failure
from outbox.console.security import SAFE_METHODS, with_headers
from outbox.console.trust import peer

if TYPE_CHECKING:
    from outbox.console.auth import Authorizer


def authentication(console: Console) -> Callable[..., Any]:
    """Return a dependency that lets in whom the authorizer knows, and acts only where the console doesn't only read.

    Raises (the dependency):
        Problem: (401) nobody that is known; (403) without the permission to look, or an act in read-only mode.
        TypeError: the authorizer returned something else.
    """
    challenges = tuple(getattr(console.authorizer, "challenges", ()))

    def authenticate(request: Request, found: Any = Depends(_injectable(console.authorizer))) -> None:  # noqa: B008
        if found is None:
            raise problems.unauthenticated(challenges)
        if not isinstance(found, Principal):
            raise TypeError(f"the authorizer returned {type(found).__name__}; it must return a Principal or None")
        console.facts(request).principal = found
        console.demand(request, Permission.VIEW)
        reads = request.method in SAFE_METHODS or getattr(request.scope["endpoint"], "only_reads", False)
        if console.read_only and not reads:
            raise problems.read_only()

    return authenticate


def _injectable(authorizer: Authorizer) -> Callable[..., Any]:
    """Return it as FastAPI can read it: of an object, its method, whose annotations can be resolved."""
    is_plain = inspect.isroutine(authorizer) or inspect.isclass(authorizer)
    call: Callable[..., Any] = authorizer if is_plain else authorizer.__call__  # type: ignore[operator]
    return call


#: Turns a problem into what is shown of it; pages have one of their own.
Render = Callable[[Request, Problem], Response]

F = TypeVar("F", bound=Callable[..., Any])

_DENIED = {401, 403, 429}


def console_router(
    console: Console, *, prefix: str = "", render: Render | None = None, public: bool = False, json_only: bool = False
) -> APIRouter:
    """Return a router whose routes have guard, headers and errors of the console, and let in only who may come.

    ``render`` shows problems (default: ``application/problem+json``); where there is one, who isn't logged in is sent
    to the page for it. ``public`` lets everybody in. ``json_only`` refuses bodies that aren't JSON.

    A route that changes nothing although its method is POST has an endpoint marked by `only_reads`.
    """
    members: dict[str, Any] = {
        "console": console,
        "render": staticmethod(render) if render else None,
        "json_only": json_only,
        "waiting": WeakKeyDictionary(),
        "templates": {},
    }
    route_class = type("ConsoleRoute", (_Route,), members)
    dependencies = [] if public else [Depends(authentication(console))]
    return APIRouter(prefix=prefix, route_class=route_class, dependencies=dependencies)


class _Route(APIRoute):
    console: ClassVar[Console]
    render: ClassVar[staticmethod[[Request, Problem], Response] | None]
    json_only: ClassVar[bool]
    waiting: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]]
    #: The paths of each endpoint below the console's root.
    templates: ClassVar[dict[Any, set[str]]]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        # Some versions of FastAPI make routes once more when a router is included, with a longer path.
        known = self.templates.setdefault(endpoint, set())
        if not any(path.endswith(template) for template in known):
            known.add(path)
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            # The application's own handlers of errors lie further out, and must not see ours.
            try:
                response = await handler(request)
            except Exception as error:
                return self.answer(request, error)
            if request.method not in security.SAFE_METHODS and self.console.facts(request).principal:
                log(logging.INFO, "console.done", status=response.status_code, **self._about(request))
            return response

        return answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        facts = scope[SCOPE_KEY] = self._facts(scope, headers)
        send = with_headers(send, facts.request_id)
        request = Request(scope, receive)
        try:
            self._check(scope["method"], headers, facts)
            receive = await security.bounded(receive, headers)
        except Problem as problem:
            await self.answer(request, problem)(scope, receive, send)
            return
        async with self._slot():
            await super().handle(scope, receive, send)

    def answer(self, request: Request, error: Exception) -> Response:
        """Return what is told of an error, and log it if somebody should know."""
        facts, about = self.console.facts(request), self._about(request)
        problem = as_problem(error)
        if problem is None or problem.status == 500:
            log_failure(error, **about)
            text = f"an error that nobody expected; the console's log has it under request id {facts.request_id}"
            problem = Problem("internal", text)
        elif problem.slug == "unavailable":
            log(logging.WARNING, "console.unavailable", reason=str(error), **about)
        elif problem.status in _DENIED:
            log(logging.WARNING, "authz.denied", problem=problem.slug, detail=problem.detail, **about)
        if problem.status < 400:
            return Response(status_code=problem.status, headers=dict(problem.headers))
        if self.render is None:
            return problems.as_json(problem, instance=facts.base + facts.path, request_id=facts.request_id)
        if problem.slug == "unauthenticated" and self.console.sessions and "Basic" not in str(problem.headers):
            return self._to_login(request, problem)
        try:
            return self.render(request, problem)
        except Exception as fault:
            log_failure(fault, **about)
            return problems.as_json(problem, instance=facts.base + facts.path, request_id=facts.request_id)

    def _about(self, request: Request) -> dict[str, str | None]:
        facts = self.console.facts(request)
        return {
            "request_id": facts.request_id,
            "client": facts.client,
            "method": request.method,
            "path": facts.path,
            "principal": facts.principal.id if facts.principal else None,
        }

    def _to_login(self, request: Request, problem: Problem) -> Response:
        where = self.console.facts(request).path + (f"?{request.url.query}" if request.url.query else "")
        login = self.console.path(request, "login", next=where if request.method == "GET" else None)
        if "hx-request" in request.headers:
            # A part of a page must not be replaced by the whole page for the login.
            return Response(status_code=problem.status, headers={"HX-Redirect": self.console.path(request, "login")})
        return RedirectResponse(login, 303)

    def _check(self, method: str, headers: Headers, facts: Facts) -> None:
        if not getattr(self.endpoint, "for_probes", False):
            security.check_host(self.console.trust, facts)
        if self.methods and method not in self.methods:
            allowed = ", ".join(sorted(self.methods))
            raise Problem(
                "method-not-allowed", f"{method} can't be done here, only {allowed}", headers={"Allow": allowed}
            )
        if method not in security.SAFE_METHODS:
            security.check_origin(self.console.trust, headers, facts)
            if self.json_only:
                security.check_json(headers)

    def _facts(self, scope: Scope, headers: Headers) -> Facts:
        trust, root = self.console.trust, scope.get("root_path", "").rstrip("/")
        asked = scope["path"]
        if root and (asked == root or asked.startswith(root + "/")):
            asked = asked[len(root) :]
        below = self._below(asked, scope.get("path_params", {}))
        forwarded = trust.prefix(scope, headers)
        outer = root if root.startswith(forwarded) else forwarded + root
        base = quote(outer + asked[: len(asked) - len(below)], safe="/~:@!$&'()*+,;=")
        return Facts(
            base=base,
            path=below,
            client=trust.client(scope, headers),
            by_proxy=trust.is_proxy(peer(scope)),
            host=trust.host(scope, headers),
            secure=trust.is_secure(scope, headers),
            request_id=security.request_id_of(headers),
        )

    def _below(self, asked: str, values: dict[str, Any]) -> str:
        """Return the part of the path below the console's root; what comes before is where it was included."""
        ends = (_filled(template, values) for template in self.templates[self.endpoint])
        return max((end for end in ends if asked.endswith(end)), key=len, default=asked)

    def _slot(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        return self.waiting.setdefault(loop, asyncio.Semaphore(self.console.slots))


def _filled(template: str, values: dict[str, Any]) -> str:
    return re.sub(r"{(\w+)(:\w+)?}", lambda match: str(values.get(match[1], "")), template)


def only_reads(endpoint: F) -> F:
    """Mark an endpoint that changes nothing, although its method is POST: it works in a console that only reads."""
    endpoint.only_reads = True  # type: ignore[attr-defined]
    return endpoint


def for_probes(endpoint: F) -> F:
    """Mark an endpoint that tells so little that it answers under any host."""
    endpoint.for_probes = True  # type: ignore[attr-defined]
    return endpoint
