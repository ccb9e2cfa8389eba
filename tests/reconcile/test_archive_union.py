"""Archives that stand in for what a database has pruned."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest

from outbox.errors import InvalidSettings, SourceError
from outbox.message.ids import uuid7_at
from outbox.prune.once import prune_producer_once
from outbox.reconcile.archive import ParquetSide, UnionSide, complete_from, merged, take_archive, with_archives
from outbox.reconcile.compare import Collected, Comparison, Side, Task
from outbox.reconcile.job import FIRST_ID, InboxState, Outcome, Pair, ProducerState, Range, Window
from outbox.reconcile.judge import Rules
from outbox.reconcile.rows import to_uuids
from tests.reconcile.archiving import (
    EVERYTHING,
    PAIR,
    archive,
    archived,
    at,
    consumer,
    forget,
    hours,
    ids_of,
    producer,
)
from tests.reconcile.town import IN_SYNC, Town, fate, kinds


@pytest.fixture
def town(emptied_town: Town) -> Town:
    """A producer and a consumer with empty tables, for many tests."""
    return emptied_town


# --- archive and database together -----------------------------------------------------------------------


def test_the_database_counts_more_than_the_archive(town: Town, tmp_path: Path) -> None:
    """A row that both have is the live one; what only the archive has is added, in order."""
    ids = town.plant([IN_SYNC] * 4, ids=ids_of(0.5, 4))
    archive(producer(town), hours(0, 1), tmp_path)
    forget(town, ids[0], ids[2], ids[3])
    town.plant([fate(sends=2, status=InboxState.NONE)], ids=[ids[2]])
    union = UnionSide(producer(town), archived(tmp_path), at(2))
    rows = union.read([EVERYTHING])
    assert to_uuids(rows) == ids
    assert rows["sends"].to_pylist() == [1, 1, 2, 1]
    assert to_uuids(union.read([Range(ids[1], ids[3])])) == ids[1:3]


def test_what_is_missing_above_the_horizon_is_missing(town: Town, tmp_path: Path) -> None:
    """What can't have been pruned and isn't in the database was lost: the archive must not hide it."""
    ids = town.plant([IN_SYNC] * 3, ids=ids_of(0.5, 3))
    archive(producer(town), hours(0, 1), tmp_path)
    forget(town, *ids)
    for number, id_ in enumerate(ids):
        assert to_uuids(UnionSide(producer(town), archived(tmp_path), id_).read([EVERYTHING])) == ids[:number]


def test_archives_are_chosen_by_what_they_have(town: Town, tmp_path: Path) -> None:
    """One folder may have the archives of many pairs and both sides; those of others are left alone."""
    town.plant([IN_SYNC], ids=ids_of(0.5))
    archive(producer(town), hours(0, 1), tmp_path / "deep" / "producer")
    archive(consumer(town), hours(0, 1), tmp_path / "deep" / "consumer", kind="consumer")
    live, horizon = producer(town), at(2)
    for kind in ("producer", "consumer"):
        side = with_archives(live, [tmp_path], kind, PAIR, horizon)
        assert side == UnionSide(live, ParquetSide((tmp_path / "deep" / kind,), kind, PAIR), horizon)
    assert with_archives(live, [tmp_path], "producer", Pair("other", "g"), horizon) is live
    with pytest.raises(SourceError, match="there is no manifest"):
        with_archives(live, [tmp_path, tmp_path / "nowhere"], "producer", PAIR, horizon)


def test_from_where_on_nothing_is_missing(town: Town, tmp_path: Path) -> None:
    """Archives that were complete when taken, and follow each other up to the horizon, extend what can be judged."""
    side = producer(town)
    archive(side, hours(0, 1), tmp_path / "incomplete", horizon=at(0.5))
    archive(side, hours(1, 2), tmp_path / "first", horizon=at(1))
    archive(side, hours(1.5, 3), tmp_path / "second")
    archive(side, hours(4, 5), tmp_path / "apart")
    assert complete_from([tmp_path], PAIR, at(2.5)) == at(1)
    assert complete_from([tmp_path], PAIR, at(3)) == at(1)
    assert complete_from([tmp_path], PAIR, at(3.5)) == at(3.5)
    assert complete_from([tmp_path], PAIR, at(4.5)) == at(4)
    assert complete_from([tmp_path], Pair("other", "g"), at(2.5)) == at(2.5)


def test_a_pruned_month_is_reconciled(town: Town, tmp_path: Path) -> None:
    """What was archived before prune, with the differences of the time, is found as it was before."""
    month = 30 * 86400.0
    old = [fate(age=month)] * 50 + [
        fate(age=month, status=InboxState.NONE),
        fate(age=month, same_body=False),
        fate(age=month, state=ProducerState.ROLLED_BACK),
    ]
    ids = town.plant(old, ids=[uuid7_at(town_now(town) - month + n) for n in range(len(old))])
    town.plant([IN_SYNC] * 5)
    full = found(town, producer(town), consumer(town))
    window = Window(grace=3600.0)
    first, second = take_archive(*town.accesses, PAIR, window, tmp_path)
    assert [first.rows, second.rows] == [53, 52]
    assert first.folder == tmp_path / "t.g" / "producer"
    with town.producer.connect() as connection:
        assert prune_producer_once(connection, town.settings).done >= 50
    assert found(town, producer(town), consumer(town)) != full
    horizon = uuid7_at(town_now(town) - town.settings.retention)
    sides = [
        with_archives(producer(town), [tmp_path], "producer", PAIR, horizon),
        with_archives(consumer(town), [tmp_path], "consumer", PAIR, horizon),
    ]
    assert found(town, *sides) == full
    assert kinds(town.reconcile(archives=(tmp_path,))) == full
    assert full == {
        ids[50]: Outcome.MISSING,
        ids[51]: Outcome.DIGEST_MISMATCH,
        ids[52]: Outcome.CONSUMED_THOUGH_ROLLED_BACK,
    }


def town_now(town: Town) -> float:
    """Return the clock of the database, in seconds since 1970."""
    (now,) = town.rows("SELECT extract(epoch FROM clock_timestamp())")
    return float(now)


def found(town: Town, ours: Side, theirs: Side) -> dict[UUID, Outcome]:
    """Return the differences between two sides."""
    now = int(town_now(town) * 1e6)
    collected = Collected()
    rules = Rules(producer_now=now, consumer_now=now, grace=0, offsets=dict.fromkeys(range(8), 10**6))
    collected.add(Comparison(ours, theirs, rules)(Task(0, (EVERYTHING,))))
    table = collected.table
    return dict(zip(to_uuids(table), map(Outcome, table["outcome"].to_pylist()), strict=True))


def test_nothing_young_is_archived(town: Town, tmp_path: Path) -> None:
    """What is within the grace period may change; a window that has nothing else is refused."""
    town.plant([IN_SYNC])
    with pytest.raises(InvalidSettings, match="it is younger than the grace period of 60 s"):
        take_archive(*town.accesses, PAIR, Window(since=dt.datetime.now(dt.UTC), grace=60.0), tmp_path)
    first, second = take_archive(*town.accesses, PAIR, Window(grace=60.0), tmp_path)
    assert [first.rows, second.rows] == [0, 0]


# --- ranges ----------------------------------------------------------------------------------------------


def test_ranges_are_clipped() -> None:
    """What two ranges have in common."""
    assert Range(at(0), at(2)).clipped(Range(at(1), at(3))) == Range(at(1), at(2))
    assert Range(at(0), None).clipped(Range(at(1), None)) == Range(at(1), None)
    assert Range(at(0), None).clipped(Range(FIRST_ID, at(1))) == Range(at(0), at(1))
    assert Range(at(0), at(1)).clipped(Range(at(1), at(2))) is None


def test_tables_are_merged() -> None:
    """The first table's row of an id counts, and the ids stay in order, also those that end in zeros."""
    ids = [UUID(int=number << 8) for number in (1, 2, 3)]

    def table(*rows: tuple[UUID, int]) -> pa.Table:
        columns = {"id": pa.array([id_.bytes for id_, _ in rows], pa.binary(16)), "n": pa.array([n for _, n in rows])}
        return pa.table(columns)

    result = merged(table((ids[1], 1)), table((ids[0], 2), (ids[1], 2), (ids[2], 2)))
    assert to_uuids(result) == ids
    assert result["n"].to_pylist() == [2, 1, 2]
