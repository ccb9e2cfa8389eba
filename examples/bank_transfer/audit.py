"""The proof: every transfer left one account, arrived in another, once, and not a cent is missing.

The audit trusts no other module. It compares the transfers of bank A with the credits of bank B one by one, every
balance with the movements of its account, the state of each transfer with both ledgers, the decisions on half messages
and reservations with what was debited, and the sum of all money with that before the first transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Uuid, any_, func, literal, select

from . import audit_via, bank_a, bank_b, halves, reservations, states
from .banks import Banks
from .evidence import AMOUNT, HALVES, INBOX, TRANSFER
from .exchange import Carried
from .halves import Halves
from .message import GROUP
from .sentences import counts_differ, one_each, transfers_found
from .states import States


@dataclass(frozen=True, slots=True)
class Sums:
    """Where the money is: at the banks, with parked messages, and on its way."""

    bank_a: Decimal
    bank_b: Decimal
    parked: Decimal = Decimal("0.00")
    in_flight: Decimal = Decimal("0.00")

    @property
    def total(self) -> Decimal:
        """All the money there is."""
        return self.bank_a + self.bank_b + self.parked + self.in_flight


@dataclass(frozen=True, slots=True)
class Parked:
    """A transfer that bank B could not credit, and why."""

    transfer: int
    amount: Decimal
    reason: str


@dataclass(frozen=True, slots=True)
class Audit:
    """Hold the auditor's counts, and every fault found, as sentences."""

    sums: Sums
    transfers: int
    messages: int
    inbox_rows: int
    answers: int
    retries: int
    parked: tuple[Parked, ...]
    refunded: Mapping[int, Decimal]
    in_flight: int
    states: States
    halves: Halves
    reservations: Counter[str]
    faults: tuple[str, ...]


def money(banks: Banks) -> Sums:
    """Return the money at the banks."""
    with banks.a.connect() as a, banks.b.connect() as b:
        return Sums(_money_of(a, bank_a.Account), _money_of(b, bank_b.Account))


def audit(
    banks: Banks,
    before: Sums,
    orders: int,
    resent: int = 0,
    tried: Callable[[int], bool] = lambda _: True,
    *,
    by_hand: bool = False,
    carried: Carried | None = None,
) -> Audit:
    """Compare the two banks with each other, with ``before``, and with the number of orders not refused.

    ``resent`` is how many messages were sent once more, to repair a loss. ``tried`` tells which transfers were
    reserved first, where some were. A parked message is a fault, unless an operator is to refund it ``by_hand``.
    ``carried`` is what went through a broker, or by webhooks, where bank A can't ask bank B's inbox.
    """
    with banks.a.connect() as a, banks.b.connect() as b:
        transfers: dict[int, Decimal] = dict(_pairs(a, bank_a.Transfer.id, bank_a.Transfer.amount))
        debits = _pairs(a, bank_a.LedgerEntry.transfer_id, -bank_a.LedgerEntry.amount)
        refunds = _pairs(a, bank_a.LedgerEntry.refund_of, bank_a.LedgerEntry.amount)
        decisions = halves.read(a)
        arrivals = _pairs(b, bank_b.LedgerEntry.transfer_id, bank_b.LedgerEntry.amount)
        inbox_rows, retries, reasons = _inbox(b)
        parked = _parked(a, reasons)
        sums = Sums(_money_of(a, bank_a.Account), _money_of(b, bank_b.Account))
        faults = [
            *_unbalanced("A", a, bank_a),
            *_unbalanced("B", b, bank_b),
            *halves.faults(decisions, a, b, transfers, resent),
            *reservations.faults(a, {each: amount for each, amount in transfers.items() if tried(each)}),
            *states.faults(a, b, {p.transfer for p in parked} if by_hand else ()),
            *(audit_via.faults(a, b, carried) if carried else states.compensation_faults(a, b)),
        ]
        reserved = reservations.read(a)
        ended = states.read(a)
        answers = audit_via.answers(b) if carried else 0

    refunded: dict[int, Decimal] = {transfer: amount for transfer, amount in refunds if transfer is not None}
    arrived = {transfer for transfer, _ in arrivals}
    in_flight = transfers.keys() - arrived - {p.transfer for p in parked} - refunded.keys()
    sums = Sums(
        sums.bank_a,
        sums.bank_b,
        sum((p.amount for p in parked), Decimal("0.00")),
        sum((transfers[transfer] for transfer in in_flight), Decimal("0.00")),
    )
    faults = [
        *_sum_faults(before, sums),
        *faults,
        *one_each("debit", transfers, [(t, amount) for t, amount in debits if t is not None]),
        *one_each(
            "credit", transfers, [*arrivals, *((p.transfer, p.amount) for p in parked)], in_flight | refunded.keys()
        ),
        *transfers_found("refunded with another amount", (t for t, n in refunded.items() if transfers.get(t) != n)),
        *transfers_found(
            "refunded, and credited or parked all the same", refunded.keys() & (arrived | {p.transfer for p in parked})
        ),
        *transfers_found("in flight", in_flight),
        *counts_differ("transfers", len(transfers), "accepted orders", orders),
        *counts_differ("inbox rows", inbox_rows, "halves with a message", decisions.dispatched),
        *counts_differ("parked transfers", len(parked), "parked messages", len(reasons)),
    ]
    return Audit(
        sums=sums,
        transfers=len(transfers),
        messages=decisions.messages,
        inbox_rows=inbox_rows,
        answers=answers,
        retries=retries,
        parked=tuple(parked),
        refunded=refunded,
        in_flight=len(in_flight),
        states=ended,
        halves=decisions,
        reservations=reserved,
        faults=tuple(faults),
    )


