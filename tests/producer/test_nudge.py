"""The nudge that follows a COMMIT: rare, in the same round trip, and unable to hurt."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from outbox import Outbox, Settings
from outbox.database.execute import Statement
from outbox.database.roundtrip import RoundTrip


def test_a_nudge_that_fails_leaves_the_commit_alone(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is committed and the connection usable, on a new connection and on one that has sent before."""
    nudged: list[str] = []

    def failing(schema: str) -> Statement:
        nudged.append(schema)
        return Statement("SELECT 1 / 0")

    monkeypatch.setattr("outbox.producer.producer.nudge", failing)
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
