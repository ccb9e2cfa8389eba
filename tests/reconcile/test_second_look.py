"""Two databases are never seen at one moment: what the looks see, and what heals between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

from outbox.reconcile import pairing, plan, run, source
from outbox.reconcile.job import Outcome, Tier, Window
from outbox.reconcile.rows import to_findings
from outbox.reconcile.tables import InboxState
from tests.reconcile.town import HOUR, IN_SYNC, Progress, Town, counted, fate, ids_at, ids_in, kinds

MISSING = fate(status=InboxState.NONE)
TIERS = [Tier.FULL, Tier.DIGEST]


def at(stage: str, act: Callable[[], object]) -> Progress:
    """Return who does something when a stage begins."""

    def began(title: str) -> None:
        if stage in title:
            act()

    return Progress(began)


@pytest.fixture
def first_looks(monkeypatch: pytest.MonkeyPatch) -> list[dict[UUID, Outcome]]:
    """What the first look of each run found to differ."""
    seen: list[dict[UUID, Outcome]] = []
    real = pairing.recheck

    def spy(findings: pa.Table, *others: Any) -> Any:
        seen.append({finding.id: finding.outcome for finding in to_findings(findings)})
        return real(findings, *others)

    monkeypatch.setattr(run, "recheck", spy)
    return seen


def consume(town: Town, *ids: UUID) -> None:
    """Write inbox rows as a consumer would have."""
    town.run(
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
        " body_digest) SELECT 'g', id, 't', 0, 1, 'consumed', 1, substr(sha256(uuid_send(id)), 1, 16)"
        " FROM unnest(CAST(:ids AS uuid[])) id",
        ids=list(ids),
    )


# --- the second look --------------------------------------------------------------------------------------


def test_what_heals_between_the_looks_is_no_difference(
    town: Town, first_looks: list[dict[UUID, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are consumed before the second look are counted as such, in several batches."""
    monkeypatch.setattr(pairing, "BATCH", 20)
    ids = town.plant([MISSING] * 50)

    result = town.reconcile(progress=at("second look", lambda: consume(town, *ids[:45])))

    assert first_looks == [dict.fromkeys(ids, Outcome.MISSING)]
    assert kinds(result) == dict.fromkeys(ids[45:], Outcome.MISSING)
    assert counted(result) == {Outcome.CONSUMED: 45, Outcome.MISSING: 5}
    assert result.healed == 45


def test_what_becomes_another_difference_is_told_as_that(town: Town) -> None:
    """The kind of a difference is that of the last look, and so are its numbers."""
    (one,) = town.plant([fate(status=InboxState.FAILED)])

    result = town.reconcile(progress=at("second look", lambda: town.set_inbox(InboxState.PARKED, one)))

    assert kinds(result) == {one: Outcome.PARKED}
    assert counted(result) == {Outcome.PARKED: 1}
    assert [finding.status for finding in to_findings(result.findings)] == [InboxState.PARKED]
    assert result.healed == 0


def test_what_is_gone_at_the_second_look_is_not_counted(town: Town) -> None:
    """A phantom whose inbox row was deleted meanwhile is on no side any more."""
    (phantom,) = town.plant([fate(state=None)])

    result = town.reconcile(progress=at("second look", lambda: town.forget(phantom)))

    assert result.in_sync
    assert counted(result) == {}
    assert result.healed == 1


def test_what_is_on_its_way_at_the_second_look_is_in_flight(town: Town) -> None:
    """A missing message that was resent meanwhile is young again."""
    (one,) = town.plant([MISSING])

    result = town.reconcile(progress=at("second look", lambda: town.resend(one)))

    assert result.in_sync
    assert counted(result) == {Outcome.IN_FLIGHT: 1}
    assert ids_in(result.open) == {one}


