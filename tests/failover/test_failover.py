"""Clusters that fall back: a replica is promoted without the last transactions, a backup or a dump is restored.

After each the same holds: what the producer has is credited once; what the consumer has and the producer lost is known
by its ids; nothing is credited twice.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox.dispatch.dispatch_pass import Dispatcher, dispatch_once
from outbox.embedded import ServerLike
from outbox.message.model import NUMBER_BITS, number_of
from outbox.operator.health.examine import examine
from outbox.operator.health.stats import stats
from outbox.operator.operator import Operator
from outbox.reconcile.spark.log import LogOptions
from outbox.worker.connections import WorkerDatabase
from tests.failover.bank import DATABASES, TABLES, Bank, credit
from tests.failover.clusters import (
    Clusters,
    ask,
    base_cluster,
    caught_up,
    clusters,
    copy_stopped,
    cut_stream,
    fail_over,
    put_back,
)
from tests.kit import Tables, declare, sample
from tests.kit.databases import clones


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """The cluster that all others are copies of."""
    with base_cluster(*DATABASES, sql=TABLES) as folder:
        yield folder


@pytest.fixture
def some(base: Path) -> Iterator[Clusters]:
    """Starts clusters that end with the test."""
    with clusters(base) as found:
        yield found


@pytest.fixture
def theirs(server: ServerLike, template: str) -> Iterator[ServerLike]:
    """The server of the run, for the side that nothing happens to: a cluster of its own takes a second to start."""
    with clones(server, template, *DATABASES) as engines:
        for engine in engines:
            with engine.begin() as connection:
                connection.exec_driver_sql(TABLES)
        yield server


def assert_settled(bank: Bank) -> None:
    """Count the money: each debit is credited once, and each credit without a debit is written down as lost."""
    credited = bank.credits()
    assert not bank.uncredited(), "durable debits were never credited"
    assert max(credited.values()) == 1, "a transfer was credited twice"
    assert set(credited) - bank.debits() == bank.lost(), "what the producer lost isn't what was found to be lost"
    with bank.producer.connect() as source, bank.consumer.connect() as connection:
        ends = {row.topic: row.messages for row in stats(source, bank.settings, ["producer"]).topics}
        (group,) = stats(connection, bank.settings, ["consumer"]).groups
    assert ends["transfer"] == group.consumed, "there is a lag, though all is consumed"
    assert group.lost == len(bank.lost())
    found = {finding.code: finding for finding in examine(bank.consumer, bank.settings).findings}
    assert ("group.lost" in found) == bool(bank.lost())


def epochs(bank: Bank) -> list[int]:
    """Return the epochs of which there are messages."""
    return sorted(set(Tables(bank.producer).rows(f"SELECT position >> {NUMBER_BITS} FROM outbox.message")))


#: Where each message stands.
PLACES = "SELECT half_id, (topic, queue, position)::text FROM outbox.message"
WRITE_OUT = "SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'test', '')"


def places(bank: Bank) -> dict[UUID, str]:
    """Return where each message stands."""
    rows: list[Any] = Tables(bank.producer).rows(PLACES)
    return dict(rows)


def test_a_replica_is_promoted_twice_with_consumers_elsewhere(
    some: Clusters, theirs: ServerLike, caplog: pytest.LogCaptureFixture
) -> None:
    """The consumers' cluster stays: what it has read is ahead of each new primary; the second loses an epoch whole."""
    first = some.new()
    bank = Bank(first, theirs)
    second = some.replica(first)
    bank.work(20)
    caught_up(second, first)
    cut_stream(second)
    bank.work(11)
    bank.debit(3)
    fail_over(first, second)
    bank.use(second, theirs)
    third = some.replica(second)
    caught_up(third, second)
    cut_stream(third)
    bank.work(30)
    assert_settled(bank)
    assert len(bank.lost()) == 11
    assert len(epochs(bank)) == 2
    assert {record.outbox_event for record in caplog.records if hasattr(record, "outbox_event")} == {
        "log.epoch",
        "log.went_back",
        "source.moved",
    }
    told = [id_ for record in caplog.records for id_ in getattr(record, "lost", [])]
    assert sorted(told) == sorted(map(str, bank.lost()))
    fail_over(second, third)
    bank.use(third, theirs)
    bank.work(30)
    assert_settled(bank)
    assert len(bank.lost()) == 41
    assert len(epochs(bank)) == 2, "the epoch of the second primary is lost with it"
    bank.work(5)
    assert_settled(bank)


