"""The lists of inbox rows: the newest id first, over all groups, by many conditions.

Dead letters in groups: what is parked (and not discarded) for one group and topic with one kind of error.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.errors import InvalidRequest
from outbox.message.model import Status
from outbox.operator.look import inbox_sql
from outbox.operator.look.inbox_sql import Source, Wanted
from outbox.operator.look.messages import check_filter, check_text, check_words
from outbox.operator.look.paging import Counted, Found, Order, Position, merged
from outbox.operator.model import COUNT_LIMIT, DeadGroup, InboxFilter, InboxRow, Page, PageRequest, Total

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

_MOST = inbox_sql.MOST
_LETTERS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """What the dead letters of one group in this sense have in common."""

    database: str
    group: str
    topic: str
    error_kind: str

    @property
    def fingerprint(self) -> str:
        """A short name for it, which stays the same as long as dead letters of this kind come."""
        text = "\0".join((self.database, self.group, self.topic, self.error_kind))
        return hashlib.sha256(text.encode()).hexdigest()[:_LETTERS]


def groups(
    databases: Databases,
    *,
    database: str | None = None,
    group: str | None = None,
    topic: str | None = None,
    limit: int = 200,
) -> list[DeadGroup]:
    """Return the dead letters by group, topic and kind of error, the biggest group first, ``limit`` groups at most.

    Counts stop at 10,000, sooner where there are many kinds. Times are those of the oldest and newest messages.

    Raises:
        InvalidRequest: a limit below 1 or over 1,000.
        UnknownDatabase: no database of this name is registered.
    """
    if not 1 <= limit <= _MOST:
        raise InvalidRequest(f"limit {limit} must be 1 to {_MOST}", field="limit")
    check_text(group, "group")
    check_text(topic, "topic")
    found = [dead for each in databases.having("consumer", database) for dead in _groups_in(each, group, topic, limit)]
    found.sort(key=lambda dead: (-dead.count.value, dead.database, dead.group, dead.topic, dead.error_kind))
    return found[:limit]


def by_fingerprint(connection: Connection, database: Database, fingerprint: str) -> Kind | None:
    """Return the kind of dead letters in a database that a fingerprint stands for; None if there are none now."""
    (rows,) = execute(connection, inbox_sql.kinds(database.schema))
    kinds = (Kind(database.name, *row) for row in rows)
    return next((kind for kind in kinds if kind.fingerprint == fingerprint), None)


def _groups_in(database: Database, group: str | None, topic: str | None, limit: int) -> list[DeadGroup]:
    schema = database.schema
    with database.looking() as connection:
        (counts,) = execute(connection, inbox_sql.counts(schema, group, topic, limit, COUNT_LIMIT))
        if not counts:
            return []
        columns = ([row[column] for row in counts] for column in range(3))
        (rows,) = execute(connection, inbox_sql.details(schema, *columns))
    return [_dead(database.name, counts[row[0] - 1], row) for row in rows]


def _dead(database: str, count: Row, detail: Row) -> DeadGroup:
    group, topic, error_kind, value, most = count
    _, first_at, last_at, *sample = detail
    return DeadGroup(
        fingerprint=Kind(database, group, topic, error_kind).fingerprint,
        database=database,
        group=group,
        topic=topic,
        error_kind=error_kind,
        count=Total(value, "gte" if value >= most else "eq"),
        first_at=first_at,
        last_at=last_at,
        sample=InboxRow(database, *sample),
    )


_ORDER: Order[InboxRow] = Order(key=lambda row: (row.message_id, row.group), shape=(UUID, str))
_MOST_ATTEMPTS = 2**31 - 1
_RARE = {"parked", "failed"}


def list_inbox(databases: Databases, wanted: InboxFilter, page: PageRequest) -> Page[InboxRow]:
    """Return a page of the inbox rows that fit.

    What is parked or failed is found by index, everything else within a window of each database
    (`outbox.operator.look.inbox_sql.WINDOW` rows; fewer where errors are searched).

    Raises:
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: the filter names a database that isn't registered.
    """
    check(wanted)
    consumers = {database.name: database for database in databases.having("consumer", wanted.database)}
    counted: Counted[InboxRow] = Counted(page, COUNT_LIMIT)

    def look(name: str, after: Position | None, limit: int) -> Found[InboxRow]:
        database = consumers[name]
        with database.looking() as connection:
            if (sought := wanted_in(connection, database, wanted)) is None:
                return Found([])
            counting = inbox_sql.count(database.schema, sought, COUNT_LIMIT + 1)
            counted.add(connection, counting if inbox_sql.is_cheap(sought) else None)
            return _look(connection, database, sought, (after[0], after[1]) if after else None, limit)

    return counted.on(merged(consumers, page, wanted, _ORDER, look))


def check(wanted: InboxFilter) -> None:
    """See that a filter is one.

    Raises:
        InvalidRequest: it isn't.
    """
    check_words(wanted.statuses, Status, "statuses")
    check_filter(wanted, texts=("group", "topic", "fingerprint", "error"), times=("since", "until"))
    if wanted.attempts_gte is not None and not 0 <= wanted.attempts_gte <= _MOST_ATTEMPTS:
        raise InvalidRequest(f"attempts_gte {wanted.attempts_gte} is no number of attempts", field="attempts_gte")


def wanted_in(connection: Connection, database: Database, wanted: InboxFilter) -> Wanted | None:
    """Return a (checked) filter as the store's statements take it; None if nothing in this database can fit.

    The fingerprint becomes the group, topic and kind of error that it stands for; ``discarded`` asks for what is
    parked.
    """
    statuses = {str(status) for status in wanted.statuses}
    sought = Wanted(
        group=wanted.group,
        topic=wanted.topic,
        message_id=wanted.message_id,
        error=wanted.error or None,
        attempts_gte=wanted.attempts_gte,
        since=wanted.since,
        until=wanted.until,
        discarded=wanted.discarded,
    )
    if wanted.discarded or wanted.fingerprint is not None:
        if statuses and "parked" not in statuses:
            return None
        statuses = {"parked"}
    if wanted.fingerprint is not None:
        kind = by_fingerprint(connection, database, wanted.fingerprint)
        if kind is None or wanted.group not in {None, kind.group} or wanted.topic not in {None, kind.topic}:
            return None
        sought = replace(sought, group=kind.group, topic=kind.topic, error_kind=kind.error_kind)
    return replace(sought, statuses=tuple(sorted(statuses)))


def to_row(database: str, row: Row) -> InboxRow:
    """Return the columns of `outbox.operator.look.inbox_sql.SHORT_ROW` as an `InboxRow`."""
    return InboxRow(database, *row)


def _in_list(row: InboxRow) -> InboxRow:
    return replace(row, last_error=row.last_error.partition("\n")[0]) if row.last_error else row


def _look(
    connection: Connection, database: Database, sought: Wanted, after: tuple[UUID, str] | None, limit: int
) -> Found[InboxRow]:
    """Search by each source, and put together what is above the place at which one of them stopped."""
    schema, rows, stops = database.schema, [], []
    for part, source in _sources(connection, schema, sought):
        if sought.message_id is not None:
            statement = inbox_sql.rows_of(schema, part, sought.message_id, after, limit)
        else:
            statement = inbox_sql.list_inbox(schema, part, source, after, limit)
        (found,) = execute(connection, statement)
        rows += [_in_list(to_row(database.name, row[2:])) for row in found if row[2] is not None]
        stops += [(row[0], row[1]) for row in found[:1] if row[0] is not None]
    stop = max(stops, default=None)
    rows.sort(key=_ORDER.key, reverse=True)
    shown = [row for row in rows if stop is None or _ORDER.key(row) >= stop][:limit]
    searched = inbox_sql.window_of(sought) if stop else len(shown)
    return Found(shown, searched, stop if len(shown) < limit else None)


def _sources(connection: Connection, schema: str, sought: Wanted) -> list[tuple[Wanted, Source]]:
    """Return by which ways the rows are found; each with the statuses that it finds."""
    statuses = set(sought.statuses)
    if sought.message_id is not None or not statuses or statuses - _RARE - {"quarantined"}:
        return [(sought, "all")]
    sources: list[tuple[Wanted, Source]] = []
    if "parked" in statuses:
        way: Source = "discarded" if sought.discarded else "parked"
        if sought.discarded or sought.error is not None:
            few: Source = "discarded" if sought.discarded else "parked_few"
            way = few if _are_few(connection, schema, sought, few) else "parked"
        sources.append((replace(sought, statuses=("parked",)), way))
    if "failed" in statuses:
        way = "failed" if _are_few(connection, schema, sought, "failed") else "all"
        sources.append((replace(sought, statuses=("failed",)), way))
    if "quarantined" in statuses:
        sources.append((replace(sought, statuses=("quarantined",)), "all"))
    return sources


def _are_few(connection: Connection, schema: str, sought: Wanted, source: Source) -> bool:
    most = inbox_sql.few_of(sought)
    (((count,),),) = execute(connection, inbox_sql.count_few(schema, sought, source, most + 1))
    return bool(count <= most)
