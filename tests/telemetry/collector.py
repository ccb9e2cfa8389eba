"""A collector: what exporters of OpenTelemetry send by OTLP over HTTP, decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

_KINDS = {number: name.removeprefix("SPAN_KIND_") for name, number in Span.SpanKind.items()}


@dataclass(frozen=True, slots=True)
class Collected:
    """A span as it came in; ids are in hexadecimal, ``parent`` is empty for a root."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    began: int
    seconds: float
    failed: bool
    attributes: dict[str, str]
    links: tuple[str, ...]
    exceptions: tuple[str, ...]


class Collector:
    """What has come in so far: spans, and points of metrics as ``(service, name, kind)``."""

    def __init__(self) -> None:
        self.spans: list[Collected] = []
        self.metrics: set[tuple[str, str, str]] = set()
        self.endpoint = ""

    def take(self, path: str, body: bytes) -> None:
        """Decode a request."""
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            for of_resource in request.resource_spans:
                service = _values(of_resource.resource.attributes)["service.name"]
                for scope in of_resource.scope_spans:
                    self.spans += [_collected(service, span) for span in scope.spans]
        elif path == "/v1/metrics":
            for of_meters in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                service = _values(of_meters.resource.attributes)["service.name"]
                for meters in of_meters.scope_metrics:
                    self.metrics |= {(service, each.name, each.WhichOneof("data")) for each in meters.metrics}

    def named(self, *names: str) -> list[Collected]:
        """Return the spans of some names, in the order of their beginnings."""
        return sorted((span for span in self.spans if span.name in names), key=lambda span: span.began)

    def tree(self, trace: str) -> Iterator[str]:
        """Yield the lines of a trace: each span below its parent."""
        of_trace = sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.began)
        known = {span.id for span in of_trace}

        def below(parent: str | None, depth: int) -> Iterator[str]:
            for span in of_trace:
                if span.parent == parent or (parent is None and span.parent not in known):
                    failed = f"  ERROR {span.attributes.get('error.type', '')}" if span.failed else ""
                    facts = f"{span.service}, {span.kind}, {span.seconds * 1000:.1f} ms"
                    yield f"{'  ' * depth}{span.name} [{facts}]{failed}"
                    yield from below(span.id, depth + 1)

        yield from below(None, 0)


def _values(attributes: Any) -> dict[str, str]:
    return {each.key: str(getattr(each.value, each.value.WhichOneof("value"))) for each in attributes}


def _collected(service: str, span: Any) -> Collected:
    events = [_values(event.attributes) for event in span.events if event.name == "exception"]
    return Collected(
        service=service,
        name=span.name,
        kind=_KINDS[span.kind],
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        links=tuple(link.span_id.hex() for link in span.links),
        exceptions=tuple(event.get("exception.stacktrace", "") for event in events),
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Take what is sent to ``endpoint``, until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the framework's parameter
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield collector
        server.shutdown()
        thread.join()
