"""What wakes dispatchers behind a COMMIT: a nudge in the same round trip, unable to hurt, or a call in the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import IntegrityError

from outbox import Outbox, Settings
from outbox.database import at_commit
from outbox.database.at_commit import LocalDispatcher, begin_here, dispatcher_here, end_here
from outbox.database.engines import address_of, address_of_connections
from outbox.database.execute import Statement
from outbox.database.roundtrip import RoundTrip
from outbox.database.sql import nudge
from outbox.producer import process
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import Tables, wait_until
from tests.producer.bank import changes
from tests.producer.carriers import CARRIERS, send
from tests.producer.proxy import Proxy


def address_of_ops(engine: Engine) -> tuple[str, str]:
    """Return where an Outbox on this engine has its ops."""
    return address_of(engine), "outbox"


#: Has what follows a COMMIT fail as a full queue of notifications does: when the Sync commits it, not before.
FAILS_LATE = """
CREATE FUNCTION public.too_late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'too many notifications'; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT OR UPDATE ON outbox.producer_process
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.too_late()
"""


def test_a_nudge_that_fails_leaves_the_commit_alone(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is committed and the connection usable, on a new connection and on one that has sent before."""
    nudged: list[str] = []

    def failing(schema: str) -> Statement:
        nudged.append(schema)
        return Statement("SELECT 1 / 0")

    monkeypatch.setattr("outbox.producer.producer.nudge", failing)
    monkeypatch.setattr(at_commit, "NO_PAUSE", -1.0)
    outbox = Outbox(engine, settings=settings)
    with engine.connect() as connection:
        for number in range(3):
            with connection.begin():
                connection.execute(text("SELECT 1"))
                outbox.send(connection, "t", {"n": number})
        with connection.begin():
            assert connection.execute(text("SELECT count(*) FROM outbox.op_message")).scalar_one() == 3
    assert len(nudged) == 3


