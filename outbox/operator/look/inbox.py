"""The list of inbox rows, and dead letters in groups: those of one group and topic with one kind of error."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import InvalidRequest
from outbox.message.model import Status
from outbox.operator.databases import OverDatabases
from outbox.operator.look import inbox_sql
from outbox.operator.look.inbox_sql import InboxQuery, Source
from outbox.operator.look.paging import Counted, Part, Position, SortOrder, checked, merged
from outbox.operator.model import COUNT_LIMIT, DeadGroup, InboxFilter, InboxRow, Page, PageRequest, Total

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database

_MOST = inbox_sql.MOST
_LETTERS = 16
_BY_ID: SortOrder[InboxRow] = SortOrder(key=lambda row: (row.message_id, row.group), shape=(UUID, str))
_RARE = {Status.PARKED, Status.FAILED}


@dataclass(frozen=True, slots=True)
class DeadKind:
    """What the dead letters of one `DeadGroup` have in common."""

    database: str
    group: str
    topic: str
    error_kind: str

    @property
    def fingerprint(self) -> str:
        """A short name for it, which stays the same as long as dead letters of this kind come."""
        text = "\0".join((self.database, self.group, self.topic, self.error_kind))
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]


class InboxLists(OverDatabases):
    """What an operator sees of the inboxes."""

    def inbox(self, criteria: InboxFilter, page: PageRequest) -> Page[InboxRow]:
        """Return a page of the inbox rows that fit, the newest id first, over all groups.

        What is parked or failed is found by index, everything else within a window of each database
        (`inbox_sql.WINDOW` rows; fewer where errors are searched).

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        criteria = checked(criteria)
        consumers = {database.name: database for database in self.databases.having("consumer", criteria.database)}
        counted: Counted[InboxRow] = Counted(page, COUNT_LIMIT)

        def read(name: str, after: Position | None, limit: int) -> Part[InboxRow]:
            database = consumers[name]
            with database.reading() as connection:
                if (query := query_in(connection, database, criteria)) is None:
                    return Part([])
                count = inbox_sql.count(database.schema, query, COUNT_LIMIT + 1)
                counted.add(connection, count if inbox_sql.is_cheap(query) else None)
                return _rows(connection, database, query, (after[0], after[1]) if after else None, limit)

        return counted.on(merged(consumers, page, criteria, _BY_ID, read))

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
        statement = inbox_sql.counts(schema, criteria.group, criteria.topic, limit, COUNT_LIMIT)
        (counts,) = execute(connection, statement)
        if not counts:
            return []
        columns = ([row[column] for row in counts] for column in range(3))
        (rows,) = execute(connection, inbox_sql.details(schema, *columns))
    return [_dead_group(database.name, counts[row[0] - 1], row) for row in rows]


def _dead_group(database: str, count: Row, detail: Row) -> DeadGroup:
    group, topic, error_kind, value, most = count
    _, first_at, last_at, *sample = detail
    return DeadGroup(
        fingerprint=DeadKind(database, group, topic, error_kind).fingerprint,
        database=database,
        group=group,
        topic=topic,
        error_kind=error_kind,
        count=Total(value, "gte" if value >= most else "eq"),
        first_at=first_at,
        last_at=last_at,
        sample=InboxRow(database, *sample),
    )


def kind_of(connection: Connection, database: Database, fingerprint: str) -> DeadKind | None:
    """Return the kind of dead letters in a database that a fingerprint stands for; None if there are none now."""
    (rows,) = execute(connection, inbox_sql.kinds(database.schema))
    kinds = (DeadKind(database.name, *row) for row in rows)
    return next((kind for kind in kinds if kind.fingerprint == fingerprint), None)


def query_in(connection: Connection, database: Database, criteria: InboxFilter) -> InboxQuery | None:
    """Return what a (checked) filter asks of one database; None if nothing in it can fit.

    The fingerprint becomes the group, topic and kind of error that it stands for; ``discarded`` asks for what is
    parked.
    """
    query = InboxQuery(**{each.name: getattr(criteria, each.name) for each in dataclasses.fields(InboxFilter)})
    statuses = set(query.status)
    if query.discarded or query.fingerprint is not None:
        if statuses and Status.PARKED not in statuses:
            return None
        statuses = {Status.PARKED}
    if query.fingerprint is not None:
        kind = kind_of(connection, database, query.fingerprint)
        if kind is None or query.group not in {None, kind.group} or query.topic not in {None, kind.topic}:
            return None
        query = replace(query, group=kind.group, topic=kind.topic, error_kind=kind.error_kind)
    return replace(query, status=tuple(sorted(statuses)), error=query.error or None)


def _rows(
    connection: Connection, database: Database, query: InboxQuery, after: tuple[UUID, str] | None, limit: int
) -> Part[InboxRow]:
    """Search by each source, and put together what is above the position at which one of them stopped."""
    schema, rows, stops = database.schema, [], []
    for part, source in _sources(connection, schema, query):
        if query.message_id is not None:
            statement = inbox_sql.rows_of(schema, part, query.message_id, after, limit)
        else:
            statement = inbox_sql.list_inbox(schema, part, source, after, limit)
        (found,) = execute(connection, statement)
        rows += [_in_list(InboxRow(database.name, *row[2:])) for row in found if row[2] is not None]
        stops += [(row[0], row[1]) for row in found[:1] if row[0] is not None]
    stop = max(stops, default=None)
    rows.sort(key=_BY_ID.key, reverse=True)
    shown = [row for row in rows if stop is None or _BY_ID.key(row) >= stop][:limit]
    searched = inbox_sql.window_of(query) if stop else len(shown)
    return Part(shown, searched, stop if len(shown) < limit else None)


def _in_list(row: InboxRow) -> InboxRow:
    return replace(row, last_error=row.last_error.partition("\n")[0]) if row.last_error else row


def _sources(connection: Connection, schema: str, query: InboxQuery) -> list[tuple[InboxQuery, Source]]:
    """Return by which indexes the rows are found; each with the statuses that it finds."""
    statuses = set(query.status)
    if query.message_id is not None or not statuses or statuses - _RARE - {Status.QUARANTINED}:
        return [(query, "all")]
    sources: list[tuple[InboxQuery, Source]] = []
    if Status.PARKED in statuses:
        source: Source = "discarded" if query.discarded else "parked"
        if query.discarded or query.error is not None:
            few: Source = "discarded" if query.discarded else "parked_few"
            source = few if _are_few(connection, schema, query, few) else "parked"
        sources.append((replace(query, status=(Status.PARKED,)), source))
    if Status.FAILED in statuses:
        source = "failed" if _are_few(connection, schema, query, "failed") else "all"
        sources.append((replace(query, status=(Status.FAILED,)), source))
    if Status.QUARANTINED in statuses:
        sources.append((replace(query, status=(Status.QUARANTINED,)), "all"))
    return sources


def _are_few(connection: Connection, schema: str, query: InboxQuery, source: Source) -> bool:
    most = inbox_sql.few_of(query)
    (((count,),),) = execute(connection, inbox_sql.count_few(schema, query, source, most + 1))
    return bool(count <= most)
