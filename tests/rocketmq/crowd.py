"""Many messages through four consumers, two servers and kills: ``python -m tests.rocketmq.crowd 100000 20``.

The group keeps the order of keys. Two of its consumers are push consumers, two are simple ones. They acknowledge most
of what they get, and give some back, leave some until the lease ends, and forward some to the dead letters; servers are
killed meanwhile. In the end each message is settled once: acknowledged with one OK, or parked. None came after it was
settled, and none came before an earlier one of its key was settled, or came with it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from examples.bank_transfer.ports import free_port
from outbox import Outbox
from outbox.database import migration
from outbox.embedded import Server
from tests.kit import wait_until
from tests.kit.passes import dispatch_all
from tests.kit.processes import ROOT
from tests.rocketmq.raw import RawClient, body_of, code, handle_of, is_listening

_TOPIC, _GROUP = "crowd", "crowd"
_CONFIG = f"""
[rocketmq.groups.{_GROUP}]
fifo = true
max_attempts = 6
retry_delays = ["1s"]
"""
#: So many messages of a key, and of a transaction that sends them.
_OF_KEY, _CHUNK = 200, 500
#: Of so many messages of a key one is forwarded to the dead letters.
_OF_FORWARDED = 100
#: What a consumer took longer ago (seconds) may be another one's by now: of that nothing follows.
_FRESH = 15.0
#: Without anything that is settled for so long (seconds), the run is given up.
_STALLED = 300.0
_SETTLED = "SELECT convert_from(h.body, 'UTF8'), c.status FROM {from_} WHERE c.status IN ('consumed', 'parked')"
_INBOX = "outbox.consumer_message c JOIN outbox.half_message h ON h.id = c.message_id"


@dataclass
class Crowd:
    """The run, what its consumers have seen, and what was wrong."""

    engine: Engine
    folder: Path
    address: str
    messages: int
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    #: Of each key, what was acknowledged with OK, and up to which number all are known to be settled.
    done: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    low: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    guard: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    # --- servers ---------------------------------------------------------------------------------------------------

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Start a server; all of them share a port."""
        config = self.folder / "crowd.toml"
        config.write_text(_CONFIG)
        url = self.engine.url.render_as_string(hide_password=False)
        environment = {**os.environ, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
        words = ("rocketmq", "serve", "--port", self.address.rpartition(":")[2], "--config", str(config))
        with (self.folder / f"server-{number}").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "outbox.cli", *words], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def wait_for_server(self) -> None:
        """Wait until one of them listens."""
        wait_until(lambda: is_listening(self.address), "a server listens")

    # --- producer --------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """Send all messages, each key's in order."""
        outbox, keys = Outbox(self.engine), max(2, self.messages // _OF_KEY)
        for first in range(0, self.messages, _CHUNK):
            with Session(self.engine) as session, session.begin():
                for number in range(first, min(first + _CHUNK, self.messages)):
                    key = f"k{number % keys}"
                    outbox.send(session, _TOPIC, f"{key}:{number // keys + 1}".encode(), key=key)
            dispatch_all(self.engine)

    # --- consumers -------------------------------------------------------------------------------------------------

    def consume(self, number: int) -> None:
        """Take and settle until the end; odd ones are push consumers."""
        dice, kind = random.Random(number), ("SIMPLE_CONSUMER", "PUSH_CONSUMER")[number % 2]  # noqa: S311
        with RawClient(self.address, options=[("grpc.use_local_subchannel_pool", 1)]) as client:
            leases = {"auto_renew": True, "invisible_duration": None} if number % 2 else {}
            while not self.ended.is_set():
                began = time.monotonic()
                try:
                    # Also tells a server that has been started anew what kind of client this is.
                    client.call("Heartbeat", {"client_type": kind, "group": {"name": _GROUP}}, timeout=10)
                    _, got = client.receive(_TOPIC, _GROUP, batch_size=dice.choice((1, 8, 32)), **leases)
                except grpc.RpcError:
                    self.count("receives that were cut off")
                    self.ended.wait(0.2)
                    continue
                self.see([body_of(each).decode() for each in got], began)
                self.settle(client, got, dice, is_push=number % 2 == 1)

    def count(self, what: str, number: int = 1) -> None:
        """Count something."""
        with self.guard:
            self.counts[what] += number

    def see(self, bodies: list[str], began: float) -> None:
        """Look at what one receive has brought, which began at that time: is it its turn?"""
        before = dict[str, int]()
        for body in bodies:
            key, number = body.split(":")[0], int(body.split(":")[1])
            with self.guard:
                self.counts["deliveries"] += 1
                again = self.done[key][number]
                after = before.get(key, self.low[key])
                missing = [each for each in range(after + 1, number) if not self.done[key][each]]
            if time.monotonic() - began > _FRESH:
                continue
            if again:
                self.faults.append(f"{body} came after its acknowledgement")
            if number <= before.get(key, 0):
                self.faults.append(f"{body} came behind {key}:{before[key]}")
            if missing and (late := set(missing) - self.settled(key, missing)):
                self.faults.append(
                    f"{body} came before {key}:{sorted(late)}, which {'is' if len(late) == 1 else 'are'} open"
                )
            with self.guard:
                if key not in before:
                    self.low[key] = max(self.low[key], number - 1)
            before[key] = number

    def settled(self, key: str, numbers: list[int]) -> set[int]:
        """Return which of these the inbox says are settled."""
        with self.engine.connect() as connection:
            query = text(_SETTLED.format(from_=_INBOX) + " AND h.body = ANY (:bodies)")
            rows = connection.execute(query, {"bodies": [f"{key}:{number}".encode() for number in numbers]})
            return {int(body.split(":")[1]) for body, _ in rows}

    def settle(self, client: RawClient, got: list[dict[str, Any]], dice: random.Random, *, is_push: bool) -> None:
        """Acknowledge what came, but for some; what is behind one that failed, of its key, is given back."""
        failed, acked = set[str](), list[tuple[str, str]]()
        for received in got:
            body, handle, chance = body_of(received).decode(), handle_of(received), dice.random()
            key, number = body.split(":")
            if key in failed or chance < 0.03:
                failed.add(key)
                self.count("given back")
                self.say(client, "ChangeInvisibleDuration", handle, invisible_duration=f"{dice.choice((0, 1))}s")
            elif chance < 0.04 and not is_push:
                failed.add(key)
                self.count("left until the lease ends")
                self.say(client, "ChangeInvisibleDuration", handle, invisible_duration="2s")
            elif int(number) % _OF_FORWARDED == 0:
                self.count("forwarded")
                self.say(client, "ForwardMessageToDeadLetterQueue", handle, delivery_attempt=1, max_delivery_attempts=1)
            else:
                acked.append((body, handle))
        if acked:
            entries = [{"message_id": "any", "receipt_handle": handle} for _, handle in acked]
            answer = self.say(client, "AckMessage", None, entries=entries)
            with self.guard:
                for (body, _), entry in zip(acked, answer["entries"], strict=True):
                    key, number = body.split(":")
                    self.counts[f"acknowledged: {code(entry)}"] += 1
                    if code(entry) == 20000:
                        self.done[key][int(number)] += 1

    def say(self, client: RawClient, call: str, handle: str | None, **more: Any) -> dict[str, Any]:
        """Make a call of a consumer until it is answered: an answer may be lost with its server."""
        named = {"topic": {"name": _TOPIC}, "group": {"name": _GROUP}, **more}
        if handle is not None:
            named["receipt_handle"] = handle
        while True:
            try:
                answer = dict(client.call(call, named, timeout=10))
            except grpc.RpcError:
                self.count("calls that were repeated")
                self.ended.wait(0.2)
                continue
            codes = {code(each) for each in answer.get("entries", [answer])}
            if codes & {50001}:  # the database's connection was cut
                self.ended.wait(0.2)
                continue
            if codes - {20000, 40013}:
                self.faults.append(f"{call} was answered with {sorted(codes)}")
            return answer

    # --- the run ---------------------------------------------------------------------------------------------------

    def number_settled(self) -> int:
        """Return how many messages the inbox says are settled."""
        with self.engine.connect() as connection:
            count = "SELECT count(*) FROM outbox.consumer_message WHERE status IN ('consumed', 'parked')"
            return int(connection.execute(text(count)).scalar_one())

    def wait_for(self, number: int) -> None:
        """Wait until so many are settled."""
        last, since = -1, time.monotonic()
        while (settled := self.number_settled()) < number:
            if settled != last:
                last, since = settled, time.monotonic()
            if time.monotonic() - since > _STALLED:
                raise TimeoutError(f"{settled:,} of {self.messages:,} are settled, and nothing goes on")
            self.ended.wait(0.2)

    def wrong(self) -> Iterator[str]:
        """Compare the inbox with what the consumers were told."""
        with self.engine.connect() as connection:
            rows = connection.execute(text(_SETTLED.format(from_=_INBOX))).all()
        of: dict[str, set[str]] = {"consumed": set(), "parked": set()}
        for body, status in rows:
            of[status].add(body)
        self.counts |= Counter({f"in the end {status}": len(bodies) for status, bodies in of.items()})
        told = {
            f"{key}:{number}": times for key, numbers in self.done.items() for number, times in numbers.items() if times
        }
        for what, found in {
            "were acknowledged more than once": {body for body, times in told.items() if times > 1},
            "were acknowledged, and aren't consumed": told.keys() - of["consumed"],
            "are consumed, and no consumer was told so": of["consumed"] - told.keys(),
        }.items():
            if found:
                yield f"{len(found)} {what}, such as {sorted(found)[:5]}"
        if len(rows) != self.messages:
            yield f"{len(rows)} of {self.messages} are settled"


def end(server: subprocess.Popen[bytes]) -> None:
    """Kill a server."""
    server.kill()
    server.wait()


def run(engine: Engine, folder: Path, messages: int, kills: int, seed: int = 1) -> tuple[Counter[str], list[str]]:
    """Send so many messages beside so many kills; return what was counted, and the faults: there must be none."""
    crowd = Crowd(engine, folder, f"127.0.0.1:{free_port()}", messages)
    Outbox(engine).declare_topic(_TOPIC, 8)
    dice = random.Random(seed)  # noqa: S311
    with ExitStack() as stack:
        servers = [crowd.start(number) for number in range(2)]
        stack.callback(lambda: list(map(end, servers)))
        crowd.wait_for_server()
        pool = stack.enter_context(ThreadPoolExecutor(5))
        stack.callback(crowd.ended.set)
        work = [pool.submit(crowd.produce), *(pool.submit(crowd.consume, number) for number in range(4))]
        for number in range(kills):
            crowd.wait_for((number + 1) * messages // (kills + 1))
            victim = dice.randrange(2)
            end(servers[victim])
            servers[victim] = crowd.start(victim)
        crowd.wait_for(messages)
        crowd.ended.set()
        for each in work:
            each.result()
    crowd.counts["kills"] = kills
    return crowd.counts, [*crowd.faults, *crowd.wrong()]


def main() -> int:
    """Run it; the arguments are the numbers of messages and of kills."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, ExitStack() as stack:
        server = stack.enter_context(Server(folder=Path(name, "data"), settings={"max_connections": "150"}))
        server.create_database("crowd")
        migration.upgrade(server.url("crowd"))
        engine = create_engine(server.url("crowd"))
        stack.callback(engine.dispose)
        counts, found = run(engine, Path(name), int(sys.argv[1]), int(sys.argv[2]))
    for what, number in sorted(counts.items()):
        print(f"{what}: {number:,}")  # noqa: T201
    print(f"seconds: {time.monotonic() - began:.0f}")  # noqa: T201
    print("\n".join(found[:20]) or "faults: 0")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
