"""Order per key: a message that isn't settled holds back the later messages of its key, and no others.

A group with ``ordered="key"`` passes a message that failed, as an unordered one does, and its row remembers the key. It
holds the key until it is consumed, discarded, skipped or quarantined. The later messages of the key that the group
comes to meanwhile are written into the inbox as `waiting`, without a call of the handler.

All follows from the rows, and no worker has to be told: each retry pass looks which row is the first of each key, and
has it due if it was waiting for others. So it doesn't matter by what the message before it was settled: a retry, an
operator, a compensation. What two workers do at the same time:

- A consumer sees that the key is held, while a retry settles the row that holds it. The message waits, is the first of
  its key, and due by the next pass.
- A consumer sees that the key isn't held. Rows of the key are inserted by the holder of its queue's lock, which is this
  consumer; the statements after it see the rows that others inserted before they gave that lock away. Over a growth of
  the topic, the old queue has been consumed before (`outbox.consumer.growth`).
- Two workers retry. The second one sees the first row of the key as unsettled until the first worker has committed.

``turn`` is the order of the rows of one key: positions of different queues can't be compared.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.calling.callback import parked_callback
from outbox.consumer.failure import tell_parked
from outbox.consumer.sql import (
    HOLDS_KEY,
    MARKED_TRANSACTION,
    InboxUpdate,
    keep_earlier,
    last_turn,
    message_by_id,
    of_earlier_passage,
)
from outbox.consumer.subscription import EVERYTHING, event_of, to_entry
from outbox.database.execute import Row, Statement, Template, execute, read_source
from outbox.database.session import begin
from outbox.database.sql import OPEN, REREAD, GroupQueue, jumps, plan_by_index
from outbox.message.model import Status
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.consumer.subscription import Entry, Subscription

_HELD_IN_FEED = f"consumer_group = %(group)s AND topic = %(topic)s AND {HOLDS_KEY}"
#: The condition that an inbox row ``m`` holds back the later messages of its key, as far as its group has read.
_HOLDS = f"{HOLDS_KEY} AND NOT {of_earlier_passage('m')}"

# As in `outbox.consumer.sql.known`: a look-up in the index for each key, also where statistics are old. The first
# condition is one look-up for all, where nothing is held.
_HELD = Template(f"""
SELECT k FROM unnest((SELECT %(keys)s::text[])) k CROSS JOIN LATERAL (
    SELECT FROM {{s}}.consumer_message m
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND order_key = k AND {_HOLDS}
     LIMIT 1) h
 WHERE EXISTS (SELECT FROM {{s}}.consumer_message
                WHERE {_HELD_IN_FEED})
""")

# A row that came in between (a quarantine, the same message in another queue) stays: there is no effect to undo. One of
# an earlier passage is that of a message which is to be handled again.
_WAIT = Template(f"""
INSERT INTO {{s}}.consumer_message AS c (consumer_group, message_id, topic, queue, position, status, attempts,
                                       body_digest, passage, order_key, turn, follows)
SELECT %(group)s, id, %(topic)s, %(queue)s, position, 'waiting', 0, digest, %(passage)s, key,
       {last_turn("m.key")} + row_number() OVER (PARTITION BY key ORDER BY position), true
  FROM unnest(%(ids)s::uuid[], %(positions)s::bigint[], %(digests)s::bytea[], %(keys)s::text[])
       AS m (id, position, digest, key)
 WHERE {MARKED_TRANSACTION}
ON CONFLICT (consumer_group, message_id) DO UPDATE
   SET status = 'waiting', attempts = 0, starts = 0, next_attempt_at = NULL, queue = excluded.queue,
       position = excluded.position, body_digest = excluded.body_digest, last_error = NULL, error_kind = NULL,
       passage = excluded.passage, order_key = excluded.order_key, turn = excluded.turn, follows = true,
       taken_by = NULL, take_id = NULL, changed_at = clock_timestamp()
 WHERE c.message_id = ANY (%(again)s::uuid[]) AND c.passage < excluded.passage
   AND c.status IN {REREAD} AND c.discarded_at IS NULL
""")

# Of a key that is held long, thousands may wait.
_KEYS = jumps("held", "{s}.consumer_message", "order_key", where=_HELD_IN_FEED)
_FIRST_OF_EACH_KEY = f"""
WITH RECURSIVE {_KEYS}, first AS MATERIALIZED (
    SELECT f.* FROM held CROSS JOIN LATERAL (
        SELECT m.message_id, m.order_key, m.status, m.follows FROM {{s}}.consumer_message m
         WHERE consumer_group = %(group)s AND topic = %(topic)s AND {_HOLDS} AND m.order_key = held.order_key
         ORDER BY turn, position, message_id LIMIT 1) f
)"""

_FIRST_OF_KEY = f"""
WITH first AS MATERIALIZED (
    SELECT message_id, follows FROM {{s}}.consumer_message m
     WHERE consumer_group = %(group)s AND topic = %(topic)s AND {_HOLDS} AND order_key = %(key)s
     ORDER BY turn, position, message_id LIMIT 1
)"""

# The conditions are asked again of a row that another transaction changed meanwhile.
_RELEASE = f"""
UPDATE {{s}}.consumer_message m
   SET status = 'failed', next_attempt_at = clock_timestamp(), attempts = 0, starts = 0, follows = false,
       last_error = NULL, error_kind = NULL, changed_at = clock_timestamp()
  FROM first
 WHERE m.consumer_group = %(group)s AND m.message_id = first.message_id AND first.follows
   AND m.follows AND m.status IN {OPEN} AND m.discarded_at IS NULL
