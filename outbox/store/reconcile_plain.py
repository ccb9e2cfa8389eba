"""The rows of a reconciliation for readers that know neither uuid nor time zones (Spark's JDBC source)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from outbox.store.execute import Statement

_AS = {
    "id": "uuid_send(r.{name}) AS {name}",
    "time": "(extract(epoch FROM r.{name}) * 1000000)::int8 AS {name}",
    "plain": "r.{name}",
}


def plain_rows(rows: Statement, columns: Mapping[str, Literal["id", "time", "plain"]]) -> Statement:
    """Return ids as 16 bytes and times as microseconds since 1970.

    ::

        SELECT uuid_send(r.id) AS id, r.state, (extract(epoch FROM r.at) * 1000000)::int8 AS at … FROM (…) r
    """
    selected = ", ".join(_AS[kind].format(name=f'"{name}"') for name, kind in columns.items())
    return Statement(f"SELECT {selected} FROM ({rows.sql}) r", rows.values)
