"""Services in Python, which use the tables, and RocketMQ's clients at the server: each gets what the other sends."""

from __future__ import annotations

import threading
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Settings
from outbox.worker import Worker
from tests.rocketmq.conformance.suite import OFFICIAL, Asked, Check, CheckRun, text

NATIVE = Check(
    75,
    "a producer in Python and its consumer in RocketMQ's client; the other way",
    "there is none",
    "body, tag, key and headers come as body, tag, message key and properties; the other way too",
    "both are of one table",
    topic="MIXED",
    group="",
    needs="tables",
)


@NATIVE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    assert c.server.url
    engine = create_engine(c.server.url)
    outbox = Outbox(engine, settings=Settings.from_env())
    got: list[Message[Any]] = []
    came = threading.Event()

    # A topic of its own: the one that is sent to below is that of the client's group.
    @outbox.consumer(f"{c.topic}-back", group="native")
    def handle(message: Message[Any], session: Session) -> None:
        got.append(message)
        came.set()

    try:
        with engine.begin() as connection:
            outbox.send(connection, c.topic, {"amount": 3}, key="account-7", tag="T", headers={"colour": "red"})
        found = c.drain(c.simple(wait=10), 1, 60)
        c.expect(len(found) == 1 and text(found[0]) == '{"amount":3}', found)
        [message] = found
        c.expect(
            message["tag"] == "T" and "account-7" in message["keys"], f"tag {message['tag']}, keys {message['keys']}"
        )
        c.expect(message["props"] == {"colour": "red"}, f"properties {message['props']}")
        with Worker(outbox, roles=["consume", "retry"]):
            _transaction(c)
            c.expect(came.wait(60), f"{len(got)} handled in Python")
        [handled] = got
        c.expect(handled.tag == "T" and handled.headers.get("colour") == "blue", f"{handled.tag} {handled.headers}")
        c.expect(_body(handled) == b"from a client", handled.body)
    finally:
        engine.dispose()


def _transaction(c: CheckRun) -> None:
    producer = c.producer(handler=Asked("ROLLBACK"), topics=[f"{c.topic}-back"])
    transaction = producer.begin()
    more: dict[str, Any] = {"body": "from a client", "tag": "T", "props": {"colour": "blue"}}
    producer.send(topic=f"{c.topic}-back", tx=transaction.name, **more)
    transaction.commit()


def _body(message: Message[Any]) -> bytes:
    body = message.body
    return body if isinstance(body, bytes) else str(body).encode()
