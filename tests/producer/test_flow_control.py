"""Flow control: producers are refused while too much of a topic waits, and nothing else ever is."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Orphan, Outbox, Resolution, Settings
from outbox.check.once import check_fences
from outbox.database.execute import Statement, execute
from outbox.embedded import ServerLike
from outbox.errors import OutboxBusy, SchemaMissing
from outbox.producer import flow_control
from outbox.testing import check, drain
from outbox.worker import Worker
from tests.consumer.support import Bench, make_ledger
from tests.kit import wait_until
from tests.producer.backlog import FURTHER_TABLES, dispatch_all, prepare_many, send_many
from tests.producer.bank import (
    KINDS,
    Databases,
    Kind,
    change,
    changes,
    create_business_tables,
    drive,
    halves,
    messages,
    op_of,
    opened,
    pid_of,
    settle,
    waits_for_a_lock,
    write,
)
from tests.producer.conftest import SECOND_SCHEMA
from tests.producer.test_round_trips import Proxy

#: Which limits concern what is sent, and what is prepared.
CONCERNED = (("send", "max_undispatched"), ("prepare", "max_undispatched"), ("prepare", "max_undecided"))
FILL: dict[str, Callable[..., None]] = {"max_undispatched": send_many, "max_undecided": prepare_many}
WHAT = {"max_undispatched": "undispatched messages", "max_undecided": "undecided halves"}


@pytest.fixture(autouse=True)
def cleared(engine: Engine) -> Iterator[None]:
    """Leave no message behind, and begin with none."""
    for last in (False, True):
        with engine.begin() as connection:
            connection.execute(text(f"TRUNCATE {FURTHER_TABLES}"))
        if not last:
            yield


@pytest.fixture
def always_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe no count: each transaction counts itself."""
    monkeypatch.setattr(flow_control, "INTERVAL", 0.0)
    monkeypatch.setattr(flow_control, "PATIENCE", 0.0)


@pytest.fixture
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe the first count to the end of the test."""
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of statements of each count so far."""
    seen: list[int] = []

    def spy(connection: Connection, *statements: Statement) -> Any:
        seen.append(len(statements))
        return execute(connection, *statements)

    monkeypatch.setattr(flow_control, "execute", spy)
    return seen


def limited(engine: Engine, setting: str = "max_undispatched", limit: int = 3, **settings: Any) -> Outbox:
    """Return an outbox with a limit."""
    settings |= {setting: limit, "listen": False}
    return Outbox(engine, settings=Settings(**settings))


def tell(outbox: Outbox, engine: Engine, number: int, topic: str = "t") -> None:
    """Make a change and send a message about it, in a transaction."""
    with engine.begin() as connection:
        connection.execute(insert(change).values(number=number))
        outbox.send(connection, topic, {"number": number})


def accepted(act: Callable[[], object]) -> bool:
    """Try once, as a producer does that tries again later."""
    try:
        act()
    except OutboxBusy:
        return False
    return True


def forget(outbox: Outbox) -> None:
    """Have the outbox count anew, as it does when its last count was long ago."""
    flow = outbox._producer._flow
    assert flow is not None
    for gauges in flow._gauges.values():
        for gauge in gauges:
            gauge.until = 0.0


# --- what is refused, and when -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "setting"), CONCERNED)
def test_full_topic(how: str, setting: str, kind: Kind, url: str, engine: Engine, counted_once: None) -> None:
    """The commit that finds the topic full writes nothing, change included; from then on, sending itself is refused."""
    FILL[setting](engine, 3)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(**{setting: 3}))  # type: ignore[arg-type]
        refused = f"topic 't' has reached its limit of 3 {WHAT[setting]} .setting {setting}; 3 counted.: nothing"
        async with opened(kind, databases) as carrier:
            await write(carrier, 1)
            getattr(outbox, how)(carrier, "t", {"number": 1})
            with pytest.raises(OutboxBusy, match=refused) as caught:
                await settle(carrier.commit())
            busy = caught.value
            assert (busy.topic, busy.what, busy.waiting, busy.limit, busy.setting) == (
                "t",
                WHAT[setting],
                3,
                3,
                setting,
            )
            await settle(carrier.rollback())

            await write(carrier, 2)
            with pytest.raises(OutboxBusy, match=refused):
                getattr(outbox, how)(carrier, "t", {"number": 2})
            await settle(carrier.commit())

            # Of another topic, on the same connection.
            await write(carrier, 3)
            getattr(outbox, how)(carrier, "other", {"number": 3})
            await settle(carrier.commit())

    before = len(halves(engine))
    drive(url, act)
    assert changes(engine) == {2, 3}
    assert [half.body["number"] for half in halves(engine) if half.topic == "other"] == [3]
    assert len(halves(engine)) == before + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("how", "setting"), CONCERNED)
