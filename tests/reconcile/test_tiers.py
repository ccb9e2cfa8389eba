"""How a comparison is planned: tiers, ranges, tasks and hashes; what is chosen is told, and changes no finding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.reconcile import digest, pairing, plan
from outbox.reconcile import sql as reconcile_sql
from outbox.reconcile.job import FIRST_ID, EngineName, Outcome, Pair, Range, Tier
from outbox.reconcile.run import reconcile
from outbox.reconcile.source import snapshots_of
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.town import HOUR, IN_SYNC, WITH_EFFECT, Fate, Town, counted, fate, ids_at, kinds

Cut = Callable[[Sequence[UUID]], None]
MISSING = fate(status=InboxState.NONE)


def ranges_of(numbers: Sequence[int | None]) -> list[Range]:
    """Return ranges between numbers, two by two."""
    ids = [None if number is None else UUID(int=number) for number in numbers]
    return [Range(first or FIRST_ID, end) for first, end in zip(ids[::2], ids[1::2], strict=True)]


edges = st.lists(st.integers(0, 60), unique=True, max_size=8).map(sorted)
ends = st.booleans()


@given(edges, ends, edges, st.integers(0, 60), st.integers(1, 60))
def test_cut_and_without_lose_no_id_and_double_none(
    some: list[int], is_open: bool, points: list[int], first: int, length: int
) -> None:
    """What is left of a window without its settled ranges, cut into buckets, has each other id exactly once."""
    settled = ranges_of([*some[: len(some) // 2 * 2]])
    if is_open and settled:
        settled[-1] = Range(settled[-1].first, None)
    window = Range(UUID(int=first), None if is_open else UUID(int=first + length))
    inside = [each for each in settled if each.first >= window.first and (window.end is None or _ends_in(each, window))]

    pieces = plan.cut(plan.without(window, inside), [UUID(int=point) for point in points])

    for number in range(130):
        id_ = UUID(int=number)
        expected = id_ in window and not any(id_ in each for each in inside)
        assert sum(id_ in piece for piece in pieces) == int(expected)
    assert all(piece.end is None or piece.first < piece.end for piece in pieces)
    assert pieces == sorted(pieces, key=lambda piece: piece.first)


def _ends_in(each: Range, window: Range) -> bool:
    return each.end is not None and window.end is not None and each.end <= window.end


@given(st.lists(st.integers(1, 2_000_000), max_size=30), st.booleans())
def test_tasks_have_each_range_once_and_are_bounded(rows: list[int], touching: bool) -> None:
    """Ranges are joined and gathered into tasks that hold no more rows than a task may, unless one range does."""
    step = 10 if touching else 9
    pieces = [(Range(UUID(int=n * 10), UUID(int=n * 10 + step)), size) for n, size in enumerate(rows)]
    weight = {each.first: size for each, size in pieces}

    tasks = plan.few_tasks(plan.joined(pieces))

    got = [each for task in tasks for each in task]
    for number in range(len(rows) * 10):
        id_ = UUID(int=number)
        assert sum(id_ in each for each in got) == sum(id_ in each for each, _ in pieces)
    for task in tasks:
        within = [size for first, size in weight.items() if any(first in each for each in task)]
        assert sum(within) <= 2 * plan.ROWS_OF_TASK or len(within) == 1
        assert len(task) <= plan._RANGES_OF_TASK


def test_few_rows_are_read_and_many_are_digested(town: Town) -> None:
    """Left to itself a job reads small tables, digests large ones, and reads only what differs there; it says so."""
    (odd,) = town.plant([MISSING])
    small = town.reconcile()
    assert (small.plan.tier, small.plan.engine) == (Tier.FULL, EngineName.LOCAL)
    assert "too few for digests to pay" in " ".join(small.plan.why)

    town.plant_bulk(30_000, topic="bulk")
    town.at_producer("ANALYZE outbox.half_message")
    large = town.reconcile(replace(WITH_EFFECT, topic="bulk", effect=None), tier=Tier.AUTO)

    assert large.plan.tier is Tier.DIGEST
    assert large.plan.buckets > 20
    assert (large.plan.differing, large.plan.rows_read) == (0, 0)
    assert large.lag is not None
    assert large.lag.sampled
    assert counted(large) == {Outcome.CONSUMED: 30_000}
    again = town.reconcile(tier=Tier.DIGEST)
    assert kinds(again) == {odd: Outcome.MISSING}
    assert again.plan.rows_read == 1


def test_the_next_nights_of_a_large_table_cost_what_is_new(town: Town) -> None:
    """Ranges are cut by the tables' own pages and ids, night after night: little is read, and nothing is overlooked."""
    pair = replace(WITH_EFFECT, effect=None)
    ids = town.plant_bulk(30_000)
    town.at_producer("ANALYZE outbox.half_message")
    assert town.reconcile(pair, tier=Tier.DIGEST).counts == {Outcome.CONSUMED: 30_000}
    odd = ids[100:400:100]
    expected: dict[UUID, Outcome] = {}
    for each in odd:
        late = town.plant([MISSING], ids=[UUID(int=each.int + 1)])
        expected[late[0]] = Outcome.MISSING
        result = town.reconcile(pair, tier=Tier.DIGEST)
        assert kinds(result) == expected
        assert counted(result) == {Outcome.CONSUMED: 30_000, Outcome.MISSING: len(expected)}
        assert result.plan.settled > 20
        assert result.plan.rows_read < 5_000


