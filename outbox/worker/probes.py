"""What ``outbox run --http`` serves: is the worker alive and ready (or all of several), and metrics for Prometheus.

It is the server of the standard library: three GETs without a body need no framework, a worker should not need the
console's extra for its probes, and the server runs in threads, as the duties do. It listens nowhere unless it is asked
to, knows no secret, and answers with numbers and names of topics, groups and duties. It serves no page to a browser;
what may reach it is for the network to say.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol

from outbox.errors import InvalidSettings, pip_install
from outbox.telemetry.hooks import add_hook, add_observer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from outbox.worker.processes.supervisor import Supervisor
    from outbox.worker.worker import Worker

#: Requests that are answered at once; more are turned away. Prometheus and a kubelet need two.
_AT_ONCE = 8
#: How long (seconds) a client may take for its request, and to read the answer.
_TIMEOUT = 5.0

Answer = tuple[int, str, bytes]
_TEXT = "text/plain; charset=utf-8"


def address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; ``:PORT`` is every address of this machine.

    Raises:
        InvalidSettings: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidSettings(f"{text!r} must be HOST:PORT, such as 127.0.0.1:9100, or :9100 for every address")
    return host.strip("[]"), int(port)


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
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes away is no news, and what answers fail with is in their answers."""


class _Handler(BaseHTTPRequestHandler):
    server: ProbeServer
    timeout = _TIMEOUT
    server_version = "outbox"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answer = self.server.answers.get(path)
        self._send(*(answer() if answer else _plain(HTTPStatus.NOT_FOUND, "not found")))

    do_HEAD = do_GET  # noqa: N815 - the framework's name

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer a request that isn't one, without a word of it."""
        self._send(*_plain(HTTPStatus(code), HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the framework's parameter
        """Log nothing: a probe comes every few seconds."""

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _plain(status: HTTPStatus, text: str) -> Answer:
    return status, _TEXT, f"{text}\n".encode()


def measured(worker: Worker, stack: ExitStack) -> CollectorRegistry | None:
    """Measure what happens in this process and how a worker fares, until the stack ends; None without the extra."""
    registry = counted(stack)
    if registry is not None:
        registry.register(DutyGauges(worker))
    return registry


def measured_processes(supervisor: Supervisor, stack: ExitStack) -> CollectorRegistry | None:
    """Count the events of a supervisor, and have its processes measured; None without the extra."""
    own = counted(stack)
    if own is None:
        return None
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    registry.register(ProcessFamilies(supervisor, own))
    return registry


def counted(stack: ExitStack) -> CollectorRegistry | None:
    """Count and time what happens in this process, until the stack ends; None without the extra."""
    try:
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra
    except ImportError:  # the answer says so
        return None
    from outbox.telemetry.prometheus import Meter  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    meter = Meter(registry)
    stack.callback(add_hook(meter))
    stack.callback(add_observer(meter.observe))
    return registry


class Probed(Protocol):
    """A worker, or what supervises several."""

    def is_alive(self) -> bool:
        """Is there no need for a restart?"""

    def is_ready(self) -> bool:
        """Is all of it at work?"""


@contextmanager
def serving(
    probed: Probed, host: str, port: int, measure: Callable[[Any, ExitStack], CollectorRegistry | None] = measured
) -> Iterator[ProbeServer]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics`` of a worker, which needn't have started.

    ``measure`` begins to measure the probed values; of a `Supervisor` that is `measured_processes`. Without
    prometheus-client ``/metrics`` answers 501, and says how to install it.

    Raises:
        OSError: the address can't be listened on.
    """
    with ExitStack() as stack:
        registry = measure(probed, stack)
        answers: dict[str, Callable[[], Answer]] = {
            "/healthz": lambda: _probe(probed.is_alive(), "alive"),
            "/readyz": lambda: _probe(probed.is_ready(), "ready"),
            "/metrics": lambda: _metrics(registry),
        }
        server = stack.enter_context(ProbeServer(host, port, answers))
        thread = threading.Thread(target=server.serve_forever, name="outbox-worker-http", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield server


def _probe(good: bool, what: str) -> Answer:
    return _plain(HTTPStatus.OK, what) if good else _plain(HTTPStatus.SERVICE_UNAVAILABLE, f"not {what}")


def _metrics(registry: CollectorRegistry | None) -> Answer:
    if registry is None:
        return _plain(HTTPStatus.NOT_IMPLEMENTED, f"metrics need prometheus-client: {pip_install('prometheus')}")
    from prometheus_client import generate_latest  # noqa: PLC0415 - an extra

    from outbox.telemetry.prometheus import CONTENT_TYPE  # noqa: PLC0415 - an extra

    return HTTPStatus.OK, CONTENT_TYPE, generate_latest(registry)


def _ready(ready: bool) -> Metric:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

    return GaugeMetricFamily("outbox_worker_ready", "Is the worker ready, as /readyz says?", float(ready))


class DutyGauges:
    """How the duties of a worker fare at the moment of the scrape."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> list[Metric]:
        """Return nothing: what a worker has isn't known before it starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - an extra

        failures = GaugeMetricFamily("outbox_duty_failures", "Failures in a row of a duty", labels=["duty"])
        success = GaugeMetricFamily(
            "outbox_duty_last_success_timestamp_seconds", "When a pass last ended well", labels=["duty"]
        )
        for name, health in self._worker.health().items():
            failures.add_metric([name], health.failures)
            if health.last_success is not None:
                success.add_metric([name], health.last_success.timestamp())
        yield from (_ready(self._worker.is_ready()), failures, success)


class ProcessFamilies:
    """What several worker processes have measured, with the label ``process``: each begins anew when it is replaced.

    So no counter of all of them ever goes back, and the sums are the scraper's, as with workers on several machines.
    The supervisor is process 0, of which the events are told.
    """

    def __init__(self, supervisor: Supervisor, own: CollectorRegistry) -> None:
        self._supervisor = supervisor
        self._own = own

    def describe(self) -> list[Metric]:
        """Return nothing: what the processes have isn't known before they start."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all."""
        from prometheus_client.core import Metric as Family  # noqa: PLC0415 - an extra

        of_processes: dict[int, Sequence[Metric]] = {
            0: [each for each in self._own.collect() if each.name == "outbox_events"],
            # One that doesn't answer isn't ready, which is its only measurement.
            **{number: found or [_ready(False)] for number, found in self._supervisor.families().items()},
        }
        merged: dict[str, Metric] = {}
        for number, families in of_processes.items():
            for each in families:
                into = merged.setdefault(each.name, Family(each.name, each.documentation, each.type, each.unit))
                into.samples += [one._replace(labels={"process": str(number), **one.labels}) for one in each.samples]
        yield from merged.values()
