"""What a request must show before anything is done: the right host, the same origin, a body that isn't too big.

The headers of every answer of the console, whatever it is.
"""

from __future__ import annotations

import contextlib
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from outbox.console.console import Facts
from outbox.console.problems import Problem
from outbox.console.trust import Trust

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: The most bytes of a request's body.
MAX_BODY = 64 * 1024

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def request_id_of(headers: Headers) -> str:
    """Return the id that came with the request, if it looks like one; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_host(trust: Trust, facts: Facts) -> None:
    """Refuse a name that isn't the console's: a page of an attacker whose name was bound to our address.

    Raises:
        Problem: (403) the host isn't allowed.
    """
    if not trust.allows_host(facts.host):
        raise Problem(
            "host-not-allowed",
            f"the header Host names {facts.host[:200]!r}, under which this console isn't served; if it should be, add "
            "it to allowed_hosts (OUTBOX_CONSOLE_ALLOWED_HOSTS)",
        )


def check_origin(trust: Trust, headers: Headers, facts: Facts) -> None:
    """Refuse an unsafe request that another site made a browser send.

    An origin in ``trusted_origins`` may send. Else ``Sec-Fetch-Site`` decides where the browser sends it (over TLS, and
    to localhost), else ``Origin``. Where both are missing it is no browser, which can't be misused like that.

    Raises:
        Problem: (403) it comes from another site; names the header and the mend.
    """
    origin = headers.get("origin")
    if origin is not None and origin.lower() in trust.origins:
        return
    site = headers.get("sec-fetch-site")
    if site is not None:
        if site not in {"same-origin", "none"}:
            raise Problem(
                "cross-origin",
                f"the header Sec-Fetch-Site says {site[:40]!r}: another site sent this; use the console's own pages, "
                "or a program that isn't a browser",
            )
        return
    if origin is not None and origin.lower() not in {f"http://{facts.host}", f"https://{facts.host}"}:
        raise Problem(
            "cross-origin",
            f"the header Origin says {origin[:200]!r}, but the header Host {facts.host[:200]!r}; if a proxy changes "
            "Host, let it keep it, or name it in trusted_proxies and let it send X-Forwarded-Host; if that site may "
            "send, add it to trusted_origins (OUTBOX_CONSOLE_TRUSTED_ORIGINS)",
        )


def check_json(headers: Headers) -> None:
    """Refuse what a form of another site could send as well.

    Raises:
        Problem: (415) the body isn't declared as JSON.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise Problem(
            "unsupported-media-type",
            f"the header Content-Type says {content_type[:100]!r}; send application/json, also where the body is empty",
        )


async def bounded(receive: Receive, headers: Headers) -> Receive:
    """Read the body, and return a ``receive`` that gives it once more.

    Raises:
        Problem: (413) it is bigger than `MAX_BODY`.
    """
    too_large = Problem("too-large", f"the body has more than {MAX_BODY} bytes; name fewer messages, or use a filter")
    with contextlib.suppress(ValueError):
        if int(headers.get("content-length", "0")) > MAX_BODY:
            raise too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return receive
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise too_large
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return replay


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
