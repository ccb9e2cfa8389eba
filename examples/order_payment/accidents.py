"""What may happen to the balance service's tables in a bad night: three accidents that no service survives by itself.

Payments are *lost* (a restore from a backup that is a little too old: inbox row and money are gone together), only
*forgotten* (a cleanup of the inbox went too far: the money has moved, without a record), or *garbled* (a repair by hand
changed a status that was right).
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, Engine, any_, delete, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import Uuid

from outbox.database.tables import consumer_tables

from .balance_service import GROUP, EnterpriseBalance, Payment, UserBalance, outbox

_SCHEMA = outbox.settings.schema
INBOX = consumer_tables(_SCHEMA).tables[f"{_SCHEMA}.consumer_message"]


@dataclass(frozen=True, slots=True)
class Accidents:
    """The ids of the messages that something happened to."""

    lost: tuple[UUID, ...]
    forgotten: tuple[UUID, ...]
    garbled: tuple[UUID, ...]

    def __str__(self) -> str:
        return f"{len(self.lost)} lost, {len(self.forgotten)} forgotten, {len(self.garbled)} garbled"


def cause(balances: Engine, number: int, seed: int) -> Accidents:
    """Let each accident happen to ``number`` payments, or to a third of all if there are fewer."""
    with balances.begin() as connection:
        paid = list(connection.scalars(select(Payment.message_id).order_by(Payment.message_id)))
        number = min(number, len(paid) // 3)
        hit = random.Random(seed).sample(paid, 3 * number)
        accidents = Accidents(tuple(hit[:number]), tuple(hit[number : 2 * number]), tuple(hit[2 * number :]))
        _undo(connection, accidents.lost)
        _forget(connection, accidents.lost + accidents.forgotten)
        _garble(connection, accidents.garbled)
    return accidents


def _undo(connection: Connection, ids: Sequence[UUID]) -> None:
    of_ids = Payment.message_id == _any(ids)
    undone = delete(Payment).where(of_ids).returning(Payment.user, Payment.enterprise, Payment.price)
    for user, enterprise, price in connection.execute(undone).all():
        of_user, of_enterprise = UserBalance.user == user, EnterpriseBalance.enterprise == enterprise
        connection.execute(update(UserBalance).where(of_user).values(amount=UserBalance.amount + price))
        connection.execute(
            update(EnterpriseBalance).where(of_enterprise).values(amount=EnterpriseBalance.amount - price)
        )


def _forget(connection: Connection, ids: Sequence[UUID]) -> None:
    connection.execute(delete(INBOX).where(INBOX.c.consumer_group == GROUP, INBOX.c.message_id == _any(ids)))


def _garble(connection: Connection, ids: Sequence[UUID]) -> None:
    # Due in an hour: unless it is found, the payment is going to be made once more.
    values = {"status": "failed", "next_attempt_at": func.now() + dt.timedelta(hours=1)}
    of_ids = (INBOX.c.consumer_group == GROUP) & (INBOX.c.message_id == _any(ids))
    connection.execute(update(INBOX).where(of_ids).values(values))


def _any(ids: Sequence[UUID]) -> object:
    return any_(literal(list(ids), ARRAY(Uuid)))
