"""What one writes by hand with psycopg: a table read with SKIP LOCKED, and a log that is read by its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import psycopg

from benchmarks.peers.business import CREDIT, CREDIT_ALL, ONCE, ONCE_ALL, libpq_url, new_order
from benchmarks.peers.contest import Arm

_TABLES = """
CREATE TABLE {name} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id uuid NOT NULL DEFAULT gen_random_uuid(),
    body jsonb NOT NULL
);
CREATE TABLE IF NOT EXISTS log_offset (id int PRIMARY KEY, position bigint NOT NULL);
"""
_TAKE = "SELECT id, message_id, body FROM {name} ORDER BY id LIMIT {limit} FOR UPDATE SKIP LOCKED"
_DELETE = "DELETE FROM {name} WHERE id = ANY (%s)"
_RANGE = "SELECT id, message_id, body FROM {name} WHERE id > %s ORDER BY id LIMIT 100"
_MOVE_ON = """
INSERT INTO log_offset (id, position) VALUES (1, %s) ON CONFLICT (id) DO UPDATE SET position = excluded.position
"""

Row = tuple[int, UUID, dict[str, Any]]
Act = Callable[[psycopg.Connection[Any], list[Row]], None]


def each(connection: psycopg.Connection[Any], rows: list[Row]) -> None:
    """Have each message take effect by statements of its own."""
    with connection.cursor() as cursor:
        for _, message_id, body in rows:
            cursor.execute(ONCE, (str(message_id),))
            cursor.execute(CREDIT, (body["amount"], body["receiver"]))


def each_in_pipeline(connection: psycopg.Connection[Any], rows: list[Row]) -> None:
    """The same, but nothing waits for an answer."""
    with connection.pipeline():
        each(connection, rows)


def at_once(connection: psycopg.Connection[Any], rows: list[Row]) -> None:
    """Have all take effect by two statements."""
    connection.execute(ONCE_ALL, ([str(row[1]) for row in rows],))
    connection.execute(CREDIT_ALL, ([row[2]["receiver"] for row in rows], [row[2]["amount"] for row in rows]))


class HandArms:
    """Arms on one database, each with a table of its own."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._connection: psycopg.Connection[Any] = stack.enter_context(psycopg.connect(libpq_url(url)))
        self._count = 0

    def arm(self, act: Act | None, limit: int = 100) -> Arm:
        """Return the arm that takes so many rows a transaction."""
        name, connection = self._table(), self._connection
        take, delete = _TAKE.format(name=name, limit=limit), _DELETE.format(name=name)

        def handle(messages: int) -> None:
            done = 0
            while done < messages:
                rows = connection.execute(take).fetchall()
                if act is not None:
                    act(connection, rows)
                connection.execute(delete, ([row[0] for row in rows],))
                connection.commit()
                done += len(rows)

        return Arm(lambda messages: self._fill(name, messages), handle)

    def log(self) -> Arm:
        """Return the arm that only reads on from where it was, and writes how far it has come."""
        name, connection, position = self._table(), self._connection, 0

        def handle(messages: int) -> None:
            nonlocal position
            done = 0
            while done < messages:
                rows = connection.execute(_RANGE.format(name=name), (position,)).fetchall()
                position = rows[-1][0]
                connection.execute(_MOVE_ON, (position,))
                connection.commit()
                done += len(rows)

        return Arm(lambda messages: self._fill(name, messages), handle)

    def _table(self) -> str:
        self._count += 1
        self._connection.execute(_TABLES.format(name=f"work_{self._count}"))
        self._connection.commit()
        return f"work_{self._count}"

    def _fill(self, name: str, messages: int) -> None:
        with self._connection.cursor() as cursor, cursor.copy(f"COPY {name} (body) FROM STDIN") as copy:
            for _ in range(messages):
                copy.write_row((json.dumps(new_order()),))
        self._connection.commit()
