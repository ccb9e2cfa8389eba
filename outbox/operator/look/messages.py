"""The list of the producers' messages: the newest first, by many conditions, within a window at a time.

What every filter is checked for before the database sees it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import execute
from outbox.errors import InvalidRequest
from outbox.operator.look import messages_sql
from outbox.operator.look.messages_sql import Wanted
from outbox.operator.look.paging import Counted, Found, Order, Position, merged
from outbox.operator.look.redact import has_at
from outbox.operator.model import COUNT_LIMIT, MessageFilter, MessageRow, Page, PageRequest
from outbox.operator.old_messages import MessageStatus
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Databases

_LONGEST = 1_000


def check_filter(wanted: object, *, texts: Iterable[str] = (), times: Iterable[str] = ()) -> None:
    """See that these fields of a filter hold texts that the database takes, and times with a zone; None is neither.

    Raises:
        InvalidRequest: one doesn't; its ``field`` is named.
    """
    for name in texts:
        check_text(getattr(wanted, name), name)
    for name in times:
        moment = getattr(wanted, name)
        if moment is not None and (not isinstance(moment, dt.datetime) or moment.utcoffset() is None):
            raise InvalidRequest(f"{name} {moment} has no time zone; add one, such as Z", field=name)


def check_text(value: str | None, name: str) -> None:
    """See that a text is one that the database takes.

    Raises:
        InvalidRequest: it has a NUL or half a surrogate pair in it, or is longer than anything it could equal.
    """
    if value is None:
        return
    if len(value) > _LONGEST:
        raise InvalidRequest(f"{name} has {len(value)} characters; at most {_LONGEST} are looked for", field=name)
    if storable(value) != value:
        raise InvalidRequest(f"{name} {storable(value)!r} has a character that is in no stored text", field=name)


def check_words(values: Iterable[str], allowed: Iterable[str], name: str) -> None:
    """See that all values are among those allowed.

    Raises:
        InvalidRequest: one isn't.
    """
    known = [str(word) for word in allowed]
    for value in values:
        if value not in known:
            raise InvalidRequest(f"{name} {value[:40]!r} is unknown; there are: {', '.join(known)}", field=name)


_ORDER: Order[MessageRow] = Order(key=lambda row: (row.id,), shape=(UUID,))
_COLUMNS = 9
_DEEPEST = 32


def list_messages(databases: Databases, wanted: MessageFilter, page: PageRequest) -> Page[MessageRow]:
    """Return a page of the messages that fit.

    A page looks at a window of each database (`messages_sql.WINDOW` messages) at most, unless an index finds what
    is wanted: undecided and scheduled messages, and a key where there is an index on ``half_message (key)`` or
    ``(topic, key)``. Bodies are compared here, `messages_sql.BODIES` of them at a time.

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
            counted.add(connection, messages_sql.count(database.schema, sought, COUNT_LIMIT + 1))
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
    many = messages_sql.BODIES if sought.json_body else limit
    (rows,) = execute(connection, messages_sql.list_messages(schema, sought, after, many, by_key=by_key))
    end, count, *_ = rows[0]
    found = [row[2:] for row in rows if row[2] is not None]
    searched = messages_sql.window_of(sought) if end else len(found)
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
    (indexes,) = execute(connection, messages_sql.key_indexes(schema))
    if not messages_sql.has_key_index([columns for (columns,) in indexes], sought.topic):
        return False
    (((count,),),) = execute(connection, messages_sql.count_of_key(schema, sought, after, messages_sql.OF_KEY + 1))
    return bool(count <= messages_sql.OF_KEY)