@pytest.mark.parametrize("database", ["crediting", "debiting"])
def test_both_sides_fall_back_in_one_cluster(some: Clusters, database: str) -> None:
    """Two databases of one cluster, or one database: both forget the same, and nothing was lost."""
    first = some.new()
    bank = Bank(first, first, database)
    second = some.replica(first)
    bank.work(20)
    caught_up(second, first)
    cut_stream(second)
    bank.work(10)
    fail_over(first, second)
    bank.use(second, second)
    bank.work(30)
    assert_settled(bank)
    assert (len(bank.debits()), bank.lost()) == (50, set())
    assert len(epochs(bank)) == 2


@pytest.mark.parametrize("consumer_first", [True, False])
def test_both_clusters_fall_back_by_themselves(some: Clusters, consumer_first: bool) -> None:
    """Each side loses another tail; what the consumer forgot it handles again, its effects were forgotten too."""
    ours, theirs = some.new(), some.new()
    bank = Bank(ours, theirs)
    replicas = some.replica(ours), some.replica(theirs)
    pairs = list(zip((ours, theirs), replicas, strict=True))
    bank.work(10)
    for primary, replica in pairs[::-1] if consumer_first else pairs:
        caught_up(replica, primary)
        cut_stream(replica)
        bank.work(10)
    for primary, replica in pairs:
        fail_over(primary, replica)
    bank.use(*replicas)
    bank.work(20)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost())) == ((40, 0) if consumer_first else (30, 10))


def test_the_consumers_cluster_falls_back_alone(some: Clusters, theirs: ServerLike) -> None:
    """Its offset, inbox and effects are of one moment: it reads what follows once more."""
    ours, theirs = theirs, some.new()
    bank = Bank(ours, theirs)
    replica = some.replica(theirs)
    bank.work(20)
    caught_up(replica, theirs)
    cut_stream(replica)
    bank.work(10)
    fail_over(theirs, replica)
    bank.use(ours, replica)
    assert len(bank.uncredited()) == 10
    bank.work(5)
    assert_settled(bank)
    assert (len(bank.debits()), bank.lost(), epochs(bank)) == (35, set(), [0])


def test_a_replica_that_knows_no_message_is_promoted(some: Clusters, theirs: ServerLike) -> None:
    """Both sides agree on nothing: all that the consumer has is lost."""
    ours = some.new()
    bank = Bank(ours, theirs)
    replica = some.replica(ours)
    caught_up(replica, ours)
    cut_stream(replica)
    bank.work(10)
    fail_over(ours, replica)
    bank.use(replica, theirs)
    bank.work(20)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost())) == (20, 10)


def test_a_group_reads_from_a_standby_that_lags(some: Clusters, theirs: ServerLike) -> None:
    """What a standby doesn't know so far isn't lost."""
    ours = some.new()
    bank = Bank(ours, theirs)
    standby = some.replica(ours)
    bank.work(20)
    caught_up(standby, ours)
    cut_stream(standby)
    bank.work(10)
    bank.use(standby, theirs)
    bank.consume()
    assert (len(bank.credits()), bank.lost()) == (30, set())
    bank.use(ours, theirs)
    bank.work(5)
    assert_settled(bank)
    assert (len(bank.debits()), bank.lost()) == (35, set())


def test_a_recovery_to_a_point_in_time(some: Clusters, theirs: ServerLike) -> None:
    """The producer goes back to a restore point in the middle: a new timeline."""
    ours = some.new()
    bank = Bank(ours, theirs)
    bank.close()
    archive = some.archive_of(ours)
    bank.use(ours, theirs)
    folder = some.backup(ours)
    bank.work(20)
    ask(ours, "SELECT pg_create_restore_point('middle')")
    bank.work(20)
    bank.close()
    some.archive_all(ours, archive)
    recovered = some.recover(folder, archive, "middle")
    bank.use(recovered, theirs)
    bank.work(30)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost()), len(epochs(bank))) == (50, 20, 2)


@pytest.mark.parametrize("where", ["another cluster", "another database", "the same database"])
def test_a_dump_is_restored(some: Clusters, theirs: ServerLike, where: str) -> None:
    """The producer's tables are put back as they were: their cluster, database or table has another identity."""
    ours = some.new()
    bank = Bank(ours, theirs)
    bank.work(20)
    bank.debit(5)
    dump = some.dump(ours, "debiting")
    bank.work(20)
    target = some.empty() if where == "another cluster" else ours
    if where == "another database":
        bank.close()
        ask(ours, "ALTER DATABASE debiting RENAME TO gone")
    if where != "the same database":
        target.create_database("debiting")
    some.restore(target, "debiting", dump)
    bank.use(target, theirs)
    bank.work(30)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost()), len(epochs(bank))) == (55, 20, 2)


