"""Addresses of databases: for the driver with the password, for people without it."""

from __future__ import annotations

from urllib.parse import quote

from sqlalchemy import URL, make_url


def libpq_url(url: str) -> str:
    """Return a SQLAlchemy URL as libpq reads it, password included."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def place(url: str) -> str:
    """Return which database is meant, in words without a secret."""
    parts = make_url(url)
    return f"database {parts.database!r} on {parts.host or 'the local socket'}"


def hidden(text: str, url: str) -> str:
    """Return a text without the password of a URL, in whatever way it is written there."""
    for form in _forms(make_url(url)):
        text = text.replace(form, "***")
    return text


def _forms(url: URL) -> list[str]:
    secrets = [str(value) for value in (url.password, url.query.get("password"), url.query.get("sslpassword")) if value]
    forms = {form for secret in secrets for form in (secret, quote(secret), quote(secret, safe=""))}
    return sorted(forms, key=len, reverse=True)
