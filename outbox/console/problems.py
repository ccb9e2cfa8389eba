"""Errors as problem details (RFC 9457): every one names what failed and, where there is one, the mend.

Which error becomes which problem.

Log lines of the console: a constant word, and facts as JSON, so that nothing a caller sends can forge a line.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outbox.database.failure import kind_of
from outbox.errors import AlreadyDecided, CompensationRefused, ErrorKind, InvalidRequest, OutboxError, SelectorChanged

MEDIA_TYPE = "application/problem+json"

#: What kinds of problems there are: slug, status, title.
KINDS: Mapping[str, tuple[int, str]] = {
    "bad-page-token": (400, "The page token isn't one of this list"),
    "unauthenticated": (401, "Nobody is logged in"),
    "forbidden": (403, "Not allowed"),
    "read-only": (403, "The console only reads"),
    "host-not-allowed": (403, "The console isn't served under this name"),
    "cross-origin": (403, "The request comes from another site"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "This can't be done here"),
    "state-conflict": (409, "The state doesn't allow it"),
    "already-resolved": (409, "Decided before"),
    "compensation-refused": (409, "The local transaction can't be rolled back"),
    "selector-changed": (409, "The selection has changed"),
    "version-mismatch": (412, "It has changed meanwhile"),
    "too-large": (413, "Too large"),
    "unsupported-media-type": (415, "The body must be JSON"),
    "invalid": (422, "The request isn't valid"),
    "too-many-attempts": (429, "Too many failed logins"),
    "internal": (500, "Something went wrong"),
    "unavailable": (503, "Not available now"),
    "query-timeout": (503, "The query took too long"),
}


_OF_STATUS = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    409: "state-conflict",
    412: "version-mismatch",
    413: "too-large",
    415: "unsupported-media-type",
    429: "too-many-attempts",
    503: "unavailable",
}


@dataclass
class Problem(Exception):
    """A request that is refused or has failed; ``slug`` is one of `KINDS`, ``errors`` name fields.

    ``headers`` go with the answer. ``status`` and ``title`` are those of the slug where they aren't given.
    """

    slug: str
    detail: str
    errors: Sequence[Mapping[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    title: str = ""

    def __post_init__(self) -> None:
        status, title = KINDS[self.slug]
        self.status = self.status or status
        self.title = self.title or title
        super().__init__(self.detail)

    def __str__(self) -> str:
        return f"{self.status} {self.slug}: {self.detail}"

    def as_dict(self, *, instance: str, request_id: str) -> dict[str, Any]:
        """Return the members of the problem document."""
        document: dict[str, Any] = {
            "type": f"urn:outbox:problem:{self.slug}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            "request_id": request_id,
        }
        return document | ({"errors": [dict(error) for error in self.errors]} if self.errors else {})


def as_json(problem: Problem, *, instance: str, request_id: str) -> Response:
    """Return a problem as ``application/problem+json``."""
    content = json.dumps(problem.as_dict(instance=instance, request_id=request_id))
    return Response(content, problem.status, headers=dict(problem.headers), media_type=MEDIA_TYPE)


def of_status(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Problem:
    """Return the problem of an HTTP status that somebody's dependency answered with."""
    slug = _OF_STATUS.get(status, "internal" if status >= 500 else "invalid")
    title = HTTPStatus(status).phrase if status in {s.value for s in HTTPStatus} else ""
    return Problem(slug, detail, headers=headers or {}, status=status, title="" if status in _OF_STATUS else title)


def unauthenticated(challenges: Sequence[str], detail: str = "") -> Problem:
    """Return the problem of a request by nobody that is known; ``challenges`` say how to log in."""
    # One of them: where there are several in a header, Chromium understands none, and asks nobody for a password.
    told = next((each for each in challenges if each.startswith("Basic")), next(iter(challenges), None))
    headers = {"WWW-Authenticate": told} if told else {}
    return Problem("unauthenticated", detail or "log in, or send credentials", headers=headers)


def forbidden(principal: str, permission: str) -> Problem:
    """Return the problem of a request by somebody who may not do it."""
    return Problem(
        "forbidden", f"{principal!r} doesn't have the permission {str(permission)!r}; ask whoever runs the console"
    )


