"""Pages of lists, over one or several databases, by keyset: no row comes twice, and none is missed.

A token says where each database's list goes on. It is no secret and gives no right to anything: its checksum, which is
also over the filter, tells a token that was cut, changed, or made for another list.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from outbox.database.execute import Statement, execute
from outbox.errors import InvalidRequest
from outbox.operator.model import MAX_PAGE, Page, PageRequest, Total
from outbox.reader import Reader
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

#: Where a list goes on: the values that name its last row, each UUID, time, int or text.
Position = tuple[Any, ...]

_CHECKSUM = 9
_LONGEST = 16_384
_BIGGEST = 2**63


F = TypeVar("F")

_FILTERS = Reader("code", error=lambda message, field: InvalidRequest(message, field.partition("[")[0]))


def checked(criteria: F) -> F:
    """Return a filter whose fields have their types, bounds and words.

    Raises:
        InvalidRequest: one hasn't; its ``field`` is named.
    """
    _FILTERS.check(criteria)
    return criteria


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """What one database gives for a page: ``rows`` in the order of the list, those after a position.

    ``stopped`` is where the search stopped at its limit, None if it read all there is (or gave as many rows as fit);
    ``searched`` is how many it looked at.
    """

    rows: list[T]
    searched: int = 0
    stopped: Position | None = None


@dataclass(frozen=True, slots=True)
class SortOrder(Generic[T]):
    """How a list is sorted: by ``key``, ties by the database's name; ``position`` names a row within its database.

    ``shape`` are the types of a position's values: UUID, datetime, int or str. Without ``position``, the key is it.
    """

    key: Callable[[T], Position]
    shape: tuple[type, ...]
    position: Callable[[T], Position] | None = None
    newest_first: bool = True

    def position_of(self, row: T) -> Position:
        """Return the position after which the list goes on behind a row."""
        return (self.position or self.key)(row)


def read_token(token: str | None, context: object) -> dict[str, Any] | None:
    """Return what `write_token` put into a token for the same context; None for no token.

    Raises:
        InvalidRequest: it is no token, was changed or cut, or belongs to another context.
    """
    if not token:
        return None
    if len(token) > _LONGEST:
        raise _invalid()
    try:
        raw = base64.b64decode(token.encode("ascii") + b"=" * (-len(token) % 4), altchars=b"-_", validate=True)
        # The last character has bits that decoding drops: one token, one spelling.
        is_canonical = base64.urlsafe_b64encode(raw).rstrip(b"=") == token.encode("ascii")
        checksum, payload = raw[:_CHECKSUM], raw[_CHECKSUM:]
        if not is_canonical or checksum != _checksum(payload, context):
            raise _invalid()
        cursor = json.loads(payload)
    except (ValueError, RecursionError):
        raise _invalid() from None
    if not isinstance(cursor, dict):
        raise _invalid()
    return cursor


def write_token(cursor: Mapping[str, Any], context: object) -> str:
    """Return an opaque text, fit for a URL, which `read_token` reads for an equal context, such as a filter."""
    payload = _json(cursor)
    return base64.urlsafe_b64encode(_checksum(payload, context) + payload).rstrip(b"=").decode("ascii")


def size_of(page: PageRequest) -> int:
    """Return how many rows a page has at most.

    Raises:
        InvalidRequest: fewer than one.
    """
    if page.size < 1:
        raise InvalidRequest(f"page size {page.size} must be 1 to {MAX_PAGE}", field="page_size")
    return min(page.size, MAX_PAGE)


def merged(
    names: Iterable[str],
    page: PageRequest,
    context: object,
    order: SortOrder[T],
    read: Callable[[str, Position | None, int], Part[T]],
) -> Page[T]:
    """Return a page of a list that several databases have parts of.

    ``read(name, after, limit)`` gives the first ``limit`` rows of one database after a position (None: of its list).
    Each database goes on by itself: the rows of a page are in order, and so are the pages, unless a search stopped at
    its limit in one database and not in another.

    Raises:
        InvalidRequest: the token isn't one of this list, or a size that isn't one.
    """
    names, size = list(names), size_of(page)
    bound = (names, context)
    cursor = read_token(page.token, bound)
    after: dict[str, Position | None] = (
        dict.fromkeys(names) if cursor is None else {name: decode(cursor[name], order.shape) for name in cursor}
    )
    if not after.keys() <= set(names):
        raise _invalid()
    found = {name: read(name, position, size + 1) for name, position in after.items()}
    taken = _first(found, order, size)
    going_on = {}
    for name, part in found.items():
        count = sum(1 for owner, _ in taken if owner == name)
        if count < len(part.rows):
            going_on[name] = order.position_of(part.rows[count - 1]) if count else after[name]
        elif part.stopped is not None:
            going_on[name] = part.stopped
    short = len(taken) < size and bool(going_on)
    return Page(
        [row for _, row in taken],
        write_token({name: encode(position) for name, position in going_on.items()}, bound) if going_on else None,
        complete=not short,
        searched=sum(part.searched for part in found.values() if part.stopped) if short else None,
    )


class Counted(Generic[T]):
    """The total of a list, on its first page only: exact where that page is all there is, else where it is counted."""

    def __init__(self, page: PageRequest, limit: int) -> None:
        self._first_page = not page.token
        self._limit = limit
        self._total: int | None = 0

    def add(self, connection: Connection, statement: Statement | None) -> None:
        """Count what one database has, one more than the limit at most; None: that can't be counted cheaply."""
        if not self._first_page or self._total is None:
            return
        if statement is None:
            self._total = None
        else:
            (((count,),),) = execute(connection, statement)
            self._total += count

    def on(self, page: Page[T]) -> Page[T]:
        """Return the page with the total."""
        if not self._first_page:
            return page
        if page.next_page_token is None:
            return dataclasses.replace(page, total=Total(len(page.items)))
        if self._total is None:
            return page
        many = self._total > self._limit
        total = Total(self._limit, "gte") if many else Total(max(self._total, len(page.items)))
        return dataclasses.replace(page, total=total)


