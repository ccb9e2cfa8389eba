"""Take the messages of the other bank by RocketMQ's own client, and store them as messages of this bank's database.

The client is the official one, unmodified. A message is stored first, under the id that it has at the other bank, and
acknowledged after that: what comes again, since a process was killed or an answer was lost, is stored once. The topic
has consumers like any other.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import import_module
from typing import Any
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Outbox

from .lifeline import Lifeline, report
from .message import GROUP, GROUP_A, OUTCOMES
from .via import Between

#: How many messages are taken at once, and for how long (seconds): no client may take them for less.
_MOST, _INVISIBLE = 32, 10
#: How long (seconds) the client waits for an answer, and for messages.
_TIMEOUT, _AWAIT = 3, 5


def main() -> None:
    """Run a collector; the argument is the module of its bank."""
    lifeline = Lifeline()
    # The client writes logs below this folder.
    os.environ["HOME"] = tempfile.mkdtemp(prefix="collector-")
    bank, between = import_module(f".{sys.argv[1]}", __package__), Between.of_environment()
    topic, model = bank.TAKEN
    consumer = _consumer(between.take_at[topic], topic, GROUP_A if topic == OUTCOMES else GROUP)
    lifeline.report(ready=True)
    while True:
        collect(consumer, bank.intake, bank.engine, topic, model)


def _consumer(address: str, topic: str, group: str) -> Any:
    from rocketmq import (  # noqa: PLC0415 - the demo runs without this client
        ClientConfiguration,
        Credentials,
        FilterExpression,
        SimpleConsumer,
    )

    configuration = ClientConfiguration(address, Credentials(), request_timeout=_TIMEOUT)
    consumer: Any = SimpleConsumer(configuration, group, {topic: FilterExpression()}, await_duration=_AWAIT)
    consumer.startup()
    return consumer


def collect(consumer: Any, outbox: Outbox, engine: Engine, topic: str, model: Any) -> None:
    """Take messages, store each, and acknowledge it."""
    try:
        messages = consumer.receive(_MOST, _INVISIBLE) or []
    except Exception as error:
        print(f"nothing was received: {error}", file=sys.stderr)
        return
    if messages:
        report(taken=len(messages))
    for message in messages:
        with Session(engine) as session, session.begin():
            body = model.model_validate_json(message.body)
            known: dict[str, Any] = {"id": UUID(message.message_id), "on_duplicate": "ignore"}
            outbox.send(session, topic, body, key=message.message_group, **known)
        try:
            consumer.ack(message)
        except Exception as error:
            print(f"{message.message_id} was not acknowledged: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
