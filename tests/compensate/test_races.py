"""Compensations against each other, and against consumers that have the message in hand: one wins, the other waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message
from outbox.compensate import sql as compensate_sql
from outbox.compensate.run import CompensationRun, ItemTable
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import newest_sends, resend
from outbox.errors import ActRefused, CompensationRefused
from outbox.message.model import Counts
from tests.compensate.support import Town, give_back, record
from tests.kit import wait_until

RIVALS = 20


@contextmanager
def elsewhere(act: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run something in another thread."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(act)


class Pause:
    """A handler or compensation that stops in the middle until it is told to go on."""

    def __init__(self, function: Callable[[Message, Session], Any]) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._function = function

    def __call__(self, message: Message, session: Session) -> Any:
        result = self._function(message, session)
        session.flush()
        self.begun.set()
        assert self.go_on.wait(60)
        return result


def handle(town: Town, consumer: Consumer, *, retry: bool = False) -> Counts:
    """Consume, or retry, on connections of its own."""
    with town.consumer.connect() as connection, town.producer.connect() as source:
        if retry:
            return consumer.retry_once(connection, source)
        return town.consume_on(consumer, connection, source)


def test_many_workers_at_one_item(town: Town) -> None:
    """Of many passes that begin at the same time, one carries the compensation out."""
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    engine = create_engine(town.producer.url, pool_size=2 * RIVALS)
    together = threading.Barrier(RIVALS)

    def work(_: int) -> int:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
            connection.rollback()
            together.wait(60)
            return town.work_on(connection).done

    with ThreadPoolExecutor(RIVALS) as threads:
        assert sum(threads.map(work, range(RIVALS))) == 1
    engine.dispose()
    assert town.item(bulk_job_id)[0] == "done"
    assert (town.balance, town.refunds(half_id)) == (1000, 1)


def test_many_compensations_of_one_message(town: Town) -> None:
    """Many workers that all believe that the item is theirs: one compensation is committed, the others are undone."""
    half_id = town.parked()
    bulk_job_id = town.order(half_id)
    engine = create_engine(town.producer.url, pool_size=RIVALS)
    with engine.connect() as connection:
        book = ItemTable(connection, "outbox")
        item = book.lease(compensate_sql.Key(bulk_job_id, 1))
        assert item is not None
        _, item = book.read(item)
    together = threading.Barrier(RIVALS)

    def perform(_: int) -> CompensationRun:
        performance = CompensationRun(town.compensations["t"], town.settings, item, [], [])
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
            connection.rollback()
            together.wait(60)
            performance.hold(connection, connection)
        return performance

    with ThreadPoolExecutor(RIVALS) as threads:
        performances = list(threads.map(perform, range(RIVALS)))
    engine.dispose()
    assert [each.done for each in performances].count(True) == 1
    assert {str(each.error) for each in performances if not each.done} <= {
        "it is not to be compensated any more",
        "it was compensated",
    }
    assert (town.balance, town.refunds(half_id)) == (1000, 1)


def test_many_orders_of_one_message(town: Town) -> None:
    """Of many orders at the same time one is taken, and the others are refused."""
    half_id = town.parked()

    def order(_: int) -> UUID | str:
        try:
            return town.order(half_id)
        except CompensationRefused as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(order, range(RIVALS)))
    (taken,) = [each for each in results if isinstance(each, UUID)]
    why = "its local transaction is being compensated; wait for that bulk job, or cancel it"
    assert {each for each in results if each != taken} == {f"message {half_id} can't be compensated: {why}"}
    assert town.at_a.rows("SELECT id FROM outbox.bulk_job") == [taken]


def test_quarantine_comes_before_the_handler_ends(town: Town) -> None:
    """A handler that runs while the quarantine is made is undone: its commit fails, and it skips the message."""
    handler = Pause(record)
    consumer = town.declare(handler)
    half_id = town.transfer()
    with elsewhere(lambda: handle(town, consumer)) as handling:
        handler.begun.wait(60)
        assert town.roll_back(half_id) == "done"
        handler.go_on.set()
        handling.result(60)
    assert (town.effects(half_id), town.refunds(half_id)) == (0, 1)
    assert town.status(half_id) == {"g": "quarantined"}


def test_consumer_waits_for_the_quarantine(town: Town) -> None:
    """A consumer whose commit meets a quarantine that isn't committed yet waits for it, and loses."""
    handler = Pause(record)
    consumer = town.declare(handler)
    half_id = town.transfer()
    with town.consumer.connect() as connection, elsewhere(lambda: handle(town, consumer)) as handling:
        handler.begun.wait(60)
        quarantine = connection.begin()
        connection.exec_driver_sql(
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)"
            f" VALUES ('g', '{half_id}', 't', 0, 0, 'quarantined', 0)"
        )
        handler.go_on.set()
        wait_until(town.waiting, "the consumer waits")
        quarantine.commit()
        handling.result(60)
    assert (town.effects(half_id), town.status(half_id)) == (0, {"g": "quarantined"})


