"""Errors as problem details (RFC 9457): every one names what failed and, where there is one, the mend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

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
