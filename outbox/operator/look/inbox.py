"""The list of inbox rows, and dead letters in groups: those of one group and topic with one kind of error."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import InvalidRequest
from outbox.message.model import Status
from outbox.operator.databases import OverDatabases
from outbox.operator.look import inbox_sql
from outbox.operator.look.inbox_sql import InboxQuery, Source
from outbox.operator.look.paging import Part, Position, SortOrder, checked, page_of
from outbox.operator.model import COUNT_LIMIT, DeadGroup, InboxFilter, InboxRow, Page, PageRequest, Total

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database

_MOST = inbox_sql.MOST
_LETTERS = 16
_BY_ID: SortOrder[InboxRow] = SortOrder(key=lambda row: (row.message_id, row.group), shape=(UUID, str))


def fingerprint_of(*kind: str) -> str:
    """Return a short name for the database, group, topic and kind of error of dead letters."""
    return hashlib.sha256("\0".join(kind).encode()).hexdigest()[:_LETTERS]


class InboxLists(OverDatabases):
    """What an operator sees of the inboxes."""

    def inbox(self, criteria: InboxFilter, page: PageRequest) -> Page[InboxRow]:
        """Return a page of the inbox rows that fit, the newest id first, over all groups.

        What is parked or failed is found by index, everything else within a window of each database
        (`inbox_sql.WINDOW` rows; fewer where errors are searched).
        """

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[InboxRow]:
            if (query := query_in(connection, database, criteria)) is None:
                return Part([], count=0)
            return _rows(connection, database, query, (after[0], after[1]) if after else None, limit)

        return page_of(self.databases.having("consumer", checked(criteria).database), criteria, page, _BY_ID, read)

    def dead_groups(
        self, *, database: str | None = None, group: str | None = None, topic: str | None = None, limit: int = 200
    ) -> list[DeadGroup]:
        """Return the dead letters by group, topic and kind of error, the biggest group first, ``limit`` groups at most.

        Counts stop at 10,000, sooner where there are many kinds. Times are those of the oldest and newest messages.

        Raises:
            InvalidRequest: a limit below 1 or over 1,000, or a name that isn't one.
            UnknownDatabase: no database of this name is registered.
        """
        if not 1 <= limit <= _MOST:
            raise InvalidRequest(f"limit {limit} must be 1 to {_MOST}", field="limit")
        criteria = checked(InboxFilter(database=database, group=group, topic=topic))
        consumers = self.databases.having("consumer", database)
        found = [dead for each in consumers for dead in _dead_groups(each, criteria, limit)]
        found.sort(key=lambda dead: (-dead.count.value, dead.database, dead.group, dead.topic, dead.error_kind))
        return found[:limit]


def _dead_groups(database: Database, criteria: InboxFilter, limit: int) -> list[DeadGroup]:
    schema = database.schema
    with database.reading() as connection:
        (counts,) = execute(connection, inbox_sql.counts(schema, criteria.group, criteria.topic, limit, COUNT_LIMIT))
        if not counts:
            return []
        columns = ([row[column] for row in counts] for column in range(3))
        (rows,) = execute(connection, inbox_sql.details(schema, *columns))
    return [_dead_group(database.name, counts[row[0] - 1], row) for row in rows]


def _dead_group(database: str, counted: Row, detail: Row) -> DeadGroup:
    group, topic, kind, value, most = counted
    _, first_at, last_at, *sample = detail
    fingerprint, count = fingerprint_of(database, group, topic, kind), Total(value, "gte" if value >= most else "eq")
    return DeadGroup(fingerprint, database, group, topic, kind, count, first_at, last_at, InboxRow(database, *sample))


def query_in(connection: Connection, database: Database, criteria: InboxFilter) -> InboxQuery | None:
    """Return what a (checked) filter asks of one database; None if nothing in it can fit.

    The fingerprint becomes the group, topic and kind of error that it stands for; ``discarded`` asks for what is
    parked.
    """
    query = InboxQuery(**asdict(criteria))
    statuses = set(query.status)
    if query.discarded or query.fingerprint is not None:
        if statuses and Status.PARKED not in statuses:
            return None
        statuses = {Status.PARKED}
    if query.fingerprint is not None:
        (kinds,) = execute(connection, inbox_sql.kinds(database.schema))
        found = (kind for kind in kinds if fingerprint_of(database.name, *kind) == query.fingerprint)
        group, topic, kind = next(found, (None, None, None))
        if group is None or query.group not in {None, group} or query.topic not in {None, topic}:
            return None
        query = replace(query, group=group, topic=topic, error_kind=kind)
    return replace(query, status=tuple(sorted(statuses)), error=query.error or None)


def _rows(
    connection: Connection, database: Database, query: InboxQuery, after: tuple[UUID, str] | None, limit: int
) -> Part[InboxRow]:
    """Search by each source, and put together what is above the position at which one of them stopped."""
    schema, rows, stops = database.schema, [], []
    for part, source in _sources(connection, schema, query):
        if query.message_id is not None:
            statement = inbox_sql.rows_of(schema, part, query.message_id, after, limit, inbox_sql.SHORT_ROW)
        else:
            statement = inbox_sql.list_inbox(schema, part, source, after, limit)
        (found,) = execute(connection, statement)
        rows += [InboxRow(database.name, *row[2:]) for row in found if row[2] is not None]
        stops += [(row[0], row[1]) for row in found[:1] if row[0] is not None]
    stop = max(stops, default=None)
    rows.sort(key=_BY_ID.key, reverse=True)
    shown = [row for row in rows if stop is None or _BY_ID.key(row) >= stop][:limit]
    searched = inbox_sql.window_of(query) if stop else len(shown)
    return Part(shown, searched, stop if len(shown) < limit else None, inbox_sql.count(schema, query))


def _sources(connection: Connection, schema: str, query: InboxQuery) -> list[tuple[InboxQuery, Source]]:
    """Return by which indexes the rows are found; each with the statuses that it finds."""
    few: Source | None = "discarded" if query.discarded else None if query.error is None else "parked_few"
    by_status: dict[Status, tuple[Source | None, Source]] = {
        Status.PARKED: (few, "parked"),
        Status.FAILED: ("failed", "all"),
        Status.QUARANTINED: (None, "all"),
    }
    statuses = set(query.status)
    if query.message_id is not None or not statuses or statuses - by_status.keys():
        return [(query, "all")]
    return [
        (replace(query, status=(status,)), few if few and _are_few(connection, schema, query, few) else many)
        for status, (few, many) in by_status.items()
        if status in statuses
    ]


def _are_few(connection: Connection, schema: str, query: InboxQuery, source: Source) -> bool:
    most = inbox_sql.FEW_ROWS if query.error is None else inbox_sql.ERROR_WINDOW
    (((count,),),) = execute(connection, inbox_sql.count_few(schema, query, source, most + 1))
    return bool(count <= most)
