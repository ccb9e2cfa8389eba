"""Before the first transfer: the tables of both banks, and their accounts.

Bank A knows the senders: every account of the orders, or those of an accounts file. Each begins with what its
orders add up to, rounded up to full thousands, or with the same amount for all. Bank B knows every receiver
which looks like an account, two capital letters and up to 16 digits, and begins with nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.orm import Session

from outbox.database.migration import upgrade

from . import bank_a, bank_b
from .message import RICHEST
from .orders import OrdersUnreadable
from .source import Survey

_RECEIVER = re.compile(r"[A-Z]{2}-[0-9]{1,16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Banks:
    """The databases of the two banks."""

    a: Engine
    b: Engine

    @classmethod
    def at(cls, url_a: str, url_b: str) -> Banks:
        """Return the banks at these SQLAlchemy URLs."""
        return cls(create_engine(url_a), create_engine(url_b))

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which the processes of the banks find their databases."""
        urls = {"BANK_A_URL": self.a.url, "BANK_B_URL": self.b.url}
        return {name: url.render_as_string(hide_password=False) for name, url in urls.items()}

    def close(self) -> None:
        """Close all connections."""
        self.a.dispose()
        self.b.dispose()


def create_tables(banks: Banks, *, via: bool = False) -> None:
    """Create the outbox tables of each bank's side, and its business tables; ``via``: something is between them."""
    urls = banks.environment
    # Bank A consumes as well: what its callbacks are told.
    upgrade(urls["BANK_A_URL"], parts=("producer", "consumer"), schema=bank_a.outbox.settings.schema)
    # Where nothing else is between the banks, bank B sends nothing, and needs no more than the consumer's tables.
    parts = ("producer", "consumer") if via else ("consumer",)
    upgrade(urls["BANK_B_URL"], parts=parts, schema=bank_b.outbox.settings.schema)
    bank_a.Base.metadata.create_all(banks.a)
    bank_b.Base.metadata.create_all(banks.b)


def open_accounts(
    banks: Banks, survey: Survey, known: frozenset[int] | None = None, balance: Decimal | None = None
) -> None:
    """Open the accounts of both banks.

    ``known``: the accounts of bank A, instead of all senders. ``balance``: what each of them begins with.
    """
    accounts = [
        {"id": account, "balance": _opening_balance(survey, account, balance)}
        for account in sorted(known if known is not None else survey.needs)
    ]
    entries = [{"account_id": account["id"], "amount": account["balance"]} for account in accounts]
    receivers = [{"id": name, "balance": Decimal()} for name in sorted(survey.receivers) if _RECEIVER.fullmatch(name)]
    with Session(banks.a) as session, session.begin():
        _insert(session, bank_a.Account, accounts)
        _insert(session, bank_a.LedgerEntry, entries)
    with Session(banks.b) as session, session.begin():
        _insert(session, bank_b.Account, receivers)


def read_accounts(path: Path) -> frozenset[int]:
    """Return the ids in the first column of a file, ``;`` between the columns, the header may be missing.

    Raises:
        OrdersUnreadable: no such file, or a line that doesn't begin with an account id.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise OrdersUnreadable(f"accounts file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OrdersUnreadable(f"accounts file {path}: not UTF-8") from None
    ids = [line.partition(";")[0].strip(' "') for line in lines]
    if ids and ids[0] == "account_id":
        ids[0] = ""
    for number, text in enumerate(ids, start=1):
        if text and not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
            raise OrdersUnreadable(f"accounts file {path}, line {number}: {text[:40]!r} is not an account id")
    return frozenset(int(text) for text in ids if text)


def _opening_balance(survey: Survey, account: int, balance: Decimal | None) -> Decimal:
    return min(survey.opening_balance(account) if balance is None else balance, RICHEST)


def _insert(session: Session, table: type[Any], rows: Iterable[dict[str, Any]]) -> None:
    if rows := list(rows):
        session.execute(insert(table), rows)