def test_a_nudge_travels_with_the_commit(engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a connection that has sent before, insert, COMMIT and nudge are one round trip."""
    trips: list[list[str]] = []
    run = RoundTrip.run

    def spied(self: RoundTrip, *, committed: bool = False) -> object:
        trips.append([sql.split()[0] for sql, _ in self.statements])
        return run(self, committed=committed)

    monkeypatch.setattr(RoundTrip, "run", spied)
    monkeypatch.setattr(at_commit, "NO_PAUSE", -1.0)
    outbox = Outbox(engine, settings=settings)
    with engine.connect() as connection:
        for number in range(2):
            with connection.begin():
                connection.execute(text("SELECT 1"))
                outbox.send(connection, "t", {"n": number})
    assert trips == [["SELECT"], ["WITH", "COMMIT", "SELECT"]]


@pytest.fixture
def told(
    engine: Engine, heard: list[TelemetryEvent], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[TelemetryEvent]]:
    """The events; each message is followed by a nudge, and a report that fails at its own commit."""
    monkeypatch.setattr(at_commit, "NO_PAUSE", -1.0)
    monkeypatch.setattr(process, "REPORT_EVERY", 0.0)
    tables = Tables(engine)
    tables.run(FAILS_LATE)
    yield heard
    tables.run("DROP FUNCTION public.too_late CASCADE")


@pytest.mark.parametrize("name", CARRIERS)
async def test_what_fails_when_it_commits_itself_leaves_the_commit_alone(
    name: str, url: str, engine: Engine, told: list[Any]
) -> None:
    """With each carrier, on a new connection and on one that has sent before: one event, and nothing else."""
    outbox = Outbox(engine, settings=Settings())
    async with CARRIERS[name](url, False) as opened:
        for number in range(3):
            await opened.write(number)
            await send(outbox, opened, number)
            await opened.commit()
    assert changes(engine) == {0, 1, 2}
    failed: list[Any] = []

    def three() -> bool:
        failed[:] = [each for each in told if isinstance(each, AfterCommitFailed)]
        return len(failed) == 3

    wait_until(three, "the reports have failed")
    assert all("too many notifications" in each.reason for each in failed)


@pytest.mark.parametrize("name", ["Session on psycopg", "AsyncSession on psycopg"])
async def test_a_connection_lost_behind_the_commit_leaves_it_alone(
    name: str, url: str, proxy: Proxy, engine: Engine, told: list[Any]
) -> None:
    """The server has said that it has committed, and not yet what became of the nudge: the commit succeeds."""
    through = make_url(url).set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    outbox = Outbox(engine, settings=Settings())
    async with CARRIERS[name](through, False) as opened:
        for number in (1, 2, 3):
            proxy.cut = "behind" if number == 2 else None
            await opened.write(number)
            await send(outbox, opened, number)
            await opened.commit()
    assert changes(engine) == {1, 2, 3}
    assert AfterCommitFailed in {type(each) for each in told}


@pytest.mark.parametrize("name", CARRIERS)
async def test_a_dispatcher_of_the_process_is_called(name: str, url: str, engine: Engine) -> None:
    """With each carrier that tells of its COMMIT: behind it, in place of a nudge, unless it has stopped."""
    outbox = Outbox(engine, settings=Settings())
    committed: list[int] = []
    there = True

    def wake() -> None:
        committed.append(len(changes(engine)))

    dispatcher = LocalDispatcher(wake, lambda: there)
    nudges: list[str] = []

    def nudging(schema: str) -> Statement:
        nudges.append(schema)
        return nudge(schema)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outbox.producer.producer.nudge", nudging)
        begin_here(address_of_ops(engine), dispatcher)
        try:
            async with CARRIERS[name](url, False) as opened:
                for number in range(2):
                    await opened.write(number)
                    await send(outbox, opened, number)
                    await opened.commit()
                called = len(committed)
                there = False
                await opened.write(2)
                await send(outbox, opened, 2)
                await opened.commit()
        finally:
            end_here(address_of_ops(engine), dispatcher)
    assert changes(engine) == {0, 1, 2}
    assert called == len(committed)
    if called:  # a driver's own connection, in the end, says nothing of its COMMIT
        follows = not any(driver in name for driver in ("psycopg2", "asyncpg"))
        assert (committed, nudges) == ([1, 2], ["outbox"] * follows)


def test_a_fork_has_no_dispatcher_of_the_process(engine: Engine) -> None:
    """Its thread isn't there, and a lock of it may be held for ever."""
    dispatcher = LocalDispatcher(lambda: None, lambda: True)
    begin_here(address_of_ops(engine), dispatcher)
    try:
        assert dispatcher_here(address_of_ops(engine)) is dispatcher
        pid = os.fork()
        if not pid:
            os._exit(0 if dispatcher_here(address_of_ops(engine)) is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        end_here(address_of_ops(engine), dispatcher)
    assert dispatcher_here(address_of_ops(engine)) is None


def test_a_process_that_sends_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It nudges now and then; the first send after a pause always."""
    now = 1000.0
    monkeypatch.setattr(at_commit, "time", SimpleNamespace(monotonic=lambda: now))
    address = "a database", "of this test"
    found = []
    for _ in range(21):
        found.append(at_commit.nudges_now(address))
        now += 0.001
    assert [number for number, nudges in enumerate(found) if nudges] == [*range(8), 18]
    now += at_commit.NO_PAUSE
    assert at_commit.nudges_now(address)
    assert at_commit.nudges_now(("another database", "of this test"))


def test_a_commit_that_fails_has_not_nudged(engine: Engine, settings: Settings) -> None:
    """The next one does, however soon it comes; so does the one behind what can't be followed by a nudge."""
    outbox = Outbox(engine, settings=settings)
    Tables(engine).run("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO once VALUES (1)")
    nudges: list[str] = []

    def nudging(schema: str) -> Statement:
        nudges.append(schema)
        return nudge(schema)

    with pytest.MonkeyPatch.context() as patch, engine.connect() as connection:
        patch.setattr("outbox.producer.producer.nudge", nudging)
        for number in (1, 2):
            with suppress(IntegrityError), connection.begin():
                outbox.send(connection, "t", number)
                connection.execute(text("INSERT INTO once VALUES (:n)"), {"n": number})
    assert nudges == ["outbox"] * 2


def test_an_engine_whose_connections_are_sent_on(engine: Engine) -> None:
    """A listener may lead them to another database, of which this process has no dispatcher."""
    other = create_engine(engine.url)
    assert address_of_connections(other) == address_of_connections(engine) == address_of(engine)
    event.listen(other, "do_connect", lambda *_: None)
    assert address_of_connections(other) != address_of_connections(engine)
