"""Two DataFrames compared by key, column by column, by the same rules as two tables of PostgreSQL's.

Rows of one key are brought together by one shuffle of both frames. What differs is said by Spark's own expressions, so
that nothing but differences leaves the executors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from outbox.errors import InvalidSettings
from outbox.message.masking import NAMES
from outbox.reconcile.columns.kinds import Tolerance
from outbox.reconcile.tables import INTEGERS
from outbox.text import MASK

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
#: So many digits a decimal of Spark's has at most.
_MOST_DIGITS = 38
_KEYS = frozenset({"bigint", "string", "boolean", "binary", "date", "timestamp", "timestamp_ntz"})


def columns_that_differ(
    left: DataFrame,
    right: DataFrame,
    key: Sequence[str],
    columns: Sequence[str] = (),
    tolerances: Mapping[str, str] | None = None,
    *,
    shown: Collection[str] = (),
) -> DataFrame:
    """Return the differences of two frames: ``key`` (a struct), ``kind``, ``column``, ``left``, ``right``.

    ``columns`` are all that both have, unless they are named: one that a frame alone has goes uncompared, and must be
    looked for by the caller. ``tolerances`` are written as those of a command:
    ``0.01``, ``1%``, of a timestamp seconds. The kind is ``differs``, ``only_left`` or ``only_right``. NULL equals
    NULL, and NaN equals NaN. Columns with a telling name are masked, but for those ``shown``. A key that is NULL, or
    there twice, fails the job.

    Raises:
        InvalidSettings: a column isn't there, types can't be compared, or a tolerance can't be right; names it.
    """
    from pyspark.sql import functions as sql  # noqa: PLC0415 - an extra

    types = dict(left.dtypes), dict(right.dtypes)
    named = list(columns) or [name for name in types[0] if name in types[1] and name not in key]
    amounts = dict(tolerances or {})
    if unknown := [name for name in amounts if name not in named]:
        raise InvalidSettings(f"tolerances: {unknown[0]} is none of the compared columns: {', '.join(named)}")
    masks = {each for each in (*key, *named) if NAMES.masks(each)} - set(shown)
    kinds = {name: _kind(name, *types, is_key=name in key) for name in (*key, *named)}
    judges = [_Judge(name, kinds[name], amounts.get(name), name in masks) for name in named]
    ours, theirs = (
        frame.select(
            sql.struct(*(sql.col(_quoted(each)).cast(kinds[each]).alias(each) for each in key)).alias("key"),
            sql.struct(
                sql.lit(True).alias("here"),
                *(sql.col(_quoted(each)).cast(kinds[each]).alias(f"c{number}") for number, each in enumerate(named)),
            ).alias(side),
        )
        for frame, side in ((left, "l"), (right, "r"))
    )
    by_key = ours.unionByName(theirs, allowMissingColumns=True).groupBy("key")
    rows = by_key.agg(
        *(sql.first(side, ignorenulls=True).alias(side) for side in ("l", "r")),
        sql.greatest(sql.count("l"), sql.count("r")).alias("most"),
    )
    key_shown = sql.struct(*(_text(sql.col("key")[each], is_masked=each in masks).alias(each) for each in key))
    is_wrong = reduce(lambda wrong, each: wrong | sql.col("key")[each].isNull(), key, sql.col("most") > 1)
    why = sql.concat(sql.lit("a key is NULL, or there twice in a frame; leave such rows out: "), sql.to_json(key_shown))
    # As a filter, which no later projection takes away.
    checked = rows.where(sql.when(is_wrong, sql.raise_error(why).cast("boolean")).otherwise(sql.lit(True)))
    is_left, is_right = sql.col("l").isNotNull(), sql.col("r").isNotNull()
    found = [
        sql.when(~is_right, _difference("only_left")),
        sql.when(~is_left, _difference("only_right")),
        *(
            sql.when(is_left & is_right, judge.difference(sql.col("l")[f"c{number}"], sql.col("r")[f"c{number}"]))
            for number, judge in enumerate(judges)
        ),
    ]
    each = sql.explode(sql.array_compact(sql.array(*found))).alias("difference")
    return checked.select(key_shown.alias("key"), each).select("key", "difference.*")


@dataclass(frozen=True, slots=True)
class _Judge:
    """Tells whether a column differs, which both frames have as one kind."""

    name: str
    kind: str
    tolerance: str | None
    is_masked: bool

    def difference(self, one: Column, other: Column) -> Column:
        """Return the difference of two values; NULL where they are equal."""
        from pyspark.sql import functions as sql  # noqa: PLC0415 - an extra

        equal = one.eqNullSafe(other)
        if self.tolerance is not None:
            near = self._near(one, other, Tolerance.parse(self.name, self.tolerance, _measure(self.kind)))
            equal = equal | sql.coalesce(near, sql.lit(False))
        values = (_text(each, is_masked=self.is_masked) for each in (one, other))
        return sql.when(~equal, _difference("differs", self.name, *values))

    def _near(self, one: Column, other: Column, tolerance: Tolerance) -> Column:
        from pyspark.sql import functions as sql  # noqa: PLC0415 - an extra

        if _measure(self.kind) == "time":
            one, other = (sql.unix_micros(each.cast("timestamp")).cast("decimal(20,0)") for each in (one, other))
            return sql.abs(one - other) <= sql.lit(tolerance.amount * 1_000_000)
        is_float = _measure(self.kind) == "float"
        if self.kind == "bigint":
            one, other = one.cast("decimal(20,0)"), other.cast("decimal(20,0)")
        amount = sql.lit(float(tolerance.amount) if is_float else tolerance.amount)
        most = amount * sql.greatest(sql.abs(one), sql.abs(other)) if tolerance.relative else amount
        near = sql.abs(one - other) <= most
        return near & (sql.abs(one) < float("inf")) & (sql.abs(other) < float("inf")) if is_float else near


def _difference(kind: str, column: str | None = None, *values: Column) -> Column:
    from pyspark.sql import functions as sql  # noqa: PLC0415 - an extra

    nothing = sql.lit(None).cast("string")
    one, other = values or (nothing, nothing)
    name = sql.lit(column).cast("string").alias("column")
    return sql.struct(sql.lit(kind).alias("kind"), name, one.alias("left"), other.alias("right"))


def _text(value: Column, *, is_masked: bool) -> Column:
    from pyspark.sql import functions as sql  # noqa: PLC0415 - an extra

    return sql.lit(MASK) if is_masked else value.cast("string")


def _quoted(name: str) -> str:
    return "`{}`".format(name.replace("`", "``"))


def _measure(kind: str) -> str:
    if kind in {"timestamp", "date"}:
        return "time"
    if kind in {"float", "double"}:
        return "float"
    return "number" if kind == "bigint" or _DECIMAL.match(kind) else ""


def _kind(name: str, left: Mapping[str, str], right: Mapping[str, str], *, is_key: bool) -> str:
    """Return the type as which a column of both frames is compared.

    Raises:
        InvalidSettings: it isn't there, or its types can't be compared; names both.
    """
    for side, types in (("left", left), ("right", right)):
        if name not in types:
            raise InvalidSettings(f"the {side} frame has no column {name}; it has {', '.join(types)}")
    kind = _met(left[name], right[name])
    if kind is None or (is_key and kind not in _KEYS and not _DECIMAL.match(kind)):
        what = "a key" if is_key else "compared"
        raise InvalidSettings(
            f"column {name} is {left[name]} in the left frame and {right[name]} in the right: they can't be {what}; "
            "cast one of them"
        )
    return kind


def _met(left: str, right: str) -> str | None:
    kinds = {"bigint" if each in INTEGERS else each for each in (left, right)}
    if len(kinds) == 1:
        (kind,) = kinds
        return None if "map<" in kind else kind
    decimals = [_DECIMAL.match(each) for each in kinds]
    digits = [(int(each[1]), int(each[2])) for each in decimals if each] + [(20, 0)] * ("bigint" in kinds)
    if len(digits) == len(kinds):
        scale = max(each for _, each in digits)
        whole = max(each - scale for each, scale in digits)
        return f"decimal({whole + scale},{scale})" if whole + scale <= _MOST_DIGITS else None
    if kinds <= {"bigint", "float", "double"} or (digits and "double" in kinds):
        return "double"
    return "float" if digits and "float" in kinds else None
