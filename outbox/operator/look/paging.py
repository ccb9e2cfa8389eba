"""Pages of lists, over one or several databases, by keyset: no row comes twice, and none is missed.

A token says where each database's list goes on. It is no secret and gives no right to anything: its checksum, which is
also over the filter, tells a token that was cut, changed, or made for another list.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from outbox.database.execute import Row, Statement, execute, statement
from outbox.errors import DatabaseUnreached, InvalidRequest, OutboxError
from outbox.operator.databases import is_away
from outbox.operator.model import COUNT_LIMIT, MAX_PAGE, NUMBERED_ROWS, Page, PageRequest, Total
from outbox.reader import FieldShape, Option, Reader, plain

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

T = TypeVar("T")
F = TypeVar("F")

#: Where a list goes on: the values that name its last row, each UUID, time, int or text.
Position = tuple[Any, ...]
#: The position after which a part of a list is read; None at its beginning.
After = Position | None

_CHECKSUM = 9
_LONGEST = 16_384
_FILTERS = Reader("code", error=lambda message, field: InvalidRequest(message, field.partition("[")[0]))


def checked(criteria: F) -> F:
    """Return a filter; raise InvalidRequest if a field hasn't its type, bounds or words, and name it."""
    _FILTERS.check(criteria)
    return criteria


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """What one database gives for a page: ``rows`` in the order of the list, those after a position.

    ``stopped`` is where the search stopped at its limit, None if it read all there is (or gave as many rows as fit);
    ``searched`` is how many it looked at. ``count`` is how many fit in all, or counts them, if that is cheap.
    ``unread`` says that the database can't be reached: the next page begins there where this one would have. ``rest``
    makes the part of the rows read, once the connection is given back.
    """

    rows: list[T]
    searched: int = 0
    stopped: Position | None = None
    count: Statement | int | None = None
    unread: bool = False
    rest: Callable[[], Part[T]] | None = None

    @classmethod
    def of(
        cls, rows: list[Row], width: int, make: Callable[[Row], T], searched: int, count: Statement | None = None
    ) -> Part[T]:
        """Return what rows say: where the search stopped (None: nowhere), in ``width`` columns, and then the row."""
        stopped = rows[0][:width] if rows and rows[0][width - 1] is not None else None
        return cls([make(row[width:]) for row in rows if row[width] is not None], searched, stopped, count)


@dataclass(frozen=True, slots=True)
class SortOrder(Generic[T]):
    """How a list is sorted: by ``key``, ties by the database's name; ``position`` names a row within its database.

    ``shape`` are the types of a position's values: UUID, datetime, int or str. Without ``position``, the key is it.
    """

    key: Callable[[T], Position]
    shape: tuple[type, ...]
    position: Callable[[T], Position] | None = None
    newest_first: bool = True


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
    """Return how many rows a page has at most; raise InvalidRequest if that is less than one."""
    if page.size < 1:
        raise InvalidRequest(f"page size {page.size} must be 1 to {MAX_PAGE}", field="page_size")
    return min(page.size, MAX_PAGE)


def merged(
    names: Iterable[str],
    page: PageRequest,
    context: object,
    order: SortOrder[T],
    read: Callable[[str, After, int], Part[T]],
) -> Page[T]:
    """Return a page of a list that several databases have parts of, each read by itself: see `merged_parts`.

    ``read(name, after, limit)`` gives the first ``limit`` rows of one database after a position (None: of its list).

    Raises:
        InvalidRequest: the token isn't one of this list, or a size that isn't one.
    """

    def read_each(after: Mapping[str, After], limit: int) -> dict[str, Part[T]]:
        return {name: read(name, position, limit) for name, position in after.items()}

    return merged_parts(names, page, context, order, read_each)


def merged_parts(
    names: Iterable[str],
    page: PageRequest,
    context: object,
    order: SortOrder[T],
    read: Callable[[Mapping[str, After], int], Mapping[str, Part[T]]],
) -> Page[T]:
    """Return a page of a list of several parts.

    ``read(after, limit)`` gives of each part the first ``limit`` rows after its position (None: of its list). Each part
    goes on by itself: the rows of a page are in order, and so are the pages, unless a search stopped at its limit in
    one part and not in another.

    Raises:
        InvalidRequest: the token isn't one of this list, or a size that isn't one.
    """
    names, size = list(names), size_of(page)
    bound = (names, context)
    cursor = read_token(page.token, bound)
    after: dict[str, After] = (
        dict.fromkeys(names) if cursor is None else {name: decode(cursor[name], order.shape) for name in cursor}
    )
    if not after.keys() <= set(names):
        raise _invalid()
    found = read(after, size + 1)
    # Each row with its database's name. Of each database it takes the first ones.
    owned = [[(name, row) for row in found[name].rows] for name in sorted(found)]
    ordered = heapq.merge(*owned, key=lambda pair: order.key(pair[1]), reverse=order.newest_first)
    taken = list(itertools.islice(ordered, size))
    going_on = {}
    for name, part in found.items():
        count = sum(1 for owner, _ in taken if owner == name)
        if count < len(part.rows):
            going_on[name] = (order.position or order.key)(part.rows[count - 1]) if count else after[name]
        elif part.unread:
            going_on[name] = after[name]
        elif part.stopped is not None:
            going_on[name] = part.stopped
    short = len(taken) < size and bool(going_on)
    return Page(
        [row for _, row in taken],
        write_token(going_on, bound) if going_on else None,
        complete=not short,
        searched=sum(part.searched for part in found.values() if part.stopped) if short else None,
        unreached=[name for name, part in found.items() if part.unread],
    )