def test_topic_below_its_limit(how: str, setting: str, kind: Kind, url: str, engine: Engine) -> None:
    """One less than the limit: the message is written, and the count leaves the transaction as it was."""
    FILL[setting](engine, 2)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(**{setting: 3}))  # type: ignore[arg-type]
        async with opened(kind, databases) as carrier:
            for number in (1, 2):
                await write(carrier, number)
                getattr(outbox, how)(carrier, "t", {"number": number})
                await settle(carrier.commit())

    drive(url, act)
    assert changes(engine) == {1, 2}
    assert len(halves(engine)) == 4


def test_undecided_halves_refuse_no_sends(engine: Engine, always_counted: None) -> None:
    """A limit on undecided halves concerns what is prepared: a message that is sent adds none."""
    prepare_many(engine, 5)
    outbox = limited(engine, "max_undecided")
    tell(outbox, engine, 1)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.send(connection, "t", {"number": 3})
        outbox.prepare(connection, "t", {"number": 4})
    assert messages(engine) == [1]


def test_send_beside_a_prepared_half(engine: Engine, counted_once: None) -> None:
    """Where a topic is full of undecided halves, a message to it is sent, also beside a half of another topic."""
    prepare_many(engine, 3)
    outbox = limited(engine, "max_undecided")
    for number in (1, 2):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number})
            outbox.prepare(connection, "other", {"number": number})
    assert messages(engine) == [1, 2]


def test_parked_halves_do_not_count(engine: Engine, always_counted: None) -> None:
    """Parked halves wait for a human, however many: producers aren't to blame for them."""
    prepare_many(engine, 50, parked=True)
    prepare_many(engine, 2)
    outbox = limited(engine, "max_undecided")
    with engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 1})
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})


def test_scheduled_messages_do_not_count(engine: Engine, always_counted: None) -> None:
    """A message that dispatch has put aside for later isn't undispatched."""
    outbox = limited(engine)
    for number in range(3):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number}, delay=3600)
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 3)
    dispatch_all(engine, outbox.settings)
    tell(outbox, engine, 4)
    assert changes(engine) == {4}


def test_both_limits(engine: Engine, always_counted: None) -> None:
    """With both limits, the one that is reached is named."""
    outbox = limited(engine, max_undecided=2)
    prepare_many(engine, 2)
    tell(outbox, engine, 1)
    with pytest.raises(OutboxBusy, match="max_undecided"), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})
    send_many(engine, 2)
    with pytest.raises(OutboxBusy, match="max_undispatched"):
        tell(outbox, engine, 3)


def test_one_full_topic_of_several(engine: Engine, always_counted: None) -> None:
    """A transaction that sends to several topics is refused as a whole, and told which one is full."""
    send_many(engine, 3, "full")
    outbox = limited(engine)
    with pytest.raises(OutboxBusy, match="'full'"), engine.begin() as connection:
        connection.execute(insert(change).values(number=1))
        for topic in ("a", "full", "b"):
            outbox.send(connection, topic, {"number": 1})
    assert (changes(engine), {half.topic for half in halves(engine)}) == (set(), {"full"})


def test_two_schemas(engine: Engine, always_counted: None) -> None:
    """Each schema has its own topics; a transaction over both is refused as a whole."""
    send_many(engine, 3, schema=SECOND_SCHEMA)
    first, second = limited(engine), limited(engine, schema=SECOND_SCHEMA)
    tell(first, engine, 1)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        connection.execute(insert(change).values(number=2))
        first.send(connection, "t", {"number": 2})
        second.send(connection, "t", {"number": 2})
    assert (changes(engine), messages(engine), len(messages(engine, SECOND_SCHEMA))) == ({1}, [1], 3)


