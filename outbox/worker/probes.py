"""What ``outbox run --http`` serves: is the worker alive and ready, and metrics for Prometheus.

It is the server of the standard library: a worker should not need the console's extra for its probes. It listens
nowhere unless it is asked to, knows no secret, and answers with numbers and names of topics, groups and duties.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

#: Requests that are answered at once; more are turned away. Prometheus and a kubelet need two.
_AT_ONCE = 8

Answer = tuple[int, str, bytes]


class Probed(Protocol):
    """What is asked whether it lives: a worker, or a server."""

    def is_alive(self) -> bool:
        """Does it give signs of life?"""

    def is_ready(self) -> bool:
        """Is all of it at work?"""

    def health(self) -> Mapping[str, Any]:
        """Return how each duty fares, by its name."""


class ProbeServer(ThreadingHTTPServer):
    """Answers GETs by functions, one for each path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, answers: dict[str, Callable[[], Answer]]) -> None:
        self.address_family: socket.AddressFamily = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread of its own, or turn it away."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.close_request(request)

    def shutdown_request(self, request: Any) -> None:
        """End a request that wasn't turned away."""
        self._free.release()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no news, and what answers fail with is in their answers."""


class _Handler(BaseHTTPRequestHandler):
    server: ProbeServer
    #: How long (seconds) a client may take for its request, and to read the answer.
    timeout = 5.0
    server_version, sys_version = "outbox", ""

    def do_GET(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0])
        self._send(*(answer() if answer else _plain(HTTPStatus.NOT_FOUND, "not found")))

    # What is no request is answered without a word of it.
    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        self._send(*_plain(HTTPStatus(code), HTTPStatus(code).phrase))

    # A probe comes every few seconds.
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the framework's parameter
        pass

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def _plain(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


@contextmanager
def serving(worker: Probed, host: str, port: int) -> Iterator[ProbeServer]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics`` of a worker, which needn't have started.

    Without prometheus-client ``/metrics`` answers 501, and says how to install it.

    Raises:
        OSError: the address can't be listened on.
    """

    def probe(good: Callable[[], bool], what: str) -> Answer:
        return _plain(HTTPStatus.OK, what) if good() else _plain(HTTPStatus.SERVICE_UNAVAILABLE, f"not {what}")

    answers: dict[str, Callable[[], Answer]] = {
        "/healthz": partial(probe, worker.is_alive, "alive"),
        "/readyz": partial(probe, worker.is_ready, "ready"),
    }
    with _metrics(worker) as answers["/metrics"], ProbeServer(host, port, answers) as server:
        threading.Thread(target=server.serve_forever, name="outbox-worker-http", daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def _metrics(worker: Probed) -> Iterator[Callable[[], Answer]]:
    """Measure what happens in this process and how a worker fares; yield what answers with it."""
    try:
        from outbox.telemetry import prometheus  # noqa: PLC0415 - an extra
    except ImportError as error:
        missing = _plain(HTTPStatus.NOT_IMPLEMENTED, str(error))
        yield lambda: missing
        return
    with prometheus.metering(worker) as text:
        yield lambda: (HTTPStatus.OK, prometheus.CONTENT_TYPE, text())
