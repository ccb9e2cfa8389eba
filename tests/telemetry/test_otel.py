"""OpenTelemetry: one trace from the sender to the handler, and what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Metric
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from sqlalchemy.orm import Session

from outbox import Message, Park, Resolution, Unavailable, testing
from outbox.telemetry.otel import instrument
from tests.kit import wait_until
from tests.worker.conftest import Bench


class Telescope:
    """What was exported, and a tracer of the application's."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        tracers, meters = TracerProvider(), MeterProvider([self.reader])
        tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = tracers.get_tracer("shop")
        self.end = instrument(tracers, meters)
        self.shut_down = (tracers.shutdown, meters.shutdown)

    def spans(self, name: str) -> list[ReadableSpan]:
        """Return the spans that have ended, by their name."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def sums(self, name: str) -> dict[str, float]:
        """Return what a metric has counted, by topic."""
        found: dict[str, float] = {}
        for metric in self.metrics():
            for point in metric.data.data_points if metric.name == name else ():
                topic = str((point.attributes or {}).get("messaging.destination.name", ""))
                found[topic] = found.get(topic, 0) + getattr(point, "value", getattr(point, "count", 0))
        return found

    def metrics(self) -> list[Metric]:
        """Return what was measured so far."""
        data = self.reader.get_metrics_data()
        scopes = [scope for each in (data.resource_metrics if data else ()) for scope in each.scope_metrics]
        return [metric for scope in scopes for metric in scope.metrics]


@pytest.fixture
def telescope() -> Iterator[Telescope]:
    """Instrumented, with exporters in memory."""
    made = Telescope()
    yield made
    made.end()
    for shut_down in made.shut_down:
        shut_down()


@pytest.fixture
def bench(new_bench: Callable[..., Bench]) -> Bench:
    """A bench with the default settings."""
    return new_bench()


def context_of(span: ReadableSpan) -> SpanContext:
    """Return trace and id of a span."""
    found = span.get_span_context()
    assert found is not None
    return found


def attributes(span: ReadableSpan, *names: str) -> list[Any]:
    """Return some attributes of a span."""
    return [(span.attributes or {}).get(name) for name in names]


@pytest.mark.parametrize("is_async", [False, True])
def test_one_trace_over_two_databases(new_bench: Callable[..., Bench], telescope: Telescope, is_async: bool) -> None:
    """From the application's span in the producer's service to the handler's own span in the consumer's."""
    shop, mailer = new_bench(), new_bench()

    def within() -> None:
        assert baggage.get_baggage("tenant") == "acme"
        telescope.tracer.start_span("render mail").end()

    @mailer.outbox.consumer("paid", group="sync", source=shop.engine)
    def handle(message: Message, session: Any) -> None:
        within()
        mailer.handle(message, session)

    if is_async:
        mailer.outbox.subscriptions.clear()

        @mailer.outbox.consumer("paid", group="sync", source=shop.engine)
        async def handle_async(message: Message, session: Any) -> None:
            within()
            await mailer.handle_async(message, session)

    shop.work()
    mailer.work()
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    with telescope.tracer.start_as_current_span("POST /orders") as request, Session(shop.engine) as session:
        message_id = shop.outbox.send(session, "paid", {}, key="k")
        assert telescope.spans("send paid") == []
        session.commit()
    context.detach(token)
    wait_until(lambda: telescope.spans("process paid"), "the message is handled")
    (send,), (process,), (mail,) = (telescope.spans(n) for n in ("send paid", "process paid", "render mail"))
    trace_id = request.get_span_context().trace_id
    assert {context_of(span).trace_id for span in (send, process, mail)} == {trace_id}
    assert send.parent is not None
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None
    assert process.parent.span_id == context_of(send).span_id
    assert mail.parent is not None
    assert mail.parent.span_id == context_of(process).span_id
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    names = "messaging.system", "messaging.operation.name", "messaging.destination.name", "messaging.message.id"
    assert attributes(send, *names) == ["outbox", "send", "paid", str(message_id)]
    assert attributes(process, *names) == ["outbox", "process", "paid", str(message_id)]
    assert attributes(process, "messaging.consumer.group.name", "outbox.attempt") == ["sync", 1]


def test_what_is_rolled_back_has_no_span(bench: Bench, telescope: Telescope) -> None:
    """Neither span nor count for what never was; nor is the current context changed by a send."""
    with Session(bench.engine) as session:
        bench.outbox.send(session, "paid", {})
        assert not trace.get_current_span().get_span_context().is_valid
        session.rollback()
    assert telescope.spans("send paid") == []
    assert telescope.sums("messaging.client.sent.messages") == {}


def test_a_batch_has_links(bench: Bench, telescope: Telescope) -> None:
    """A handler that takes a list: one span, with a link to the context of each message."""

    @bench.outbox.consumer("paid", group="mail", batch=10, takes_batch=True)
    def handle(messages: list[Message], session: Any) -> None:
        """Take them."""

    with Session(bench.engine) as session, session.begin():
        for n in range(3):
            bench.outbox.send(session, "paid", {"n": n}, key="k")
    testing.drain(bench.outbox)
    (process,) = telescope.spans("process paid")
    sent = {context_of(span).span_id for span in telescope.spans("send paid")}
    assert len(sent) == 3
    assert {link.context.span_id for link in process.links} == sent
    assert attributes(process, "messaging.batch.message_count") == [3]


def test_a_callers_own_context_is_kept(bench: Bench, telescope: Telescope) -> None:
    """Headers that have a traceparent are left alone; the send is linked to it, the handler its child."""
    own = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.send(headers={"traceparent": own})
    testing.drain(bench.outbox)
    (send,), (process,) = telescope.spans("send paid"), telescope.spans("process paid")
    assert [link.context.span_id for link in send.links] == [0xB7AD6B7169203331]
    assert process.parent is not None
    assert process.parent.span_id == 0xB7AD6B7169203331


def test_failures(bench: Bench, telescope: Telescope) -> None:
    """A handler that raises, and one that parks, are spans with an error; the message fails as ever."""

    @bench.outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> Park:
        if message.body["number"] == 0:
            raise ZeroDivisionError("no money")
        return Park("no such customer")

    bench.send(count=2)
    testing.drain(bench.outbox)
    spans = {attributes(span, "error.type")[0]: span for span in telescope.spans("process paid")}
    assert set(spans) == {"ZeroDivisionError", "Park"}
    assert {span.status.status_code for span in spans.values()} == {StatusCode.ERROR}
    assert spans["ZeroDivisionError"].events[0].name == "exception"
    assert sorted(bench.inbox()) == [("failed", 1), ("parked", 1)]


def test_an_answer_among_several_is_told(bench: Bench, telescope: Telescope) -> None:
    """A handler of lists that answers for one that something isn't available has a span with that error."""

    @bench.outbox.consumer("paid", group="mail", transactional=False, takes_batch=True, batch=2)
    def handle(messages: list[Message]) -> list[Unavailable | None]:
        return [Unavailable("the provider is away") if message.body["number"] else None for message in messages]

    bench.send(count=2)
    testing.drain(bench.outbox)
    (told,) = {attributes(span, "error.type")[0] for span in telescope.spans("process paid") if span.status.description}
    assert told == "Unavailable"


