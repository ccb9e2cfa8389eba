"""Orders in transactions of RocketMQ's Java client, while all is killed: ``python -m tests.rocketmq.soak 10000 100``.

An order is a half message, a row of a table of the producer's (its local transaction), and a verdict; some orders write
no row, and some are left without a verdict. The Java process, our server, the worker and PostgreSQL are killed in turn.
The client's checker looks whether there is a row. Consumers take messages, and write into a ledger with the
acknowledgement. In the end each row has one entry in the ledger, and no other order has one; no half is undecided.
"""

from __future__ import annotations

import base64
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from examples.bank_transfer.ports import free_port
from outbox import Outbox
from outbox.database import migration
from outbox.embedded import Server
from outbox.errors import LeaseEnded
from outbox.leases import LeasedGroup
from tests.kit import ROOT, wait_until
from tests.rocketmq.conformance.bridge import Bridge, ClientRaised, ClientThing, command
from tests.rocketmq.raw import is_listening

_TOPIC, _TELLERS, _TAKERS = "soak", 8, 4
_SHORT_TIMES = {
    "OUTBOX_IMMUNITY": "5",
    "OUTBOX_CHECK_INTERVAL": "1",
    "OUTBOX_CHECK_TIMEOUT": "2",
    "OUTBOX_MAX_CHECKS": "1000",
}
#: After how long (seconds) without an order that ends, or a half that is decided, it is given up.
_STALLED = 300.0
_TABLES = "CREATE TABLE local_order (body text PRIMARY KEY)", "CREATE TABLE ledger (n serial PRIMARY KEY, body text)"
_LOST = (ClientRaised, DBAPIError, OSError, RuntimeError, TimeoutError, ValueError)


@dataclass
class Soak:
    """The run: its server, its processes by what they are, and what was counted."""

    server: Server
    folder: Path
    engine: Engine
    address: str
    dice: random.Random
    processes: dict[str, Any] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    #: Orders whose local transaction may yet commit.
    begun: set[str] = field(default_factory=set)
    producer: ClientThing | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, what: str) -> None:
        """Start a process."""
        url = self.server.url("soak")
        if what == "java":
            program, errors = command("J", self.folder), (self.folder / "java").open("a")
            made: dict[str, Any] = {"endpoints": self.address, "topics": [_TOPIC], "check": True, "timeout": 3}
            for _ in range(20):
                self.wait_for_server()
                bridge = self.processes[what] = Bridge("J", program, self.folder, errors)
                bridge.handlers["p"] = self.check
                with suppress(*_LOST):  # its server may have been killed meanwhile
                    bridge.call("producer", **{"as": "p", **made})
                    self.producer = ClientThing(bridge, "p")
                    return
                bridge.kill()
            raise TimeoutError("the Java client doesn't start")
        port = self.address.rpartition(":")[2]
        words = {"server": ("rocketmq", "serve", "--auto-create", "--port", port), "worker": ("run", "--url", url)}
        environment = {**os.environ, **_SHORT_TIMES, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
        with (self.folder / what).open("a") as log:
            arguments = [sys.executable, "-m", "outbox.cli", *words[what]]
            self.processes[what] = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def wait_for_server(self) -> None:
        """Wait until our server listens."""
        wait_until(lambda: is_listening(self.address), "a server listens")

    def kill(self, what: str) -> None:
        """Kill a process, or PostgreSQL, and start it again."""
        self.counts[f"killed: {what}"] += 1
        if what == "postgresql":
            self.server.kill()
            self.server.start()
            return
        if what == "java":
            self.producer = None
        process = self.processes[what]
        process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()
        self.start(what)

    def check(self, message: dict[str, Any]) -> str:
        """Answer what became of an order: what the client's checker calls."""
        body = base64.b64decode(message["body"]).decode()
        self.counts["asked"] += 1
        if body in self.begun:
            return "UNKNOWN"
        try:
            return "COMMIT" if self.rows("SELECT body FROM local_order WHERE body = :body", body=body) else "ROLLBACK"
        except DBAPIError:
            return "UNKNOWN"

    def rows(self, sql: str, **values: Any) -> list[Any]:
        """Return the first column of a query."""
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), values).scalars())

    def order(self, number: int) -> None:
        """Give an order: a half, a row, a verdict, as far as nothing is killed meanwhile."""
        while (producer := self.producer) is None:
            if self.ended.wait(0.1):
                return
        self.wait_for_server()
        body = str(number)
        commits, says = self.dice.random() < 0.8, self.dice.random() < 0.8
        self.begun.add(body)
        try:
            transaction = producer.begin()
            producer.send(topic=_TOPIC, body=body, tx=transaction.name)
            if commits:
                with self.engine.begin() as connection:
                    connection.execute(text("INSERT INTO local_order VALUES (:body)"), {"body": body})
            if says:
                (transaction.commit if commits else transaction.rollback)()
            self.counts["orders whose client heard of their end"] += says
        except _LOST:
            self.counts["orders that a kill has cut off"] += 1
            self.ended.wait(0.5)
        finally:
            self.begun.discard(body)

    def take(self, group: LeasedGroup[Any]) -> None:
        """Take messages, and book each with its acknowledgement, until the end."""
        while not self.ended.is_set():
            try:
                taken = group.take(16, invisible=5)
                for each in taken:
                    with Session(self.engine) as session, suppress(LeaseEnded):
                        session.execute(
                            text("INSERT INTO ledger (body) VALUES (:body)"), {"body": each.message.raw.decode()}
                        )
                        each.acknowledge(session)
                        session.commit()
            except _LOST:
                self.counts["takes that a kill has cut off"] += 1
                taken = []
            if not taken:
                self.ended.wait(0.1)

    def settle(self) -> None:
        """Wait until each half is decided, and each message is in the ledger."""
        seen, since = None, time.monotonic()
        sql = """SELECT (SELECT count(*) FROM outbox.half_message h WHERE NOT EXISTS (
                           SELECT FROM outbox.op_message o WHERE o.half_id = h.id))
                      + (SELECT count(*) FROM outbox.op_message WHERE resolution = 'commit')
                      - (SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed')"""
        while (left := self.rows(sql)[0]) > 0:
            if left != seen:
                seen, since = left, time.monotonic()
            if time.monotonic() - since > _STALLED:
                raise TimeoutError(f"{left} halves and messages don't get on")
            self.ended.wait(0.5)


