"""Payment orders: read from a file, or generated.

A file has the format of the PKDD'99 bank data: ``;`` between the columns, and a header with ``order_id``,
``account_id`` (the sender, at bank A), ``bank_to`` and ``account_to`` (the receiver, at bank B), ``amount`` and
``k_symbol`` (the purpose). A row that can't be an order is refused with its line number; the next is read.
"""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

COLUMNS = ("order_id", "account_id", "bank_to", "account_to", "amount", "k_symbol")
MOST = Decimal("1000000000.00")

_MAX_ID = 2**63 - 1
_LONGEST = {"bank_to": 11, "account_to": 34, "k_symbol": 100}  # a BIC, an IBAN
_NUMBER = re.compile(r"[+-]?([0-9]+)(\.[0-9]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Order:
    """One payment order; ``line`` is where it stands in its file, or its number."""

    line: int
    id: int
    account_id: int
    bank_to: str
    account_to: str
    amount: Decimal
    purpose: str

    @property
    def receiver(self) -> str:
        """The receiver's account, as bank B calls it."""
        return f"{self.bank_to}-{self.account_to}"


@dataclass(frozen=True, slots=True, order=True)
class Refusal:
    """An order that was not executed, and why."""

    line: int
    reason: str


class OrdersUnreadable(Exception):
    """The file as a whole is of no use."""


def read_orders(path: Path) -> Iterator[Order | Refusal]:
    """Yield every row of a file as an order or a refusal; blank lines are skipped.

    Raises:
        OrdersUnreadable: no such file, not a regular one, or a column is missing from its header.
    """
    try:
        if path.exists() and not path.is_file():
            raise OrdersUnreadable(f"orders file {path}: not a regular file (it is read more than once)")
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            columns = _header(path, file.readline())
            seen: dict[int, int] = {}
            for line, text in enumerate(file, start=2):
                if text.strip():
                    yield _row(line, text, columns, seen)
    except OSError as error:
        raise OrdersUnreadable(f"orders file {path}: {error.strerror}") from None


def generate_orders(count: int, seed: int) -> Iterator[Order]:
    """Yield ``count`` orders; the same seed gives the same orders."""
    dice = random.Random(seed)
    for number in range(1, count + 1):
        yield Order(
            line=number,
            id=number,
            account_id=dice.randint(1, 100),
            bank_to=dice.choice(("AB", "CD", "EF")),
            account_to=str(dice.randint(1_000, 1_099)),
            amount=Decimal(dice.randint(1, 500_000)).scaleb(-2),
            purpose=dice.choice(("RENT", "LOAN", "INSURANCE", "")),
        )


def _header(path: Path, text: str) -> list[str]:
    try:
        columns = _split(text)
    except ValueError:
        columns = []
    if missing := [name for name in COLUMNS if name not in columns]:
        raise OrdersUnreadable(
            f"orders file {path}: no column {', '.join(missing)} in its first line; expected is {';'.join(COLUMNS)}"
        )
    return columns


def _row(line: int, text: str, columns: list[str], seen: dict[int, int]) -> Order | Refusal:
    try:
        order = _order(line, text, columns)
    except ValueError as error:
        return Refusal(line, str(error))
    if (earlier := seen.setdefault(order.id, line)) != line:
        return Refusal(line, f"order_id {order.id} came before, in line {earlier}")
    return order


def _order(line: int, text: str, columns: list[str]) -> Order:
    values = _split(text)
    if len(values) != len(columns):
        raise ValueError(f"{len(values)} columns, {len(columns)} expected")
    row = dict(zip(columns, values, strict=True))
    return Order(
        line=line,
        id=_whole("order_id", row["order_id"]),
        account_id=_whole("account_id", row["account_id"]),
        bank_to=_word("bank_to", row["bank_to"]),
        account_to=_word("account_to", row["account_to"]),
        amount=_amount(row["amount"]),
        purpose=_text("k_symbol", row["k_symbol"]),
    )


def _split(text: str) -> list[str]:
    # Line by line, not the file at once: an open quote spoils its own line only.
    try:
        (values,) = csv.reader([text], delimiter=";", strict=True)
    except csv.Error as error:
        raise ValueError(f"not a row of a CSV file: {error}") from None
    return [value.strip() for value in values]


def _whole(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or not 0 < int(text) <= _MAX_ID:
        raise ValueError(f"{name} {_shown(text)} is not a positive whole number of at most 63 bits")
    return int(text)


def _amount(text: str) -> Decimal:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"amount {_shown(text)} is not a number")
    if len(match[2] or "") > 3:
        raise ValueError(f"amount {_shown(text)} has more than 2 decimals")
    amount = Decimal(text)
    if amount < 0:
        raise ValueError(f"amount {_shown(text)} is negative")
    if amount == 0:
        raise ValueError("amount is zero")
    if amount > MOST:
        raise ValueError(f"amount {_shown(text)} is more than {MOST}")
    return amount.quantize(Decimal("0.01"))


def _word(name: str, text: str) -> str:
    if not text:
        raise ValueError(f"{name} is empty")
    return _text(name, text)


def _text(name: str, text: str) -> str:
    if len(text) > _LONGEST[name]:
        raise ValueError(f"{name} {_shown(text)} is longer than {_LONGEST[name]} characters")
    if "\ufffd" in text or not text.isprintable():
        raise ValueError(f"{name} {_shown(text)} has characters that are not UTF-8 or can't be printed")
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