def test_a_message_that_changes_at_each_look_comes_to_an_end(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking ends after some looks, and tells what the last one saw; the others of its batch aren't held up."""
    restless, calm, healing = town.plant([fate(status=InboxState.FAILED), MISSING, MISSING])
    looks: list[InboxState] = []
    real = pairing.rules_now

    def change(job: Any, pair: Any) -> Any:
        looks.append([InboxState.PARKED, InboxState.FAILED][len(looks) % 2])
        town.set_inbox(looks[-1], restless)
        if len(looks) == 2:
            consume(town, healing)
        return real(job, pair)

    monkeypatch.setattr(pairing, "rules_now", change)
    result = town.reconcile()

    assert len(looks) == pairing._MOST_READS
    assert kinds(result) == {restless: Outcome[looks[-1].name], calm: Outcome.MISSING}
    assert counted(result) == {Outcome[looks[-1].name]: 1, Outcome.MISSING: 1, Outcome.CONSUMED: 1}


def test_nothing_to_look_at_again_opens_no_connection(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing differs there is no second look."""
    for module in (pairing, run):
        monkeypatch.setattr(module, "rules_now", lambda *_: pytest.fail("looked"))
    town.plant([IN_SYNC, fate(status=InboxState.NONE, age=0)])
    assert town.reconcile().in_sync


# --- the snapshots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_committed_after_the_snapshots_is_seen_by_no_reader(
    town: Town, tier: Tier, small_buckets: Callable[[Sequence[UUID]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader, every task and every digest sees what was there when the run began, and not a row more."""
    monkeypatch.setattr(plan, "ROWS_OF_TASK", 5)
    ids = town.plant([IN_SYNC, MISSING] * 30, ids=ids_at(HOUR, 60))
    small_buckets(ids[::7])
    late = [UUID(int=each.int + 1) for each in ids]

    def interfere() -> None:
        if late:
            town.plant([IN_SYNC, MISSING, fate(state=None), fate(status=InboxState.PARKED)] * 15, ids=late)
            late.clear()

    stage = "digests" if tier is Tier.DIGEST else "rows"
    result = town.reconcile(tier=tier, workers=3, progress=at(stage, interfere))

    assert not late
    assert kinds(result) == dict.fromkeys(ids[1::2], Outcome.MISSING)
    assert counted(result) == {Outcome.CONSUMED: 30, Outcome.MISSING: 30}


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_sent_and_consumed_between_the_snapshots_is_no_phantom(
    town: Town, tier: Tier, monkeypatch: pytest.MonkeyPatch, first_looks: list[dict[UUID, Outcome]]
) -> None:
    """The consumer's snapshot is the older one: whatever it has consumed, the producer's has sent."""
    consumer = town.declare()
    town.send(*"abc")
    town.consume(consumer)
    taken: list[str] = []
    between: list[UUID] = []
    real = source._begin

    def begin(access: Any, *others: Any) -> Any:
        if taken:
            between.extend(town.send(*"defg"))
            town.consume(consumer)
        taken.append(access.url)
        return real(access, *others)

    monkeypatch.setattr(source, "_begin", begin)
    result = town.reconcile(window=Window(grace=0.0), tier=tier)

    assert len(taken) == 2
    assert first_looks == [dict.fromkeys(between, Outcome.UNCONSUMED)]
    assert result.in_sync
    assert counted(result) == {Outcome.CONSUMED: 7}


def test_a_busy_pair_has_neither_phantoms_nor_missing_messages(
    town: Town, first_looks: list[dict[UUID, Outcome]]
) -> None:
    """While messages are sent and consumed all the time, no run sees anything but some of them on their way."""
    consumer = town.declare()
    stop, sent, failed = threading.Event(), [0], list[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                sent[0] += len(town.send(*range(5)))
                town.consume(consumer)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        found = [
            set(kinds(town.reconcile(window=Window(grace=0.0), tier=tier, record=False)).values()) for tier in TIERS * 4
        ]
    finally:
        stop.set()
        thread.join()

    assert not failed
    on_their_way = {Outcome.UNCONSUMED, Outcome.UNDISPATCHED}
    assert all(each <= on_their_way for each in found)
    assert all(set(each.values()) <= on_their_way for each in first_looks)
    for tier in TIERS:
        assert town.reconcile(window=Window(grace=0.0), tier=tier).counts == {Outcome.CONSUMED: sent[0]}


def test_a_reader_whose_snapshot_is_gone_says_so(town: Town) -> None:
    """A reader doesn't fall back on whatever is there when the transaction that exported its snapshot has ended."""
    from outbox.errors import SourceError
    from outbox.reconcile.job import FIRST_ID, Range
    from outbox.reconcile.source import PostgresSide
    from tests.reconcile.town import PAIR

    with source.snapshots_of(town.job().databases) as taken:
        name = taken.producer.name
    with pytest.raises(SourceError, match="snapshot"):
        PostgresSide(town.accesses[0], "producer", PAIR, name).read([Range(FIRST_ID, None)])