def test_two_databases(engine: Engine, new_engine: Callable[..., Engine], counted_once: None) -> None:
    """What an outbox knows of one database it doesn't believe of another that it is used with."""
    other = new_engine()
    send_many(other, 3)
    outbox = limited(engine)
    with pytest.raises(OutboxBusy), other.begin() as connection:
        outbox.send(connection, "t", {"number": 1})
    tell(outbox, engine, 2)
    with Session(engine) as session:
        outbox.send(session, "t", {"number": 3})
        session.commit()
    with other.connect() as connection, pytest.raises(OutboxBusy):
        outbox.send(connection, "t", {"number": 4})
    # A session on another engine might come to use the outbox's own: only its COMMIT tells.
    with Session(other) as session:
        outbox.send(session, "t", {"number": 5})
        with pytest.raises(OutboxBusy):
            session.commit()
    assert (messages(engine), messages(other)) == ([2, 3], [0, 0, 0])


def test_full_database_of_the_outbox_itself(engine: Engine, new_engine: Callable[..., Engine]) -> None:
    """A session that leads to another database isn't refused for what waits in that of the outbox."""
    other = new_engine()
    send_many(engine, 3)
    outbox = limited(engine)
    assert not accepted(lambda: tell(outbox, engine, 1))
    with Session(other) as session:
        outbox.send(session, "t", {"number": 2})
        session.commit()
    assert messages(other) == [2]


def test_engines_that_share_a_pool(engine: Engine, counts: list[int], counted_once: None) -> None:
    """An engine with options of its own leads to the same database: it isn't counted anew for each."""
    outbox = limited(engine)
    for number in range(5):
        tell(outbox, engine.execution_options(isolation_level="READ COMMITTED"), number)
    assert len(counts) == 1
    assert len(messages(engine)) == 5


def test_unknown_carrier_is_refused_as_ever(engine: Engine) -> None:
    """A limit changes nothing in what is said to somebody who passes no session."""
    outbox = limited(engine)
    for carrier in (None, "session", Session, engine):
        with pytest.raises(ValueError, match="is sent with a Session"):
            outbox.send(carrier, "t", {})  # type: ignore[arg-type]


def test_database_without_tables(server: ServerLike) -> None:
    """Where the tables are missing, a limit that can't be counted says so as a send does."""
    server.create_database("flow_empty")
    engine = create_engine(server.url("flow_empty"))
    try:
        outbox = limited(engine, max_undecided=3)
        with pytest.raises(SchemaMissing, match="outbox db upgrade"), engine.begin() as connection:
            outbox.prepare(connection, "t", {"number": 1})
    finally:
        engine.dispose()
        server.drop_database("flow_empty")


def test_error_survives_pickling() -> None:
    """A process pool hands the error on with all that it says."""
    busy = OutboxBusy("t", "undecided halves", 7, 5, "max_undecided")
    again = pickle.loads(pickle.dumps(busy))  # noqa: S301
    assert (str(again), vars(again)) == (str(busy), vars(busy))


# --- what counting costs -----------------------------------------------------------------------------------


def test_off_by_default(engine: Engine, counts: list[int]) -> None:
    """Without limits, nothing is counted, and sending stays one statement."""
    send_many(engine, 100)
    prepare_many(engine, 100)
    outbox = Outbox(engine)
    with Session(engine) as session:
        outbox.send(session, "t", {"number": 1})
        outbox.prepare(session, "t", {"number": 2})
        session.commit()
    assert counts == []


@pytest.mark.parametrize("limits", [{}, {"max_undispatched": 50}, {"max_undispatched": 50, "max_undecided": 50}])
def test_round_trips(limits: dict[str, int], engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from the wire, a limit costs nothing while the last count is believed, and one round trip when it is due."""
    assert engine.url.host
    assert engine.url.port
    proxy = Proxy(engine.url.host, engine.url.port)
    through = create_engine(engine.url.set(host="127.0.0.1", port=proxy.port), pool_size=1, max_overflow=0)
    outbox = Outbox(through, settings=Settings(listen=False, **limits))  # type: ignore[arg-type]

    def round_trips(messages: int) -> int:
        with Session(through) as session:
            session.execute(text("SELECT 1"))
            for number in range(messages):
                outbox.send(session, "t", {"number": number})
                outbox.prepare(session, "u", {"number": number})
            before = proxy.round_trips
            session.commit()
            return proxy.round_trips - before

    try:
        for due in (True, False):
            monkeypatch.setattr(flow_control, "INTERVAL", 0.0 if due else 3600.0)
            monkeypatch.setattr(flow_control, "PATIENCE", 0.0)
            # Each connection prepares a statement when it meets it for the first time, and the first one counts.
            first = [round_trips(n) for n in (0, 1, 2)]
            assert [round_trips(n) for n in (0, 1, 2)] == ([1, 2, 2] if due and limits else [1, 1, 1]), first
    finally:
        through.dispose()
        proxy.close()


def test_known_to_be_full_costs_nothing(engine: Engine, counts: list[int], counted_once: None) -> None:
    """Where the topic is known to be full, a send is refused without a connection."""
    send_many(engine, 3)
    outbox = limited(engine)
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 1)
    # The statements of one count, all in one round trip: planner aside, the limit, planner back.
    assert counts == [3]
    taken: list[Any] = []
    event.listen(engine.pool, "checkout", lambda *args: taken.append(args))
    with Session(engine) as session:
        for _ in range(3):
            with pytest.raises(OutboxBusy):
                outbox.send(session, "t", {"number": 2})
    with pytest.raises(OutboxBusy):
        outbox.transactional(topic="t")(lambda session=INJECTED: {"number": 3})()
    assert (counts, taken) == ([3], [])


def test_only_what_is_concerned_is_counted(engine: Engine, counts: list[int], always_counted: None) -> None:
    """A transaction that prepares nothing doesn't count undecided halves."""
    outbox = limited(engine, max_undecided=3)
    tell(outbox, engine, 1)
    with engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 2})
    assert counts == [3, 4]


