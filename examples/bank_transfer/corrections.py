"""Corrections of bank B's books by hand, in the caller's transaction: what faults do, and what an operator does."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select, update

from . import bank_b
from .bank_b import LedgerEntry
from .evidence import INBOX
from .message import GROUP, TransferOrdered

_OF_GROUP = INBOX.c.consumer_group == GROUP


def credit(connection: Connection, message_id: UUID, transfer: TransferOrdered) -> None:
    """Credit a transfer, as the consumer does."""
    entry = {"account_id": transfer.receiver, "transfer_id": transfer.transfer_id, "amount": transfer.amount}
    connection.execute(insert(LedgerEntry).values(message_id=message_id, **entry))
    _add(connection, transfer.receiver, transfer.amount)


def take_back(connection: Connection, message_id: UUID, keep: int = 0) -> Decimal:
    """Undo all credits of a message but for the first ``keep``; return the amount taken back."""
    entries = select(LedgerEntry.id).where(LedgerEntry.message_id == message_id).order_by(LedgerEntry.id).offset(keep)
    undone = (
        delete(LedgerEntry).where(LedgerEntry.id.in_(entries)).returning(LedgerEntry.account_id, LedgerEntry.amount)
    )
    total = Decimal()
    for account, amount in connection.execute(undone).all():
        _add(connection, account, -amount)
        total += amount
    return total


def delete_inbox_row(connection: Connection, message_id: UUID) -> None:
    """Delete a message from the inbox."""
    connection.execute(delete(INBOX).where(_OF_GROUP, INBOX.c.message_id == message_id))


def mark(connection: Connection, message_id: UUID, **columns: object) -> None:
    """Overwrite columns of a message's inbox row."""
    connection.execute(update(INBOX).where(_OF_GROUP, INBOX.c.message_id == message_id).values(columns))


def insert_inbox_row(connection: Connection, message_id: UUID, **columns: object) -> None:
    """Write an inbox row of a message that is consumed."""
    row = {"consumer_group": GROUP, "message_id": message_id, "status": "consumed", "attempts": 1, **columns}
    connection.execute(insert(INBOX).values(row))


def _add(connection: Connection, account: str, amount: Decimal) -> None:
    of_account = bank_b.Account.id == account
    connection.execute(update(bank_b.Account).where(of_account).values(balance=bank_b.Account.balance + amount))
