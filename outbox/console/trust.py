"""Which hosts, origins and proxies are trusted, and what a request says of itself in that light."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.errors import InvalidSettings

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Scope

#: Names that lead nowhere but to this machine.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")

_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>\d{1,5}))?", re.IGNORECASE)
#: An address with a port, as some proxies have it.
_PORT = re.compile(r"^(?:\[(.*)\]|([^:]*))(?::\d+)?$")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Trust:
    """What is trusted.

    ``hosts`` are the names under which the console is reached: ``console.example.com``, ``*.example.com``, or ``*`` for
    any; those of this machine are always good, since no other site can have them. ``origins`` are those of other sites
    that may send (``https://ops.example.com``). ``proxies`` are the networks whose ``X-Forwarded-*`` is believed.
    """

    hosts: tuple[str, ...] = LOOPBACK
    origins: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()

    @classmethod
    def of(cls, hosts: Iterable[str] | None = None, origins: Iterable[str] = (), proxies: Iterable[str] = ()) -> Trust:
        """Return the trust in these, and in this machine's own names.

        Raises:
            InvalidSettings: an origin that isn't ``scheme://host``, or a proxy that is no address or network.
        """
        names = (*LOOPBACK, *(host.strip().lower() for host in hosts or ()))
        return cls(names, frozenset(map(_origin, origins)), tuple(map(_network, proxies)))

    def is_proxy(self, address: str) -> bool:
        """Tell whether an address is that of a trusted proxy."""
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in network for network in self.proxies)

    def client(self, scope: Scope, headers: Headers) -> str:
        """Return the address that a request comes from: behind trusted proxies, the last one that isn't theirs."""
        address = peer(scope)
        for hop in reversed([hop.strip() for hop in ",".join(headers.getlist("x-forwarded-for")).split(",")]):
            if not hop or not self.is_proxy(address):
                break
            address = _PORT.sub(r"\1\2", hop)
        return address if _is_address(address) or not self.is_proxy(peer(scope)) else "unknown"

    def forwarded(self, scope: Scope, headers: Headers, name: str) -> str | None:
        """Return a ``X-Forwarded-*`` header if a trusted proxy set it: the last value, the others may be anybody's."""
        value = headers.get(f"x-forwarded-{name}") if self.is_proxy(peer(scope)) else None
        return value.rpartition(",")[2].strip() if value else None

    def host(self, scope: Scope, headers: Headers) -> str:
        """Return under which host (and port) the console was asked, in lower case."""
        return (self.forwarded(scope, headers, "host") or headers.get("host", "")).lower()

    def prefix(self, scope: Scope, headers: Headers) -> str:
        """Return the prefix that a trusted proxy took off the path."""
        given = self.forwarded(scope, headers, "prefix") or ""
        return given.rstrip("/") if _PREFIX.fullmatch(given.rstrip("/")) else ""

    def is_secure(self, scope: Scope, headers: Headers) -> bool:
        """Tell whether the browser speaks TLS."""
        return (self.forwarded(scope, headers, "proto") or scope.get("scheme", "http")) == "https"

    def allows_host(self, host: str) -> bool:
        """Tell whether the console may be reached under this host; the port doesn't matter."""
        if "*" in self.hosts:
            return True
        match = _HOST.fullmatch(host)
        name = match["name"].lower() if match else ""
        return bool(name) and any(
            name == allowed or (allowed.startswith("*.") and name.endswith(allowed[1:])) for allowed in self.hosts
        )


def peer(scope: Scope) -> str:
    """Return the address at the other end of the connection; ``local`` for a socket without one."""
    client = scope.get("client")
    return str(client[0]) if client else "local"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _origin(text: str) -> str:
    origin = text.strip().lower().rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+", origin):
        raise InvalidSettings(f"trusted origin {text!r} must look like https://ops.example.com")
    return origin


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip())
    except ValueError as error:
        raise InvalidSettings(f"trusted proxy {text!r} must be an address or network: {error}") from None
