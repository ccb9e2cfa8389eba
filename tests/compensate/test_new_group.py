"""Groups that start while a local transaction is compensated, or later: the quarantine is there before they consume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from outbox import Message
from outbox.compensate import quarantine
from tests.compensate.support import Town, give_back, settle


def fail(message: Message, session: Session) -> None:
    """Undo nothing."""
    raise RuntimeError("bank A is closed")


def begun(town: Town, half_id: UUID) -> UUID:
    """Order a compensation that quarantines the message, and fails then; return the bulk job."""
    town.compensate_by(fail)
    bulk_job_id = town.order(half_id)
    town.work()
    town.compensate_by(give_back)
    return bulk_job_id


@pytest.mark.parametrize("dispatched", [True, False], ids=["message", "no message yet"])
def test_after_a_compensation(town: Town, dispatched: bool) -> None:
    """A group that starts after a compensation does not handle the message, and handles all others."""
    first, half_id, last = (town.transfer(dispatched=dispatched) for _ in range(3))
    assert town.roll_back(half_id) == "done"
    settle(town, town.declare())
    assert [town.effects(each) for each in (first, half_id, last)] == [1, 0, 1]
    assert town.status(half_id) == {"g": "quarantined"}
    assert town.acts(half_id)[0][:3] == ("ada", "quarantine", f"g/{half_id}")


def test_while_it_is_rolled_back(town: Town) -> None:
    """A group that starts between two tries doesn't handle it; after the second one it never will."""
    half_id = town.transfer()
    bulk_job_id = begun(town, half_id)
    consumer = town.declare()
    settle(town, consumer)
    assert (town.effects(half_id), town.status(half_id)) == (0, {"g": "quarantined"})
    town.age()
    assert town.work().done == 1
    settle(town, consumer)
    assert (town.effects(half_id), town.refunds(half_id)) == (0, 1)
    assert town.rows("SELECT quarantined_by FROM outbox.consumer_message") == [bulk_job_id]


def test_order_that_nobody_has_begun(town: Town) -> None:
    """An order that nobody has begun doesn't stop a group that starts, and is refused if that consumes the message."""
    half_id = town.transfer()
    bulk_job_id = town.order(half_id)
    settle(town, town.declare())
    assert town.effects(half_id) == 1
    town.work()
    assert town.item(bulk_job_id)[0] == "skipped"


def test_withdrawn_compensation(town: Town) -> None:
    """A group that was quarantined at its start gets the message when the compensation is withdrawn."""
    half_id = town.transfer()
    bulk_job_id = begun(town, half_id)
    consumer = town.declare()
    settle(town, consumer)
    town.cancel(bulk_job_id)
    town.work()
    assert town.item(bulk_job_id)[0] == "cancelled"
    settle(town, consumer)
    assert town.effects(half_id) == 1


def test_what_a_dead_worker_left(town: Town) -> None:
    """A quarantine that its compensation left behind is released when the group's next worker starts."""
    half_id = town.transfer()
    begun(town, half_id)
    consumer = town.declare()
    settle(town, consumer)
    town.at_a.run("UPDATE outbox.bulk_item SET state = 'cancelled'")
    settle(town, consumer)
    assert town.effects(half_id) == 0
    settle(town, town.declare())
    assert town.effects(half_id) == 1


