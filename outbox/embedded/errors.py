"""What can go wrong with an embedded PostgreSQL."""

from __future__ import annotations


class EmbeddedError(Exception):
    """The embedded PostgreSQL can't do what was asked; the message ends with the tail of its log, if any."""


class PostgresNotFound(EmbeddedError):
    """There are no PostgreSQL binaries on this machine."""
