"""The last run as Prometheus' text, for the textfile collector of the node exporter, or any other way of your own.

All are gauges with the labels ``topic`` and ``group``; every kind is there, also at 0, so that an alert ends:

    outbox_reconcile_success                        1 if the run came to an end, 0 if it failed
    outbox_reconcile_last_run_timestamp_seconds     when the run began, by the databases' clock
    outbox_reconcile_in_sync                        1 if there was no difference (measures aside)
    outbox_reconcile_differences{kind}              differences found
    outbox_reconcile_differences_left{kind}         of these, neither repaired nor healed by the end of the run
    outbox_reconcile_in_flight_messages             on their way for less than the grace period, or scheduled
    outbox_reconcile_read_rows                      rows read one by one, on both sides
    outbox_reconcile_standby_lag_seconds{side}      how far a side that was read on a standby was behind its primary; it
                                                    isn't there for a primary
    outbox_reconcile_duration_seconds               how long the pair took, all stages
    outbox_reconcile_unexplained{measure, value, currency}
                                                    what no booking accounts for, absolute values added up; ``currency``
                                                    is empty where no part of the key is called so. Prometheus has
                                                    only floats: alert on ``> 0``, and read the cents in the report

After a run that failed only the first two are there: nothing is known of the rest.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from outbox.reconcile.job import KINDS, Outcome, Pair
from outbox.reconcile.report import kinds, unexplained
from outbox.reconcile.rows import JobResult
from outbox.text import key_text


def write_prometheus(path: Path, result: JobResult) -> None:
    """Write the gauges of a run to a file, at once and whole: a temporary file beside it is renamed."""
    registry = CollectorRegistry()
    _outcome(registry, ((pair.pair, pair.begun_at) for pair in result.pairs), success=True)
    in_sync = _gauge(registry, "in_sync", "Whether there was no difference.")
    in_flight = _gauge(registry, "in_flight_messages", "Messages on their way for less than the grace period.")
    rows = _gauge(registry, "read_rows", "Rows read one by one, on both sides.")
    duration = _gauge(registry, "duration_seconds", "How long the comparison took.")
    lags = _gauge(registry, "standby_lag_seconds", "How far a standby was behind its primary.", "side")
    found = _gauge(registry, "differences", "Differences found.", "kind")
    left = _gauge(registry, "differences_left", "Differences neither repaired nor healed.", "kind")
    for pair in result.pairs:
        labels = pair.pair.names
        in_sync.labels(*labels).set(pair.in_sync)
        in_flight.labels(*labels).set(pair.counts[Outcome.IN_FLIGHT])
        rows.labels(*labels).set(pair.plan.rows_read)
        duration.labels(*labels).set(sum(pair.seconds.values()))
        for side, lag in pair.plan.standby_lag.items():
            lags.labels(*labels, side).set(lag)
        summaries = {kind.kind: kind for kind in kinds(pair, result)}
        for kind in KINDS:
            found.labels(*labels, kind.label).set(summaries[kind].number if kind in summaries else 0)
            left.labels(*labels, kind.label).set(summaries[kind].left if kind in summaries else 0)
    sums = _gauge(registry, "unexplained", "What nothing accounts for.", "measure", "value", "currency")
    for measure in result.measures:
        for (value, currency), amounts in measure.by_currency(measure.rows).items():
            gauge = sums.labels(*measure.pair.names, measure.name, value, key_text(currency))
            gauge.set(float(unexplained(amounts)))
    write_to_textfile(str(path), registry)


def write_failed(path: Path, pairs: Iterable[Pair], at: dt.datetime) -> None:
    """Write that the run of these pairs at this time failed."""
    registry = CollectorRegistry()
    _outcome(registry, ((pair, at) for pair in pairs), success=False)
    write_to_textfile(str(path), registry)


def _outcome(registry: CollectorRegistry, runs: Iterable[tuple[Pair, dt.datetime]], *, success: bool) -> None:
    succeeded = _gauge(registry, "success", "Whether the last run came to an end.")
    began = _gauge(registry, "last_run_timestamp_seconds", "When the last run began.")
    for pair, at in runs:
        succeeded.labels(*pair.names).set(success)
        began.labels(*pair.names).set(at.timestamp())


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"outbox_reconcile_{name}", text, ("topic", "group", *labels), registry=registry)
