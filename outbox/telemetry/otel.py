"""OpenTelemetry: a trace from the function that sends to the handlers, in whatever databases they are; and metrics.

::

    from outbox.telemetry.otel import instrument

    instrument()  # where the application sets up its SDK

Spans, by the semantic conventions for messaging (in development, as of 1.44):

- ``send {topic}`` begins with the `send` and ends with the COMMIT. Its context goes into the message's headers, by the
  propagators that the application has. A message that is rolled back has no span: what never ends is never exported.
  Headers that have a ``traceparent`` already are left alone; the span has a link to that context.
- ``process {topic}`` is around the handler, as a child of the context in the message's headers. A call with several
  messages has a link to each of theirs.
- ``check {topic}`` and ``compensate {topic}`` have a link to the context of the half or the message.
- ``commit`` and ``rollback`` are the producer's decision on a half, until its COMMIT.
- ``dispatch`` is a pass that made messages of ops; there is none for a pass without work.
- ``rocketmq {call}`` is a call of a client of RocketMQ's, from its request to the answer.

Counted are ``messaging.client.sent.messages`` after the COMMIT, ``messaging.client.consumed.messages`` with each call
of a handler, and ``outbox.events``. Histograms are ``messaging.client.operation.duration`` (as long as the ``send``
spans), ``messaging.process.duration``, ``outbox.pass.duration`` and ``outbox.rocketmq.duration``.

A driver's own connection doesn't tell of its COMMIT: there a ``send`` span ends when the message is written, and the
message isn't counted as sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox import __version__
from outbox.errors import pip_install
from outbox.message.model import HalfMessage, Message, Orphan, Park, Resolution, Retry, Unavailable
from outbox.telemetry.events import ClientCallEnded, HalfDecided, MessagesSent, PassEnded
from outbox.telemetry.hooks import Activity, Handling, Sending, TelemetryEvent, add_hook, add_observer, add_send_hook
from outbox.text import class_name

try:
    from opentelemetry import context, metrics, propagate, trace
except ImportError as _missing:
    raise ImportError(f"spans need opentelemetry-api: {pip_install('otel')}") from _missing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Link, Span, TracerProvider

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

_SYSTEM, _TOPIC, _GROUP = "messaging.system", "messaging.destination.name", "messaging.consumer.group.name"
_NAME, _TYPE, _COUNT = "messaging.operation.name", "messaging.operation.type", "messaging.batch.message_count"
_ID, _QUEUE = "messaging.message.id", "messaging.destination.partition.id"
#: Bounds of the histograms (seconds), as the conventions advise.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
#: The duties whose passes make messages of committed halves.
_DISPATCHING = frozenset({"dispatch", "release"})


def instrument(
    tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> Callable[[], None]:
    """Make spans and measurements from now on, for all of this process; return the function that ends it.

    The providers are by default those that the application has set for the process. Call it once.
    """
    instrumentation = _Instrumentation(
        trace.get_tracer("outbox", __version__, tracer_provider, SCHEMA_URL),
        metrics.get_meter("outbox", __version__, meter_provider, SCHEMA_URL),
    )
    removes = (
        add_hook(instrumentation.hear),
        add_observer(instrumentation.around),
        add_send_hook(instrumentation.sending),
    )

    def end() -> None:
        for remove in removes:
            remove()

    return end


class _Instrumentation:
    """What a tracer and a meter are told."""

    def __init__(self, tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self._tracer = tracer
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages sent, once committed"
        )
        self._operation = _seconds(meter, "messaging.client.operation.duration", "From a send to its COMMIT")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages given to handlers"
        )
        self._processing = _seconds(meter, "messaging.process.duration", "How long calls of handlers take")
        self._passes = _seconds(meter, "outbox.pass.duration", "How long a duty's passes take")
        self._calls = _seconds(meter, "outbox.rocketmq.duration", "How long calls of RocketMQ's clients take")
        self._events = meter.create_counter("outbox.events", "{event}", "Events, by their code")

    def sending(self, half: HalfMessage) -> Sending:
        """Begin the span of a message, which ends with the COMMIT."""
        links = _links([half.headers])
        attributes = {**_messaging("send", "send", half.topic), _ID: str(half.id)}
        kind = trace.SpanKind.PRODUCER
        span = self._tracer.start_span(f"send {half.topic}", kind=kind, attributes=attributes, links=links)
        headers: dict[str, str] = {}
        if not links:
            propagate.inject(headers, trace.set_span_in_context(span))
        return Sending(headers, partial(self._committed, half.topic, span, time.perf_counter()))

    def _committed(self, topic: str, span: Span, began: float) -> None:
        span.end()
        self._operation.record(time.perf_counter() - began, _messaging("send", "send", topic))

    def hear(self, event: TelemetryEvent) -> None:
        """Count an event."""
        names: dict[str, Any] = {
            "outbox.event": event.code,
            _TOPIC: getattr(event, "topic", ""),
            _GROUP: getattr(event, "group", ""),
        }
        self._events.add(1, {name: value for name, value in names.items() if value})
        match event:
            case MessagesSent(prepared=False):
                self._sent.add(len(event.message_ids), _messaging("send", "send", event.topic))
            case HalfDecided():
                attributes = {_SYSTEM: "outbox", _NAME: event.resolution, _TYPE: "settle", _ID: str(event.half_id)}
                self._ended(event.resolution, event.seconds, attributes, None)
            case ClientCallEnded():
                called = {"rpc.system": "grpc", "rpc.method": event.call, "outbox.rocketmq.status": event.status}
                self._calls.record(event.seconds, called)
                self._ended(f"rocketmq {event.call}", event.seconds, called, context.Context(), trace.SpanKind.SERVER)
            case PassEnded():
                self._passes.record(event.seconds, {"outbox.duty": event.duty})
                if event.duty in _DISPATCHING and event.done:
                    counts: dict[str, Any] = {_SYSTEM: "outbox", _NAME: event.duty, _COUNT: event.done}
                    self._ended("dispatch", event.seconds, counts, context.Context())

    def _ended(
        self,
        name: str,
        seconds: float,
        attributes: Mapping[str, Any],
        within: Context | None,
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> None:
        """Make the span of what has ended: within a context, the empty one or (None) that of the running code."""
        now = time.time_ns()
        began = now - int(seconds * 1e9)
        self._tracer.start_span(name, within, kind, attributes, start_time=began).end(now)

    @contextmanager
    def around(self, activity: Activity) -> Iterator[None]:
        """Make a span around a call of a handler, a checker, a compensation or a callback."""
        if isinstance(activity, Handling):
            with self._handling(activity):
                yield
            return
        argument, more = activity.argument, dict[str, Any]()
        match argument:
            case Orphan(checks=checks):
                verb, more = "check", {"outbox.checks": checks}
            case _:
                verb = "compensate"
        attributes = {**_messaging(verb, None, argument.topic), _ID: str(argument.id), **more}
        with self._current(f"{verb} {argument.topic}", attributes, [argument.headers]) as span:
            yield
            if isinstance(activity.answer, Resolution):
                span.set_attribute("outbox.resolution", activity.answer.value)

    @contextmanager
    def _handling(self, call: Handling) -> Iterator[None]:
        labels = {**_messaging("process", "process", call.topic), _GROUP: call.group}
        attributes = {**labels, _QUEUE: str(call.queue)}
        if len(call.messages) > 1:
            headers = [message.headers for message in call.messages]
            spans = self._current(f"process {call.topic}", attributes | {_COUNT: len(headers)}, headers, kind=_CONSUMER)
        else:
            spans = self._child(f"process {call.topic}", attributes, call.messages[0])
        began = time.perf_counter()
        self._consumed.add(len(call.messages), labels)
        failed: dict[str, str] = {}
        try:
            with spans as span:
                yield
                answers = call.answer if isinstance(call.answer, list | tuple) else [call.answer]
                if bad := next((each for each in answers if isinstance(each, Retry | Park | Unavailable)), None):
                    failed = {"error.type": type(bad).__name__}
                    span.set_attributes(failed)
                    span.set_status(trace.StatusCode.ERROR, bad.reason)
        except BaseException as error:
            failed = {"error.type": class_name(error)}
            raise
        finally:
            self._processing.record(time.perf_counter() - began, {**labels, **failed})

    @contextmanager
    def _child(self, name: str, attributes: Mapping[str, Any], message: Message) -> Iterator[Span]:
        """Make a span whose parent is the context in a message's headers; the rest of that (baggage) is current too."""
        attributes = {**attributes, _ID: str(message.id), "outbox.attempt": message.attempt}
        token = context.attach(propagate.extract(message.headers, context.Context()))
        try:
            with self._current(name, attributes, kind=_CONSUMER) as span:
                yield span
        finally:
            context.detach(token)

    @contextmanager
    def _current(
        self,
        name: str,
        attributes: Mapping[str, Any],
        linked: Sequence[Mapping[str, str]] = (),
        kind: trace.SpanKind = trace.SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """Make a span with links to the contexts of headers."""
        with self._tracer.start_as_current_span(name, kind=kind, attributes=attributes, links=_links(linked)) as span:
            try:
                yield span
            except BaseException as error:
                span.set_attribute("error.type", class_name(error))
                raise


_CONSUMER = trace.SpanKind.CONSUMER


def _messaging(operation: str, kind: str | None, topic: str) -> dict[str, Any]:
    names = {_SYSTEM: "outbox", _NAME: operation, _TOPIC: topic}
    return names if kind is None else {**names, _TYPE: kind}


def _seconds(meter: metrics.Meter, name: str, text: str) -> metrics.Histogram:
    return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_SECONDS)


def _links(headers: Sequence[Mapping[str, str]]) -> list[Link]:
    """Return a link to each context that headers have."""
    contexts: list[Context] = [propagate.extract(each, context.Context()) for each in headers]
    found = (trace.get_current_span(each).get_span_context() for each in contexts)
    return [trace.Link(each) for each in found if each.is_valid]
