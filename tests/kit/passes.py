"""Passes by hand, as a worker's duties would run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox import Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.outside.consumer import consumer_of
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.message.model import Counts


@contextmanager
def rebound(*outboxes: tuple[Outbox, Engine]) -> Iterator[None]:
    """Have outboxes of an example's modules, each bound where it was imported, work on other databases for a while."""
    before = [(outbox, outbox.engine) for outbox, _ in outboxes]
    _bind(outboxes)
    try:
        yield
    finally:
        _bind(before)


def _bind(outboxes: Iterable[tuple[Outbox, Engine | AsyncEngine]]) -> None:
    for outbox, engine in outboxes:
        outbox.unbind()
        outbox.bind(engine)


def send_each(outbox: Outbox, topic: str, *bodies: Any, **options: Any) -> list[UUID]:
    """Send messages, each in a transaction of its own."""
    assert isinstance(outbox.engine, Engine)
    ids = []
    for body in bodies:
        with outbox.engine.begin() as connection:
            ids.append(outbox.send(connection, topic, body, **options))
    return ids


def dispatch_all(engine: Engine, settings: Settings | None = None) -> Counts:
    """Dispatch all committed ops, and release what is due."""
    counts, limits = Counts(more=True), settings or Settings()
    with engine.connect() as connection:
        while counts.more:
            counts = replace(counts, more=False) + dispatch_once(connection, limits)
        while release_due_once(connection, limits).more:
            pass
    return counts


def declare(
    bind: Engine, topic: str, group: str, handler: Callable[..., Any], *, settings: Settings, **options: Any
) -> Consumer:
    """Return a consumer that hasn't begun: its first pass or `Consumer.start` begins its group."""
    app = Outbox(bind, settings=settings)
    app.consumer(topic, group=group, **options)(handler)
    return consumer_of(app.subscriptions[topic, group], settings)


def consume_all(consumer: Consumer, connection: Connection, source: Connection) -> Counts:
    """Consume until nothing is left that could be consumed now."""
    total = Counts()
    for _ in range(10_000):
        counts = consumer.consume_once(connection, source)
        total += replace(counts, more=False)
        if not counts.more and not counts.taken:
            return total
    raise AssertionError("the consumer never comes to an end")
