"""The nudge that follows a COMMIT: rare, in the same round trip, and unable to hurt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text

from outbox import Outbox, Settings
from outbox.database.execute import Statement
from outbox.database.roundtrip import RoundTrip
from outbox.producer import process
from outbox.telemetry.events import AfterCommitFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import Tables, wait_until
from tests.producer.bank import changes
from tests.producer.carriers import CARRIERS, send
from tests.producer.proxy import Proxy

#: Has what follows a COMMIT fail as a full queue of notifications does: when the Sync commits it, not before.
FAILS_LATE = """
CREATE FUNCTION outbox.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'too many notifications'; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT OR UPDATE ON outbox.producer_process
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION outbox.fail()
"""


def test_a_nudge_that_fails_leaves_the_commit_alone(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is committed and the connection usable, on a new connection and on one that has sent before."""
    nudged: list[str] = []

    def failing(schema: str, _: str) -> Statement:
        nudged.append(schema)
        return Statement("SELECT 1 / 0")

    monkeypatch.setattr("outbox.producer.producer.notify", failing)
    monkeypatch.setattr("outbox.producer.producer._NUDGE_AFTER", -1.0)
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
    monkeypatch.setattr("outbox.producer.producer._NUDGE_AFTER", -1.0)
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
    monkeypatch.setattr("outbox.producer.producer._NUDGE_AFTER", -1.0)
    monkeypatch.setattr(process, "REPORT_EVERY", 0.0)
    tables = Tables(engine)
    tables.run(FAILS_LATE)
    yield heard
    tables.run("DROP FUNCTION outbox.fail CASCADE")


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
