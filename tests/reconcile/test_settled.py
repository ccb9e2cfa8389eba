"""Ranges that were in sync are not read again, until something is written in them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pytest

from outbox.database.execute import execute
from outbox.reconcile.job import Outcome, Pair, Tier, Window
from outbox.reconcile.record import settled
from outbox.reconcile.rows import PairResult
from outbox.reconcile.source import snapshots_of
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.town import HOUR, IN_SYNC, PAIR, WITH_EFFECT, Progress, Town, counted, explain, fate, ids_at, kinds

Cut = Callable[[Sequence[UUID]], None]
#: Messages in each bucket, and how many buckets there are.
SIZE, BUCKETS = 10, 6


@pytest.fixture
def ids(town: Town, small_buckets: Cut) -> list[UUID]:
    """Messages in sync of an hour ago, cut into buckets; the last one has no end."""
    ids = town.plant([IN_SYNC] * (SIZE * BUCKETS), ids=ids_at(HOUR, SIZE * BUCKETS))
    small_buckets(ids[SIZE::SIZE])
    return ids


def night(town: Town, *pairs: Pair, **options: Any) -> PairResult:
    """Reconcile by digests, and check that nothing is told which isn't so, or isn't told."""
    result = town.reconcile(*pairs, tier=Tier.DIGEST, **options)
    full = {name: value for name, value in options.items() if name in {"window"}}
    whole = town.reconcile(*pairs, tier=Tier.FULL, record=False, **full)
    assert kinds(result) == kinds(whole)
    assert counted(result) == whole.counts
    return result


def test_a_night_with_nothing_new_reads_nothing(town: Town, ids: list[UUID]) -> None:
    """What was in sync is counted, not read; only the range without an end is digested again."""
    first = night(town)
    assert (first.plan.buckets, first.plan.differing, first.plan.settled) == (BUCKETS, 0, 0)

    second = night(town)

    assert (second.plan.settled, second.plan.buckets, second.plan.differing) == (BUCKETS - 1, 1, 0)
    assert (second.plan.rows_read, second.plan.ranges) == (0, 0)
    assert second.counts == {Outcome.CONSUMED: len(ids)}
    assert "were in sync and nothing was written in them since" in second.plan.why[0]


def late_commit(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Commit a message whose id is old."""
    (one,) = town.plant([fate(state=ProducerState.COMMITTED, status=InboxState.NONE)], ids=[_after(ids[15])])
    return {one: Outcome.UNDISPATCHED}


def old_half_prepared(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Prepare a half whose id is old."""
    (one,) = town.plant([fate(state=ProducerState.UNDECIDED, status=InboxState.NONE)], ids=[_after(ids[15])])
    return {one: Outcome.UNDECIDED}


def late_rollback(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Roll a half back whose id is old."""
    town.plant([fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE)], ids=[_after(ids[15])])
    return {}


