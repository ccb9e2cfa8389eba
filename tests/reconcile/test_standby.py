"""The producer's tables are read on a standby, which may be behind its primary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import NullPool, create_engine

from outbox import Settings, embedded
from outbox.reconcile.job import Access, Job, Outcome, Pair, Tier, Window
from outbox.reconcile.rows import PairResult, ProducerState
from outbox.reconcile.run import reconcile
from tests.failover.clusters import Clusters, ask, base_cluster, caught_up, clusters
from tests.reconcile.town import HOUR, IN_SYNC, Town, fate, ids_at, ids_in, kinds

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
