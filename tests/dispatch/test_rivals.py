"""Two dispatchers at once, and a dispatcher that dies: one works, nothing is lost or doubled."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once, release_due_once
from outbox.errors import ActRefused
from outbox.testing import make_due
from tests.dispatch.support import WAITING, act, assert_dense, by_key, dispatch_all, messages, run, scalar, send
from tests.kit import wait_until

KILL = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
)


def test_the_second_dispatcher_returns_with_nothing(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """While somebody dispatches, a pass of any kind that appends messages returns at once, without an error."""
    send(app, 1, key="k0")
    send(app, 2, key="k0", delay=0)
    with engine.begin() as other:
        other.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": dispatch_lock(settings.schema)})
        assert not dispatch_once(connection, settings)
        assert not release_due_once(connection, settings)
        assert messages(connection) == []
    assert dispatch_all(connection, settings).done == 2


def test_rivals_leave_no_hole(app: Outbox, engine: Engine, connection: Connection, settings: Settings) -> None:
    """Dispatchers, releases and resends that race leave dense positions and every message once per send."""
    ids = send(app, *range(300), key="k0")
    delayed = send(app, *range(50), key="k1", delay=3600)
    dispatch_all(connection, settings)
    make_due(app)
    send(app, *range(300, 600), key="k0")
    start = threading.Barrier(4)

    def race(number: int) -> None:
        with engine.connect() as other:
            start.wait()
            for n in range(60):
                dispatch_once(other, settings, limit=1 + n % 7)
                release_due_once(other, settings, limit=1 + n % 3)
                if n % 10 == number:
                    with other.begin():
                        act(other, settings, "resend", *ids[n : n + 3])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(race, number) for number in range(4)]:
            future.result()
    dispatch_all(connection, settings)
    while release_due_once(connection, settings).more:
        pass
    found = messages(connection)
    assert_dense(found)
    first = [message for message in found if message.send_number == 1]
    assert by_key(first) == {"k0": list(range(600)), "k1": list(range(50))}
    assert {message.id for message in found if message.key == "k1"} == set(delayed)
    assert len(found) == 650 + 4 * 6 * 3


def block_topic(engine: Engine, topic: str) -> Connection:
    """Hold the row of a new topic, so that a batch with a message of that topic stops in its middle."""
    blocker = engine.connect()
    blocker.begin()
    blocker.execute(text("INSERT INTO outbox.topic (name, queues) VALUES (:topic, 2)"), {"topic": topic})
    return blocker


@pytest.mark.parametrize("limit", [2, 1000])
def test_a_dispatcher_that_is_killed_in_its_batch(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings, limit: int
) -> None:
    """A dispatcher whose connection is cut in the middle of a batch loses nothing and doubles nothing."""
    send(app, *range(5), key="k0")
    with block_topic(engine, "t") as blocker, ThreadPoolExecutor(1) as pool:

        def dispatch() -> None:
            with engine.connect() as doomed:
                dispatch_all(doomed, settings, limit)

        dying = pool.submit(dispatch)
        wait_until(lambda: scalar(connection, WAITING) == 1, "the batch stops at the topic")
        run(connection, KILL)
        with pytest.raises(DBAPIError) as error:
            dying.result()
        assert error.value.connection_invalidated
        blocker.rollback()
    assert messages(connection) == []
    assert dispatch_all(connection, settings, limit).done == 5
    found = messages(connection)
    assert_dense(found)
    assert by_key(found) == {"k0": list(range(5))}


def test_a_topic_declared_in_the_middle_of_its_first_batch(
    app: Outbox, engine: Engine, connection: Connection, settings: Settings
) -> None:
    """A topic that is declared smaller while its first messages are placed gets as many queues as they need."""
    send(app, *range(40))
    with block_topic(engine, "t") as blocker, ThreadPoolExecutor(1) as pool:

        def dispatch() -> None:
            with engine.connect() as other:
                dispatch_all(other, settings)

        dispatching = pool.submit(dispatch)
        wait_until(lambda: scalar(connection, WAITING) == 1, "the batch stops at the topic")
        blocker.commit()
        dispatching.result()
    queues = scalar(connection, "SELECT queues FROM outbox.topic WHERE name = 't'")
    found = messages(connection)
    assert len(found) == 40
    assert max(message.queue for message in found) < queues, "messages in queues that no consumer looks at"


def test_recall_against_release(app: Outbox, engine: Engine, connection: Connection, settings: Settings) -> None:
    """A recall that comes while a release is under way waits for it, and is told that it came too late."""
    (half_id,) = send(app, "late", delay=3600)
    dispatch_all(connection, settings)
    make_due(app)
    run(connection, "DELETE FROM outbox.topic")
    with block_topic(engine, "t") as blocker, ThreadPoolExecutor(2) as pool:

        def release() -> int:
            with engine.connect() as other:
                return release_due_once(other, settings).done

        def take_back() -> None:
            app.operator.recall(half_id, by="me", why="test")

        releasing = pool.submit(release)
        wait_until(lambda: scalar(connection, WAITING) == 1, "the release stops at the topic")
        recalling = pool.submit(take_back)
        wait_until(lambda: scalar(connection, WAITING) == 2, "the recall waits for the release")
        blocker.commit()
        assert releasing.result() == 1
        with pytest.raises(ActRefused, match="out already"):
            recalling.result()
    assert len(messages(connection)) == 1


def test_release_against_recall(app: Outbox, engine: Engine, connection: Connection, settings: Settings) -> None:
    """A release that comes while a recall is under way leaves the message alone, also afterwards."""
    (half_id,) = send(app, "taken back", delay=3600)
    dispatch_all(connection, settings)
    make_due(app)
    with engine.begin() as other:
        assert act(other, settings, "recall", half_id)
        assert not release_due_once(connection, settings)
    assert not release_due_once(connection, settings)
    assert messages(connection) == []
