"""A side is read on a standby: it may be behind its primary, nothing is written there, and replay goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import NullPool, create_engine

from outbox import Settings, embedded
from outbox.errors import InvalidSettings
from outbox.reconcile.job import Access, Job, Outcome, Pair, Tier, Window
from outbox.reconcile.rows import PairResult
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState, ProducerState
from tests.failover.clusters import Clusters, ask, base_cluster, caught_up, clusters
from tests.reconcile.town import HOUR, IN_SYNC, Progress, Town, fate, ids_at, ids_in, kinds

SHOP, BANK = "shop", "bank"


class Replicated:
    """A town on one cluster, and another cluster that follows it."""

    def __init__(self, town: Town, primary: embedded.Server, standby: embedded.Server) -> None:
        self.town, self.primary, self.standby = town, primary, standby

    def at_standby(self, sql: str, database: str = SHOP) -> object:
        """Run a statement on the standby, and return its first value."""
        return ask(self.standby, sql, database=database)

    def caught_up(self) -> None:
        """Wait until the standby has all that its primary has."""
        caught_up(self.standby, self.primary)

    def read_there(self, topic: str, **options: Any) -> PairResult:
        """Reconcile a topic with the producer's tables on the standby."""
        producer = Access(self.standby.url(SHOP), self.town.settings)
        job = Job(producer, self.town.accesses[1], (Pair(topic, "g"),), Window(grace=60.0), **options)
        return reconcile(job).pairs[0]


@pytest.fixture(scope="module")
def pair_of_clusters() -> Iterator[Replicated]:
    """A cluster with both sides, and one that follows it."""
    with base_cluster(SHOP, BANK, sql="SELECT 1") as base, clusters(base) as some:
        primary = some.new()
        shop, bank = (create_engine(primary.url(database), poolclass=NullPool) for database in (SHOP, BANK))
        with Town(shop, bank, Settings()) as town:
            yield Replicated(town, primary, _replica(some, primary))


def _replica(some: Clusters, primary: embedded.Server) -> embedded.Server:
    standby = some.replica(primary)
    caught_up(standby, primary)
    return standby


@pytest.fixture
def replicated(pair_of_clusters: Replicated) -> Iterator[Replicated]:
    """The same, which replays again after the test; each test has a topic of its own."""
    pair_of_clusters.caught_up()
    yield pair_of_clusters
    pair_of_clusters.at_standby("SELECT pg_wal_replay_resume()")


@pytest.mark.parametrize("tier", [Tier.FULL, Tier.DIGEST])
def test_what_a_standby_does_not_know_yet_is_in_flight(replicated: Replicated, tier: Tier) -> None:
    """Messages sent and consumed since replay was paused are no phantoms, whichever half of them was replayed."""
    town = replicated.town
    topic = f"behind-{tier}"
    town.plant([IN_SYNC] * 5, topic=topic)
    (phantom,) = town.plant([fate(state=None)], topic=topic)
    (undecided,) = town.plant([fate(state=ProducerState.UNDECIDED, age=0)], topic=topic)
    replicated.caught_up()
    replicated.at_standby("SELECT pg_wal_replay_pause()")
    town.at_producer(
        "INSERT INTO outbox.op_message (half_id, resolution, decided_by) VALUES (:id, 'commit', 'producer')",
        id=undecided,
    )
    fresh = town.plant([fate(age=0)] * 3, topic=topic)

    result = replicated.read_there(topic, tier=tier, record=False)

    assert kinds(result) == {phantom: Outcome.PHANTOM}
    assert ids_in(result.open) == {*fresh, undecided}
    assert list(result.plan.standby_lag) == ["producer"]
    assert "standby" in " ".join(result.plan.why)


def test_a_phantom_is_told_by_a_standby_that_has_caught_up(replicated: Replicated) -> None:
    """What the consumer has known for longer than the standby is behind, and for longer than the grace, is none."""
    (phantom,) = replicated.town.plant([fate(state=None, age=HOUR)], topic="known")
    (young,) = replicated.town.plant([fate(state=None, age=0)], topic="known")
    replicated.caught_up()

    result = replicated.read_there("known")

    assert kinds(result) == {phantom: Outcome.PHANTOM}
    assert ids_in(result.open) == {young}
    (recorded,) = replicated.town.rows("SELECT plan FROM outbox.reconciliation_run")
    assert recorded["standby_lag"]["producer"] >= 0


