"""The audit: whatever is changed behind the banks' back is found."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Connection, delete, func, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Session

from examples.bank_transfer import bank_a, bank_b
from examples.bank_transfer.audit import Audit, audit, money
from examples.bank_transfer.banks import Banks, open_accounts
from examples.bank_transfer.source import Source, survey
from tests.examples.scene import deliver

Auditor = Callable[[], Audit]


@pytest.fixture
def auditor(banks: Banks) -> Auditor:
    """The audit of three transfers, which were executed, dispatched and consumed."""
    orders = Source(None, 3, 1)
    open_accounts(banks, survey(orders, 1))
    before = money(banks)
    for order in orders.share(0, 1):
        with Session(banks.a) as session, session.begin():
            bank_a.order_transfer(order, session=session)
    deliver(banks)
    return lambda: audit(banks, before, orders=3)


def test_honest_banks_pass(auditor: Auditor) -> None:
    """Three transfers, three credits, no fault."""
    found = auditor()
    assert (found.transfers, found.messages, found.inbox_rows, found.in_flight) == (3, 3, 3, 0)
    assert found.faults == ()


def _without(table: type[DeclarativeBase]) -> Callable[[Connection], Any]:
    key: Any = table.__table__.c.id
    last = select(func.max(key)).scalar_subquery()
    return lambda connection: connection.execute(delete(table).where(key == last))


def _cent(table: type[bank_a.Account] | type[bank_b.Account]) -> Callable[[Connection], Any]:
    richest = select(func.max(table.id)).scalar_subquery()
    change = update(table).where(table.id == richest).values(balance=table.balance + Decimal("0.01"))
    return lambda connection: connection.execute(change)


def _credit_twice(connection: Connection) -> None:
    entry = bank_b.LedgerEntry
    once = select(entry.account_id, entry.transfer_id, entry.message_id, entry.amount).where(
        entry.id == select(func.max(entry.id)).scalar_subquery()
    )
    account, _, _, amount = connection.execute(once).one()
    connection.execute(insert(entry).from_select(["account_id", "transfer_id", "message_id", "amount"], once))
    connection.execute(
        update(bank_b.Account).where(bank_b.Account.id == account).values(balance=bank_b.Account.balance + amount)
    )


def _without_inbox_row(connection: Connection) -> None:
    connection.execute(
        text(
            "DELETE FROM outbox.consumer_message "
            "WHERE message_id = (SELECT message_id FROM outbox.consumer_message LIMIT 1)"
        )
    )


def _in_state(state: str) -> Callable[[Connection], Any]:
    last = select(func.max(bank_a.Transfer.id)).scalar_subquery()
    settled_at = None if state == "debited" else func.now()
    change = update(bank_a.Transfer).where(bank_a.Transfer.id == last).values(state=state, settled_at=settled_at)
    return lambda connection: connection.execute(change)


def _refund_by_hand(connection: Connection) -> None:
    """Give a sender money that bank B has credited already."""
    entry, account = bank_a.LedgerEntry, bank_a.Account
    transfer = connection.execute(
        select(bank_a.Transfer.id, bank_a.Transfer.account_id, bank_a.Transfer.amount)
    ).first()
    assert transfer
    connection.execute(
        insert(entry).values(account_id=transfer.account_id, refund_of=transfer.id, amount=transfer.amount)
    )
    more = update(account).where(account.id == transfer.account_id).values(balance=account.balance + transfer.amount)
    connection.execute(more)


def _quarantine(connection: Connection) -> None:
    connection.execute(
        text(
            "UPDATE outbox.consumer_message SET status = 'quarantined' "
            "WHERE message_id = (SELECT message_id FROM outbox.consumer_message LIMIT 1)"
        )
    )


@pytest.mark.parametrize(
    ("bank", "theft", "finding"),
    [
        ("a", _without(bank_a.LedgerEntry), "1 transfer without a debit"),
        ("b", _without(bank_b.LedgerEntry), "1 transfer in flight"),
        ("a", _cent(bank_a.Account), "0.01 is too much"),
        ("b", _cent(bank_b.Account), "but its ledger adds up to"),
        ("b", _credit_twice, "1 transfer with more than one credit"),
        ("b", _without_inbox_row, "2 inbox rows, but 3 halves with a message"),
        ("b", _without(bank_b.LedgerEntry), "1 transfer credited by their state, and not by bank B's ledger"),
        ("a", _in_state("refunded"), "1 transfer refunded by their state, and not by bank A's ledger"),
        ("a", _in_state("refunded"), "1 transfer credited by bank B's ledger, and not by their state"),
        ("a", _in_state("debited"), "1 transfer neither credited nor refunded"),
        ("a", _refund_by_hand, "1 transfer refunded by bank A's ledger, and not by their state"),
        ("a", _refund_by_hand, "1 transfer refunded, and not compensated"),
        ("b", _quarantine, "0 transfers compensated, but 1 message quarantined at bank B"),
    ],
    ids=[
        *("debit-gone", "credit-gone", "cent-at-a", "cent-at-b", "credited-twice", "inbox-row-gone"),
        *("not-credited", "not-refunded", "credited-though", "no-end", "refunded-though", "by-hand", "quarantined"),
    ],
)
def test_a_thief_is_found(
    banks: Banks, auditor: Auditor, bank: str, theft: Callable[[Connection], Any], finding: str
) -> None:
    """Every way to change one of the two databases after the last transfer has its sentence."""
    with getattr(banks, bank).begin() as connection:
        theft(connection)
    assert any(finding in fault for fault in auditor().faults), auditor().faults


def test_an_order_that_was_skipped_is_found(banks: Banks, auditor: Auditor) -> None:
    """The sums are right when an order is forgotten altogether, so orders and transfers are counted."""
    assert audit(banks, money(banks), orders=4).faults == ("3 transfers, but 4 accepted orders",)
