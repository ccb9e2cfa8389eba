"""Money from one bank to another through a broker, while relay, intake and broker are killed: each transfer once."""

from __future__ import annotations

import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from outbox import Outbox
from tests.kit import tries, wait_until
from tests.kit.processes import python
from tests.relay.servers import Server
from tests.relay.targets import TARGETS, Target
from tests.relay.working import LEDGER

KINDS = ("kafka", "nats", "redis", "rabbitmq")
ACCOUNTS = 7


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Target]]:
    """A destination of each kind."""
    with TARGETS[request.param].serve(tmp_path) as server:
        yield request.param, TARGETS[request.param](server)


class Bank:
    """The worker of a bank, as a process that is killed and started again."""

    def __init__(self, *arguments: str | Engine) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        """Start it."""
        self.process = self._stack.enter_context(python("tests.relay.working", *self._arguments))

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End it, and those before it."""
        self._stack.close()


@contextmanager
def banks(kind: str, target: Target, a: Engine, b: Engine) -> Iterator[list[Bank]]:
    """Run the workers of both banks."""
    place = getattr(target, "url", target.server)
    both = [Bank(side, kind, place, target.destination, engine) for side, engine in (("a", a), ("b", b))]
    try:
        yield both
    finally:
        for each in both:
            each.end()


@pytest.mark.slow
def test_no_money_is_lost_or_made(new_engine: Callable[[], Engine], target: tuple[str, Target]) -> None:
    """Whatever is killed: each transfer is booked once, to the cent, in the order of its account."""
    kind, destination = target
    a, b = new_engine(), new_engine()
    with b.begin() as connection:
        connection.exec_driver_sql(LEDGER)
    outbox, chance, sent = Outbox(a), random.Random(4711), 0  # noqa: S311 - no secret
    with banks(kind, destination, a, b) as both:
        for _ in range(tries(8)):
            for _ in range(20):
                with a.begin() as connection:
                    body = {"transfer": sent, "amount": chance.randrange(1, 100_000)}
                    outbox.send(connection, "transfer", body, key=f"account {sent % ACCOUNTS}")
                sent += 1
            time.sleep(chance.uniform(0.0, 0.6))  # any moment will do
            victim: Any = chance.choice(
                [*both, destination.server if isinstance(destination.server, Server) else both[0]]
            )
            victim.kill()
            victim.start()

        def booked() -> bool:
            with b.connect() as connection:
                return bool(connection.exec_driver_sql("SELECT count(*) FROM ledger").scalar_one() >= sent)

        wait_until(booked, "all is booked")
    with a.connect() as at_a, b.connect() as at_b:
        rows = at_b.exec_driver_sql("SELECT transfer, account, amount FROM ledger ORDER BY n").all()
        bodies = at_a.exec_driver_sql(
            "SELECT convert_from(body, 'UTF8')::json ->> 'amount' FROM outbox.half_message"
        ).all()
        failed = at_a.exec_driver_sql("SELECT count(*) FROM outbox.attempt_history").scalar_one()
    assert sorted(row.transfer for row in rows) == list(range(sent))
    assert sum(row.amount for row in rows) == sum(int(amount) for (amount,) in bodies)
    by_account = defaultdict(list)
    for row in rows:
        by_account[row.account].append(row.transfer)
    assert all(transfers == sorted(transfers) for transfers in by_account.values())
    assert failed == 0
