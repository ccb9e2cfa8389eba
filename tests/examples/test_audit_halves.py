"""The audit of half messages and reservations: a wrong decision is found, whatever the sums say."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from examples.bank_transfer.audit import Audit, audit, money
from examples.bank_transfer.bank_a_tcc import CONFIRM_WITHIN, cancel, confirm, try_transfer
from examples.bank_transfer.banks import Banks, open_accounts
from examples.bank_transfer.orders import Order
from examples.bank_transfer.source import Source, survey
from tests.examples.scene import check, deliver

Auditor = Callable[[], Audit]


@pytest.fixture
def auditor(banks: Banks) -> Auditor:
    """The audit of four tries: confirmed; cancelled; abandoned and released by the check, then confirmed by another."""
    source = Source(None, 3, 1)
    open_accounts(banks, survey(source, 1))
    before = money(banks)
    first, second, third = source.share(0, 1)

    _confirm(banks, first, _try(banks, first))
    with Session(banks.a) as session, session.begin():
        cancel(try_transfer(second, session), "smells", session)
    _try(banks, third)
    check(banks, after=CONFIRM_WITHIN)
    _confirm(banks, third, _try(banks, third))
    deliver(banks)
    return lambda: audit(banks, before, orders=2)


def test_honest_decisions_pass(auditor: Auditor) -> None:
    """Each half is counted by who decided it, each orphan told with its answers."""
    found = auditor()
    assert found.faults == ()
    assert (found.halves.written, found.halves.messages, found.halves.undecided) == (4, 2, 0)
    assert found.halves.decided == {("producer", "commit"): 2, ("producer", "rollback"): 1, ("checker", "rollback"): 1}
    (orphan,) = found.halves.orphans
    assert (orphan.transfer, orphan.asked, orphan.answers) == (3, "checker", ("rollback",))
    assert (orphan.verdict, orphan.executed) == ("rollback", True)
    assert found.reservations == {"confirmed": 2, "cancelled": 1, "abandoned": 1}


_OF = "(SELECT half_id FROM reservation WHERE state = '{}' ORDER BY half_id LIMIT 1)"
_CONFIRMED, _CANCELLED, _ABANDONED = (_OF.format(state) for state in ("confirmed", "cancelled", "abandoned"))


@pytest.mark.parametrize(
    ("tampering", "finding"),
    [
        (f"DELETE FROM outbox.op_message WHERE half_id = {_CANCELLED}", "1 half message undecided"),
        (
            f"INSERT INTO outbox.half_check (half_id, topic, fenced, next_check_at, parked_at, reason) "
            f"SELECT half_id, 'transfer', false, now(), now(), 'tired' FROM (SELECT {_CANCELLED} half_id) c",
            "1 half message parked, which a human has to decide",
        ),
        (
            f"UPDATE outbox.op_message SET resolution = 'rollback' WHERE half_id = {_CONFIRMED}",
            "1 transfer without a committed half message",
        ),
        (
            f"UPDATE outbox.op_message SET resolution = 'commit' WHERE half_id = {_CANCELLED}",
            "1 transfer with a committed half message but never ordered: 2",
        ),
        (
            f"UPDATE outbox.op_message SET resolution = 'commit' WHERE half_id = {_ABANDONED}",
            "1 transfer with more than one committed half message: 3",
        ),
        (
            f"UPDATE outbox.op_message SET resolution = 'commit' WHERE half_id = {_CANCELLED}",
            "1 transfer with a reservation that doesn't match its half message: 2",
        ),
        (
            f"UPDATE outbox.tcc_branch SET state = 'tried' WHERE transaction_id = {_ABANDONED}",
            "1 transfer with a reservation that doesn't match its branch: 3",
        ),
        (
            "INSERT INTO outbox.message (topic, queue, position, half_id, send_number) "
            f"VALUES ('transfer', 0, 1000, {_ABANDONED}, 1)",
            "1 message of half messages that were not committed",
        ),
        (
            "INSERT INTO outbox.message (topic, queue, position, half_id, send_number) "
            f"VALUES ('transfer', 0, 1000, {_CONFIRMED}, 2)",
            "3 messages, but 2 halves with a message",
        ),
        (
            f"DELETE FROM outbox.message WHERE half_id = {_CONFIRMED}",
            "1 halves with a message, but 2 committed half messages",
        ),
        (f"DELETE FROM reservation WHERE half_id = {_CONFIRMED}", "1 transfer without a confirmed reservation: 1"),
        (
            f"UPDATE reservation SET amount = amount + 1 WHERE half_id = {_CONFIRMED}",
            "1 transfer with a confirmed reservation of another amount: 1",
        ),
        (
            f"UPDATE reservation SET state = 'reserved', reason = NULL WHERE half_id = {_CANCELLED}",
            "1 transfer still reserved: 2",
        ),
        (
            "UPDATE account SET reserved = 0.01 WHERE id = (SELECT min(id) FROM account)",
            "has 0.01 reserved, but its open reservations add up to 0",
        ),
    ],
    ids=[
        "op-gone",
        "parked",
        "debited-and-rolled-back",
        "cancelled-and-committed",
        "committed-twice",
        "reservation-and-op-differ",
        "reservation-and-branch-differ",
        "message-of-a-rollback",
        "message-twice",
        "message-gone",
        "reservation-gone",
        "reserved-another-amount",
        "reservation-left-over",
        "reserved-for-nobody",
    ],
)
def test_tampering_is_found(banks: Banks, auditor: Auditor, tampering: str, finding: str) -> None:
    """Every way to make a decision untrue has its sentence."""
    with banks.a.begin() as connection:
        assert connection.execute(text(tampering)).rowcount == 1
    assert any(finding in fault for fault in auditor().faults), auditor().faults


def test_what_bank_b_should_never_have_seen_is_found(banks: Banks, auditor: Auditor) -> None:
    """An inbox row for a half that was rolled back."""
    with banks.a.connect() as a, banks.b.begin() as b:
        rolled_back = a.scalar(text(f"SELECT {_ABANDONED}"))
        b.execute(
            text("UPDATE outbox.consumer_message SET message_id = :id WHERE message_id = :other"),
            {"id": rolled_back, "other": a.scalar(text(f"SELECT {_CONFIRMED}"))},
        )
    assert "1 inbox row of half messages that were not committed" in auditor().faults


def _try(banks: Banks, order: Order) -> UUID:
    with Session(banks.a) as session, session.begin():
        return try_transfer(order, session)


def _confirm(banks: Banks, order: Order, half_id: UUID) -> None:
    with Session(banks.a) as session, session.begin():
        confirm(order, half_id, session)