def test_withdrawn_while_a_group_starts(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compensation withdrawn between a starting group's look and its quarantine leaves no quarantine."""
    half_id = town.transfer()
    bulk_job_id = begun(town, half_id)
    inner = quarantine._quarantine

    def late(*args: object) -> bool:
        monkeypatch.undo()
        town.cancel(bulk_job_id)
        town.work()
        assert town.item(bulk_job_id)[0] == "cancelled"
        return inner(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(quarantine, "_quarantine", late)
    settle(town, town.declare())
    assert town.effects(half_id) == 1


@pytest.mark.parametrize("moment", ["before its registration", "after it"])
def test_rollback_while_a_group_starts(town: Town, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Wherever in the start of a group a whole compensation happens, the group doesn't handle the message."""
    half_id = town.transfer()
    bulk_job_id = town.order(half_id)

    def happen() -> None:
        town.work()
        assert town.item(bulk_job_id)[0] == "done"

    if moment == "after it":
        inner = quarantine.quarantine_group

        def quarantine_group(*args: Any) -> None:
            happen()
            inner(*args)

        monkeypatch.setattr("tests.kit.bench.quarantine_group", quarantine_group)
    else:
        looked: list[bool] = []

        def after_heads(*args: object) -> None:
            if not looked:
                looked.append(True)
                happen()

        event.listen(town.source, "commit", after_heads)
    settle(town, town.declare())
    assert (town.effects(half_id), town.status(half_id), town.refunds(half_id)) == (0, {"g": "quarantined"}, 1)


def test_second_worker_of_the_group(town: Town) -> None:
    """A group's first worker died between registration and quarantine: the second quarantines before it consumes."""
    half_id = town.transfer()
    assert town.roll_back(half_id) == "done"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.kit.bench.quarantine_group", lambda *args: None)
        town.declare()
    assert town.status(half_id) == {}
    settle(town, town.declare())
    assert town.effects(half_id) == 0


def test_what_lies_before_the_start(town: Town) -> None:
    """A group that starts now is quarantined from what may yet come to it, and from nothing else."""
    before, scheduled = town.transfer(), town.transfer(delay=3600)
    for half_id in (before, scheduled):
        assert town.roll_back(half_id) == "done"
    town.declare(start="now")
    assert (town.status(before), town.status(scheduled)) == ({}, {"g": "quarantined"})


def test_compensated_without_an_order(town: Town) -> None:
    """What the application has compensated by itself is quarantined as well, in nobody's name."""
    half_id = town.transfer()
    town.at_a.run(
        "INSERT INTO outbox.compensation (half_id, function, requested_by, reason) VALUES (:id, 'f', 'me', 'test')",
        id=half_id,
    )
    settle(town, town.declare())
    assert town.effects(half_id) == 0
    assert town.rows("SELECT status, quarantined_by FROM outbox.consumer_message") == [("quarantined", None)]


def test_source_is_only_read(town: Town, new_engine: Callable[..., Engine]) -> None:
    """The start of a group needs no more than to read the producer's database."""
    half_id = town.transfer()
    assert town.roll_back(half_id) == "done"
    town.source.exec_driver_sql("SET default_transaction_read_only = on")
    town.source.commit()
    try:
        town.consume(town.declare())
    finally:
        town.source.exec_driver_sql("SET default_transaction_read_only = off")
        town.source.commit()
    assert town.status(half_id) == {"g": "quarantined"}


def test_many_compensations(town: Town) -> None:
    """A group that starts quarantines many messages in one go, and only once."""
    ids = [town.transfer(dispatched=False, key=str(number)) for number in range(20)]
    town.dispatch()
    for half_id in ids[::2]:
        town.order(half_id)
    assert town.work().done == 10
    for _ in range(2):
        settle(town, town.declare())
    assert [town.effects(each) for each in ids] == [0, 1] * 10
    assert len(town.rows("SELECT 1 FROM outbox.audit WHERE action = 'quarantine'")) == 10


def test_group_that_receives_in_sql(town: Town) -> None:
    """A group that consumes in another language is quarantined like others, from its first message on."""
    receive = "SELECT outbox.receive('node', CAST(:id AS uuid), 't', 0, 1)"
    first, second = town.transfer(), town.transfer()
    town.run(receive, id=first)
    assert town.roll_back(first) == "skipped"
    assert town.roll_back(second) == "done"
    assert town.status(second) == {"node": "quarantined"}
    assert town.value(receive, id=second) is False