@pytest.mark.parametrize(("took", "believed"), [(0.001, 1.0), (0.04, 1.0), (0.2, 4.0), (60.0, 10.0)])
def test_how_long_a_count_is_believed(
    took: float, believed: float, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a second; one that took its time for longer, so that counting can't become the load, but never for long."""
    clock = SimpleNamespace(now=1000.0)

    def slow(connection: Connection, *statements: Statement) -> Any:
        clock.now += took
        return execute(connection, *statements)

    monkeypatch.setattr(flow_control, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(flow_control, "execute", slow)
    outbox = limited(engine)
    send_many(engine, 3)
    assert not accepted(lambda: tell(outbox, engine, 1))
    dispatch_all(engine, outbox.settings)
    clock.now += believed - 0.01
    assert not accepted(lambda: tell(outbox, engine, 2))
    clock.now += 0.02
    assert accepted(lambda: tell(outbox, engine, 3))


@pytest.mark.parametrize(
    "own", [None, "SET LOCAL enable_seqscan = off", "SET jit = off", "SET enable_bitmapscan = off"]
)
def test_planner_of_the_caller(own: str | None, engine: Engine, always_counted: None) -> None:
    """What the count asks of the planner is gone when deferred triggers run in the COMMIT; what was asked is kept."""
    names = ("enable_seqscan", "enable_bitmapscan", "jit")
    current = " || ' ' || ".join(f"current_setting('{name}')" for name in names)
    setup = f"""
        CREATE TABLE seen (settings text);
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO seen SELECT {current}; RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER see AFTER INSERT ON change DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION see()
    """
    with engine.begin() as connection:
        connection.exec_driver_sql(setup)
    outbox = limited(engine)
    try:
        with engine.connect() as connection:
            for number in (1, 2):
                if own:
                    connection.exec_driver_sql(own)
                asked = connection.exec_driver_sql(f"SELECT {current}").scalar_one()
                connection.execute(insert(change).values(number=number))
                outbox.send(connection, "t", {"number": number})
                connection.commit()
                assert connection.exec_driver_sql("SELECT settings FROM seen").scalars().all() == [asked] * number
                after = connection.exec_driver_sql(f"SELECT {current}").scalar_one()
                assert (after == asked) is not (own or "").startswith("SET LOCAL")
                connection.rollback()
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE seen; DROP TRIGGER see ON change; DROP FUNCTION see()")
        engine.dispose()


def test_one_counts_and_the_others_go_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one transaction waits for its count, others go by the last one, and don't wait."""
    outbox = limited(engine)
    tell(outbox, engine, 1)  # counts, and finds room
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)
    forget(outbox)
    pids: list[int] = []

    def slow() -> None:
        with engine.begin() as connection:
            pids.append(pid_of(connection))
            outbox.send(connection, "t", {"number": 2})

    with engine.begin() as locking:
        locking.execute(text("LOCK TABLE outbox.dispatch_cursor IN ACCESS EXCLUSIVE MODE"))
        thread = threading.Thread(target=slow)
        thread.start()
        wait_until(lambda: pids and waits_for_a_lock(engine, pids[0]), "the count waits for the table")
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '10s'"))
            outbox.send(connection, "t", {"number": 3})
        assert messages(engine) == [1, 3]
    thread.join()
    assert messages(engine) == [1, 3, 2]


def test_count_that_fails_is_made_again(engine: Engine, counted_once: None) -> None:
    """A count that fails fails its transaction, as any statement does; the next one counts again."""
    send_many(engine, 3)
    outbox = limited(engine)
    with engine.begin() as locking:
        locking.execute(text("LOCK TABLE outbox.dispatch_cursor IN ACCESS EXCLUSIVE MODE"))
        with pytest.raises(OperationalError, match="lock timeout"), engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '10ms'"))
            connection.execute(insert(change).values(number=1))
            outbox.send(connection, "t", {"number": 1})
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 2)
    assert changes(engine) == set()


