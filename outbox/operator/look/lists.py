"""The lists of messages, undecided halves, scheduled messages and audited acts, over all registered databases."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute, query
from outbox.errors import InvalidRequest
from outbox.operator.databases import OverDatabases
from outbox.operator.look import lists_sql
from outbox.operator.look.paging import Part, Position, SortOrder, checked, count_of, page_of
from outbox.operator.look.redact import has_at
from outbox.operator.model import (
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
        """

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[MessageRow]:
            return _messages(connection, database, criteria, after[0] if after else None, limit)

        producers = self.databases.having("producer", check_messages(criteria).database)
        return page_of(producers, criteria, page, _BY_ID, read)

    def halves(self, criteria: HalfFilter, page: PageRequest) -> Page[HalfRow]:
        """Return a page of the undecided halves that fit, the oldest first."""

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[HalfRow]:
            schema = database.schema
            (rows,) = execute(connection, lists_sql.list_halves(schema, criteria, after[0] if after else None, limit))
            count = count_of(schema, "half_check") if criteria == HalfFilter(database=criteria.database) else None
            return Part.of(rows, 1, lambda row: HalfRow(database.name, *row), lists_sql.HALF_WINDOW, count)

        return page_of(self.databases.having("producer", checked(criteria).database), criteria, page, _OLDEST, read)

    def scheduled(self, criteria: ScheduledFilter, page: PageRequest) -> Page[ScheduledRow]:
        """Return a page of the scheduled messages that fit, the next due first; of recalled ones, the newest first."""
        order, width, window = _DUE, 2, lists_sql.HALF_WINDOW
        if criteria.recalled:
            order, width, window = _RECALLED, 1, lists_sql.RECALLED_WINDOW

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[ScheduledRow]:
            schema, every = database.schema, criteria == ScheduledFilter(database=criteria.database)
            (rows,) = execute(connection, lists_sql.list_scheduled(schema, criteria, after, limit))
            count = count_of(schema, "scheduled_message", "recalled_at IS NULL") if every else None
            return Part.of(rows, width, lambda row: ScheduledRow(database.name, *row), window, count)

        return page_of(self.databases.having("producer", checked(criteria).database), criteria, page, order, read)

    def audit(self, criteria: AuditFilter, page: PageRequest) -> Page[AuditRow]:
        """Return a page of what operators did, the newest first.

        A target that is a message's id also finds what was done to it in the inboxes of groups. Acts on a target are
        found by index, all others within a window of each database (`lists_sql.AUDIT_WINDOW` acts).
        """

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[AuditRow]:
            schema, below = database.schema, after[0] if after else None
            targets = None if criteria.target is None else audit_targets(connection, database, criteria.target)
            (rows,) = execute(connection, lists_sql.list_audit(schema, criteria, targets, below, limit))
            count = count_of(schema, "audit") if criteria == AuditFilter(database=criteria.database) else None
            return Part.of(rows, 1, lambda row: audit_row(database.name, row), lists_sql.AUDIT_WINDOW, count)

        return page_of(self.databases.having(None, checked(criteria).database), criteria, page, _BY_TIME, read)


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
    stopped = (end,) if end and len(shown) < limit else None
    return Part(shown, searched, stopped, lists_sql.count_messages(schema, criteria))


def _finds_by_key(connection: Connection, schema: str, criteria: MessageFilter, after: UUID | None) -> bool:
    """Tell whether there is an index for the key, and not too many messages that have it."""
    if criteria.key is None:
        return False
    indexes = [columns or [] for (columns,) in query(connection, schema, lists_sql.KEY_INDEXES)]
    if not any(names[:1] == ["key"] or (names == ["topic", "key"] and criteria.topic) for names in indexes):
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
    groups = query(connection, database.schema, lists_sql.KNOWN_GROUPS)
    return [message_id, *(f"{group}/{message_id}" for (group,) in groups)]


def audit_row(database: str, row: Row) -> AuditRow:
    """Return a row of `lists_sql.list_audit` without its end as an `AuditRow`."""
    return AuditRow(database, *row[:-2], *(None if value is None else json.loads(value) for value in row[-2:]))
