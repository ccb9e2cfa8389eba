"""What an ASGI application (FastAPI, Starlette, Litestar, any) mounts: a transaction for each request, inbox statuses.

A transaction for each HTTP request is committed before its response begins. An application that commits after its
response was sent (code after the ``yield`` of a FastAPI dependency runs so late) answers with success, and a COMMIT
that fails then leaves the client with an order that isn't there. `TransactionMiddleware` commits when the application
begins its response, and before anything of that goes out.

A producer that doesn't reach the consumer's database learns from `InboxStatusService` what became of its messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.engines import connect, discard, engine_of
from outbox.database.execute import execute
from outbox.database.identity import feed_from
from outbox.database.sql import read_only
from outbox.delivery import sql
from outbox.errors import InvalidSettings, SchemaError, TransactionRequired

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from outbox.app import Outbox

logger: logging.Logger = logging.getLogger("outbox.delivery")

# Each framework has ASGI types of its own, which are no subtypes of each other.
Application = Callable[[Any, Any, Any], Awaitable[None]]

#: The first status that tells of a failure: what the request did is rolled back.
_FAILURE = 400


class TransactionMiddleware:
    """Gives each request that asks for it (`request_session`) one session, in one transaction on an Outbox's database.

    A response below 400 commits it, any other one rolls it back, and so does an exception. If the COMMIT fails, nothing
    of the response has gone out: the error is raised to the server, which answers with 500. Requests that ask for no
    session cost nothing.
    """

    def __init__(self, app: Application, outbox: Outbox) -> None:
        self.app = app
        self.outbox = outbox

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request; whatever is no HTTP request is passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        transaction = _RequestTransaction(self.outbox)

        async def send_after_commit(event: Any) -> None:
            if event["type"] == "http.response.start":
                await transaction.end(commit=event["status"] < _FAILURE)
            await send(event)

        token = _current.set(transaction)
        try:
            await self.app(scope, receive, send_after_commit)
        except Exception:
            # A framework that has begun a response may tell of its own trouble with that instead.
            if transaction.failure is not None:
                raise transaction.failure from None
            raise
        finally:
            _current.reset(token)
            await asyncio.shield(transaction.end(commit=False))


async def request_session() -> Any:
    """Return the session of the running request: a Session, or an AsyncSession if the Outbox is on an AsyncEngine.

    A dependency, as in ``Depends(request_session)``. It is opened when it is first asked for, and not to be committed:
    the middleware does that.

    Raises:
        TransactionRequired: the application has no `TransactionMiddleware`, or the response has begun.
    """
    transaction = _current.get()
    if transaction is None:
        raise TransactionRequired(
            "no request with a transaction is running here: app.add_middleware(TransactionMiddleware, outbox=outbox)"
        )
    return transaction.open()


class _RequestTransaction:
    """The session of one request, from its first use to the beginning of the response."""

    def __init__(self, outbox: Outbox) -> None:
        self.failure: BaseException | None = None
        self._outbox = outbox
        self._session: Any = None
        self._ended = False

    def open(self) -> Any:
        if self._ended:
            raise TransactionRequired("the response has begun, and with it the transaction of the request has ended")
        if self._session is None:
            self._session = self._outbox.new_session()
        return self._session

    async def end(self, *, commit: bool) -> None:
        """Commit or roll back, and close; what a session is used for later is rolled back at the request's end."""
        commit, self._ended = commit and not self._ended, True
        if self._session is None:
            return
        try:
            if commit:
                await self._call("commit")
        except BaseException as error:
            self.failure = error
            raise
        finally:
            await self._call("close")

    async def _call(self, method: str) -> None:
        call = getattr(self._session, method)
        if hasattr(self._session, "sync_session"):
            await call()
        else:
            await asyncio.to_thread(call)


_current: ContextVar[_RequestTransaction | None] = ContextVar("outbox_request", default=None)


# --- the status of an inbox ------------------------------------------------------------------------------------------

#: As many messages can be asked about at once; a question has so many bytes at most.
_MOST_IDS = 10_000
_MOST_BYTES = 1 << 20
#: How long (seconds) a statement may take.
_PATIENCE = 20.0
_SHORTEST_TOKEN = 16


class _Refused(Exception):
    """A question that isn't answered: the status of the response, and why."""

    def __init__(self, status: int, why: str, **headers: str) -> None:
        super().__init__(why)
        self.status = status
        self.headers: dict[str, str] = headers


