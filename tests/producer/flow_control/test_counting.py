"""What flow control's counting costs, and when producers are accepted again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import INJECTED, Outbox, Resolution, Settings
from outbox.database.execute import Statement, execute
from outbox.errors import OutboxBusy
from outbox.producer import flow_control
from outbox.worker import Worker
from tests.kit import at_once, dispatch_all, wait_until
from tests.producer.backlog import prepare_many, send_many
from tests.producer.bank import (
    KINDS,
    Databases,
    Kind,
    change,
    changes,
    drive,
    halves,
    messages,
    opened,
    pid_of,
    settle,
    waits_for_a_lock,
    write,
)
from tests.producer.flow_control.limits import accepted, forget, limited, tell
from tests.producer.proxy import Proxy


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
def test_round_trips(limits: dict[str, int], proxy: Proxy, through: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen from the wire, a limit costs nothing while the last count is believed, and one round trip when it is due."""

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

    for due in (True, False):
        monkeypatch.setattr(flow_control, "INTERVAL", 0.0 if due else 3600.0)
        monkeypatch.setattr(flow_control, "PATIENCE", 0.0)
        # Each connection prepares a statement when it meets it for the first time, and the first one counts.
        first = [round_trips(n) for n in (0, 1, 2)]
        assert [round_trips(n) for n in (0, 1, 2)] == ([1, 2, 2] if due and limits else [1, 1, 1]), first


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


@pytest.mark.parametrize("setting", ["max_undispatched", "max_undecided"])
@pytest.mark.parametrize(("limit", "passed"), [(1, 1), (5, 5), (20, 20), (40, 41)])
def test_a_small_limit_means_what_it_says(
    setting: str, limit: int, passed: int, engine: Engine, counted_once: None
) -> None:
    """Also where a process sends faster than it counts by the clock: it counts when there may be no more room."""
    outbox = limited(engine, setting, limit)

    def act() -> None:
        with engine.begin() as connection:
            (outbox.send if setting == "max_undispatched" else outbox.prepare)(connection, "t", {"number": 1})

    assert limit <= sum(accepted(act) for _ in range(60)) <= passed
    assert accepted(lambda: tell(outbox, engine, 1, topic="other"))


def test_a_small_limit_holds_among_threads(engine: Engine, counted_once: None) -> None:
    """What a transaction writes that is open counts; those that look at the same moment are as many as the threads."""
    outbox = limited(engine, limit=5)
    barrier = threading.Barrier(4)

    def tell_any() -> None:
        with engine.begin() as connection:
            outbox.send(connection, "t", {"number": 1})

    def run() -> int:
        barrier.wait(60)
        return sum(accepted(tell_any) for _ in range(15))

    assert 5 <= sum(at_once(run, run, run, run)) <= 5 + 3
