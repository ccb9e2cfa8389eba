"""How drivers differ: what URLs call them, and how they take the placeholders and values of a statement.

Statements are written with the placeholders of psycopg 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outbox.errors import InvalidSettings, OutboxError, SchemaMissing
from outbox.text import described

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

#: The drivers that a message may be sent through.
PSYCOPG, PSYCOPG2, ASYNCPG = "psycopg", "psycopg2", "asyncpg"
DRIVERS = (PSYCOPG, PSYCOPG2, ASYNCPG)

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT = "COMMIT"
#: Commits, and begins the next transaction. (PostgreSQL, COMMIT.)
COMMIT_AND_CHAIN = "COMMIT AND CHAIN"
COMMITS = frozenset({COMMIT, COMMIT_AND_CHAIN})
#: What psycopg isn't to prepare.
UNPREPARED = COMMITS | {BEGIN}

_PLACEHOLDER = re.compile(r"%(?:%|(?P<plain>[sb])|\((?P<name>\w+)\)(?P<named>[sb]))")
_BINARY = re.compile(r"%(\(\w+\))?b")


@lru_cache(maxsize=1000)
def is_of_driver(kind: type) -> bool:
    """Tell whether objects of a class are one of the `DRIVERS`', or derived from its; asked for each send."""
    return any(base.__module__.partition(".")[0] in DRIVERS for base in kind.__mro__)


def check_driver(dialect: Dialect) -> None:
    """Make sure that messages can be sent through a dialect of SQLAlchemy's.

    Raises:
        InvalidSettings: it isn't PostgreSQL's, or not through one of `DRIVERS`.
    """
    if dialect.name != "postgresql" or dialect.driver not in DRIVERS:
        raise InvalidSettings(
            f"the outbox needs PostgreSQL through psycopg 3, psycopg2 or asyncpg, not {dialect.name} through "
            f"{dialect.driver}; make the engine with a URL that begins with postgresql+psycopg://"
        )


# --- statements ------------------------------------------------------------------------------------------------------


class Uuids(list[UUID]):
    """Ids to bind as ``%b::uuid[]``: `outbox.database.roundtrip` has them ready faster than the driver a list."""


class Bigints(list[int]):
    """Numbers to bind as ``%b::bigint[]``, in the same way."""


class Byteas(list["bytes | None"]):
    """Bytes to bind as ``%b::bytea[]``, in the same way."""


@lru_cache(maxsize=1000)
def numbered(sql: str) -> tuple[str, tuple[str, ...], tuple[bool, ...]]:
    """Turn psycopg's placeholders into PostgreSQL's.

    Returns the SQL, the name of each parameter ("" where it has none), and whether ``%b`` asked for a binary value.
    """
    names: list[str] = []
    binary: list[bool] = []

    def number(match: re.Match[str]) -> str:
        kind = match["plain"] or match["named"]
        if kind is None:
            return "%"
        name = match["name"]
        if name is not None and name in names:
            return f"${names.index(name) + 1}"
        names.append(name or "")
        binary.append(kind == "b")
        return f"${len(names)}"

    text = _PLACEHOLDER.sub(number, sql)
    return text, tuple(names), tuple(binary)


def translated(sql: str, values: Sequence[Any] | Mapping[str, Any], driver: str) -> tuple[str, Any]:
    """Return SQL and values as ``driver`` takes them."""
    if driver == ASYNCPG:
        sql, names, _ = numbered(sql)
        return sql, tuple([values[name] for name in names] if isinstance(values, Mapping) else values)
    if driver == PSYCOPG2:
        return _for_psycopg2(sql), _plain(values)
    return sql, values


@lru_cache(maxsize=1000)
def _for_psycopg2(sql: str) -> str:
    return _BINARY.sub(r"%\1s", sql)


class _Array(list[Any]):
    """A list that psycopg2 binds as an array, also where the application has it do something else with lists."""


@cache
def _know_arrays() -> None:
    from psycopg2 import _psycopg, extensions  # noqa: PLC0415 - a caller that passes its connection has paid for it

    extensions.register_adapter(_Array, _psycopg.List)


def _plain(values: Sequence[Any] | Mapping[str, Any]) -> Sequence[Any] | dict[str, Any]:
    """Write UUIDs out: psycopg2 only takes them where the application has registered the type."""
    _know_arrays()
    if isinstance(values, Mapping):
        return {name: _without_uuids(value) for name, value in values.items()}
    return [_without_uuids(value) for value in values]


def _without_uuids(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, (list, tuple)):
        return (_Array if isinstance(value, list) else tuple)(map(_without_uuids, value))
    return value


# --- URLs ------------------------------------------------------------------------------------------------------------

DRIVER_NAME = "postgresql+psycopg"
#: What the drivers with which an application sends are called in URLs. What works on the tables has psycopg 3.
_OTHERS = frozenset({"postgresql", *(f"postgresql+{driver}" for driver in (*DRIVERS, "psycopg_async"))})
#: Options of asyncpg's, which libpq doesn't know.
OF_ASYNCPG = ("prepared_statement_cache_size", "prepared_statement_name_func")


def url_of(bind: Engine | AsyncEngine | URL | str) -> URL:
    """Return the URL of a database for psycopg, also where it names no driver, psycopg2 or asyncpg."""
    url = parsed_url(bind) if isinstance(bind, str | URL) else bind.url
    if url.drivername not in _OTHERS:
        return url
    if "ssl" in url.query:  # as asyncpg calls it, with libpq's values
        url = url.update_query_dict({"sslmode": url.query["ssl"]}).difference_update_query(["ssl"])
    return url.set(drivername=DRIVER_NAME).difference_update_query(OF_ASYNCPG)


def parsed_url(text: str | URL, what: str = "the URL of a database", error: type[OutboxError] = InvalidSettings) -> URL:
    """Return a URL, or raise: nothing behind the error repeats any of the text, as SQLAlchemy's do."""
    url = None
    with suppress(ArgumentError, ValueError):
        url = make_url(text)
    if url is None:
        raise error(f"{what} can't be read; it must look like postgresql+psycopg://user@host:5432/database")
    if "@" in (url.host or ""):  # the tail of a password, which each error about the host would tell
        raise error(f"{what} has an @ too many: in a user's name or a password it is written %40")
    return url


def command(url: URL, verb: str, parts: tuple[str, ...], schema: str) -> str:
    """Return the command that mends the tables; it has psycopg 3, also for other drivers, and no password."""
    shown = url_of(url).render_as_string(hide_password=True)
    which = "".join(f" --part {part}" for part in parts)
    where = "" if schema == "outbox" else f" --schema {schema}"
    return f"outbox db {verb} --url {shown}{which}{where}"


def tables_missing(url: URL, what: str, parts: tuple[str, ...], schema: str) -> SchemaMissing:
    """Return the error that a statement failed for want of our tables; ``what`` is what the server said."""
    mend = command(url, "upgrade", parts, schema)
    return SchemaMissing(f"the outbox tables are not in {described(url, schema)}: {what}; run: {mend}")
