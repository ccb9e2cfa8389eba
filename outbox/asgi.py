"""A transaction for each HTTP request, committed before its response begins: FastAPI, Starlette, Litestar, any ASGI.

An application that commits after its response was sent (code after the ``yield`` of a FastAPI dependency runs so late)
answers with success, and a COMMIT that fails then leaves the client with an order that isn't there.
`TransactionMiddleware` commits when the application begins its response, and before anything of that goes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from outbox.errors import TransactionRequired

if TYPE_CHECKING:
    from outbox.app import Outbox

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
