"""Operations and their items, as they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from outbox.admin.filters import check_words
from outbox.admin.model import OperationItem, OperationRow, Page, PageRequest
from outbox.admin.paging import Found, Order, Position, merged
from outbox.errors import OperationNotFound
from outbox.store import operate
from outbox.store.execute import Row, execute

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.admin.databases import Database, Databases

T = TypeVar("T")

STATES = ("waiting", "running", "done", "partly", "cancelled")
ITEM_STATES = ("pending", "done", "skipped", "failed", "cancelled")

_NEWEST: Order[OperationRow] = Order(key=lambda row: (row.id,), shape=(UUID,))
_BY_NUMBER: Order[OperationItem] = Order(key=lambda item: (item.number,), shape=(int,), newest_first=False)


def list_operations(
    databases: Databases, page: PageRequest, *, state: str | None, database: str | None
) -> Page[OperationRow]:
    """Return a page of operations, the newest first.

    Raises:
        InvalidRequest: a state or token that isn't one.
        UnknownDatabase: no database has this name.
    """
    check_words([] if state is None else [state], STATES, "state")
    names = list(databases) if database is None else [databases[database].name]

    def look(name: str, after: Position | None, limit: int) -> Found[OperationRow]:
        one = databases[name]
        with one.looking() as connection:
            statement = operate.list_operations(one.schema, state, after[0] if after else None, limit)
            (rows,) = execute(connection, statement)
        return Found([_row(name, row) for row in rows])

    return merged(names, page, ("operations", state), _NEWEST, look)


def operation(databases: Databases, operation_id: UUID) -> OperationRow:
    """Return an operation.

    Raises:
        OperationNotFound: no registered database has it.
    """
    found = _first(databases, lambda database: _look(database, operation_id))
    if found is None:
        raise OperationNotFound(f"no registered database ({', '.join(databases)}) has operation {operation_id}")
    return found


def find(databases: Databases, operation_id: UUID) -> Database:
    """Return the database that has an operation.

    Raises:
        OperationNotFound: none has.
    """
    return databases[operation(databases, operation_id).database]


def items(databases: Databases, operation_id: UUID, page: PageRequest, *, state: str | None) -> Page[OperationItem]:
    """Return a page of the items of an operation, in their order.

    Raises:
        OperationNotFound: no registered database has it.
        InvalidRequest: a state or token that isn't one.
    """
    check_words([] if state is None else [state], ITEM_STATES, "state")
    database = find(databases, operation_id)

    def look(_: str, after: Position | None, limit: int) -> Found[OperationItem]:
        with database.looking() as connection:
            statement = operate.items(database.schema, operation_id, state, after[0] if after else 0, limit)
            (rows,) = execute(connection, statement)
        return Found([OperationItem(*row) for row in rows])

    return merged([database.name], page, ("items", operation_id, state), _BY_NUMBER, look)


def of_message(connection: Connection, database: Database, message_id: UUID) -> list[OperationRow]:
    """Return the operations of a database that a message was in."""
    (rows,) = execute(connection, operate.of_message(database.schema, message_id))
    return [_row(database.name, row) for row in rows]


def _look(database: Database, operation_id: UUID) -> OperationRow | None:
    with database.looking() as connection:
        (rows,) = execute(connection, operate.operation(database.schema, operation_id))
    return _row(database.name, rows[0]) if rows else None


def _row(database: str, row: Row) -> OperationRow:
    said = dict(zip(operate.OPERATION, row, strict=True))
    counts = json.loads(said.pop("counts") or "{}")
    said |= {"options": json.loads(said["options"]), "described": said["described"] or said["action"]}
    return OperationRow(database, **said, **{state: counts.get(state, 0) for state in ITEM_STATES})


def _first(databases: Databases, look: Callable[[Database], T | None]) -> T | None:
    return next((found for database in databases.values() if (found := look(database)) is not None), None)
