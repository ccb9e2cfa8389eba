"""The lists of scheduled messages (the next due first) and of recalled ones (the newest first)."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.admin.filters import check_filter
from outbox.admin.model import COUNT_LIMIT, Page, PageRequest, ScheduledFilter, ScheduledRow
from outbox.admin.paging import Counted, Found, Order, Position, merged
from outbox.store import find_scheduled as store
from outbox.store.execute import execute

if TYPE_CHECKING:
    from outbox.admin.databases import Databases

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
            window = store.RECALLED_WINDOW
            statement = store.list_recalled(schema, topic, after[0] if after else None, limit)
        else:
            window = store.WINDOW
            statement = store.list_scheduled(schema, topic, (after[0], after[1]) if after else None, limit)
        with producers[name].looking() as connection:
            counted.add(connection, store.count_scheduled(schema, COUNT_LIMIT + 1) if cheap else None)
            (rows,) = execute(connection, statement)
        time, half_id = rows[0][:2]
        end = (half_id,) if wanted.recalled else (time, half_id)
        found = [ScheduledRow(name, *row[2:]) for row in rows if row[2] is not None]
        return Found(found, window, end if half_id else None)

    return counted.on(merged(producers, page, wanted, order, look))
