"""The admin console: HTTP endpoints and pages over `outbox.operator`, as a router or an application."""

from __future__ import annotations

from outbox.errors import pip_install

try:
    import fastapi  # noqa: F401 - is the extra installed?
except ImportError as _missing:
    raise ImportError(f"the console needs FastAPI: {pip_install('console')}") from _missing

from outbox.console.app import ConsoleOptions, create_console_app, create_console_router
from outbox.console.auth import AllowAll, AnyOf, Basic, Bearer, TrustedHeader, hash_password, hash_token
from outbox.console.context import PERMISSIONS, Authorizer, Principal, Role

__all__ = [
    "PERMISSIONS",
    "AllowAll",
    "AnyOf",
    "Authorizer",
    "Basic",
    "Bearer",
    "ConsoleOptions",
    "Principal",
    "Role",
    "TrustedHeader",
    "create_console_app",
    "create_console_router",
    "hash_password",
    "hash_token",
]