# --- how it ends -------------------------------------------------------------------------------------------


def test_producers_go_on_after_the_dispatch(engine: Engine) -> None:
    """When the backlog is dispatched, producers that try again are accepted by themselves."""
    send_many(engine, 3)
    outbox = limited(engine)
    with Session(engine) as session:

        def attempt() -> None:
            with session.begin():
                session.execute(insert(change).values(number=1))
                outbox.send(session, "t", {"number": 1})

        assert not accepted(attempt)
        assert not accepted(attempt)
        dispatch_all(engine, outbox.settings)
        wait_until(lambda: accepted(attempt), "the producer is accepted again")
    assert changes(engine) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_producers_go_on_after_decisions(kind: Kind, url: str, engine: Engine) -> None:
    """When halves are decided, producers that prepare are accepted again; the decisions were never refused."""

    async def act(databases: Databases) -> None:
        limits = Settings(max_undecided=2, max_undispatched=1, listen=False)
        outbox = Outbox(databases.engine_for(kind), settings=limits)
        async with opened(kind, databases) as carrier:

            async def prepare(number: int) -> Any:
                half_id = outbox.prepare(carrier, "t", {"number": number})
                await settle(carrier.commit())
                return half_id

            async def decide(half_id: Any, resolution: Resolution) -> None:
                decision = outbox.commit if resolution is Resolution.COMMIT else outbox.rollback
                await write(carrier, len(changes(engine)))
                decision(half_id, within=carrier)
                await settle(carrier.commit())

            ids = [await prepare(number) for number in range(2)]
            forget(outbox)
            with pytest.raises(OutboxBusy, match="max_undecided"):
                await prepare(2)
            await settle(carrier.rollback())
            with pytest.raises(OutboxBusy, match="max_undecided"):
                await prepare(2)
            await settle(carrier.rollback())
            await decide(ids[0], Resolution.COMMIT)
            await decide(ids[1], Resolution.ROLLBACK)
            # The half that was committed is more than may be undispatched.
            forget(outbox)
            with pytest.raises(OutboxBusy, match="max_undispatched"):
                await prepare(3)
            await settle(carrier.rollback())
            dispatch_all(engine, limits)
            for _ in range(600):
                try:
                    await prepare(4)
                    break
                except OutboxBusy:
                    await settle(carrier.rollback())
                    await asyncio.sleep(0.01)  # the outbox believes a count for a while

    drive(url, act)
    assert [half.body["number"] for half in halves(engine)] == [0, 1, 4]
    assert changes(engine) == {0, 1}


def test_producer_beside_a_worker_that_starts_late(new_engine: Callable[..., Engine]) -> None:
    """Without a worker the producer is stopped at its limit; with one, it gets all its messages through."""
    engine = new_engine()
    outbox = limited(engine, limit=20, idle_wait=0.01)
    handled = []
    outbox.consumer("t", group="g")(lambda message, session: handled.append(message.body["number"]))

    def attempt(number: int) -> None:
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number})

    number = 0
    while number < 100:
        forget(outbox)
        if not accepted(lambda: attempt(number)):  # noqa: B023
            break
        number += 1
    assert number == 20
    with Worker(outbox):
        for number in range(20, 60):
            wait_until(lambda: accepted(lambda: attempt(number)), "the producer is accepted")  # noqa: B023
        wait_until(lambda: len(handled) == 60, "all messages are handled")
    assert sorted(handled) == list(range(60))


# --- what is never refused ---------------------------------------------------------------------------------


