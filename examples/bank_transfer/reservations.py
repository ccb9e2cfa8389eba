"""Tell the outcomes of the reservations at bank A, and find the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal

from sqlalchemy import Connection, case, func, select

from outbox.flow.tcc import BranchState

from .bank_a import Account, Reservation
from .bank_a_tcc import ABANDONED, CANCELLED, CONFIRMED, RESERVED
from .evidence import BRANCHES, OPS
from .halves import COMMIT, ROLLBACK
from .sentences import one_each, transfers_found


def read(connection: Connection) -> Counter[str]:
    """Count the reservations by state."""
    query = select(Reservation.state, func.count()).group_by(Reservation.state)
    return Counter({row[0]: row[1] for row in connection.execute(query)})


def faults(connection: Connection, transfers: Mapping[int, Decimal]) -> Iterator[str]:
    """Compare the reservations with the accounts, with their half messages and branches, and with the transfers."""
    yield from _left_over(connection)
    yield from _wrongly_decided(connection)
    if connection.scalar(select(func.count()).select_from(Reservation)):
        query = select(Reservation.order_id, Reservation.amount).where(Reservation.state == CONFIRMED)
        confirmed = [(order, amount) for order, amount in connection.execute(query)]
        yield from one_each("confirmed reservation", transfers, confirmed)


def _left_over(connection: Connection) -> Iterator[str]:
    is_open = Reservation.state == RESERVED
    yield from transfers_found("still reserved", connection.scalars(select(Reservation.order_id).where(is_open)))
    spoken_for = func.coalesce(func.sum(Reservation.amount), 0)
    query = (
        select(Account.id, Account.reserved, spoken_for)
        .outerjoin(Reservation, (Reservation.account_id == Account.id) & is_open)
        .group_by(Account.id)
        .having(Account.reserved != spoken_for)
        .order_by(Account.id)
    )
    for account, reserved, amount in connection.execute(query):
        yield f"account {account} of bank A has {reserved} reserved, but its open reservations add up to {amount}"


def _wrongly_decided(connection: Connection) -> Iterator[str]:
    ops = select(Reservation.order_id).outerjoin(OPS, OPS.c.half_id == Reservation.half_id)
    due = case({CONFIRMED: COMMIT, CANCELLED: ROLLBACK, ABANDONED: ROLLBACK}, value=Reservation.state)
    query = ops.where(due.is_distinct_from(OPS.c.resolution))
    yield from transfers_found("with a reservation that doesn't match its half message", connection.scalars(query))

    branches = select(Reservation.order_id).outerjoin(BRANCHES, BRANCHES.c.transaction_id == Reservation.half_id)
    made = case(
        {
            RESERVED: BranchState.TRIED,
            CONFIRMED: BranchState.CONFIRMED,
            CANCELLED: BranchState.CANCELLED,
            ABANDONED: BranchState.CANCELLED,
        },
        value=Reservation.state,
    )
    query = branches.where(made.is_distinct_from(BRANCHES.c.state))
    yield from transfers_found("with a reservation that doesn't match its branch", connection.scalars(query))
