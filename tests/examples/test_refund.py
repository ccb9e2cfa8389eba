"""Bank A's refund of a transfer that bank B can't credit, as an operator orders it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a, bank_b, open_console
from examples.bank_transfer.banks import Banks, open_accounts
from examples.bank_transfer.message import TOPIC, TransferOrdered
from examples.bank_transfer.options import Mode
from examples.bank_transfer.orders import generate_orders
from examples.bank_transfer.source import Source, survey
from outbox import Message, Outbox, testing
from tests.examples.scene import GOOD, Scene, deliver


@pytest.fixture
def scene(banks: Banks, tmp_path: Path) -> Scene:
    """An executed order for 30.00 whose receiver has closed the account: its message is parked at bank B."""
    scene = Scene.of(banks, Mode.SEND, tmp_path, GOOD)
    with banks.b.begin() as b:
        b.execute(delete(bank_b.Account))
    scene.work()
    deliver(banks)
    return scene


def _order_refund(banks: Banks) -> Outbox:
    """Order the rollback of the only message; return bank A's outbox, whose workers carry it out."""
    outbox = Outbox(banks.a, group="bank-a")
    outbox.compensation(TOPIC, model=TransferOrdered, consumers=[banks.b])(bank_a.refund)
    with banks.a.connect() as a:
        message_id = a.execute(text("SELECT half_id FROM outbox.message")).scalar_one()
    outbox.operator.compensate(message_id, by="alice", why="the account is closed")
    return outbox


def _sender(scene: Scene) -> int:
    with Session(scene.banks.a) as session:
        return session.scalars(select(bank_a.Account.id)).one()


def _statuses(connection: Connection) -> list[str]:
    return list(connection.scalars(text("SELECT status FROM outbox.consumer_message")))


def test_the_money_comes_back_once(scene: Scene) -> None:
    """The parked transfer is quarantined at bank B, the sender has the money, and the audit of the banks is content."""
    parked = scene.audit(executed=1)
    assert ([p.amount for p in parked.parked], parked.faults) == ([Decimal("30.00")], ())
    outbox = _order_refund(scene.banks)
    testing.bulk(outbox)
    testing.bulk(outbox)
    audited = scene.audit(executed=1)
    assert (dict(audited.refunded), audited.parked, audited.in_flight) == ({7: Decimal("30.00")}, (), 0)
    assert (audited.faults, audited.sums) == ((), scene.before)
    with scene.banks.a.connect() as a:
        told = a.execute(
            text("SELECT actor, reason, result -> 'returned' FROM outbox.audit WHERE action = 'compensate'")
        )
        ((actor, reason, returned),) = told.all()
    assert (actor, reason) == ("alice", "the account is closed")
    assert returned == {"account": str(_sender(scene)), "refunded": "30.00"}


def test_the_message_takes_no_effect_any_more(scene: Scene) -> None:
    """An account that is opened after the refund gets nothing."""
    testing.bulk(_order_refund(scene.banks))
    with Session(scene.banks.b) as session, session.begin():
        session.add(bank_b.Account(id="AB-71000001", balance=Decimal()))
    deliver(scene.banks)
    with scene.banks.b.connect() as b:
        assert _statuses(b) == ["quarantined"]
        assert b.scalar(select(bank_b.Account.balance)) == 0
    assert scene.audit(executed=1).faults == ()


def test_the_ledger_refuses_a_second_refund(scene: Scene) -> None:
    """Whoever calls the function by hand once more is stopped by the books themselves."""
    testing.bulk(_order_refund(scene.banks))
    body = TransferOrdered(transfer_id=7, sender=1, receiver="AB-71000001", amount=Decimal("30.00"))
    with Session(scene.banks.a) as session, session.begin():
        sender = session.scalars(select(bank_a.Account.id)).one()
        with pytest.raises(IntegrityError, match="ledger_entry_refund_of_key"):
            bank_a.refund(_Told(body.model_copy(update={"sender": sender})), session)
            session.flush()
        session.rollback()


def test_a_few_accounts_are_closed(banks: Banks) -> None:
    """The demo closes the same accounts for the same seed, so that there is something to heal."""
    left = []
    for _ in range(2):
        with banks.b.begin() as b:
            b.execute(delete(bank_b.Account))
        with banks.a.begin() as a:
            a.execute(delete(bank_a.LedgerEntry))
            a.execute(delete(bank_a.Account))
        seen = survey(Source(None, 100, 1), 1)
        open_accounts(banks, seen)
        open_console.close_accounts(banks, 1)
        with banks.b.connect() as b:
            left.append(set(b.scalars(select(bank_b.Account.id))))
    assert left[0] == left[1]
    receivers = {order.receiver for order in generate_orders(100, 1)}
    assert len(receivers) - len(left[0]) == max(1, len(receivers) // 50)


class _Told(Message):
    """A message of which only the body is looked at."""

    def __init__(self, body: TransferOrdered) -> None:
        self._body = body

    @property
    def body(self) -> TransferOrdered:
        """What bank B was told."""
        return self._body
