"""The headers of every answer of the console, whatever it is."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)

#: `Referrer-Policy` isn't `no-referrer`: with it browsers send `Origin: null` with forms, which the guard refuses.
FIXED = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def with_headers(send: Send, request_id: str) -> Send:
    """Return a ``send`` that adds the headers; only who serves assets may say how long they are kept."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in FIXED.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
            headers["X-Request-ID"] = request_id
        await send(message)

    return sending
