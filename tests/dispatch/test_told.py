"""A dispatcher that is told of ops: its pass needs no look, and no telling is left out that no look makes up for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import contains
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.database import at_commit
from outbox.database.roundtrip import RoundTrip
from outbox.database.sql import OPS
from outbox.dispatch import dispatch_pass
from outbox.dispatch.dispatch_pass import Dispatcher, dispatch_once
from outbox.worker import Worker, duty, plan
from outbox.worker.connections import WorkerDatabase
from tests.dispatch.support import assert_dense, messages, run, scalar, send
from tests.kit import tries, wait_until

#: Has a pass wait while it inserts a message, if another session holds a lock.
WAITING_INSERT = """
CREATE FUNCTION outbox.waiting() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$;
CREATE TRIGGER waiting BEFORE INSERT ON outbox.message FOR EACH ROW EXECUTE FUNCTION outbox.waiting()
"""


@pytest.fixture
def worker(engine: Engine) -> Iterator[Connection]:
    """A connection as workers have them."""
    with WorkerDatabase(engine).connect() as connection:
        yield connection


@pytest.fixture
def heard_ops(app: Outbox, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Return how many nudges came since it was asked last. Each send nudges, without a pause too."""
    monkeypatch.setattr(at_commit, "NO_PAUSE", -1.0)
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute('LISTEN "outbox.message"')

        def heard() -> int:
            with engine.begin() as connection:
                connection.exec_driver_sql("SELECT pg_notify('outbox.message', 'the end')")
            payloads: list[str] = []
            for notice in listener.notifies():
                if notice.payload == "the end":
                    break
                payloads.append(notice.payload)
            return payloads.count(OPS)

        yield heard


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of statements of each round trip of this process."""
    found: list[int] = []
    usual = RoundTrip.run

    def counted(self: RoundTrip, *, committed: bool = False) -> Any:
        found.append(len(self.statements))
        return usual(self, committed=committed)

    monkeypatch.setattr(RoundTrip, "run", counted)
    return found


def test_a_pass_that_is_told_needs_no_look(app: Outbox, worker: Connection, trips: list[int]) -> None:
    """Once the driver knows the statements: one round trip if it is told, two if it isn't, one if there is nothing."""
    dispatcher = Dispatcher(Settings(listen=False))
    counts = []
    for number in range(12):
        send(app, number)
        trips.clear()
        if number % 2:
            dispatcher.nudge()
        assert dispatcher.once(worker).done == 1
        counts.append(len(trips))
        trips.clear()
        assert not dispatcher.once(worker)
        assert number < 4 or len(trips) == 1
    assert counts[6:] == [2, 1] * 3
    assert_dense(messages(worker))


def test_it_is_told_and_another_worker_has_come_further(
    app: Outbox, worker: Connection, connection: Connection, settings: Settings
) -> None:
    """The cursor that it left isn't the newest: it looks again, and doubles nothing."""
    dispatcher = Dispatcher(settings)
    for number in range(6):
        send(app, number)
        dispatcher.nudge()
        assert dispatcher.once(worker).done == 1
        send(app, "another's")
        assert dispatch_once(connection, settings).done == 1
        dispatcher.nudge()
        assert not dispatcher.once(worker), "told of what the other one has dispatched"
    assert len(messages(connection)) == 12
    assert_dense(messages(connection))


def test_it_is_told_while_a_backlog_is_cut(app: Outbox, worker: Connection, settings: Settings) -> None:
    """Also the cursor inside of a cut is one that it can go by."""
    dispatcher = Dispatcher(settings)
    for number in range(50):
        send(app, number)
    done, passes = 0, 0
    while done < 50:
        dispatcher.nudge()
        done, passes = done + dispatcher.once(worker, 3).done, passes + 1
    assert (done, passes) == (50, 17)
    assert not dispatcher.once(worker)
    assert_dense(messages(worker))


