"""What bank A looks at before it debits: whether the sender is its customer, and whether bank B would take the money.

No transaction is open while bank B is asked, so its answer may be stale when the debit is made, and the amount is
checked once more by the transaction that debits. A bank that offers no desk isn't asked.
"""

from __future__ import annotations

import os
import time
from functools import cache

import httpx
from sqlalchemy.orm import Session

from .bank_a_tables import Refused, engine, lock_sender
from .message import Inquiry, Reply
from .orders import Order

#: The URL of bank B's desk; without one bank B isn't asked.
DESK = os.environ.get("BANK_B_DESK")

_ASK_AGAIN_SECONDS = 0.1


def require_acceptance(order: Order) -> None:
    """Make sure that both banks would execute the order, as far as one can know before.

    Raises:
        AlreadyExecuted: the order was executed before.
        Refused: no such account at bank A, or bank B has an objection.
    """
    if DESK is None:
        return
    with Session(engine) as session:
        lock_sender(order, session)
    inquiry = Inquiry(transfer_id=order.id, receiver=order.receiver, amount=order.amount)
    if (objection := ask(inquiry, _client()).objection) is not None:
        raise Refused(objection)


def ask(inquiry: Inquiry, desk: httpx.Client) -> Reply:
    """Ask until bank B answers: as long as it isn't known whether the receiver is there, nothing is debited."""
    while True:
        try:
            answer = desk.post("/inquiries", json=inquiry.model_dump(mode="json"))
        except httpx.TransportError:
            time.sleep(_ASK_AGAIN_SECONDS)
            continue
        return Reply.model_validate(answer.raise_for_status().json())


@cache
def _client() -> httpx.Client:
    return httpx.Client(base_url=DESK or "")
