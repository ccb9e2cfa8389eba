"""`Console`: what all requests to one console share; `Trust`: what it believes; `RequestContext`: one request."""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import Depends, Request
from starlette.datastructures import Headers

from outbox.console.connections import OperatorSource
from outbox.console.permissions import VIEW, Principal
from outbox.console.problems import Problem
from outbox.errors import InvalidSettings
from outbox.operator.acts import ACTS
from outbox.operator.model import Actor

if TYPE_CHECKING:
    from fastapi.params import Depends as Dependency
    from starlette.types import Scope

    from outbox.console.login import Sessions
    from outbox.operator.operator import Operator

#: The key of the `RequestContext` in the scope of a request.
SCOPE_KEY = "outbox.console"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>\d{1,5}))?", re.IGNORECASE)
#: An address with a port, as some proxies have it.
_PORT = re.compile(r"^(?:\[(.*)\]|([^:]*))(?::\d+)?$")


class Trust:
    """What is trusted.

    ``hosts`` are the names under which the console is reached: ``console.example.com``, ``*.example.com``, or ``*`` for
    any; those of this machine are always good, since no other site can have them. ``origins`` are those of other sites
    that may send (``https://ops.example.com``). ``proxies`` are addresses or networks whose ``X-Forwarded-*`` is
    believed.

    Raises:
        InvalidSettings: an origin that isn't ``scheme://host``, or a proxy that is no address or network.
    """

    def __init__(
        self, hosts: Iterable[str] | None = None, origins: Iterable[str] = (), proxies: Iterable[str] = ()
    ) -> None:
        self.hosts = ("localhost", "127.0.0.1", "[::1]", *(host.strip().lower() for host in hosts or ()))
        self.origins = frozenset(map(_origin, origins))
        self.proxies = tuple(map(_network, proxies))

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
    call.
    """

    source: OperatorSource
    authorizer: Authorizer
    trust: Trust
    read_only: bool = False
    environment: str | None = None

    @property
    def sessions(self) -> Sessions | None:
        """The sessions of people who log in by a page; None where the authorizer has no such page."""
        return getattr(self.authorizer, "sessions", None)


class RequestContext:
    """What is known of one request to a console, and what its sender may do: what it says, as far as that is trusted.

    ``base`` is the path of the console's root, ``path`` the rest of the request's path. ``client`` is the address the
    request came from, ``by_proxy`` whether a trusted proxy handed it on, ``host`` the name (and port) it was sent to.
    ``secure`` is whether the browser speaks TLS. ``identity`` is None until the authorizer has found the principal.
    """

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
        self.console, self.path, self.method = console, path, str(scope["method"])
        self.base = quote(root, safe="/~:@!$&'()*+,;=")
        self.client = trust.client(scope, headers)
        self.by_proxy = trust.is_proxy(peer(scope))
        self.host = (trust.forwarded(scope, headers, "host") or headers.get("host", "")).lower()
        self.secure = (trust.forwarded(scope, headers, "proto") or scope.get("scheme", "http")) == "https"
        self.request_id = request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex
        self.identity: Principal | None = None

    @property
    def operator(self) -> Operator:
        """What an operator can see and do. Its calls are synchronous: use it in endpoints that are plain functions."""
        return self.console.source()

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
    def log_fields(self) -> dict[str, str | None]:
        """What each log line about the request has."""
        return {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path,
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
        return self._refusal(needed) is None

    def demand(self, needed: str) -> None:
        """Refuse the request by a `Problem` (403) unless its sender could do this here, as `may` has it."""
        if (refusal := self._refusal(needed)) is not None:
            raise refusal

    def _refusal(self, needed: str) -> Problem | None:
        permission = ACTS[needed].permission if needed in ACTS else needed
        if not self.principal.may(permission):
            detail = f"{self.principal.id!r} doesn't have the permission {permission!r}; ask an admin of the console"
            return Problem("forbidden", detail)
        return Problem.read_only() if self.console.read_only and permission != VIEW else None


def context_of(request: Request) -> RequestContext:
    """Return what is known of a request."""
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
