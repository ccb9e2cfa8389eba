"""How a group's inbox is asked: in its database, or by the service that its consumer mounts.

A worker asks in this order: first how far the group has read, then what its inbox says. A message that the group had
read past when the first was answered has its inbox row when the second is: both were committed together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import OK, PERMANENT_REDIRECT, TEMPORARY_REDIRECT, UNAUTHORIZED
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.dialect import url_of
from outbox.database.engines import address_of, connect, discard, engine_of
from outbox.database.execute import Statement, execute, read_source
from outbox.database.identity import feed_from, source_identity
from outbox.delivery import sql
from outbox.errors import SchemaError
from outbox.message.model import Status
from outbox.text import database_address, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.delivery.known_group import KnownGroup

#: How long (seconds) a status service may take to answer.
_PATIENCE = 30.0
_REDIRECTS = {TEMPORARY_REDIRECT, PERMANENT_REDIRECT}


class QueueProgress(NamedTuple):
    """How far a group has read a queue: what lies up to ``start`` was never meant for it.

    ``skipped`` are ranges that an operator had it skip: after a position, up to another one.
    """

    queue: int
    start: int
    position: int
    skipped: tuple[tuple[int, int], ...] = ()

    def has_skipped(self, position: int) -> bool:
        """Tell whether the group will never read what stands at a position."""
        return any(after < position <= end for after, end in self.skipped)


class InboxStatus(NamedTuple):
    """What an inbox says of a message, and the kind of its error."""

    status: Status
    reason: str | None


class InboxUnavailable(Exception):
    """An inbox can't be asked now; the text says which, without a secret."""


class Inbox(Protocol):
    """The inbox of a group, as its producer sees it."""

    def progress(self) -> list[QueueProgress]:
        """Return how far the group has read each queue; nothing while it has read none."""

    def statuses(self, ids: Sequence[UUID]) -> Mapping[UUID, InboxStatus]:
        """Return what it says of these messages, of those that it has."""

    def close(self) -> None:
        """Give back its connections."""


class DatabaseInbox:
    """An inbox in a database that the producer's worker reaches."""

    def __init__(self, group: KnownGroup, own: Connection, schema: str, source: UUID) -> None:
        consumer = group.consumer
        is_own = consumer is None or address_of(consumer) == address_of(own.engine.url)
        url = own.engine.url if consumer is None else url_of(consumer)
        self._name = database_address(url)
        self._own = own if is_own else None
        self._connect = partial(_connect, consumer)
        self._connection = self._own
        self._schema = schema
        self._group, self._topic, self._source = group.group, group.topic, source

    def progress(self) -> list[QueueProgress]:
        """Read it in the database."""
        rows = self._read(lambda here: sql.progress(self._schema, group=self._group, topic=self._feed(here)))
        return [
            QueueProgress(queue, start, position, tuple(zip(afters, ends, strict=True)))
            for queue, start, position, afters, ends in rows
        ]

    def statuses(self, ids: Sequence[UUID]) -> Mapping[UUID, InboxStatus]:
        """Read it in the database."""
        rows = self._read(lambda _: sql.statuses(self._schema, ids=list(ids), group=self._group))
        return {id_: InboxStatus(Status(status), reason) for id_, status, reason in rows}

    def close(self) -> None:
        """Give the connection back; the pass's own stays."""
        connection, self._connection = self._connection, self._own
        if connection is not None and connection is not self._own:
            discard(connection)

    def _feed(self, connection: Connection) -> str:
        """Return the feed that the group has of this producer's topic."""
        return feed_from(connection, self._schema, self._topic, self._source)

    def _read(self, statement: Callable[[Connection], Statement]) -> list[Any]:
        try:
            if self._connection is None:
                self._connection = self._connect()
            with self._connection.begin():
                return execute(self._connection, statement(self._connection))[0]
        except (DBAPIError, SchemaError) as error:
            if self._own is not None and isinstance(error, DBAPIError):
                raise  # the pass itself is lost
            first, _, _ = summary_of(getattr(error, "orig", None) or error).partition("\n")
            raise InboxUnavailable(f"database {self._name}: {first}") from error


def _connect(bind: Any) -> Connection:
    return connect(engine_of(bind))


class ServiceInbox:
    """An inbox behind a status service (`outbox.asgi.InboxStatusService`)."""

    def __init__(self, group: KnownGroup, source: UUID) -> None:
        import httpx  # noqa: PLC0415 - an extra; the declaration has looked whether it is there

        self._group, self._source = group, source
        self._url = str(group.status_url)
        self._errors, self._late = (httpx.HTTPError, httpx.InvalidURL), (httpx.ReadTimeout, httpx.WriteTimeout)
        # No redirects: the token is for this address alone.
        self._client = httpx.Client(
            timeout=_PATIENCE, follow_redirects=False, headers={"Authorization": f"Bearer {group.token}"}
        )

    def progress(self) -> list[QueueProgress]:
        """Ask the service about no message."""
        return self._ask(())[0]

    def statuses(self, ids: Sequence[UUID]) -> Mapping[UUID, InboxStatus]:
        """Ask the service."""
        return self._ask(ids)[1]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, ids: Sequence[UUID]) -> tuple[list[QueueProgress], dict[UUID, InboxStatus]]:
        question = {"topic": self._group.topic, "group": self._group.group, "ids": [str(each) for each in ids]}
        question["source"] = str(self._source)
        service = f"the status service of group {self._group.group}"
        try:
            response = self._client.post(self._url, json=question)
            # What FastAPI and Starlette mount at a path answers at that path with a slash, and redirects others there.
            if response.status_code in _REDIRECTS and not self._url.endswith("/"):
                self._url += "/"
                response = self._client.post(self._url, json=question)
        except self._errors as error:
            # Its text may have the URL. Of fewer messages, it may know in time.
            cause = TimeoutError(type(error).__name__) if isinstance(error, self._late) else error
            raise InboxUnavailable(f"{service} can't be reached: {type(error).__name__}") from cause
        if response.status_code == UNAUTHORIZED:
            raise InboxUnavailable(f"{service} doesn't know the token: is it the same on both sides?")
        if response.status_code != OK:
            raise InboxUnavailable(f"{service} answered {response.status_code}")
        try:
            return _read_answer(response.json())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InboxUnavailable(f"{service} gave an answer that can't be read: is its URL right?") from error


def _read_answer(answer: Any) -> tuple[list[QueueProgress], dict[UUID, InboxStatus]]:
    queues = [
        QueueProgress(
            int(each["queue"]),
            int(each["start"]),
            int(each["position"]),
            # An older service knows of none.
            tuple((int(after), int(end)) for after, end in each.get("skipped", ())),
        )
        for each in answer["queues"]
    ]
    if [each.queue for each in queues] != list(range(len(queues))):
        raise ValueError("the queues aren't numbered from 0 on")
    statuses = {
        UUID(id_): InboxStatus(Status(each["status"]), each["reason"]) for id_, each in answer["statuses"].items()
    }
    return queues, statuses


def inbox_of(group: KnownGroup, own: Connection, schema: str) -> Inbox:
    """Return the inbox of a known group; ``own`` is the connection of the pass, on the producer's database."""
    ((source, _),) = read_source(own, source_identity(schema))[0]
    return ServiceInbox(group, source) if group.status_url is not None else DatabaseInbox(group, own, schema, source)
