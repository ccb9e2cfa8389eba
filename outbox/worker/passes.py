"""Passes as lanes run them: with a connection to the database, and one to the producer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription
from outbox.model import Counts
from outbox.prune import prune_consumer_once
from outbox.settings import Settings
from outbox.store.execute import execute
from outbox.store.wakeup import notify
from outbox.worker.lane import Pass

if TYPE_CHECKING:
    from sqlalchemy import Connection


def on_producer(one_pass: Callable[[Connection, Settings], Counts], settings: Settings) -> Pass:
    """Return the pass of a duty that needs the producer's tables only."""
    return lambda connection, _: one_pass(connection, settings)


def start_group(consumer: Consumer, connection: Connection, source: Connection) -> Counts:
    """Register a new group."""
    consumer.start(connection, source)
    return Counts()


def prune_group(
    settings: Settings,
    subscription: Subscription,
    stopping: Callable[[], bool],
    connection: Connection,
    source: Connection,
) -> Counts:
    """Delete old inbox rows and offsets of a group."""
    group, topic = subscription.group, subscription.topic
    return prune_consumer_once(connection, source, settings, group, topic, stopping=stopping)


def send_notification(schema: str, payload: str, connection: Connection, _: Connection) -> Counts:
    """Send a notification."""
    with connection.begin():
        execute(connection, notify(schema, payload))
    return Counts()
