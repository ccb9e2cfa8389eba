"""Bank A takes a transfer back that bank B can't credit: an operator orders it, a worker does it, once."""

from __future__ import annotations

import os

from sqlalchemy.orm import Session

from outbox import Message

from .bank_a_tables import Account, LedgerEntry, outbox
from .message import TOPIC, TransferOrdered

#: Where the messages of the topic are consumed. Bank B's inbox is quarantined before a refund, so that it can't credit
#: what the sender has got back.
CONSUMER = os.environ.get("BANK_B_URL", "postgresql+psycopg://localhost/bank_b")


@outbox.compensation(TOPIC, model=TransferOrdered, consumers=[CONSUMER])
def refund(message: Message, session: Session) -> dict[str, str]:
    """Give the sender back what the transfer took; return what is to be on record about it.

    The framework calls it once for each message, in the transaction that also records the compensation. If
    an operator has refunded the transfer by hand, the ledger refuses a second refund.
    """
    transfer: TransferOrdered = message.body
    account = session.get_one(Account, transfer.sender, with_for_update=True)
    account.balance += transfer.amount
    session.add(LedgerEntry(account_id=account.id, refund_of=transfer.transfer_id, amount=transfer.amount))
    return {"account": str(account.id), "refunded": str(transfer.amount)}
