"""The last run as Prometheus' text, for the textfile collector of the node exporter, or any other way of your own.

All are gauges with the labels ``topic`` and ``group``, of a fleet also ``producer`` and ``consumer``; every kind is
there, also at 0, so that an alert ends:

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

Of a fleet there are also

    outbox_reconcile_fleet_failed                   members, databases and groups that came to no result: a
                                                    database that is away has no series of its own
    outbox_reconcile_total_in_sync{total}           1 if a total adds up

After a run that failed only the first two are there: nothing is known of the rest.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from outbox.destination import Destination, whole_at
from outbox.reconcile.job import KINDS, Outcome, Pair
from outbox.reconcile.report import kinds, unexplained
from outbox.reconcile.rows import JobResult
from outbox.text import key_text


def write_prometheus(path: Destination, result: JobResult) -> None:
    """Write the gauges of a run to a file, at once and whole: a temporary file beside it is renamed."""
    gauges = Gauges()
    gauges.add(result)
    gauges.write(path)


def write_failed(path: Destination, pairs: Iterable[Pair], at: dt.datetime) -> None:
    """Write that the run of these pairs at this time failed."""
    gauges = Gauges()
    gauges.fail(pairs, at)
    gauges.write(path)


class Gauges:
    """The gauges of one run or of several; ``labels`` are those that tell the runs apart, before topic and group."""

    def __init__(self, *labels: str) -> None:
        self._labels = labels
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def write(self, path: Destination) -> None:
        """Write them to a file, at once and whole."""
        with whole_at(path) as file:
            file.write(generate_latest(self._registry))

    def add(self, result: JobResult, *values: str) -> None:
        """Add a run that came to an end; ``values`` are those of the labels."""
        self._outcome(((pair.pair, pair.begun_at) for pair in result.pairs), values, success=True)
        in_sync = self._gauge("in_sync", "Whether there was no difference.")
        in_flight = self._gauge("in_flight_messages", "Messages on their way for less than the grace period.")
        rows = self._gauge("read_rows", "Rows read one by one, on both sides.")
        duration = self._gauge("duration_seconds", "How long the comparison took.")
        lags = self._gauge("standby_lag_seconds", "How far a standby was behind its primary.", "side")
        found = self._gauge("differences", "Differences found.", "kind")
        left = self._gauge("differences_left", "Differences neither repaired nor healed.", "kind")
        for pair in result.pairs:
            labels = (*values, *pair.pair.names)
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
        sums = self._gauge("unexplained", "What nothing accounts for.", "measure", "value", "currency")
        for measure in result.measures:
            for (value, currency), amounts in measure.by_currency(measure.rows).items():
                labels = (*values, *measure.pair.names, measure.name, value, key_text(currency))
                sums.labels(*labels).set(float(unexplained(amounts)))

    def fail(self, pairs: Iterable[Pair], at: dt.datetime, *values: str) -> None:
        """Add that the run of these pairs at this time failed; ``values`` are those of the labels."""
        self._outcome(((pair, at) for pair in pairs), values, success=False)

    def add_fleet(self, failed: int, totals: Mapping[str, bool]) -> None:
        """Add what is of no member alone: how much came to no result, and whether each total adds up, by name."""
        text = "Members, databases and groups of the fleet that came to no result."
        Gauge("outbox_reconcile_fleet_failed", text, registry=self._registry).set(failed)
        text = "Whether what many databases have adds up."
        in_sync = Gauge("outbox_reconcile_total_in_sync", text, ["total"], registry=self._registry)
        for name, adds_up in totals.items():
            in_sync.labels(name).set(adds_up)

    def _outcome(self, runs: Iterable[tuple[Pair, dt.datetime]], values: Sequence[str], *, success: bool) -> None:
        succeeded = self._gauge("success", "Whether the last run came to an end.")
        began = self._gauge("last_run_timestamp_seconds", "When the last run began.")
        for pair, at in runs:
            succeeded.labels(*values, *pair.names).set(success)
            began.labels(*values, *pair.names).set(at.timestamp())

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        if name not in self._gauges:
            every = (*self._labels, "topic", "group", *labels)
            self._gauges[name] = Gauge(f"outbox_reconcile_{name}", text, every, registry=self._registry)
        return self._gauges[name]
