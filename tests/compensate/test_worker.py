"""Compensations as a worker makes them, beside all else that it does."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Message, Outbox
from outbox.worker import Worker
from tests.compensate.support import GIVE, REFUND, Town, give_back, record, refuse
from tests.kit import wait_until


def test_parked_is_rolled_back_by_a_worker(town: Town) -> None:
    """What is ordered while bank A's worker runs is carried out by it, by plain functions and by coroutines."""
    plain = town.parked()
    with town.producer.begin() as connection:
        later = town.app.send(connection, "later", {"amount": 1})
    app = Outbox(town.producer, settings=town.settings)
    app.compensation("t", consumers=[town.consumer])(give_back)

    @app.compensation("later", consumers=[town.consumer])
    async def give_back_later(message: Message, session: AsyncSession) -> None:
        await session.execute(GIVE, {"amount": 0})
        await session.execute(REFUND, {"id": message.id, "amount": 0})

    with Worker(app):
        bulk_jobs = [town.order(plain), town.order(later)]
        wait_until(lambda: [town.item(each)[0] for each in bulk_jobs] == ["done"] * 2, "both are rolled back")
    assert (town.balance, town.refunds(plain), town.refunds(later)) == (1000, 1, 1)
    assert town.status(plain) == {"g": "quarantined"}


def test_ordered_group_gets_what_was_set_aside(town: Town) -> None:
    """A worker retries for an ordered group what its queue has left behind: retried messages, released quarantines."""
    resumed = town.parked(ordered=True)
    stepped_over = _quarantined_and_passed(town)
    app = Outbox(town.consumer, settings=town.settings)
    app.consumer("t", group="g", ordered=True, source=town.producer)(record)
    town.sink.operator.retry(resumed, group="g", by="me", why="the account is there now")
    with Worker(app):
        for half_id in (resumed, stepped_over):
            wait_until(lambda half_id=half_id: town.effects(half_id) == 1, "it is handled")  # type: ignore[misc]


def _quarantined_and_passed(town: Town) -> UUID:
    """Return a message whose quarantine was released after the group had stepped over it."""

    def fail(message: Message, session: Session) -> None:
        raise RuntimeError("bank A is closed")

    town.compensate_by(fail)
    half_id = town.transfer()
    bulk_job_id = town.order(half_id)
    town.work()
    town.consume(town.declare(refuse, ordered=True))
    town.cancel(bulk_job_id)
    town.work()
    assert town.status(half_id) == {"g": "failed"}
    town.compensate_by()
    return half_id