def _first(found: Mapping[str, Part[T]], order: SortOrder[T], size: int) -> list[tuple[str, T]]:
    """Return the first rows of all, each with its database's name. Of each database it takes the first ones."""
    lists = [[(name, row) for row in found[name].rows] for name in sorted(found)]
    rows = heapq.merge(*lists, key=lambda owned: order.key(owned[1]), reverse=order.newest_first)
    return [owned for owned, _ in zip(rows, range(size), strict=False)]


def encode(position: Position | None) -> list[Any] | None:
    """Return a position as what JSON can hold."""
    if position is None:
        return None
    return [value.isoformat() if isinstance(value, dt.datetime) else _plain(value) for value in position]


def decode(values: object, shape: Sequence[type]) -> Position | None:
    """Return the position that `encode` made JSON of.

    Raises:
        InvalidRequest: it isn't one of this shape.
    """
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(shape):
        raise _invalid()
    return tuple(_decoded(value, kind) for value, kind in zip(values, shape, strict=True))


def _decoded(value: object, kind: type) -> Any:
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool) and -_BIGGEST <= value < _BIGGEST:
            return value
        raise _invalid()
    if not isinstance(value, str) or storable(value) != value:
        raise _invalid()
    if kind is str:
        return value
    try:
        decoded = dt.datetime.fromisoformat(value) if kind is dt.datetime else UUID(value)
    except ValueError:
        raise _invalid() from None
    if isinstance(decoded, dt.datetime) and decoded.tzinfo is None:
        raise _invalid()
    return decoded


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | str) or value is None else str(value)


def _json(value: object) -> bytes:
    return json.dumps(value, default=_described, separators=(",", ":"), sort_keys=True).encode("ascii")


def _described(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            "": type(value).__name__,
            **{field.name: getattr(value, field.name) for field in dataclasses.fields(value)},
        }
    return str(value)


def _checksum(payload: bytes, context: object) -> bytes:
    return hashlib.blake2b(payload + b"\0" + _json(context), digest_size=_CHECKSUM).digest()


def _invalid() -> InvalidRequest:
    return InvalidRequest(
        "the page token isn't one of this list, or was changed on its way; begin again with the first page",
        field="page_token",
    )