def test_a_copy_of_a_database_takes_over(some: Clusters, theirs: ServerLike) -> None:
    """CREATE DATABASE … TEMPLATE makes a copy that has all of the original but its oid."""
    ours = some.new()
    bank = Bank(ours, theirs)
    bank.work(20)
    bank.close()
    ours.create_database("copy", template="debiting")
    bank.use(ours, theirs)
    bank.work(10)
    bank.close()
    ask(ours, "ALTER DATABASE debiting RENAME TO gone")
    ask(ours, "ALTER DATABASE copy RENAME TO debiting")
    bank.use(ours, theirs)
    bank.work(30)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost()), len(epochs(bank))) == (50, 10, 2)


@pytest.mark.parametrize("more", [3, 20, 40])
def test_a_volume_is_put_back_by_its_storage(some: Clusters, theirs: ServerLike, more: int) -> None:
    """Nothing tells it but the messages: fewer than were lost, as many, or more are there when the consumer looks."""
    ours = some.new()
    bank = Bank(ours, theirs)
    bank.work(20)
    bank.close()
    copy = copy_stopped(ours)
    bank.use(ours, theirs)
    bank.work(20)
    bank.close()
    put_back(ours, copy)
    bank.use(ours, theirs)
    bank.work(more)
    bank.work(0)
    assert_settled(bank)
    assert (len(bank.debits()), len(bank.lost()), epochs(bank)) == (20 + more, 20, [0])


@pytest.mark.parametrize("setting", ["off", "local"])
def test_a_crash_without_synchronous_commits(some: Clusters, theirs: ServerLike, setting: str) -> None:
    """What dispatch has placed is durable, with all that it was made of: no consumer has read what a crash forgets."""
    ours = some.new(synchronous_commit=setting)
    bank = Bank(ours, theirs)
    bank.work(20)
    for _ in range(3):
        bank.work(5)
        credited = set(bank.credits())
        bank.debit(3)
        ours.kill()
        ours.start()
        bank.use(ours, theirs)
        assert credited <= bank.debits(), "a crash has forgotten what was consumed"
    bank.work(20)
    assert_settled(bank)
    assert bank.lost() == set()


#: Each place with the setting that loses most, and each other setting once; by night all pairs.
CRASHES = (
    *((where, "off") for where in ("another cluster", "another cluster, by a worker", "the same database")),
    ("another cluster", "on"),
    ("the same database", "local"),
    ("another cluster", "local"),
    *((where, "on") for where in ("another cluster, by a worker", "the same database")),
    ("another cluster, by a worker", "local"),
)


@pytest.mark.parametrize(("where", "setting"), sample(CRASHES, 5))
def test_a_crash_before_the_disk_has_what_was_dispatched(
    some: Clusters, theirs: ServerLike, setting: str, where: str
) -> None:
    """A dispatcher needn't wait for the disk: what a consumer has read there, no crash forgets; what it hasn't, may go.

    The server writes nothing out by itself, and is killed after a consumer has read, and before.
    """
    ours = some.new(synchronous_commit=setting)
    theirs = ours if where == "the same database" else theirs
    bank = Bank(ours, theirs, "debiting" if theirs is ours else "crediting")
    bank.durable, bank.by_worker = False, "worker" in where

    def crash_after(consume: bool) -> tuple[dict[UUID, str], dict[UUID, str]]:
        """Kill the server behind a dispatch; return where messages stood, and where they stand."""
        bank.debit(3)
        ask(ours, WRITE_OUT, database="debiting")
        bank.dispatch()
        if consume:
            bank.consume()
        before = places(bank)
        ours.kill()
        ours.start()
        bank.use(ours, theirs)
        return before, places(bank)

    bank.work(20)
    for _ in range(3):
        before, after = crash_after(consume=True)
        credited = set(bank.credits())
        assert credited <= bank.debits(), "a crash has forgotten what was consumed"
        assert {id_: before[id_] for id_ in credited} == {id_: after.get(id_) for id_ in credited}, (
            "it stands elsewhere"
        )
        bank.work(0)
        # The server does write out what fills a page.
        forgotten = (len(before) - len(after) for before, after in iter(lambda: crash_after(consume=False), None))
        assert 3 in islice(forgotten, 10), "what no consumer has read was written out: the test shows nothing"
    bank.work(20)
    assert_settled(bank)
    assert (bank.lost(), epochs(bank)) == (set(), [0])