def test_check_and_dispatch(bench: Bench, telescope: Telescope) -> None:
    """A checker has a span with a link to the half's context, and a dispatch that did something has one."""

    @bench.outbox.checker("paid", immunity=0)
    def check(orphan: Any) -> Resolution:
        return Resolution.COMMIT

    with Session(bench.engine) as session, session.begin():
        bench.outbox.prepare(session, "paid", {}, immunity=0)
    bench.work(roles=["check", "dispatch"])
    wait_until(lambda: telescope.spans("check paid") and telescope.spans("dispatch"), "both are told")
    (checked,), (sent,) = telescope.spans("check paid"), telescope.spans("send paid")
    assert [link.context.span_id for link in checked.links] == [context_of(sent).span_id]
    assert attributes(checked, "outbox.resolution") == ["commit"]
    assert attributes(telescope.spans("dispatch")[0], "messaging.batch.message_count") == [1]


def test_decisions(bench: Bench, telescope: Telescope) -> None:
    """The producer's decision on a half has a span, within that of the application's."""
    with Session(bench.engine) as session, session.begin():
        half_id = bench.outbox.prepare(session, "paid", {})
    with telescope.tracer.start_as_current_span("checkout") as span:
        bench.outbox.commit(half_id)
    (decided,) = telescope.spans("commit")
    assert decided.parent is not None
    assert decided.parent.span_id == span.get_span_context().span_id
    assert attributes(decided, "messaging.message.id") == [str(half_id)]


def test_measurements(bench: Bench, telescope: Telescope) -> None:
    """Messages are counted when they are committed and when they are given to a handler."""
    bench.outbox.consumer("paid", group="mail")(bench.handle)
    bench.send(count=3)
    testing.drain(bench.outbox)
    assert telescope.sums("messaging.client.sent.messages") == {"paid": 3}
    assert telescope.sums("messaging.client.consumed.messages") == {"paid": 3}
    assert telescope.sums("messaging.process.duration") == {"paid": 3}
    assert telescope.sums("messaging.client.operation.duration") == {"paid": 3}


def test_names_are_those_of_the_conventions(bench: Bench, telescope: Telescope) -> None:
    """Each attribute and metric that says ``messaging`` is one of the semantic conventions, none deprecated."""
    bench.outbox.consumer("paid", group="mail", batch=10, takes_batch=True)(lambda messages, session: None)
    bench.send(count=3)
    testing.drain(bench.outbox)
    used = {name for span in telescope.exporter.get_finished_spans() for name in span.attributes or {}}
    used |= {metric.name for metric in telescope.metrics()}
    declared = {**vars(messaging_attributes), **vars(messaging_metrics)}
    known = {value for name, value in declared.items() if name.startswith("MESSAGING_")}
    assert {name for name in used if name.startswith("messaging.")} <= known
    assert len(used) > 10
    assert not used & {"messaging.operation", "messaging.client.published.messages", "messaging.publish.duration"}


def test_ended_is_ended(bench: Bench, telescope: Telescope) -> None:
    """After its end nothing is added to a message."""
    telescope.end()
    bench.send()
    (headers,) = bench.rows("SELECT headers FROM outbox.half_message")
    assert headers is None
    assert telescope.exporter.get_finished_spans() == ()
