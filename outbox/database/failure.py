"""What an error of the database or of its pool means: one classification for every way in."""

from __future__ import annotations

import re

from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.errors import ErrorKind, OutboxError

LOCK_NOT_AVAILABLE = "55P03"

STATEMENT_CANCELLED = "57014"
#: Another transaction was in the way; the same statement may succeed later: lock, deadlock, serialization failure.
CONTENDED = frozenset({LOCK_NOT_AVAILABLE, "40P01", "40001"})

_STATES = {
    **dict.fromkeys(CONTENDED, ErrorKind.CONFLICT),
    STATEMENT_CANCELLED: ErrorKind.TIMEOUT,
    "25006": ErrorKind.READ_ONLY,
}
# Classes of SQLSTATE: connection exception, invalid authorization, invalid catalog name, insufficient resources,
# operator intervention (57P; 57014 is a cancelled statement).
_UNAVAILABLE = re.compile(r"08|28|3D|53|57P")
_DATA = "22"
# The driver's classes for a connection that can't be made or is lost; such an error has no SQLSTATE. What the driver
# refuses to send has none either.
_LOST = frozenset({"OperationalError", "ConnectionTimeout", "InterfaceError"})


def sqlstate(error: BaseException | None) -> str:
    """Return the SQLSTATE of an error of SQLAlchemy or of the driver; "" where there is none."""
    return getattr(getattr(error, "orig", error), "sqlstate", None) or ""


def kind_of(error: BaseException) -> ErrorKind | None:
    """Return what an error means; None for one that is neither the outbox's nor the database's."""
    match error:
        case OutboxError():
            return error.kind
        case PoolTimeout():
            return ErrorKind.UNAVAILABLE
        case DBAPIError():
            state = sqlstate(error)
            lost = error.connection_invalidated or (not state and type(error.orig).__name__ in _LOST)
            if lost or _UNAVAILABLE.match(state):
                usual = ErrorKind.UNAVAILABLE
            else:
                usual = ErrorKind.USAGE if state.startswith(_DATA) else ErrorKind.INTERNAL
            return _STATES.get(state, usual)
        case ArgumentError() | NoSuchModuleError():
            return ErrorKind.SETTINGS
    return None
