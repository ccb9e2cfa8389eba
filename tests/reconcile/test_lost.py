"""What a comparison loses on the way: a reader, its snapshots, a server, itself. It goes on, or the next one does."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from uuid import UUID

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

from outbox import Settings
from outbox.errors import SourceError, SourceLost
from outbox.reconcile import source
from outbox.reconcile.job import Access, Effect, EngineName, Interrupted, Job, Outcome, Pair, Tier
from outbox.reconcile.record import timetable, write
from outbox.reconcile.run import foresee, reconcile
from outbox.reconcile.tables import InboxState
from tests.failover.clusters import base_cluster, clusters
from tests.kit import sample, wait_until
from tests.reconcile.town import HOUR, IN_SYNC, Progress, Town, fate, ids_at, kinds

TIERS = (Tier.DIGEST, Tier.FULL)
PAIR = Pair("t", "g", effect=Effect("ledger"))
MISSING = fate(status=InboxState.NONE, effects=0)
#: The sessions of a run: the two that hold its snapshots idle in their transactions, while readers are active.
OURS = "application_name LIKE 'outbox reconcile %' AND pid <> pg_backend_pid()"


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as good as nothing for what is lost."""
    monkeypatch.setattr(source, "_FIRST_WAIT", 0.01)


def plant(town: Town) -> UUID:
    """Write messages, one of which is missing; return that."""
    return town.plant([fate(effects=1)] * 9 + [MISSING], ids=ids_at(HOUR, 10))[-1]


def ended(engine: Engine, which: str) -> int:
    """End sessions of runs; return how many."""
    with engine.connect() as connection:
        sql = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OURS} AND {which}"
        return int(connection.scalar(text(sql)) or 0)


@contextmanager
def readers_kept(town: Town) -> Iterator[None]:
    """Let no reader of the consumer's side get beyond the business table."""
    with town.consumer.connect() as connection:
        connection.execute(text("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE"))
        yield


def test_a_reader_that_is_lost_reads_again(town: Town, hurry: None) -> None:
    """Its connection is ended while it reads; it connects again, to the same snapshot, and nothing is begun again."""
    missing = plant(town)
    threads: list[Thread] = []

    def lose_it(title: str) -> None:
        if not title.endswith(": rows"):
            return
        kept = readers_kept(town)
        kept.__enter__()

        def end() -> None:
            try:
                wait_until(lambda: ended(town.consumer, "wait_event_type = 'Lock'"), "a reader waits, and is ended")
            finally:
                kept.__exit__(None, None, None)

        threads.append(Thread(target=end))
        threads[-1].start()

    progress = Progress(lose_it)
    found = town.reconcile(PAIR, progress=progress, workers=1)
    for thread in threads:
        thread.join()
    assert threads
    assert kinds(found) == {missing: Outcome.MISSING}
    assert "begun again" not in " ".join(progress.said)


@pytest.mark.parametrize(
    ("tier", "engine"),
    [
        *((tier, EngineName.LOCAL) for tier in TIERS),
        *(pytest.param(tier, EngineName.SPARK, marks=pytest.mark.slow) for tier in sample(TIERS, 1)),
    ],
)
def test_a_pair_whose_snapshots_are_lost_is_begun_again(
    request: pytest.FixtureRequest, town: Town, hurry: None, tier: Tier, engine: EngineName
) -> None:
    """Whoever holds a snapshot is ended before its rows are read: the pair is compared again, and that is said."""
    if engine is EngineName.SPARK:
        request.getfixturevalue("spark")
    missing = plant(town)
    times: list[int] = []

    def lose_them(title: str) -> None:
        if title.endswith(": rows") and len(times) < 2:
            side = (town.consumer, town.producer)[len(times)]
            times.append(ended(side, "state = 'idle in transaction'"))

    progress = Progress(lose_them)
    found = town.reconcile(PAIR, progress=progress, tier=tier, engine=engine)
    assert min(times) >= 1
    assert kinds(found) == {missing: Outcome.MISSING}
    assert " ".join(progress.said).count("begun again") == 2
    assert town.rows("SELECT error FROM outbox.reconciliation_run") == [None]
    assert town.rows("SELECT message_id FROM outbox.reconciliation_finding") == [missing]