def test_decisions_and_checks_are_never_refused(engine: Engine, always_counted: None) -> None:
    """In topics that are full by both limits, halves are committed, rolled back, checked and resolved."""
    outbox = limited(engine, max_undecided=3)
    with engine.begin() as connection:
        ids = [outbox.prepare(connection, "t", {"number": number}) for number in range(5)]
    send_many(engine, 5)
    prepare_many(engine, 4, "fenced", fenced=True)
    with pytest.raises(OutboxBusy), engine.begin() as connection:
        outbox.prepare(connection, "t", {"number": 9})

    outbox.commit(ids[0])
    outbox.rollback(ids[1])
    with engine.begin() as connection:
        outbox.commit(ids[2], within=connection)

    @outbox.checker("t")
    def answer(orphan: Orphan) -> Resolution:
        return Resolution.COMMIT if orphan.id == ids[3] else Resolution.UNKNOWN

    check(outbox)
    outbox.operator.rollback(ids[4], by="me", why="test")
    with engine.connect() as connection:
        check_fences(connection, outbox.settings)
    assert [op_of(engine, half_id) for half_id in ids] == [
        ("commit", "producer"),
        ("rollback", "producer"),
        ("commit", "producer"),
        ("commit", "check"),
        ("rollback", "operator"),
    ]
    with engine.begin() as connection:
        outbox.prepare(connection, "fenced", {"number": 9})


def test_functions_in_two_phases(engine: Engine, always_counted: None) -> None:
    """A function isn't run when its half is refused; one that runs already decides, however full the topic became."""
    outbox = limited(engine, "max_undecided", 2, max_undispatched=2)
    ran: list[int] = []

    @outbox.two_phase(topic="t", body=lambda number: {"number": number})
    def act(number: int, session: Session = INJECTED) -> None:
        ran.append(number)
        session.execute(insert(change).values(number=number))
        prepare_many(engine, 2)
        send_many(engine, 2)

    act(1)
    with pytest.raises(OutboxBusy, match="2 counted"):
        act(2)
    assert (ran, changes(engine), messages(engine)) == ([1], {1}, [0, 0, 1])


def test_async_functions_in_two_phases(url: str, engine: Engine, always_counted: None) -> None:
    """An async function isn't run either when its half is refused."""
    prepare_many(engine, 1)

    async def run() -> None:
        async_engine = create_async_engine(url)
        outbox = Outbox(async_engine, settings=Settings(max_undecided=2))
        ran: list[int] = []

        @outbox.two_phase(topic="t", body=lambda number: {"number": number})
        async def act(number: int, session: AsyncSession = INJECTED) -> None:
            ran.append(number)
            await session.execute(insert(change).values(number=number))
            prepare_many(engine, 2)

        await act(1)
        with pytest.raises(OutboxBusy, match="max_undecided"):
            await act(2)
        assert ran == [1]
        await async_engine.dispose()

    asyncio.run(run())
    assert changes(engine) == {1}


def test_transactional_function(engine: Engine, always_counted: None) -> None:
    """A function whose message is refused has changed nothing; one that sends nothing isn't refused."""
    send_many(engine, 3)
    outbox = limited(engine)

    @outbox.transactional(topic="t")
    def act(number: int, tells: bool, session: Session = INJECTED) -> dict[str, int] | None:
        session.execute(insert(change).values(number=number))
        return {"number": number} if tells else None

    for number, tells in ((1, True), (2, False), (3, True)):
        accepted(lambda: act(number, tells))  # noqa: B023
    assert changes(engine) == {2}


@pytest.mark.parametrize("batch", [1, 10])
@pytest.mark.parametrize("known", [False, True])
def test_consumer_that_sends(batch: int, known: bool, new_engine: Callable[..., Engine], counted_once: None) -> None:
    """A handler whose message is refused is an attempt that failed: retried, until there is room, with one effect."""
    engine = new_engine()
    make_ledger(engine)
    create_business_tables(engine)
    outbox = limited(engine)

    def handle(message: Any, session: Session) -> None:
        session.execute(text("INSERT INTO ledger (message_id, body) VALUES (:id, 'x')"), {"id": message.id})
        outbox.send(session, "next", message.body)

    with Bench(engine, engine, Settings(listen=False)) as bench:
        bench.send({"number": 1})
        consumer = bench.declare(handle, batch=batch)
        send_many(engine, 3, "next")
        if known:
            assert not accepted(lambda: tell(outbox, engine, 0, "next"))
        bench.consume(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("failed", 1)], [])
        ((_, _, error),) = [(row.status, row.attempts, row.error) for row in bench.inbox().values()]
        assert "'next' has reached its limit of 3 undispatched messages" in str(error)
        bench.retry(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("failed", 2)], [])
        bench.dispatch()
        forget(outbox)
        bench.retry(consumer)
        assert (bench.statuses(), bench.ledger()) == ([("consumed", 3)], ["x"])
    assert [half.body["number"] for half in halves(engine) if half.topic == "next"] == [0, 0, 0, 1]


