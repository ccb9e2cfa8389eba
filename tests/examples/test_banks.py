"""The service function of bank A and the handler of bank B, one call at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from examples.bank_transfer.bank_a import Account, LedgerEntry, Refused, Transfer, order_transfer
from examples.bank_transfer.orders import Order
from tests.kit import wait_until

ORDER = Order(1, 501, 7, "AB", "71000001", Decimal("30.00"), "RENT")


def test_transfer_and_message_are_committed_together(bank: Engine) -> None:
    """Debit, transfer, ledger entry and message are there after the commit, and not before."""
    with Session(bank) as session, session.begin():
        order_transfer(ORDER, session=session)
        assert counts_of(bank) == (0, 0, 0)
    assert counts_of(bank) == (1, 1, 1)
    assert _balance(bank) == Decimal("70.00")


def test_nothing_is_left_of_a_transfer_whose_transaction_is_rolled_back(bank: Engine) -> None:
    """The message goes with the debit."""
    with Session(bank) as session:
        order_transfer(ORDER, session=session)
        session.rollback()
    assert (counts_of(bank), _balance(bank)) == ((0, 0, 0), Decimal("100.00"))


def test_an_order_is_executed_once_however_often_it_is_given(bank: Engine) -> None:
    """The second time it returns None, and so sends nothing."""
    for expected in (True, False, False):
        with Session(bank) as session, session.begin():
            assert (order_transfer(ORDER, session=session) is not None) is expected
    assert (counts_of(bank), _balance(bank)) == ((1, 1, 1), Decimal("70.00"))


def test_an_order_given_to_two_tellers_at_once_is_executed_once(bank: Engine) -> None:
    """The second waits for the first to commit, and then sees that there is nothing to do.

    So it is when a teller was killed while its COMMIT was on its way, and its successor begins again.
    """

    def again() -> object:
        with Session(bank) as session, session.begin():
            return order_transfer(ORDER, session=session)

    with ThreadPoolExecutor(1) as pool:
        with Session(bank) as session, session.begin():
            order_transfer(ORDER, session=session)
            second = pool.submit(again)
            wait_until(lambda: waits(bank), "the second teller waits for the account")
        assert second.result() is None
    assert (counts_of(bank), _balance(bank)) == ((1, 1, 1), Decimal("70.00"))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (Order(1, 502, 8, "AB", "71000001", Decimal("30.00"), ""), "no account 8 at bank A"),
        (
            Order(1, 503, 7, "AB", "71000001", Decimal("100.01"), ""),
            "insufficient funds: account 7 has 100.00, needs 100.01",
        ),
    ],
)
def test_a_refused_order_leaves_no_trace(bank: Engine, order: Order, reason: str) -> None:
    """One clear reason; no debit, no transfer, no message."""
    with pytest.raises(Refused, match=reason), Session(bank) as session, session.begin():
        order_transfer(order, session=session)
    assert (counts_of(bank), _balance(bank)) == ((0, 0, 0), Decimal("100.00"))


def test_the_database_itself_refuses_to_overdraw(bank: Engine) -> None:
    """The CHECK is there for the day when somebody forgets to ask."""
    with pytest.raises(IntegrityError, match="account_not_overdrawn"), Session(bank) as session, session.begin():
        session.get_one(Account, 7).balance -= Decimal("100.01")


def counts_of(bank: Engine) -> tuple[int, ...]:
    """Return the numbers of transfers, of ledger entries, and of half messages."""
    with bank.connect() as connection:
        tables = (Transfer.__table__, LedgerEntry.__table__, text("outbox.half_message"))
        return tuple(connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables)


def _balance(bank: Engine) -> Decimal:
    with Session(bank) as session:
        return session.get_one(Account, 7).balance


def waits(bank: Engine) -> bool:
    """Return whether a connection waits for a lock."""
    with bank.connect() as connection:
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(connection.scalar(waiting))