def late_dispatch(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Commit and dispatch a message whose id is old; the group passes it by."""
    (one,) = town.plant([fate(status=InboxState.NONE)], ids=[_after(ids[15])])
    return {one: Outcome.MISSING}


def resend(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Resend a message that the inbox has forgotten."""
    town.forget(ids[15])  # behind the framework's back; that it is resent brings it to light
    town.resend(ids[15])
    town.at_producer("UPDATE outbox.message SET visible_at = visible_at - interval '1 hour'")
    return {ids[15]: Outcome.UNCONSUMED}


def failure(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Have an inbox row fail."""
    town.set_inbox(InboxState.FAILED, ids[15])
    return {ids[15]: Outcome.FAILED}


def park(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Park an inbox row."""
    town.set_inbox(InboxState.PARKED, ids[15])
    return {ids[15]: Outcome.PARKED}


def compensation(town: Town, ids: list[UUID]) -> dict[UUID, Outcome]:
    """Compensate a message that was consumed."""
    town.at_producer(
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=ids[15],
    )
    return {ids[15]: Outcome.CONSUMED_THOUGH_ROLLED_BACK}


@pytest.mark.parametrize(
    "act", [late_commit, old_half_prepared, late_rollback, late_dispatch, resend, failure, park, compensation]
)
def test_what_is_written_in_a_range_has_it_looked_at_again(
    town: Town, ids: list[UUID], act: Callable[[Town, list[UUID]], dict[UUID, Outcome]]
) -> None:
    """The range in which something was written is compared again, and the others are not."""
    night(town)
    expected = act(town, ids)

    result = night(town)

    assert kinds(result) == expected
    assert (result.plan.settled, result.plan.buckets) == (BUCKETS - 2, 2)


def test_an_op_of_a_long_transaction_is_seen_when_it_commits(town: Town, ids: list[UUID]) -> None:
    """A message whose transaction was open when its range was settled, with an xid before the mark, is found."""
    with town.producer.connect() as writer, writer.begin():
        late = town.app.send(writer, "t", "late")
        # Others that begin and commit meanwhile move the mark beyond the writer's xid.
        town.plant([IN_SYNC] * SIZE)
        first = night(town)
        assert first.plan.differing == 0
        assert night(town).plan.settled == BUCKETS - 1
    town.at_producer("UPDATE outbox.op_message SET decided_at = decided_at - interval '1 hour'")

    result = night(town)

    assert kinds(result) == {late: Outcome.UNDISPATCHED}
    town.dispatch()
    town.at_producer("UPDATE outbox.message SET visible_at = visible_at - interval '1 hour'")
    assert late in kinds(night(town))


def test_a_long_transaction_with_an_old_id_inside_a_settled_range(
    town: Town, ids: list[UUID], small_buckets: Cut
) -> None:
    """The same, where the id lies between settled ones: begun early, committed after its neighbours were settled."""
    with town.producer.connect() as writer, writer.begin():
        late = town.app.send(writer, "t", "late")
        later = town.plant([IN_SYNC] * (2 * SIZE))
        small_buckets([*ids[SIZE::SIZE], later[SIZE]])
        night(town)
        assert night(town).plan.settled == BUCKETS
    town.at_producer("UPDATE outbox.op_message SET decided_at = decided_at - interval '1 hour'")

    result = night(town)

    assert kinds(result) == {late: Outcome.UNDISPATCHED}
    assert result.plan.settled == BUCKETS - 1


def test_a_range_with_anything_open_is_not_settled(town: Town, ids: list[UUID]) -> None:
    """What is in flight, differs, or was set aside keeps its range from being settled, night after night."""
    town.plant([fate(status=InboxState.NONE, age=0)], ids=[_after(ids[5])])
    town.plant([fate(state=ProducerState.SCHEDULED, due_in=HOUR, status=InboxState.NONE)], ids=[_after(ids[25])])
    (parked,) = town.plant([fate(status=InboxState.PARKED)], ids=[_after(ids[45])])
    for _ in range(2):
        result = night(town, window=Window(grace=60.0))
        assert kinds(result) == {parked: Outcome.PARKED}
    assert result.plan.settled == 0 or result.plan.buckets >= 4


def _after(id_: UUID) -> UUID:
    return UUID(int=id_.int + 1)


def _mark(town: Town, change: str) -> None:
    town.run(f"UPDATE outbox.reconciliation_mark SET mark = jsonb_set(mark, {change})")


@pytest.mark.parametrize("place", [1, 2, 3])
def test_after_a_restore_into_another_cluster_nothing_is_trusted(town: Town, ids: list[UUID], place: int) -> None:
    """A mark of another cluster, timeline or database says nothing about this one."""
    night(town)
    _mark(town, f"'{{identity,{place}}}', '\"another\"'")

    result = night(town)

    assert (result.plan.settled, result.plan.buckets) == (0, BUCKETS)
    assert night(town).plan.settled == BUCKETS - 1


def lost_messages(town: Town, ids: list[UUID]) -> None:
    """Lose the newest messages, and give their positions to others, as transactions of those numbers did before."""
    _lose(town, ids[-3:])
    late = town.plant([fate(status=InboxState.NONE)] * 3, ids=[_after(each) for each in ids[:3]])
    town.at_producer("UPDATE outbox.op_message SET xid = '3' WHERE half_id = ANY (:ids)", ids=late)


def lost_decision(town: Town, ids: list[UUID]) -> None:
    """Lose the newest half, which was rolled back and so was never a message."""
    _lose(town, ids[-1:])


def lost_transactions(town: Town, ids: list[UUID]) -> None:
    """Know of fewer transactions than the mark does."""
    _mark(town, "'{xmax}', to_jsonb(9000000000000)")
    _lose(town, ids[15:16])


def _lose(town: Town, ids: list[UUID]) -> None:
    for table, column in (("half_message", "id"), ("op_message", "half_id"), ("message", "half_id")):
        town.at_producer(f"DELETE FROM outbox.{table} WHERE {column} = ANY (:ids)", ids=ids)


@pytest.mark.parametrize("act", [lost_messages, lost_decision, lost_transactions])
def test_after_the_storage_fell_back_nothing_is_trusted(
    town: Town, small_buckets: Cut, act: Callable[[Town, list[UUID]], None]
) -> None:
    """A disk that was put back has the same identity and timeline; what was settled there may be lost."""
    ids = ids_at(HOUR, SIZE * BUCKETS + 1)
    town.plant([*[IN_SYNC] * (SIZE * BUCKETS), fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE)], ids=ids)
    small_buckets([*ids[SIZE::SIZE], _after(ids[-1])])
    night(town)
    assert night(town).plan.settled > 0

    act(town, ids)

    assert night(town).plan.settled == 0


def test_what_was_pruned_is_no_storage_that_fell_back(town: Town, ids: list[UUID]) -> None:
    """Ranges are trusted on where the last messages of the mark were pruned, and there are newer ones."""
    night(town)
    town.plant([IN_SYNC])
    _lose(town, ids)
    town.forget(*ids)

    assert town.reconcile(tier=Tier.DIGEST).plan.settled == BUCKETS - 1


@pytest.mark.parametrize(
    "pair",
    [
        *(Pair("t", "g", tags=["mine"]), Pair("t", "g", keys=["k*"]), Pair("t", "g", headers=["region=eu"])),
        *(Pair("t", "g", tags=[]), WITH_EFFECT),
    ],
    ids=["tags", "keys", "headers", "no tags", "effect"],
)
def test_with_another_filter_nothing_is_trusted(town: Town, ids: list[UUID], pair: Pair) -> None:
    """A range in sync under one filter need not be under another."""
    night(town)
    assert night(town, pair).plan.settled == 0
    assert night(town).plan.settled == 0


def test_another_group_has_ranges_of_its_own(town: Town, ids: list[UUID]) -> None:
    """What is settled for one group isn't for another."""
    night(town)
    assert night(town, Pair("t", "other")).plan.settled == 0
    assert night(town).plan.settled == BUCKETS - 1


def test_a_change_behind_the_frameworks_back_is_found_when_trust_ends(town: Town, ids: list[UUID]) -> None:
    """An inbox row that was deleted by hand is found by a run that trusts nothing, and when the trust is old."""
    night(town)
    town.forget(ids[15])
    assert town.reconcile(tier=Tier.DIGEST).in_sync, "documented: it isn't looked at while it is trusted"

    assert kinds(town.reconcile(tier=Tier.DIGEST, keep_for=0, record=False)) == {ids[15]: Outcome.MISSING}
    town.run(
        "UPDATE outbox.reconciliation_settled SET verified_at = verified_at - interval '8 days' WHERE first_id = :id",
        id=ids[10],
    )
    result = town.reconcile(tier=Tier.DIGEST)
    assert kinds(result) == {ids[15]: Outcome.MISSING}
    assert result.plan.settled == BUCKETS - 2


def test_what_a_run_without_trust_found_stays_found(town: Town, ids: list[UUID]) -> None:
    """A full run, or one that trusts nothing, doesn't leave a range settled in which it found a difference."""
    night(town)
    town.forget(ids[15])
    assert kinds(town.reconcile(tier=Tier.FULL)) == {ids[15]: Outcome.MISSING}
    assert kinds(town.reconcile(tier=Tier.DIGEST)) == {ids[15]: Outcome.MISSING}


def test_a_phantom_behind_the_last_message_is_found_the_same_night(town: Town, ids: list[UUID]) -> None:
    """A range without an end isn't settled: what only the consumer has would be in it, and no mark would tell."""
    night(town)
    (phantom,) = town.plant([fate(state=None)])
    assert kinds(night(town)) == {phantom: Outcome.PHANTOM}


def test_of_two_runs_at_once_one_keeps_its_ranges(town: Town, ids: list[UUID]) -> None:
    """The run that is overtaken gives its result all the same, says that it kept nothing, and harms nothing."""
    inner: list[PairResult] = []

    def overtake(title: str) -> None:
        if "digests" in title and not inner:
            inner.append(town.reconcile(tier=Tier.DIGEST))

    told = Progress(overtake)
    result = town.reconcile(tier=Tier.DIGEST, progress=told)

    assert inner[0].counts == result.counts == {Outcome.CONSUMED: len(ids)}
    assert any("another run" in sentence for sentence in told.said)
    assert town.rows("SELECT version FROM outbox.reconciliation_mark") == [1]
    assert night(town).plan.settled == BUCKETS - 1


def test_the_loser_does_not_keep_what_the_winners_mark_has_passed(town: Town, ids: list[UUID]) -> None:
    """Ranges judged in an older snapshot aren't kept under a newer mark: it would hide what came in between."""
    inner: list[PairResult] = []

    def overtake(title: str) -> None:
        if "digests" in title and not inner:
            town.plant([fate(status=InboxState.NONE)], ids=[_after(ids[15])])
            inner.append(town.reconcile(tier=Tier.DIGEST))

    town.reconcile(tier=Tier.DIGEST, progress=Progress(overtake))

    assert kinds(inner[0]) == {_after(ids[15]): Outcome.MISSING}
    assert kinds(night(town)) == {_after(ids[15]): Outcome.MISSING}


def test_a_narrower_window_leaves_the_ranges_outside(town: Town, ids: list[UUID]) -> None:
    """A run over a part keeps what is settled elsewhere, gives up what its edges cut, and counts nothing twice."""
    night(town)
    part = Window(_moment(ids[23]), _moment(ids[47]), grace=60.0)

    inside = night(town, window=part)
    assert inside.plan.settled == 1  # 30 to 40; 20 to 30 and 40 to 50 are cut by the edges
    again = night(town, window=part)
    assert again.plan.settled == 3

    whole = night(town)
    assert whole.counts == {Outcome.CONSUMED: len(ids)}
    assert whole.plan.settled == 2 + 3  # up to 20, those of the part; the rest was cut or has no end
    assert night(town).plan.settled >= 6


def test_what_is_written_where_a_window_cut_a_range_is_found(town: Town, ids: list[UUID]) -> None:
    """A range that overlaps a newer one doesn't hide what was written in both."""
    night(town)
    night(town, window=Window(_moment(ids[13]), _moment(ids[17]), grace=60.0))
    (late,) = town.plant([fate(status=InboxState.NONE)], ids=[_after(ids[15])])
    assert kinds(night(town)) == {late: Outcome.MISSING}


@pytest.mark.parametrize("first", [0, 20])
def test_a_window_that_begins_where_a_range_does(town: Town, ids: list[UUID], first: int, small_buckets: Cut) -> None:
    """A window whose first range begins with the id of one that is settled, and ends earlier, does no harm."""
    night(town)
    since = None if first == 0 else _moment(ids[first])
    small_buckets([])
    result = night(town, window=Window(since, _moment(ids[first + 5]), grace=60.0))
    assert result.in_sync
    assert night(town).counts == {Outcome.CONSUMED: len(ids)}


def _moment(id_: UUID) -> dt.datetime:
    return dt.datetime.fromtimestamp((id_.int >> 80) / 1000, dt.UTC)


def test_a_queue_that_is_added_later_is_watched(town: Town, ids: list[UUID]) -> None:
    """A message that is resent into a queue which the mark doesn't know is found."""
    night(town)
    town.app.declare_topic("t", 16)
    town.at_producer(
        "INSERT INTO outbox.message (topic, queue, position, half_id, send_number, visible_at)"
        " VALUES ('t', 15, 1, :id, 2, now() - interval '1 hour')",
        id=ids[15],
    )
    town.forget(ids[15])
    assert kinds(night(town)) == {ids[15]: Outcome.UNCONSUMED}


def test_the_lookups_of_what_was_touched_use_indexes(town: Town, ids: list[UUID]) -> None:
    """A night costs what was added since, whatever the history: nothing is looked up by reading a whole table."""
    town.plant_bulk(20_000, topic="bulk")
    town.at_producer("ANALYZE")
    town.run("ANALYZE")
    plans = []
    with snapshots_of(town.job().databases) as snapshots:
        mark = settled.load(snapshots, PAIR, Window().range, HOUR).mark
        for snapshot, statement in settled.lookups(snapshots, PAIR, ids, mark, mark):
            plans += [row[0] for row in execute(snapshot.connection, explain(statement))[0]]
    for table in ("op_message", "message", "consumer_message"):
        assert not [line for line in plans if f"Seq Scan on {table} " in line], "\n".join(plans)


def test_without_a_record_nothing_is_kept(town: Town, ids: list[UUID]) -> None:
    """A job that writes no record writes no ranges either, and trusts none."""
    night(town, record=False)
    assert town.rows("SELECT count(*) FROM outbox.reconciliation_settled") == [0]
    night(town)
    town.forget(ids[15])
    assert kinds(town.reconcile(tier=Tier.DIGEST, record=False)) == {ids[15]: Outcome.MISSING}