def test_quarantine_waits_for_the_consumer(town: Town) -> None:
    """A quarantine that meets an inbox row which isn't committed yet waits for it, and the compensation is refused."""
    half_id = town.transfer()
    town.declare()
    bulk_job_id = town.order(half_id)
    with town.consumer.connect() as connection:
        handling = connection.begin()
        connection.exec_driver_sql(
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)"
            f" VALUES ('g', '{half_id}', 't', 0, 1, 'consumed', 1)"
        )
        with elsewhere(town.work) as working:
            wait_until(town.waiting, "the quarantine waits")
            handling.commit()
            assert working.result(60).done == 0
    assert town.item(bulk_job_id)[0] == "skipped"
    assert town.refunds(half_id) == 0


@pytest.mark.parametrize("succeeds", [True, False])
def test_quarantine_waits_for_a_retry(town: Town, succeeds: bool) -> None:
    """A quarantine waits for the retry that holds the row: its success has the compensation refused."""
    half_id = town.transfer()
    town.consume(town.declare(_fail))
    town.age_retries()
    handler = Pause(record if succeeds else _fail_later)
    bulk_job_id = town.order(half_id)
    consumer = town.declare(handler)
    with elsewhere(lambda: handle(town, consumer, retry=True)):
        handler.begun.wait(60)
        with elsewhere(town.work):
            wait_until(town.waiting, "the quarantine waits")
            handler.go_on.set()
    assert town.item(bulk_job_id)[0] == ("skipped" if succeeds else "done")
    assert (town.effects(half_id), town.refunds(half_id)) == ((1, 0) if succeeds else (0, 1))


def test_quarantine_does_not_wait_for_ever(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the retry takes too long, the item says so and waits; then it goes on."""
    monkeypatch.setattr("outbox.compensate.quarantine.PATIENCE", 0.05)
    half_id = town.transfer()
    town.consume(town.declare(_fail))
    town.age_retries()
    handler = Pause(_fail_later)
    consumer = town.declare(handler)
    bulk_job_id = town.order(half_id)
    with elsewhere(lambda: handle(town, consumer, retry=True)):
        handler.begun.wait(60)
        assert town.work().failed == 1
        state, outcome = town.item(bulk_job_id)
        assert (state, (outcome or "").partition(" in database")[0]) == (
            "pending",
            "waits: another transaction has the message",
        )
        handler.go_on.set()
    assert not town.work()
    town.age()
    assert town.work().done == 1
    assert town.at_a.rows("SELECT attempts FROM outbox.bulk_item") == [1]


def test_sent_again_meanwhile(town: Town) -> None:
    """A message sent again between quarantine and compensation is quarantined in groups that had passed it, too."""
    half_id = town.transfer()
    passed = town.declare(group="late", start="now")

    def slow(message: Message, session: Session) -> None:
        pytest.fail("it was sent again")

    town.compensate_by(slow)
    bulk_job_id = town.order(half_id)
    town.work(lambda is_async: _Resender(town, half_id))
    assert town.item(bulk_job_id) == ("pending", "waits: it was sent again")
    town.compensate_by(give_back)
    assert town.work().done == 1
    assert town.status(half_id) == {"late": "quarantined"}
    town.consume(passed)
    assert town.effects(half_id) == 0


def test_resend_waits_for_the_compensation(town: Town) -> None:
    """A resend that comes while the compensation runs waits for it, and then sends nothing."""
    half_id = town.transfer()
    compensation = Pause(give_back)
    town.compensate_by(compensation)
    town.order(half_id)
    with elsewhere(town.work) as working:
        compensation.begun.wait(60)
        with elsewhere(lambda: town.app.operator.resend(half_id, by="me", why="test")) as resending:
            wait_until(town.at_a.waiting, "the resend waits")
            compensation.go_on.set()
            assert working.result(60).done == 1
            with pytest.raises(ActRefused, match="its local transaction was compensated"):
                resending.result(60)
    assert town.at_a.rows("SELECT count(*) FROM outbox.message") == [1]


def test_cancelled_while_it_runs(town: Town) -> None:
    """A compensation under way when its bulk item is cancelled is undone, and its quarantines are released."""
    half_id = town.parked()
    compensation = Pause(give_back)
    town.compensate_by(compensation)
    bulk_job_id = town.order(half_id)
    with elsewhere(town.work) as working:
        compensation.begun.wait(60)
        town.at_a.run("UPDATE outbox.bulk_item SET state = 'cancelled'")
        compensation.go_on.set()
        assert working.result(60).done == 0
    assert town.item(bulk_job_id)[0] == "cancelled"
    assert town.status(half_id) == {"g": "parked"}
    assert (town.balance, town.refunds(half_id)) == (900, 0)


class _Resender:
    """A room that sends the message again before it is entered."""

    def __init__(self, town: Town, half_id: UUID) -> None:
        self._town, self._half_id = town, half_id

    def run(self, act: Callable[..., Counts]) -> Counts:
        settings = self._town.app.settings
        with self._town.producer.begin() as connection:
            resend(connection, settings, newest_sends(connection, settings, [self._half_id]), actor="me", reason="test")
        with self._town.producer.connect() as connection:
            return act(connection, connection)

    def end(self) -> None:
        """Do nothing."""


def _fail(message: Message, session: Session) -> None:
    raise ValueError("not now")


def _fail_later(message: Message, session: Session) -> Any:
    from outbox import Retry

    return Retry()
