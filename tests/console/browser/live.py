"""Real servers on sockets of their own: the console's, a proxy that takes a prefix off, and one of an attacker."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import uvicorn

from tests.kit import wait_until

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te", "trailer"})


@contextmanager
def serving(app: ASGIApp, **options: Any) -> Iterator[int]:
    """Serve an application by uvicorn in a thread; give its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", lifespan="on", **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="console")
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the console serves")
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="plain server")
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def attacker(pages: Mapping[str, str]) -> Iterator[int]:
    """Serve these pages by their paths, with no policy that could hide what they do; give the port."""

    class Evil(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(200 if page else 204)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with _answering(Evil) as port:
        yield port


@contextmanager
def stripping_proxy(prefix: str, port: int, told: Mapping[str, str], strays: list[str]) -> Iterator[int]:
    """Hand on what is asked for under a prefix, without it, with the headers ``told``; give the proxy's port.

    What is asked for elsewhere is noted in ``strays``: no link, form or file of the console may lead there.
    """

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand_on()

        def do_POST(self) -> None:
            self._hand_on()

        def _hand_on(self) -> None:
            if not self.path.startswith(prefix + "/"):
                strays.append(f"{self.command} {self.path}")
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            try:
                upstream.request(self.command, self.path.removeprefix(prefix), body or None, {**headers, **told})
                answer = upstream.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP_BY_HOP | {"date", "server"}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            finally:
                upstream.close()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with _answering(Proxy) as at:
        yield at
