"""A reconciliation that follows the log, while messages pass at a steady rate and some are falsified behind its back.

One process sends, dispatches and consumes; one follows; this one falsifies a message in so many, of those that were
consumed within the last seconds, and notes when its grace period is over. The bar is what the follower, and its
backends in the server, take of a processor.
"""

from __future__ import annotations

import itertools
import queue
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, LiteralString
from uuid import UUID

import psutil
from sqlalchemy import Engine, create_engine

from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, server_seconds
from benchmarks.reconcile_fill import GROUP, TOPIC
from outbox import Outbox, Settings
from outbox.message.model import Message, uuid7
from outbox.reconcile.follow.follower import Follower, PassResult
from outbox.reconcile.job import PASS_EVERY, Access, Job, Pair, Window
from outbox.worker import Worker

#: Messages a second, and how many of them come to one that is falsified.
RATE, ONE_IN = 1_000, 10_000
GRACE = 30.0
#: A difference is to be told so many seconds after its grace period, at most; and the share of a processor.
TOLD_WITHIN, CPU = 60.0, 0.05
_BATCH = 50
#: So long (seconds) before anything is measured: then each pass takes up as many messages as are sent.
_WARM_UP = GRACE + 2 * PASS_EVERY

# Of the messages consumed within the last seconds, one.
_RECENT: LiteralString = """
SELECT message_id FROM outbox.consumer_message
 WHERE consumer_group = 'bank_b' AND message_id >= %s AND status = 'consumed' ORDER BY message_id LIMIT 1
"""
_PHANTOM: LiteralString = """
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts)
VALUES ('bank_b', %s, 'transfer', 0, 1, 'consumed', 1)
"""
#: The damage to a message, its side, and the kind of difference that it makes.
_FALSIFIED: tuple[tuple[str, str, LiteralString], ...] = (
    ("missing", "consumer", "DELETE FROM outbox.consumer_message WHERE message_id = %s"),
    ("digest_mismatch", "consumer", "UPDATE outbox.consumer_message SET body_digest = '\\x00' WHERE message_id = %s"),
    ("phantom", "consumer", _PHANTOM),
    ("torn", "producer", "UPDATE outbox.op_message SET resolution = 'rollback' WHERE half_id = %s"),
    ("undispatched", "producer", "DELETE FROM outbox.message WHERE half_id = %s"),
    ("torn", "producer", "DELETE FROM outbox.half_message WHERE id = %s"),
)


def run(lab: Lab) -> Iterator[Figure]:
    """Falsify for 20 minutes (``--quick``: two), then wait until all that was falsified must have been told."""
    seconds = lab.scale(1_200, 120)
    context = get_context("spawn")
    told: Any = context.Queue()
    end = context.Event()
    arguments = lab.urls["producer"], lab.urls["consumer"], told, end
    processes = [context.Process(target=target, args=arguments, daemon=True) for target in (_traffic, _follow)]
    for process in processes:
        process.start()
    with ended(processes, end):
        backends = told.get(timeout=300)
        time.sleep(_WARM_UP)
        before, since = _cpu(processes[1].pid, backends), time.time()
        falsified = _falsify(lab, seconds)
        until = time.time()
        measured = until - since
        after = _cpu(processes[1].pid, backends)
        time.sleep(GRACE + TOLD_WITHIN)
    found: dict[UUID, tuple[str, float]] = {}
    seconds_of_pass: list[float] = []
    judged = meanwhile = 0
    while True:
        try:
            message = told.get(timeout=5)
        except queue.Empty:
            break
        if len(message) == 2:
            judged += message[0]
            meanwhile += message[0] if since < message[1] < until else 0
        elif len(message) == 1:
            seconds_of_pass += message
        else:
            found[message[0]] = message[1:]
    late = [found[id_][1] - at - GRACE for id_, (kind, at) in falsified.items() if found.get(id_, ("",))[0] == kind]
    false = len(found.keys() - falsified.keys())
    yield Figure(
        "falsified messages that were told by their kind",
        f"{len(late):,} of {len(falsified):,}",
        bar="all",
        met=len(late) == len(falsified),
    )
    yield Figure("messages told that were not falsified", f"{false:,} of {judged:,}", bar="0", met=not false)
    longest = max(late, default=0.0)
    yield Figure(
        "told after the grace period: median, longest",
        f"{statistics.median(late or [0.0]):.0f} s, {longest:.0f} s",
        bar=f"≤ {TOLD_WITHIN:.0f} s",
        met=longest <= TOLD_WITHIN,
    )
    shares = [(now - then) / measured for now, then in zip(after, before, strict=True)]
    yield Figure(
        f"processor at {meanwhile / measured:,.0f} messages/s",
        f"{sum(shares):.2%}",
        bar=f"≤ {CPU:.0%}",
        met=sum(shares) <= CPU,
    )
    yield Figure("of it: the follower, its backends", f"{shares[0]:.2%}, {shares[1]:.2%}")
    yield Figure("duration of a pass, median", f"{statistics.median(seconds_of_pass) * 1000:.0f} ms")


