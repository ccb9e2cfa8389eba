"""Drive RocketMQ's own Python client against a server: send, receive and acknowledge, push, and transactions.

A process of its own, since its time of the processor is measured apart from the server's. Before and after each part
it says so by a line of JSON, and waits for a line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

os.environ["HOME"] = tempfile.mkdtemp(prefix="rocketmq-client-")  # it writes logs there

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

THREADS, _TAKERS = 16, 8
_TOPIC, _OF_TRANSACTIONS = "bench", "bench-tx"
_DEADLINE = 600.0


class _Committing(TransactionChecker):  # type: ignore[misc]  # the client has no types
    def check(self, message: Any) -> Any:
        """Commit whatever is asked about."""
        del message
        return TransactionResolution.COMMIT


class _Counting(MessageListener):  # type: ignore[misc]  # the client has no types
    def __init__(self, wanted: int) -> None:
        self.seen: set[str] = set()
        self.done = threading.Event()
        self._wanted = wanted

    def consume(self, message: Any) -> Any:
        """Count a message."""
        self.seen.add(message.message_id)
        if len(self.seen) >= self._wanted:
            self.done.set()
        return ConsumeResult.SUCCESS


def _say(**fact: object) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


@contextmanager
def part(name: str, messages: int) -> Iterator[None]:
    """Say that a part begins, and what it took of this process's processor time."""
    _say(begins=name)
    wall, own = time.monotonic(), time.process_time()
    yield
    seconds, own = time.monotonic() - wall, time.process_time() - own
    _say(ends=name, messages=messages, seconds=seconds, cpu=own)


def _message(topic: str) -> Any:
    message = Message()
    message.topic = topic
    message.body = b"x" * 200
    return message


def each(act: Callable[[], object], times: int) -> None:
    """Act so often, by 16 threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(act) for _ in range(times)]:
            done.result()


def _begin(consumer: Any) -> None:
    """Receive once: from then on the group is there. RocketMQ fails until it has taken the client's settings."""
    for patience in range(10, -1, -1):
        try:
            consumer.receive(1, 30)
        except Exception:
            if not patience:
                raise
            time.sleep(0.5)
        else:
            return


def main() -> None:
    """Run all parts; the arguments are the server's address, and the numbers of messages and of transactions."""
    address, messages, transactions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    configuration = ClientConfiguration(address, Credentials(), request_timeout=30)
    subscription = {_TOPIC: FilterExpression()}
    simple = SimpleConsumer(configuration, "bench-simple", subscription, await_duration=5)
    simple.startup()
    _begin(simple)
    producer = Producer(configuration, (_TOPIC, _OF_TRANSACTIONS), _Committing())
    producer.startup()
    each(lambda: producer.send(_message(_TOPIC)), 200)  # warm
    with part("send", messages):
        each(lambda: producer.send(_message(_TOPIC)), messages)
    received: set[str] = set()

    def take() -> None:
        while len(received) < messages + 200:
            for message in simple.receive(32, 60) or ():
                simple.ack(message)
                received.add(message.message_id)

    with part("receive and acknowledge", messages), ThreadPoolExecutor(_TAKERS) as pool:
        for done in [pool.submit(take) for _ in range(_TAKERS)]:
            done.result()
    counting = _Counting(messages + 200)
    with part("push", messages):
        push = PushConsumer(configuration, "bench-push", counting, subscription)
        push.startup()
        counting.done.wait(_DEADLINE)

    def transact() -> None:
        transaction = producer.begin_transaction()
        producer.send(_message(_OF_TRANSACTIONS), transaction)
        transaction.commit()

    with part("transaction", transactions):
        each(transact, transactions)
    os._exit(0)  # its shutdown waits for polls


if __name__ == "__main__":
    main()
