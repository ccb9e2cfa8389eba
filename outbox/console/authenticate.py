"""The dependency that finds out who asks, whichever authorizer a console has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request

from outbox.console import problems
from outbox.console.console import Console
from outbox.console.guard import SAFE_METHODS
from outbox.console.permissions import Permission, Principal

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
