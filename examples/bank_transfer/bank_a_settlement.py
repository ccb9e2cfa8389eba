"""How a transfer ends at bank A: bank B has credited it, or the sender has the money back.

Bank A's workers ask bank B what became of each message. A credit is noted. A message that bank B has parked, for
the account was closed after bank A had asked, is refunded without an operator: the message is quarantined at bank B
first, so that it can't be credited any more.
"""

from __future__ import annotations

import os

from sqlalchemy.orm import Session

from outbox import Delivery, Message

from .bank_a_tables import outbox, settle_as_credited, settle_by_refund
from .message import GROUP, TOPIC, TransferOrdered

#: Where the messages of the topic are consumed. Bank B's inbox is asked what became of them, and quarantined before a
#: refund.
CONSUMER = os.environ.get("BANK_B_URL", "postgresql+psycopg://localhost/bank_b")
#: How long (seconds) bank B's operators may heal a parked message, before it is refunded.
REFUND_AFTER = float(os.environ.get("BANK_A_REFUND_AFTER", "3600"))

outbox.known_group(TOPIC, group=GROUP, consumer=CONSUMER)


@outbox.on_delivered(TOPIC, model=TransferOrdered)
def note_credit(delivery: Delivery, session: Session) -> None:
    """Note that bank B has credited a transfer.

    The framework calls it once for each message, in the transaction that also records the delivery.

    Raises:
        RefundedBefore: it is logged, and called again in the next pass.
    """
    settle_as_credited(delivery.message.body.transfer_id, session)


@outbox.compensation(TOPIC, model=TransferOrdered, consumers=[CONSUMER], when="parked", after=REFUND_AFTER)
def refund(message: Message, session: Session) -> dict[str, str]:
    """Give the sender back what the transfer took; return the text for the record.

    The framework calls it once for each message, in the transaction that also records the compensation: by itself for
    what stays parked, or when an operator orders it. If an operator has refunded the transfer by hand, the ledger
    refuses a second refund.
    """
    ordered: TransferOrdered = message.body
    transfer = settle_by_refund(ordered.transfer_id, session)
    return {"account": str(transfer.account_id), "refunded": str(transfer.amount)}
