"""The OpenAPI document of the endpoints, for who is logged in."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

import outbox
from outbox.console.console import Console

_DESCRIPTION = (
    "Lists give a `next_page_token` for the page after, and refuse one of another filter. Acts take `If-Match`, orders "
    "`Idempotency-Key`. Errors are problem details (RFC 9457). Requests that change something have the content type "
    "`application/json`."
)


def add_routes(router: APIRouter, console: Console) -> None:
    """Add the endpoint."""
    documents: dict[str, dict[str, Any]] = {}

    @router.get("/openapi.json", include_in_schema=False)
    def openapi(request: Request) -> JSONResponse:
        """Return the OpenAPI document."""
        base = console.facts(request).base
        if not documents:
            documents["it"] = get_openapi(
                title="outbox console",
                version=outbox.__version__,
                openapi_version="3.1.0",
                description=_DESCRIPTION,
                routes=router.routes,
            )
        return JSONResponse(documents["it"] | {"servers": [{"url": base or "/"}]})
