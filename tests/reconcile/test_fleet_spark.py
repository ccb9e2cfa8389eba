"""A fleet on Spark: one session for all members, whatever their tables are, and the same as threads find."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from outbox.errors import InvalidSettings, ReconcileError
from outbox.reconcile.fleet.config import Bounds, Fleet, FleetTotal, PairPattern, TotalPart
from outbox.reconcile.fleet.members import members_of
from outbox.reconcile.fleet.report import render_fleet, write_findings
from outbox.reconcile.fleet.run import FleetResult, compare_fleet
from outbox.reconcile.job import NO_DATABASE, Access, EngineName, NoProgress, Outcome, Repair
from outbox.reconcile.rows import to_findings
from outbox.reconcile.spark import frames
from outbox.reconcile.spark.session import Session, session
from tests.reconcile.foreign import KNOWN, SENT, tell
from tests.reconcile.test_fleet import MISSING, Houses, houses
from tests.reconcile.test_tables_oracle import believed
from tests.reconcile.test_tables_spark import FATES, WINDOW, parquet, rows_of
from tests.reconcile.town import PAIR, Town, url_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["houses"]

_MEASURE = {
    "name": "n",
    "values": ["n"],
    "producer": "SELECT count(*) AS n FROM outbox.half_message",
    "consumer": "SELECT count(*) AS n FROM outbox.consumer_message",
    "in_flight": {"n": "*"},
}
PATTERNS = (
    PairPattern(producers=("shop-*",), consumers=("bank-*",), topics=("{producer}-*",), measures=(_MEASURE,)),
    PairPattern(producers=("lake",), consumers=("books",), topics=("t",), groups=("g",)),
    PairPattern(producers=("old",), consumers=("old",), topics=("t",), groups=("g",)),
)


@pytest.fixture
def platform(houses: Houses, village: Town, tmp_path: Path) -> Fleet:
    """Two shops and two banks; a producer in Parquet, whose consumer is ours; and both sides in foreign tables."""
    village.plant(FATES)
    tell(village, ids="text")
    fleet = houses.fleet(*PATTERNS)
    access = Access(url_of(village.consumer), village.settings)
    lake = parquet(tmp_path, "producer", rows_of(village, "legacy_sent"))
    known = replace(KNOWN, columns={**KNOWN.columns, "topic": "from", "group": "by"})
    return replace(
        fleet,
        databases={**fleet.databases, "lake": NO_DATABASE, "books": access, "old": access},
        foreign={"lake": {"producer": lake}, "old": {"producer": SENT, "consumer": known}},
        job={"window": {"grace": WINDOW.grace}},
    )


def found(result: FleetResult) -> dict[str, dict[Any, Outcome]]:
    """Return what the messages of each member were found to be."""
    assert [each.error for each in result.members] == [""] * len(result.members)
    return {
        str(member): {each.name: each.outcome for pair in job.pairs for each in to_findings(pair.findings)}
        for member, job in result.results
    }


@pytest.mark.slow
def test_one_session_compares_all_kinds_of_members(
    platform: Fleet, houses: Houses, village: Town, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, with measures; what Spark alone can read; and foreign tables: as the oracle says, and as threads find."""
    opened: list[AbstractContextManager[Session]] = []

    def counted(*options: Any) -> AbstractContextManager[Session]:
        opened.append(session(*options))
        return opened[-1]

    monkeypatch.setattr(frames, "session", counted)
    houses.towns["shop-1", "bank-1"].plant([MISSING], topic="shop-1-orders", group="bank-1-books")
    result = compare_fleet(replace(platform, job={**platform.job, "engine": EngineName.SPARK}))

    kinds = found(result)
    expected = {str(id_): outcome for id_, outcome in believed(village, PAIR).items() if outcome.differs}
    assert {str(name): kind for name, kind in kinds["lake → books"].items()} == expected
    assert kinds["old → old"] == expected
    assert [*kinds["shop-1 → bank-1"].values()] == [Outcome.MISSING]
    assert len(opened) == 1
    assert {pair.plan.engine for _, job in result.results for pair in job.pairs} == {EngineName.SPARK}
    measured = {str(member): [each.in_sync for each in job.measures] for member, job in result.results}
    # What is missing is on its way as far as a sum goes.
    assert [measured[f"shop-{number} → bank-{number}"] for number in (1, 2)] == [[True], [True]]

    # Without the engine named, Spark compares what it alone can read, and threads the others.
    by_threads = compare_fleet(platform)
    assert found(by_threads) == kinds
    engines = {str(member): job.pairs[0].plan.engine for member, job in by_threads.results}
    assert engines.pop("lake → books") is EngineName.SPARK
    assert set(engines.values()) == {EngineName.LOCAL}

    titles = _titles(spark)
    assert any(title.startswith("shop-1-orders → bank-1-books: database '") for title in titles), titles
    assert any(title.startswith("t → g: parquet ") for title in titles), titles

    write_findings(tmp_path / "findings", result)
    rows = ds.dataset(tmp_path / "findings", partitioning="hive").to_table().to_pylist()
    assert {(row["producer"], row["consumer"], row["feed"]) for row in rows if row["kind"] == "missing"} >= {
        ("shop-1", "bank-1", "shop-1-orders")
    }