def read_only() -> Problem:
    """Return the problem of an act in a console that only reads."""
    return Problem(
        "read-only",
        "this console only reads (read_only, OUTBOX_CONSOLE_READ_ONLY); use one that doesn't, or the command line",
    )


_RETRY = {"Retry-After": "5"}

#: The problem of each kind of error. Of the kinds that aren't here only the log says more than "internal".
_SLUGS = {
    ErrorKind.USAGE: "invalid",
    ErrorKind.NOT_FOUND: "not-found",
    ErrorKind.REFUSED: "state-conflict",
    ErrorKind.CONFLICT: "state-conflict",
    ErrorKind.STALE: "version-mismatch",
    ErrorKind.TOO_LARGE: "too-large",
    ErrorKind.READ_ONLY: "read-only",
    ErrorKind.SCHEMA: "unavailable",
    ErrorKind.BUSY: "unavailable",
    ErrorKind.UNAVAILABLE: "unavailable",
    ErrorKind.TIMEOUT: "query-timeout",
}
#: Conflicts that a client may want to tell apart.
_CONFLICTS: Mapping[type[OutboxError], str] = {
    AlreadyDecided: "already-resolved",
    CompensationRefused: "compensation-refused",
    SelectorChanged: "selector-changed",
}
#: What the console says of an error of the database, whose own words may show its address.
_DATABASE_SAYS = {
    ErrorKind.TIMEOUT: "the database stopped the query, since it took too long; narrow the time range, or filter by "
    "topic or key",
    ErrorKind.CONFLICT: "another transaction holds a lock; try again in a while",
    ErrorKind.USAGE: "the database can't hold one of the values that were sent",
    ErrorKind.UNAVAILABLE: "a database can't be reached; see the log of the console, and that the server runs and "
    "lets it in",
}
_LATER = frozenset({ErrorKind.BUSY, ErrorKind.SCHEMA, ErrorKind.TIMEOUT, ErrorKind.UNAVAILABLE})


def as_problem(error: Exception) -> Problem | None:
    """Return the problem of an error; None for an unexpected one."""
    match error:
        case Problem():
            return error
        case HTTPException():
            return of_status(error.status_code, str(error.detail), error.headers)
        case RequestValidationError():
            return Problem("invalid", "some of what was sent isn't valid", errors=_fields(error.errors()))
        case OutboxError():
            return _of_outbox(error)
        case PoolTimeout():
            return Problem("unavailable", "all of the console's connections are busy; try again", headers=_RETRY)
    return _of_database(kind_of(error))


def _of_outbox(error: OutboxError) -> Problem | None:
    slug = next((slug for each, slug in _CONFLICTS.items() if isinstance(error, each)), _SLUGS.get(error.kind))
    if slug is None:
        return None
    field = error.field if isinstance(error, InvalidRequest) else None
    if field == "page_token":
        slug = "bad-page-token"
    return Problem(
        slug,
        str(error),
        errors=[_field(field, str(error))] if field else [],
        headers=_RETRY if error.kind in _LATER else {},
    )


def _of_database(kind: ErrorKind | None) -> Problem | None:
    if kind is ErrorKind.READ_ONLY:
        return read_only()
    if kind is None or kind not in _DATABASE_SAYS:
        return None
    return Problem(_SLUGS[kind], _DATABASE_SAYS[kind], headers={} if kind is ErrorKind.USAGE else _RETRY)


def _fields(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return where what is wrong; without the values, which may be secret."""
    return [_field(".".join(map(str, error["loc"])), str(error["msg"])) for error in errors]


def _field(name: str, detail: str) -> dict[str, str]:
    return {"field": name, "detail": detail}


logger = logging.getLogger("outbox.console")
logger.addHandler(logging.NullHandler())


def log(level: int, event: str, **facts: object) -> None:
    """Log an event with its facts: escaped to ASCII, and long texts cut."""
    if logger.isEnabledFor(level):
        cut = {name: value[:4000] if isinstance(value, str) else value for name, value in facts.items()}
        logger.log(level, "%s %s", event, json.dumps(cut, default=str), extra={"event": event})


def log_failure(error: BaseException, **facts: object) -> None:
    """Log an error that nobody expected; its traceback is one escaped text, the end of it if it is long."""
    text = "".join(traceback.format_exception(error))
    log(logging.ERROR, "console.failed", traceback=text[-4000:], **facts)
