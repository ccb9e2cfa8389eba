"""The ASGI middleware of a console: what a request must show before anything is done, and what every answer has.

It holds for every path of a console: known paths, unknown ones, and those that FastAPI itself refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from outbox.console.context import SCOPE_KEY, RequestContext
from outbox.console.problems import Problem, log

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from outbox.console.context import Console, Trust

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: The most bytes of a request's body.
MAX_BODY = 64 * 1024
#: How many requests are worked on at once.
SLOTS = 8
#: They tell so little that they answer under any host.
PROBES = frozenset({"/healthz", "/readyz"})

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; object-src 'none'"
)
#: `Referrer-Policy` isn't `no-referrer`: with it browsers send `Origin: null` with forms, which the guard refuses.
FIXED_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Works out the `RequestContext`, refuses requests that no one should answer, and sees to every answer.

    It refuses a request under another host, from another site, with a wrong type of body, or with a body too big. Only
    `SLOTS` requests are worked on at once; the others wait without holding a thread. Every
    answer gets the fixed headers (only the route of static files sets its own ``Cache-Control``), and every error that
    no handler of FastAPI's took is answered, before the application around the console sees it.
    """

    def __init__(
        self, app: ASGIApp, console: Console, answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self.app, self.console, self.answer = app, console, answer
        # A semaphore belongs to the event loop in which a request first waits for it.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its context, if it may be answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context = scope[SCOPE_KEY] = RequestContext(self.console, scope)
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(FIXED_HEADERS | {"X-Request-ID": context.request_id})
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check(context, headers)
            body = await buffered(receive, headers)
            async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(SLOTS)):
                await self.app(scope, body, sending)
        except Exception as error:
            if status:
                raise
            response = await self.answer(Request(scope, receive), error)
            await response(scope, receive, sending)
        if context.method not in SAFE_METHODS and context.identity and status < 400:
            log(logging.INFO, "console.done", status=status, **context.log_fields)

    def _check(self, context: RequestContext, headers: Headers) -> None:
        # A page of an attacker could have a name that was bound to our address.
        if context.path not in PROBES and not self.console.trust.allows_host(context.host):
            raise Problem(
                "host-not-allowed",
                f"the header Host names {context.host[:200]!r}, under which this console isn't served; if it should "
                "be, add it to allowed_hosts (OUTBOX_CONSOLE_ALLOWED_HOSTS)",
            )
        if context.method in SAFE_METHODS:
            return
        check_origin(self.console.trust, headers, context)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # The form of another site could send other types, and of these methods POST only.
        if context.method == "POST" and context.path.startswith("/api/") and content_type != "application/json":
            raise Problem(
                "unsupported-media-type",
                f"the header Content-Type says {content_type[:100]!r}; send application/json, also where the body is "
                "empty",
            )


def check_origin(trust: Trust, headers: Headers, context: RequestContext) -> None:
    """Refuse an unsafe request that another site made a browser send.

    An origin in ``trusted_origins`` may send. Else ``Sec-Fetch-Site`` decides where the browser sends it (over TLS, and
    to localhost), else ``Origin``. Where both are missing it is no browser, which can't be misused like that.

    Raises:
        Problem: (403) it comes from another site; names the header and the mend.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site in {"same-origin", "none"} or (origin is not None and origin.lower() in trust.origins):
        return
    if site is not None:
        raise Problem(
            "cross-origin",
            f"the header Sec-Fetch-Site says {site[:40]!r}: another site sent this; use the console's own pages, "
            "or a program that isn't a browser",
        )
    if origin is not None and origin.lower() not in {f"http://{context.host}", f"https://{context.host}"}:
        raise Problem(
            "cross-origin",
            f"the header Origin says {origin[:200]!r}, but the header Host {context.host[:200]!r}; if a proxy changes "
            "Host, let it keep it, or name it in trusted_proxies and let it send X-Forwarded-Host; if that site may "
            "send, add it to trusted_origins (OUTBOX_CONSOLE_TRUSTED_ORIGINS)",
        )


async def buffered(receive: Receive, headers: Headers) -> Receive:
    """Read the body before the request takes a slot, and return a ``receive`` that gives it once more."""
    too_large = Problem("too-large", f"the body has more than {MAX_BODY} bytes; name fewer messages, or use a filter")
    with contextlib.suppress(ValueError):
        if int(headers.get("content-length", "0")) > MAX_BODY:
            raise too_large
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return receive
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise too_large
    messages = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay
