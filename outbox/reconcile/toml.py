"""Read values from a table of a TOML document: of the right type, under a known name, or refused with both."""

from __future__ import annotations

import datetime as dt
import enum
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from outbox.errors import InvalidSettings

E = TypeVar("E", bound=enum.StrEnum)
T = TypeVar("T")

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_SECONDS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", list: "a list", dict: "a table"}


def seconds_of(value: object, what: str) -> float:
    """Return a duration: seconds as a number, or a text such as ``90s``, ``5m``, ``1h30m``, ``24h``, ``7d``, ``2w``.

    Raises:
        InvalidSettings: it is none; names it as ``what``.
    """
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise InvalidSettings(f"{what} = {value!r} is no duration; write seconds, or a text such as '90s', '1h30m' or '7d'")


def moment_of(value: object, what: str) -> dt.datetime:
    """Return a time with its zone, also from ISO text.

    Raises:
        InvalidSettings: it is none; names it as ``what``.
    """
    moment = value
    if isinstance(value, str):
        try:
            moment = dt.datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if not isinstance(moment, dt.datetime) or moment.tzinfo is None:
        shown = value.isoformat() if isinstance(value, dt.date) else repr(value)
        raise InvalidSettings(f"{what} = {shown} is no time with a zone; write it as 2026-03-01T00:00:00+01:00")
    return moment


class Table:
    """A table of a document. ``name`` is how it is called in errors; every key must be asked for before `done`."""

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values, self._name = values, name
        self._known: list[str] = []

    def text(self, key: str) -> str | None:
        """Return a text."""
        return self._typed(key, str)

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        return self._typed(key, bool)

    def whole(self, key: str) -> int | None:
        """Return a whole number."""
        return self._typed(key, int)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of texts."""
        values = self._typed(key, list)
        if values is not None and not all(isinstance(value, str) for value in values):
            raise InvalidSettings(f"{self.path(key)} = {values!r} must be a list of texts")
        return None if values is None else tuple(values)

    def mapping(self, key: str) -> dict[str, str] | None:
        """Return a table of texts."""
        values = self._typed(key, dict)
        for name, value in (values or {}).items():
            if not isinstance(value, str):
                raise InvalidSettings(f"{self.path(key)}.{name} = {value!r} must be a text")
        return values

    def seconds(self, key: str) -> float | None:
        """Return a duration in seconds (`seconds_of`)."""
        value = self._value(key)
        return None if value is None else seconds_of(value, self.path(key))

    def moment(self, key: str) -> dt.datetime | None:
        """Return a time (`moment_of`)."""
        value = self._value(key)
        return None if value is None else moment_of(value, self.path(key))

    def choice(self, key: str, kind: type[E]) -> E | None:
        """Return one of the values of an enumeration."""
        text = self.text(key)
        try:
            return None if text is None else kind(text)
        except ValueError:
            raise InvalidSettings(
                f"{self.path(key)} = {text!r} is unknown; choose one of {', '.join(one.value for one in kind)}"
            ) from None

    def table(self, key: str) -> Table | None:
        """Return a table inside this one."""
        values = self._typed(key, dict)
        return None if values is None else Table(values, self.path(key))

    def tables(self, key: str) -> list[Table]:
        """Return the tables of a ``[[list]]``, none if it isn't there."""
        values = self._typed(key, list) or []
        for value in values:
            if not isinstance(value, dict):
                raise InvalidSettings(f"{self.path(key)} must be a list of tables; write [[{self.path(key)}]]")
        return [Table(value, f"{self.path(key)}[{number}]") for number, value in enumerate(values, 1)]

    def needed(self, key: str) -> str:
        """Return a text that must be there."""
        text = self.text(key)
        if text is None:
            raise InvalidSettings(f"{self.path(key)} is missing; it must be a text")
        return text

    def path(self, key: str) -> str:
        """Return how a value is called in errors: ``window.since``."""
        return f"{self._name}.{key}" if self._name else key

    def done(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            InvalidSettings: names the key, and those that are known.
        """
        for key in self._values:
            if key not in self._known:
                close = get_close_matches(key, self._known, 1)
                mend = f"did you mean {close[0]}?" if close else f"known are {', '.join(self._known)}"
                raise InvalidSettings(f"{self.path(key)} is unknown; {mend}")

    def _value(self, key: str) -> Any:
        self._known.append(key)
        return self._values.get(key)

    def _typed(self, key: str, kind: type[T]) -> T | None:
        value = self._value(key)
        # A bool is an int to Python, and not to the reader of a file.
        if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return value
        raise InvalidSettings(f"{self.path(key)} = {value!r} must be {_KINDS[kind]}")
