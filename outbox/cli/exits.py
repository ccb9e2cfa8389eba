"""Exit codes, and which error leads to which."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from outbox.database.execute import kind_of
from outbox.errors import ErrorKind, pip_install, was_interrupted, without_secrets
from outbox.text import message_of


class Code(enum.IntEnum):
    """Number the exit codes of the process; ``meaning`` is for the help text."""

    DONE = 0, "done"
    FAILED = 1, "failed"
    USAGE = 2, "wrong usage, or refused"
    NOT_FOUND = 3, "not found"
    CONFLICT = 4, "conflict: the state doesn't allow it, or another actor was first"
    PARTIAL = 5, "done in part: some of the named things failed, or are missing"
    PROBLEMS = 6, "a check found problems; of `reconcile`: differences are left"
    UNAVAILABLE = 69, "the database is unavailable"
    NO_RESULT = 70, "`reconcile` came to no result"
    CONFIG = 78, "bad configuration: URL, settings, --app, or a database that isn't migrated"
    INTERRUPTED = 130, "interrupted"

    meaning: str

    def __new__(cls, number: int, meaning: str) -> Code:
        """Return the code of a number, with its meaning."""
        code = int.__new__(cls, number)
        code._value_, code.meaning = number, meaning
        return code


class Failure(Exception):
    """An error to tell the user in one line, which any command may raise: wrong usage, unless ``code`` differs."""

    def __init__(self, message: str, code: Code = Code.USAGE) -> None:
        super().__init__(without_secrets(message))
        self.code = code


#: The exit code of each kind of error that isn't just `FAILED`.
_CODES = {
    ErrorKind.USAGE: Code.USAGE,
    ErrorKind.REFUSED: Code.USAGE,
    ErrorKind.TOO_LARGE: Code.USAGE,
    ErrorKind.SETTINGS: Code.CONFIG,
    ErrorKind.SCHEMA: Code.CONFIG,
    ErrorKind.NOT_FOUND: Code.NOT_FOUND,
    ErrorKind.CONFLICT: Code.CONFLICT,
    ErrorKind.STALE: Code.CONFLICT,
    ErrorKind.BUSY: Code.CONFLICT,
    ErrorKind.UNAVAILABLE: Code.UNAVAILABLE,
    ErrorKind.NO_RESULT: Code.NO_RESULT,
}

#: The command line's words for the database's error, around the database's own words.
_DATABASE_SAYS = {
    ErrorKind.UNAVAILABLE: "the database is unavailable: {}",
    ErrorKind.CONFLICT: "another transaction holds a lock: {}; try again in a while",
    ErrorKind.TIMEOUT: "{}; narrow down what to look for",
}


def as_failure(error: Exception) -> Failure | None:
    """Return the line and the exit code of an error; None for an unexpected one: its traceback is the best message."""
    if isinstance(error, Failure):
        return error
    kind = kind_of(error)
    if kind is None:
        return None
    text = one_line(message_of(error))
    if isinstance(error, DBAPIError):
        if was_interrupted(error):
            return Failure("interrupted", Code.INTERRUPTED)
        text = _DATABASE_SAYS.get(kind, "the database refused: {}").format(one_line(str(error.orig)))
    return Failure(text, _CODES.get(kind, Code.FAILED))


def if_away(error: Exception) -> Failure:
    """Return the failure of a database that is away for now; any other error is raised again."""
    failure = as_failure(error)
    if failure is None or failure.code is not Code.UNAVAILABLE:
        raise error
    return failure


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Say which extra is to be installed where one of its libraries isn't there."""
    try:
        yield
    except ImportError as error:
        missing = error.name or ""
        if missing.startswith("outbox"):
            raise
        raise Failure(f"{what} needs {missing or error}; {pip_install(extra)}", Code.CONFIG) from error
