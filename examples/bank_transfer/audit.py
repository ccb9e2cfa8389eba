"""The proof: every transfer left one account, arrived in another, once, and not a cent is missing.

The auditor trusts nobody. It compares the transfers of bank A with the credits of bank B one by one, every
balance with the movements of its account, and the sum of all money with that before the first transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, Connection, Uuid, any_, func, literal, select

from outbox.schema import consumer_tables, producer_tables

from . import bank_a, bank_b
from .message import TransferOrdered
from .opening import Banks
from .words import counted

_HALVES, _MESSAGES = (
    producer_tables(bank_a.outbox.settings.schema).tables[f"{bank_a.outbox.settings.schema}.{name}"]
    for name in ("half_message", "message")
)
_INBOX = consumer_tables(bank_b.outbox.settings.schema).tables[f"{bank_b.outbox.settings.schema}.consumer_message"]


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
    """What the auditor counted, and every fault found, as sentences."""

    sums: Sums
    transfers: int
    messages: int
    inbox_rows: int
    retries: int
    parked: tuple[Parked, ...]
    in_flight: int
    faults: tuple[str, ...]


def settled(connection: Connection) -> int:
    """Return how many messages bank B is done with: consumed, or parked."""
    done = _INBOX.c.status.in_(("consumed", "parked"))
    query = select(func.count()).where(_INBOX.c.consumer_group == bank_b.GROUP, done)
    return connection.scalar(query) or 0


def money(banks: Banks) -> Sums:
    """Return the money at the banks."""
    with banks.a.connect() as a, banks.b.connect() as b:
        return Sums(_money_of(a, bank_a.Account), _money_of(b, bank_b.Account))


def audit(banks: Banks, before: Sums, orders: int) -> Audit:
    """Compare the two banks with each other, with ``before``, and with the number of orders not refused."""
    with banks.a.connect() as a, banks.b.connect() as b:
        transfers: dict[int, Decimal] = dict(_pairs(a, bank_a.Transfer.id, bank_a.Transfer.amount))
        debits = _pairs(a, bank_a.LedgerEntry.transfer_id, -bank_a.LedgerEntry.amount)
        arrivals = _pairs(b, bank_b.LedgerEntry.transfer_id, bank_b.LedgerEntry.amount)
        halves, messages, dispatched = _messages(a)
        inbox_rows, retries, reasons = _inbox(b)
        parked = _parked(a, reasons)
        sums = Sums(_money_of(a, bank_a.Account), _money_of(b, bank_b.Account))
        unbalanced = [*_unbalanced("A", a, bank_a), *_unbalanced("B", b, bank_b)]

    in_flight = transfers.keys() - {transfer for transfer, _ in arrivals} - {p.transfer for p in parked}
    sums = Sums(
        sums.bank_a,
        sums.bank_b,
        sum((p.amount for p in parked), Decimal("0.00")),
        sum((transfers[transfer] for transfer in in_flight), Decimal("0.00")),
    )
    faults = [
        *_sum_faults(before, sums),
        *unbalanced,
        *_one_each("debit", transfers, [(t, amount) for t, amount in debits if t is not None], set()),
        *_one_each("credit", transfers, [*arrivals, *((p.transfer, p.amount) for p in parked)], in_flight),
        *_list_fault("in flight", in_flight),
        *_count_fault("transfers", len(transfers), "accepted orders", orders),
        *_count_fault("half messages", halves, "transfers", len(transfers)),
        *_count_fault("halves with a message", dispatched, "half messages", halves),
        *_count_fault("inbox rows", inbox_rows, "halves with a message", dispatched),
        *_count_fault("parked transfers", len(parked), "parked messages", len(reasons)),
    ]
    return Audit(sums, len(transfers), messages, inbox_rows, retries, tuple(parked), len(in_flight), tuple(faults))


def _pairs(connection: Connection, *columns: Any) -> list[tuple[Any, Decimal]]:
    return [(row[0], row[1]) for row in connection.execute(select(*columns))]


def _money_of(connection: Connection, account: type[bank_a.Account] | type[bank_b.Account]) -> Decimal:
    return connection.scalar(select(func.coalesce(func.sum(account.balance), Decimal("0.00")))) or Decimal("0.00")


def _messages(connection: Connection) -> tuple[int, int, int]:
    halves = connection.scalar(select(func.count()).select_from(_HALVES)) or 0
    query = select(func.count(), func.count(_MESSAGES.c.half_id.distinct())).select_from(_MESSAGES)
    messages, dispatched = connection.execute(query).one()
    return halves, messages, dispatched


def _inbox(connection: Connection) -> tuple[int, int, dict[UUID, str]]:
    of_group = _INBOX.c.consumer_group == bank_b.GROUP
    retries = func.coalesce(func.sum(func.greatest(_INBOX.c.attempts - 1, 0)), 0)
    rows, tries = connection.execute(select(func.count(), retries).where(of_group)).one()
    parked = select(_INBOX.c.message_id, _INBOX.c.last_error).where(of_group, _INBOX.c.status == "parked")
    return rows, tries, {message: reason or "" for message, reason in connection.execute(parked)}


def _parked(connection: Connection, reasons: dict[UUID, str]) -> list[Parked]:
    ids = literal(list(reasons), ARRAY(Uuid))
    found = []
    for message, body in connection.execute(select(_HALVES.c.id, _HALVES.c.body).where(_HALVES.c.id == any_(ids))):
        transfer = TransferOrdered.model_validate_json(bytes(body))
        found.append(Parked(transfer.transfer_id, transfer.amount, reasons[message]))
    return sorted(found, key=lambda parked: parked.transfer)


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


def _one_each(
    what: str, transfers: dict[int, Decimal], entries: list[tuple[int, Decimal]], excused: Collection[int]
) -> Iterator[str]:
    times = Counter(transfer for transfer, _ in entries)
    yield from _list_fault(f"without a {what}", transfers.keys() - times.keys() - set(excused))
    yield from _list_fault(f"with more than one {what}", (t for t, n in times.items() if n > 1))
    yield from _list_fault(f"with a {what} but never ordered", times.keys() - transfers.keys())
    wrong = {transfer for transfer, amount in entries if transfers.get(transfer, amount) != amount}
    yield from _list_fault(f"with a {what} of another amount", wrong)


def _list_fault(what: str, transfers: Iterable[int]) -> Iterator[str]:
    if found := sorted(transfers):
        some = ", ".join(map(str, found[:5])) + (", …" if len(found) > 5 else "")
        yield f"{counted(len(found), 'transfer')} {what}: {some}"


def _count_fault(what: str, count: int, of: str, expected: int) -> Iterator[str]:
    if count != expected:
        yield f"{count} {what}, but {expected} {of}"