def _pairs(connection: Connection, *columns: Any) -> list[tuple[Any, Decimal]]:
    return [(row[0], row[1]) for row in connection.execute(select(*columns))]


def _money_of(connection: Connection, account: type[bank_a.Account] | type[bank_b.Account]) -> Decimal:
    return connection.scalar(select(func.coalesce(func.sum(account.balance), Decimal("0.00")))) or Decimal("0.00")


def _inbox(connection: Connection) -> tuple[int, int, dict[UUID, str]]:
    of_group = INBOX.c.consumer_group == GROUP
    retries = func.coalesce(func.sum(func.greatest(INBOX.c.attempts - 1, 0)), 0)
    rows, tries = connection.execute(select(func.count(), retries).where(of_group)).one()
    parked = select(INBOX.c.message_id, INBOX.c.last_error).where(of_group, INBOX.c.status == "parked")
    return rows, tries, {message: reason or "" for message, reason in connection.execute(parked)}


def _parked(connection: Connection, reasons: dict[UUID, str]) -> list[Parked]:
    ids = literal(list(reasons), ARRAY(Uuid))
    query = select(HALVES.c.id, TRANSFER, AMOUNT).where(HALVES.c.id == any_(ids)).order_by(TRANSFER)
    return [Parked(transfer, amount, reasons[message]) for message, transfer, amount in connection.execute(query)]


def _unbalanced(name: str, connection: Connection, bank: Any) -> Iterator[str]:
    moved = func.coalesce(func.sum(bank.LedgerEntry.amount), 0)
    query = (
        select(bank.Account.id, bank.Account.balance, moved)
        .outerjoin(bank.LedgerEntry, bank.LedgerEntry.account_id == bank.Account.id)
        .group_by(bank.Account.id)
        .having(bank.Account.balance != moved)
        .order_by(bank.Account.id)
    )
    for account, balance, ledger in connection.execute(query):
        yield f"account {account} of bank {name} has {balance}, but its ledger adds up to {ledger}"


def _sum_faults(before: Sums, after: Sums) -> Iterator[str]:
    if difference := after.total - before.total:
        what = "too much" if difference > 0 else "missing"
        yield f"{abs(difference):,} is {what}: {before.total:,} before, {after.total:,} after"
