"""What no page of the console may do, watched in every test: errors, violations, requests that fail or go elsewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Request, Response, WebError

#: Chromium doesn't report every violation of the policy as an error of the console; the event it always has.
_TELL_VIOLATIONS = """
window.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violated: ${event.effectiveDirective} ${event.blockedURI}`))
"""
_INLINE = ("data:", "blob:", "about:")
#: A part of a page that refreshes itself may be late on a busy machine; the page says so, and tries again.
_LATE = "htmx:error: timeout"


class Watch:
    """Notes what went wrong in a browser's context; `verify` fails unless it was expected."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.requests: list[str] = []
        self._faults: list[str] = []
        self._expected: list[str] = [_LATE]
        self._origins = {origin}
        context.add_init_script(_TELL_VIOLATIONS)
        context.on("console", self._on_console)
        context.on("weberror", self._on_error)
        context.on("request", self._on_request)
        context.on("requestfailed", self._on_failure)
        context.on("response", self._on_response)

    def expect(self, pattern: str) -> None:
        """Let faults pass that contain this regular expression."""
        self._expected.append(pattern)

    def allow_origin(self, origin: str) -> None:
        """Let requests to another origin pass."""
        self._origins.add(origin)

    def forget(self) -> None:
        """Begin anew."""
        self.requests, self._faults, self._expected = [], [], [_LATE]

    def verify(self) -> None:
        """Fail if anything went wrong that wasn't expected."""
        faults = [fault for fault in self._faults if not any(re.search(each, fault) for each in self._expected)]
        assert not faults, "\n".join(["the browser told of:", *faults])

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self._faults.append(f"console {message.type}: {message.text} at {message.location['url']}")

    def _on_error(self, error: WebError) -> None:
        self._faults.append(f"uncaught: {error.error}")

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
        origin = "{0.scheme}://{0.netloc}".format(urlsplit(request.url))
        if origin not in self._origins and not request.url.startswith(_INLINE):
            self._faults.append(f"request to another origin: {request.method} {request.url}")

    def _on_failure(self, request: Request) -> None:
        # A page that is left takes its requests with it.
        if request.failure != "net::ERR_ABORTED":
            self._faults.append(f"request failed: {request.method} {request.url}: {request.failure}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self._faults.append(f"answer {response.status}: {response.request.method} {response.url}")