def page_of(
    databases: Databases,
    part: str | None,
    criteria: Any,
    page: PageRequest,
    order: SortOrder[T],
    read: Callable[[Connection, Database, After, int], Part[T]],
    context: object = None,
) -> Page[T]:
    """Return a page of what fits a filter in the databases that have a part; ``read`` is as `merged` has it.

    A ``database`` in the filter limits it to one. ``context`` is that of the tokens, if it isn't the filter. The total
    comes with the first page only: exact where that page is all there is, else where it can be counted. Databases that
    can't be reached are named in the page; if none of those that the page is about can be, the error is raised.
    """
    only = getattr(criteria, "database", None)
    by_name = {database.name: database for database in databases.having(part, only)}
    counts: list[int | None] = []
    read_through: list[str] = []
    errors: list[Exception] = []

    def read_one(name: str, after: After, limit: int) -> Part[T]:
        try:
            with by_name[name].read_only() as connection:
                found = read(connection, by_name[name], after, limit)
                if not page.token:
                    count = found.count
                    counts.append(execute(connection, count)[0][0][0] if isinstance(count, Statement) else count)
            found = found.rest() if found.rest else found
        except (SQLAlchemyError, OutboxError) as error:
            if not is_away(error):
                raise
            errors.append(error)
            return Part([], unread=True)
        read_through.append(name)
        return found

    if page.number != 1:
        return numbered(page, lambda each: page_of(databases, part, criteria, each, order, read, context))
    found = merged(by_name, page, context or criteria, order, read_one)
    if errors and not read_through:
        raise errors[0]
    found.unreached.extend(databases.away_for(only))
    # Unseen rows can't be counted.
    total = None if page.token or found.unreached else _total(found, counts)
    return dataclasses.replace(found, total=total)


def listed(
    rows: Iterable[T], page: PageRequest, key: Callable[[T], tuple[object, ...]], unreached: Collection[str] = ()
) -> Page[T]:
    """Return a page of rows that are all there, in the order of the texts of ``key``; ``unreached`` as in `Page`."""
    if page.number != 1:
        return numbered(page, lambda each: listed(rows, each, key, unreached))
    found: list[tuple[Position, T]] = []
    for row in sorted(rows, key=lambda row: tuple(map(str, key(row)))):
        texts = tuple(map(str, key(row)))
        # Of rows with one key, each has its number.
        found.append(((*texts, found[-1][0][-1] + 1 if found and found[-1][0][:-1] == texts else 0), row))
    width = len(found[0][0]) if found else 1
    order: SortOrder[tuple[Position, T]] = SortOrder(
        key=lambda pair: pair[0], shape=(*[str] * (width - 1), int), newest_first=False
    )

    def read(_: str, after: After, limit: int) -> Part[tuple[Position, T]]:
        begin = 0 if after is None else bisect.bisect_right(found, after, key=order.key)
        return Part(found[begin : begin + limit])

    part = merged([""], page, "listed", order, read)
    total = None if unreached else Total(len(found))
    return Page([row for _, row in part.items], part.next_page_token, total, not unreached, unreached=list(unreached))


#: So many numbers of pages are offered on either side of the page that is shown.
_NEAR = 2


