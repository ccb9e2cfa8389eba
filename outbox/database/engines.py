"""Engines for what names a database: an engine, of an async engine its URL, or a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, NullPool, create_engine, make_url

from outbox.text import database_address

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    Bind = Engine | AsyncEngine | URL | str

_CONNECT_TIMEOUT = 10


def url_of(bind: Bind) -> URL:
    """Return the URL of a database; its driver is psycopg where it names none."""
    url = make_url(bind) if isinstance(bind, str | URL) else bind.url
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def address_of(url: URL) -> str:
    """Return what tells two databases apart; no password."""
    return f"{database_address(url)}?{sorted(url.query.items())}"


def engine_of(bind: Bind, timeout: int = _CONNECT_TIMEOUT, **options: Any) -> Engine:
    """Return an engine as it is, else one for the URL.

    That one doesn't wait for a host for longer than ``timeout`` seconds, unless its URL says for how long, and keeps no
    connections, unless ``options`` name another pool.
    """
    if isinstance(bind, Engine):
        return bind
    url = url_of(bind)
    limit = {} if "connect_timeout" in url.query else {"connect_timeout": timeout}
    return create_engine(url, connect_args=limit, **({"poolclass": NullPool} | options))