@contextmanager
def opened(folder: Path, seed: int) -> Iterator[Soak]:
    """Run all that an order needs."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder=folder / "data", settings={"max_connections": "150"}))
        server.create_database("soak")
        migration.upgrade(server.url("soak"))
        engine = create_engine(server.url("soak"), pool_size=20, pool_pre_ping=True)
        with engine.begin() as connection:
            for table in _TABLES:
                connection.execute(text(table))
        soak = Soak(server, folder, engine, f"127.0.0.1:{free_port()}", random.Random(seed))  # noqa: S311
        for what in ("server", "worker", "java"):
            soak.start(what)
        yield soak
        soak.ended.set()
        for process in soak.processes.values():
            process.kill()
        engine.dispose()


def run(orders: int, kills: int, seed: int = 1) -> tuple[Counter[str], list[str]]:
    """Give so many orders beside so many kills; return what was counted, and the faults: there must be none."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, opened(Path(name), seed) as soak:
        group = Outbox(soak.engine).leased(_TOPIC, group="ledger", retry_delays=(0.5,) * 100)
        given = iter(range(orders))
        guard, left = threading.Lock(), [orders]

        def teller() -> None:
            while True:
                with guard:
                    number = next(given, None)
                    left[0] -= number is not None
                if number is None or soak.ended.is_set():
                    return
                soak.order(number)

        with ThreadPoolExecutor(_TELLERS + _TAKERS) as pool, ExitStack() as at_end:
            at_end.callback(soak.ended.set)  # also where something fails here: threads that go on would hide it
            takers = [pool.submit(soak.take, group) for _ in range(_TAKERS)]
            tellers = [pool.submit(teller) for _ in range(_TELLERS)]
            for number in range(kills):
                goal = orders - (number + 1) * orders // (kills + 1)
                while left[0] > goal and not soak.ended.wait(0.05):
                    continue
                soak.kill(("java", "server", "worker", "java", "server", "postgresql")[number % 6])
            for each in tellers:
                each.result()
            for what in ("server", "java"):  # whatever the last kill has left
                soak.kill(what)
            soak.settle()
            soak.ended.set()
            for each in takers:
                each.result()
        return soak.counts, list(faults(soak))


def faults(soak: Soak) -> Iterator[str]:
    """Compare the local transactions with the ledger, and the verdicts with both."""
    local, ledger = set(soak.rows("SELECT body FROM local_order")), Counter(soak.rows("SELECT body FROM ledger"))
    soak.counts["local transactions"] = len(local)
    soak.counts["in the ledger"] = ledger.total()
    soak.counts["decided by the check"] = soak.rows(
        "SELECT count(*) FROM outbox.op_message WHERE decided_by = 'check'"
    )[0]
    verdicts = (
        "SELECT convert_from(body, 'UTF8') FROM outbox.half_message h JOIN outbox.op_message o ON o.half_id = h.id"
    )
    committed = set(soak.rows(f"{verdicts} WHERE resolution = 'commit'"))
    rolled_back = set(soak.rows(f"{verdicts} WHERE resolution = 'rollback'"))
    for what, found in {
        "committed, and never in the ledger": local - ledger.keys(),
        "in the ledger, and never committed": ledger.keys() - local,
        "in the ledger twice": {body for body, times in ledger.items() if times > 1},
        "committed, with a verdict that says no": rolled_back & local,
        "not committed, with a verdict that says yes": committed - local,
    }.items():
        if found:
            yield f"{len(found)} orders {what}: {sorted(found)[:5]}"


def main() -> int:
    """Run it; the arguments are the numbers of orders and of kills."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    began = time.monotonic()
    counts, found = run(int(sys.argv[1]), int(sys.argv[2]))
    for what, number in sorted(counts.items()):
        print(f"{what}: {number:,}")  # noqa: T201
    print(f"seconds: {time.monotonic() - began:.0f}")  # noqa: T201
    print("\n".join(found) or "faults: 0")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
