"""Read a request and its sender before anything is done; the guard refuses some requests at once.

An act has a permission of its own; three roles bundle them, and the principal has those of its role.

The guard is the ASGI middleware of a console: what a request must show, and what every answer has. It holds for every
path of a console: known paths, unknown ones, and those that FastAPI itself refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import ipaddress
import re
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlencode
from weakref import WeakKeyDictionary

from fastapi import Depends, Request, Response
from fastapi.params import Depends as Dependency
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outbox.acts.changes import Actor
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import DECLARATIONS
from outbox.console.connections import OperatorSource
from outbox.console.events import RequestDone, RequestUnavailable
from outbox.console.problems import Problem
from outbox.errors import InvalidSettings
from outbox.flow.views import Sagas
from outbox.operator.databases import CALLER, Caller, OverDatabases
from outbox.operator.operator import MaskedOperator, Operator
from outbox.reconcile.record.orders import ReconciliationOrders
from outbox.telemetry.hooks import emit
from outbox.text import summary_of

_Views = TypeVar("_Views", bound=OverDatabases)

#: The key of the `RequestContext` in the scope of a request.
SCOPE_KEY = "outbox.console"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>\d{1,5}))?", re.IGNORECASE)
#: An address with a port, as some proxies have it.
_PORT = re.compile(r"^(?:\[(.*)\]|([^:]*))(?::\d+)?$")

#: How much of a path the log has.
_LONGEST_PATH = 1000
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: The most bytes of a request's body.
MAX_BODY = 64 * 1024
#: How many requests are worked on at once; and how many exports, which have slots of their own.
SLOTS, EXPORT_SLOTS = 8, 1
#: How many searches, previews and exports of one principal run at once, in one process.
SEARCHES = 2
#: Below which path the API is, and its exports.
API = "/api/v1"
_EXPORTS = f"{API}/export/"
#: How the name of a session's cookie begins.
COOKIE = "outbox_console"
#: They tell so little that they answer under any host.
PROBES = frozenset({"/healthz", "/readyz"})

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)
#: `Referrer-Policy` isn't `no-referrer`: with it browsers send `Origin: null` with forms, which the guard refuses.
FIXED_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

#: See everything, bodies masked; see where databases are; cancel bulk jobs; see bodies as they are. Each act has a
#: permission of its own.
VIEW, ADDRESSES, CANCEL, REVEAL = "view", "address:read", "bulk_job:cancel", "payload:read"


class Role(enum.StrEnum):
    """A bundle of permissions; each role has those of the one before it.

    ``viewer`` sees, with bodies masked. ``operator`` acts where nothing is lost. ``admin`` decides halves, compensates
    local transactions, ends sessions that hold a lock and sees bodies unmasked.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def permissions(self) -> frozenset[str]:
        """Return the permissions of the role."""
        return ROLES[self]

    @classmethod
    def _missing_(cls, value: object) -> Role:
        raise InvalidSettings(f"role {value!r} must be one of: {', '.join(cls)}")


_VIEWER = frozenset({VIEW})
_OPERATOR = _VIEWER | {ADDRESSES, CANCEL, *(act.permission for act in DECLARATIONS if act.role == "operator")}

