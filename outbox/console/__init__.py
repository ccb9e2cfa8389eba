"""The admin console: HTTP endpoints and pages over `outbox.operator`, as a FastAPI router or an application of its own."""

from __future__ import annotations

from outbox.errors import pip_install

try:
    import fastapi  # noqa: F401
except ImportError as error:
    raise ImportError(f"the console needs FastAPI: {pip_install('console')}") from error

from outbox.console.auth import (
    AllowAll,
    AnyOf,
    Authorizer,
    Basic,
    Bearer,
    Permission,
    Principal,
    Role,
    TrustedHeader,
    hash_password,
    hash_token,
)
from outbox.console.router import create_console_app, create_console_router

__all__ = [
    "AllowAll",
    "AnyOf",
    "Authorizer",
    "Basic",
    "Bearer",
    "Permission",
    "Principal",
    "Role",
    "TrustedHeader",
    "create_console_app",
    "create_console_router",
    "hash_password",
    "hash_token",
]
