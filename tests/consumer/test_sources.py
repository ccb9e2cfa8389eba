"""One group that reads one topic name from two producers' databases: nothing of one is taken for the other's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

from outbox import Breaker, Outbox, Settings
from outbox.compensate.compensate_pass import compensate_once
from outbox.consumer.outside.consumer import consumer_of
from outbox.database.engines import EngineRunner
from outbox.database.identity import follow, meet, renew
from outbox.delivery.confirm_pass import confirm_once
from outbox.delivery.known_group import KnownGroup
from outbox.embedded import ServerLike
from outbox.errors import ActRefused, InvalidHandler, InvalidRequest, InvalidSettings
from outbox.operator.databases import Database, Databases
from outbox.operator.model import MessageFate, MessageFilter, PageRequest
from outbox.operator.operator import Operator
from outbox.prune.prune_pass import prune_consumer_once
from outbox.telemetry.events import LogWentBack, SourceMoved
from outbox.telemetry.hooks import TelemetryEvent
from outbox.worker import Worker
from tests.consumer.workers import read_all
from tests.kit import tries
from tests.kit.bench import Two, Ward, address, make_ledger, record
from tests.kit.passes import consume_all
from tests.kit.processes import spoken_to
from tests.kit.waiting import wait_until

#: How often the worker is killed, thrice at least (a dump, a loss, a restore), and how many messages come before each.
KILLS, EACH = max(tries(10), 3), 50


def test_each_source_has_offsets_and_an_inbox_of_its_own(two: Two, heard: list[TelemetryEvent]) -> None:
    """The same positions of two databases are two messages, and neither log has gone back."""
    consumers = two.declare()
    for number in range(4):
        two.branches[0].send(f"a{number}", key="k")
        two.branches[1].send(f"b{number}", key="k")
        two.consume(consumers)
    two.branches[1].send("b4", key="k")
    two.consume(consumers)
    assert sorted(two.ledger()) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "b4"]
    of_each = two.rows("SELECT topic || ':' || count(*) FROM outbox.consumer_message GROUP BY topic ORDER BY 1")
    assert of_each == ["t:4", "t@1:5"]
    assert not [each for each in heard if isinstance(each, LogWentBack)]
    assert two.rows("SELECT id FROM outbox.message_source ORDER BY number") == [each.id for each in two.branches]


def test_a_new_worker_finds_the_sources_in_another_order(two: Two) -> None:
    """It is the id by which a source is known, not the order in which it is declared."""
    two.branches[0].send("a")
    two.branches[1].send("b")
    two.consume(two.declare())
    two.branches.reverse()
    two.sources.reverse()
    consumers = two.declare_anew()
    two.branches[0].send("b2")
    two.consume(consumers)
    assert [each.subscription.feed for each in consumers] == ["t@1", "t"]
    assert sorted(two.ledger()) == ["a", "b", "b2"]


def test_two_workers_that_meet_two_sources_at_once(two: Two) -> None:
    """Each source gets a number of its own: the second worker waits for the first one."""
    schema = two.settings.schema
    with ThreadPoolExecutor() as pool, two.head.connect() as other:
        first = Two(two.branches, two.head, two.settings)
        with first.connection.begin():
            assert meet(first.connection, first.sources[0], schema, "t").number == 0
            second = pool.submit(meet, other, two.sources[1], schema, "t")
            wait_until(two.is_blocked, "the second worker waits")
        assert second.result().number == 1
        first.close()


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"ordered": "key"}, {"transactional": False}])
def test_failures_are_retried_from_their_own_source(two: Two, options: dict[str, Any]) -> None:
    """A failed message is read again where it came from, and holds back nothing of the other source."""
    ward = Ward("a0", "b0")
    consumers = two.declare(ward, retry_delays=(3600.0,) * 9, **options)
    for branch, name in zip(two.branches, "ab", strict=True):
        branch.send(f"{name}0", f"{name}1", key="k")
    two.consume(consumers)
    ward.ill.clear()
    for _ in range(3):
        two.age_retries()
        two.consume(consumers)
        for consumer, source in zip(consumers, two.sources, strict=True):
            consumer.retry_once(two.connection, source)
    assert sorted(ward.done) == ["a0", "a1", "b0", "b1"]
    assert two.rows("SELECT DISTINCT status FROM outbox.consumer_message") == ["consumed"]
    if options.get("ordered"):
        for name in "ab":
            assert [body for body in ward.done if body[0] == name] == [f"{name}0", f"{name}1"]


def test_a_retry_outside_of_transactions_leases_the_queue_of_its_feed(two: Two) -> None:
    """Also in a worker that has none of the queues yet: what it reads on and writes there is of that source."""
    ward = Ward("b0")
    two.branches[1].send("b0", key="k")
    two.consume(two.declare(ward, transactional=False, retry_delays=(3600.0,)))
    ward.ill.clear()
    two.branches[1].send("b1", key="k")
    two.age_retries()
    leases = two.value("SELECT count(*) FROM outbox.consumer_lease")
    fresh = two.declare_anew(ward, transactional=False, retry_delays=(3600.0,))
    fresh[1].retry_once(two.connection, two.sources[1])
    assert ward.done[:1] == ["b0"]
    assert two.value("SELECT count(*) FROM outbox.consumer_lease") > leases
    of_its_queue = "WHERE queue = (SELECT queue FROM outbox.consumer_message LIMIT 1)"
    for table, moved in (("consumer_lease", ""), ("consumer_message", ""), ("consumer_offset", "AND position > 0")):
        assert two.rows(f"SELECT DISTINCT topic FROM outbox.{table} {of_its_queue} {moved}") == ["t@1"]


def test_growth_of_one_source(two: Two) -> None:
    """A topic that gets more queues in one database has its keys in order there; the other one stays as it is."""
    consumers = two.declare()
    for number in range(3):
        for branch, name in zip(two.branches, "ab", strict=True):
            branch.send(f"{name}{number}", key="k")
        if number == 0:
            two.branches[0].app.declare_topic("t", 16)
        if number:
            two.consume(consumers)
    for name in "ab":
        assert [body for body in two.ledger() if body[0] == name] == [f"{name}0", f"{name}1", f"{name}2"]


def test_a_reset_moves_the_group_at_one_source(two: Two) -> None:
    """An operator names the source; what was read of the other one is left alone."""
    consumers = two.declare()
    two.branches[0].send("a")
    two.branches[1].send("b")
    two.consume(consumers)
    operator = two.operator()
    operator.reset_group("g", "t", "first", by="ada", why="again", source="b")
    two.consume(consumers)
    assert two.ledger() == ["a", "b", "b"]
    assert two.rows("SELECT DISTINCT topic FROM outbox.consumer_passage") == ["t@1"]
    with pytest.raises(InvalidRequest, match="reads from several; name one of: a, b"):
        operator.reset_group("g", "t", "first", by="ada", why="again")
    operator.reset_group("g", "t@1", "first", by="ada", why="by its feed")
    assert two.rows("SELECT DISTINCT topic FROM outbox.consumer_passage") == ["t@1"]
    assert operator.pause_group("g", by="ada", why="calm", topic="t@1")
    with pytest.raises(InvalidRequest, match="which is deleted with all of them: name topic 't'"):
        operator.delete_group("g", "t@1", by="ada", why="gone")
    operator.delete_group("g", "t", by="ada", why="gone")
    assert two.rows("SELECT count(*) FROM outbox.consumer_message") == [0]


def test_a_source_that_is_not_registered(two: Two) -> None:
    """Its messages are nobody else's: lists say where it is, and acts on it are refused by that."""
    consumers = two.declare()
    (of_a,) = two.branches[0].send("a")
    two.branches[1].send("b0", "b1", key="k")
    consume_all(consumers[1], two.connection, two.sources[1])
    operator = two.operator("b")
    page = operator.messages(
        MessageFilter(group="g", status=(MessageFate.UNCONSUMED,), topic="t", database="a"), PageRequest()
    )
    assert [row.id for row in page.items] == [of_a]
    assert [each.partition(" at ")[0] for each in page.unreached] == ["t@1"]
    with pytest.raises(InvalidRequest, match=r"group 'g' reads t@1 at .*, which is none of: a; register it"):
        operator.reset_group("g", "t@1", "first", by="ada", why="again")