def test_an_op_that_was_in_progress_on_a_standby_is_seen_when_it_commits(
    replicated: Replicated, small_buckets: Callable[[Sequence[UUID]], None]
) -> None:
    """A snapshot on a standby doesn't list what is in progress; what commits then in a settled range is found."""
    town, topic = replicated.town, "progress"
    ids = town.plant([IN_SYNC] * 10, topic=topic, ids=ids_at(HOUR, 10))
    with town.producer.connect() as writer, writer.begin():
        writer.exec_driver_sql("SELECT pg_current_xact_id()")
        late = town.app.send(writer, topic, "late")
        later = town.plant([IN_SYNC] * 20, topic=topic)
        small_buckets([ids[5], later[10]])
        replicated.caught_up()
        replicated.read_there(topic, tier=Tier.DIGEST)
    town.at_producer("UPDATE outbox.op_message SET decided_at = decided_at - interval '1 hour'")
    replicated.caught_up()

    assert kinds(replicated.read_there(topic, tier=Tier.DIGEST)) == {late: Outcome.UNDISPATCHED}


def consumer_at(replicated: Replicated, topic: str, **options: Any) -> Job:
    """Return a job that reads the consumer's side on the standby; without ``record_in`` it has nowhere to record."""
    town = replicated.town
    consumer = Access(replicated.standby.url(BANK), town.settings)
    return Job(town.accesses[0], consumer, (Pair(topic, "g"),), Window(grace=60.0), **options)


def test_the_record_of_a_consumer_on_a_standby_is_in_another_database(
    replicated: Replicated, small_buckets: Callable[[Sequence[UUID]], None]
) -> None:
    """There runs and findings are, and what was in sync: as long as the group is as far as it was."""
    town, topic = replicated.town, "recorded"
    ids = town.plant([IN_SYNC] * 20, topic=topic, ids=ids_at(HOUR, 20))
    (missing,) = town.plant([fate(status=InboxState.NONE)], topic=topic, ids=ids_at(HOUR / 2))
    small_buckets([ids[10], missing])
    replicated.caught_up()
    at_primary = town.accesses[1]

    first, second = (
        reconcile(consumer_at(replicated, topic, record_in=at_primary, tier=Tier.DIGEST)).pairs[0] for _ in range(2)
    )

    assert kinds(first) == kinds(second) == {missing: Outcome.MISSING}
    assert first.plan.settled == 0
    assert second.plan.settled == 2
    found = "SELECT message_id FROM outbox.reconciliation_finding WHERE run_id = :run"
    assert town.rows(found, run=second.run_id) == [missing]
    town.run(
        "UPDATE {s}.consumer_offset SET position = position - 1 WHERE topic = :topic AND position > 0", topic=topic
    )
    replicated.caught_up()
    assert reconcile(consumer_at(replicated, topic, record_in=at_primary, tier=Tier.DIGEST)).pairs[0].plan.settled == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"is a standby, in which no run can be recorded; .*--record"),
        ({"record": False, "apply": True}, "repaired"),
    ],
)
def test_nothing_is_written_to_a_standby(replicated: Replicated, options: dict[str, Any], said: str) -> None:
    """Neither a record nor a repair: that is told before anything is compared."""
    with pytest.raises(InvalidSettings, match=said):
        reconcile(consumer_at(replicated, "unwritten", **options))


def test_what_a_standby_had_to_end_is_begun_again(replicated: Replicated) -> None:
    """Replay removes what a snapshot sees, and doesn't wait: the pair is compared in new snapshots."""
    town, topic = replicated.town, "conflict"
    (missing,) = town.plant([fate(status=InboxState.NONE)], topic=topic)
    gone = town.plant([IN_SYNC] * 50, topic="gone")
    replicated.caught_up()
    replicated.at_standby("ALTER SYSTEM SET max_standby_streaming_delay = 0")
    replicated.at_standby("SELECT pg_reload_conf()")

    def clean(title: str) -> None:
        if gone and title == f"{topic} → g: rows":
            town.forget(*gone)
            gone.clear()
            with town.consumer.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM outbox.consumer_message")
            replicated.caught_up()

    progress = Progress(clean)
    try:
        found = reconcile(consumer_at(replicated, topic, record=False), progress).pairs[0]
    finally:
        replicated.at_standby("ALTER SYSTEM RESET max_standby_streaming_delay")
        replicated.at_standby("SELECT pg_reload_conf()")
    assert kinds(found) == {missing: Outcome.MISSING}
    assert "begun again" in " ".join(progress.said)
