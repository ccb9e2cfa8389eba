"""The list of what operators did, the newest first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.operator.look import audit_sql
from outbox.operator.look.audit_sql import Wanted
from outbox.operator.look.messages import check_filter
from outbox.operator.look.paging import Counted, Found, Order, Position, merged
from outbox.operator.model import COUNT_LIMIT, AuditFilter, AuditRow, Page, PageRequest

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

# Within a database, ids are given in the order of time, but for acts at the same moment.
_ORDER: Order[AuditRow] = Order(key=lambda row: (row.acted_at,), shape=(int,), position=lambda row: (row.id,))


def list_audit(databases: Databases, wanted: AuditFilter, page: PageRequest) -> Page[AuditRow]:
    """Return a page of the acts that fit.

    A target that is a message's id also finds what was done to it in the inboxes of groups. Acts on a target are found
    by index, all others within a window of each database (`outbox.operator.look.audit_sql.WINDOW` acts).

    Raises:
        InvalidRequest: a filter or token that isn't one.
        UnknownDatabase: the filter names a database that isn't registered.
    """
    check_filter(wanted, texts=("actor", "action", "target"), times=("since", "until"))
    chosen = [databases[wanted.database]] if wanted.database is not None else list(databases.values())
    by_name = {database.name: database for database in chosen}
    counted: Counted[AuditRow] = Counted(page, COUNT_LIMIT)
    every = wanted == AuditFilter(database=wanted.database)

    def look(name: str, after: Position | None, limit: int) -> Found[AuditRow]:
        database = by_name[name]
        with database.looking() as connection:
            counted.add(connection, audit_sql.count(database.schema, COUNT_LIMIT + 1) if every else None)
            targets = None if wanted.target is None else targets_of(connection, database, wanted.target)
            sought = Wanted(wanted.actor, wanted.action, wanted.since, wanted.until, targets)
            statement = audit_sql.list_audit(database.schema, sought, after[0] if after else None, limit)
            (rows,) = execute(connection, statement)
        end = rows[0][0] if rows else None
        return Found(rows_of(name, rows), audit_sql.WINDOW, (end,) if end else None)

    return counted.on(merged(by_name, page, wanted, _ORDER, look))


def targets_of(connection: Connection, database: Database, target: str) -> list[str]:
    """Return what acts on a target are recorded under in a database: a message also as ``<group>/<id>``."""
    try:
        message_id = str(UUID(target))
    except ValueError:
        return [target]
    if "consumer" not in database.parts:
        return [message_id]
    (groups,) = execute(connection, audit_sql.groups(database.schema))
    return [message_id, *(f"{group}/{message_id}" for (group,) in groups)]


def rows_of(database: str, rows: list[Row]) -> list[AuditRow]:
    """Return the rows of `outbox.operator.look.audit_sql.list_audit` as `AuditRow`s."""
    return [
        AuditRow(database, *row[1:-2], *(None if value is None else json.loads(value) for value in row[-2:]))
        for row in rows
        if row[1] is not None
    ]
