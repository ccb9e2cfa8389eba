"""Night after night: what is read around differences that nobody repairs becomes less, and what is found stays."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from outbox.database.execute import execute
from outbox.reconcile.job import LAST_ID, Outcome, Range, Tier
from outbox.reconcile.record.settled import KNOWN, ROWS_OF_RANGE, SettledRange, pair_statement, settled_by
from outbox.reconcile.rows import CONSUMER, PRODUCER, Both
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import IN_SYNC, PAIR, Town, kinds

_NUMBER = 6_000
_IDS = st.lists(st.binary(min_size=16, max_size=16) | st.integers(0, 9).map(lambda n: n.to_bytes(16)), unique=True)


def test_less_is_read_every_night_around_the_same_differences(town: Town) -> None:
    """A range that differs is cut finer the next night; the rest of it is settled, and joined to few ranges."""
    some = town.plant_bulk(_NUMBER)
    gone, failed = some[200], some[700]
    town.forget(gone)
    town.set_inbox(InboxState.FAILED, failed)
    expected = {gone: Outcome.MISSING, failed: Outcome.FAILED}
    _analyze(town)

    nights = [town.reconcile(tier=Tier.DIGEST) for _ in range(4)]

    assert [kinds(each) for each in nights] == [expected] * 4
    full = town.reconcile(tier=Tier.FULL, record=False)
    assert [each.counts for each in nights] == [full.counts] * 4
    read = [each.plan.rows_read for each in nights]
    assert read[0] > 200
    assert 400 > read[1] >= read[2] >= read[3]
    # What was settled between two differences is as few ranges as it can be, not one for each fifty rows.
    assert nights[-1].plan.settled < 3 * _NUMBER / ROWS_OF_RANGE


def test_new_messages_are_settled_though_most_of_what_is_left_differs(town: Town) -> None:
    """What is new is settled in its first night also where the old differences lie in more rows than it has."""
    some = town.plant_bulk(_NUMBER)
    town.forget(*some[:500:50])
    _analyze(town)
    town.reconcile(tier=Tier.DIGEST)
    new = town.plant([IN_SYNC] * 200)

    first = town.reconcile(tier=Tier.DIGEST)
    second = town.reconcile(tier=Tier.DIGEST)

    assert len(kinds(first)) == len(kinds(second)) == len(some[:500:50])
    # The last range is never settled: it has no end.
    with town.consumer.connect() as connection:
        (settled,) = execute(connection, pair_statement(KNOWN, town.accesses[1], PAIR, keep_for=3600.0))
    assert max(end for _, end, _ in settled) > new[100]


@given(st.lists(st.integers(0, 2 * ROWS_OF_RANGE), min_size=1, max_size=20), st.data())
def test_joined_ranges_cover_the_same_messages(sizes: list[int], data: st.DataObject) -> None:
    """Neighbours are joined while they are small; no id is lost, none is covered twice, and the counts stay."""
    bounds = [LAST_ID if n == len(sizes) else UUID(int=n) for n in range(len(sizes) + 1)]
    dropped = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    clean: list[SettledRange] = [
        (Range(bounds[n], bounds[n + 1]), Counter({Outcome.CONSUMED: size}))
        for n, size in enumerate(sizes)
        if n not in dropped
    ]

    kept = settled_by(clean, [])

    assert sum((counts for _, counts in kept), Counter()) == sum((counts for _, counts in clean), Counter())
    for n in range(len(sizes)):
        assert sum(bounds[n] in each for each, _ in kept) == (n not in dropped)
    assert all(each.first < (each.end or LAST_ID) for each, _ in kept)
    assert all(counts.total() <= ROWS_OF_RANGE or (each, counts) in clean for each, counts in kept)


@given(_IDS, _IDS)
def test_both_sides_are_put_side_by_side(ours: list[bytes], theirs: list[bytes]) -> None:
    """Every id of either side is there once, in order, with its row on each side."""
    ours, theirs = sorted(ours), sorted(theirs)

    both = Both(_table(ours, PRODUCER), _table(theirs, CONSUMER))

    every = sorted({*ours, *theirs})
    assert [bytes(id_).ljust(16, b"\0") for id_ in both.ids] == every
    assert both.in_producer.tolist() == [ours.index(id_) if id_ in ours else -1 for id_ in every]
    assert both.in_consumer.tolist() == [theirs.index(id_) if id_ in theirs else -1 for id_ in every]


def _analyze(town: Town) -> None:
    # How many ranges there are goes by the statistics.
    for engine in (town.producer, town.consumer):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("ANALYZE")


def _table(ids: list[bytes], schema: pa.Schema) -> pa.Table:
    return pa.table({"id": pa.array(ids, schema.field("id").type)})
