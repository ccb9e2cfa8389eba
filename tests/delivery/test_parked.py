"""What is parked is compensated without an operator, by the same order, once, and only as much as is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings, Worker
from outbox.compensate.compensate_pass import compensate_once
from outbox.database.engines import EngineRunner
from outbox.errors import InvalidHandler, InvalidMessage
from tests.delivery.support import Post, refuse
from tests.kit import wait_until

REFUNDS = "CREATE TABLE IF NOT EXISTS refund (message_id uuid); DELETE FROM refund"


def refund(message: Message, session: Session) -> None:
    """Give the money back; twice would be seen."""
    session.execute(text("INSERT INTO refund VALUES (:id)"), {"id": message.id})


class Bank(Post):
    """Bank A, which compensates what bank B has parked."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, settings)
        self.at_a.run(REFUNDS)

    def policy(self, after: float = 0.0) -> Outbox:
        """Return bank A with its policy."""
        app = self.know()
        app.compensation("t", consumers=[self.consumer], when="parked", after=after)(refund)
        return app

    def parked(self, *bodies: object) -> list[UUID]:
        """Make transfers that bank B parks."""
        ids = self.send(*bodies)
        self.consume(self.declare(refuse, retry_delays=()))
        return ids

    def compensate(self, app: Outbox) -> None:
        """Carry the orders out, as a worker does."""
        with self.producer.connect() as connection:
            compensate_once(
                connection,
                self.settings,
                compensations=app.compensations,
                new_runner=lambda is_async: EngineRunner(self.producer),
            )

    def refunds(self) -> list[UUID]:
        """Return the transfers whose money is back."""
        return self.at_a.rows("SELECT message_id FROM refund ORDER BY 1")

    def orders(self) -> list[int]:
        """Return how many messages each order has."""
        return self.at_a.rows("SELECT total FROM outbox.bulk_job ORDER BY created_at")


@pytest.fixture
def bank(banks: tuple[Engine, Engine], settings: Settings) -> Iterator[Bank]:
    """Two banks in two databases."""
    with Bank(*banks, settings) as bank:
        yield bank


def test_parked_is_refunded_once(bank: Bank) -> None:
    """The order is an operator's but for its name; it is carried out once, and isn't made again."""
    app = bank.policy()
    ids = bank.parked(1, 2)
    for _ in range(3):
        bank.confirm(app)
        bank.compensate(app)
    assert (bank.refunds(), bank.orders()) == (ids, [2])
    assert bank.rows("SELECT DISTINCT status FROM outbox.consumer_message") == ["quarantined"]
    assert all(bank.settled(each) for each in ids)
    actors = "SELECT DISTINCT actor, origin ->> 'via' FROM outbox.audit WHERE action IN ('bulk', 'compensate')"
    assert bank.at_a.rows(actors) == [("policy", "worker")]


def test_not_before_its_time(bank: Bank) -> None:
    """A message stays parked for as long as the compensation says: an operator may retry it until then."""
    app = bank.policy(after=3600)
    (half_id,) = bank.parked(1)
    bank.confirm(app)
    assert bank.orders() == []
    bank.at_a.run("UPDATE outbox.delivery SET recorded_at = recorded_at - interval '1 hour'")
    bank.confirm(app)
    bank.compensate(app)
    assert bank.refunds() == [half_id]


def test_what_took_effect_after_all_is_not_refunded(bank: Bank) -> None:
    """An operator's retry that came in between wins, and the policy lets it be."""
    app = bank.policy()
    (half_id,) = bank.parked(1)
    bank.confirm(app)
    bank.sink.operator.retry(half_id, group="g", by="me", why="the account is there now")
    bank.retry(bank.declare())
    for _ in range(2):
        bank.compensate(app)
        bank.confirm(app)
    assert (bank.refunds(), bank.ledger(), bank.orders()) == ([], ["1"], [1])
    assert bank.fates()[half_id] == ["parked", "consumed"]


def test_an_operator_was_first(bank: Bank) -> None:
    """What an operator has ordered isn't ordered again."""
    app = bank.policy()
    (half_id,) = bank.parked(1)
    bank.app.operator.compensate(half_id, by="ada", why="no such account")
    bank.confirm(app)
    assert bank.orders() == [1]
    bank.compensate(app)
    assert bank.refunds() == [half_id]


def test_limit_and_switch(bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    """So many in an hour, the others wait and are told of; none when that is switched off."""
    app = bank.policy()
    bank.parked(1, 2, 3)
    bank.confirm(app, replace(bank.settings, compensate_parked=0))
    assert bank.orders() == []
    few = replace(bank.settings, compensate_parked=2)
    for _ in range(2):
        bank.confirm(app, few)
    assert bank.orders() == [2]
    held = [each for each in caplog.records if getattr(each, "outbox_event", "") == "delivery.held"]
    assert [each.waiting for each in held] == [1, 1]  # type: ignore[attr-defined]
    bank.at_a.run("UPDATE outbox.bulk_job SET created_at = created_at - interval '1 hour'")
    bank.confirm(app, few)
    assert sorted(bank.orders()) == [1, 2]


def test_of_many_workers_one_orders(bank: Bank) -> None:
    """Passes that begin at the same time order each compensation once."""
    app = bank.policy()
    ids = bank.parked(*range(10))
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(bank.confirm, app) for _ in range(4)]:
            each.result()
    bank.confirm(app)
    for _ in range(2):
        bank.compensate(app)
    assert bank.refunds() == sorted(ids)
    assert bank.at_a.value("SELECT count(*) FROM outbox.bulk_item WHERE state = 'done'") == 10


def test_declarations(bank: Bank) -> None:
    """What can't work is refused."""
    app = Outbox(bank.producer, settings=bank.settings)
    with pytest.raises(InvalidHandler, match="must be 'ordered' or 'parked'"):
        app.compensation("t", when="never")(refund)  # type: ignore[call-overload]
    with pytest.raises(InvalidHandler, match="needs when='parked'"):
        app.compensation("t", after=5)(refund)
    with pytest.raises(InvalidMessage, match="after"):
        app.compensation("t", when="parked", after=-1)(refund)
    app.compensation("t", when="parked")(refund)
    with pytest.raises(InvalidHandler, match="no group of topic 't' is known"):
        app.groups_to_confirm()


def test_by_a_worker(bank: Bank) -> None:
    """Bank A's worker gives the money back, and nobody has ordered it."""
    ids = bank.parked(1, 2)
    app = Outbox(bank.producer, settings=replace(bank.settings, confirm_interval=0.05))
    app.known_group("t", group="g", consumer=bank.consumer)
    app.compensation("t", consumers=[bank.consumer], when="parked")(refund)
    with Worker(app):
        wait_until(lambda: bank.refunds() == ids, "the money is back")
