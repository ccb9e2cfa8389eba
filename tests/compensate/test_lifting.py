"""Quarantines that are released: a compensation which will not be leaves the message as if nothing had been ordered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from outbox import Message
from outbox.compensate import quarantine
from outbox.compensate.quarantine import QuarantineOrder
from tests.compensate.support import Town, give_back, refuse, settle


def fail(message: Message, session: Session) -> None:
    """Undo nothing."""
    raise RuntimeError("bank A is closed")


def quarantined(town: Town, half_id: UUID) -> UUID:
    """QuarantineOrder a compensation that quarantines the message, and fails then; return the bulk job."""
    town.compensate_by(fail)
    bulk_job_id = town.order(half_id)
    town.work()
    assert town.said(bulk_job_id).startswith("failed: RuntimeError: bank A is closed")
    return bulk_job_id


def withdrawn(town: Town, bulk_job_id: UUID) -> None:
    """Cancel a bulk job that has begun, and see it end."""
    town.cancel(bulk_job_id)
    assert town.work().taken == 1
    assert town.item(bulk_job_id) == ("cancelled", "refused: cancelled by bob")
    assert town.at_a.rows("SELECT finished_at IS NOT NULL FROM outbox.bulk_job WHERE id = :id", id=bulk_job_id) == [
        True
    ]


def test_unconsumed(town: Town) -> None:
    """A group that was yet to come to the message comes to it in its place, as if nothing had been."""
    consumer = town.declare()
    first, half_id, last = (town.transfer(amount) for amount in (1, 2, 3))
    bulk_job_id = quarantined(town, half_id)
    assert town.status(half_id) == {"g": "quarantined"}
    withdrawn(town, bulk_job_id)
    assert town.status(half_id) == {}
    town.consume(consumer)
    assert [eval(body)["amount"] for body in town.ledger()] == [1, 2, 3]  # noqa: S307
    assert [town.effects(each) for each in (first, half_id, last)] == [1, 1, 1]
    assert [act[1] for act in town.acts(half_id)] == ["quarantine", "release"]


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_stepped_over(town: Town, ordered: bool) -> None:
    """A group that has stepped over the quarantine gets the message by a retry."""
    consumer = town.declare(ordered=ordered)
    half_id = town.transfer()
    bulk_job_id = quarantined(town, half_id)
    town.transfer()
    town.consume(consumer)
    assert town.effects(half_id) == 0
    withdrawn(town, bulk_job_id)
    assert town.status(half_id) == {"g": "failed"}
    assert town.retry(consumer, due=False).done == 1
    assert (town.effects(half_id), town.status(half_id)) == (1, {"g": "consumed"})


def test_stepped_over_while_it_was_no_message(town: Town) -> None:
    """So does one for which the message came out, and was stepped over, after it was quarantined."""
    consumer = town.declare()
    half_id = town.transfer(dispatched=False)
    bulk_job_id = quarantined(town, half_id)
    town.transfer()
    town.consume(consumer)
    withdrawn(town, bulk_job_id)
    assert town.retry(consumer, due=False).done == 1
    assert town.effects(half_id) == 1


def test_still_no_message(town: Town) -> None:
    """One that comes out after all is consumed then."""
    consumer = town.declare()
    half_id = town.transfer(dispatched=False)
    withdrawn(town, quarantined(town, half_id))
    assert town.status(half_id) == {}
    settle(town, consumer)
    assert town.effects(half_id) == 1


def test_filter_holds(town: Town) -> None:
    """What a group's filter would have left out isn't given to it by a released quarantine."""
    consumer = town.declare(tags={"eu"})
    half_id = town.transfer(tag="us")
    mine = town.transfer(tag="eu")
    bulk_job_id = quarantined(town, half_id)
    town.consume(consumer)
    withdrawn(town, bulk_job_id)
    town.retry(consumer, due=False)
    assert (town.effects(half_id), town.status(half_id)) == (0, {})
    assert town.effects(mine) == 1


@pytest.mark.parametrize("status", ["failed", "parked"])
def test_what_it_was_before(town: Town, status: str) -> None:
    """A failed message is due again, with the attempts it had; a parked one is parked again."""
    half_id = town.transfer()
    town.consume(town.declare(refuse, retry_delays=(60,) if status == "failed" else ()))
    before = town.inbox()
    assert before[half_id].status == status
    bulk_job_id = quarantined(town, half_id)
    assert town.status(half_id) == {"g": "quarantined"}
    withdrawn(town, bulk_job_id)
    assert town.inbox() == before
    again = town.declare()
    if status == "parked":
        town.sink.operator.retry(half_id, group="g", by="me", why="test")
    assert town.retry(again, due=False).done == 1
    assert town.effects(half_id) == 1


def test_in_every_database_but_those_of_others(town: Town, new_engine: Callable[[], Engine]) -> None:
    """Quarantines are released wherever they were made; a quarantine of nobody's order stays."""
    third = new_engine()
    town.compensate_by(fail, third)
    half_id = town.parked()
    town.declare(group="repaired")
    town.run(
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)"
        " VALUES ('repaired', :id, 't', 0, 0, 'quarantined', 0)",
        id=half_id,
    )
    with third.connect() as connection:
        town.declare_on(connection, group="h")
    bulk_job_id = town.order(half_id)
    town.work()
    assert town.status(half_id) == {"g": "quarantined", "repaired": "quarantined"}
    assert town.status(half_id, third) == {"h": "quarantined"}
    withdrawn(town, bulk_job_id)
    assert town.status(half_id) == {"g": "parked", "repaired": "quarantined"}
    assert town.status(half_id, third) == {}