def test_scattered_differences_cost_less_than_reading_everything(town: Town) -> None:
    """One message of a thousand differs, here and there: few of the others are read."""
    ids = town.plant_bulk(30_000)
    town.at_producer("ANALYZE outbox.half_message")
    odd = ids[15::34]
    town.forget(*odd)

    result = town.reconcile(tier=Tier.DIGEST)

    assert kinds(result) == dict.fromkeys(odd, Outcome.MISSING)
    assert result.plan.buckets > 200  # as many as there are pages to take a sample of
    assert result.plan.rows_read < 60_000 * 0.25


@pytest.mark.parametrize("odd", [1, 2, 5])
def test_digests_read_the_ranges_that_differ_and_no_others(town: Town, small_buckets: Cut, odd: int) -> None:
    """One difference in a range has that range read, of as many rows as it has; the others are counted."""
    ids = town.plant([IN_SYNC] * 100, ids=ids_at(HOUR, 100))
    small_buckets(ids[10::10])
    missing = ids[5 : 5 + 20 * odd : 20]
    town.forget(*missing)

    result = town.reconcile(tier=Tier.DIGEST)

    assert kinds(result) == dict.fromkeys(missing, Outcome.MISSING)
    if odd < 5:
        assert (result.plan.buckets, result.plan.differing) == (10, odd)
        assert result.plan.rows_read == odd * 19
    else:
        assert result.plan.rows_read == 195
        assert "everything is read" in result.plan.why[-1]


#: Everything that a digest must see, each beside nine messages in sync.
DIRT = {
    "undecided": fate(state=ProducerState.UNDECIDED, status=InboxState.NONE),
    "undispatched": fate(state=ProducerState.COMMITTED, status=InboxState.NONE),
    "scheduled": fate(state=ProducerState.SCHEDULED, status=InboxState.NONE),
    "missing": MISSING,
    "phantom": fate(state=None, effects=1),
    "body": fate(same_body=False, effects=1),
    "received in times to come": fate(received=-HOUR, effects=1),
    "parked": fate(status=InboxState.PARKED),
    "failed": fate(status=InboxState.FAILED),
    "quarantined": fate(status=InboxState.QUARANTINED),
    "consumed though rolled back": fate(state=ProducerState.ROLLED_BACK, effects=1),
    "consumed though compensated": fate(compensated=True, effects=1),
    "two effects": fate(effects=2),
    "no effect": fate(),
    "unrecorded": fate(status=InboxState.NONE, effects=1),
    "an effect of a rolled back one": fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE, effects=1),
}


#: What is as it should be, though its rows are not those of a message that was sent once and took effect.
EXCUSED = {
    "skipped": fate(skipped=True),
    "skipped after its effect": fate(skipped=True, effects=1),
    "sent twice": fate(sends=2, effects=1),
    "sent and rolled back": fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE),
    "recalled": fate(state=ProducerState.RECALLED, status=InboxState.NONE),
}
#: What may be of another topic, whose group writes the same ledger.
NOISE = [
    fate(state=ProducerState.UNDECIDED, status=InboxState.NONE),
    fate(state=ProducerState.SCHEDULED, status=InboxState.NONE),
    fate(state=ProducerState.COMMITTED, status=InboxState.NONE),
    fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE),
    fate(compensated=True, status=InboxState.QUARANTINED),
    fate(sends=3, effects=1),
    fate(status=InboxState.PARKED),
    fate(effects=2),
    fate(effects=1),
    fate(state=None, effects=1),
]


