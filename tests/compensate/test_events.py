"""What is told of compensations: each of them, done, failed or refused, by its ids; and its span."""

from __future__ import annotations

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox.telemetry import events
from outbox.telemetry.hooks import TelemetryEvent
from outbox.telemetry.otel import instrument
from tests.compensate.support import Town
from tests.compensate.test_failing import give_back_and_fail


def test_done_and_refused(town: Town, heard: list[TelemetryEvent]) -> None:
    """A compensation that succeeds, and one whose message was pruned before its turn."""
    town.compensate_by()
    half_id, pruned_id = town.parked(), town.transfer()
    bulk_job_id, refused_id = town.order(half_id), town.order(pruned_id)
    for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
        town.at_a.run(f"DELETE FROM outbox.{table} WHERE {column} = :id", id=pruned_id)
    town.work()
    (done,) = (e for e in heard if isinstance(e, events.MessageCompensated))
    assert (done.message_id, done.bulk_job) == (half_id, bulk_job_id)
    (refused,) = (e for e in heard if isinstance(e, events.CompensationEnded))
    assert (refused.message_id, refused.bulk_job, refused.state) == (pruned_id, refused_id, "skipped")
    assert "no half message has this id" in refused.reason


def test_failed(town: Town, heard: list[TelemetryEvent]) -> None:
    """A compensation that fails is told with its error and its attempt, and has a span with the error."""
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    end = instrument(tracers, MeterProvider([]))
    try:
        town.compensate_by(give_back_and_fail)
        half_id = town.parked()
        bulk_job_id = town.order(half_id)
        town.work()
    finally:
        end()
    (failed,) = (e for e in heard if isinstance(e, events.CompensationAttemptFailed))
    assert (failed.message_id, failed.bulk_job, failed.attempt, failed.attempts) == (half_id, bulk_job_id, 1, 5)
    assert isinstance(failed.error, RuntimeError)
    (span,) = (span for span in exporter.get_finished_spans() if span.name == "compensate t")
    assert (span.attributes or {})["error.type"] == "RuntimeError"
    (sent,) = (span for span in exporter.get_finished_spans() if span.name == "send t")
    context = sent.get_span_context()
    assert context is not None
    assert [link.context.span_id for link in span.links] == [context.span_id]
    tracers.shutdown()
