"""Call a handler inside the running transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.consumer.outcome import Failure, failure_from, failure_of
from outbox.consumer.subscription import Subscription
from outbox.model import Message
from outbox.store.execute import is_lost

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session


class HandlerSession:
    """One session for the handlers of one transaction, joined to it.

    A handler can't commit: ``session.commit()`` only flushes, the framework commits inbox row, business change
    and offset together. A ``session.rollback()`` undoes the transaction, and counts as a failure.
    """

    def __init__(self, connection: Connection, subscription: Subscription) -> None:
        self._connection = connection
        self._subscription = subscription
        self._is_async = subscription.is_async
        self._given: Any = None
        self._session: Session | None = None

    def handle(self, argument: Message | list[Message]) -> Failure | None:
        """Call the handler with a message or, where it takes batches, a list; return its failure, if it failed.

        Raises:
            Exception: the connection was lost, which is nobody's failure and costs no attempt.
        """
        transaction = self._connection.get_transaction()
        try:
            answer = self._subscription.handler(argument, self._open())
            if self._is_async:
                from sqlalchemy.util import await_only  # noqa: PLC0415

                answer = await_only(answer)
            if self._session is not None:
                self._session.flush()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        if transaction is None or not transaction.is_active:
            return Failure("the handler rolled the session back; let it raise, or return Retry, Park or Skip instead")
        return failure_of(answer)

    def finish(self) -> Failure | None:
        """Flush, and hand what the handlers sent to the connection, to be written at its commit."""
        try:
            if self._session is not None:
                self._session.commit()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        return None

    def close(self) -> None:
        """Forget the session; its transaction is the caller's."""
        if self._session is not None:
            self._session.close()

    def _open(self) -> Any:
        if self._given is None:
            from sqlalchemy.orm import Session  # noqa: PLC0415

            if self._is_async:
                from sqlalchemy.ext.asyncio import AsyncSession  # noqa: PLC0415

                self._given = AsyncSession(join_transaction_mode="rollback_only", expire_on_commit=False)
                self._session = self._given.sync_session
                self._session.bind = self._connection
            else:
                self._given = self._session = Session(self._connection, join_transaction_mode="rollback_only")
        return self._given


def commit(connection: Connection) -> None:
    """Commit the transaction that handlers ran in; if that fails, end it, so that the connection can be used again."""
    transaction = connection.get_transaction()
    assert transaction is not None  # noqa: S101
    try:
        transaction.commit()
    except BaseException:
        # SQLAlchemy leaves a transaction whose COMMIT failed on its connection, also at the end of a with block.
        transaction.rollback()
        raise