class InboxStatusService:
    """Answers a producer what became of its messages in the inbox of an Outbox's database, by HTTP.

    An ASGI application, to be mounted where the producer's ``status_url`` (`Outbox.known_group`) says::

        app.mount("/inbox/status", InboxStatusService(outbox, token=os.environ["STATUS_TOKEN"]))

    ``POST`` ``{"topic": …, "group": …, "source": …, "ids": […]}`` with ``Authorization: Bearer <token>`` is answered by
    ``queues``, how far the group has read each, and ``statuses`` of those of the messages that its inbox has: no body,
    no key. ``source`` is the id of the producer's database.
    A caller without a token learns nothing. ``token`` may be several, so that one can be replaced while both count. It
    answers about the groups that consume by this Outbox, and those of ``groups``.

    Raises:
        InvalidSettings: no token, or one of fewer than 16 characters.
    """

    def __init__(self, outbox: Outbox, *, token: str | Collection[str], groups: Collection[str] = ()) -> None:
        tokens = [token] if isinstance(token, str) else list(token)
        if not tokens or any(not isinstance(each, str) or len(each) < _SHORTEST_TOKEN for each in tokens):
            raise InvalidSettings(
                f"InboxStatusService needs a token of at least {_SHORTEST_TOKEN} characters; make one by: "
                "python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        self.outbox = outbox
        self._digests = [_digest(each.encode()) for each in tokens]
        self._groups = frozenset([groups] if isinstance(groups, str) else groups)
        self._engine: tuple[object, Engine] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request; whatever is no HTTP request is left alone."""
        if scope["type"] != "http":
            return
        headers: dict[str, str] = {}
        try:
            self._check(scope)
            topic, group, ids, source = _read_question(await _read_body(receive))
            if group not in self._groups and all(group != name for _, name in self.outbox.subscriptions):
                raise _Refused(404, f"no group {group!r} consumes here")
            status, answer = 200, await asyncio.to_thread(self._answer, topic, group, ids, source)
        except _Refused as refused:
            status, answer, headers = refused.status, {"error": str(refused)}, refused.headers
        except (DBAPIError, SchemaError) as error:
            logger.warning(
                "a question about an inbox can't be answered: %s",
                getattr(error, "orig", None) or error,
                extra={"outbox_event": "delivery.not_answered"},
            )
            status, answer = 503, {"error": "the inbox can't be read now"}
        raw = json.dumps(answer).encode()
        headers |= {"content-type": "application/json", "content-length": str(len(raw)), "cache-control": "no-store"}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": raw})

    def _check(self, scope: Mapping[str, Any]) -> None:
        """Raise _Refused unless the request has a token; nothing else is told to one without."""
        header = b"".join(value for name, value in scope["headers"] if name.lower() == b"authorization")
        scheme, _, token = header.partition(b" ")
        digest = _digest(token.strip())
        # All are compared, each in constant time: how long it takes tells nothing of a token.
        known = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != b"bearer" or not any(known):
            raise _Refused(401, "give the token: Authorization: Bearer <token>", **{"www-authenticate": "Bearer"})
        if scope["method"] != "POST":
            raise _Refused(405, "only POST is answered", allow="POST")

    def _answer(self, topic: str, group: str, ids: Collection[UUID], source: UUID) -> dict[str, Any]:
        schema = self.outbox.settings.schema
        # The Outbox may be bound anew, or be that of another tenant in each request.
        bind, known = self.outbox.engine, self._engine
        if known is None or known[0] is not bind:
            known = self._engine = bind, engine_of(bind)
        connection = connect(known[1])
        try:
            with connection.begin():
                feed = feed_from(connection, schema, topic, source)
                # In this order, each with a snapshot of its own: what the group had read past has its inbox row.
                _, queues, statuses = execute(
                    connection,
                    read_only(_PATIENCE),
                    sql.progress(schema, topic=feed, group=group),
                    sql.statuses(schema, group=group, ids=list(ids)),
                )
        finally:
            discard(connection)
        return {
            "queues": [
                {
                    "queue": queue,
                    "start": start,
                    "position": position,
                    "skipped": [list(each) for each in zip(afters, ends, strict=True)],
                }
                for queue, start, position, afters, ends in queues
            ],
            "statuses": {str(id_): {"status": status, "reason": reason} for id_, status, reason in statuses},
        }


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


async def _read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event["type"] == "http.request" and event.get("more_body", False)
        if len(body) > _MOST_BYTES:
            raise _Refused(413, f"a question has at most {_MOST_BYTES} bytes")
    return body


def _read_question(body: bytes) -> tuple[str, str, list[UUID], UUID]:
    try:
        question = json.loads(body)
        topic, group, ids = question["topic"], question["group"], [UUID(each) for each in question["ids"]]
        source = UUID(question["source"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        form = '{"topic": "…", "group": "…", "source": "…", "ids": ["…"]}'
        raise _Refused(400, f"a question is {form}, source and ids as UUIDs") from None
    if not isinstance(topic, str) or not isinstance(group, str) or "\0" in topic + group:
        raise _Refused(400, "topic and group are names")
    if len(ids) > _MOST_IDS:
        raise _Refused(400, f"at most {_MOST_IDS} messages can be asked about at once")
    return topic, group, ids, source
