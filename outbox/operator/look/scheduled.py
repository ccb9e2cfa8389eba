"""The list of undecided halves, the oldest first.

The lists of scheduled messages (the next due first) and of recalled ones (the newest first).
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import execute
from outbox.errors import InvalidRequest
from outbox.operator.look import scheduled_sql
from outbox.operator.look.messages import check_filter, check_words
from outbox.operator.look.paging import Counted, Found, Order, Position, merged
from outbox.operator.model import COUNT_LIMIT, HalfFilter, HalfRow, Page, PageRequest, ScheduledFilter, ScheduledRow
from outbox.operator.old_halves import HalfStatus
from outbox.operator.old_halves_sql import LISTED
from outbox.operator.old_halves_sql import HalfFilter as Wanted

if TYPE_CHECKING:
    from outbox.operator.databases import Databases

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
            counted.add(connection, scheduled_sql.count_halves(schema, COUNT_LIMIT + 1) if sought == Wanted() else None)
            (rows,) = execute(connection, scheduled_sql.list_halves(schema, sought, after[0] if after else None, limit))
        end = rows[0][0]
        found = [dict(zip(LISTED, row[1:], strict=True)) for row in rows if row[1] is not None]
        for half in found:
            del half["next_check_in"]
        return Found([HalfRow(name, **half) for half in found], scheduled_sql.WINDOW, (end,) if end else None)

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


_DUE: Order[ScheduledRow] = Order(
    key=lambda row: (row.deliver_at, row.id), shape=(dt.datetime, UUID), newest_first=False
)
_RECALLED: Order[ScheduledRow] = Order(key=lambda row: (row.id,), shape=(UUID,))


def list_scheduled(databases: Databases, wanted: ScheduledFilter, page: PageRequest) -> Page[ScheduledRow]:
    """Return a page of the scheduled messages that fit; or of the recalled ones, which are looked for in a window.

    Raises:
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: the filter names a database that isn't registered.
    """
    check_filter(wanted, texts=("topic",))
    producers = {database.name: database for database in databases.having("producer", wanted.database)}
    counted: Counted[ScheduledRow] = Counted(page, COUNT_LIMIT)
    order = _RECALLED if wanted.recalled else _DUE
    cheap = wanted.topic is None and not wanted.recalled

    def look(name: str, after: Position | None, limit: int) -> Found[ScheduledRow]:
        schema, topic = producers[name].schema, wanted.topic
        if wanted.recalled:
            window = scheduled_sql.RECALLED_WINDOW
            statement = scheduled_sql.list_recalled(schema, topic, after[0] if after else None, limit)
        else:
            window = scheduled_sql.WINDOW
            statement = scheduled_sql.list_scheduled(schema, topic, (after[0], after[1]) if after else None, limit)
        with producers[name].looking() as connection:
            counted.add(connection, scheduled_sql.count_scheduled(schema, COUNT_LIMIT + 1) if cheap else None)
            (rows,) = execute(connection, statement)
        time, half_id = rows[0][:2]
        end = (half_id,) if wanted.recalled else (time, half_id)
        found = [ScheduledRow(name, *row[2:]) for row in rows if row[2] is not None]
        return Found(found, window, end if half_id else None)

    return counted.on(merged(producers, page, wanted, order, look))
