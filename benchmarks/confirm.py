"""Deliveries: what it costs a producer to learn what became of a day's messages, of which some are lost."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, text

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab, backend_pid
from benchmarks.measure import Figure, Ratio, median_time, milliseconds, server_seconds
from benchmarks.pinned import held_open
from outbox import Outbox, Settings
from outbox.delivery.confirm_pass import confirm_once
from outbox.dispatch.dispatch_pass import dispatch_once

_TOPIC, _GROUP = "transfer", "bank_b"
#: One message in so many is lost: the group has read past it, and its inbox doesn't have it.
_LOST = 1_000

# As a consumer leaves it that has read all there is: the inbox rows, and the newest offset of each queue.
_CONSUME = text("""
INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts, body_digest)
SELECT :group, m.half_id, m.topic, m.queue, m.position, 'consumed', 1, h.body_digest
  FROM outbox.message m JOIN outbox.half_message h ON h.id = m.half_id
 WHERE m.topic = :topic AND m.send_number = 1 AND m.position % :lost <> 0
ON CONFLICT DO NOTHING
""")
_READ_PAST = text("""
INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts)
SELECT :group, topic, queue, max(position), 0 FROM outbox.message WHERE topic = :topic GROUP BY topic, queue
ON CONFLICT DO NOTHING
""")

# The same fates in two statements: what it costs PostgreSQL to compare the tables, which it can where both are its own.
_BY_HAND = text("""
INSERT INTO fate (half_id, consumer_group, status)
SELECT m.half_id, :group, coalesce(c.status, 'unconsumed')
  FROM outbox.message m
  LEFT JOIN outbox.consumer_message c ON c.consumer_group = :group AND c.message_id = m.half_id
 WHERE m.topic = :topic
ON CONFLICT DO NOTHING
""")
_FATE = text("""
CREATE TABLE IF NOT EXISTS fate (
    half_id uuid, consumer_group text, status text, recorded_at timestamptz DEFAULT clock_timestamp(),
    PRIMARY KEY (half_id, consumer_group))
""")

# Of all sessions: nothing else works in this database.
_ROWS = text("""
SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint
  FROM pg_stat_user_tables WHERE schemaname = 'outbox'
""")
_DEAD = text("SELECT sum(n_dead_tup)::bigint FROM pg_stat_user_tables WHERE schemaname = 'outbox'")


@dataclass(frozen=True, slots=True)
class _Cost:
    """What passes took: seconds, of the server's process too, and rows that the server read."""

    found: int
    seconds: float
    cpu: float | None
    rows: int

    def __str__(self) -> str:
        cpu = "" if self.cpu is None else f", {self.cpu:.1f} s CPU of the server"
        speed, rows = self.found / self.seconds, self.rows / self.found
        return f"{self.seconds:.1f} s, {speed:,.0f}/s{cpu}, {rows:.1f} rows read a message"


def run(lab: Lab) -> Iterator[Figure]:
    """Measure a day's messages, and another day's while a transaction is held open."""
    engine, count = lab.engine("main"), lab.scale(1_000_000, 20_000)
    outbox = Outbox(engine, settings=Settings(confirm_grace=0.0))
    outbox.known_group(_TOPIC, group=_GROUP)
    with engine.begin() as connection:
        connection.execute(_FATE)
    # Each batch tells what it sends again.
    logging.getLogger("outbox.delivery").setLevel(logging.ERROR)
    with lab.worker_connection("main") as connection:
        one_pass = _Pass(connection, outbox)
        free = _day(lab, engine, one_pass, count, "")
        yield free.figure(count, "")
        yield _again(lab, one_pass, count, "")
        with held_open(lab.engine("main"), writing=True):
            pinned = _day(lab, engine, one_pass, count, ", a transaction held open")
            yield pinned.figure(count, ", a transaction held open")
            yield _again(lab, one_pass, count, ", a transaction held open")
        ratio = free.cost.seconds / pinned.cost.seconds
        yield Figure(
            "deliveries a second, a transaction held open ÷ without",
            f"{pinned.cost.found / pinned.cost.seconds:,.0f}/s",
            f"{free.cost.found / free.cost.seconds:,.0f}/s",
            Ratio(ratio, ratio, ratio),
            "≥ 0.95",
            ratio >= 0.95,
        )
        with engine.connect() as reader:
            yield Figure("dead rows that all passes left behind", f"{reader.scalar(_DEAD) or 0:,}")


class _Pass:
    """A worker's confirm pass."""

    def __init__(self, connection: Connection, outbox: Outbox) -> None:
        self.pid = backend_pid(connection)
        self._connection = connection
        self._outbox = outbox

    def __call__(self) -> int:
        """Run one; return how many deliveries it wrote."""
        counts = confirm_once(
            self._connection,
            self._outbox.settings,
            groups=self._outbox.groups_to_confirm(),
            callbacks=self._outbox.delivery_callbacks,
        )
        return counts.taken


@dataclass(frozen=True, slots=True)
class _Day:
    """Hold the cost of a day's messages, and of the same by hand (seconds)."""

    cost: _Cost
    by_hand: float

    def figure(self, count: int, besides: str) -> Figure:
        """Return the line of the table."""
        ratio = self.cost.seconds / self.by_hand
        what = f"confirm {count:,} messages, one in {_LOST:,} lost and sent again{besides} ÷ a join in one statement"
        return Figure(what, str(self.cost), f"{self.by_hand:.1f} s", Ratio(ratio, ratio, ratio))


def _day(lab: Lab, engine: Engine, one_pass: _Pass, count: int, besides: str) -> _Day:
    lab.say(f"confirm: filling{besides}")
    fill.messages(engine, _TOPIC, count, Settings())
    values = {"group": _GROUP, "topic": _TOPIC, "lost": _LOST}
    with engine.begin() as connection:
        connection.execute(_CONSUME, values)
        connection.execute(_READ_PAST, values)
    fill.vacuum(engine)
    lab.say(f"confirm: asking{besides}")
    before, cpu, began = _rows(engine), server_seconds(one_pass.pid), time.perf_counter()
    found = one_pass()
    seconds = time.perf_counter() - began
    used = None if cpu is None else (server_seconds(one_pass.pid) or cpu) - cpu
    cost = _Cost(found, seconds, used, _rows(engine) - before)
    lab.say(f"confirm: by hand{besides}")
    began = time.perf_counter()
    with engine.begin() as connection:
        connection.execute(_BY_HAND, values)
    by_hand = time.perf_counter() - began
    # The group reads a message that was sent again: the next pass finds it consumed.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while dispatch_once(connection, Settings()).more:
            pass
    with engine.begin() as connection:
        connection.execute(_CONSUME, values | {"lost": 1 << 60})
        connection.execute(_READ_PAST, values)
    one_pass()
    return _Day(cost, by_hand)


def _again(lab: Lab, one_pass: _Pass, count: int, besides: str) -> Figure:
    durations = [median_time(1, one_pass) for _ in range(lab.scale(30, 5))]
    met = statistics.median(durations) <= 20
    what = f"pass with nothing to do, {count:,} messages confirmed{besides}"
    return Figure(what, milliseconds(durations), bar="≤ 20 ms", met=met)


def _rows(engine: Engine) -> int:
    """Return how many rows the server has read so far; sessions tell it of theirs within a second, and at their end."""
    seen = -1
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while seen != (now := int(connection.scalar(_ROWS) or 0)):
            seen = now
            time.sleep(1.5)
    return now


BENCHMARK = Benchmark(run)