def test_later_order_takes_the_quarantines_over(town: Town) -> None:
    """A later order owns the quarantines of one that failed for good: it may release them, the first one no more."""
    half_id = town.parked()
    first = quarantined(town, half_id)
    for _ in range(4):
        town.age()
        town.work()
    assert town.item(first)[0] == "failed"
    second = quarantined(town, half_id)
    assert town.rows("SELECT quarantined_by FROM outbox.consumer_message") == [second]
    straggler = QuarantineOrder(half_id, "t", first, "ada", "late", None, ((0, 1),))
    for doubt in (False, True):
        quarantine.release(town.connection, "outbox", straggler, doubt=doubt)
    assert quarantine.quarantine(town.connection, "outbox", straggler, acknowledged=False).quarantined == ["g"]
    assert town.rows("SELECT quarantined_by, quarantined_from FROM outbox.consumer_message") == [(second, "parked")]
    withdrawn(town, second)
    assert town.status(half_id) == {"g": "parked"}


def test_unreachable_while_lifting(town: Town, new_database: Callable[[], str]) -> None:
    """A refusal that can't release all quarantines yet stands, is seen, and is ended once it can."""
    url = new_database()
    third = create_engine(url)
    with third.connect() as connection:
        town.declare_on(connection, group="h")
    town.compensate_by(fail, third)
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    town.work()
    town.cancel(bulk_job_id)
    rename(town, third.url.database, "gone")
    third.dispose()
    try:
        assert town.work().failed == 1
        state, outcome = town.item(bulk_job_id)
        assert (state, (outcome or "").partition("\n")[0]) == ("pending", "refused: cancelled by bob")
        assert "does not exist" in (outcome or "")
        assert town.status(half_id) == {"g": "parked"}
    finally:
        rename(town, "gone", third.url.database)
    assert not town.work()
    town.age()
    town.compensate_by(give_back, third)
    town.work()
    assert town.item(bulk_job_id) == ("cancelled", "refused: cancelled by bob")
    assert town.status(half_id, third) == {}
    assert town.refunds(half_id) == 0
    third.dispose()


def rename(town: Town, name: str | None, to: str | None) -> None:
    """Give a database another name, so that nobody reaches it."""
    admin = create_engine(town.producer.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
        connection.exec_driver_sql(f'ALTER DATABASE "{name}" RENAME TO "{to}"')
    admin.dispose()


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_it_comes_out_while_it_is_released(town: Town, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """A message that comes out and is skipped right before its quarantine is released isn't lost, whoever dies."""
    consumer = town.declare()
    half_id = town.transfer(dispatched=False)
    bulk_job_id = quarantined(town, half_id)
    inner = quarantine.release

    def release(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        town.dispatch()
        town.consume(consumer)
        inner(*args, **options)
        if dies:
            raise KeyboardInterrupt

    monkeypatch.setattr(quarantine, "release", release)
    town.cancel(bulk_job_id)
    if dies:
        with pytest.raises(KeyboardInterrupt):
            town.work()
        town.age()
    assert town.work().taken == 1
    assert town.item(bulk_job_id)[0] == "cancelled"
    town.retry(consumer, due=False)
    assert town.effects(half_id) == 1


@pytest.mark.parametrize("dispatched", [True, False], ids=["message", "no message yet"])
def test_refused_by_the_second_database(town: Town, new_engine: Callable[[], Engine], dispatched: bool) -> None:
    """A consumer between look and quarantine has the compensation refused; earlier quarantines are released."""
    third = new_engine()
    consumer = town.declare()
    with third.connect() as connection, town.producer.connect() as source:
        other = town.declare_on(connection, consume_nothing, group="h")
        half_id = town.transfer(dispatched=dispatched)
        town.compensate_by(give_back, third)

        def consume_it(sql: str) -> None:
            """The quarantine at bank B is there: now the other bank consumes."""
            town.dispatch()
            town.consume_on(other, connection, source)

        bulk_job_id = town.order(half_id)
        once_after_quarantine(town, consume_it)
        assert town.work().taken == 1
    state, outcome = town.item(bulk_job_id)
    assert (state, "consumed by h (database" in (outcome or "")) == ("skipped", True)
    assert town.status(half_id, third) == {"h": "consumed"}
    settle(town, consumer)
    assert (town.effects(half_id), town.refunds(half_id)) == (1, 0)


def consume_nothing(message: Message, session: Session) -> None:
    """Take a message."""


def once_after_quarantine(town: Town, act: Callable[[str], None]) -> None:
    """Have something done right after the first quarantine was committed."""
    inner = quarantine.quarantine
    patch = pytest.MonkeyPatch()

    def wrapped(*args: Any, **options: Any) -> Any:
        made = inner(*args, **options)
        patch.undo()
        act("")
        return made

    patch.setattr(quarantine, "quarantine", wrapped)
