"""Data to stdout as tables, JSON, CSV or ids; everything else to stderr.

A body for people: as JSON or text, else how long it is.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox.errors import InvalidMessage
from outbox.message import codec
from outbox.text import duration, plain


class Output(enum.StrEnum):
    """The form of the data on stdout."""

    TABLE = "table"
    JSON = "json"


class Form(enum.StrEnum):
    """The form of a list on stdout."""

    TABLE = "table"
    JSON = "json"
    NDJSON = "ndjson"
    CSV = "csv"
    ID = "id"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="The form of the data on stdout.")]

# Where nobody looks at a terminal, lines may be as long as they are.
_WIDE = 10_000


def say(text: str) -> None:
    """Tell the user something on stderr."""
    print(plain(text), file=sys.stderr)  # noqa: T201


def print_json(value: Any) -> None:
    """Print one JSON value on one line."""
    print(json.dumps(value, ensure_ascii=False, default=as_json), flush=True)  # noqa: T201


def print_table(*tables: Table) -> None:
    """Print tables; as wide as they are if stdout is no terminal."""
    terminal = console()
    for table in tables:
        terminal.print(table)


def console() -> Console:
    """Return the console of stdout."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDE)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        result.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(cell(value)) for value in row))
    return result


def cell(value: Any) -> str:
    """Return a value as text in a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    if isinstance(value, dict | list):
        return plain(json.dumps(value, ensure_ascii=False, default=as_json))
    return plain(str(value))


def age(seconds: float | None) -> str:
    """Return a duration for people, see `duration`; nothing where there is none."""
    return "" if seconds is None else duration(seconds)


def as_json(value: Any) -> Any:
    """Return what JSON has for a value it has no form for: a time as ISO 8601 in UTC, an id as its text."""
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def readable(half: Mapping[str, Any] | None, raw: bytes | None) -> Any:
    """Return the body of a half message, decoded by its content type; else how long it is, and its digest."""
    if half is None or raw is None:
        return None
    digest = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    try:
        decoded = codec.decode(raw, half["content_type"])
    except InvalidMessage as error:
        return {**digest, "error": str(error)}
    return digest if isinstance(decoded, bytes) else decoded
