"""Sums under keys, to the last digit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from outbox.reconcile.result import EXACT

#: The parts of a key, in the order of the measure's ``by``.
Key = tuple[str, ...]

#: The text of a part of a key that is NULL.
NULL = "NULL"


@dataclass(slots=True)
class Tally:
    """Sums by key, one for each value of a measure. ``faults`` are sentences about what couldn't be added."""

    width: int
    sums: dict[Key, list[Decimal]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def add(self, key: Key, values: Sequence[Decimal]) -> None:
        """Add numbers to those of a key; infinity and NaN, which numeric can hold, add up to nothing and are a fault.

        ``values`` are as many as there are values in the measure.
        """
        sums = self.sums.setdefault(key, [Decimal()] * self.width)
        for place, value in enumerate(values):
            if value.is_finite():
                sums[place] = EXACT.add(sums[place], value)
            else:
                self.faults.append(f"{value} under the key {key!r} can't be added up; mend the row that has it")

    def get(self, key: Key, place: int) -> Decimal:
        """Return one sum; 0 where nothing was added."""
        return self.sums[key][place] if key in self.sums else Decimal()


def keys_of(tallies: Iterable[Tally]) -> list[Key]:
    """Return all keys, sorted."""
    return sorted({key for tally in tallies for key in tally.sums})