def test_what_is_lost_again_and_again_ends_the_run(town: Town, hurry: None) -> None:
    """A bounded number of times; the record says why."""
    plant(town)

    def lose_it(title: str) -> None:
        ended(town.producer, "state = 'idle in transaction'")

    progress = Progress(lose_it)
    with pytest.raises(SourceLost, match="database"):
        town.reconcile(PAIR, progress=progress)
    assert " ".join(progress.said).count("begun again") == source.MOST_TRIES - 1
    (error,) = town.rows("SELECT error FROM outbox.reconciliation_run")
    assert error.startswith("database ")


@pytest.mark.parametrize("act", [reconcile, foresee])
@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize("record", [False, True], ids=["not recorded", "recorded"])
def test_what_was_never_there_is_not_waited_for(
    town: Town, monkeypatch: pytest.MonkeyPatch, act: Callable[[Job], object], side: str, record: bool
) -> None:
    """A database that can't be reached at the beginning is told at once, also where it is to have the record."""
    monkeypatch.setattr(source, "_FIRST_WAIT", 3600.0)
    monkeypatch.setattr(source, "_LONGEST_WAIT", 3600.0)
    job = town.job(PAIR, record=record)
    nowhere = Access(town.producer.url.set(database="nothing").render_as_string(hide_password=False), Settings())
    with pytest.raises(SourceError, match="nothing"):
        act(replace(job, producer=nowhere) if side == "producer" else replace(job, consumer=nowhere))


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for() -> None:
    """All its sessions and snapshots are gone, and for a while it isn't there: the run takes longer, that is all."""
    with base_cluster("shop", "bank", sql="SELECT 1") as base, clusters(base) as some:
        server = some.new()
        shop, bank = (create_engine(server.url(database), poolclass=NullPool) for database in ("shop", "bank"))
        with Town(shop, bank, Settings()) as town:
            missing = plant(town)
            restarted: list[str] = []

            def restart(title: str) -> None:
                if title.endswith((": rows", ": second look")) and title not in restarted:
                    restarted.append(title)
                    server.restart("immediate")

            found = town.reconcile(PAIR, progress=Progress(restart))
            assert len(restarted) == 2
            assert kinds(found) == {missing: Outcome.MISSING}
            assert town.rows("SELECT error FROM outbox.reconciliation_run") == [None]


def test_a_run_that_is_begun_again_knows_what_the_first_found_in_sync(
    town: Town, small_buckets: Callable[[list[UUID]], None]
) -> None:
    """A run that dies over its second pair leaves the first one's ranges to the next run."""
    ids = town.plant([IN_SYNC] * 40, ids=ids_at(HOUR, 40))
    town.plant([IN_SYNC] * 40, topic="u", ids=ids_at(HOUR, 40))
    small_buckets(ids[5::10])
    pairs = Pair("t", "g"), Pair("u", "g")

    def die(title: str) -> None:
        if title.startswith("u → g"):
            raise Interrupted

    with pytest.raises(Interrupted):
        town.reconcile(*pairs, progress=Progress(die), tier=Tier.DIGEST)
    again = reconcile(town.job(*pairs, tier=Tier.DIGEST)).pairs
    assert again[0].plan.settled > 0
    assert again[0].in_sync
    assert again[1].plan.settled == 0
    assert again[1].in_sync


def test_a_run_says_that_it_is_alive(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heart beats in the record as long as it is at work, and has left no trace when it ends."""
    monkeypatch.setattr(write, "HEARTBEAT", 0.01)
    plant(town)
    heard: list[dt.datetime] = []

    def listen(title: str) -> None:
        if title.endswith(": second look"):
            sql = f"SELECT {timetable.HEARD_OF} FROM outbox.reconciliation_run r WHERE plan ? 'alive_at'"
            heard.extend(wait_until(lambda: town.rows(sql), "a beat is recorded"))
            wait_until(lambda: town.rows(sql) > heard, "another beat is recorded")

    town.reconcile(PAIR, progress=Progress(listen))
    assert heard
    (plan,) = town.rows("SELECT plan FROM outbox.reconciliation_run")
    assert "alive_at" not in plan
    assert plan["engine"] == "local"