def test_a_pause_and_a_rate_hold_for_all_sources(two: Two) -> None:
    """What holds a group back is of the group, wherever its messages come from."""
    two.declare()
    operator = two.operator()
    operator.pause_group("g", by="ada", why="calm")
    for branch in two.branches:
        branch.send("x")
    two.consume(two.declare_anew())
    assert two.ledger() == []
    operator.resume_group("g", by="ada", why="go on")
    two.consume(two.declare_anew())
    assert two.ledger() == ["x", "x"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_breaker_opens_for_all_sources(two: Two, number: int) -> None:
    """Failures at one source stop the group at the other one."""
    options: dict[str, Any] = {"breaker": Breaker(3), "retry_delays": (3600.0,)}
    ward = Ward(down=True)
    consumers = two.declare(ward, **options)
    two.branches[number].send("a0", "a1", "a2", "a3")
    two.consume(consumers)
    two.branches[1 - number].send("b0")
    two.consume(consumers)
    assert len(ward.calls) == 3
    assert two.rows("SELECT topic FROM outbox.group_control WHERE opened_at IS NOT NULL") == ["t"]


def test_lag_and_groups_of_both_sources(two: Two) -> None:
    """One row a group, with the lag of both; the overview has one for each topic of a database."""
    two.declare()
    two.branches[0].send("a0", "a1")
    two.branches[1].send("b0")
    operator = two.operator()
    (row,) = operator.groups()
    assert (row.topic, row.group, row.lag) == ("t", "g", 3)
    lags = {
        topic.database: [(group.topic, group.lag) for group in topic.groups] for topic in operator.overview().topics
    }
    assert lags == {"a": [("t", 2)], "b": [("t@1", 1)]}


def test_prune_asks_each_source_what_it_still_has(two: Two) -> None:
    """An inbox row stays as long as its own producer has the message."""
    consumers = two.declare()
    (a,), (b,) = two.branches[0].send("a"), two.branches[1].send("b")
    two.consume(consumers)
    two.run("UPDATE outbox.consumer_message SET changed_at = '2000-01-01', received_at = '2000-01-01'")
    with two.branches[0].engine.begin() as connection:
        for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
            connection.execute(text(f"DELETE FROM outbox.{table} WHERE {column} = :id"), {"id": a})
    for consumer, source in zip(consumers, two.sources, strict=True):
        prune_consumer_once(two.connection, source, two.settings, "g", consumer.subscription.feed)
    assert two.rows("SELECT message_id FROM outbox.consumer_message") == [b]


@pytest.fixture
def copied(server: ServerLike, two: Two) -> Iterator[Callable[[Engine], Engine]]:
    """Copy a database as it is, id and all, as a dump or a volume has it; its connections end."""
    with ExitStack() as stack:

        def copy(engine: Engine) -> Engine:
            name, original = f"copy_{uuid4().hex[:12]}", str(engine.url.database)
            engine.dispose()
            with create_engine(server.url("postgres"), poolclass=NullPool).connect() as connection:
                end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = :name"
                connection.execute(text(end), {"name": original})
            server.create_database(name, template=original)
            stack.callback(server.drop_database, name)
            made = create_engine(server.url(name))
            stack.callback(made.dispose)
            return made

        yield copy
        two.close()


def test_one_source_is_restored_from_a_dump(
    two: Two, copied: Callable[[Engine], Engine], heard: list[TelemetryEvent]
) -> None:
    """What it has lost is told of it alone; both go on, and nothing takes effect twice."""
    two.branches[0].send("a0", "a1", key="k")
    two.branches[1].send("b0", "b1", key="k")
    two.close()
    dump = copied(two.branches[1].engine)
    two.connect()
    two.branches[0].send("a2", key="k")
    (lost,) = two.branches[1].send("b2", key="k")
    two.consume(two.declare())
    two.close()
    two.branches[1].engine, two.branches[1].app = dump, Outbox(dump, settings=two.settings)
    two.connect()
    consumers = two.declare_anew()
    two.branches[0].send("a3", key="k")
    two.branches[1].send("b3", "b4", key="k")
    two.consume(consumers)
    assert sorted(two.ledger()) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "b4"]
    moved = [each for each in heard if isinstance(each, SourceMoved)]
    assert [(each.number, each.source) for each in moved] == [(1, two.branches[1].id)]
    losses = [(each.topic, each.lost) for each in heard if isinstance(each, LogWentBack)]
    assert losses == [("t@1", (lost,))]


