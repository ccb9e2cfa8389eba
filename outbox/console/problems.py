"""Errors as problem details (RFC 9457): every one names what failed and, where there is one, the mend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outbox.database.execute import kind_of
from outbox.errors import AlreadyDecided, CompensationRefused, ErrorKind, InvalidRequest, OutboxError, SelectorChanged

MEDIA_TYPE = "application/problem+json"

#: What kinds of problems there are: slug, status, title.
KINDS: Mapping[str, tuple[int, str]] = {
    "bad-page-token": (400, "The page token isn't one of this list"),
    "unauthenticated": (401, "Not logged in"),
    "forbidden": (403, "Not allowed"),
    "read-only": (403, "The console only reads"),
    "host-not-allowed": (403, "The console isn't served under this name"),
    "cross-origin": (403, "The request comes from another site"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "This can't be done here"),
    "client-gone": (408, "The client has gone"),
    "state-conflict": (409, "The state doesn't allow it"),
    "already-decided": (409, "Decided before"),
    "compensation-refused": (409, "The local transaction can't be compensated"),
    "selector-changed": (409, "The selection has changed"),
    "version-mismatch": (412, "It has changed meanwhile"),
    "too-large": (413, "Too large"),
    "unsupported-media-type": (415, "The body must be JSON"),
    "invalid": (422, "The request isn't valid"),
    "too-many-attempts": (429, "Too many failed logins"),
    "too-many-searches": (429, "Too many searches at once"),
    "internal": (500, "Something went wrong"),
    "unavailable": (503, "Not available now"),
    "query-timeout": (503, "The query took too long"),
}

#: The first kind of each status; a 400 by FastAPI or by a dependency isn't about a page token.
_OF_STATUS = {status: slug for slug, (status, _) in reversed(list(KINDS.items()))} | {400: "invalid"}


class Problem(HTTPException):
    """A request that is refused or has failed; ``slug`` is one of `KINDS`, ``errors`` name fields.

    ``headers`` go with the answer. ``status`` and ``title`` default to those of the slug.
    """

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        status: int = 0,
        title: str = "",
    ) -> None:
        usual_status, usual_title = KINDS[slug]
        super().__init__(status or usual_status, detail, dict(headers or {}))
        self.slug: str = slug
        self.errors: Sequence[Mapping[str, str]] = errors
        self.title: str = title or usual_title

    @classmethod
    def read_only(cls) -> Problem:
        """Return the problem of an act in a console that only reads."""
        return cls(
            "read-only",
            "this console only reads (read_only, OUTBOX_CONSOLE_READ_ONLY); use one that doesn't, or the command line",
        )

    def as_json(self, *, instance: str, request_id: str) -> Response:
        """Return the problem as ``application/problem+json``."""
        document: dict[str, Any] = {
            "type": f"urn:outbox:problem:{self.slug}",
            "title": self.title,
            "status": self.status_code,
            "detail": self.detail,
            "instance": instance,
            "request_id": request_id,
        }
        document |= {"errors": [dict(error) for error in self.errors]} if self.errors else {}
        return Response(json.dumps(document), self.status_code, headers=dict(self.headers or {}), media_type=MEDIA_TYPE)


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
    AlreadyDecided: "already-decided",
    CompensationRefused: "compensation-refused",
    SelectorChanged: "selector-changed",
}
#: The console's words for an error of the database, whose own words may show its address.
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
            return _of_status(error)
        case RequestValidationError():
            # Without the values, which may be secret.
            fields = [{"field": ".".join(map(str, each["loc"])), "detail": each["msg"]} for each in error.errors()]
            return Problem("invalid", "some of the fields sent aren't valid", errors=fields)
        case OutboxError():
            return _of_outbox(error)
        case PoolTimeout():
            return Problem("unavailable", "all of the console's connections are busy; try again", headers=_RETRY)
    return _of_database(kind_of(error))


def _of_status(error: HTTPException) -> Problem:
    """Return the problem of an HTTP status: by FastAPI, or by a dependency of the application's."""
    status, headers, detail = error.status_code, error.headers, str(error.detail)
    slug = _OF_STATUS.get(status, "internal" if status >= 500 else "invalid")
    if status == 405:
        detail = f"this method can't be used here, only {(headers or {}).get('Allow', 'others')}"
    titles = {each.value: each.phrase for each in HTTPStatus if each == 400 or each not in _OF_STATUS}
    return Problem(slug, detail, headers=headers, status=status, title=titles.get(status, ""))


def _of_outbox(error: OutboxError) -> Problem | None:
    slug = next((slug for each, slug in _CONFLICTS.items() if isinstance(error, each)), _SLUGS.get(error.kind))
    if slug is None:
        return None
    field = error.field if isinstance(error, InvalidRequest) else None
    return Problem(
        "bad-page-token" if field == "page_token" else slug,
        str(error),
        errors=[{"field": field, "detail": str(error)}] if field else [],
        headers=_RETRY if error.kind in _LATER else {},
    )


def _of_database(kind: ErrorKind | None) -> Problem | None:
    if kind is ErrorKind.READ_ONLY:
        return Problem.read_only()
    if kind is None or kind not in _DATABASE_SAYS:
        return None
    return Problem(_SLUGS[kind], _DATABASE_SAYS[kind], headers={} if kind is ErrorKind.USAGE else _RETRY)
