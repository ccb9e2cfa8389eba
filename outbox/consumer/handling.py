"""Call a handler inside the running transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.consumer.outcome import Failure, failure_from, failure_of
from outbox.consumer.subscription import Subscription
from outbox.joined import JoinedSession, wait_for
from outbox.model import Message
from outbox.store.execute import is_lost

if TYPE_CHECKING:
    from sqlalchemy import Connection


class HandlerSession:
    """One session for the handlers of one transaction, joined to it.

    A handler can't commit: ``session.commit()`` only flushes, the framework commits inbox row, business change
    and offset together. A ``session.rollback()`` undoes the transaction, and counts as a failure.
    """

    def __init__(self, connection: Connection, subscription: Subscription) -> None:
        self._connection = connection
        self._subscription = subscription
        self._joined = JoinedSession(connection, is_async=subscription.is_async)

    def handle(self, argument: Message | list[Message]) -> Failure | None:
        """Call the handler with a message or, where it takes batches, a list; return its failure, if it failed.

        Raises:
            Exception: the connection was lost, which is nobody's failure and costs no attempt.
        """
        try:
            answer = self._subscription.handler(argument, self._joined.open())
            if self._subscription.is_async:
                answer = wait_for(answer)
            self._joined.flush()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        if self._joined.rolled_back:
            return Failure("the handler rolled the session back; let it raise, or return Retry, Park or Skip instead")
        return failure_of(answer)

    def finish(self) -> Failure | None:
        """Flush, and hand what the handlers sent to the connection, to be written at its commit."""
        try:
            self._joined.finish()
        except Exception as error:
            if is_lost(self._connection):
                raise
            return failure_from(error)
        return None

    def close(self) -> None:
        """Forget the session; its transaction is the caller's."""
        self._joined.close()