@pytest.mark.slow
def test_nothing_is_lost_of_either_source_under_kills(two: Two, copied: Callable[[Engine], Engine]) -> None:
    """A worker that reads both is killed again and again, and one source is put back to a dump on the way."""
    meant: dict[str, set[UUID]] = {"t": set(), "t@1": set()}
    before = lost = set[UUID]()
    for number in range(KILLS):
        if number == KILLS // 3:  # what comes after this is lost
            two.close()
            dump = copied(two.branches[1].engine)
            two.connect()
            before = set(meant["t@1"])
        if number == 2 * KILLS // 3:
            two.close()
            two.branches[1].engine, two.branches[1].app = dump, Outbox(dump, settings=two.settings)
            two.connect()
            lost, meant["t@1"] = meant["t@1"] - before, before
        for feed, branch in zip(meant, two.branches, strict=True):
            meant[feed] |= set(branch.send(*range(EACH)))
        # Only what was consumed before it is lost is told as a loss: of that there is some in each run.
        losing = meant["t@1"] - before if KILLS // 3 <= number < 2 * KILLS // 3 else set[UUID]()
        with spoken_to(read_all) as pipe:
            pipe.send((address(two.head), [address(each.engine) for each in two.branches]))
            least = len(two.ledger()) + random.randrange(1, EACH)  # noqa: S311
            wait_until(partial(has_come, two, least, losing), "it has handled some; then it is killed")
    with spoken_to(read_all) as pipe:
        pipe.send((address(two.head), [address(each.engine) for each in two.branches]))
        for feed, ids in meant.items():
            wait_until(partial(has_all, two, feed, ids), f"{feed} is handled")
    effects = two.rows("SELECT message_id FROM ledger")
    assert len(effects) == len(set(effects))
    assert set(effects) - lost == meant["t"] | meant["t@1"]
    assert two.rows("SELECT DISTINCT topic FROM outbox.log_loss") == ["t@1"]
    told = set(two.rows("SELECT unnest(message_ids) FROM outbox.log_loss"))
    assert told == lost & set(effects)


