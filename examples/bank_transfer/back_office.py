"""What an operator decides: the demo's operator mends what the reconciliation only reports.

The operator knows nothing of the planted faults: only the findings, and the tables of both banks. Where these leave a
doubt, the finding stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, select, update
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.consumer.subscription import DIGEST_BYTES
from outbox.reconcile.job import Outcome
from outbox.reconcile.rows import Finding, JobResult, to_findings

from . import bank_b, corrections
from .bank_a import Transfer
from .banks import Banks
from .evidence import HALVES, INBOX
from .message import GROUP, TransferOrdered

OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class ByHand:
    """Tell what the operator did about one message, as a sentence."""

    message: UUID
    kind: Outcome
    did: str

    @property
    def retried(self) -> bool:
        """Is bank B to consume it once more?"""
        return self.kind is Outcome.PARKED


def mend(result: JobResult, banks: Banks) -> Iterator[ByHand]:
    """Go through the findings that are for a human; yield each mend, and skip those that stay."""
    for pair in result.pairs:
        for finding in to_findings(pair.findings):
            did = _mend(finding, banks)
            if did is not None:
                yield ByHand(finding.id, finding.outcome, did)


def _mend(finding: Finding, banks: Banks) -> str | None:
    match finding.outcome:
        case Outcome.PHANTOM:
            return _strike_out(finding, banks, "bank A never ordered")
        case Outcome.CONSUMED_THOUGH_ROLLED_BACK:
            return _strike_out(finding, banks, "bank A rolled back")
        case Outcome.DUPLICATE_EFFECT:
            return _credit_once(finding, banks)
        case Outcome.DIGEST_MISMATCH:
            return _restore_body(finding, banks)
        case Outcome.PARKED:
            return _retry(finding, banks)
        case _:
            return None


def _strike_out(finding: Finding, banks: Banks, why: str) -> str:
    """Take the money back from an account that it was never meant for, and delete the inbox row."""
    with banks.b.begin() as b:
        taken = corrections.take_back(b, finding.id)
        corrections.delete_inbox_row(b, finding.id)
    return f"took back {taken:,.2f}, which {why}"


def _credit_once(finding: Finding, banks: Banks) -> str:
    """Take back every credit but the first."""
    with banks.b.begin() as b:
        taken = corrections.take_back(b, finding.id, keep=1)
    return f"took back {taken:,.2f}, which was credited twice"


def _restore_body(finding: Finding, banks: Banks) -> str | None:
    """Write the body anew from the transfer that bank A executed.

    Bank B's inbox kept the digest of the body that it was given: it is the witness that the new one is the old one.
    """
    with banks.b.connect() as b:
        credited = select(bank_b.LedgerEntry.transfer_id).where(bank_b.LedgerEntry.message_id == finding.id)
        number = b.scalar(credited)
    with banks.a.begin() as a:
        body = _body(a, number)
        if body is None or hashlib.sha256(body).digest()[:DIGEST_BYTES] != finding.consumer_digest:
            return None
        a.execute(update(HALVES).where(HALVES.c.id == finding.id).values(body=body))
    return f"restored transfer {number}: bank B's digest agrees"


def _body(a: Connection, number: int | None) -> bytes | None:
    """Return the body of the message that announced a transfer to bank B."""
    row = a.execute(select(Transfer.__table__).where(Transfer.id == number)).one_or_none()
    if row is None:
        return None
    message = TransferOrdered(
        transfer_id=row.id, sender=row.account_id, receiver=row.receiver, amount=row.amount, purpose=row.purpose
    )
    return message.model_dump_json().encode()


def _retry(finding: Finding, banks: Banks) -> str | None:
    """Have bank B try again where its account is there now; otherwise the message stays parked."""
    with banks.a.connect() as a:
        body = a.execute(select(HALVES.c.body).where(HALVES.c.id == finding.id)).scalar_one()
    transfer = TransferOrdered.model_validate_json(body)
    with Session(banks.b) as b:
        if bank_b.objection(transfer.receiver, transfer.amount, b.get(bank_b.Account, transfer.receiver)) is not None:
            return None
        reason = b.scalar(
            select(INBOX.c.last_error).where(INBOX.c.consumer_group == GROUP, INBOX.c.message_id == finding.id)
        )
    Outbox(banks.b, group=GROUP).operator.retry(
        finding.id, group=GROUP, by=OPERATOR, why="nothing stands against it any more"
    )
    return f"gave it to bank B again: {reason}"