def test_the_lock_of_a_dispatcher_that_is_awake(
    app: Outbox,
    worker: Connection,
    engine: Engine,
    settings: Settings,
    heard_ops: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Senders leave out telling only while a pass holds it; that pass asks for a look. A lone message has no such pass.

    The pass that holds it is stopped behind its snapshot, by a trigger.
    """
    dispatcher = Dispatcher(settings, awake=True)
    assert [bool(send(app, number)) for number in range(3)] == [True] * 3
    assert heard_ops() == 3
    assert not dispatcher.once(worker).more, "nothing came in the time of a pass before"
    monkeypatch.setattr(dispatch_pass, "BUSY", 3600.0)
    run(worker, WAITING_INSERT)
    for _ in range(6):  # the driver has prepared the statements, so that a pass is one round trip
        send(app, "busy")
        assert dispatcher.once(worker).more
        assert not dispatcher.once(worker)
    heard_ops()
    send(app, "before")
    assert heard_ops() == 1
    pid = scalar(worker, "SELECT pg_backend_pid()")
    with engine.connect() as holder, holder.begin(), engine.connect() as looking:
        holder.exec_driver_sql("SELECT pg_advisory_xact_lock(42)")
        passing = _started(dispatcher, worker)
        waits = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        wait_until(lambda: scalar(looking, waits), "the pass holds its lock, and waits")
        send(app, "meanwhile")
        assert heard_ops() == 0
    counts = passing()
    assert (counts.done, counts.more) == (1, True)
    assert dispatcher.once(worker).done == 1, "the look that follows sees it"
    send(app, "after")
    assert heard_ops() == 1
    run(worker, "DROP FUNCTION outbox.waiting CASCADE")


def _started(dispatcher: Dispatcher, connection: Connection) -> Callable[[], Any]:
    """Begin a pass in a thread; return what waits for its counts."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(dispatcher.once, connection)

    def ended() -> Any:
        with pool:
            return running.result(60)

    return ended


def test_another_session_holds_the_lock(app: Outbox, worker: Connection, engine: Engine, settings: Settings) -> None:
    """A nudge holds it for a moment: the pass does without, works, and asks for no look."""
    dispatcher = Dispatcher(settings, awake=True)
    dispatcher._worked_at = float("inf")
    with engine.connect() as other, other.begin():
        other.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({dispatcher._awake})")
        send(app, 1)
        counts = dispatcher.once(worker)
    assert (counts.done, counts.more) == (1, False)


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("resolution", ["commit", "rollback"])
def test_decisions_tell_too(
    app: Outbox, engine: Engine, heard_ops: Callable[[], int], resolution: str, within: bool
) -> None:
    """To commit a half makes an op that is to be dispatched, in whatever transaction; nothing else does."""
    for number in range(3):
        with engine.begin() as carrier:
            half_id = app.prepare(carrier, "t", number)
        assert heard_ops() == 0
        decide = getattr(app, resolution)
        if within:
            with engine.begin() as carrier:
                decide(half_id, carrier)
        else:
            decide(half_id)
        assert heard_ops() == (resolution == "commit")
        decide(half_id)  # decides nothing
        assert heard_ops() == 0


@pytest.mark.parametrize("busy", [0.0, 0.003, 3600.0])
@pytest.mark.parametrize("in_process", [True, False])
def test_no_message_waits_for_a_look(
    app: Outbox, engine: Engine, monkeypatch: pytest.MonkeyPatch, in_process: bool, busy: float
) -> None:
    """Senders in four threads, with and without pauses: a worker that never looks by itself handles every message."""
    monkeypatch.setattr(duty, "QUIET_AFTER", 0.0)
    monkeypatch.setattr(plan, "LISTENING_WAIT", 3600.0)
    monkeypatch.setattr(at_commit, "NO_PAUSE", -1.0)
    monkeypatch.setattr(dispatch_pass, "BUSY", busy)
    if not in_process:
        monkeypatch.setattr("outbox.producer.producer.dispatcher_here", lambda _: None)
    outbox = Outbox(engine, settings=Settings(idle_wait=3600.0, release_interval=3600.0))
    handled: list[object] = []

    @outbox.consumer("t", group="g", batch=10)
    def note(message: Message, _session: Session) -> None:
        handled.append(message.body)

    def send_some(sender: int) -> None:
        pauses = random.Random(sender)  # noqa: S311 - no secret
        with engine.connect() as connection:
            for number in range(tries(60)):
                with connection.begin():
                    outbox.send(connection, "t", [sender, number])
                if pauses.random() < 0.5:
                    wait_until(partial(contains, handled, [sender, number]), "it is handled, and all is at rest")

    with Worker(outbox) as worker:
        listeners = [each for plan in worker._plans for each in plan.listeners.values()]
        wait_until(lambda: all(each.working for each in listeners), "notifications arrive")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send_some, range(4)))
        wait_until(lambda: len(handled) == 4 * tries(60), "every message is handled")
    assert len({str(each) for each in handled}) == len(handled)
