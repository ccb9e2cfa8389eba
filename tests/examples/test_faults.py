"""Faults planted in the tables of two small banks: found by kind, mended by hand where that is possible, and told."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

import pytest
from rich.console import Console
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from examples.bank_transfer import bank_a, bank_b, comparison, corrections, faults, reconciliation
from examples.bank_transfer.audit import audit, money
from examples.bank_transfer.back_office import mend
from examples.bank_transfer.bank_a_tables import transfer_message
from examples.bank_transfer.banks import Banks, open_accounts
from examples.bank_transfer.evidence import HALVES, INBOX
from examples.bank_transfer.options import DemoOptions
from examples.bank_transfer.reconciliation import by_kind
from examples.bank_transfer.source import Source, survey
from outbox import Outbox
from outbox.reconcile.job import EngineName, Outcome
from outbox.reconcile.run import reconcile
from tests.examples.scene import deliver

OPTIONS = DemoOptions(engine=EngineName.LOCAL)
ORDERS = 25
BY_HAND = {
    Outcome.CONSUMED_THOUGH_ROLLED_BACK,
    Outcome.DUPLICATE_EFFECT,
    Outcome.PHANTOM,
    Outcome.DIGEST_MISMATCH,
    Outcome.PARKED,
}


@pytest.fixture
def day(banks: Banks) -> Banks:
    """Two banks that have done their work: all orders executed and credited, and one half message rolled back."""
    orders = Source(None, ORDERS, 1)
    open_accounts(banks, survey(orders, 1))
    first, *others = orders.share(0, 1)
    for order in others:
        with Session(banks.a) as session, session.begin():
            bank_a.order_transfer(order, session=session)
    outbox = Outbox(banks.a, group="bank-a")
    with Session(banks.a) as session, session.begin():
        withdrawn = outbox.prepare(session, "transfer", transfer_message(first), key=first.receiver)
    outbox.rollback(withdrawn)
    deliver(banks)
    return banks


@pytest.fixture
def found(day: Banks) -> faults.Planted:
    """The faults that were planted in `day`."""
    return faults.plant(day, seed=3)


def test_nothing_is_found_where_nothing_was_planted(day: Banks) -> None:
    """A day without faults is in sync, and its sums agree."""
    result = reconcile(comparison.job(day, OPTIONS))
    assert result.in_sync
    sums = {row.value: (row.producer, row.consumer) for row in result.measures[0].totals}
    assert sums["transfers"] == (Decimal(ORDERS - 1), Decimal(ORDERS - 1))


def test_each_fault_is_found_as_what_it_is_and_nothing_else(day: Banks, found: faults.Planted) -> None:
    """Message by message, kind by kind; the sums of both banks don't agree any more."""
    assert set(found) == BY_HAND | {Outcome.MISSING, Outcome.UNRECORDED, Outcome.STATUS_MISMATCH, Outcome.UNDISPATCHED}
    result = reconcile(comparison.job(day, OPTIONS))
    assert by_kind(result) == found
    assert result.measures[0].unexplained


def test_the_same_seed_plants_the_same_faults(day: Banks) -> None:
    """Only an invented message has an id of its own each time."""
    planted = []
    for _ in range(2):
        with day.a.connect() as a, day.b.connect() as b:
            planted.append(faults.Saboteur(a, b, seed=5).plant())  # and rolled back
    first, second = ({kind: ids for kind, ids in plant.items() if kind is not Outcome.PHANTOM} for plant in planted)
    assert first == second
    assert len(first) == 8


def test_there_are_never_more_faults_than_messages(banks: Banks) -> None:
    """A day without any transfer has nothing to damage."""
    assert faults.plant(banks, seed=1) == {}


def test_without_leave_nothing_is_repaired_and_each_difference_is_told(day: Banks, found: faults.Planted) -> None:
    """Differences that nobody planted on purpose are what the demo must fail on."""
    done = reconciliation.run(day, OPTIONS, Console(quiet=True))
    assert (done.planted, done.repaired, done.by_hand) == ({}, None, ())
    found_wrong = list(done.faults(parked=0))
    for kind in set(found) - {Outcome.PARKED}:
        assert any(f"1 message {kind.label}: {min(found[kind])}" in fault for fault in found_wrong), found_wrong
    assert "1 parked at the reconciliation, but 0 at the audit" in found_wrong
    assert any(fault.startswith("debited: ") and "amount unexplained at " in fault for fault in found_wrong)


