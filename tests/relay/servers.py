"""Servers that relays publish to: those of the demo, skipped where a program is missing; and an HTTP endpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

from examples.bank_transfer import brokers
from examples.bank_transfer.brokers import KafkaServers, Server
from tests.kit.programs import lacks

T = TypeVar("T")

__all__ = ["Endpoint", "KafkaServers", "Server", "http_endpoint", "kafka_servers", "nats_server", "rabbit_server"]
__all__ += ["redis_server"]


@contextmanager
def _or_lacking(server: AbstractContextManager[T]) -> Iterator[T]:
    with ExitStack() as stack:
        try:
            it = stack.enter_context(server)
        except brokers.Missing as error:
            lacks(error.program, error.mend)
        yield it


def nats_server(folder: Path) -> AbstractContextManager[Server]:
    """Run NATS."""
    return _or_lacking(brokers.nats_server(folder))


def redis_server(folder: Path) -> AbstractContextManager[Server]:
    """Run Valkey."""
    return _or_lacking(brokers.redis_server(folder))


def rabbit_server(folder: Path) -> AbstractContextManager[Server]:
    """Run RabbitMQ."""
    return _or_lacking(brokers.rabbit_server(folder))


def kafka_servers(count: int = 1) -> AbstractContextManager[KafkaServers]:
    """Run a real Kafka."""
    return _or_lacking(brokers.kafka_servers(count))


# --- an endpoint ----------------------------------------------------------------------------------------------------


@dataclass
class Endpoint:
    """An HTTP endpoint: ``took`` are the headers and bodies that came, ``answer`` says what each is answered."""

    url: str = ""
    took: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[dict[str, str], bytes], tuple[int, dict[str, str], bytes]] = lambda headers, body: (204, {}, b"")
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def http_endpoint() -> Iterator[Endpoint]:
    """Serve an endpoint."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, answer = endpoint.answer(headers, body)
            with endpoint.lock:
                endpoint.took.append((headers, body))
            self.send_response(status)
            for name, value in {"content-length": str(len(answer)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    class EndpointServer(ThreadingHTTPServer):
        request_queue_size = 200

    with EndpointServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield endpoint
        server.shutdown()
        thread.join()
