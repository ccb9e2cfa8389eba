"""Bank A, the producer: debits the sender, and tells bank B exactly when the debit is committed.

There are three ways to execute an order. Debit and message in one local transaction is the way to choose whenever it
can be (`order_transfer`). With a half message first, the intent is on record before the work begins
(`order_transfer_two_phase`). When the outcome is known only later, the money is reserved meanwhile (`bank_a_tcc`).

Before, both banks are asked whether they would execute the order (`bank_a_inquiry`). After, each transfer ends as
credited or refunded (`bank_a_settlement`).

``outbox run --app examples.bank_transfer.bank_a:outbox`` checks what was left undecided, dispatches what was sent, asks
bank B what became of it, and refunds.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from outbox import INJECTED

from .bank_a_settlement import note_credit, refund
from .bank_a_tables import (
    Account,
    AlreadyExecuted,
    Base,
    LedgerEntry,
    Refused,
    Transfer,
    debit,
    engine,
    lock_sender,
    outbox,
    require_funds,
    transfer_message,
)
from .bank_a_tcc import Reservation, order_transfer_tcc
from .message import TOPIC, TransferOrdered
from .orders import Order

__all__ = [
    "Account",
    "AlreadyExecuted",
    "Base",
    "LedgerEntry",
    "Refused",
    "Reservation",
    "Transfer",
    "engine",
    "note_credit",
    "order_transfer",
    "order_transfer_tcc",
    "order_transfer_two_phase",
    "outbox",
    "refund",
]


@outbox.transactional(topic=TOPIC, key=lambda transfer: transfer.receiver)
def order_transfer(order: Order, session: Session = INJECTED) -> TransferOrdered | None:
    """Debit the sender, and tell bank B; None if the order was executed before.

    What is returned is sent in the transaction that debits. The key is the receiver: what is meant for one
    account stays in order, and no two consumers fight over its row.

    Raises:
        Refused: no such account, or insufficient funds; nothing of the order stays.
    """
    try:
        account = lock_sender(order, session)
    except AlreadyExecuted:
        return None
    require_funds(order, account)
    debit(order, account, session)
    return transfer_message(order)


@outbox.two_phase(
    topic=TOPIC, body=transfer_message, key=lambda transfer: transfer.receiver, rollback_on=(Refused, AlreadyExecuted)
)
def order_transfer_two_phase(order: Order, session: Session = INJECTED) -> None:
    """Debit the sender; the half message for bank B was prepared before, and is committed with the debit.

    A process that dies in here leaves an orphan. It needs no checker: the half carries a fence, which tells the check
    whether this transaction still runs. When it has ended without a commit, the orphan is rolled back.

    Raises:
        AlreadyExecuted: the order was executed before. The half message is rolled back.
        AlreadyRolledBack: a check was faster, which can only be before the first statement of the function.
        Refused: no such account, or insufficient funds. The half message is rolled back.
    """
    account = lock_sender(order, session)
    require_funds(order, account)
    debit(order, account, session)
