"""How things stand, as Prometheus reads it: what only a look at the tables can tell, never per message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outbox.admin.model import Overview

try:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest
except ImportError as error:
    raise ImportError("the console's metrics need prometheus-client: pip install prometheus-client") from error

#: That of the text format, version 0.0.4.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOPIC = ("database", "topic")
_GROUP = ("database", "group", "topic")


def exposition(overview: Overview) -> bytes:
    """Return the gauges of all topics and groups; what isn't known is left out."""
    registry = CollectorRegistry()

    def gauge(
        name: str, text: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float | None]]
    ) -> None:
        one = Gauge(name, text, labels, registry=registry)
        for names, value in values:
            if value is not None:
                (one.labels(*names) if labels else one).set(value)

    of_topics = {
        "outbox_pending_messages": ("Committed, and not dispatched yet", "undispatched"),
        "outbox_oldest_pending_age_seconds": ("Age of the oldest that isn't dispatched yet", "oldest_undispatched"),
        "outbox_undecided_halves": ("Half messages without a decision", "undecided"),
        "outbox_parked_halves": ("Half messages over their checks, which need a human", "parked_halves"),
        "outbox_scheduled_messages": ("Messages that wait for their time", "scheduled"),
    }
    for name, (text, field) in of_topics.items():
        gauge(name, text, _TOPIC, (((t.database, t.topic), getattr(t, field)) for t in overview.topics))
    groups = [group for topic in overview.topics for group in topic.groups]
    of_groups = {
        "outbox_dead_messages": ("Parked messages of a group, which need a human", "parked"),
        "outbox_failed_messages": ("Messages of a group that will be retried", "failed"),
        "outbox_lag_messages": ("Messages that a group has not come to", "lag"),
        "outbox_oldest_due_retry_age_seconds": ("How long the oldest retry of a group is due", "oldest_due"),
    }
    for name, (text, field) in of_groups.items():
        gauge(name, text, _GROUP, (((g.database, g.group, g.topic), getattr(g, field)) for g in groups))
    alive = sum(worker.alive for worker in overview.workers)
    gauge("outbox_workers_alive", "Workers that reported lately", (), [((), alive)])
    gauge("outbox_databases_unreachable", "Databases that didn't answer", (), [((), len(overview.unseen))])
    return generate_latest(registry)
