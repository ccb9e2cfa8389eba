"""Handle a message of a broker in the transaction of a loop that isn't ours: stored, and handled exactly once.

The message is stored as an intake stores it, so that nothing is lost when the broker is told. If its handler fails,
what the handler did is undone and the message stays: the workers of its group handle it as they do all others, with
retries, parking and console. An order, a filter, a pause, a rate and an open breaker are for the workers alone to keep:
there, the handler isn't called here at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from outbox.consumer.control.gate import Gate
from outbox.consumer.meter import HandlerMeter
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
from outbox.errors import TransactionRequired
from outbox.telemetry.events import BatchUndone
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection, NestedTransaction

    from outbox.relay.intake.intake import Intake, Stored
    from outbox.relay.intake.source import Received
    from outbox.settings import Settings

# Where a worker meets the message in its queue, this row says that it was handled. It has no position yet.
_RECEIVE: Template = Template("""
SELECT clock_timestamp() FROM (SELECT {s}.receive(%(group)s, %(id)s, %(topic)s, %(queue)s, 0, %(body)s) AS new) r
 WHERE r.new
""")


def receive(
    connection: Connection, subscription: Subscription, settings: Settings, intake: Intake, received: Received
) -> bool:
    """Store a message, and have its handler called, in the transaction of ``connection``; tell whether it was.

    Raises:
        TransactionRequired: the handler has ended the transaction: the broker mustn't be told.
        InvalidHandler: as of `Intake.id_of`.
    """
    (stored,) = intake.store(connection, settings.schema, [received])
    if stored.is_refused or not _is_for_here(connection, subscription, settings):
        return False
    savepoint = connection.begin_nested()
    try:
        entry = _begun(connection, subscription, settings, stored)
        if entry is not None:
            run_handler(connection, subscription, [entry], 1, HandlerMeter(), 0)
        savepoint.commit()
    except TransactionEnded as ended:
        raise TransactionRequired(f"{subscription.what}: {ended.failure.error}") from ended
    except AttemptFailed as failed:
        _roll_back(savepoint)
        group, topic, reason = subscription.group, subscription.topic, failed.failure.reason
        emit(BatchUndone(group=group, topic=topic, queue=0, size=1, reason=reason, error=failed.__cause__))
        return False
    except BaseException:
        _roll_back(savepoint)
        raise
    if entry is not None:
        of = subscription.queue(settings.schema, 0)
        after_commit(connection, lambda: emit(handled(of, [entry], 1)))
    return entry is not None


def _roll_back(savepoint: NestedTransaction) -> None:
    """Undo what a handler did, unless that has rolled its session back by itself."""
    if savepoint.is_active:
        savepoint.rollback()


def _is_for_here(connection: Connection, subscription: Subscription, settings: Settings) -> bool:
    """Tell whether a handler may be called out of turn, and outside of a worker."""
    filters = subscription.tags, subscription.keys, subscription.headers
    if subscription.ordered or any(each is not None for each in filters) or connection.dialect.driver != PSYCOPG:
        return False
    gate = Gate(subscription, settings, ())
    return not gate.shut(connection) and not gate.limited


def _begun(connection: Connection, subscription: Subscription, settings: Settings, stored: Stored) -> Entry | None:
    """Write the inbox row of a message that is to be handled; None if the group has had it, or has it just now."""
    of, options, body = subscription.queue(settings.schema, 0), stored.outgoing.options, bytes(stored.outgoing.body)
    # Its digest is that of what is stored, which isn't known here where it is stored compressed.
    is_compressed = 0 < settings.compress_above < len(body)
    values = {"group": of.group, "id": stored.id, "topic": of.topic, "queue": of.queue}
    (rows,) = execute(connection, _RECEIVE(settings.schema, **values, body=None if is_compressed else body))
    if not rows:
        return None
    now, headers = rows[0][0], json.dumps(options["headers"])
    row = (0, stored.id, 1, now, options["key"], options["tag"], headers, options["content_type"], body, now, True)
    return to_entry(row, subscription, of.queue)
