"""Which error becomes which problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from outbox.console.problems import Problem, of_status, read_only
from outbox.errors import (
    ActRefused,
    AlreadyDecided,
    CheckRefused,
    CompensationRefused,
    DecisionRefused,
    HalfNotFound,
    InvalidRequest,
    MessageNotFound,
    NotParked,
    OperationNotFound,
    OperationTooLarge,
    OutboxBusy,
    OutboxError,
    RecallRefused,
    SchemaError,
    SelectorChanged,
    UnknownDatabase,
    VersionMismatch,
)

_RETRY = {"Retry-After": "5"}

_SLUGS: Sequence[tuple[tuple[type[OutboxError], ...], str]] = (
    ((MessageNotFound, OperationNotFound, HalfNotFound), "not-found"),
    ((AlreadyDecided,), "already-resolved"),
    ((CompensationRefused,), "compensation-refused"),
    ((VersionMismatch,), "version-mismatch"),
    ((SelectorChanged,), "selector-changed"),
    ((OperationTooLarge,), "too-large"),
    ((ActRefused, NotParked, RecallRefused, CheckRefused, DecisionRefused), "state-conflict"),
)

#: Of the classes of SQLSTATE: connection exception, invalid authorization, invalid catalog name; insufficient
#: resources and operator intervention, but for a statement that was cancelled.
_UNAVAILABLE = re.compile(r"08|28|3D|53|57P")


def as_problem(error: Exception) -> Problem | None:
    """Return the problem to tell of; None for an error that nobody expected."""
    problem: Problem | None = None
    match error:
        case Problem():
            problem = error
        case HTTPException():
            problem = of_status(error.status_code, str(error.detail), error.headers)
        case RequestValidationError():
            problem = Problem("invalid", "some of what was sent isn't valid", errors=_fields(error.errors()))
        case InvalidRequest():
            slug = "bad-page-token" if error.field == "page_token" else "invalid"
            problem = Problem(slug, str(error), errors=[_field(error.field, str(error))] if error.field else [])
        case UnknownDatabase():
            problem = Problem("invalid", str(error), errors=[_field("database", str(error))])
        case SchemaError() | OutboxBusy():
            problem = Problem("unavailable", str(error), headers=_RETRY)
        case OutboxError():
            slugs = (slug for kinds, slug in _SLUGS if isinstance(error, kinds))
            problem = next((Problem(slug, str(error)) for slug in slugs), None)
        case PoolTimeout():
            problem = Problem("unavailable", "all of the console's connections are busy; try again", headers=_RETRY)
        case DBAPIError():
            problem = _of_database(error)
    return problem


def _of_database(error: DBAPIError) -> Problem | None:
    state = getattr(error.orig, "sqlstate", None) or ""
    if state == "57014":
        return Problem(
            "query-timeout",
            "the database stopped the query, since it took too long; narrow the time range, or filter by topic or key",
            headers=_RETRY,
        )
    if state in {"55P03", "40P01", "40001"}:
        return Problem("state-conflict", "another transaction is at it; try again in a while", headers=_RETRY)
    if state == "25006":
        return read_only()
    if state.startswith("22"):
        return Problem("invalid", "the database can't hold one of the values that were sent")
    # Where a connection can't even be made there is no state; what the driver refuses to send has none either.
    if error.connection_invalidated or _UNAVAILABLE.match(state) or _is_lost(error, state):
        return Problem(
            "unavailable",
            "a database can't be reached; see the log of the console, and that the server runs and lets it in",
            headers=_RETRY,
        )
    return None


def _is_lost(error: DBAPIError, state: str) -> bool:
    return not state and type(error.orig).__name__ in {"OperationalError", "ConnectionTimeout", "InterfaceError"}


def _fields(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return where what is wrong; without the values, which may be secret."""
    return [_field(".".join(map(str, error["loc"])), str(error["msg"])) for error in errors]


def _field(name: str, detail: str) -> dict[str, str]:
    return {"field": name, "detail": detail}