def _start(bank: Bank, start: Any) -> None:
    """Begin a new group."""
    group = declare(bank.consumer, "transfer", f"late-{uuid4()}", credit, settings=bank.settings, start=start)
    with WorkerDatabase(bank.consumer).connect() as connection, WorkerDatabase(bank.producer).connect() as source:
        group.start(connection, source)


def _skip(bank: Bank) -> None:
    """Have an operator move a group to the end."""
    operator = Operator.open({"debiting": bank.producer, "crediting": bank.consumer}, bank.settings)
    operator.skip_group("crediting", "transfer", "now", by="me", why="t", database="crediting", source="debiting")


def _read_by_spark(bank: Bank) -> None:
    """Ask for the offset that the checkpoint of a stream would keep."""
    os.environ["OUTBOX_TEST_LOG"] = bank.producer.url.render_as_string(hide_password=False)
    assert LogOptions(topic="transfer", url_env="OUTBOX_TEST_LOG").log().end()


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(lambda bank: _start(bank, "now"), id="a group that starts now"),
        pytest.param(lambda bank: _start(bank, dt.datetime.now(dt.UTC)), id="a group that starts at a time"),
        pytest.param(lambda bank: _start(bank, 2), id="a group that starts at a position"),
        pytest.param(_skip, id="an operator's skip"),
        pytest.param(_read_by_spark, id="the log as a source of Spark"),
    ],
)
def test_a_position_that_is_kept_elsewhere(some: Clusters, theirs: ServerLike, keep: Callable[[Bank], None]) -> None:
    """Whatever keeps a position of the log in another place has the log written out before: no crash forgets it."""
    ours = some.new()
    bank = Bank(ours, theirs)
    bank.durable = False
    bank.work(20)
    for _ in range(3):
        bank.debit(3)
        ask(ours, WRITE_OUT, database="debiting")
        bank.dispatch()
        keep(bank)
        before = places(bank)
        ours.kill()
        ours.start()
        bank.use(ours, theirs)
        assert places(bank) == before


def test_a_dispatcher_that_outlives_a_crash(some: Clusters) -> None:
    """The crash forgets its cursor; another worker writes one of that number, and xids are given again."""
    ours = some.new()
    bank = Bank(ours, ours, "debiting")
    settings = replace(bank.settings, listen=False)
    dispatcher = Dispatcher(settings, durable=False)
    with WorkerDatabase(bank.producer).connect() as connection:
        for _ in range(5):
            bank.debit(1)
            dispatcher.nudge()
            dispatcher.once(connection)
        bank.debit(1)
        with connection.begin():  # so that the xids of these are lost, too
            connection.exec_driver_sql("SET synchronous_commit = off")
        for _ in range(6):
            with connection.begin():
                connection.exec_driver_sql("INSERT INTO debit SELECT gen_random_uuid() WHERE false RETURNING 1")
                connection.exec_driver_sql("SELECT pg_current_xact_id()")
        dispatcher.nudge()
        assert dispatcher.once(connection).done == 1
    ours.kill()
    ours.start()
    bank.use(ours, ours)
    with bank.producer.connect() as connection:
        assert dispatch_once(connection, settings).done == 1
    bank.debit(9)
    with WorkerDatabase(bank.producer).connect() as connection:
        dispatcher.nudge()
        assert dispatcher.once(connection).done == 9
    bank.consume()
    assert_settled(bank)


def test_numbers_go_on_in_a_new_epoch(some: Clusters, theirs: ServerLike) -> None:
    """A queue's numbers are dense over epochs, so that a lag and a gap that was pruned can be told from a jump."""
    first = some.new()
    bank = Bank(first, theirs)
    bank.work(20)
    second = some.replica(first)
    caught_up(second, first)
    fail_over(first, second)
    bank.use(second, theirs)
    bank.debit(10)
    bank.dispatch()
    places: list[Any] = Tables(bank.producer).rows("SELECT queue, position FROM outbox.message ORDER BY 1, 2")
    for queue in (0, 1):
        numbers = [number_of(position) for each, position in places if each == queue]
        assert numbers == list(range(1, len(numbers) + 1))
    bank.consume()
    assert_settled(bank)
    assert bank.lost() == set()
