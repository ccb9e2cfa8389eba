"""Declare the events of a console: each is one record of the logger ``outbox.console``, and is told to hooks.

A sentence shows what a client has sent with ``%a``, escaped to ASCII, so that nothing that is sent can forge a line.
No event has a query, a body or credentials, which may be secret.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outbox.telemetry.hooks import TelemetryEvent, event


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRequest(TelemetryEvent):
    """An event of a request; ``principal`` is the id of its sender, or None for a stranger."""

    request_id: str
    client: str
    method: str
    path: str
    principal: str | None

    @property
    def shows_traceback(self) -> bool:
        """An exception can quote what a client has sent, over several lines."""
        return False


_REQUEST = "%(method)s %(path)a of %(principal)a from %(client)a (request %(request_id)s)"


@event("console.failed", "console", logging.ERROR, f"{_REQUEST} failed, which is a defect: %(traceback)a")
class RequestFailed(_OfRequest):
    """A request met an unexpected error: a 500, whose page shows the request's id.

    ``traceback`` is its end, as one escaped text.
    """

    traceback: str


@event("console.unavailable", "console", logging.WARNING, f"{_REQUEST} could not be answered now: %(reason)a")
class RequestUnavailable(_OfRequest):
    """A request needed a database, or a connection to it, that could not be had, or took too long: a 503."""

    reason: str


@event("authz.denied", "console", logging.WARNING, f"{_REQUEST} was denied (%(problem)s): %(detail)a")
class RequestDenied(_OfRequest):
    """A request came from a stranger, without the permission, from another site, or after too many failed logins."""

    problem: str
    detail: str

    @property
    def level(self) -> int:
        """INFO where the sender has still to log in; a wrong password or token is an event of its own."""
        return logging.INFO if self.problem == "unauthenticated" else logging.WARNING


@event("console.refused", "console", logging.INFO, f"{_REQUEST} was refused (%(problem)s): %(detail)a")
class RequestRefused(_OfRequest):
    """A request was not valid, was about an unknown thing, or came when the state didn't allow it: other 4xx."""

    problem: str
    detail: str


@event("console.done", "console", logging.INFO, f"{_REQUEST} was done: %(status)d")
class RequestDone(_OfRequest):
    """A request changed something, or had a body revealed; the audit says what."""

    status: int


@event("login.succeeded", "console", logging.INFO, "%(principal)a logged in from %(client)a (request %(request_id)s)")
class LoginSucceeded(_OfRequest):
    """A person has opened a session."""


@event(
    "login.failed",
    "console",
    logging.WARNING,
    "a login of %(principal)a from %(client)a failed (request %(request_id)s)",
)
class LoginFailed(_OfRequest):
    """A password or token was wrong; ``principal`` is the user of that password, if there is one of this name."""


@event("login.ended", "console", logging.INFO, "%(principal)a logged out from %(client)a (request %(request_id)s)")
class LoginEnded(_OfRequest):
    """A person has ended a session."""


@event("console.database_missing", "console", logging.WARNING, "database %(database)a can't be used yet: %(reason)a")
class DatabaseMissing(TelemetryEvent):
    """A database could not be opened, and will be tried again; ``repeated``: as before."""

    database: str
    reason: str
    repeated: bool


@event("console.not_ready", "console", logging.WARNING, "not every database answers: %(reason)a")
class NotReady(TelemetryEvent):
    """``/readyz`` found a database that doesn't answer; ``repeated``: as before."""

    reason: str
    repeated: bool


@event("console.badges_missing", "console", logging.DEBUG, "the numbers in the navigation can't be counted: %(reason)a")
class BadgesMissing(TelemetryEvent):
    """The numbers in the navigation could not be counted; the page goes without them."""

    reason: str
