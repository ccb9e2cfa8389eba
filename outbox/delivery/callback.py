"""Run a callback of the producer's: in one transaction with the delivery that it is about, once for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.database.execute import execute
from outbox.database.session import JoinedSession, attempt, commit
from outbox.database.sql import plan_by_index, wait_at_most
from outbox.delivery import sql
from outbox.delivery.known_group import DeliveryCallback, KnownGroup
from outbox.delivery.sql import NewDelivery
from outbox.message.answer import CALLBACK
from outbox.message.model import Counts, Delivery, DeliveryStatus, Message, read_headers
from outbox.settings import Settings
from outbox.telemetry.hooks import Confirming, observed

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: How long (seconds) a statement of the callback's may wait for a lock.
_PATIENCE = 10.0


class CallbackFailed(Exception):
    """The callback didn't succeed; all that it did is undone."""


@dataclass(slots=True, eq=False)
class CallbackRun:
    """One run of a callback, on a connection of its own.

    ``done`` tells that all is committed, ``overtaken`` that there is nothing to do (another worker has called back, or
    the message is pruned), ``error`` how it failed.
    """

    callback: DeliveryCallback
    settings: Settings
    group: KnownGroup
    row: NewDelivery
    done: bool = False
    overtaken: bool = False
    error: BaseException | None = None

    def hold(self, connection: Connection, _: Connection) -> Counts:
        """Run it on a connection that isn't in a transaction.

        Raises:
            Exception: the connection was lost: whether it committed isn't known.
        """
        self.error = attempt(connection, self._perform)
        return Counts()

    def _perform(self, connection: Connection) -> None:
        schema, row, group = self.settings.schema, self.row, self.group
        # The row first: a second caller waits here for the first, and finds its number taken.
        *_, new, messages = execute(
            connection,
            plan_by_index(),
            wait_at_most(_PATIENCE),
            sql.append(schema, group.topic, group.group, [row]),
            sql.message(schema, row.half_id),
        )
        if not new or not messages:
            self.overtaken = True
            return
        queue, position, key, tag, headers, content_type, body, born_at, visible_at = messages[0]
        headers, encoding = read_headers(headers)
        message = Message(
            row.half_id,
            *(group.topic, queue, position, key, tag, content_type, body, born_at, visible_at),
            headers=headers,
            model=self.callback.model,
            codecs=self.callback.codecs,
            encoding=encoding,
        )
        delivery = Delivery(message, group.group, DeliveryStatus(row.status), row.reason)
        joined = JoinedSession(connection, is_async=self.callback.is_async)
        try:
            answer = observed(Confirming(delivery), joined.call, self.callback.function, delivery)
            joined.accept(answer, CALLBACK, CallbackFailed)
        finally:
            joined.close()
        commit(connection)
        self.done = True