def test_drain_of_a_chain(new_engine: Callable[..., Engine], always_counted: None) -> None:
    """Consumers that pass messages on stay below the limits while dispatch keeps up."""
    engine = new_engine()
    outbox = limited(engine, limit=50)
    passed = []

    @outbox.consumer("t", group="g")
    def on_first(message: Any, session: Session) -> None:
        outbox.send(session, "u", message.body)

    @outbox.consumer("u", group="g")
    def on_second(message: Any, session: Session) -> None:
        passed.append(message.body["number"])

    for number in range(40):
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": number})
    drain(outbox)
    assert sorted(passed) == list(range(40))


# --- transactions of every kind ----------------------------------------------------------------------------


def test_what_counts_is_the_commit(engine: Engine, always_counted: None) -> None:
    """A long transaction is judged when it commits: it is refused if the topic filled since it sent, or let through."""
    outbox = limited(engine)
    with engine.connect() as early, engine.connect() as late:
        early.execute(insert(change).values(number=1))
        outbox.send(early, "t", {"number": 1})
        send_many(engine, 3)
        late.execute(insert(change).values(number=2))
        outbox.send(late, "t", {"number": 2})
        with pytest.raises(OutboxBusy):
            early.commit()
        early.rollback()
        dispatch_all(engine, outbox.settings)
        late.commit()
    assert changes(engine) == {2}


def test_long_transaction_elsewhere(engine: Engine, always_counted: None) -> None:
    """What a transaction has sent that isn't committed doesn't count; nor does it keep others from counting."""
    outbox = limited(engine)
    with engine.connect() as held:
        held.execute(text("SELECT pg_current_xact_id()"))
        for number in range(10):
            outbox.send(held, "t", {"number": number})
        dispatch_all(engine, outbox.settings)
        for number in range(20, 23):
            tell(outbox, engine, number)
        with pytest.raises(OutboxBusy):
            tell(outbox, engine, 23)
        dispatch_all(engine, outbox.settings)
        tell(outbox, engine, 24)
        held.commit()
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 25)
    dispatch_all(engine, outbox.settings)
    tell(outbox, engine, 26)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_snapshot_of_the_past(level: Any, engine: Engine, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that sees only what was long ago doesn't judge by it, and nobody else does."""
    send_many(engine, 3)
    outbox = limited(engine)
    with engine.connect().execution_options(isolation_level=level) as old:
        old.execute(text("SELECT count(*) FROM outbox.op_message")).one()
        old.execute(insert(change).values(number=1))
        outbox.send(old, "t", {"number": 1})
        dispatch_all(engine, outbox.settings)
        monkeypatch.setattr(flow_control, "INTERVAL", 0.0)  # whatever is older than that is long ago
        old.commit()
    monkeypatch.setattr(flow_control, "INTERVAL", 3600.0)
    send_many(engine, 2)
    with pytest.raises(OutboxBusy):
        tell(outbox, engine, 2)
    assert (changes(engine), len(counts)) == ({1}, 2)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_young_snapshot(level: Any, engine: Engine, counted_once: None) -> None:
    """Also where all transactions run at a higher level, the limit holds."""
    send_many(engine, 3)
    outbox = limited(engine)
    strict = engine.execution_options(isolation_level=level)
    for number in (1, 2):
        with pytest.raises(OutboxBusy):
            tell(outbox, strict, number)
    assert changes(engine) == set()


def test_savepoints(engine: Engine, always_counted: None) -> None:
    """A message that vanished with its savepoint is nobody's business; one that didn't fails the whole transaction."""
    send_many(engine, 3)
    outbox = limited(engine)
    for keeps in (False, True):
        with Session(engine) as session:
            session.execute(insert(change).values(number=1 + keeps))
            savepoint = session.begin_nested()
            outbox.send(session, "t", {"number": 1})
            (savepoint.commit if keeps else savepoint.rollback)()
            outbox.send(session, "other", {"number": 1})
            accepted(session.commit)
    assert (changes(engine), len(halves(engine))) == ({1}, 4)


def test_refused_in_a_savepoint(engine: Engine, counted_once: None) -> None:
    """Where the topic is known to be full, only the savepoint fails, and the transaction may go on without it."""
    send_many(engine, 3)
    outbox = limited(engine)
    accepted(lambda: tell(outbox, engine, 0))
    with Session(engine) as session, session.begin():
        session.execute(insert(change).values(number=1))
        with pytest.raises(OutboxBusy), session.begin_nested():
            session.execute(insert(change).values(number=2))
            outbox.send(session, "t", {"number": 2})
        outbox.send(session, "other", {"number": 3})
    assert changes(engine) == {1}
    assert messages(engine) == [0, 0, 0, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("known", [False, True])
def test_message_that_begins_the_transaction(known: bool, kind: Kind, url: str, engine: Engine) -> None:
    """A carrier in no transaction yet is usable at once after a refusal, and nothing stays open."""
    send_many(engine, 3)

    async def act(databases: Databases) -> None:
        outbox = Outbox(databases.engine_for(kind), settings=Settings(max_undispatched=3, max_undecided=3))
        async with opened(kind, databases) as carrier:
            for number in range(3):
                if not known:
                    forget(outbox)
                with pytest.raises(OutboxBusy):
                    outbox.send(carrier, "t", {"number": number})
                    await settle(carrier.commit())
                await settle(carrier.rollback())
                assert not carrier.in_transaction()
        dispatch_all(engine, outbox.settings)
        forget(outbox)
        async with opened(kind, databases) as carrier:
            outbox.send(carrier, "t", {"number": 9})
            await settle(carrier.commit())

    drive(url, act)
    assert messages(engine) == [0, 0, 0, 9]


def prepared_transactions(engine: Engine) -> int:
    """Count what is prepared in this database by PREPARE TRANSACTION."""
    with engine.connect() as connection:
        sql = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
        return int(connection.scalar(text(sql)) or 0)


@pytest.mark.parametrize("prepare", [True, False])
def test_two_phase_commit_of_a_connection(prepare: bool, engine: Engine, always_counted: None) -> None:
    """PREPARE TRANSACTION, or the commit without it, is refused; the connection is usable, nothing is prepared."""
    send_many(engine, 3)
    outbox = limited(engine)
    small = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
    with small.connect() as connection:
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=1))
        outbox.send(connection, "t", {"number": 1})
        with pytest.raises(OutboxBusy):
            transaction.prepare() if prepare else transaction.commit()
        transaction.rollback()
        assert prepared_transactions(engine) == 0
        dispatch_all(engine, outbox.settings)
        transaction = connection.begin_twophase()
        connection.execute(insert(change).values(number=2))
        outbox.send(connection, "t", {"number": 2})
        transaction.prepare()
        # What was counted locks nothing that dispatch or a check would need.
        dispatch_all(engine, outbox.settings)
        prepare_many(engine, 1, "fenced", fenced=True)
        with engine.connect() as checking:
            assert check_fences(checking, outbox.settings).done == 1
        transaction.commit()
    small.dispose()
    assert (changes(engine), messages(engine)) == ({2}, [0, 0, 0, 2])


