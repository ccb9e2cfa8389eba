"""Two tables compared by key, column by column: which rows one side alone has, which columns differ, and both values.

Both are read in one snapshot of each database, in transactions that are read only (`compare.compare_tables`).

1. A sample of the keys of both sides cuts them into ranges of some hundred rows: some 65,000 at most. Where several
   rows have the first column of the key in common, and for keys of variable length (of which PostgreSQL finds the range
   by going through all of them), there are fewer ranges, each cut into parts by a hash of the whole key.
2. Both databases digest their rows by range. Ranges of equal digests are equal.
3. The rows of the others are read: looked up where they are few and an index leads to them, else by one more pass. They
   come in the order of their ranges, so that each range of either side is joined and judged by itself, and what lies in
   memory is a few batches, however large the tables are.

To cut ranges that differ once more, and digest them again, would save a fiftieth at most, as it does between messages.
A tolerance changes nothing of that: a digest is stricter, so that more ranges are read, and the judge decides.

This module needs no library of the extra: commands describe a job with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox.errors import InvalidSettings
from outbox.reader import Seconds, option
from outbox.reconcile.job import MAX_TIME, Access


@dataclass(frozen=True, slots=True)
class TablesJob:
    """Which two tables are compared, by which key, in which columns, and how far values may lie apart.

    ``left`` is in the producer's database, ``right`` in the consumer's. Each of ``key`` and ``columns`` is a name, or
    ``left:right`` where the tables call it differently; one text may have several, with commas between. Of ``masks``
    and of columns with a telling name both values are masked, but for those ``shown``.

    Raises:
        InvalidSettings: no table, no key, a column twice, or a tolerance that isn't ``column=amount``.
    """

    producer: Access
    consumer: Access
    left: str = option("", "The producer's table, as name or schema.name.", metavar="TABLE")
    right: str = option("", "The consumer's table. Default: called as the producer's.", metavar="TABLE")
    key: tuple[str, ...] = option(
        (), "A column of the key; a:b where the right table calls it b. Several with commas.", metavar="COLUMN"
    )
    columns: tuple[str, ...] = option(
        (), "A column to compare, written as one of the key. Default: all that both tables have.", metavar="COLUMN"
    )
    tolerances: tuple[str, ...] = option(
        (), "How far values may lie apart: price=0.01, price=1%, at=2s.", metavar="COLUMN=AMOUNT"
    )
    masks: tuple[str, ...] = option((), "Mask the values of a column, as of one named `email`.", metavar="COLUMN")
    shown: tuple[str, ...] = option(
        (), "Show a column whose name tells of secrets or persons.", metavar="COLUMN", aliases=("show",)
    )
    sample: int = option(20, "How many differences of each column are shown.", least=0)
    max_time: Seconds = option(
        MAX_TIME, "How long a statement may take.", above=0, most=20 * 86400.0, metavar="DURATION"
    )

    def __post_init__(self) -> None:
        for name in ("key", "columns", "tolerances", "masks", "shown"):
            each = tuple(part.strip() for text in getattr(self, name) for part in text.split(",") if part.strip())
            object.__setattr__(self, name, each)
        if not self.left:
            raise InvalidSettings("left: name the producer's table")
        if not self.right:
            object.__setattr__(self, "right", self.left)
        if not self.key:
            raise InvalidSettings("key: name the columns by which a row of one table is found in the other")
        named = [text.partition(":")[0] for text in (*self.key, *self.columns)]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise InvalidSettings(f"columns: {', '.join(twice)} is named twice; a column of the key is always compared")
        if wrong := [text for text in self.tolerances if not all(text.partition("="))]:
            raise InvalidSettings(f"tolerances: {wrong[0]!r} must be column=amount, as price=0.01")
