"""What the bodies of messages carry, added up: by the database, and one by one where some can't be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox import codec
from outbox.errors import InvalidMessage
from outbox.reconcile.aside import aside
from outbox.reconcile.measure import COUNT, Measure
from outbox.reconcile.model import FIRST_ID, Pair, Range
from outbox.reconcile.postgres import between
from outbox.reconcile.tally import NULL, Key, Tally
from outbox.store import reconcile_measure as store
from outbox.store.execute import execute
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: Half messages that one statement adds up.
BATCH = 50_000
#: Bodies that are read at once where the database couldn't read one of a batch.
CHUNK = 100
_EXAMPLES = 3
_ZERO, _ONE = Decimal(), Decimal(1)

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bodies:
    """Adds up bodies in the producer's database as a measure of a pair says.

    ``seconds`` is how long a statement may take.
    """

    connection: Connection
    schema: str
    measure: Measure
    pair: Pair
    seconds: float

    def under_way(self, ids: Sequence[UUID]) -> Tally:
        """Return what the bodies of these messages carry."""
        if ids and not self.measure.in_flight:
            what = f"{len(ids)} messages are under way, and what they carry isn't known"
            return self._tally([f"{what}: give the measure in_flight, or a window in which all has arrived"])
        kept, unreadable, tally = 0, _Unreadable(), self._tally()
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            with aside(self.connection, self.seconds, by_index=True):
                kept += execute(self.connection, store.kept(self.schema, batch))[0][0][0]
            self._add(store.halves_of(self.schema, between(self.pair), batch), tally, unreadable)
        if kept < len(ids):
            tally.faults.append(
                f"the bodies of {len(ids) - kept} of {len(ids)} messages under way are no longer in the producer's "
                "database (pruned?): what they carry isn't counted"
            )
        tally.faults += unreadable.told(f"{len(ids)} messages under way")
        return tally

    def settled(self, window: Range, starts: Mapping[int, int]) -> Tally:
        """Return what the bodies of all committed messages of a window carry that are meant for the group.

        ``starts`` are the positions, by queue, after which the group began.
        """
        found, unreadable, tally, pair = 0, _Unreadable(), self._tally(), between(self.pair)
        for first, last in self._batches(window.first, last_of(window)):
            halves = store.settled_halves(self.schema, pair, starts, first, last)
            found += self._add(halves, tally, unreadable)
        tally.faults += unreadable.told(f"{found} messages")
        return tally

    def _tally(self, faults: Sequence[str] = ()) -> Tally:
        return Tally(len(self.measure.values), faults=list(faults))

    def _batches(self, first: UUID, last: UUID) -> Iterator[tuple[UUID, UUID]]:
        while True:
            with aside(self.connection, self.seconds, by_index=True):
                (rows,) = execute(self.connection, store.batch_end(self.schema, first, last, BATCH))
            if not rows:
                yield first, last
                return
            yield first, UUID(int=rows[0][0].int - 1)
            first = rows[0][0]

    def _add(self, halves: store.Halves, tally: Tally, unreadable: _Unreadable) -> int:
        """Add the bodies of a batch; return how many there are."""
        rows = self._sums(halves)
        if rows is None or not all(row[0] for row in rows):
            return self._add_one_by_one(halves, tally, unreadable)
        width = len(self.measure.by)
        for _, _, *columns in rows:
            tally.add(tuple(columns[:width]), columns[width:])
        return sum(row[1] for row in rows)

    def _sums(self, halves: store.Halves) -> list[tuple[Any, ...]] | None:
        """Have the database add up a batch; None if it can't read one of the bodies."""
        try:
            with aside(self.connection, self.seconds, by_index=True):
                return execute(self.connection, store.body_sums(halves, self._by, self._values))[0]
        except DBAPIError as error:
            # Data exception, and program limit exceeded: a nesting or a number that is too much for it.
            if str(getattr(error.orig, "sqlstate", ""))[:2] in {"22", "54"}:
                return None
            raise

    def _add_one_by_one(self, halves: store.Halves, tally: Tally, unreadable: _Unreadable) -> int:
        found, after = 0, FIRST_ID
        while True:
            with aside(self.connection, self.seconds, by_index=True):
                (rows,) = execute(self.connection, store.bodies(halves, after, CHUNK))
            for id_, content_type, raw in rows:
                try:
                    tally.add(*carried(raw, content_type, self._by, self._values))
                except InvalidMessage as error:
                    unreadable.add(id_, str(error))
            found += len(rows)
            if len(rows) < CHUNK:
                return found
            after = rows[-1][0]

    @property
    def _by(self) -> list[Path]:
        return [_path(self.measure.in_flight[column]) for column in self.measure.by]

    @property
    def _values(self) -> list[Path | None]:
        paths = [self.measure.in_flight[column] for column in self.measure.values]
        return [None if path == COUNT else _path(path) for path in paths]