"""
_RELEASE_ALL = Template(_FIRST_OF_EACH_KEY + _RELEASE)
_RELEASE_NEXT = Template(_FIRST_OF_KEY + _RELEASE)

#: What the messages have in common that were parked because of one before them.
SEQUENCE_KIND = "an earlier message of its key is parked"

_PARK_SEQUENCE = Template(f"""{_FIRST_OF_EACH_KEY}
UPDATE {{s}}.consumer_message m
   SET status = 'parked', last_error = concat('message ', first.message_id, ' of its key, before it, is parked'),
       error_kind = %(kind)s, changed_at = clock_timestamp()
  FROM first
 WHERE m.consumer_group = %(group)s AND m.topic = %(topic)s AND m.order_key = first.order_key
   AND first.status = 'parked' AND m.status = 'waiting' AND NOT {of_earlier_passage("m")}
RETURNING m.message_id, m.queue, m.position, m.last_error
""")


def held(of: GroupQueue, entries: Sequence[Entry]) -> list[Statement]:
    """Read which keys of messages that the group takes are held back, in any queue. Rows: ``(key,)``."""
    keys = list(dict.fromkeys(entry.key for entry in entries if entry.key is not None))
    return [_HELD(of.schema, group=of.group, topic=of.topic, keys=keys)] if keys else []


def wait(of: GroupQueue, entries: Sequence[Entry], passage: int, again: Collection[UUID]) -> list[Statement]:
    """Write the inbox rows of messages whose key is held back, in the transaction that was marked.

    ``again``: the messages that this passage handles again; their rows of the earlier one are kept.
    """
    if not entries:
        return []
    earlier = [entry.id for entry in entries if entry.id in again]
    waiting = _WAIT(
        of.schema,
        group=of.group,
        topic=of.topic,
        queue=of.queue,
        ids=[entry.id for entry in entries],
        positions=[entry.position for entry in entries],
        digests=[entry.digest() for entry in entries],
        keys=[entry.key for entry in entries],
        passage=passage,
        again=earlier,
    )
    return [keep_earlier(of.schema, group=of.group, ids=earlier, passage=passage), waiting] if earlier else [waiting]


def release(connection: Connection, source: Connection, subscription: Subscription, schema: str) -> None:
    """Make each message due that waits and is the first of its key now, in a transaction of its own.

    Where a parked message takes its whole sequence with it, messages that wait for one are parked. A group that isn't
    ordered by key any more releases the messages that wait from the time when it was.
    """
    of_group: dict[str, Any] = {"group": subscription.group, "topic": subscription.feed}
    parked: list[Row] = []
    with begin(connection):
        execute(connection, plan_by_index(), _RELEASE_ALL(schema, **of_group))
        if subscription.on_exhausted == "park_sequence":
            (parked,) = execute(connection, _PARK_SEQUENCE(schema, **of_group, kind=SEQUENCE_KIND))
            if parked and parked_callback(subscription) is not None:
                _write_notices(connection, source, subscription, schema, parked)
    for message_id, queue, position, reason in parked:
        row = InboxUpdate(message_id, position, Status.PARKED.value, 0, None, reason)
        emit(event_of(subscription.queue(schema, queue), row))


def _write_notices(
    connection: Connection, source: Connection, subscription: Subscription, schema: str, parked: Sequence[Row]
) -> None:
    """Tell the callback that these messages are parked; a sequence may be long, so a body at a time."""
    for message_id, queue, _, reason in parked:
        (found,) = read_source(source, message_by_id(schema, id=message_id, **EVERYTHING))
        message = to_entry(found[0], subscription, queue).message if found else None
        execute(connection, *tell_parked(schema, subscription, message_id, message, reason, 0))


def release_next(subscription: Subscription, of: GroupQueue, entry: Entry) -> list[Statement]:
    """Make the next message of a key due, in the transaction that settles the one before it: a key is soon done."""
    if not subscription.by_key or entry.key is None:
        return []
    return [release_key(of.schema, of.group, of.topic, entry.key)]


def release_key(schema: str, group: str, feed: str, key: str) -> Statement:
    """Make the next message of a key due, if it waits, in the transaction that settles the one before it."""
    return _RELEASE_NEXT(schema, group=group, topic=feed, key=key)
