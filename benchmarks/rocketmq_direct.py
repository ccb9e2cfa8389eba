"""Send and consume by the library itself, as a Python service does: a server and its clients come on top of that.

It speaks as `benchmarks.rocketmq_client` does. Each send has a transaction of its own, and the same threads.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from benchmarks.rocketmq_client import THREADS, each, part
from outbox import Message, Outbox
from outbox.worker import Worker

_TOPIC, _BODY = "bench-direct", b"x" * 200


def main() -> None:
    """Run both parts; the arguments are the database and the number of messages."""
    url, messages = sys.argv[1], int(sys.argv[2])
    engine = create_engine(url, pool_size=THREADS)
    outbox = Outbox(engine)
    done, counter = threading.Event(), itertools.count(1)

    @outbox.consumer(_TOPIC, group="bench-direct")
    def count(message: Message, session: Session) -> None:
        del message, session
        if next(counter) == messages:
            done.set()

    def send() -> None:
        with engine.begin() as connection:
            outbox.send(connection, _TOPIC, _BODY)

    with part("send", messages):
        each(send, messages)
    with part("consume", messages), Worker(outbox, roles=["consume"]):
        done.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
