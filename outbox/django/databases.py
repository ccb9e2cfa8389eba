"""The `Outbox` of each of Django's databases: declared when modules are imported, bound when it is used."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections
from sqlalchemy import URL, Dialect, Engine, NullPool, create_engine, event

from outbox.app import Outbox
from outbox.django.configuration import configuration
from outbox.errors import InvalidSettings

_declared: dict[str, Outbox] = {}
#: What the engine of an Outbox was made of: tests give an alias another database.
_made_of: dict[str, Hashable] = {}
#: The alias of the producer's database, where a group's is another one.
_sources: dict[tuple[str, str, str], str] = {}
_guard = threading.RLock()

#: Keys of a database's settings that say where it is.
_ADDRESS = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
#: What Django passes to psycopg, and libpq doesn't know.
_OF_PSYCOPG = frozenset({"client_encoding", "cursor_factory", "context", "prepare_threshold"})


def outbox(using: str | None = None) -> Outbox:
    """Return the Outbox on a database of ``DATABASES``, for all that has no function of its own here.

    Raises:
        InvalidSettings: ``OUTBOX`` doesn't name the database, or it isn't PostgreSQL.
    """
    alias = using or DEFAULT_DB_ALIAS
    found = declared(alias)
    address = _address(alias)
    if _made_of.get(alias) != address:
        with _guard:
            if _made_of.get(alias) != address:
                found.unbind()
                found.bind(_engine(alias))
                _bind_sources(alias, found)
                _made_of[alias] = address
    return found


def outboxes() -> list[Outbox]:
    """Return the Outboxes of all databases that ``OUTBOX`` names; a worker serves them together."""
    return [outbox(alias) for alias in configuration().own.databases]


def declared(using: str | None) -> Outbox:
    """Return the Outbox of a database, which may have no engine so far: its declarations stay."""
    alias = using or DEFAULT_DB_ALIAS
    with _guard:
        if alias not in _declared:
            own, settings = configuration()
            if alias not in own.databases:
                raise InvalidSettings(
                    f"database {alias!r} has no outbox; OUTBOX.DATABASES in your settings names "
                    f"{', '.join(own.databases)}: add it there, and run 'manage.py migrate --database {alias}'"
                )
            _declared[alias] = Outbox(group=own.group, settings=settings)
        return _declared[alias]


def set_source(using: str | None, topic: str, group: str, source: str | None) -> None:
    """Have a group read a topic from another of Django's databases."""
    alias = using or DEFAULT_DB_ALIAS
    if source is not None and source != alias:
        _sources[alias, topic, group] = source


def _address(alias: str) -> Hashable:
    settings = connections[alias].settings_dict
    return tuple(settings[key] for key in _ADDRESS)


def _bind_sources(alias: str, bound: Outbox) -> None:
    for (own, *key), source in _sources.items():
        topic, group = key
        if own == alias:
            subscription = bound.subscriptions[topic, group]
            bound.subscriptions[topic, group] = replace(subscription, source=_engine(source))


def database_url(alias: str) -> URL:
    """Return the URL of a database of ``DATABASES``, as psycopg takes it.

    Raises:
        InvalidSettings: it isn't PostgreSQL.
    """
    connection: Any = connections[alias]
    if connection.vendor != "postgresql":
        raise InvalidSettings(f"database {alias!r} of DATABASES is {connection.vendor}; the outbox needs PostgreSQL")
    known = {name: value for name, value in connection.get_connection_params().items() if name not in _OF_PSYCOPG}
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        known["options"] = f"{known.get('options', '')} -c role={role}".strip()
    user, password, host, port, name = (known.pop(key, None) for key in ("user", "password", "host", "port", "dbname"))
    if host and str(host).startswith("/"):  # a folder of sockets, which has no place before the path of a URL
        known["host"], host = host, None
    return URL.create(
        "postgresql+psycopg",
        username=user,
        password=password,
        host=host,
        port=int(port) if port else None,
        database=name,
        query={key: str(value) for key, value in known.items() if value is not None},
    )


def _engine(alias: str) -> Engine:
    """Return an engine that keeps no connections: requests use Django's, and workers keep those that they open."""
    options = connections[alias].settings_dict["OPTIONS"]
    arguments = {key: options[key] for key in ("prepare_threshold",) if key in options}
    engine = create_engine(database_url(alias), poolclass=NullPool, connect_args=arguments)

    @event.listens_for(engine, "do_connect")
    def as_django(dialect: Dialect, _: object, __: object, parameters: dict[str, Any]) -> None:
        # As Django asks its backend each time, which may draw a new token.
        parameters.update(dialect.create_connect_args(database_url(alias))[1])

    return engine