@pytest.mark.parametrize("mixing", [reconcile_sql.FAST, reconcile_sql.PORTABLE], ids=["fast", "portable"])
def test_what_is_as_it_should_be_makes_no_range_differ(
    town: Town, small_buckets: Cut, mixing: reconcile_sql.Mixing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are as strict as the judge: what another topic leaves open, and writes into a shared ledger, is nothing.

    Such ranges are settled, and the one message that differs is found among them.
    """
    monkeypatch.setattr(pairing, "mixing_of", lambda snapshots: mixing)
    good = fate(effects=1)
    fates = [each for excused in EXCUSED.values() for each in (*[good] * 9, excused)]
    fates += [*[good] * 10 * len(NOISE), *[good] * 9, fate(effects=2)]
    ids = ids_at(HOUR, len(fates))
    town.plant(fates, ids=ids)
    behind = 10 * len(EXCUSED)
    town.plant(NOISE, topic="other", group="h", ids=[UUID(int=ids[behind + 10 * n].int + 1) for n in range(len(NOISE))])
    small_buckets(ids[10::10])

    result = town.reconcile(WITH_EFFECT, tier=Tier.DIGEST)

    assert kinds(result) == {ids[-1]: Outcome.DUPLICATE_EFFECT}
    assert (result.plan.buckets, result.plan.differing) == (len(fates) // 10, 1)
    assert "12 are in sync" in result.plan.why[-1]  # three more are so table by table
    assert result.counts == town.reconcile(WITH_EFFECT, tier=Tier.FULL, record=False).counts
    assert town.reconcile(WITH_EFFECT, tier=Tier.DIGEST).plan.buckets <= 3


def test_an_effect_of_what_the_group_was_not_to_handle_is_seen_in_a_shared_ledger(
    town: Town, small_buckets: Cut
) -> None:
    """Beside effects of another group: of a message that was rolled back, or that the group's filter leaves out."""
    pair = replace(WITH_EFFECT, tags=["mine"])
    good = fate(effects=1, tag="mine")
    back = fate(state=ProducerState.ROLLED_BACK, status=InboxState.NONE, tag="mine")
    left = fate(status=InboxState.NONE, tag="other")
    ids = ids_at(HOUR, 40)
    odd = [[back, left], [replace(back, effects=1), left], [back, replace(left, effects=1)], [back, left]]
    town.plant([each for two in odd for each in (*[good] * 8, *two)], ids=ids)
    town.plant([fate(effects=1)] * 4, topic="other", group="h", ids=[UUID(int=id_.int + 1) for id_ in ids[::10]])
    small_buckets(ids[10::10])

    result = town.reconcile(pair, tier=Tier.DIGEST)

    assert kinds(result) == {ids[18]: Outcome.CONSUMED_THOUGH_ROLLED_BACK, ids[29]: Outcome.UNRECORDED}
    assert (result.plan.buckets, result.plan.differing) == (4, 2)


def test_twenty_topics_and_one_ledger(town: Town) -> None:
    """Seven differences among twenty topics of one database, whose groups write one ledger: little is read for them."""
    pairs = [Pair(f"t{number}", f"g{number}", effect=WITH_EFFECT.effect) for number in range(20)]
    ids = ids_at(HOUR, 24_500)
    for number in range(20):
        town.plant(
            [*[fate(effects=1)] * 1_224, fate(sends=2, effects=1)],
            topic=f"t{number}",
            group=f"g{number}",
            ids=ids[number::20],
        )
    town.plant(
        [fate(state=ProducerState.UNDECIDED, status=InboxState.NONE)] * 49,
        topic="open",
        ids=[UUID(int=id_.int + 1) for id_ in ids[::500]],
    )
    town.at_producer("ANALYZE outbox.half_message")
    odd = ids[1_000:22_000:3_001]
    town.run("UPDATE ledger SET message_id = gen_random_uuid() WHERE message_id = ANY (:ids)", ids=odd)

    results = reconcile(town.job(*pairs, tier=Tier.DIGEST)).pairs

    assert {id_ for result in results for id_ in kinds(result)} == set(odd)
    assert sum(result.plan.rows_read for result in results) <= 3_500
    again = reconcile(town.job(*pairs, tier=Tier.DIGEST)).pairs
    assert [kinds(result) for result in again] == [kinds(result) for result in results]
    assert sum(result.plan.rows_read for result in again) <= 3_500
    assert all(result.plan.settled for result in again)


@pytest.mark.parametrize("mixing", [reconcile_sql.FAST, reconcile_sql.PORTABLE], ids=["fast", "portable"])
def test_each_difference_alone_makes_its_range_differ(
    town: Town, small_buckets: Cut, mixing: reconcile_sql.Mixing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every difference shows in the digests of its range, also where all else agrees, by either hash."""
    monkeypatch.setattr(pairing, "mixing_of", lambda snapshots: mixing)
    monkeypatch.setattr(plan, "RANGE", 0.0)  # so that it never pays to read all
    ids = ids_at(HOUR, 10 * len(DIRT))
    good = fate(effects=1)
    fates: list[Fate] = [each for dirt in DIRT.values() for each in (*[good] * 9, dirt)]
    town.plant(fates, ids=ids)
    clean = town.plant([good] * 30)
    small_buckets([*ids[10::10], *clean[::10]])

    result = town.reconcile(WITH_EFFECT, tier=Tier.DIGEST)

    assert set(kinds(result)) == set(ids[9::10])
    assert (result.plan.buckets, result.plan.differing) == (len(DIRT) + 4 - 1, len(DIRT))


def test_two_differences_do_not_cancel_out(town: Town, small_buckets: Cut) -> None:
    """A missing message and a phantom, two bodies exchanged, an effect moved: equal numbers are no agreement."""
    ids = town.plant([fate(effects=1)] * 40, ids=ids_at(HOUR, 40))
    small_buckets(ids[10::10])
    town.forget(ids[3])
    town.plant([fate(state=None, effects=1)], ids=[UUID(int=ids[3].int + 1)])
    town.run(
        "UPDATE outbox.consumer_message c SET body_digest = d.body_digest FROM outbox.consumer_message d"
        " WHERE (c.message_id, d.message_id) IN ((:a, :b), (:b, :a))",
        a=ids[13],
        b=ids[14],
    )
    town.run("UPDATE ledger SET message_id = :b WHERE message_id = :a", a=ids[23], b=ids[24])

    found = kinds(town.reconcile(WITH_EFFECT, tier=Tier.DIGEST))

    assert found == {
        ids[3]: Outcome.UNRECORDED,
        UUID(int=ids[3].int + 1): Outcome.PHANTOM,
        ids[13]: Outcome.DIGEST_MISMATCH,
        ids[14]: Outcome.DIGEST_MISMATCH,
        ids[23]: Outcome.NO_EFFECT,
        ids[24]: Outcome.DUPLICATE_EFFECT,
    }


def test_the_hash_is_one_that_both_servers_compute_alike(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast hash needs PostgreSQL 14 on both sides and the same values; else both hash by md5."""
    with snapshots_of(town.job().databases) as snapshots:
        assert digest.mixing_of(snapshots) is reconcile_sql.FAST
        values = iter([[[(1, 2)]], [[(1, 3)]]])
        with monkeypatch.context() as patch:
            patch.setattr(digest, "execute", lambda *_: next(values))
            assert digest.mixing_of(snapshots) is reconcile_sql.PORTABLE
        with monkeypatch.context() as patch:
            versions = iter([18, 13])
            patch.setattr(digest, "_version", lambda _: next(versions))
            assert digest.mixing_of(snapshots) is reconcile_sql.PORTABLE


@pytest.mark.parametrize("workers", [1, 3])
def test_many_small_tasks_find_what_one_finds(town: Town, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the ids are cut into tasks, and however many run at once, each message is judged exactly once."""
    monkeypatch.setattr(plan, "ROWS_OF_TASK", 200)
    ids = town.plant_bulk(20_000)
    odd = random.Random(workers).sample(ids, 30)  # noqa: S311
    town.forget(*odd)

    result = town.reconcile(tier=Tier.FULL, workers=workers)

    assert kinds(result) == dict.fromkeys(odd, Outcome.MISSING)
    assert counted(result) == {Outcome.CONSUMED: 19_970, Outcome.MISSING: 30}
    assert result.plan.ranges > 20
    assert result.plan.rows_read == 39_970


def test_what_the_producer_has_pruned_is_not_read(town: Town, small_buckets: Cut) -> None:
    """Ranges beyond the retention of which the producer has nothing are counted by their digests, and settled."""
    retention = town.settings.retention
    old, young = ids_at(retention + HOUR, 40), ids_at(HOUR, 40)
    town.plant([fate(state=None)] * 40, ids=old)
    town.plant([IN_SYNC] * 40, ids=young)
    small_buckets(ids_at(retention + 60))

    result = town.reconcile(tier=Tier.DIGEST, keep_for=HOUR)

    assert counted(result) == {Outcome.UNJUDGED: 40, Outcome.CONSUMED: 40}
    assert (result.plan.differing, result.plan.rows_read) == (0, 0)