class _Unreadable:
    """Bodies that couldn't be read: how many, and why the first of them couldn't."""

    def __init__(self) -> None:
        self.number = 0
        self.examples: list[str] = []

    def add(self, id_: UUID, why: str) -> None:
        self.number += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{id_}: {why}")

    def told(self, among: str) -> list[str]:
        if not self.number:
            return []
        more = f"; and {self.number - len(self.examples)} more" if self.number > len(self.examples) else ""
        return [
            f"{self.number} of {among} have a body that can't be read, so that what they carry isn't counted: "
            f"{'; '.join(self.examples)}{more}"
        ]


def last_of(window: Range) -> UUID:
    """Return the last id that a range can hold."""
    return UUID(int=(1 << 128) - 1 if window.end is None else window.end.int - 1)


def carried(
    raw: bytes, content_type: str, by: Sequence[Path], values: Sequence[Path | None]
) -> tuple[Key, list[Decimal]]:
    """Return key and numbers of one body, exactly as the database reads them; no path counts.

    Raises:
        InvalidMessage: it isn't JSON, lacks what a path names, or has something else there than is wanted.
    """
    paths = [*by, *(path for path in values if path is not None)]
    if paths and not codec.is_json(content_type):
        raise InvalidMessage(f"its content type is {content_type!r}, and only JSON can be read")
    body = codec.decode(raw, content_type, exact=True) if paths else None
    key = tuple(_key(body, path) for path in by)
    return key, [_ONE if path is None else _number(body, path) for path in values]


def _path(text: str) -> Path:
    return tuple(text.split("."))


def _at(body: Any, path: Path) -> Any:
    try:
        for step in path:
            body = _into(body, step)
    except (LookupError, ValueError):
        raise InvalidMessage(f"it has no {'.'.join(path)}") from None
    return body


def _into(body: Any, step: str) -> Any:
    if isinstance(body, list):
        return body[int(step)]
    if isinstance(body, dict):
        return body[step]
    raise KeyError(step)


def _key(body: Any, path: Path) -> str:
    value = _at(body, path)
    text = NULL if value is None else _text(value)
    if text is None or storable(text) != text:
        raise InvalidMessage(f"its {'.'.join(path)} is no text: {str(value)[:40]!r}")
    return text


def _number(body: Any, path: Path) -> Decimal:
    value = _at(body, path)
    text = None if isinstance(value, bool) else _text(value)
    if text is None or len(text) > store.NUMBER_CHARS or not re.fullmatch(store.NUMBER, text):
        raise InvalidMessage(f"its {'.'.join(path)} is no number: {str(value)[:40]!r}")
    return Decimal(text)


def _text(value: Any) -> str | None:
    """Return a value as ``#>>`` does; None for what has no such text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        if abs(value.adjusted()) > store.NUMBER_CHARS:
            return None
        return f"{value.copy_abs() if value.is_zero() else value:f}"
    return str(value) if isinstance(value, str | int) else None
