"""Many writers at once for real, with a dispatcher that never waits for them."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, Engine, text

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.dispatch.support import assert_dense, by_key, dispatch_all, messages, scalar
from tests.kit import tries

WRITERS = 6
EACH = tries(400)
KEYS = 20
LOCK = text("UPDATE counter SET value = value + 1 WHERE key = :key RETURNING value")


class Holder:
    """Transactions that are kept open while others run, on keys of their own."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.open: list[Connection] = [engine.connect() for _ in range(count)]
        for connection in self.open:
            connection.begin()
            connection.execute(text("SELECT pg_current_xact_id()"))


def write(app: Outbox, engine: Engine, seed: int) -> Counter[str]:
    """Send EACH messages in transactions of random size; some roll back, some roll a savepoint back."""
    chance = random.Random(seed)  # noqa: S311
    sent: Counter[str] = Counter()
    with engine.connect() as connection:
        while sum(sent.values()) < EACH:
            # Keys in one order for all writers: no deadlocks.
            keys = sorted(chance.sample(range(KEYS), chance.choice([1, 1, 1, 2, 3, 8])))
            ours: Counter[str] = Counter()
            transaction = connection.begin()
            if chance.random() < 0.3:
                connection.execute(text("SELECT pg_current_xact_id()"))
            for key in (f"k{number}" for number in keys):
                for _ in range(chance.choice([1, 1, 2, 5, 20])):
                    app.send(connection, "t", connection.execute(LOCK, {"key": key}).scalar_one(), key=key)
                    ours[key] += 1
            if chance.random() < 0.1:
                with connection.begin_nested() as nested:
                    app.send(connection, "t", "undone", key="k0")
                    nested.rollback()
            if chance.random() < 0.05:
                transaction.rollback()
            else:
                transaction.commit()
                sent += ours
    return sent


@pytest.mark.slow
def test_messages_come_in_commit_order(app: Outbox, engine: Engine, settings: Settings) -> None:
    """Six writers with row-locked counters and a running dispatcher: all that committed, in order, no hole, no double.

    Some transactions are open through the whole run, and commit after it.
    """
    holder = Holder(engine, 4)
    done = threading.Event()
    chance = random.Random(7)  # noqa: S311
    batches = 0

    def dispatch() -> None:
        nonlocal batches
        with engine.connect() as connection:
            while not done.is_set() or batches < 100:
                dispatch_once(connection, settings, limit=chance.choice([1, 3, 10, 50, 200, 700]))
                batches += 1

    with ThreadPoolExecutor(WRITERS + 1) as pool:
        dispatcher = pool.submit(dispatch)
        writers = [pool.submit(write, app, engine, seed) for seed in range(WRITERS)]
        try:
            sent = sum((writer.result() for writer in writers), Counter())
        finally:
            done.set()
        dispatcher.result()
    for number, connection in enumerate(holder.open):
        app.send(connection, "t", 1, key=f"held {number}")
        connection.commit()
        connection.close()

    with engine.connect() as connection:
        dispatch_all(connection, settings, 1000)
        found = messages(connection)
        committed = scalar(connection, "SELECT count(*) FROM outbox.op_message")
    assert committed == len(found) == sum(sent.values()) + len(holder.open)
    assert len(found) >= WRITERS * EACH
    assert_dense(found)
    keys = by_key(found)
    for key, count in sent.items():
        assert keys[key] == list(range(1, count + 1)), f"key {key} is out of order"
    assert all(keys[f"held {number}"] == [1] for number in range(len(holder.open)))
