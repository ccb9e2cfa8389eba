"""Exit codes, and which error leads to which."""

from __future__ import annotations

import enum
import re

from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.embedded.binaries import EmbeddedError
from outbox.errors import (
    ActRefused,
    AdminError,
    CheckRefused,
    CompensationRefused,
    DecisionError,
    DecisionRefused,
    HalfNotFound,
    InvalidHandler,
    InvalidMessage,
    InvalidSettings,
    MessageNotFound,
    NotParked,
    OperationNotFound,
    OutboxBusy,
    OutboxError,
    RecallRefused,
    ReconcileError,
    SchemaBusy,
    SchemaError,
    SelectorChanged,
    SourceError,
    VersionMismatch,
)


class Code(enum.IntEnum):
    """What the process leaves with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    PARTIAL = 5
    PROBLEMS = 6
    UNAVAILABLE = 69
    NO_RESULT = 70
    CONFIG = 78
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """What the code says, for the help text."""
        return _MEANINGS[self]


_MEANINGS = {
    Code.DONE: "done",
    Code.FAILED: "failed; of `reconcile`: differences are left",
    Code.USAGE: "wrong usage, or refused",
    Code.NOT_FOUND: "not found",
    Code.CONFLICT: "conflict: somebody else was first, or is at it",
    Code.PARTIAL: "done in part: some of what was named failed, or is missing",
    Code.PROBLEMS: "a check found problems",
    Code.UNAVAILABLE: "the database is unavailable",
    Code.NO_RESULT: "`reconcile` came to no result",
    Code.CONFIG: "bad configuration: URL, settings, --app, or a database that isn't migrated",
    Code.INTERRUPTED: "interrupted",
}


class Failure(Exception):
    """An error to tell the user in one line."""

    def __init__(self, message: str, code: Code = Code.FAILED) -> None:
        super().__init__(message)
        self.code = code


#: Of the classes of SQLSTATE: connection exception, invalid authorization, invalid catalog name; insufficient
#: resources and operator intervention, but for a statement that was cancelled.
_UNAVAILABLE = re.compile(r"08|28|3D|53|57P")


#: The first that fits counts.
_CODES: tuple[tuple[tuple[type[Exception], ...], Code], ...] = (
    ((SchemaBusy,), Code.CONFLICT),
    ((SchemaError, InvalidSettings, InvalidHandler, InvalidMessage), Code.CONFIG),
    ((HalfNotFound, MessageNotFound, OperationNotFound), Code.NOT_FOUND),
    ((DecisionRefused,), Code.USAGE),
    ((DecisionError, CheckRefused, OutboxBusy, NotParked, RecallRefused, CompensationRefused), Code.CONFLICT),
    ((ActRefused, VersionMismatch, SelectorChanged), Code.CONFLICT),
    ((AdminError,), Code.USAGE),
    ((EmbeddedError, SourceError, PoolTimeout), Code.UNAVAILABLE),
    ((ReconcileError,), Code.NO_RESULT),
    ((OutboxError, ArgumentError, NoSuchModuleError), Code.FAILED),
)


def as_failure(error: Exception) -> Failure | None:
    """Return what to tell of an error; None if nobody expected it: then its traceback is the best message."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, DBAPIError):
        return _database_failure(error)
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return Failure(one_line(str(error)), code)
    return None


def _database_failure(error: DBAPIError) -> Failure:
    text = one_line(str(error.orig))
    state = getattr(error.orig, "sqlstate", None)
    # Where a connection can't even be made there is no state.
    if error.connection_invalidated or state is None or _UNAVAILABLE.match(state):
        return Failure(f"the database is unavailable: {text}", Code.UNAVAILABLE)
    if state == "55P03":
        return Failure(f"another transaction is at it: {text}; try again in a while", Code.CONFLICT)
    if state == "57014":
        return Failure(f"{text}; narrow down what to look at", Code.FAILED)
    return Failure(f"the database refused: {text}", Code.FAILED)


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())
