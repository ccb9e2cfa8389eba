"""The list of the producers' messages: the newest first, by many conditions, within a window at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.admin.filters import check_filter, check_text, check_words
from outbox.admin.json_text import has_at
from outbox.admin.model import COUNT_LIMIT, MessageFilter, MessageRow, Page, PageRequest
from outbox.admin.paging import Counted, Found, Order, Position, merged
from outbox.errors import InvalidRequest
from outbox.messages import MessageStatus
from outbox.store import find
from outbox.store.execute import execute
from outbox.store.find import Wanted

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.admin.databases import Databases

_ORDER: Order[MessageRow] = Order(key=lambda row: (row.id,), shape=(UUID,))
_COLUMNS = 9
_DEEPEST = 32


def list_messages(databases: Databases, wanted: MessageFilter, page: PageRequest) -> Page[MessageRow]:
    """Return a page of the messages that fit.

    A page looks at a window of each database (`outbox.store.find.WINDOW` messages) at most, unless an index finds what
    is wanted: undecided and scheduled messages, and a key where there is an index on ``half_message (key)`` or
    ``(topic, key)``. Bodies are compared here, `outbox.store.find.BODIES` of them at a time.

    Raises:
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: the filter names a database that isn't registered.
    """
    sought = wanted_of(wanted)
    producers = {database.name: database for database in databases.having("producer", wanted.database)}
    counted: Counted[MessageRow] = Counted(page, COUNT_LIMIT)

    def look(name: str, after: Position | None, limit: int) -> Found[MessageRow]:
        database = producers[name]
        with database.looking() as connection:
            counted.add(connection, find.count(database.schema, sought, COUNT_LIMIT + 1))
            return _look(connection, database.name, database.schema, wanted, after[0] if after else None, limit)

    return counted.on(merged(producers, page, wanted, _ORDER, look))


def wanted_of(wanted: MessageFilter) -> Wanted:
    """Return a filter as the store's statements take it, all but what is said about a value in the body.

    Raises:
        InvalidRequest: it isn't one.
    """
    check_words(wanted.statuses, MessageStatus, "statuses")
    check_filter(wanted, texts=("topic", "key", "tag", "producer_group"), times=("since", "until"))
    for name, pair in (("header", wanted.header), ("body", wanted.body)):
        for text in pair or ():
            check_text(text, name)
    if wanted.body is not None and not 0 < len(wanted.body[0].split(".")) <= _DEEPEST:
        raise InvalidRequest(f"body path {wanted.body[0]!r} has more than {_DEEPEST} names", field="body")
    return Wanted(
        statuses=wanted.statuses,
        topic=wanted.topic,
        key=wanted.key,
        tag=wanted.tag,
        producer_group=wanted.producer_group,
        since=wanted.since,
        until=wanted.until,
        header=wanted.header,
        json_body=wanted.body is not None,
    )


def _look(
    connection: Connection, database: str, schema: str, wanted: MessageFilter, after: UUID | None, limit: int
) -> Found[MessageRow]:
    sought = wanted_of(wanted)
    by_key = _finds_by_key(connection, schema, sought, after)
    many = find.BODIES if sought.json_body else limit
    (rows,) = execute(connection, find.list_messages(schema, sought, after, many, by_key=by_key))
    end, count, *_ = rows[0]
    found = [row[2:] for row in rows if row[2] is not None]
    searched = find.window_of(sought) if end else len(found)
    if wanted.body is not None:
        if count == many or len(found) < count:
            end = found[-1][0]
            searched = len(found)
        found = [row for row in found if has_at(row[_COLUMNS], *wanted.body)]
    shown = [MessageRow(database, *row[:_COLUMNS]) for row in found[:limit]]
    return Found(shown, searched, (end,) if end and len(shown) < limit else None)


def _finds_by_key(connection: Connection, schema: str, sought: Wanted, after: UUID | None) -> bool:
    """Tell whether there is an index for the key, and not too many messages that have it."""
    if sought.key is None:
        return False
    (indexes,) = execute(connection, find.key_indexes(schema))
    if not find.has_key_index([columns for (columns,) in indexes], sought.topic):
        return False
    (((count,),),) = execute(connection, find.count_of_key(schema, sought, after, find.OF_KEY + 1))
    return bool(count <= find.OF_KEY)