def has_come(two: Two, least: int, some_of: set[UUID]) -> bool:
    """Tell whether so many messages took effect, and one of these."""
    done = two.rows("SELECT message_id FROM ledger")
    return len(done) >= least and (not some_of or not some_of.isdisjoint(done))


def has_all(two: Two, feed: str, ids: set[UUID]) -> bool:
    """Tell whether the inbox has all of these messages of a feed."""
    return ids <= set(two.rows("SELECT message_id FROM outbox.consumer_message WHERE topic = :feed", feed=feed))


def test_a_copy_that_lives_beside_its_original(two: Two, copied: Callable[[Engine], Engine]) -> None:
    """A worker that reads from both is refused, by name; with an id of its own, the copy is another source."""
    two.branches[0].send("a0")
    two.close()
    engine = copied(two.branches[0].engine)
    two.sink.consumer("t", group="g", source=[two.branches[0].engine, engine])(record)
    with (
        pytest.raises(InvalidSettings, match=r"have one id: one is a copy of the other.*new-source"),
        Worker(two.sink),
    ):
        pass
    with engine.begin() as connection:
        old, new = renew(connection, two.settings.schema)
    assert old == two.branches[0].id != new
    with Worker(two.sink):
        wait_until(lambda: two.rows("SELECT id FROM outbox.message_source ORDER BY number") == [old, new], "both met")
        wait_until(lambda: two.ledger() == ["a0"], "the message of both took effect once")


def test_a_copied_consumer_follows_the_new_id(two: Two) -> None:
    """The groups of a consumer that was copied with its producer go on where they were."""
    consumers = two.declare()
    two.branches[1].send("b")
    two.consume(consumers)
    with two.branches[1].engine.begin() as connection:
        old, new = renew(connection, two.settings.schema)
    with two.head.begin() as connection:
        assert follow(connection, two.settings.schema, old, new)
        assert not follow(connection, two.settings.schema, old, uuid4())
        with pytest.raises(ActRefused, match=r"is another one here already, as t@1"):
            follow(connection, two.settings.schema, two.branches[0].id, new)
    assert meet(two.connection, two.sources[1], two.settings.schema, "t").number == 1
    two.consume(two.declare_anew())
    assert two.ledger() == ["b"]


def test_a_database_that_consumes_its_own_messages_keeps_its_offsets(engine: Engine, settings: Settings) -> None:
    """`new-source` there changes both ends."""
    make_ledger(engine)
    app = Outbox(engine, settings=settings)
    app.consumer("t", group="g")(record)
    (consumer,) = [consumer_of(each, settings) for each in app.subscriptions["t", "g"].of_sources()]
    with engine.connect() as connection:
        consumer.start(connection, connection)
        _, new = renew(connection, settings.schema)
        connection.commit()
        assert meet(connection, connection, settings.schema, "t")[:2] == (0, new)


