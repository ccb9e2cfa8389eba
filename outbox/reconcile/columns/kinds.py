"""What two columns are compared as: one comparison for each two types that can be equal by value.

Each comparison has a form that both databases hash, and a text that both databases write. Rows of equal hashes are
equal, and are never read. Of others the texts are read: equal ones are equal values, and a few kinds look once more at
texts that differ (`equal_values`), since a tolerance, or what JSON leaves open, makes equal what is written otherwise.
So a hash may be stricter than the judge, which costs time, and never looser, which would cost the truth.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

import numpy as np

from outbox.errors import InvalidSettings
from outbox.reader import DURATION, seconds_of
from outbox.reconcile.measure.result import EXACT
from outbox.reconcile.rows import Array


@dataclass(frozen=True, slots=True)
class Kind:
    """One comparison, in SQL of an expression ``{c}``: ``value`` is what rows are ordered by, ``text`` what is read.

    ``type`` is that of a value, and ``hashed`` what is hashed of it, where it isn't itself. ``is_key``: two rows may be
    told apart by it. ``measure`` is what a tolerance is of: ``float``, ``number``, ``time``, or nothing.
    """

    name: str
    type: str
    value: str
    text: str = ""
    hashed: str = "{value}"
    is_key: bool = True
    measure: str = ""

    def expression(self, column: str) -> str:
        """Return the value of a column, in SQL."""
        return self.value.format(c=column)

    def digested(self, column: str) -> str:
        """Return what is hashed of a column, in SQL."""
        return self.hashed.format(value=self.expression(column))

    def written(self, column: str) -> str:
        """Return the text of a column, in SQL."""
        return (self.text or "({value})::text").format(c=column, value=self.expression(column))


# PostgreSQL hashes values for equality, not as evidence: -1 as 1 if it is a decimal, and as 4294967295 if it is a
# bigint (which times are, too), `[]` as `{}` in a jsonb. So their bytes are hashed, or their text.
# Of a negative zero the sum with zero is zero, which is written and hashed in one way. A float is no key: two of its
# texts may be one number, and a number of another type lies beside it.
INTEGER = Kind("integer", "int8", "{c}::int8", hashed="int8send({value})", measure="number")
NUMBER = Kind(
    "number",
    "numeric",
    "{c}::numeric",
    "trim_scale({value})::text",
    "numeric_send(trim_scale({value}))",
    measure="number",
)
REAL = Kind("real", "float4", "({c}::float4 + 0::float4)", is_key=False, measure="float")
DOUBLE = Kind("double", "float8", "({c}::float8 + 0::float8)", is_key=False, measure="float")
TEXT = Kind("text", "text", '({c}::text COLLATE "C")')
UUIDS = Kind("uuid", "uuid", "{c}")
BOOLEAN = Kind("boolean", "bool", "{c}")
BYTES = Kind("bytes", "bytea", "{c}")
DATE = Kind("date", "date", "{c}", measure="time")
MOMENT = Kind("moment", "timestamptz", "{c}", hashed="timestamptz_send({value})", measure="time")
LOCAL = replace(MOMENT, value="timezone('UTC', {c}::timestamp)")
TIME = Kind("time of day", "time", "{c}", hashed="time_send({value})")
JSON = Kind("json", "text", '({c}::jsonb::text COLLATE "C")', is_key=False)

_BY_TYPE: Mapping[str, Kind] = {
    **dict.fromkeys(("smallint", "integer", "bigint"), INTEGER),
    "numeric": NUMBER,
    "real": REAL,
    "double precision": DOUBLE,
    **dict.fromkeys(("text", "character varying", "character", "name"), TEXT),
    "uuid": UUIDS,
    "boolean": BOOLEAN,
    "bytea": BYTES,
    "date": DATE,
    "timestamp with time zone": MOMENT,
    "timestamp without time zone": LOCAL,
    "time without time zone": TIME,
    **dict.fromkeys(("json", "jsonb"), JSON),
}

#: What two kinds that aren't the same are compared as. An integer that a float meets is exact up to 2^53; a decimal
#: becomes the nearest float. A time without a zone is in UTC, and a date is its midnight.
_MEETING: Mapping[frozenset[str], Kind] = {
    frozenset(("integer", "number")): NUMBER,
    frozenset(("integer", "real")): DOUBLE,
    frozenset(("integer", "double")): DOUBLE,
    frozenset(("number", "real")): REAL,
    frozenset(("number", "double")): DOUBLE,
    frozenset(("real", "double")): DOUBLE,
    frozenset(("uuid", "text")): TEXT,
    frozenset(("date", "moment")): LOCAL,
}


def kinds_of(left: str, right: str) -> tuple[Kind, Kind] | None:
    """Return what columns of two types are compared as, one for each side; None: they can't be compared.

    Other types (arrays, intervals, networks, …) are compared by their texts, if both are of the same one.
    """
    ours, theirs = _BY_TYPE.get(left), _BY_TYPE.get(right)
    if ours is None or theirs is None:
        other = Kind(left, "text", TEXT.value, is_key=False)
        return (other, other) if left == right else None
    if ours.name == theirs.name:
        return ours, theirs
    if (met := _MEETING.get(frozenset((ours.name, theirs.name)))) is None:
        return None
    return ours if ours.name == met.name else met, theirs if theirs.name == met.name else met


# --- tolerances ------------------------------------------------------------------------------------------

_AMOUNT = re.compile(r"\d+(\.\d*)?(e-?\d+)?|\.\d+", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two values may lie apart and count as equal: so much, or ``relative`` to the larger of both.

    Of times it is seconds.
    """

    amount: Decimal
    relative: bool = False

    def __str__(self) -> str:
        return f"{(self.amount * 100).normalize():f}%" if self.relative else f"{self.amount.normalize():f}"

    @classmethod
    def parse(cls, column: str, text: str, measure: str) -> Tolerance:
        """Return the tolerance that a text is: ``0.01``, ``1%``; of times ``1.5`` or ``2s``.

        Raises:
            InvalidSettings: it is none, or the column has no distance; names both.
        """
        called = f"tolerance {column} = {text!r}"
        if not measure:
            raise InvalidSettings(f"{called}: {column} is neither a number nor a time; leave it out")
        number = text.removesuffix("%")
        if measure == "time" and DURATION.fullmatch(text):
            return cls(Decimal(str(seconds_of(text))))
        if not _AMOUNT.fullmatch(number) or (number != text and measure == "time"):
            example = "a duration as 500ms, 2s or 1.5" if measure == "time" else "a number as 0.01, or a share as 1%"
            raise InvalidSettings(f"{called} must be {example}")
        return cls(Decimal(number) / 100, relative=True) if number != text else cls(Decimal(number))


