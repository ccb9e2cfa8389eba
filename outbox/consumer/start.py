"""Where a group begins to read a topic, or goes on: in each queue, behind which position.

A time is looked for by position: the messages of a queue became visible in the order of their positions, so that some
twenty looks into the primary key find the first one of a time, however many messages there are.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from outbox.consumer import sql
from outbox.consumer.progress import ConsumerProgress
from outbox.database.execute import execute, lock_key, read_log
from outbox.database.identity import meet
from outbox.database.session import begin
from outbox.database.sql import GroupQueue, take_lock
from outbox.errors import MessagesPruned
from outbox.message.model import Start, number_of
from outbox.telemetry.events import SourceMoved
from outbox.telemetry.hooks import emit
from outbox.text import feed_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.consumer.subscription import Subscription


class StartPosition(NamedTuple):
    """Behind which position of a queue a group begins, and the id of the message there, as far as there is one.

    ``missing`` is how many messages were pruned that were numbered before the first one that is there, and that may
    have been meant.
    """

    queue: int
    position: int
    message_id: UUID | None
    missing: int = 0


def start_positions(
    connection: Connection | None, source: Connection, schema: str, topic: str, start: Start
) -> list[StartPosition]:
    """Return where a group begins in each queue; nothing while the topic doesn't exist.

    ``source`` is on the producer's database, ``connection`` on that which keeps them (`read_log`).
    """
    if start == "now":
        (heads,) = read_log(connection, source, sql.heads(schema, topic=topic))
        return [StartPosition(queue, last, last_id) for queue, last, last_id, *_ in heads]
    (firsts,) = read_log(connection, source, sql.beginnings(schema, topic=topic))
    if start == "first":
        return [StartPosition(queue, first - 1, None) for queue, first in firsts]
    if isinstance(start, dt.datetime):
        (rows,) = read_log(connection, source, sql.start_at_time(schema, topic=topic, since=start))
        return [StartPosition(*row) for row in rows]
    positions = [start.get(queue, first) if isinstance(start, Mapping) else start for queue, first in firsts]
    (rows,) = read_log(connection, source, sql.start_at_position(schema, topic=topic, positions=positions))
    return [
        StartPosition(queue, max(before, first - 1), message_id, max(number_of(first) - number_of(position), 0))
        for (queue, first), position, (_, before, message_id) in zip(firsts, positions, rows, strict=True)
    ]


def met(connection: Connection, source: Connection, subscription: Subscription, schema: str) -> Subscription:
    """Return a subscription with the name under which its group keeps the topic of this source.

    A source that is elsewhere than before is told: it was moved, or it is a copy of another one (`SourceMoved`).
    """
    group, topic = subscription.group, subscription.topic
    number, id_, address, before = meet(connection, source, schema, topic)
    if before is not None:
        emit(SourceMoved(group=group, topic=topic, number=number, source=id_, address=address, before=before))
    return replace(subscription, feed=feed_of(topic, number))


def start_group(connection: Connection, source: Connection, subscription: Subscription, schema: str) -> None:
    """Write the first offsets of a group that is new, by its subscription's ``start``.

    Raises:
        MessagesPruned: messages from behind the start were pruned, and the subscription says to stop then.
    """
    pair = subscription.group, subscription.feed
    with begin(connection):
        # Two workers of a new group must not start it at two different positions.
        lock = take_lock(lock_key("group", schema, *pair))
        _, known = execute(connection, lock, sql.group_is_known(schema, *pair))
        if known[0][0]:
            return
        beginnings = start_positions(connection, source, schema, subscription.topic, subscription.start)
        missing = sum(each.missing for each in beginnings)
        if missing and subscription.on_pruned == "stop":
            raise MessagesPruned(
                f"group {subscription.group!r} can't begin at {subscription.start}: of topic "
                f"{subscription.topic!r}, {missing} older messages were pruned, and some of them may be of that "
                "time; begin later, or with the oldest that is kept (start='first' or on_pruned='skip')"
            )
        for queue, position, message_id, _ in beginnings or [StartPosition(0, 0, None)]:
            begins = ConsumerProgress(GroupQueue(schema, *pair, queue), position, message_id)
            execute(connection, begins.append(), sql.write_start(schema, *begins.of.values, position))