@pytest.mark.parametrize("names", [[], ["postgresql://h/a", "postgresql+psycopg://me:secret@h/a"]])
def test_sources_are_named_each_once(engine: Engine, names: list[str]) -> None:
    """None at all, or one twice, is refused where it is declared."""
    with pytest.raises(InvalidHandler, match="names a producer's database, or several, each once"):
        Outbox(engine).consumer("t", group="g", source=names)(record)


def test_a_worker_serves_both(two: Two) -> None:
    """All duties of a worker at both sources: consume, retry, prune, report."""
    two.sink.consumer("t", group="g", source=[each.engine for each in two.branches], threads=2)(record)
    for branch, name in zip(two.branches, "ab", strict=True):
        branch.send(*(f"{name}{number}" for number in range(20)))
    with Worker(two.sink):
        wait_until(lambda: len(two.ledger()) == 40, "all took effect")
    assert len(set(two.ledger())) == 40


@pytest.mark.parametrize("options", [{}, {"transactional": False}])
def test_an_address_that_leads_to_another_source(two: Two, options: dict[str, Any], server: ServerLike) -> None:
    """A worker that is connected anew, and to another database, takes nothing of it for what it had before."""
    names = [str(each.engine.url.database) for each in two.branches]
    for branch, name in zip(two.branches, "ab", strict=True):
        branch.send(name)
    ward = Ward()
    two.sink.consumer("t", group="g", source=two.branches[0].engine, **options)(ward)
    two.close()
    with Worker(two.sink):
        wait_until(lambda: ward.done == ["a"], "the first source is read")
        for branch in two.branches:
            branch.engine.dispose()
        with create_engine(server.url("postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as admin:
            admin.execute(text(f'ALTER DATABASE "{names[0]}" ALLOW_CONNECTIONS false'))
            end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = ANY (:names)"
            admin.execute(text(end), {"names": names})
            for old, new in ((names[0], "aside"), (names[1], names[0])):
                admin.execute(text(f'ALTER DATABASE "{old}" RENAME TO "{new}"'))
        wait_until(lambda: ward.done == ["a", "b"], "the other one is read from its beginning")
    with create_engine(server.url("postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as admin:
        for old, new in ((names[0], names[1]), ("aside", names[0])):
            admin.execute(text(f'ALTER DATABASE "{old}" RENAME TO "{new}"'))
        admin.execute(text(f'ALTER DATABASE "{names[0]}" ALLOW_CONNECTIONS true'))
    two.connect()
    assert two.rows("SELECT topic FROM outbox.consumer_message ORDER BY position, topic") == ["t", "t@1"]
    assert two.rows("SELECT count(*) FROM outbox.log_loss") == [0]


def test_each_source_learns_what_became_of_its_own_messages(two: Two) -> None:
    """Confirm passes of both producers, of which each asks about its own feed."""
    consumers = two.declare()
    for branch in two.branches:
        branch.send("a message")
    consume_all(consumers[1], two.connection, two.sources[1])
    settings = replace(two.settings, confirm_grace=0.0)
    for source in two.sources:
        group = KnownGroup("t", "g", consumer=two.head)
        confirm_once(source, settings, groups=[group], callbacks={})
    known = text("SELECT max(position) FROM outbox.delivery_cursor CROSS JOIN unnest(positions) position")
    assert [source.scalar(known) for source in two.sources] == [0, 1]
    assert not any(source.scalars(text("SELECT half_id FROM outbox.delivery")).all() for source in two.sources)


@pytest.mark.parametrize("number", [0, 1])
def test_a_compensation_quarantines_the_feed_of_its_source(two: Two, number: int) -> None:
    """The group steps over the message at that source, and over none at the other one."""
    consumers = two.declare()
    ids = [branch.send(name)[0] for branch, name in zip(two.branches, "ab", strict=True)]
    branch = two.branches[number]
    branch.app.compensation("t", consumers=[two.head])(lambda message, session: None)
    Operator(Databases([Database("a", branch.engine, two.settings, frozenset({"producer"}))])).compensate(
        ids[number], by="ada", why="no such account"
    )
    with branch.engine.connect() as connection:
        made: dict[str, Any] = {
            "compensations": branch.app.compensations,
            "new_runner": lambda _: EngineRunner(branch.engine),
        }
        assert compensate_once(connection, two.settings, **made).done == 1
    two.consume(consumers)
    assert two.ledger() == ["ba"[number]]
    rows = two.rows("SELECT topic || ' ' || status FROM outbox.consumer_message ORDER BY 1")
    assert rows == (["t quarantined", "t@1 consumed"] if number == 0 else ["t consumed", "t@1 quarantined"])
