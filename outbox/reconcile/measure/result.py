"""What a measure comes to: a row for each key and value, and what nothing accounts for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.reconcile.job import Pair

#: Adds without rounding: numeric has up to 131072 digits before the point and 16383 after it.
EXACT = Context(prec=150_000, traps=[Inexact, InvalidOperation])


@dataclass(frozen=True, slots=True)
class MeasureRow:
    """One value of one measure under one key; ``unexplained`` = producer - rolled_back - consumer - in_flight.

    A part of the key is None where it is NULL, or null in a body.
    """

    key: tuple[str | None, ...]
    value: str
    producer: Decimal
    rolled_back: Decimal
    consumer: Decimal
    in_flight: Decimal

    @property
    def unexplained(self) -> Decimal:
        """What nothing accounts for; 0 if all is well."""
        return reduce(EXACT.subtract, (self.rolled_back, self.consumer, self.in_flight), self.producer)


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """One measure: a row for each key and value; ``by`` names the parts of the keys.

    ``faults`` are sentences about what couldn't be read, so that the measure proves nothing.
    """

    name: str
    pair: Pair
    by: tuple[str, ...]
    rows: tuple[MeasureRow, ...]
    faults: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[MeasureRow, ...]:
        """The sums over all keys, by value and currency."""
        totals = []
        for (value, currency), rows in self.by_currency(self.rows).items():
            parts = (map(attrgetter(part), rows) for part in ("producer", "rolled_back", "consumer", "in_flight"))
            sums = (reduce(EXACT.add, part, Decimal()) for part in parts)
            totals.append(MeasureRow(("total", *currency), value, *sums))
        return tuple(totals)

    def by_currency(self, rows: Iterable[MeasureRow]) -> dict[tuple[str, tuple[str | None, ...]], list[MeasureRow]]:
        """Return rows by value and currency, if a part of the key is called so: only such rows may be added up."""
        groups: dict[tuple[str, tuple[str | None, ...]], list[MeasureRow]] = {}
        for row in rows:
            currency = tuple(part for name, part in zip(self.by, row.key, strict=True) if name.lower() == "currency")
            groups.setdefault((row.value, currency), []).append(row)
        return groups

    @property
    def unexplained(self) -> tuple[MeasureRow, ...]:
        """The rows that don't add up."""
        return tuple(row for row in self.rows if row.unexplained)

    @property
    def in_sync(self) -> bool:
        """Does everything add up, and could everything be read?"""
        return not self.unexplained and not self.faults