@contextmanager
def ended(processes: list[Any], end: Any) -> Iterator[None]:
    """End the processes with the block."""
    try:
        yield
    finally:
        end.set()
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def _cpu(pid: int | None, backends: list[int]) -> tuple[float, float]:
    """Return the seconds of a processor that a process, and some of the server's, have taken."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system, sum(server_seconds(backend) or 0.0 for backend in backends)


# --- the three processes ---------------------------------------------------------------------------------------------


def _falsify(lab: Lab, seconds: float) -> dict[UUID, tuple[str, float]]:
    """Falsify one message in so many; return the damage by message, and when it was sent."""
    falsified: dict[UUID, tuple[str, float]] = {}
    chance, began = random.Random(1), time.monotonic()
    with lab.psycopg("producer") as producer, lab.psycopg("consumer") as consumer:
        sides = {"producer": producer, "consumer": consumer}
        for side in sides.values():
            side.autocommit = True
        for number in itertools.count():
            due = began + number * ONE_IN / RATE
            if due > began + seconds:
                return falsified
            time.sleep(max(due - time.monotonic(), 0.0))
            kind, side_name, statement = _FALSIFIED[number % len(_FALSIFIED)]
            if kind == "phantom":
                id_ = uuid7()
            else:
                since = uuid7().int - (int(chance.uniform(2.0, 8.0) * 1000) << 80)
                row = consumer.execute(_RECENT, (UUID(int=since),)).fetchone()
                if row is None:
                    continue
                id_ = UUID(str(row[0]))
            sides[side_name].execute(statement, (id_,))
            falsified[id_] = kind, (id_.int >> 80) / 1000
    return falsified


def _traffic(producer: str, consumer: str, _: Any, end: Any) -> None:
    """Send at the rate, dispatch and consume, until the end."""
    source, sink = create_engine(producer), create_engine(consumer)
    sender, receiver = Outbox(source, settings=Settings()), Outbox(sink, settings=Settings())

    @receiver.consumer(TOPIC, group=GROUP, batch=200, source=producer)
    def handle(message: Message, session: Any) -> None:
        """Do nothing."""

    with Worker(sender, roles=["dispatch"]), Worker(receiver, roles=["consume", "retry"]):
        send_steadily(sender, source, RATE, end)


def send_steadily(outbox: Outbox, engine: Engine, rate: int, end: Any) -> None:
    """Send so many messages a second, some in one transaction, until the end."""
    began, sent = time.monotonic(), 0
    while not end.is_set():
        with engine.begin() as connection:
            for n in range(sent, sent + _BATCH):
                outbox.send(connection, TOPIC, {"transfer_id": n, "amount": "12.50"}, key=f"account-{n % 10_000}")
        sent += _BATCH
        time.sleep(max(began + sent / rate - time.monotonic(), 0.0))


def _follow(producer: str, consumer: str, told: Any, end: Any) -> None:
    """Follow, until the end; tell the backends, and then what passes have found, and how long they took."""

    def report(result: PassResult) -> None:
        told.put((result.judged, time.time()))
        for each in result.found:
            told.put((each.id, each.outcome.label, time.time()))

    sides = Access(producer, Settings()), Access(consumer, Settings())
    job = Job(*sides, (Pair(TOPIC, GROUP),), window=Window(grace=GRACE))
    follower = Follower(job, job.pairs[0], "live", PASS_EVERY, report)
    with create_engine(consumer).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        record: Any = connection.connection.dbapi_connection
        follower(connection)
        told.put([*follower.backends, record.info.backend_pid])
        while not end.wait(1.0):
            began = time.monotonic()
            if follower(connection):
                told.put((time.monotonic() - began,))
    follower.close()


BENCHMARK = Benchmark(run, ("producer", "consumer"))
