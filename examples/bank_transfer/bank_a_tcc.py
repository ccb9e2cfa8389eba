"""Bank A by try, confirm or cancel (TCC): for an outcome that isn't known while a transaction can be held open.

Each step is a local transaction, and each takes its half message along:

- **try** reserves the amount, and prepares the message: both or neither;
- then the compliance desk is asked, and no transaction is open while it thinks;
- **confirm** turns the reservation into a debit, and commits the message: both or neither;
- **cancel** releases the reservation, and rolls the message back: both or neither.

A teller that dies in between leaves a reservation and an orphan, which the check of bank A's workers decides together
(`verdict`). Should the teller come back after that, its confirm fails as a whole. That each step takes effect once, and
none after the other decision, is the business of a participant (`money`); its transaction id is that of the half.
"""

from __future__ import annotations

import datetime as dt
import os
from contextlib import suppress
from decimal import Decimal
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, select, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from outbox import Orphan, Participant, Resolution
from outbox.errors import BranchCancelled, BranchConfirmed
from outbox.flow.tcc import Branch

from .bank_a_tables import Account, Base, Refused, debit, engine, lock_sender, outbox, require_funds, transfer_message
from .message import TOPIC
from .orders import Order

RESERVED, CONFIRMED, CANCELLED, ABANDONED = "reserved", "confirmed", "cancelled", "abandoned"

#: How long a teller may take from try to confirm; older reservations are released by the check.
CONFIRM_WITHIN = dt.timedelta(seconds=float(os.environ.get("BANK_A_CONFIRM_WITHIN", "60")))


class Reservation(Base):
    """Money set aside for an order; it shares its fate with the half message of the same id.

    Confirmed or cancelled by the teller, or abandoned and released by the check. An abandoned order may be tried again.
    """

    __tablename__ = "reservation"
    __table_args__ = (
        CheckConstraint(
            f"state IN ('{RESERVED}', '{CONFIRMED}', '{CANCELLED}', '{ABANDONED}')", name="reservation_state"
        ),
        CheckConstraint(f"(state = '{CANCELLED}') = (reason IS NOT NULL)", name="reservation_reason"),
        Index("reservation_once", "order_id", unique=True, postgresql_where=text(f"state <> '{ABANDONED}'")),
    )

    half_id: Mapped[UUID] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    amount: Mapped[Decimal]
    state: Mapped[str] = mapped_column(server_default=RESERVED)
    reason: Mapped[str | None]


#: Try and confirm are called with the order; cancel with the objection, or None where the teller didn't come back.
money: Participant[Order | str | None] = Participant(outbox, "money")


class StillReserved(Exception):
    """Another teller tried this order, and has neither confirmed nor cancelled it so far."""


def order_transfer_tcc(order: Order) -> None:
    """Execute an order step by step.

    Raises:
        AlreadyExecuted: the order was executed before.
        AlreadyRolledBack: the teller was too slow, and the check has released the reservation. The order may be tried
            again.
        Refused: no such account, insufficient funds, or the compliance desk objects.
        StillReserved: of an earlier try. The check is going to decide it.
    """
    with Session(engine) as session, session.begin():
        half_id = try_transfer(order, session)
    objection = ask_compliance(order)
    with Session(engine) as session, session.begin():
        if objection is None:
            confirm(order, half_id, session)
        else:
            cancel(half_id, objection, session)
    if objection is not None:
        raise Refused(objection)


def try_transfer(order: Order, session: Session) -> UUID:
    """Reserve the amount and prepare the message, in the caller's transaction; return the id of the half message.

    Raises:
        AlreadyExecuted, Refused, StillReserved: see `order_transfer_tcc`.
    """
    half_id = outbox.prepare(session, TOPIC, transfer_message(order), key=order.receiver)
    money.attempt(session, half_id, order)
    return half_id


def ask_compliance(order: Order) -> str | None:
    """Ask the compliance desk about an order; return its objection, None if it has none."""
    return f"receiver {order.receiver} is on the watch list" if order.account_to.endswith("13") else None


def confirm(order: Order, half_id: UUID, session: Session) -> None:
    """Debit what was reserved and commit the message, in the caller's transaction, which fails if it is too late."""
    outbox.commit(half_id, within=session)
    # Cancelled already? Then there is nothing to debit, and the commit of this transaction fails and says by whom.
    with suppress(BranchCancelled):
        money.confirm(session, half_id, order)


def cancel(half_id: UUID, reason: str, session: Session) -> None:
    """Release what was reserved and roll the message back, in the caller's transaction, which fails if it is late."""
    outbox.rollback(half_id, within=session)
    with suppress(BranchConfirmed):
        money.cancel(session, half_id, reason)


@outbox.checker(TOPIC)
def verdict(orphan: Orphan, session: Session) -> Resolution:
    """Say what became of a try; one that was abandoned is released in the transaction that rolls its half back."""
    if session.get(Reservation, orphan.id) is None or orphan.age < CONFIRM_WITHIN:
        return Resolution.UNKNOWN  # without a reservation, no try has left it: a human should look at it
    try:
        # A teller that is just confirming has the branch. It isn't waited for long: then the answer is UNKNOWN.
        money.cancel(session, orphan.id, None)
    except BranchConfirmed:
        return Resolution.COMMIT
    return Resolution.ROLLBACK


# --- what takes effect once ------------------------------------------------------------------------------------------


@money.on_try
def reserve(branch: Branch[Order], session: Session) -> None:
    """Set the amount of an order aside."""
    order = branch.body
    account = lock_sender(order, session)
    tried = select(Reservation).where(Reservation.order_id == order.id, Reservation.state != ABANDONED)
    if (earlier := session.scalar(tried)) is not None:
        if earlier.state == CANCELLED:
            raise Refused(earlier.reason)
        raise StillReserved(f"order {order.id} is still {earlier.state} by half message {earlier.half_id}")
    require_funds(order, account)
    account.reserved += order.amount
    half_id = branch.transaction_id
    session.add(Reservation(half_id=half_id, order_id=order.id, account_id=account.id, amount=order.amount))


@money.on_confirm
def debit_reserved(branch: Branch[Order], session: Session) -> None:
    """Debit what was set aside."""
    reservation, account = _release(branch.transaction_id, session)
    reservation.state = CONFIRMED
    debit(branch.body, account, session)


@money.on_cancel
def release(branch: Branch[str | None], session: Session) -> None:
    """Give back what was set aside."""
    reservation, _ = _release(branch.transaction_id, session)
    reservation.state, reservation.reason = ABANDONED if branch.body is None else CANCELLED, branch.body


def _release(half_id: UUID, session: Session) -> tuple[Reservation, Account]:
    """Give the account back what was reserved; return the reservation and the account, locked."""
    reservation = session.get_one(Reservation, half_id)
    account = session.get_one(Account, reservation.account_id, with_for_update=True)
    account.reserved -= reservation.amount
    return reservation, account
