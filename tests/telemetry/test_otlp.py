"""Two services, two databases, one collector: a trace leads from the HTTP request to the handler."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from outbox.telemetry.events import MessageFailed
from tests.kit import wait_until
from tests.telemetry.collector import collecting

ROOT = Path(__file__).parents[2]
#: What any service sets up that is told by its environment where to send what it measures.
SET_UP = """
from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from outbox.telemetry.otel import instrument

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
instrument()
"""
SHOP = (
    SET_UP
    + """
import os
from fastapi import Depends, FastAPI
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from outbox import Outbox

engine = create_engine(os.environ["SHOP_URL"])
outbox = Outbox(engine)
app = FastAPI()
FastAPIInstrumentor.instrument_app(app, exclude_spans=["receive", "send"])

@app.post("/orders")
def order() -> dict[str, str]:
    with Session(engine) as session, session.begin():
        return {"message": str(outbox.send(session, "order-created", {"total": "12.50"}, key="c-1"))}
"""
)
MAILER = (
    SET_UP
    + """
import os
from sqlalchemy import create_engine
from outbox import Outbox, Settings

outbox = Outbox(create_engine(os.environ["MAILER_URL"]), settings=Settings(retry_delays=(0.0,)))

@outbox.consumer("order-created", group="mailer", source=create_engine(os.environ["SHOP_URL"]))
def mail(message, session):
    with trace.get_tracer("mailer").start_as_current_span("render mail"):
        if message.attempt == 1:
            raise TimeoutError("smtp.example.com doesn't answer")
"""
)
#: The producer's service dispatches what it sends.
DISPATCHER = (
    SET_UP
    + """
import os
from sqlalchemy import create_engine
from outbox import Outbox

outbox = Outbox(create_engine(os.environ["SHOP_URL"]))
"""
)


@contextmanager
def service(folder: Path, name: str, endpoint: str, urls: dict[str, str], *command: str) -> Iterator[Path]:
    """Run a service as a process of its own, until the block ends; yield its log."""
    environment = {
        "OTEL_SERVICE_NAME": name,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "NO_PROXY": "127.0.0.1",
    }
    path = folder / f"{name}.log"
    with path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={**os.environ, **environment, **urls},
            stdout=log,
            stderr=log,
        )
        try:
            yield path
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def test_one_trace_from_the_request_to_the_handler(tmp_path: Path, new_database: Callable[[], str]) -> None:
    """FastAPI's span, the send, each attempt of the handler and the handler's own span, of three processes."""
    for name, text in {"shop": SHOP, "mailer": MAILER, "dispatcher": DISPATCHER}.items():
        (tmp_path / f"{name}_service.py").write_text(text)
    urls = {"SHOP_URL": new_database(), "MAILER_URL": new_database()}
    run = "outbox.cli", "run", "--app"
    with (
        collecting() as collector,
        service(tmp_path, "shop", collector.endpoint, urls, "uvicorn", "shop_service:app", "--port", "0") as shop,
        service(tmp_path, "dispatcher", collector.endpoint, urls, *run, "dispatcher_service:outbox"),
        service(tmp_path, "mailer", collector.endpoint, urls, *run, "mailer_service:outbox") as mailer,
    ):
        (address,) = wait_until(lambda: re.findall(r"running on (http://\S+)", shop.read_text()), "the shop serves")
        caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        answer = httpx.post(f"{address}/orders", headers={"traceparent": caller}, trust_env=False, timeout=60)
        assert answer.status_code == 200, shop.read_text()
        wait_until(lambda: len(collector.named("process order-created", "render mail")) == 4, "both attempts are told")
        wait_until(lambda: {name for _, name, _ in collector.metrics} >= _MEASURED, "the metrics are told")
    (request,), (send,) = collector.named("POST /orders"), collector.named("send order-created")
    first, second = collector.named("process order-created")
    mails = collector.named("render mail")
    of_trace = {span.trace for span in (request, send, first, second, *mails)}
    assert of_trace == {"0af7651916cd43dd8448eb211c80319c"}
    assert [span.parent for span in (request, send, first, second)] == [
        "b7ad6b7169203331",
        request.id,
        send.id,
        send.id,
    ]
    assert [span.parent for span in mails] == [first.id, second.id]
    assert [span.service for span in (request, send, first, second)] == ["shop", "shop", "mailer", "mailer"]
    assert [span.kind for span in (request, send, first, second)] == ["SERVER", "PRODUCER", "CONSUMER", "CONSUMER"]
    message_id = answer.json()["message"]
    assert {span.attributes["messaging.message.id"] for span in (send, first, second)} == {message_id}
    assert [span.attributes["outbox.attempt"] for span in (first, second)] == ["1", "2"]
    assert (first.failed, first.attributes["error.type"], second.failed) == (True, "TimeoutError", False)
    assert "smtp.example.com" in first.exceptions[0]
    assert MessageFailed.text.partition("%")[0] in mailer.read_text()
    kinds = {name: kind for _, name, kind in collector.metrics}
    assert {kinds[name] for name in _MEASURED if name.endswith("duration")} == {"histogram"}
    assert {kinds[name] for name in _MEASURED if not name.endswith("duration")} == {"sum"}


_MEASURED = {
    "messaging.client.sent.messages",
    "messaging.client.operation.duration",
    "messaging.client.consumed.messages",
    "messaging.process.duration",
    "outbox.pass.duration",
    "outbox.events",
}
