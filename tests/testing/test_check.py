"""`outbox.testing.check`: what a worker would decide, here and now."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import INJECTED, Counts, Orphan, Outbox, Resolution, Settings
from outbox.errors import InvalidHandler
from outbox.testing import check, drain


def test_check_asks_the_checker_of_a_young_half(engine: Engine) -> None:
    """A service's test needn't wait for the immunity time to see what its checker answers."""
    outbox = Outbox(engine, settings=Settings())
    asked: list[dict[str, int]] = []
    consumed: list[dict[str, int]] = []
    outbox.consumer("paid", group="g")(lambda message, session: consumed.append(message.body))

    @outbox.checker("paid")
    def was_paid(orphan: Orphan) -> Resolution:
        asked.append(orphan.body)
        return Resolution.COMMIT if orphan.body["number"] == 1 else Resolution.UNKNOWN

    with Session(engine) as session, session.begin():
        for number in (1, 2):
            outbox.prepare(session, "paid", {"number": number})
    assert check(outbox) == Counts(taken=2, done=1, failed=1)
    assert sorted(body["number"] for body in asked) == [1, 2]
    drain(outbox)
    assert consumed == [{"number": 1}]


def test_check_decides_by_the_fence(engine: Engine) -> None:
    """What a fenced function left behind is rolled back."""
    outbox = Outbox(engine, settings=Settings())

    @outbox.two_phase(topic="paid")
    def pay(number: int, session: Session = INJECTED) -> None:
        raise ConnectionError("the process might as well have died")

    with pytest.raises(ConnectionError):
        pay(1)
    assert check(outbox) == Counts(taken=1, done=1)
    assert check(outbox) == Counts()


def test_check_refuses_an_async_checker(engine: Engine) -> None:
    """An async checker needs a worker's event loop."""
    outbox = Outbox(engine, settings=Settings())

    @outbox.checker("paid")
    async def was_paid(orphan: Orphan) -> Resolution:
        return Resolution.COMMIT

    with Session(engine) as session, session.begin():
        outbox.prepare(session, "paid", {})
    with pytest.raises(InvalidHandler, match="async checker"):
        check(outbox)
