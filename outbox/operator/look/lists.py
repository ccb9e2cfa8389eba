"""The lists of messages, undecided halves, scheduled messages and audited acts, over all registered databases."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import InvalidRequest
from outbox.operator.databases import OverDatabases
from outbox.operator.look import lists_sql
from outbox.operator.look.paging import Counted, Part, Position, SortOrder, checked, merged
from outbox.operator.look.redact import has_at
from outbox.operator.model import (
    COUNT_LIMIT,
    LONGEST,
    AuditFilter,
    AuditRow,
    HalfFilter,
    HalfRow,
    MessageFilter,
    MessageRow,
    Page,
    PageRequest,
    ScheduledFilter,
    ScheduledRow,
)
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database

_BY_ID: SortOrder[MessageRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
_OLDEST: SortOrder[HalfRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,), newest_first=False)
_DUE: SortOrder[ScheduledRow] = SortOrder(
    key=lambda row: (row.deliver_at, row.id), shape=(dt.datetime, UUID), newest_first=False
)
_RECALLED: SortOrder[ScheduledRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
# Within a database, ids are given in the order of time, but for acts at the same moment.
_BY_TIME: SortOrder[AuditRow] = SortOrder(key=lambda row: (row.acted_at,), shape=(int,), position=lambda row: (row.id,))

_COLUMNS = 9
_DEEPEST = 32


class Lists(OverDatabases):
    """What an operator sees in lists."""

    def messages(self, criteria: MessageFilter, page: PageRequest) -> Page[MessageRow]:
        """Return a page of the producers' messages that fit, the newest first.

        A page looks at a window of each database (`lists_sql.WINDOW` messages) at most, unless an index finds what
        fits: undecided and scheduled messages, and a key where there is an index on ``half_message (key)`` or
        ``(topic, key)``. Bodies are compared here, `lists_sql.BODIES` of them at a time.

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        criteria = check_messages(criteria)
        producers = {database.name: database for database in self.databases.having("producer", criteria.database)}
        counted: Counted[MessageRow] = Counted(page, COUNT_LIMIT)

        def read(name: str, after: Position | None, limit: int) -> Part[MessageRow]:
            with producers[name].reading() as connection:
                schema = producers[name].schema
                counted.add(connection, lists_sql.count_messages(schema, criteria, COUNT_LIMIT + 1))
                return _messages(connection, producers[name], criteria, after[0] if after else None, limit)

        return counted.on(merged(producers, page, criteria, _BY_ID, read))

    def halves(self, criteria: HalfFilter, page: PageRequest) -> Page[HalfRow]:
        """Return a page of the undecided halves that fit, the oldest first.

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        criteria = checked(criteria)
        producers = {database.name: database for database in self.databases.having("producer", criteria.database)}
        counted: Counted[HalfRow] = Counted(page, COUNT_LIMIT)
        every = criteria == HalfFilter(database=criteria.database)

        def read(name: str, after: Position | None, limit: int) -> Part[HalfRow]:
            schema = producers[name].schema
            with producers[name].reading() as connection:
                counted.add(connection, lists_sql.count_halves(schema, COUNT_LIMIT + 1) if every else None)
                statement = lists_sql.list_halves(schema, criteria, after[0] if after else None, limit)
                (rows,) = execute(connection, statement)
            end = rows[0][0]
            found = [HalfRow(name, *row[1:]) for row in rows if row[1] is not None]
            return Part(found, lists_sql.HALF_WINDOW, (end,) if end else None)

        return counted.on(merged(producers, page, criteria, _OLDEST, read))

    def scheduled(self, criteria: ScheduledFilter, page: PageRequest) -> Page[ScheduledRow]:
        """Return a page of the scheduled messages that fit, the next due first; of recalled ones, the newest first.

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        criteria = checked(criteria)
        producers = {database.name: database for database in self.databases.having("producer", criteria.database)}
        counted: Counted[ScheduledRow] = Counted(page, COUNT_LIMIT)
        every = criteria == ScheduledFilter(database=criteria.database)

        def read(name: str, after: Position | None, limit: int) -> Part[ScheduledRow]:
            schema = producers[name].schema
            with producers[name].reading() as connection:
                counted.add(connection, lists_sql.count_scheduled(schema, COUNT_LIMIT + 1) if every else None)
                (rows,) = execute(connection, lists_sql.list_scheduled(schema, criteria, after, limit))
            time, half_id = rows[0][:2]
            end = (half_id,) if criteria.recalled else (time, half_id)
            found = [ScheduledRow(name, *row[2:]) for row in rows if row[2] is not None]
            window = lists_sql.RECALLED_WINDOW if criteria.recalled else lists_sql.HALF_WINDOW
            return Part(found, window, end if half_id else None)

        return counted.on(merged(producers, page, criteria, _RECALLED if criteria.recalled else _DUE, read))

    def audit(self, criteria: AuditFilter, page: PageRequest) -> Page[AuditRow]:
        """Return a page of what operators did, the newest first.

        A target that is a message's id also finds what was done to it in the inboxes of groups. Acts on a target are
        found by index, all others within a window of each database (`lists_sql.AUDIT_WINDOW` acts).

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        criteria = checked(criteria)
        name = criteria.database
        chosen = list(self.databases.values()) if name is None else [self.databases[name]]
        by_name = {database.name: database for database in chosen}
        counted: Counted[AuditRow] = Counted(page, COUNT_LIMIT)
        every = criteria == AuditFilter(database=name)

        def read(name: str, after: Position | None, limit: int) -> Part[AuditRow]:
            database = by_name[name]
            with database.reading() as connection:
                counted.add(connection, lists_sql.count_audit(database.schema, COUNT_LIMIT + 1) if every else None)
                targets = None if criteria.target is None else audit_targets(connection, database, criteria.target)
                below = after[0] if after else None
                (rows,) = execute(connection, lists_sql.list_audit(database.schema, criteria, targets, below, limit))
            end = rows[0][0] if rows else None
            return Part(to_audit_rows(name, rows), lists_sql.AUDIT_WINDOW, (end,) if end else None)

        return counted.on(merged(by_name, page, criteria, _BY_TIME, read))


def check_messages(criteria: MessageFilter) -> MessageFilter:
    """Return a filter of messages, checked.

    Raises:
        InvalidRequest: it isn't one.
    """
    criteria = checked(criteria)
    for name, pair in (("header", criteria.header), ("body", criteria.body)):
        if any(storable(text) != text or len(text) > LONGEST for text in pair or ()):
            raise InvalidRequest(f"{name} has more than {LONGEST} characters, or one that no stored text has", name)
    if criteria.body is not None and not 0 < len(criteria.body[0].split(".")) <= _DEEPEST:
        raise InvalidRequest(f"body path {criteria.body[0]!r} has more than {_DEEPEST} names", field="body")
    return criteria


def _messages(
    connection: Connection, database: Database, criteria: MessageFilter, after: UUID | None, limit: int
) -> Part[MessageRow]:
    schema = database.schema
    by_key = _finds_by_key(connection, schema, criteria, after)
    many = limit if criteria.body is None else lists_sql.BODIES
    (rows,) = execute(connection, lists_sql.list_messages(schema, criteria, after, many, by_key=by_key))
    end, count, *_ = rows[0]
    found = [row[2:] for row in rows if row[2] is not None]
    searched = lists_sql.window_of(criteria) if end else len(found)
    if criteria.body is not None:
        if count == many or len(found) < count:
            end = found[-1][0]
            searched = len(found)
        found = [row for row in found if has_at(row[_COLUMNS], *criteria.body)]
    shown = [MessageRow(database.name, *row[:_COLUMNS]) for row in found[:limit]]
    return Part(shown, searched, (end,) if end and len(shown) < limit else None)


def _finds_by_key(connection: Connection, schema: str, criteria: MessageFilter, after: UUID | None) -> bool:
    """Tell whether there is an index for the key, and not too many messages that have it."""
    if criteria.key is None:
        return False
    (indexes,) = execute(connection, lists_sql.key_indexes(schema))
    if not lists_sql.has_key_index([columns for (columns,) in indexes], criteria.topic):
        return False
    (((count,),),) = execute(connection, lists_sql.count_of_key(schema, criteria, after, lists_sql.OF_KEY + 1))
    return bool(count <= lists_sql.OF_KEY)


def audit_targets(connection: Connection, database: Database, target: str) -> list[str]:
    """Return under which targets a database records the acts on one: of a message also ``<group>/<id>``."""
    try:
        message_id = str(UUID(target))
    except ValueError:
        return [target]
    if "consumer" not in database.parts:
        return [message_id]
    (groups,) = execute(connection, lists_sql.known_groups(database.schema))
    return [message_id, *(f"{group}/{message_id}" for (group,) in groups)]


def to_audit_rows(database: str, rows: list[Row]) -> list[AuditRow]:
    """Return the rows of `lists_sql.list_audit` as `AuditRow`s."""
    return [
        AuditRow(database, *row[1:-2], *(None if value is None else json.loads(value) for value in row[-2:]))
        for row in rows
        if row[1] is not None
    ]
