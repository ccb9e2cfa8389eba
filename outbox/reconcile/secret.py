"""Addresses of databases: for the driver with the password, for people without it."""

from __future__ import annotations

from typing import NoReturn
from urllib.parse import quote, quote_plus

from psycopg.conninfo import make_conninfo
from sqlalchemy import URL, make_url

from outbox.errors import OutboxError


def conninfo(url: str) -> str:
    """Return a SQLAlchemy URL as libpq takes it, password included.

    Not as a URL: SQLAlchemy leaves spaces in a password as they are, which libpq refuses, and quotes in its error.
    """
    parts = make_url(url)
    _, options = parts.get_dialect()().create_connect_args(parts)
    return make_conninfo(**options)


def place(url: str) -> str:
    """Return which database is meant, in words without a secret."""
    parts = make_url(url)
    return f"database {parts.database!r} on {parts.host or 'the local socket'}"


def hidden(text: str, url: str) -> str:
    """Return a text without the password of a URL, in whatever way it is written there."""
    for form in _forms(make_url(url)):
        text = text.replace(form, "***")
    return text


def tell(error: OutboxError) -> NoReturn:
    """Raise an error with nothing behind it: psycopg's own keep the password of their connection."""
    try:
        raise error from None
    except OutboxError:
        error.__context__ = None
        raise


def _forms(url: URL) -> list[str]:
    secrets = [str(value) for value in (url.password, url.query.get("password"), url.query.get("sslpassword")) if value]
    return sorted({form for secret in secrets for form in _written(secret)}, key=len, reverse=True)


def _written(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, as URLs have it (SQLAlchemy's leave spaces), and as libpq's own strings have it."""
    quoted = (quote(secret), quote(secret, safe=""), quote(secret, safe=" +"), quote_plus(secret))
    return secret, *quoted, secret.replace("\\", "\\\\").replace("'", "\\'")