def test_what_is_not_found_or_invented_is_told(day: Banks) -> None:
    """The demo doesn't trust the reconciliation: it knows what was planted."""
    (missed,) = faults.plant(day, seed=3)[Outcome.MISSING]
    result = reconcile(comparison.job(day, OPTIONS))
    wrong = dict(by_kind(result))
    del wrong[Outcome.MISSING]
    wrong[Outcome.UNRECORDED] |= {UUID(int=7)}
    done = reconciliation.Reconciliation(wrong, result, None, (), result, 0.0)
    found_wrong = list(done.faults(parked=1))
    assert f"1 message planted as unrecorded, and not found as such: {UUID(int=7)}" in found_wrong
    assert f"1 message found as missing, and not planted as such: {missed}" in found_wrong


def test_the_operator_mends_what_is_for_a_human(day: Banks, found: faults.Planted) -> None:
    """Each of these kinds, with a sentence; what can be repaired without a human is left alone."""
    hands = tuple(mend(reconcile(comparison.job(day, OPTIONS)), day))
    assert {(hand.kind, hand.message) for hand in hands} == {
        (kind, message) for kind in BY_HAND for message in found[kind]
    }
    assert all(hand.did for hand in hands)
    left = by_kind(reconcile(comparison.job(day, OPTIONS)))
    # The parked message is given back, and nobody is here to consume it.
    assert left.pop(Outcome.FAILED, None) in (None, found[Outcome.PARKED])
    assert left == {kind: ids for kind, ids in found.items() if kind not in BY_HAND}


def test_a_body_is_not_restored_from_a_transfer_that_was_changed_too(day: Banks, found: faults.Planted) -> None:
    """Bank B's digest is the witness: where it doesn't bear the new body out, the finding stays for another human."""
    (message,) = found[Outcome.DIGEST_MISMATCH]
    with day.a.begin() as a, day.b.begin() as b:
        number = b.scalar(select(bank_b.LedgerEntry.transfer_id).where(bank_b.LedgerEntry.message_id == message))
        forged = a.scalar(select(HALVES.c.body).where(HALVES.c.id == message))
        more = {"amount": bank_a.Transfer.amount + Decimal("5.00")}
        a.execute(update(bank_a.Transfer).where(bank_a.Transfer.id == number).values(more))
    hands = tuple(mend(reconcile(comparison.job(day, OPTIONS)), day))
    assert message not in {hand.message for hand in hands}
    with day.a.connect() as a:
        assert a.scalar(select(HALVES.c.body).where(HALVES.c.id == message)) == forged


def test_what_has_no_account_at_bank_b_stays_parked(day: Banks, found: faults.Planted) -> None:
    """No operator opens an account in a customer's name."""
    (message,) = found[Outcome.PARKED]
    with day.a.begin() as a:
        body = a.execute(select(HALVES.c.body).where(HALVES.c.id == message)).scalar_one()
        elsewhere = bytes(body).replace(b'"receiver":"', b'"receiver":"X')
        a.execute(update(HALVES).where(HALVES.c.id == message).values(body=elsewhere))
    with day.b.begin() as b:
        corrections.mark(b, message, body_digest=None)
    hands = tuple(mend(reconcile(comparison.job(day, OPTIONS)), day))
    assert message not in {hand.message for hand in hands}
    with day.b.connect() as b:
        assert b.scalar(select(INBOX.c.status).where(INBOX.c.message_id == message)) == "parked"


@pytest.mark.parametrize("installed", [True, False])
def test_spark_compares_if_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """Without it the demo does with the local engine, unless it was told otherwise."""
    monkeypatch.setattr(comparison, "find_spec", lambda name: object() if installed and name == "pyspark" else None)
    assert comparison.engine_of(DemoOptions()) is (EngineName.SPARK if installed else EngineName.LOCAL)
    assert ("pip install" in comparison.engine_in_words(DemoOptions())) is not installed
    assert comparison.engine_of(DemoOptions(engine=EngineName.SPARK)) is EngineName.SPARK
    assert comparison.engine_of(OPTIONS) is EngineName.LOCAL


def test_the_audit_sees_the_faults_too(banks: Banks) -> None:
    """The money that was invented, doubled and taken back is missing or too much by the audit's own count."""
    orders = Source(None, ORDERS, 1)
    open_accounts(banks, survey(orders, 1))
    before = money(banks)
    for order in orders.share(0, 1):
        with Session(banks.a) as session, session.begin():
            bank_a.order_transfer(order, session=session)
    deliver(banks)
    assert audit(banks, before, orders=ORDERS).faults == ()
    faults.plant(banks, seed=3)
    found_wrong = audit(banks, before, orders=ORDERS).faults
    for what in (" with more than one credit", " with a credit but never ordered", " in flight", "inbox rows, but "):
        assert any(what in fault for fault in found_wrong), found_wrong
