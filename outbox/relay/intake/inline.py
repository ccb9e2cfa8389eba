"""Handle a message of a broker in the transaction of a loop that isn't ours: stored, and handled exactly once.

The message is stored as an intake stores it, so that nothing is lost when the broker is told. If its handler fails,
what the handler did is undone and the message stays: the workers of its group handle it as they do all others, with
retries, parking and console. An order, a filter, a pause, a rate and an open breaker are for the workers alone to keep:
there, the handler isn't called here at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.consumer.control.gate import Gate
from outbox.consumer.meter import HandlerMeter
from outbox.consumer.sql import group_is_known
from outbox.consumer.start import start_group
from outbox.consumer.subscription import (
    AttemptFailed,
    Entry,
    Subscription,
    TransactionEnded,
    handled,
    run_handler,
    to_entry,
)
from outbox.database.at_commit import after_commit
from outbox.database.dialect import PSYCOPG
from outbox.database.execute import Template, execute
from outbox.database.session import CarrierKind
from outbox.errors import TransactionRequired
from outbox.telemetry.events import InlineFailed
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection, NestedTransaction

    from outbox.relay.intake.intake import Intake, Stored
    from outbox.relay.intake.source import Received
    from outbox.settings import Settings

# Where a worker meets the message in its queue, this row says that it was handled; it has no position yet. One that is
# there already is the workers' affair, or says that the message was handled.
_RECEIVE: Template = Template("""
INSERT INTO {s}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
VALUES (%(group)s, %(id)s, %(topic)s, %(queue)s, 0, 'consumed', 1, substr(sha256(%(body)s::bytea), 1, 16))
ON CONFLICT (consumer_group, message_id) DO NOTHING RETURNING received_at
""")


@dataclass(slots=True)
class InlineReceiver:
    """What takes messages for one group, in transactions of the application's; used by any number of threads.

    ``active`` is entered around the handler.
    """

    subscription: Subscription
    settings: Settings
    intake: Intake
    active: Callable[[], AbstractContextManager[object]]
    # Is the group known to have begun?
    _has_begun: bool = field(default=False, init=False)

    def receive(self, connection: Connection, received: Received) -> bool:
        """Store a message, and have its handler called, in the transaction of ``connection``; tell whether it was.

        Raises:
            TransactionRequired: the handler has ended the transaction: the broker mustn't be told.
            InvalidHandler: as of `Intake.id_of`.
        """
        subscription, schema = self.subscription, self.settings.schema
        self._begin_group(connection)
        (stored,) = self.intake.store(connection, schema, [received])
        if stored.is_refused or not self._is_for_here(connection):
            return False
        savepoint = connection.begin_nested()
        try:
            entry = self._begun(connection, stored)
            if entry is not None:
                with self.active():
                    run_handler(connection, subscription, [entry], 1, HandlerMeter(), 0)
            savepoint.commit()
        except TransactionEnded as ended:
            raise TransactionRequired(f"{subscription.what}: {ended.failure.error}") from ended
        except AttemptFailed as failed:
            _roll_back(savepoint)
            group, topic, reason = subscription.group, subscription.topic, failed.failure.reason
            emit(InlineFailed(group=group, topic=topic, message_id=stored.id, reason=reason, error=failed.__cause__))
            return False
        except BaseException:
            _roll_back(savepoint)
            raise
        if entry is not None:
            after_commit(connection, lambda: emit(handled(subscription.queue(schema, 0), [entry], 1)))
        return entry is not None

    def _begin_group(self, connection: Connection) -> None:
        """Have a new group begin before its first message is sent here, by its ``start``."""
        if not self._has_begun:
            pair = self.subscription.group, self.subscription.feed
            self._has_begun = execute(connection, group_is_known(self.settings.schema, *pair))[0][0][0]
            if not self._has_begun:  # from the next transaction on
                start_group(connection, connection, self.subscription, self.settings.schema)

    def _is_for_here(self, connection: Connection) -> bool:
        """Tell whether a handler may be called out of turn, and can be by this connection."""
        subscription, is_async = self.subscription, connection.dialect.is_async
        filters = subscription.tags, subscription.keys, subscription.headers
        if subscription.ordered or any(each is not None for each in filters) or connection.dialect.driver != PSYCOPG:
            return False
        # Of an asynchronous connection, cursors are asynchronous too.
        if subscription.is_async != is_async and (not is_async or subscription.takes.kind is CarrierKind.CURSOR):
            return False
        gate = Gate(subscription, self.settings, ())
        return not gate.shut(connection) and not gate.limited

    def _begun(self, connection: Connection, stored: Stored) -> Entry | None:
        """Write the inbox row of a message that is to be handled; None if the group has had it, or has it just now."""
        subscription, options, body = self.subscription, stored.outgoing.options, bytes(stored.outgoing.body)
        of = subscription.queue(self.settings.schema, 0)
        # Its digest is that of what is stored, which isn't known here where it is stored compressed.
        is_compressed = 0 < self.settings.compress_above < len(body)
        values = {"group": of.group, "id": stored.id, "topic": of.topic, "queue": of.queue}
        (rows,) = execute(connection, _RECEIVE(of.schema, **values, body=None if is_compressed else body))
        if not rows:
            return None
        now, headers = rows[0][0], json.dumps(options["headers"])
        row = (0, stored.id, 1, now, options["key"], options["tag"], headers, options["content_type"], body, now, True)
        return to_entry(row, subscription, of.queue)


def _roll_back(savepoint: NestedTransaction) -> None:
    """Undo what a handler did, unless that has rolled its session back by itself."""
    if savepoint.is_active:
        savepoint.rollback()