def _titles(spark: SparkSession) -> set[str]:
    """Return what the jobs of a session are called on Spark's own pages."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    descriptions = [jobs.apply(number).description() for number in range(jobs.size())]
    return {each.get() for each in descriptions if each.isDefined()}


def test_members_of_foreign_tables_are_named_by_patterns(platform: Fleet) -> None:
    """Nothing else tells their topics and groups; they are reported on where the others are repaired."""
    repairing = replace(platform, job={**platform.job, "apply": True})
    members = {str(each): each for each in members_of(repairing, NoProgress()).members}
    assert set(members) == {"shop-1 → bank-1", "shop-2 → bank-2", "lake → books", "old → old"}
    assert {name for name, each in members.items() if each.job.apply} == {"shop-1 → bank-1", "shop-2 → bank-2"}
    assert [str(pair) for pair in members["lake → books"].job.pairs] == ["t → g"]
    # What Spark reads has no server, and where nothing of ours is, nothing is recorded.
    (workers,) = {each.job.workers for each in members.values()}
    assert members["lake → books"].sessions.total() == 1 + workers + 2
    assert members["old → old"].sessions.total() == 2 * (1 + workers)

    everything = replace(platform, patterns=(*PATTERNS[:1], PairPattern(producers=("lake", "old"))))
    with pytest.raises(InvalidSettings, match=r"compare\[2\] chooses nothing"):
        members_of(everything, NoProgress())


def test_a_total_is_not_told_from_foreign_tables(platform: Fleet) -> None:
    """What is under way between them isn't known, and the total would be wrong in silence."""
    part = TotalPart(("old",), "SELECT 1 AS n")
    total = FleetTotal("n", values=("n",), in_flight={"n": "*"}, parts=(part,))
    with pytest.raises(InvalidSettings, match=r"t → g \(old → old\) moves between tables that aren't ours"):
        compare_fleet(replace(platform, totals=(total,), bounds=Bounds(sessions=50)))
    lake = replace(total, parts=(TotalPart(("lake",), "SELECT 1 AS n"),))
    with pytest.raises(InvalidSettings, match="lake has no database"):
        compare_fleet(replace(platform, totals=(lake,)))


def test_where_spark_does_not_start_the_others_are_compared(platform: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member that needs it says why; what threads can compare has its result."""

    def broken(*_: Any) -> AbstractContextManager[Session]:
        raise ReconcileError("no Java that this Spark supports")

    monkeypatch.setattr(frames, "session", broken)
    errors = {str(each.member): each.error for each in compare_fleet(platform).members}
    assert errors.pop("lake → books").endswith("no Java that this Spark supports")
    assert set(errors.values()) == {""}


def test_a_policy_of_opinions_is_for_the_members_that_have_some(platform: Fleet) -> None:
    """The others of a fleet know none, and are repaired by the rest of it."""
    opinions = {**SENT.columns, "opinion": "status"}
    believing = replace(SENT, columns=opinions, opinions={"5": "consumed", "0": "none"})
    policy = {Outcome.OPINION_DIFFERS: Repair.SYNC_OPINION, Outcome.MISSING: Repair.RESEND}
    job = {**platform.job, "apply": True, "policy": policy, "record_in": platform.databases["books"]}
    old = {**platform.foreign["old"], "producer": believing}
    fleet = replace(platform, job=job, foreign={**platform.foreign, "old": old})
    members = {str(each): each.job for each in members_of(fleet, NoProgress()).members}
    assert members["old → old"].apply
    assert members["old → old"].policy == policy
    assert members["shop-1 → bank-1"].policy == {Outcome.MISSING: Repair.RESEND}
    assert members["shop-1 → bank-1"].apply
    assert not members["lake → books"].apply


def test_the_report_has_ids_as_their_tables_have_them(platform: Fleet, village: Town) -> None:
    """A hash can't be looked for."""
    tell(village, ids="string")
    patterns = [each for each in platform.patterns if each.producers == ("old",)]
    page = render_fleet(compare_fleet(replace(platform, patterns=tuple(patterns))))
    assert "order/" in page
    assert "<code>e" not in page