def equal_values(
    kind: Kind, tolerance: Tolerance | None, left: Sequence[str | None], right: Sequence[str | None]
) -> Array:
    """Return which texts that differ are equal values all the same; NULL is equal to nothing here."""
    if tolerance is None and kind is not JSON:
        return np.zeros(len(left), bool)
    if tolerance is None:
        return _each(left, right, lambda one, other: _document(one) == _document(other))
    if kind.measure == "float":
        return _near(left, right, tolerance)
    if kind.measure == "time":
        return _each(left, right, lambda one, other: abs(_moment(one) - _moment(other)) <= tolerance.amount)
    return _each(left, right, lambda one, other: _is_within(Decimal(one), Decimal(other), tolerance))


def _each(left: Sequence[str | None], right: Sequence[str | None], equal: Callable[[str, str], bool]) -> Array:
    def is_equal(one: str | None, other: str | None) -> bool:
        # Of infinity, and of times of no year of Python's, their texts decide.
        with suppress(ValueError, InvalidOperation, RecursionError):
            return one is not None and other is not None and equal(one, other)
        return False

    return np.fromiter(map(is_equal, left, right), bool, len(left))


def _is_within(one: Decimal, other: Decimal, tolerance: Tolerance) -> bool:
    if not (one.is_finite() and other.is_finite()):
        return False
    most = EXACT.multiply(tolerance.amount, max(abs(one), abs(other))) if tolerance.relative else tolerance.amount
    return EXACT.subtract(one, other).copy_abs() <= most


def _near(left: Sequence[str | None], right: Sequence[str | None], tolerance: Tolerance) -> Array:
    one, other = (np.array([np.nan if each is None else float(each) for each in side]) for side in (left, right))
    finite = np.isfinite(one) & np.isfinite(other)
    one, other = np.where(finite, one, 0.0), np.where(finite, other, 0.0)
    with np.errstate(over="ignore"):  # what is too far apart for a float is too far
        most = float(tolerance.amount) * (np.maximum(np.abs(one), np.abs(other)) if tolerance.relative else 1.0)
        near: Array = finite & (np.abs(one - other) <= most)
    return near


def _moment(text: str) -> Decimal:
    """Return the seconds since 1970 of a time as PostgreSQL writes it in UTC.

    Raises:
        ValueError: it is infinite, or in no year from 1 to 9999.
    """
    moment = dt.datetime.fromisoformat(text)
    passed = moment.replace(tzinfo=dt.UTC) - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return Decimal(passed // dt.timedelta(microseconds=1)).scaleb(-6)


def _document(text: str) -> object:
    # Numbers by value, 1.0 as 1; and never as the boolean that Python takes for the same.
    def number(digits: str) -> tuple[str, Decimal]:
        return "number", Decimal(digits)

    return json.loads(text, parse_int=number, parse_float=number)
