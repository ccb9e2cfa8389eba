"""A bad night of the order service: it is restored from a backup that is a little too old.

Some messages are lost there: what they did is undone, and the inbox has never heard of them, though the offset says
that they were read. No service notices that by itself; the account service does, when it asks.
"""

from __future__ import annotations

import random
from uuid import UUID

from sqlalchemy import ARRAY, Engine, Uuid, any_, delete, literal, select, update

from outbox.database.tables import consumer_tables

from .message import GROUP
from .order_service import UNPAID, Credit, Enterprise, Order, outbox

_SCHEMA = outbox.settings.schema
INBOX = consumer_tables(_SCHEMA).tables[f"{_SCHEMA}.consumer_message"]


def lose(orders: Engine, number: int, seed: int) -> list[UUID]:
    """Lose so many messages, or all that were consumed if there are fewer; return their ids."""
    with orders.begin() as connection:
        consumed = list(connection.scalars(select(Credit.message_id).order_by(Credit.message_id)))
        lost = random.Random(seed).sample(consumed, min(number, len(consumed)))
        of_lost = any_(literal(lost, ARRAY(Uuid)))
        undone = delete(Credit).where(Credit.message_id == of_lost)
        for order, enterprise, price in connection.execute(
            undone.returning(Credit.order_id, Credit.enterprise, Credit.price)
        ).all():
            connection.execute(update(Order).where(Order.id == order).values(state=UNPAID))
            less = update(Enterprise).where(Enterprise.name == enterprise).values(amount=Enterprise.amount - price)
            connection.execute(less)
        connection.execute(delete(INBOX).where(INBOX.c.consumer_group == GROUP, INBOX.c.message_id == of_lost))
    return lost
