"""Try, confirm and cancel at bank A, one step at a time, and the checker's verdict on each state."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a
from examples.bank_transfer.bank_a import Account, AlreadyExecuted, Refused, Reservation
from examples.bank_transfer.bank_a_tcc import (
    CONFIRM_WITHIN,
    StillReserved,
    ask_compliance,
    cancel,
    confirm,
    try_transfer,
    verdict,
)
from examples.bank_transfer.orders import Order
from outbox import Orphan, Resolution
from outbox.errors import AlreadyCommitted, AlreadyRolledBack
from tests.examples.test_banks import counts_of, waits
from tests.kit import wait_until

ORDER = Order(1, 501, 7, "AB", "71000001", Decimal("30.00"), "RENT")
OTHER = Order(2, 502, 7, "AB", "71000002", Decimal("80.00"), "RENT")
FULL, DEBITED = (Decimal("100.00"), Decimal("0.00")), (Decimal("70.00"), Decimal("0.00"))
RESERVED = (Decimal("100.00"), Decimal("30.00"))


def test_try_reserves_and_prepares_in_one_transaction(bank: Engine) -> None:
    """Reservation and half message are there after the commit, and not before; nothing is debited."""
    with Session(bank) as session, session.begin():
        half_id = try_transfer(ORDER, session)
        assert _account(bank) == FULL
    assert _account(bank) == RESERVED
    assert _reservation(bank, half_id) == ("reserved", None)
    assert (_resolution(bank, half_id), counts_of(bank)) == (None, (0, 0, 1))


def test_nothing_is_left_of_a_try_that_is_rolled_back(bank: Engine) -> None:
    """The half message goes with the reservation."""
    with Session(bank) as session:
        try_transfer(ORDER, session)
        session.flush()
        session.rollback()
    assert (_account(bank), counts_of(bank)) == (FULL, (0, 0, 0))


def test_what_is_reserved_is_spoken_for(bank: Engine) -> None:
    """Another order can't have it, in whichever way it is executed."""
    _try(bank)
    for execute in (try_transfer, lambda order, session: bank_a.order_transfer(order, session=session)):
        with pytest.raises(Refused, match=r"account 7 has 70\.00, needs 80\.00"), Session(bank) as session:
            execute(OTHER, session)


def test_the_database_itself_refuses_to_spend_what_is_reserved(bank: Engine) -> None:
    """The CHECK is there for the day when somebody forgets to ask."""
    _try(bank)
    with pytest.raises(IntegrityError, match="account_not_overdrawn"), Session(bank) as session, session.begin():
        session.get_one(Account, 7).balance -= Decimal("70.01")


def test_confirm_debits_and_commits_in_one_transaction(bank: Engine) -> None:
    """Debit, transfer, ledger entry and op; the order is executed from then on."""
    half_id = _try(bank)
    with Session(bank) as session, session.begin():
        confirm(ORDER, half_id, session)
        assert _account(bank) == RESERVED
    assert (_account(bank), counts_of(bank)) == (DEBITED, (1, 1, 1))
    assert (_reservation(bank, half_id), _resolution(bank, half_id)) == (("confirmed", None), "commit")
    with pytest.raises(AlreadyExecuted), Session(bank) as session:
        try_transfer(ORDER, session)


def test_cancel_releases_and_rolls_back_in_one_transaction(bank: Engine) -> None:
    """Nothing is debited; the objection stands for whoever comes with the order again."""
    half_id = _try(bank)
    with Session(bank) as session, session.begin():
        cancel(half_id, "smells", session)
    assert (_account(bank), counts_of(bank)) == (FULL, (0, 0, 1))
    assert (_reservation(bank, half_id), _resolution(bank, half_id)) == (("cancelled", "smells"), "rollback")
    with pytest.raises(Refused, match="smells"), Session(bank) as session:
        try_transfer(ORDER, session)


def test_an_order_is_reserved_once_at_a_time(bank: Engine) -> None:
    """A second try fails while the first is open."""
    half_id = _try(bank)
    with pytest.raises(StillReserved, match=str(half_id)), Session(bank) as session:
        try_transfer(ORDER, session)
    assert _account(bank) == RESERVED


