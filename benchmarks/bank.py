"""The business that all benchmarks share: debit an account and write a ledger entry."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Identity,
    MetaData,
    Numeric,
    Table,
    bindparam,
    insert,
    text,
    update,
)

ACCOUNTS = 100_000
TOPIC = "transfer"

_chance = random.Random()

metadata = MetaData()
account = Table(
    "account",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("balance", Numeric(14, 2), nullable=False),
)
ledger = Table(
    "ledger",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("account_id", BigInteger, nullable=False),
    Column("amount", Numeric(14, 2), nullable=False),
)

MOVE = (
    update(account)
    .where(account.c.id == bindparam("account_id"))
    .values(balance=account.c.balance + bindparam("moved", type_=Numeric(14, 2)))
)
NOTE = insert(ledger)

_OPEN = text("INSERT INTO account (id, balance) SELECT n, 1000000 FROM generate_series(1, :last) n")


def open_bank(engine: Engine) -> None:
    """Create the tables, and accounts with money in them."""
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(_OPEN, {"last": ACCOUNTS})
        connection.execute(text("ANALYZE account"))


def new_order() -> dict[str, Any]:
    """Return a payment order as a service would send it."""
    sender = _chance.randint(1, ACCOUNTS)
    return {
        "transfer_id": _chance.getrandbits(40),
        "sender": sender,
        "receiver": f"bank-b-{_chance.randint(1, ACCOUNTS)}",
        "amount": Decimal(_chance.randint(1, 9999)) / 100,
        "purpose": "household payment",
    }
