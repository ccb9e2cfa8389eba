"""Authentication: authorizers for passwords, tokens and proxies, or any FastAPI dependency of the application.

An authorizer is a FastAPI dependency, sync or async, that returns a `Principal`, or None for a stranger. Those here are
objects that are called with the request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Depends, Request

from outbox.console.context import Authorizer, Context, context_of
from outbox.console.guard import SAFE_METHODS
from outbox.console.login import COOKIE, PasswordHash, Sessions, Throttle
from outbox.console.permissions import VIEW, Principal, Role
from outbox.console.problems import Problem
from outbox.errors import InvalidSettings

E = TypeVar("E", bound=Callable[..., Any])

_REALM = 'Basic realm="outbox console", charset="UTF-8"'
_REMEMBERED = 256
#: How many passwords are tried at once: each takes 16 MB and a processor.
_TRIES = 2


def authentication(authorizer: Authorizer) -> Callable[..., None]:
    """Return a dependency that lets in a sender whom the authorizer knows, to act only unless the console only reads.

    An endpoint that changes nothing although its method is POST is marked by `only_reads`.

    Raises (the dependency):
        Problem: (401) an unknown sender; (403) no permission to see anything, or an act in read-only mode.
        TypeError: the authorizer returned something else.
    """
    is_plain = inspect.isroutine(authorizer) or inspect.isclass(authorizer)
    # FastAPI reads the annotations of a method, but can't resolve those of an object that is called.
    dependency = authorizer if is_plain else authorizer.__call__  # type: ignore[operator]

    def authenticate(request: Request, context: Context, found: Any = Depends(dependency)) -> None:  # noqa: B008
        if found is not None and not isinstance(found, Principal):
            raise TypeError(f"the authorizer returned {type(found).__name__}; it must return a Principal or None")
        context.identity = found
        context.demand(VIEW)
        reads = request.method in SAFE_METHODS or getattr(request.scope["endpoint"], "only_reads", False)
        if context.console.read_only and not reads:
            raise Problem.read_only()

    return authenticate


def only_reads(endpoint: E) -> E:
    """Mark an endpoint that changes nothing, although its method is POST: it works in a console that only reads."""
    endpoint.only_reads = True  # type: ignore[attr-defined]
    return endpoint


class AllowAll:
    """Lets everybody in, as an admin or what ``role`` says. For a laptop; never where others reach the console."""

    def __init__(self, role: Role | str = Role.ADMIN) -> None:
        self._principal = Principal.of("anonymous", role)

    def __call__(self, request: Request) -> Principal:  # noqa: ARG002 - as all authorizers are called
        """Return the same principal for every request."""
        return self._principal


class Basic:
    """Names and passwords, for which the browser has a dialog (HTTP Basic).

    ``users`` maps a name to ``(hash, role)``, the hash by `hash_password`. Failed logins are slowed down by name and
    address. A password that was right is recognised by a keyed digest for as long as the process runs, since scrypt
    is slow on purpose and browsers send the password each time.

    Raises:
        InvalidSettings: a hash or role that isn't one.
    """

    challenges = (_REALM,)

    def __init__(self, users: Mapping[str, tuple[str, Role | str]], *, throttle: Throttle | None = None) -> None:
        self._users = {
            name: (PasswordHash.read(hashed), Principal.of(name, role)) for name, (hashed, role) in users.items()
        }
        self._throttle = throttle or Throttle()
        self._decoy = next((hashed for hashed, _ in self._users.values()), PasswordHash()).decoy()
        self._key = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._lock, self._tries = threading.Lock(), threading.BoundedSemaphore(_TRIES)

    def __call__(self, request: Request) -> Principal | None:
        """Return the user whose name came with the right password; raise a `Problem` (429) if too many have failed."""
        if (sent := _credentials(request, "basic")) is None:
            return None
        try:
            name, colon, password = base64.b64decode(sent, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        if not colon:
            return None
        attempt = (name[:100], context_of(request).client)
        self._throttle.check(attempt)
        hashed, principal = self._users.get(name, (self._decoy, None))
        digest = hmac.digest(self._key, f"{hashed}:{name}:{password}".encode(), hashlib.sha256)
        with self._lock:
            known = digest in self._right
        if not known:
            with self._tries:
                known = hashed.matches(password)
        if not known or principal is None:
            self._throttle.failed(attempt)
            return None
        self._throttle.succeeded(attempt)
        with self._lock:
            self._right[digest] = None
            while len(self._right) > _REMEMBERED:
                self._right.popitem(last=False)
        return principal


class Bearer:
    """Tokens: in the header ``Authorization: Bearer …`` by programs, typed into a page by people.

    ``tokens`` maps the hash of a token (by `hash_token`) to its principal; ``session_key`` is that of `Sessions`.

    Raises:
        InvalidSettings: something isn't a hash, or the key is too short.
    """

    challenges = ("Bearer",)

    def __init__(
        self, tokens: Mapping[str, Principal], *, session_key: str | None = None, throttle: Throttle | None = None
    ) -> None:
        self.sessions = Sessions(tokens, throttle, key=session_key)

    def __call__(self, request: Request) -> Principal | None:
        """Return whose token was sent, or whose session it is; raise a `Problem` (429) if too many have failed."""
        if (token := _credentials(request, "bearer")) is None:
            return self.sessions.principal(request.cookies.get(COOKIE))
        found = self.sessions.find(token, context_of(request).client)
        return found and found[1]


class TrustedHeader:
    """Believes a proxy that has authenticated the caller and says so in a header; only one of ``trusted_proxies``.

    ``header`` has the name. ``roles`` maps names to roles; with ``groups`` (the header with the groups, separated by
    commas) it maps groups, and the biggest role counts. A user without a role gets ``default``, or isn't let in.

    Raises:
        InvalidSettings: a role that isn't one.
    """

    needs_proxies = True

    def __init__(
        self,
        header: str = "X-Forwarded-User",
        *,
        roles: Mapping[str, Role | str] | None = None,
        groups: str | None = None,
        default: Role | str | None = None,
    ) -> None:
        self._header, self._groups = header, groups
        self._roles = {name: Role(role) for name, role in (roles or {}).items()}
        self._default = None if default is None else Role(default)

    def __call__(self, request: Request) -> Principal | None:
        """Return whom the proxy names."""
        sent = request.headers.getlist(self._header)
        if not context_of(request).by_proxy or len(sent) != 1 or not (name := sent[0].strip()):
            return None
        among = re.split(r"\s*,\s*", request.headers.get(self._groups, "").strip()) if self._groups else [name]
        roles = [self._roles[one] for one in among if one in self._roles]
        role = max(roles, key=list(Role).index, default=self._default)
        return None if role is None else Principal.of(name, role)


class AnyOf:
    """Lets in whom any of some authorizers lets in, tried in turn; each is one of this module."""

    def __init__(self, *authorizers: Callable[[Request], Principal | None]) -> None:
        if not authorizers:
            raise InvalidSettings("AnyOf needs at least one authorizer")
        self._authorizers = authorizers
        self.challenges = tuple(text for one in authorizers for text in getattr(one, "challenges", ()))
        self.sessions = next((one.sessions for one in authorizers if isinstance(one, Bearer)), None)
        self.needs_proxies = any(getattr(one, "needs_proxies", False) for one in authorizers)

    def __call__(self, request: Request) -> Principal | None:
        """Return the first principal that one of them knows; raise a `Problem` (429) if too many have failed."""
        return next((principal for one in self._authorizers if (principal := one(request)) is not None), None)


def _credentials(request: Request, scheme: str) -> str | None:
    """Return what a header ``Authorization`` of this scheme has."""
    scheme_name, _, sent = request.headers.get("authorization", "").partition(" ")
    return sent.strip() if scheme_name.lower() == scheme and sent.strip() else None