def test_two_phase_commit_over_two_engines(engine: Engine, always_counted: None) -> None:
    """One database that refuses makes both roll back."""
    other = create_engine(engine.url)
    first, second = limited(engine), limited(other, schema=SECOND_SCHEMA)
    send_many(engine, 3, schema=SECOND_SCHEMA)
    with Session(twophase=True) as session:
        for number in (1, 2):
            session.connection(bind_arguments={"bind": engine}).execute(insert(change).values(number=number))
            session.connection(bind_arguments={"bind": other}).execute(insert(change).values(number=10 + number))
            first.send(session, "t", {"number": number})
            second.send(session, "t", {"number": number})
            if number == 1:
                with pytest.raises(OutboxBusy):
                    session.commit()
                session.rollback()
                assert prepared_transactions(engine) == 0
                dispatch_all(engine, second.settings)
            else:
                session.commit()
    other.dispose()
    assert changes(engine) == {2, 12}
    assert (messages(engine), messages(engine, SECOND_SCHEMA)) == ([2], [0, 0, 0, 2])


def test_refused_commit_in_a_hook_of_the_session(engine: Engine, always_counted: None) -> None:
    """A message that a flush hook sends inside the commit is refused with it."""
    send_many(engine, 3)
    outbox = limited(engine)
    with Session(engine) as session:
        event.listen(session, "before_commit", lambda s: outbox.send(s, "t", {"number": 1}), once=True)
        session.execute(insert(change).values(number=1))
        with pytest.raises(OutboxBusy):
            session.commit()
        session.rollback()
        session.execute(insert(change).values(number=2))
        session.commit()
    assert changes(engine) == {2}