#: Every permission that there is.
PERMISSIONS = _OPERATOR | {REVEAL, *(act.permission for act in DECLARATIONS)}
#: The permissions of each role.
ROLES = {Role.VIEWER: _VIEWER, Role.OPERATOR: _OPERATOR, Role.ADMIN: PERMISSIONS}


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request: ``id`` is what the audit records, ``name`` what the pages show.

    Raises:
        InvalidSettings: a permission that isn't one of `PERMISSIONS`.
    """

    id: str
    name: str
    permissions: frozenset[str] = _VIEWER

    def __post_init__(self) -> None:
        if unknown := sorted(self.permissions - PERMISSIONS):
            raise InvalidSettings(f"permission {unknown[0]!r} must be one of: {', '.join(sorted(PERMISSIONS))}")

    @classmethod
    def of(cls, id: str, role: Role | str = Role.VIEWER, *, name: str | None = None) -> Principal:  # noqa: A002 - the field of this name
        """Return a principal of a role: ``viewer``, ``operator`` or ``admin``.

        Raises:
            InvalidSettings: there is no such role.
        """
        return cls(id, name or id, Role(role).permissions)

    @property
    def role(self) -> str:
        """The biggest role whose permissions the principal has; ``custom`` where it has none of them."""
        return next((str(role) for role in reversed(Role) if self.permissions >= role.permissions), "custom")

    def may(self, permission: str) -> bool:
        """Return whether the principal has a permission."""
        return permission in self.permissions


class Trust:
    """Hold the trusted parties, as `ConsoleOptions` names them: the names of the console, other sites, and proxies.

    Names of this machine are always good, since no other site can have them.

    Raises:
        InvalidSettings: an origin that isn't ``scheme://host``, or a proxy that is no address or network.
    """

    def __init__(
        self, hosts: Iterable[str] | None = None, origins: Iterable[str] = (), proxies: Iterable[str] = ()
    ) -> None:
        self.hosts: tuple[str, ...] = (
            "localhost",
            "127.0.0.1",
            "[::1]",
            *(host.strip().lower() for host in hosts or ()),
        )
        self.origins: frozenset[str] = frozenset(map(_origin, origins))
        self.proxies: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...] = tuple(map(_network, proxies))

    def is_proxy(self, address: str) -> bool:
        """Return whether an address is that of a trusted proxy."""
        ip = _address(address)
        return ip is not None and any(ip in network for network in self.proxies)

    def client(self, scope: Scope, headers: Headers) -> str:
        """Return the address that a request comes from: behind trusted proxies, the last one that isn't theirs."""
        address = peer(scope)
        for hop in reversed([hop.strip() for hop in ",".join(headers.getlist("x-forwarded-for")).split(",")]):
            if not hop or not self.is_proxy(address):
                break
            address = _PORT.sub(r"\1\2", hop)
        return address if _address(address) or not self.is_proxy(peer(scope)) else "unknown"

    def forwarded(self, scope: Scope, headers: Headers, name: str) -> str | None:
        """Return a ``X-Forwarded-*`` header of a trusted proxy: its last value, since any client can set others."""
        value = headers.get(f"x-forwarded-{name}") if self.is_proxy(peer(scope)) else None
        return value.rpartition(",")[2].strip() if value else None

    def allows_host(self, host: str) -> bool:
        """Return whether the console may be reached under this host; the port doesn't matter."""
        if "*" in self.hosts:
            return True
        match = _HOST.fullmatch(host)
        name = match["name"].lower() if match else ""
        return bool(name) and any(
            name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:])) for allowed in self.hosts
        )


#: ``(request) -> Principal | None``, or any FastAPI dependency that returns that; sync or async.
Authorizer = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Console:
    """One console: its databases, its authorizer, and how it is reached.

    ``environment`` is the name in the badge (``prod`` is red). ``source`` connects to the databases at the first
    call. ``searches`` counts those of each principal that run, under the ``lock``.
    """

    source: OperatorSource
    authorizer: Authorizer
    trust: Trust
    read_only: bool = False
    environment: str | None = None
    metrics_rows: int = 500
    searches: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sessions(self) -> Any:
        """The `outbox.console.auth.Bearer` that people log in to by a page; None where the authorizer has no page."""
        return getattr(self.authorizer, "sessions", None)


