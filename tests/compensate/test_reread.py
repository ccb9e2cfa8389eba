"""Compensations and groups that read again: what is undone is never handled again, what took effect is known."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from outbox.operator.operator import Operator
from tests.compensate.support import Town, record, refuse
from tests.compensate.test_races import Pause, handle
from tests.kit import wait_until


def reset(town: Town) -> None:
    """Have bank B read all transfers again."""
    operator = Operator.open({"a": town.producer, "b": town.consumer}, town.settings)
    operator.reset_group("g", "t", "first", by="ada", why="the amounts were wrong")


def consumed(town: Town) -> UUID:
    """Make a transfer that bank B has consumed."""
    half_id = town.transfer()
    town.consume(town.declare())
    return half_id


def test_what_was_undone_is_not_handled_again(town: Town) -> None:
    """Compensated though it had taken effect: the group that reads again steps over it."""
    half_id = consumed(town)
    assert town.roll_back(half_id, acknowledge_delivered=True) == "done"
    reset(town)
    town.consume(town.declare())
    assert len(town.ledger()) == 1
    assert town.status(half_id) == {"g": "consumed"}


def test_ordered_and_not_yet_undone(town: Town) -> None:
    """An order that stands is enough."""
    half_id = consumed(town)
    town.order(half_id, acknowledge_delivered=True)
    reset(town)
    town.consume(town.declare())
    assert len(town.ledger()) == 1
    town.work()
    assert (town.balance, town.refunds(half_id)) == (1000, 1)


def test_parked_when_it_was_read_again(town: Town) -> None:
    """It took effect in the first passage: that isn't undone without a word."""
    half_id = consumed(town)
    reset(town)
    town.consume(town.declare(refuse, retry_delays=()))
    assert town.status(half_id) == {"g": "parked"}
    assert town.roll_back(half_id) == "skipped"
    assert town.refunds(half_id) == 0
    assert town.roll_back(half_id, acknowledge_delivered=True) == "done"
    assert town.refunds(half_id) == 1


def test_while_it_is_handled_again(town: Town) -> None:
    """The quarantine waits for the handler, and finds the message consumed."""
    half_id = consumed(town)
    reset(town)
    handler = Pause(record)
    consumer = town.declare(handler)
    with ThreadPoolExecutor(2) as threads:
        handling = threads.submit(handle, town, consumer)
        assert handler.begun.wait(60)
        bulk_job_id = town.order(half_id, acknowledge_delivered=True)
        undoing = threads.submit(town.work)
        wait_until(town.waiting, "the quarantine waits for the row")
        handler.go_on.set()
        handling.result(60)
        undoing.result(60)
    town.age()
    town.work()
    assert town.item(bulk_job_id)[0] == "done"
    assert len(town.ledger()) == 2
    reset(town)
    town.consume(town.declare())
    assert len(town.ledger()) == 2
