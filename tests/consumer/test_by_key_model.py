"""A thousand keys with random failures, against a model: each key strictly in order, all others unharmed."""

from __future__ import annotations

import random
from collections import defaultdict
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from outbox import Message
from tests.kit.bench import LEDGER, Bench

KEYS = 1_000
ROUNDS = 6
SENT_A_ROUND = 400
#: One retry.
DELAYS = (60.0,)
PARKED = """SELECT message_id FROM outbox.consumer_message
             WHERE status = 'parked' AND NOT follows AND discarded_at IS NULL ORDER BY message_id"""
OPEN = """SELECT count(*) FROM outbox.consumer_message
           WHERE status IN ('failed', 'waiting', 'parked') AND discarded_at IS NULL"""
#: Make the retries of half of the failed messages due.
AGE_HALF = """UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() - interval '2 s'
               WHERE status = 'failed' AND abs(hashtext(message_id::text || :salt)) % 2 = 0"""


class Model:
    """What was sent under each key, how often each message is yet to fail, and which of them are settled."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.sent: dict[str, list[UUID]] = defaultdict(list)
        self.failures: dict[UUID, int] = {}
        self.keys: dict[UUID, str] = {}
        self.settled: set[UUID] = set()
        self.discarded: set[UUID] = set()
        self.harmed: set[str] = set()

    def send(self, bench: Bench) -> None:
        """Send messages of random keys in one transaction; one in twenty will fail, up to three times."""
        with bench.producer.begin() as connection:
            for _ in range(SENT_A_ROUND):
                key = f"key {self.random.randrange(KEYS)}"
                id_ = bench.app.send(connection, "t", len(self.sent[key]), key=key)
                self.sent[key].append(id_)
                self.keys[id_] = key
                self.failures[id_] = self.random.choice((1, 2, 3)) if self.random.random() < 0.05 else 0
                if self.failures[id_]:
                    self.harmed.add(key)
        bench.dispatch()

    def handle(self, message: Message, session: Session) -> None:
        """Check that all before it of its key are settled; fail as often as planned, else have an effect."""
        assert message.key is not None
        before = self.sent[message.key][: message.body]
        assert self.settled.issuperset(before), "a message was tried before an earlier one of its key was settled"
        if self.failures[message.id]:
            self.failures[message.id] -= 1
            raise RuntimeError("planned")
        self.settled.add(message.id)
        session.execute(LEDGER, {"id": message.id, "body": str(message.body), "attempt": message.attempt})

    def act(self, bench: Bench, most: int) -> None:
        """Retry or discard some of what is parked, by an operator."""
        for id_ in bench.rows(PARKED)[:most]:
            if self.random.random() < 0.3:
                self.settled.add(id_)
                self.discarded.add(id_)
                bench.sink.operator.discard(id_, group="g", by="me", why="test")
            else:
                bench.sink.operator.retry(id_, group="g", by="me", why="test")

    def expected(self) -> dict[str, list[UUID]]:
        """Return what must have taken effect under each key, in order."""
        return {key: [id_ for id_ in ids if id_ not in self.discarded] for key, ids in self.sent.items()}


@pytest.mark.parametrize("policy", ["park", "park_sequence", "block"])
def test_each_key_is_in_order_and_all_others_are_unharmed(bench: Bench, policy: str) -> None:
    """Two workers, batches, retries at random times, operators who retry and discard: the ledger is the model's."""
    model = Model(seed=5)
    options = {"ordered": "key", "on_exhausted": policy, "retry_delays": DELAYS, "batch": 10}
    crew = [bench.declare(model.handle, **options) for _ in range(2)]
    for number in range(ROUNDS):
        model.send(bench)
        bench.consume(crew[number % 2])
        rows = bench.inbox()
        unharmed = [rows.get(id_) for id_, key in model.keys.items() if key not in model.harmed]
        assert all(row is not None and (row.status, row.attempts) == ("consumed", 1) for row in unharmed)
        with bench.observer.begin() as connection:
            connection.execute(text(AGE_HALF), {"salt": str(number)})
        model.random.choice(crew).retry_once(bench.connection, bench.source, limit=50)
        model.act(bench, most=5)
    while bench.rows(OPEN) != [0]:
        bench.age_retries()
        crew[0].retry_once(bench.connection, bench.source, limit=1_000)
        model.act(bench, most=1_000)

    ledger: dict[str, list[UUID]] = defaultdict(list)
    for id_ in bench.rows("SELECT message_id FROM ledger ORDER BY n"):
        ledger[model.keys[id_]].append(id_)
    assert dict(ledger) == {key: ids for key, ids in model.expected().items() if ids}
    assert policy == "block" or model.discarded, "nothing was ever parked: the test has proved too little"
