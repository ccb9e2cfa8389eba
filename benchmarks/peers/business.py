"""What all arms do: a message of 300 bytes credits an account, once; an arm without an inbox writes a row."""

from __future__ import annotations

import json
import random
from typing import Any

from sqlalchemy import Engine, make_url, text

from benchmarks import bank, handmade

_SIZE = 300
_chance = random.Random(17)

CREDIT = "UPDATE account SET balance = balance + %s WHERE id = %s"
ONCE = "INSERT INTO dedupe (consumer, message_id) VALUES ('till', %s) ON CONFLICT DO NOTHING"
#: The same for asyncpg: amount and account as text and number, and the message's id.
CREDIT_ASYNCPG = "UPDATE account SET balance = balance + $1::text::numeric WHERE id = $2"
ONCE_ASYNCPG = "INSERT INTO dedupe (consumer, message_id) VALUES ('till', $1) ON CONFLICT DO NOTHING"
#: The same for a list: the ids; the accounts and the amounts.
ONCE_ALL = "INSERT INTO dedupe (consumer, message_id) SELECT 'till', unnest(%s::text[]) ON CONFLICT DO NOTHING"
CREDIT_ALL = """
UPDATE account SET balance = balance + moved
  FROM (SELECT id, sum(amount) AS moved FROM unnest(%s::bigint[], %s::numeric[]) AS m (id, amount) GROUP BY id) m
 WHERE account.id = m.id
"""

_TABLE = "CREATE TABLE dedupe (consumer text, message_id text, PRIMARY KEY (consumer, message_id))"


def create(engine: Engine) -> None:
    """Create the accounts, the ledger, the table of those without an inbox, and that of a hand-written outbox."""
    bank.open_bank(engine)
    handmade.create(engine)
    with engine.begin() as connection:
        connection.execute(text(_TABLE))


def new_order() -> dict[str, Any]:
    """Return a body, which is JSON of 300 bytes."""
    order = {"receiver": _chance.randint(1, bank.ACCOUNTS), "amount": "12.50", "purpose": ""}
    return order | {"purpose": "x" * (_SIZE - len(json.dumps(order)))}


def libpq_url(url: str) -> str:
    """Return the URL as drivers take it that SQLAlchemy isn't before."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def asyncpg_url(url: str) -> str:
    """Return SQLAlchemy's URL for asyncpg."""
    return make_url(url).set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
