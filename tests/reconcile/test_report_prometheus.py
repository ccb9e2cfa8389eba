"""The last run as Prometheus' text."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from outbox.reconcile.job import KINDS, Pair
from outbox.reconcile.report import prometheus
from outbox.reconcile.report.prometheus import write_failed, write_prometheus
from tests.reconcile.report_samples import HOSTILE, NOW, PAIR, job, money, pair_result, whole

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(path: Path) -> Samples:
    """Return the samples of a file by name and labels."""
    return {
        (sample.name.removeprefix("outbox_reconcile_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def labels(pair: Pair = PAIR, **others: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a pair's sample."""
    return tuple(sorted({"topic": pair.topic, "group": pair.group, **others}.items()))


def test_a_run_is_told_with_every_kind(tmp_path: Path) -> None:
    """Prometheus' own parser reads the file, and each pair has its numbers, kinds without differences at 0."""
    path = tmp_path / "outbox.prom"
    write_prometheus(path, whole())
    found = samples(path)
    mail = Pair("orders", "mail")
    assert {(found["success", labels(pair)], found["in_sync", labels(pair)]) for pair in (PAIR, mail)} == {
        (1, 0),
        (1, 1),
    }
    assert found["last_run_timestamp_seconds", labels()] == NOW.timestamp()
    assert found["in_flight_messages", labels()] == 42
    assert found["read_rows", labels()] == 1234
    assert round(found["duration_seconds", labels()], 2) == 3.52
    assert found["standby_lag_seconds", labels(side="producer")] == 12.5
    for kind in KINDS:
        assert found["differences", labels(kind=kind.label)] == 3
        assert found["differences", labels(mail, kind=kind.label)] == 0
    assert found["differences_left", labels(kind="missing")] == 1
    assert found["unexplained", labels(measure="bank", value="amount", currency="")] == 1.5
    assert list(tmp_path.iterdir()) == [path]


def test_a_measure_that_adds_up_is_there_at_zero(tmp_path: Path) -> None:
    """An alert on what is unexplained ends with the run that explains it."""
    path = tmp_path / "outbox.prom"
    write_prometheus(
        path, job([pair_result()], [money((("d", "EUR"), "amount", "1", "0", "1", "0"), by=("day", "currency"))])
    )
    assert samples(path)["unexplained", labels(measure="bank", value="amount", currency="EUR")] == 0


def test_a_failed_run_says_only_that(tmp_path: Path) -> None:
    """After a failure no number of an earlier run is left in the file."""
    path = tmp_path / "outbox.prom"
    write_prometheus(path, whole())
    write_failed(path, [PAIR], NOW)
    assert samples(path) == {("success", labels()): 0, ("last_run_timestamp_seconds", labels()): NOW.timestamp()}


def test_hostile_names_stay_in_their_labels(tmp_path: Path) -> None:
    """Quotes and line breaks in the names of measures and values can't forge a sample."""
    forged = f'x"}} 0\noutbox_reconcile_success{{topic="orders"}} 0\n{HOSTILE}'
    path = tmp_path / "outbox.prom"
    write_prometheus(path, job([pair_result()], [money((("d",), forged, "1", "0", "0", "0"))]))
    assert [name for name, _ in samples(path)].count("success") == 1
    assert samples(path)["unexplained", labels(measure="bank", value=forged, currency="")] == 1


def test_every_name_is_documented(tmp_path: Path) -> None:
    """The module's docstring has each name that a file can have."""
    path = tmp_path / "outbox.prom"
    gauges = prometheus.Gauges()
    gauges.add(whole())
    gauges.add_fleet(0, {"money": True})
    gauges.write(path)
    assert {name for name, _ in samples(path)} == {
        line.split()[0].split("{")[0].removeprefix("outbox_reconcile_")
        for line in (prometheus.__doc__ or "").splitlines()
        if line.startswith("    outbox_reconcile_")
    }
