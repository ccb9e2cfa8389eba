"""How a transfer ends: credited as bank B confirms, or refunded, by policy or as an operator orders it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a, bank_b, bank_b_desk
from examples.bank_transfer.banks import Banks
from examples.bank_transfer.message import RICHEST, TransferOrdered
from examples.bank_transfer.options import Mode
from examples.bank_transfer.orders import Order
from examples.bank_transfer.source import Source, choose_closing
from outbox import Message, Outbox, Settings, testing
from outbox.consumer.consumer import Consumer
from tests.examples.scene import GOOD, Scene, bank_a_at, deliver


@pytest.fixture
def scene(banks: Banks, tmp_path: Path) -> Scene:
    """An executed order for 30.00 whose receiver has closed the account: its message is parked at bank B."""
    scene = Scene.of(banks, Mode.SEND, tmp_path, GOOD)
    scene.work()
    _set_closed(banks, True)
    deliver(banks)
    return scene


def _set_closed(banks: Banks, closed: bool) -> None:
    with banks.b.begin() as b:
        b.execute(update(bank_b.Account).values(closed=closed))


def _order_refund(banks: Banks) -> Outbox:
    """Order the rollback of the only message; return bank A's outbox, whose workers carry it out."""
    outbox = bank_a_at(banks)
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
    parked = scene.audit(executed=1, by_hand=True)
    assert scene.states() == ["debited"]
    assert ([p.amount for p in parked.parked], parked.faults) == ([Decimal("30.00")], ())
    outbox = _order_refund(scene.banks)
    testing.bulk(outbox)
    testing.bulk(outbox)
    audited = scene.audit(executed=1)
    assert (dict(audited.refunded), audited.parked, audited.in_flight) == ({7: Decimal("30.00")}, (), 0)
    assert (audited.faults, audited.sums) == ((), scene.before)
    assert scene.states() == ["refunded"]
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
    _set_closed(scene.banks, False)
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


def test_what_stays_parked_is_refunded_without_an_operator(scene: Scene) -> None:
    """Once, by policy; not before its time; and the audit, which takes what is parked for a fault, is content."""
    assert scene.audit(executed=1).faults == ("1 transfer neither credited nor refunded: 7",)
    patient, prompt = bank_a_at(scene.banks), bank_a_at(scene.banks, refund_after=0.0)
    testing.confirm(patient)
    testing.bulk(patient)
    assert scene.states() == ["debited"]
    for _ in range(2):
        testing.confirm(prompt)
        testing.bulk(prompt)
    assert scene.states() == ["refunded"]
    audited = scene.audit(executed=1)
    assert (audited.faults, audited.sums, len(audited.refunded)) == ((), scene.before, 1)


def test_what_is_credited_after_all_is_not_refunded(scene: Scene) -> None:
    """The account is opened again before the policy's worker comes: the order is refused, and bank A learns of it."""
    prompt = bank_a_at(scene.banks, refund_after=0.0)
    testing.confirm(prompt)
    _set_closed(scene.banks, False)
    with scene.banks.a.connect() as a:
        message_id = a.execute(text("SELECT half_id FROM outbox.message")).scalar_one()
    Outbox(scene.banks.b, group="bank-b").operator.retry(message_id, group="bank-b", by="bob", why="open again")
    _retry(scene.banks)
    testing.bulk(prompt)
    assert scene.states() == ["debited"]
    testing.confirm(prompt)
    testing.drain(prompt)
    assert scene.states() == ["credited"]
    assert scene.audit(executed=1).faults == ()


def test_a_credit_of_what_was_refunded_is_told(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Bank A doesn't take a state back: the callback fails each time, and its error names the transfer."""
    with Session(scene.banks.a) as session, session.begin():
        session.get_one(bank_a.Transfer, 7).state = "refunded"
        session.get_one(bank_a.Transfer, 7).settled_at = func.now()
    _set_closed(scene.banks, False)
    with scene.banks.b.begin() as b:
        b.execute(text("UPDATE outbox.consumer_message SET status = 'failed', next_attempt_at = now()"))
    _retry(scene.banks)
    bank = bank_a_at(scene.banks)
    testing.confirm(bank)
    testing.drain(bank)
    assert "transfer 7 is credited at bank B, and refunded at bank A" in caplog.text
    found = scene.audit(executed=1).faults
    assert "1 transfer credited by bank B's ledger, and not by their state: 7" in found
    assert "1 transfer refunded by their state, and not by bank A's ledger: 7" in found


def test_accounts_are_closed_just_after_bank_a_has_asked(banks: Banks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first inquiry is answered with no objection, the next with one; nothing is said of an unknown account."""
    monkeypatch.setattr(bank_b_desk, "engine", banks.b)
    with banks.b.begin() as b:
        b.execute(insert(bank_b.Account).values(id="AB-1", balance=Decimal()))
    client = TestClient(bank_b_desk.desk(closing=[7]))

    def ask(transfer: int, receiver: str = "AB-1", amount: str = "1.00") -> str | None:
        asked = {"transfer_id": transfer, "receiver": receiver, "amount": amount}
        answer: str | None = client.post("/inquiries", json=asked).raise_for_status().json()["objection"]
        return answer

    assert [ask(6), ask(7), ask(8)] == [None, None, "account AB-1 of bank B is closed"]
    assert ask(7, "AB-2") == "no account AB-2 at bank B"


def test_an_account_takes_no_more_than_it_can_hold() -> None:
    """The desk objects to an amount for which the account has no room."""
    account = bank_b.Account(id="AB-1", balance=RICHEST, closed=False)
    assert bank_b.objection("AB-1", Decimal("0.00"), account) is None
    assert (
        bank_b.objection("AB-1", Decimal("0.01"), account) == f"account AB-1 of bank B would hold more than {RICHEST}"
    )


def test_the_same_accounts_are_closed_for_the_same_seed() -> None:
    """Some, each of another receiver; one for a hundred orders, but at least two."""
    source = Source(None, 400, 1)
    closing = choose_closing(source, 1)
    assert closing == choose_closing(source, 1)
    assert closing != choose_closing(source, 2)
    receivers = [order.receiver for order in source if isinstance(order, Order) and order.id in closing]
    assert len(receivers) == len(set(receivers)) == len(closing) == 4
    assert len(choose_closing(Source(None, 20, 1), 1)) == 2
    assert len(choose_closing(Source(None, 5_000, 1), 1)) == 25


def _retry(banks: Banks) -> None:
    """Have bank B retry what is due."""
    with banks.a.connect() as source, banks.b.connect() as connection:
        Consumer(bank_b.outbox.subscriptions["transfer", "bank-b"], Settings()).retry_once(connection, source)


class _Told(Message):
    """A message of which only the body is looked at."""

    def __init__(self, body: TransferOrdered) -> None:
        self._body = body

    @property
    def body(self) -> TransferOrdered:
        """What bank B was told."""
        return self._body
