"""How a transfer ends at bank A: bank B has credited it, or the sender has the money back.

Bank A's workers ask bank B what became of each message. A credit is noted. A message that bank B has parked, for
the account was closed after bank A had asked, is refunded without an operator: the message is quarantined at bank B
first, so that it can't be credited any more.
"""

from __future__ import annotations

import os

from sqlalchemy import func
from sqlalchemy.orm import Session

from outbox import Delivery, Message

from .bank_a_tables import CREDITED, REFUNDED, Account, LedgerEntry, Transfer, outbox
from .message import GROUP, TOPIC, TransferOrdered

#: Where the messages of the topic are consumed. Bank B's inbox is asked what became of them, and quarantined before a
#: refund.
CONSUMER = os.environ.get("BANK_B_URL", "postgresql+psycopg://localhost/bank_b")
#: How long (seconds) bank B's operators may heal a parked message, before it is refunded.
REFUND_AFTER = float(os.environ.get("BANK_A_REFUND_AFTER", "3600"))

outbox.known_group(TOPIC, group=GROUP, consumer=CONSUMER)


class RefundedBefore(Exception):
    """Bank B has credited a transfer that bank A has refunded: the money is there twice, and a human must know."""


@outbox.on_delivered(TOPIC, model=TransferOrdered)
def note_credit(delivery: Delivery, session: Session) -> None:
    """Note that bank B has credited a transfer.

    The framework calls it once for each message, in the transaction that also records the delivery.

    Raises:
        RefundedBefore: it is logged, and called again in the next pass.
    """
    transfer = session.get_one(Transfer, delivery.message.body.transfer_id, with_for_update=True)
    if transfer.state == REFUNDED:
        raise RefundedBefore(f"transfer {transfer.id} is credited at bank B, and refunded at bank A")
    _settle(transfer, CREDITED)


@outbox.compensation(TOPIC, model=TransferOrdered, consumers=[CONSUMER], when="parked", after=REFUND_AFTER)
def refund(message: Message, session: Session) -> dict[str, str]:
    """Give the sender back what the transfer took; return the text for the record.

    The framework calls it once for each message, in the transaction that also records the compensation: by itself for
    what stays parked, or when an operator orders it. If an operator has refunded the transfer by hand, the ledger
    refuses a second refund.
    """
    ordered: TransferOrdered = message.body
    account = session.get_one(Account, ordered.sender, with_for_update=True)
    account.balance += ordered.amount
    session.add(LedgerEntry(account_id=account.id, refund_of=ordered.transfer_id, amount=ordered.amount))
    _settle(session.get_one(Transfer, ordered.transfer_id, with_for_update=True), REFUNDED)
    return {"account": str(account.id), "refunded": str(ordered.amount)}


def _settle(transfer: Transfer, state: str) -> None:
    transfer.state, transfer.settled_at = state, func.now()