def numbers_near(number: int, size: int, total: Total | None) -> list[int | None]:
    """Return which numbers of pages are offered: the first, those around a page, and the last; None for a gap."""
    rows = min(total.value, NUMBERED_ROWS) if total else 0
    last = min(-(-rows // size), max(NUMBERED_ROWS // size, 1))
    if last < 2:
        return []
    near = [each for each in range(1, last + 1) if each in {1, last} or abs(each - number) <= _NEAR]
    found: list[int | None] = []
    for before, each in itertools.pairwise([0, *near]):
        found += [None, each] if each > before + 1 else [each]
    return found


def numbered(page: PageRequest, fetch: Callable[[PageRequest], Page[T]]) -> Page[T]:
    """Return the page of a number, which ``fetch`` comes to by the tokens of those before it.

    It is empty where the list ends before it; and where the search stopped, or a database can't be read, it says so.

    Raises:
        InvalidRequest: there is a token, too, or the number is less than 1, or beyond the rows that have numbers.
    """
    if page.token:
        raise InvalidRequest("give the number of a page or a page token, not both", "page")
    size = size_of(page)
    last = max(NUMBERED_ROWS // size, 1)
    if not 1 <= page.number <= last:
        raise InvalidRequest(
            f"page = {page.number} must be 1 to {last}, the first {NUMBERED_ROWS:,} rows; set a filter, or go on by "
            "tokens",
            "page",
        )
    left, total, token = (page.number - 1) * size, None, None
    while left:
        before = fetch(PageRequest(min(left, MAX_PAGE), token))
        total, token, left = total or before.total, before.next_page_token, left - len(before.items)
        if token is None or not before.complete or before.unreached:
            return dataclasses.replace(before, items=[], total=total)
    return dataclasses.replace(fetch(PageRequest(page.size, token)), total=total)


def every(fetch: Callable[[PageRequest], Page[T]], limit: int | None = None) -> Iterator[T]:
    """Yield the rows of all pages that ``fetch`` returns, the first ``limit`` of them if given; as `every_page`."""
    return itertools.chain.from_iterable(every_page(fetch, limit))


def every_page(fetch: Callable[[PageRequest], Page[T]], limit: int | None = None) -> Iterator[list[T]]:
    """Yield what each page has that ``fetch`` returns, which may be nothing; ``limit`` rows in all if given.

    Raises:
        DatabaseUnreached: a database can't be read, so that the rows aren't all there are.
    """
    token, left = None, limit
    while left is None or left > 0:
        page = fetch(PageRequest(MAX_PAGE if left is None else min(MAX_PAGE, left), token))
        if page.unreached:
            raise DatabaseUnreached(page.unreached)
        yield page.items
        left = None if left is None else left - len(page.items)
        token = page.next_page_token
        if token is None:
            return


def _total(page: Page[T], counts: list[int | None]) -> Total | None:
    if page.next_page_token is None:
        return Total(len(page.items))
    if None in counts:
        return None
    total = sum(filter(None, counts))
    return Total(COUNT_LIMIT, "gte") if total > COUNT_LIMIT else Total(max(total, len(page.items)))


def count_of(schema: str, table: str, condition: str = "true", most: int | None = None, **values: Any) -> Statement:
    """Count the rows ``m`` of a table that fit, one more than `COUNT_LIMIT` at most. Rows: ``(rows,)``."""
    sql = "SELECT count(*) FROM (SELECT FROM {s}.{table} m WHERE {condition} LIMIT %(most)s) c"
    most = COUNT_LIMIT + 1 if most is None else most
    return statement(schema, sql, {**values, "most": most}, table=table, condition=condition)


def first_line(column: str) -> str:
    """Return the SQL of the first line of an error, of 1,000 characters at most; three dots tell that it was cut.

    Not an ellipsis as `outbox.text.cut` has it: a database or a client with another encoding than UTF-8 may lack it.
    """
    line = f"split_part({column}, E'\\n', 1)"
    return f"CASE WHEN length({line}) > 1000 THEN left({line}, 997) || '...' ELSE {line} END"


def fitting(criteria: object, conditions: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the conditions of the fields that are given, as one, and their values by the names of the fields."""
    values = {name: value for name in conditions if (value := getattr(criteria, name)) not in {None, ()}}
    return " AND ".join(conditions[name] for name in values) or "true", values


def decode(values: object, shape: Sequence[type]) -> Position | None:
    """Return the position of which `plain` made a list; raise InvalidRequest if it isn't one of this shape."""
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(shape):
        raise _invalid()
    fields = (FieldShape("", kind, kind, many=False, optional=False, default=None, option=_BIGINT) for kind in shape)
    return tuple(_POSITIONS.value(field, value, "") for field, value in zip(fields, values, strict=True))


def _json(value: object) -> bytes:
    return json.dumps(plain(value), separators=(",", ":"), sort_keys=True).encode("ascii")


def _checksum(payload: bytes, context: object) -> bytes:
    return hashlib.blake2b(payload + b"\0" + _json(context), digest_size=_CHECKSUM).digest()


def _invalid(*_: str) -> InvalidRequest:
    return InvalidRequest(
        "the page token isn't one of this list, or was changed on its way; begin again with the first page",
        field="page_token",
    )


_POSITIONS = Reader("data", error=_invalid)
_BIGINT = Option(least=-(2**63), most=2**63 - 1)
