"""`Console`: what every endpoint and page of one console shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, urlencode

from fastapi import Depends, Request

from outbox.console import problems
from outbox.console.permissions import Permission, Principal, needed_for
from outbox.console.trust import Trust
from outbox.operator.model import Action, Actor

if TYPE_CHECKING:
    from fastapi.params import Depends as Dependency

    from outbox.console.auth import Authorizer
    from outbox.console.login import Sessions
    from outbox.operator.service import Admin

#: Where in the scope of a request its facts are kept.
SCOPE_KEY = "outbox.console"

QueryValue = str | int | float | bool | list[str] | tuple[str, ...] | None


@dataclass(slots=True)
class Facts:
    """What is known of one request.

    ``base`` is the path of the console's root, ``path`` what was asked for below it. ``client`` is the address it came
    from, ``by_proxy`` whether a trusted proxy handed it on, ``host`` the name (and port) it was sent to. ``secure``
    tells whether the browser speaks TLS. ``principal`` is None until somebody has logged in.
    """

    base: str
    path: str
    client: str
    by_proxy: bool
    host: str
    secure: bool
    request_id: str
    principal: Principal | None = None


class Opener(Protocol):
    """Gives the service layer."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the databases that couldn't be reached yet."""

    def __call__(self) -> Admin:
        """Return the service layer."""

    def close(self) -> None:
        """Close the console's own connections."""


@dataclass(frozen=True, slots=True)
class Console:
    """One console: its service layer, who may come in, and how it is reached.

    ``environment`` is the name in the badge (``prod`` is red). ``open_admin`` gives the service layer, and connects at
    the first call. ``slots`` is how many requests are worked on at once; the others wait without holding a thread.
    """

    open_admin: Opener
    authorizer: Authorizer
    trust: Trust = field(default_factory=Trust)
    read_only: bool = False
    environment: str | None = None
    slots: int = 8

    @property
    def sessions(self) -> Sessions | None:
        """The sessions of those who log in by a page; None where nobody does."""
        return getattr(self.authorizer, "sessions", None)

    @property
    def admin(self) -> Admin:
        """The service layer. Its calls are synchronous: use it in endpoints that are plain functions.

        Raises:
            SchemaMissing, SchemaOutdated: a database has no outbox tables, or not those of this code.
            sqlalchemy.exc.DBAPIError: no database can be reached.
        """
        return self.open_admin()

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the databases that couldn't be reached yet; what is shown is without them."""
        return self.open_admin.missing

    def facts(self, request: Request) -> Facts:
        """Return what is known of a request."""
        facts: Facts = request.scope[SCOPE_KEY]
        return facts

    def path(self, request: Request, *segments: object, **query: QueryValue) -> str:
        """Return the path of something in this console, as the browser must ask for it: never with scheme or host.

        Each of ``segments`` is quoted: ``console.path(request, "messages", id, status=["parked"])`` gives
        ``/prefix/messages/…?status=parked``. Without segments it is the root, with a slash at its end. What has no
        value is left out of the query.
        """
        path = "/".join([self.facts(request).base, *(quote(str(segment), safe="") for segment in segments)])
        pairs = {name: value for name, value in query.items() if value is not None and value != ""}
        return (path if segments else path + "/") + (f"?{urlencode(pairs, doseq=True)}" if pairs else "")

    def principal_of(self, request: Request) -> Principal:
        """Return who asks.

        Raises:
            Problem: (401) nobody that is known.
        """
        if (principal := self.facts(request).principal) is None:
            raise problems.unauthenticated(())
        return principal

    def actor_of(self, request: Request) -> Actor:
        """Return who acts, and by which way, for the audit."""
        facts = self.facts(request)
        via = "api" if facts.path.startswith("/api/") else "console"
        origin = {"via": via, "ip": facts.client, "request_id": facts.request_id}
        return Actor(self.principal_of(request).id, origin)

    def may(self, request: Request, wanted: Permission | Action | str) -> bool:
        """Tell whether who asks could do this here: has the permission, in a console that doesn't only read."""
        permission = _permission(wanted)
        writes = permission is not Permission.VIEW
        return self.principal_of(request).may(permission) and not (writes and self.read_only)

    def demand(self, request: Request, wanted: Permission | Action | str) -> None:
        """Refuse who asks unless they could do this here.

        Raises:
            Problem: (403) they don't have the permission, or the console only reads.
        """
        permission, principal = _permission(wanted), self.principal_of(request)
        if not principal.may(permission):
            raise problems.forbidden(principal.id, permission)
        if self.read_only and permission is not Permission.VIEW:
            raise problems.read_only()

    def requires(self, wanted: Permission | Action | str) -> Dependency:
        """Return a dependency that refuses who may not: ``dependencies=[console.requires("message:resend")]``."""

        def permitted(request: Request) -> None:
            self.demand(request, wanted)

        dependency: Dependency = Depends(permitted)
        return dependency


def _permission(wanted: Permission | Action | str) -> Permission:
    return needed_for(wanted) if isinstance(wanted, Action) else Permission(wanted)