@pytest.mark.parametrize("first", ["confirm", "cancel"])
@pytest.mark.parametrize("second", ["confirm", "cancel"])
def test_the_first_of_confirm_and_cancel_counts(bank: Engine, first: str, second: str) -> None:
    """The second fails as a whole and says what came first; money moves once."""
    half_id = _try(bank)
    steps: dict[str, Callable[[Session], None]] = {
        "confirm": lambda session: confirm(ORDER, half_id, session),
        "cancel": lambda session: cancel(half_id, "smells", session),
    }
    with Session(bank) as session, session.begin():
        steps[first](session)
    once = _account(bank), counts_of(bank)
    error = AlreadyCommitted if first == "confirm" else AlreadyRolledBack
    with pytest.raises(error, match="by the producer"), Session(bank) as session, session.begin():
        steps[second](session)
    assert (_account(bank), counts_of(bank)) == once
    assert _account(bank) == (DEBITED if first == "confirm" else FULL)


def test_a_confirm_that_waits_for_the_verdict_fails(bank: Engine) -> None:
    """The checker has the branch: the confirm waits, then finds it released, and commits nothing."""
    half_id = _try(bank)

    def late() -> None:
        with Session(bank) as session, session.begin():
            confirm(ORDER, half_id, session)

    with ThreadPoolExecutor(1) as pool:
        with Session(bank) as session, session.begin():
            assert verdict(_orphan(half_id), session) is Resolution.ROLLBACK
            bank_a.outbox.rollback(half_id, within=session)
            confirming = pool.submit(late)
            wait_until(lambda: waits(bank), "the confirm waits for the reservation")
        with pytest.raises(AlreadyRolledBack):
            confirming.result()
    assert (_account(bank), counts_of(bank)) == (FULL, (0, 0, 1))
    assert _reservation(bank, half_id) == ("abandoned", None)


@pytest.mark.parametrize(
    ("state", "age", "expected"),
    [
        ("reserved", CONFIRM_WITHIN - dt.timedelta(seconds=1), Resolution.UNKNOWN),
        ("reserved", CONFIRM_WITHIN, Resolution.ROLLBACK),
        ("confirmed", CONFIRM_WITHIN, Resolution.COMMIT),
        ("cancelled", CONFIRM_WITHIN, Resolution.ROLLBACK),
        ("abandoned", CONFIRM_WITHIN, Resolution.ROLLBACK),
    ],
)
def test_the_verdict_on_each_state(bank: Engine, state: str, age: dt.timedelta, expected: Resolution) -> None:
    """Only an open reservation that is older than the teller's patience is changed: it is released."""
    half_id = _try(bank)
    with Session(bank) as session, session.begin():
        match state:
            case "confirmed":
                confirm(ORDER, half_id, session)
            case "cancelled":
                cancel(half_id, "smells", session)
            case "abandoned":
                assert verdict(_orphan(half_id), session) is Resolution.ROLLBACK
    before, found = _account(bank), _reservation(bank, half_id)
    assert found == (state, "smells" if state == "cancelled" else None)
    with Session(bank) as session, session.begin():
        assert verdict(_orphan(half_id, age), session) is expected
    if state == "reserved" and expected is Resolution.ROLLBACK:
        before, found = FULL, ("abandoned", None)
    assert (_account(bank), _reservation(bank, half_id)) == (before, found)


def test_a_half_without_reservation_is_for_a_human(bank: Engine) -> None:
    """No step leaves one, so nothing is concluded from it."""
    with Session(bank) as session:
        assert verdict(_orphan(UUID(int=1)), session) is Resolution.UNKNOWN


def test_the_compliance_desk_objects_to_its_watch_list() -> None:
    """By the receiver's account; every other order passes."""
    assert ask_compliance(ORDER) is None
    listed = Order(1, 503, 7, "AB", "71000013", Decimal("30.00"), "RENT")
    assert ask_compliance(listed) == "receiver AB-71000013 is on the watch list"


def _try(bank: Engine) -> UUID:
    with Session(bank) as session, session.begin():
        return try_transfer(ORDER, session)


def _orphan(half_id: UUID, age: dt.timedelta = CONFIRM_WITHIN) -> Orphan:
    born = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    return Orphan(half_id, "transfer", None, None, {}, "application/json", b"{}", born, age, checks=1)


def _account(bank: Engine) -> tuple[Decimal, Decimal]:
    with Session(bank) as session:
        account = session.get_one(Account, 7)
        return account.balance, account.reserved


def _reservation(bank: Engine, half_id: UUID) -> tuple[str, str | None]:
    with Session(bank) as session:
        reservation = session.get_one(Reservation, half_id)
        return reservation.state, reservation.reason


def _resolution(bank: Engine, half_id: UUID) -> str | None:
    with bank.connect() as connection:
        query = text("SELECT resolution FROM outbox.op_message WHERE half_id = :id")
        resolution: str | None = connection.scalar(query, {"id": half_id})
        return resolution
