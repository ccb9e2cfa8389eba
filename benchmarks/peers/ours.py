"""Our arms: what a worker does for a group, dispatch included, in this thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from benchmarks import bank
from benchmarks.fill import dispatch_all
from benchmarks.peers.business import CREDIT, CREDIT_ALL, new_order
from benchmarks.peers.contest import Arm
from outbox import Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.worker.connections import WorkerDatabase

_TOGETHER = 500
_CREDIT_ALL = text(CREDIT_ALL.replace("%s", ":ids", 1).replace("%s", ":amounts", 1).replace("::", "\\:\\:"))
_numbers = itertools.count()


def credit(message: Message, session: Session) -> None:
    """Credit an account."""
    body = message.body
    session.execute(bank.MOVE, {"account_id": body["receiver"], "moved": body["amount"]})


def credit_all(messages: list[Message], session: Session) -> None:
    """Credit the accounts of a list."""
    bodies = [message.body for message in messages]
    values = {"ids": [body["receiver"] for body in bodies], "amounts": [body["amount"] for body in bodies]}
    session.execute(_CREDIT_ALL, values)


def credit_by_cursor(message: Message, cursor: psycopg.Cursor) -> None:
    """Credit an account by a cursor of the driver."""
    body = message.body
    cursor.execute(CREDIT, (body["amount"], body["receiver"]))


def nothing(message: Message, session: Session) -> None:
    """Do nothing."""


def nothing_all(messages: list[Message], session: Session) -> None:
    """Do nothing."""


class OurArms:
    """Arms on one database, each with a topic and a group of its own."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        self._engine = create_engine(url)
        self._outbox = Outbox(self._engine, settings=Settings())
        self._dispatching = stack.enter_context(WorkerDatabase(self._engine).connect())
        self._consuming = stack.enter_context(WorkerDatabase(self._engine).connect())
        stack.callback(self._engine.dispose)

    def arm(self, handler: Callable[..., Any], **options: Any) -> Arm:
        """Return the arm of a handler."""
        topic = f"transfer-{next(_numbers)}"
        self._outbox.consumer(topic, group="till", **options)(handler)
        subscription = self._outbox.subscriptions[topic, "till"]
        consumer = Consumer(subscription, self._outbox.settings, lambda: False)
        consumer.start(self._consuming, self._consuming)

        def handle(messages: int) -> None:
            dispatch_all(self._dispatching, self._outbox.settings)
            done = 0
            while done < messages:
                counts = consumer.consume_once(self._consuming, self._consuming)
                assert not counts.failed, "the handler failed"
                done += counts.done

        return Arm(lambda messages: self._fill(topic, messages), handle)

    def cursor_arms(self, *, batch: int) -> Iterator[tuple[str, Arm]]:
        """Yield those whose handler takes a cursor; in batches also in a pipeline."""
        yield "ours, cursor", self.arm(credit_by_cursor, batch=batch)
        if batch > 1:
            yield "ours, cursor, pipeline", self.arm(credit_by_cursor, batch=batch, pipeline=True)

    def _fill(self, topic: str, messages: int) -> None:
        for _ in range(0, messages, _TOGETHER):
            with self._engine.begin() as connection:
                for _ in range(min(_TOGETHER, messages)):
                    order = new_order()
                    self._outbox.send(connection, topic, order, key=str(order["receiver"]))
