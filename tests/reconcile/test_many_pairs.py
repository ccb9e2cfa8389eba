"""A job of several pairs: the producer is digested once for all, and each pair has snapshots of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from outbox.reconcile import source
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import Outcome, Pair, Tier
from outbox.reconcile.measure import Measure
from outbox.reconcile.rows import JobResult
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.town import HOUR, IN_SYNC, Progress, Town, fate, ids_at, kinds

MISSING = fate(status=InboxState.NONE)
MINE, OTHER = fate(tag="mine"), fate(tag="other", status=InboxState.NONE)
PAIRS = Pair("t", "g"), Pair("u", "g"), Pair("v", "h", tags=["mine"])


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many pairs the producer was digested, each time."""
    times: list[int] = []
    real = reconcile_sql.producer_digests

    def spy(schema: str, pairs: Sequence[Pair], *others: Any) -> Any:
        times.append(len(pairs))
        return real(schema, pairs, *others)

    monkeypatch.setattr(reconcile_sql, "producer_digests", spy)
    return times


def plant(town: Town) -> dict[tuple[str, str], dict[UUID, Outcome]]:
    """Write messages of three pairs, some of which differ; return these."""
    of_t = town.plant([IN_SYNC] * 39 + [MISSING], ids=ids_at(HOUR, 40))
    town.plant([IN_SYNC] * 39 + [fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE)], topic="u")
    mixed = [MINE, OTHER] * 19 + [replace(MINE, status=InboxState.PARKED), replace(OTHER, status=InboxState.CONSUMED)]
    of_v = town.plant(mixed, topic="v", group="h")
    return {("t", "g"): {of_t[-1]: Outcome.MISSING}, ("u", "g"): {}, ("v", "h"): {of_v[38]: Outcome.PARKED}}


def found(result: JobResult) -> dict[tuple[str, str], dict[UUID, Outcome]]:
    """Return the differences of each pair."""
    return {pair.pair.names: kinds(pair) for pair in result.pairs}


def test_the_producer_is_digested_once_for_all_pairs(
    town: Town, digested: list[int], small_buckets: Callable[[Sequence[UUID]], None]
) -> None:
    """One read serves pairs of several topics, filters and groups, tonight and on the nights that follow."""
    expected = plant(town)
    small_buckets(ids_at(HOUR, 40)[::10])

    for night in range(3):
        result = reconcile(town.job(*PAIRS, tier=Tier.DIGEST))
        assert found(result) == expected
        alone = {pair.names: town.reconcile(pair, tier=Tier.DIGEST, record=False) for pair in PAIRS}
        for pair in result.pairs:
            assert pair.counts == alone[pair.pair.names].counts
            if night:
                assert pair.plan.settled > 0
        assert digested == [3, 1, 1, 1]
        digested.clear()
        (late,) = town.plant([MISSING])
        expected["t", "g"][late] = Outcome.MISSING


def test_each_pair_has_snapshots_of_its_own(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the pair before are given back when a pair begins: vacuum never waits for a whole job."""
    plant(town)
    taken: list[source.Snapshot] = []
    real = source._begin

    def begin(*arguments: Any) -> source.Snapshot | None:
        assert all(each.connection.closed for each in taken[: len(taken) // 2 * 2])
        snapshot = real(*arguments)
        if snapshot is not None:
            taken.append(snapshot)
        return snapshot

    monkeypatch.setattr(source, "_begin", begin)
    reconcile(town.job(*PAIRS, tier=Tier.DIGEST))
    assert len(taken) == 2 * len(PAIRS)


@pytest.mark.parametrize("consumed", [True, False])
def test_what_is_sent_while_a_job_runs_is_no_difference(town: Town, consumed: bool) -> None:
    """The digests of the producer may be older than a pair's snapshots: what they lack is read, or comes later."""
    expected = plant(town)
    late: list[UUID] = []

    def send(title: str) -> None:
        if title == "u → g: digests" and not late:
            late.extend(town.plant([IN_SYNC if consumed else fate(status=InboxState.NONE, age=0)] * 5, topic="v",
                                   group="h"))  # fmt: skip

    pairs = *PAIRS[:2], Pair("v", "h")
    result = reconcile(town.job(*pairs, tier=Tier.DIGEST), Progress(send))

    assert late
    assert found(result)["t", "g"] == expected["t", "g"]
    assert not set(kinds(result.pairs[2])) & set(late)
    for _ in range(2):
        assert not set(kinds(town.reconcile(pairs[2], tier=Tier.DIGEST))) & set(late)


def test_what_is_sent_while_a_job_runs_is_under_way_for_a_measure(town: Town, digested: list[int]) -> None:
    """A measure adds up in the snapshot of its pair, so that pair's digests are of that snapshot."""
    plant(town)
    late: list[UUID] = []

    def send(title: str) -> None:
        if title.startswith("t → g") and not late:
            late.extend(town.plant([fate(status=InboxState.NONE, age=0)] * 5, topic="u"))

    measure = Measure(
        "n",
        "u",
        "g",
        by=(),
        values=("n",),
        producer="SELECT count(*) AS n FROM outbox.half_message h JOIN outbox.op_message o ON o.half_id = h.id"
        " WHERE topic = 'u' AND resolution = 'commit'",
        consumer="SELECT count(*) AS n FROM outbox.consumer_message WHERE topic = 'u'",
        in_flight={"n": "*"},
    )
    result = reconcile(town.job(*PAIRS, tier=Tier.DIGEST, measures=(measure,)), Progress(send))

    assert late
    ((row,),) = [each.rows for each in result.measures]
    assert row.in_flight == len(late)
    assert not row.unexplained
    assert len(digested) == 2