class RequestContext(Caller):
    """What is known of one request to a console, and what its sender may do: what it says, as far as that is trusted.

    ``base`` is the path of the console's root, ``path`` the rest of the request's path. ``client`` is the address the
    request came from, ``by_proxy`` whether a trusted proxy handed it on, ``host`` the name (and port) it was sent to.
    ``secure`` is whether the browser speaks TLS. ``identity`` is None until the authorizer has found the principal.
    ``acts`` says whether it changes something, or reveals a body: then the log tells of it. ``gone``: its client has.
    ``slot`` is its place among the requests that are worked on.
    """

    slot: Slot

    def __init__(self, console: Console, scope: Scope) -> None:
        trust, headers = console.trust, Headers(scope=scope)
        # The prefix of the console, after what a proxy takes off the path.
        root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
        # Some servers put root_path before the path, others don't.
        if root and (path == root or path.startswith(root + "/")):
            path = path[len(root) :]
        prefix = (trust.forwarded(scope, headers, "prefix") or "").rstrip("/")
        if _PREFIX.fullmatch(prefix) and not root.startswith(prefix):
            root = prefix + root
        request_id = headers.get("x-request-id", "")
        self.console: Console = console
        self.path: str = path
        self.method: str = str(scope["method"])
        self.base: str = quote(root, safe="/~:@!$&'()*+,;=")
        self.client: str = trust.client(scope, headers)
        self.by_proxy: bool = trust.is_proxy(peer(scope))
        self.host: str = (trust.forwarded(scope, headers, "host") or headers.get("host", "")).lower()
        self.secure: bool = (trust.forwarded(scope, headers, "proto") or scope.get("scheme", "http")) == "https"
        self.request_id: str = request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex
        self.identity: Principal | None = None
        self.acts: bool = self.method not in SAFE_METHODS
        #: Whether a person has requested it: of the parts of pages, scripts refresh those that they GET.
        self.by_hand: bool = self.acts or "hx-request" not in headers
        #: The cookie of the session from now on, where the request has used it.
        self.renewed: str | None = None
        self.is_export: bool = path.startswith(_EXPORTS)
        self.gone: bool = False
        self._searches: bool = False

    def check(self) -> None:
        """Refuse to read more for a client that has gone, by a `Problem` (408)."""
        if self.gone:
            raise Problem("client-gone", "the client has closed the connection before it was answered")

    def search(self) -> None:
        """Count the request among the searches of its principal; raise a `Problem` (429) if `SEARCHES` run."""
        if self._searches:
            return
        with self.console.lock:
            if self.console.searches[self.principal.id] >= SEARCHES:
                detail = f"{SEARCHES} searches or exports of {self.principal.id!r} are running; end one, or wait for it"
                raise Problem("too-many-searches", detail, headers={"Retry-After": "2"})
            self.console.searches[self.principal.id] += 1
            self._searches = True

    def end(self) -> None:
        """Let the principal search again."""
        if self._searches:
            with self.console.lock:
                self.console.searches.subtract([self.principal.id])

    def heard(self, message: asyncio.Future[Message]) -> None:
        """Take notice of what the client has sent after its request: that it has gone."""
        if not message.cancelled() and message.exception() is None:
            self.gone = message.result()["type"] == "http.disconnect"

    @property
    def addresses(self) -> bool:
        """May its sender see at which addresses databases are? If not, it can't search by them either."""
        return self.identity is not None and self.identity.may(ADDRESSES)

    @property
    def operator(self) -> Operator:
        """Return the sender's operator. Its calls are synchronous: use it in endpoints that are plain functions."""
        everything = self.console.source()
        addresses = self.addresses
        # Its sender can't search by masked values.
        kind = Operator if addresses and self.may(REVEAL) else MaskedOperator
        redactor = everything.redactor if addresses else everything.redactor.without_addresses()
        found = kind(everything.databases, redactor, everything.codecs, everything.topics)
        found.addresses = addresses
        return found

    @property
    def reconciliations(self) -> ReconciliationOrders:
        """Return the sender's views and orders of reconciliations; as `operator`."""
        return self._of(ReconciliationOrders)

    @property
    def sagas(self) -> Sagas:
        """Return the sender's views of sagas, and its answers; as `operator`."""
        return self._of(Sagas)

    def _of(self, views: type[_Views]) -> _Views:
        operator = self.operator
        found = views(operator.databases, operator.redactor)
        found.addresses = operator.addresses
        return found

    @property
    def principal(self) -> Principal:
        """The sender of the request; a `Problem` (401) that says how to log in if the authorizer doesn't know it."""
        if self.identity is None:
            challenges = tuple(getattr(self.console.authorizer, "challenges", ()))
            # One of them: where several are in a header, Chromium understands none, and shows no password dialog.
            chosen = next((each for each in challenges if each.startswith("Basic")), next(iter(challenges), None))
            headers = {"WWW-Authenticate": chosen} if chosen else {}
            raise Problem("unauthenticated", "log in, or send credentials", headers=headers)
        return self.identity

    @property
    def actor(self) -> Actor:
        """The sender as the audit names it, with the interface it used and its address."""
        via = "api" if self.path.startswith("/api/") else "console"
        return Actor(self.principal.id, {"via": via, "ip": self.client, "request_id": self.request_id})

    @property
    def cookie(self) -> str:
        """The name of the session's cookie: browsers send one of a name to all ports of a host, and to all paths below.

        So each console has a name of its own, also after a restart.
        """
        return f"{COOKIE}_{hashlib.sha256((self.host + self.base).encode()).hexdigest()[:8]}"

    @property
    def facts(self) -> dict[str, Any]:
        """What each event of the request has."""
        return {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path[:_LONGEST_PATH],
            "principal": self.identity.id if self.identity else None,
        }

    def url(self, *segments: object, **query: Any) -> str:
        """Return the path of something in this console, as the browser must request it: never with scheme or host.

        Each of ``segments`` is quoted: ``context.url("messages", id, status=["parked"])`` gives
        ``/prefix/messages/…?status=parked``. Without segments it is the root, with a slash at its end. What has no
        value is left out of the query.
        """
        path = "/".join([self.base, *(quote(str(segment), safe="") for segment in segments)])
        pairs = {name: value for name, value in query.items() if value is not None and value != ""}
        return (path if segments else path + "/") + (f"?{urlencode(pairs, doseq=True)}" if pairs else "")

    def may(self, needed: str) -> bool:
        """Return whether the sender could do this here: has the permission, in a console that doesn't only read.

        ``needed`` is a permission, or the name of an act.
        """
        permission = ACTS[needed].permission if needed in ACTS else needed
        return self.principal.may(permission) and (permission == VIEW or not self.console.read_only)

    def demand(self, needed: str) -> None:
        """Refuse the request by a `Problem` (403) unless its sender could do this here, as `may` has it."""
        if self.may(needed):
            return
        permission = ACTS[needed].permission if needed in ACTS else needed
        if self.principal.may(permission):
            raise Problem.read_only()
        detail = f"{self.principal.id!r} doesn't have the permission {permission!r}; ask an admin of the console"
        raise Problem("forbidden", detail)

    def set_cookie(self, value: str | None) -> str:
        """Return the header that sets the session's cookie; None takes it away."""
        response, sessions = Response(), self.console.sessions
        where: dict[str, Any] = {"path": self.base or "/", "secure": self.secure, "samesite": "strict"}
        if value is None:
            response.delete_cookie(self.cookie, httponly=True, **where)
        else:
            seconds = sessions.seconds if sessions else None
            response.set_cookie(self.cookie, value, seconds, httponly=True, **where)
        return response.headers["set-cookie"]


