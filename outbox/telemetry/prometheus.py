"""Metrics for Prometheus: what events and observations come to in this process, and the gauges of the last sample.

Each metric is declared once, in `GAUGES` or in `Meter`; the console serves the same gauges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from outbox.errors import pip_install
from outbox.telemetry.events import (
    ClientCallEnded,
    DeliveriesConfirmed,
    HalfChecked,
    MessageExpired,
    MessageFailed,
    MessageParked,
    MessagesHandled,
    MessageSkipped,
    MessagesSent,
    PassEnded,
    PassFailed,
    StatisticsRead,
)
from outbox.telemetry.hooks import Activity, Handling, TelemetryEvent, add_hook, add_observer

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
    from prometheus_client.core import GaugeMetricFamily, Metric
except ImportError as _missing:
    raise ImportError(f"metrics need prometheus-client: {pip_install('prometheus')}") from _missing

#: That of the text format, version 0.0.4.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class GaugeOfStats:
    """A gauge: its name, what it is, and a field of `TopicStats`, `GroupStats` or `SagaStats`; is it in the samples?

    Without the field ``needed`` in a sample its value isn't known, and it isn't there.
    """

    name: str
    text: str
    field: str
    sampled: bool = True
    needed: str | None = None

    def together(self, values: list[float]) -> float:
        """Return the value of several rows together: of ages and of values that are 1 or 0, the highest."""
        return max(values) if self.name.endswith("_seconds") or self.text.endswith("1 or 0") else sum(values)


OF_TOPICS = (
    GaugeOfStats("outbox_pending_messages", "Committed, and not dispatched yet", "undispatched"),
    GaugeOfStats(
        "outbox_oldest_pending_age_seconds", "Age of the oldest that isn't dispatched yet", "oldest_undispatched"
    ),
    GaugeOfStats("outbox_undecided_halves", "Half messages without a decision", "undecided"),
    GaugeOfStats("outbox_parked_halves", "Half messages over their checks, which need a human", "parked"),
    GaugeOfStats("outbox_scheduled_messages", "Messages that wait for their time", "scheduled"),
    GaugeOfStats("outbox_committed_halves", "Half messages that were committed; it only grows", "committed"),
    GaugeOfStats("outbox_rolled_back_halves", "Half messages that were rolled back; it only grows", "rolled_back"),
    GaugeOfStats("outbox_checks", "Checks of half messages, by checkers and fences; it only grows", "checks"),
    GaugeOfStats(
        "outbox_exhausted_messages", "Messages that a known group lost, and that aren't sent again", "exhausted"
    ),
)
OF_GROUPS = (
    GaugeOfStats("outbox_dead_messages", "Parked messages of a group, which need a human", "parked"),
    GaugeOfStats("outbox_failed_messages", "Messages of a group that will be retried", "failed"),
    GaugeOfStats("outbox_waiting_messages", "Messages that wait for an earlier one of their key", "waiting"),
    GaugeOfStats("outbox_taken_messages", "Messages that clients have under leases", "taken"),
    GaugeOfStats("outbox_group_paused", "Has an operator paused the group? 1 or 0", "paused"),
    GaugeOfStats("outbox_breaker_open", "Is the breaker of the group open, or half open? 1 or 0", "breaker_open"),
    GaugeOfStats("outbox_lag_messages", "Messages that a group has not come to", "lag", needed="lag"),
    GaugeOfStats(
        "outbox_oldest_lag_age_seconds",
        "Age of the oldest message that a group has not come to",
        "oldest_lag",
        needed="lag",
    ),
    GaugeOfStats(
        "outbox_reconciliation_differences",
        "What the reconciliation that follows the log knows to differ, with the backlog past its grace period",
        "differences",
        needed="unfollowed",
    ),
    GaugeOfStats(
        "outbox_reconciliation_pass_age_seconds",
        "How long ago the reconciliation that follows the log has ended a pass",
        "unfollowed",
        needed="unfollowed",
    ),
    GaugeOfStats("outbox_lost_messages", "Messages that a group has read and the producer has lost", "lost", False),
    GaugeOfStats(
        "outbox_oldest_due_retry_age_seconds", "How long the oldest retry of a group is due", "oldest_due", False
    ),
)
OF_SAGAS = (
    GaugeOfStats("outbox_open_flows", "Flows of a saga that haven't ended", "open"),
    GaugeOfStats("outbox_compensating_flows", "Flows of a saga that undo their steps", "compensating"),
    GaugeOfStats("outbox_overdue_flows", "Flows of a saga that wait for an answer which is overdue", "overdue"),
    GaugeOfStats(
        "outbox_oldest_overdue_flow_age_seconds", "How long the oldest answer to a saga is overdue", "oldest_overdue"
    ),
)


#: How many topics, and groups, have gauges of their own unless a console says otherwise; and the label of the others.
MOST_ROWS, REST = 500, "(rest)"


def gauged(
    gauge: GaugeOfStats, rows: Iterable[tuple[tuple[str, ...], float]], most: int = MOST_ROWS
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the ``most`` rows (labels and a value) with the highest values, and all others as one, labelled `REST`."""
    ranked = sorted(rows, key=lambda row: -row[1])
    yield from ranked[:most]
    if rest := ranked[most:]:
        yield (REST,) * len(rest[0][0]), gauge.together([value for _, value in rest])


