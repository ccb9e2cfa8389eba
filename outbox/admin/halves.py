"""The list of undecided halves, the oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.admin.filters import check_filter, check_words
from outbox.admin.model import COUNT_LIMIT, HalfFilter, HalfRow, Page, PageRequest
from outbox.admin.paging import Counted, Found, Order, Position, merged
from outbox.errors import InvalidRequest
from outbox.halves import HalfStatus
from outbox.store import find_scheduled as store
from outbox.store.browse_halves import LISTED
from outbox.store.browse_halves import HalfFilter as Wanted
from outbox.store.execute import execute

if TYPE_CHECKING:
    from outbox.admin.databases import Databases

_ORDER: Order[HalfRow] = Order(key=lambda row: (row.id,), shape=(UUID,), newest_first=False)
_LONGEST_AGE = 100 * 366 * 86400.0


def list_halves(databases: Databases, wanted: HalfFilter, page: PageRequest) -> Page[HalfRow]:
    """Return a page of the undecided halves that fit.

    Raises:
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: the filter names a database that isn't registered.
    """
    sought = wanted_of(wanted)
    producers = {database.name: database for database in databases.having("producer", wanted.database)}
    counted: Counted[HalfRow] = Counted(page, COUNT_LIMIT)

    def look(name: str, after: Position | None, limit: int) -> Found[HalfRow]:
        schema = producers[name].schema
        with producers[name].looking() as connection:
            counted.add(connection, store.count_halves(schema, COUNT_LIMIT + 1) if sought == Wanted() else None)
            (rows,) = execute(connection, store.list_halves(schema, sought, after[0] if after else None, limit))
        end = rows[0][0]
        found = [dict(zip(LISTED, row[1:], strict=True)) for row in rows if row[1] is not None]
        for half in found:
            del half["next_check_in"]
        return Found([HalfRow(name, **half) for half in found], store.WINDOW, (end,) if end else None)

    return counted.on(merged(producers, page, wanted, _ORDER, look))


def wanted_of(wanted: HalfFilter) -> Wanted:
    """Return a filter as the store's statements take it.

    Raises:
        InvalidRequest: it isn't one.
    """
    check_filter(wanted, texts=("topic",))
    check_words([] if wanted.status is None else [wanted.status], HalfStatus, "status")
    if wanted.min_age is not None and not 0 <= wanted.min_age <= _LONGEST_AGE:
        raise InvalidRequest(f"min_age {wanted.min_age} must be seconds, under 100 years", field="min_age")
    return Wanted(wanted.topic, wanted.status, wanted.min_age)