def context_of(request: Request) -> RequestContext:
    """Return the context of a request."""
    context: RequestContext = request.scope[SCOPE_KEY]
    return context


#: The parameter by which an endpoint gets the context.
Context = Annotated[RequestContext, Depends(context_of)]


def requires(needed: str) -> Dependency:
    """Return a dependency that refuses senders without a permission: ``dependencies=[requires("message:resend")]``."""

    def permitted(context: Context) -> None:
        context.demand(needed)

    dependency: Dependency = Depends(permitted)
    return dependency


def peer(scope: Scope) -> str:
    """Return the address at the other end of the connection; ``local`` for a socket without one."""
    client = scope.get("client")
    return str(client[0]) if client else "local"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _origin(text: str) -> str:
    origin = text.strip().lower().rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+", origin):
        raise InvalidSettings(f"trusted origin {text!r} must look like https://ops.example.com")
    return origin


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text.strip())
    except ValueError as error:
        raise InvalidSettings(f"trusted proxy {text!r} must be an address or network: {error}") from None


# --- the guard ---------------------------------------------------------------------------------------------


class Guard:
    """Works out the `RequestContext`, refuses requests that must not be answered, and sees to every answer.

    It refuses a request under another host, from another site, with a wrong type of body, or with a body too big. Only
    `SLOTS` requests are worked on at once; the others wait without holding a thread. Exports have slots of their own,
    and while a client reads what it was sent, its request has none: a few slow ones can't keep all others out. Every
    answer gets the fixed headers (only the route of static files sets its own ``Cache-Control``), and every error that
    no handler of FastAPI's took is answered, before the application around the console sees it.
    """

    def __init__(
        self, app: ASGIApp, console: Console, answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self.app: ASGIApp = app
        self.console: Console = console
        self.answer: Callable[[Request, Exception], Awaitable[Response]] = answer
        # A semaphore belongs to the event loop in which a request first waits for it.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, asyncio.Semaphore]] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its context, if it may be answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = scope[SCOPE_KEY] = RequestContext(self.console, scope)
        status, slot = 0, self._slot(export=context.is_export)
        context.slot = slot
        caller = CALLER.set(context)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(FIXED_HEADERS | {"X-Request-ID": context.request_id})
                headers.setdefault("Cache-Control", "no-store")
                if context.renewed and "set-cookie" not in headers:
                    headers.append("Set-Cookie", context.set_cookie(context.renewed))
            async with slot.away():
                await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(context, headers)
            async with _heard(receive, headers, context) as body, slot:
                await self.app(scope, body, sending)
        except Exception as error:
            if context.gone:
                return  # to no client that would read an answer
            if status:
                emit(RequestUnavailable(**context.facts, reason=summary_of(error.__cause__ or error), error=error))
                raise
            response = await self.answer(Request(scope, receive), error)
            await response(scope, receive, sending)
        finally:
            CALLER.reset(caller)
            context.end()
        if context.acts and context.identity and status < 400:
            emit(RequestDone(**context.facts, status=status))

    def _slot(self, *, export: bool) -> Slot:
        new = {False: asyncio.Semaphore(SLOTS), True: asyncio.Semaphore(EXPORT_SLOTS)}
        return Slot(self._slots.setdefault(asyncio.get_running_loop(), new)[export])

    def _check(self, context: RequestContext, headers: Headers) -> None:
        # A page of an attacker could have a name that was bound to our address.
        if context.path not in PROBES and not self.console.trust.allows_host(context.host):
            raise Problem(
                "host-not-allowed",
                f"the header Host names {context.host[:200]!r}, under which this console isn't served; if it should "
                "be, add it to allowed_hosts (OUTBOX_CONSOLE_ALLOWED_HOSTS)",
            )
        if context.method in SAFE_METHODS:
            return
        check_origin(self.console.trust, headers, context)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # The form of another site could send other types, and of these methods POST only.
        if context.method == "POST" and context.path.startswith("/api/") and content_type != "application/json":
            raise Problem(
                "unsupported-media-type",
                f"the header Content-Type says {content_type[:100]!r}; send application/json, also where the body is "
                "empty",
            )


class Slot:
    """One request's slot among those of a semaphore, held from ``async with`` on, but for `away`."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots, self._held = slots, False

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._release()

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Let others have the slot meanwhile, if it is held, and wait for one again."""
        held = self._held
        self._release()
        yield
        # Not after an error, nor when it is cancelled: the request ends without its slot.
        if held:
            await self.__aenter__()

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


def check_origin(trust: Trust, headers: Headers, context: RequestContext) -> None:
    """Refuse an unsafe request that another site made a browser send.

    An origin in ``trusted_origins`` may send. Else ``Sec-Fetch-Site`` decides where the browser sends it (over TLS, and
    to localhost), else ``Origin``. Where both are missing it is no browser, which can't be misused like that.

    Raises:
        Problem: (403) it comes from another site; names the header and the mend.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site in {"same-origin", "none"} or (origin is not None and origin.lower() in trust.origins):
        return
    if site is not None:
        raise Problem(
            "cross-origin",
            f"the header Sec-Fetch-Site says {site[:40]!r}: another site sent this; use the console's own pages, "
            "or a program that isn't a browser",
        )
    if origin is not None and origin.lower() not in {f"http://{context.host}", f"https://{context.host}"}:
        raise Problem(
            "cross-origin",
            f"the header Origin says {origin[:200]!r}, but the header Host {context.host[:200]!r}; if a proxy changes "
            "Host, let it keep it, or name it in trusted_proxies and let it send X-Forwarded-Host; if that site may "
            "send, add it to trusted_origins (OUTBOX_CONSOLE_TRUSTED_ORIGINS)",
        )


@contextlib.asynccontextmanager
async def _heard(receive: Receive, headers: Headers, context: RequestContext) -> AsyncIterator[Receive]:
    """Read the body before the request takes a slot; give a ``receive`` with it, while the client's end is awaited."""
    messages = iter([await _buffered(receive, headers)])
    following = asyncio.ensure_future(receive())
    following.add_done_callback(context.heard)

    async def replay() -> Message:
        for first in messages:
            return first
        return await (receive() if following.done() and not context.gone else asyncio.shield(following))

    try:
        yield replay
    finally:
        following.cancel()


async def _buffered(receive: Receive, headers: Headers) -> Message:
    """Return the whole body as one message; or that the client has gone."""
    length, body, more = headers.get("content-length", ""), bytearray(), True
    is_too_large = length.isdecimal() and (len(length) > 9 or int(length) > MAX_BODY)
    while more and not is_too_large:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message
        body += message.get("body", b"")
        more = message.get("more_body", False)
        is_too_large = len(body) > MAX_BODY
    if is_too_large:
        raise Problem("too-large", f"the body has more than {MAX_BODY} bytes; name fewer messages, or use a filter")
    return {"type": "http.request", "body": bytes(body), "more_body": False}