class Meter:
    """A hook and an observer that count and time; `registry` has what they come to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        in_registry: dict[str, Any] = {"registry": registry}
        self._events = Counter(
            "outbox_events_total", "Events, by their code", ("event", "topic", "group", "duty"), **in_registry
        )
        self._sent = Counter("outbox_sent_total", "Messages sent here, once committed", ("topic",), **in_registry)
        self._handled = Counter(
            "outbox_handled_total",
            "Messages of a group, by what came of them: consumed, skipped, failed, parked, expired",
            ("topic", "group", "outcome"),
            **in_registry,
        )
        self._handle_seconds = Histogram(
            "outbox_handle_seconds", "How long calls of a group's handler take", ("topic", "group"), **in_registry
        )
        self._in_flight = Gauge(
            "outbox_handling_messages",
            "Messages that a group's handler has right now",
            ("topic", "group"),
            **in_registry,
        )
        self._checked = Counter("outbox_checked_total", "Answers of checkers", ("topic", "resolution"), **in_registry)
        self._delivered = Counter(
            "outbox_deliveries_total",
            "What became known of messages in a known group, by their status",
            ("topic", "group", "status"),
            **in_registry,
        )
        self._pass_seconds = Histogram("outbox_pass_seconds", "How long a duty's passes take", ("duty",), **in_registry)
        self._pass_failures = Counter("outbox_pass_failures_total", "Passes that failed", ("duty",), **in_registry)
        self._call_seconds = Histogram(
            "outbox_rocketmq_call_seconds",
            "How long calls of RocketMQ's clients take, by what they were answered with",
            ("call", "status"),
            **in_registry,
        )
        of_topics, of_groups = ("topic",), ("group", "topic")
        self._of_topics = {each: Gauge(each.name, each.text, of_topics, **in_registry) for each in OF_TOPICS}
        self._of_groups = {
            each: Gauge(each.name, each.text, of_groups, **in_registry) for each in OF_GROUPS if each.sampled
        }
        self._of_sagas = {each: Gauge(each.name, each.text, ("saga",), **in_registry) for each in OF_SAGAS}
        self._sample_age = Gauge("outbox_sample_age_seconds", "Age of the statistics behind the gauges", **in_registry)

    def __call__(self, event: TelemetryEvent) -> None:
        """Count an event."""
        labels = (str(getattr(event, name, "")) for name in ("topic", "group", "duty"))
        self._events.labels(event.code, *labels).inc()
        match event:
            case MessagesSent(prepared=False):
                self._sent.labels(event.topic).inc(len(event.message_ids))
            case MessagesHandled():
                self._handled.labels(event.topic, event.group, "consumed").inc(len(event.message_ids))
            case MessageExpired() | MessageFailed() | MessageParked() | MessageSkipped():
                self._handled.labels(event.topic, event.group, event.code.partition(".")[2]).inc()
            case HalfChecked():
                self._checked.labels(event.topic, event.resolution).inc()
            case DeliveriesConfirmed():
                for status, number in event.numbers.items():
                    self._delivered.labels(event.topic, event.group, status).inc(number)
            case PassEnded():
                self._pass_seconds.labels(event.duty).observe(event.seconds)
            case ClientCallEnded():
                self._call_seconds.labels(event.call, event.status).observe(event.seconds)
            case PassFailed():
                self._pass_failures.labels(event.duty).inc()
            case StatisticsRead():
                self._set_gauges(event.statistics)
                self._sample_age.set(event.age)

    @contextmanager
    def observe(self, activity: Activity) -> Iterator[None]:
        """Time a handler, and count the messages that it has in hand."""
        if not isinstance(activity, Handling):
            yield
            return
        labels, began = (activity.topic, activity.group), time.perf_counter()
        in_flight = self._in_flight.labels(*labels)
        in_flight.inc(len(activity.messages))
        try:
            yield
        finally:
            in_flight.dec(len(activity.messages))
            self._handle_seconds.labels(*labels).observe(time.perf_counter() - began)

    def _set_gauges(self, statistics: Mapping[str, Any]) -> None:
        topics, sagas = statistics.get("topics", {}), statistics.get("sagas", {})
        groups = [
            ((group, topic), numbers)
            for topic, groups in statistics.get("groups", {}).items()
            for group, numbers in groups.items()
        ]
        for own, rows in (
            (self._of_topics, [((topic,), numbers) for topic, numbers in topics.items()]),
            (self._of_groups, groups),
            (self._of_sagas, [((saga,), numbers) for saga, numbers in sagas.items()]),
        ):
            for each, gauge in own.items():
                gauge.clear()
                # A lag that isn't known is another thing than none.
                known = (row for row in rows if each.needed is None or each.needed in row[1])
                for labels, value in gauged(each, [(of, numbers.get(each.field, 0)) for of, numbers in known]):
                    gauge.labels(*labels).set(value)


class Working(Protocol):
    """A worker, as its gauges see it."""

    def health(self) -> Mapping[str, Any]:
        """Return how each duty fares, by its name."""

    def is_ready(self) -> bool:
        """Is all of it at work?"""


class DutyGauges:
    """How the duties of a worker fare at the moment of the scrape."""

    def __init__(self, worker: Working) -> None:
        self._worker = worker

    def describe(self) -> list[Metric]:
        """Return nothing: what a worker has isn't known before it starts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        failures = GaugeMetricFamily("outbox_duty_failures", "Failures in a row of a duty", labels=["duty"])
        success = GaugeMetricFamily(
            "outbox_duty_last_success_timestamp_seconds", "When a pass last ended well", labels=["duty"]
        )
        for name, health in self._worker.health().items():
            failures.add_metric([name], health.failures)
            if health.last_success is not None:
                success.add_metric([name], health.last_success.timestamp())
        ready = float(self._worker.is_ready())
        yield GaugeMetricFamily("outbox_worker_ready", "Is the worker ready, as /readyz says?", ready)
        yield from (failures, success)


@contextmanager
def metering(worker: Working) -> Iterator[Callable[[], bytes]]:
    """Measure what happens in this process, and how a worker fares; yield what returns it as Prometheus' text."""
    registry = CollectorRegistry()
    meter = Meter(registry)
    registry.register(DutyGauges(worker))
    with ExitStack() as stack:
        stack.callback(add_hook(meter))
        stack.callback(add_observer(meter.observe))
        yield lambda: generate_latest(registry)
