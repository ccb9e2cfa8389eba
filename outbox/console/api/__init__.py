"""The HTTP endpoints: what `outbox.operator` does, as JSON under ``/api/v1``."""

from __future__ import annotations

from fastapi import APIRouter

from outbox.console.api import acts, export, inbox, looking, operations, probes
from outbox.console.api import export as payload
from outbox.console.api import looking as messages
from outbox.console.console import Console
from outbox.console.routing import console_router

PREFIX = "/api/v1"


def api_routes(console: Console) -> APIRouter:
    """Return the endpoints of a console, under ``/api/v1``."""
    router = console_router(console, prefix=PREFIX, json_only=True)
    # Those with a fixed path come before those with an id at the same place.
    for part in (looking, messages, payload, acts, inbox, operations, export, probes):
        part.add_routes(router, console)
    return router
