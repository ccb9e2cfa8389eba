"""Faults that are planted on purpose when the day's work is done, for the reconciliation to find.

They are what restores from old backups, repairs by hand and faulty software leave behind. Each makes a difference of
one kind, and hits another message.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from uuid import UUID

from sqlalchemy import Connection, delete, func, select, tuple_, update

from outbox.message.model import uuid7
from outbox.reconcile.job import Outcome

from . import bank_a, bank_b, corrections
from .banks import Banks
from .evidence import HALVES, INBOX, MESSAGES, OPS
from .halves import ROLLBACK
from .message import GROUP, TOPIC, TransferOrdered

#: One fault of each kind for so many transfers, but at least one and not too many.
_EVERY, _MOST = 200, 25

#: Which messages were hit, by the kind of difference.
Planted = Mapping[Outcome, frozenset[UUID]]


def plant(banks: Banks, seed: int) -> Planted:
    """Plant some faults of each kind; the dice fall as ``seed`` says."""
    with banks.a.begin() as a, banks.b.begin() as b:
        return Saboteur(a, b, seed).plant()


class Saboteur:
    """Changes the tables of both banks behind their backs, in the transactions of the two connections."""

    def __init__(self, a: Connection, b: Connection, seed: int) -> None:
        self._a, self._b = a, b
        self._dice = random.Random(seed)
        self._kinds: dict[Outcome, Callable[[UUID], UUID]] = {
            Outcome.MISSING: self._lose,
            Outcome.UNRECORDED: self._forget,
            Outcome.STATUS_MISMATCH: self._belie,
            Outcome.UNDISPATCHED: self._withhold,
            Outcome.PARKED: self._set_aside,
            Outcome.DIGEST_MISMATCH: self._falsify,
            Outcome.DUPLICATE_EFFECT: self._double,
            Outcome.PHANTOM: self._invent,
        }

    def plant(self) -> Planted:
        """Plant faults of each kind, as far as there are messages for them."""
        settled = self._settled()
        number = min(max(len(settled) // _EVERY, 1), _MOST)
        victims = self._dice.sample(settled, min(number * len(self._kinds), len(settled)))
        planted: defaultdict[Outcome, set[UUID]] = defaultdict(set)
        for place, victim in enumerate(victims):
            kind, hit = list(self._kinds.items())[place % len(self._kinds)]
            planted[kind].add(hit(victim))
        for half_id in self._withdrawn(number):
            planted[Outcome.CONSUMED_THOUGH_ROLLED_BACK].add(self._disobey(half_id))
        return {kind: frozenset(ids) for kind, ids in planted.items()}

    def _lose(self, message: UUID) -> UUID:
        """Undo the consumer's whole transaction: the database was restored to a moment before it."""
        corrections.take_back(self._b, message)
        corrections.delete_inbox_row(self._b, message)
        return message

    def _forget(self, message: UUID) -> UUID:
        """Delete the inbox row only: a cleanup went too far. Delivered again, it would be credited twice."""
        corrections.delete_inbox_row(self._b, message)
        return message

    def _belie(self, message: UUID) -> UUID:
        """Have the inbox say that it isn't consumed, though it is credited: a repair by hand, gone wrong."""
        in_an_hour = func.now() + dt.timedelta(hours=1)
        failed = {"status": "failed", "next_attempt_at": in_an_hour, "last_error": "set back by hand"}
        parked = {"status": "parked", "last_error": "set aside by hand"}
        corrections.mark(self._b, message, **self._dice.choice((failed, parked)))
        return message

    def _withhold(self, message: UUID) -> UUID:
        """Undo dispatch and consumption: both databases were restored, each to a moment before it."""
        self._a.execute(delete(MESSAGES).where(MESSAGES.c.half_id == message))
        return self._lose(message)

    def _set_aside(self, message: UUID) -> UUID:
        """Park it without a credit: bank B was out of order for longer than there are retries."""
        corrections.take_back(self._b, message)
        corrections.mark(self._b, message, status="parked", last_error="the booking system was down")
        return message

    def _falsify(self, message: UUID) -> UUID:
        """Change the body at bank A, after bank B has credited what it said before."""
        more = self._said(message)
        more = more.model_copy(update={"amount": more.amount + Decimal("0.01")})
        body = more.model_dump_json().encode()
        self._a.execute(update(HALVES).where(HALVES.c.id == message).values(body=body))
        return message

    def _double(self, message: UUID) -> UUID:
        """Credit it a second time, past the inbox."""
        corrections.credit(self._b, message, self._said(message))
        return message

    def _invent(self, like: UUID) -> UUID:
        """Credit a transfer that bank A never ordered, with an inbox row as if it had."""
        invented, model = uuid7(), self._said(like)
        highest = self._a.scalar(select(func.max(bank_a.Transfer.id))) or 0
        transfer = model.model_copy(update={"transfer_id": highest + self._dice.randint(1, 1_000_000)})
        return self._smuggle(invented, transfer)

    def _disobey(self, half_id: UUID) -> UUID:
        """Credit a transfer whose half message bank A rolled back."""
        return self._smuggle(half_id, self._said(half_id))

    def _smuggle(self, message: UUID, transfer: TransferOrdered) -> UUID:
        corrections.credit(self._b, message, transfer)
        corrections.insert_inbox_row(self._b, message, topic=TOPIC, queue=0, position=1)
        return message

    def _said(self, message: UUID) -> TransferOrdered:
        body = self._a.execute(select(HALVES.c.body).where(HALVES.c.id == message)).scalar_one()
        return TransferOrdered.model_validate_json(body)

    def _settled(self) -> list[UUID]:
        """Return the messages that are credited and consumed, in the order of their transfers.

        Those to accounts that are closed by now are left out: bank B couldn't credit them again. So are the last of
        each queue: without the end of its queue, the next message would take its position, which the consumer has
        passed.
        """
        of_topic = MESSAGES.c.topic == TOPIC
        ends = select(MESSAGES.c.queue, func.max(MESSAGES.c.position)).where(of_topic).group_by(MESSAGES.c.queue)
        last = select(MESSAGES.c.half_id).where(of_topic, tuple_(MESSAGES.c.queue, MESSAGES.c.position).in_(ends))
        spared = set(self._a.scalars(last))
        credited = (
            select(INBOX.c.message_id)
            .join(bank_b.LedgerEntry, bank_b.LedgerEntry.message_id == INBOX.c.message_id)
            .join(bank_b.Account)
            .where(INBOX.c.consumer_group == GROUP, INBOX.c.status == "consumed", ~bank_b.Account.closed)
            .order_by(bank_b.LedgerEntry.transfer_id)
        )
        return [message for message in self._b.scalars(credited) if message not in spared]

    def _withdrawn(self, number: int) -> Iterator[UUID]:
        """Yield some half messages that were rolled back, and whose receivers bank B knows."""
        accounts = set(self._b.scalars(select(bank_b.Account.id)))
        rolled_back = (
            select(OPS.c.half_id)
            .join(HALVES, HALVES.c.id == OPS.c.half_id)
            .where(OPS.c.resolution == ROLLBACK)
            .order_by(OPS.c.half_id)
        )
        known = [half for half in self._a.scalars(rolled_back) if self._said(half).receiver in accounts]
        yield from self._dice.sample(known, min(number, len(known)))
