"""What the two sides' business tables must agree on, declared: counts and sums under keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from outbox.errors import InvalidSettings
from outbox.message.content import check_group, check_topic
from outbox.message.masking import names_in

#: Under a value of ``in_flight``: each message counts one.
COUNT = "*"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
#: What may hold a semicolon that doesn't end a statement: comments, quoted names, literals, dollar-quoted text.
_QUOTED = re.compile(
    r"""--[^\n]*|/\*.*?\*/|"(?:[^"]|"")*"|\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|(\$\w*\$).*?\1""", re.DOTALL
)


class Sums:
    """What adds up columns of SELECT statements and of bodies under keys: a measure, or a total of a fleet."""

    __slots__ = ()
    #: What errors call one.
    called: ClassVar[str]
    name: str
    by: tuple[str, ...]
    values: tuple[str, ...]
    in_flight: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that each SELECT returns."""
        return (*self.by, *self.values)

    @property
    def selects(self) -> dict[str, str]:
        """The SELECT statements that there are, by what they are called."""
        raise NotImplementedError

    def refused(self, why: str) -> InvalidSettings:
        """Return the error that names it."""
        return InvalidSettings(f"{self.called} {self.name!r}: {why}")

    def wrong(self) -> Iterator[str]:
        """Say what is wrong with it; the first counts: what comes after it may make no sense."""
        yield from self._wrong_columns()
        for name, select in self.selects.items():
            yield from wrong_select(name, select)
        yield from self._wrong_paths()

    def _wrong_columns(self) -> Iterator[str]:
        if not _NAME.fullmatch(self.name):
            yield "a name begins with a letter and has letters, digits, _ and - only"
        for what, columns in (("by", self.by), ("values", self.values)):
            if isinstance(columns, str):
                yield f"{what} = {columns!r} must be a tuple; write ({columns!r},)"
        if not self.values:
            yield "no values; name at least one column to add up"
        for column in self.columns:
            if not isinstance(column, str) or not _COLUMN.fullmatch(column):
                yield f"{column!r} is no name of a column; use letters, digits and _, as in SELECT … AS amount"
        if twice := sorted({column for column in self.columns if self.columns.count(column) > 1}):
            yield f"{', '.join(twice)} is named twice among by and values; name each column once"

    def _wrong_paths(self) -> Iterator[str]:
        if self.in_flight and (missing := [column for column in self.columns if column not in self.in_flight]):
            yield f"in_flight lacks {', '.join(missing)}; give its path in the body, such as 'amount'"
        if extra := sorted(self.in_flight.keys() - set(self.columns)):
            yield f"in_flight has {', '.join(extra)}, which is neither in by nor in values"
        for column, path in self.in_flight.items():
            try:
                is_path = isinstance(path, str) and path and all(names_in(path))
            except ValueError:
                is_path = False
            if not is_path:
                yield f"in_flight.{column} = {path!r} is no path; write names with dots between, as in 'order.currency'"
            if path == COUNT and column in self.by:
                yield f"in_flight.{column} = '*' counts messages, and {column} is a part of the key"


@dataclass(frozen=True, slots=True)
class Measure(Sums):
    """A business measure of one pair: what the producer booked equals what the consumer booked plus what is under way.

    ``producer``, ``consumer`` and (optional) ``rolled_back`` are SELECT statements, run in the same snapshot as the
    comparison of the messages, ``rolled_back`` in the producer's database. Each returns the columns ``by`` (the key,
    compared as numbers where one of the statements gives it as a number, else as text; NULL is a key of its own) and
    ``values`` (integers or numeric, never floats; NULL, which is what ``sum`` gives of no rows, is 0). Rows with the
    same key are added up, so that GROUP BY may be left out. Without ``by`` there is one row for all.

    They may use bound values of the window: ``:since`` and ``:until`` (timestamptz, or NULL where the window is open),
    and ``:first`` and ``:last`` (uuid, never NULL), the first and the last id that the window can hold. A window is one
    of ids, so a table that has the message id is best asked with ``message_id BETWEEN :first AND :last``; with times,
    what happens at the very edge of the window may fall on different sides of it in two databases. The time zone of
    the statements is UTC.

    ``producer`` may be left out: then the bodies of all messages of the window are summed which were committed and
    neither recalled nor compensated, as far as they are addressed to the group.

    ``in_flight`` says how the body of a message that is under way (JSON) gives each column of ``by`` and ``values``:
    a path such as ``amount``, ``order.currency`` or ``items.0.price``; the path ``*`` under a value counts messages.
    Where a body doesn't have what the path names, or has something else than a number under a value, the result says
    so. Empty: the bodies don't tell, and a message under way leaves the measure unproven.

    For the bank: ``by=("receiver",)``, ``values=("transfers", "amount")``.

    Raises:
        InvalidSettings: names the measure, what is wrong with it, and the mend.
        InvalidMessage: topic or group isn't a name.
    """

    called: ClassVar[str] = "measure"
    name: str
    topic: str
    group: str
    by: tuple[str, ...]
    values: tuple[str, ...]
    consumer: str
    in_flight: Mapping[str, str] = field(default_factory=dict)
    producer: str | None = None
    rolled_back: str | None = None

    def __post_init__(self) -> None:
        check_topic(self.topic)
        check_group(self.group)
        for wrong in self.wrong():
            raise self.refused(wrong)

    def of(self, names: tuple[str, str]) -> bool:
        """Is it a measure of the pair of this topic and group?"""
        return (self.topic, self.group) == names

    @property
    def selects(self) -> dict[str, str]:
        """The SELECT statements that there are, by ``producer``, ``rolled_back`` and ``consumer``."""
        selects = {"producer": self.producer, "rolled_back": self.rolled_back, "consumer": self.consumer}
        return {side: sql for side, sql in selects.items() if sql is not None}

    def _wrong_paths(self) -> Iterator[str]:
        if not self.in_flight and self.producer is None:
            named = ", ".join(self.columns)
            yield f"without producer the bodies are summed, and in_flight must say where they have {named}"
        yield from Sums._wrong_paths(self)


def wrong_select(name: str, sql: str) -> Iterator[str]:
    """Say what is wrong with a statement, which is called so."""
    bare = _QUOTED.sub(" ", sql).strip()
    if ";" in bare:
        yield f"{name} must be a single SELECT; leave out the semicolon"
    if not re.match(r"[\s(]*(SELECT|WITH|VALUES|TABLE)\b", bare, re.IGNORECASE):
        yield f"{name} must be a single SELECT (or WITH … SELECT), not {bare[:40]!r}"
