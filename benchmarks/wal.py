"""WAL: what a message costs the log from send to confirmed, by statement, beside an outbox of one table.

Full-page images are left out: how many there are is a matter of checkpoints, the same for both. So are nudges: each
that isn't coalesced is a COMMIT of 40 bytes, which an outbox that is polled doesn't have. Where the server has
pg_walinspect (15 or newer) and lets this role use it, each statement's bytes are told by table and index, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from benchmarks import fill, handmade
from benchmarks.bank import TOPIC, new_order
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Figure, Ratio
from outbox import Message, Outbox, Settings
from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription
from outbox.delivery.confirm_pass import confirm_once

#: A message costs at most so many times what it costs an outbox of one table.
_BAR = 2.0
_BATCH = 100
_GROUP = "bank_b"
#: So many go all the way before any is counted: pages, caches and statistics are there, as in a day's work.
_BEFORE = 2_000

_AT = text("SELECT pg_current_wal_insert_lsn()::text")
_BYTES = text("SELECT pg_wal_lsn_diff(CAST(:end AS pg_lsn), CAST(:begin AS pg_lsn))")
# Only what is on the disk can be inspected, and not all commits wait for it.
_FLUSH = text("SELECT pg_logical_emit_message(true, 'wal', '')")
_RECORDS = text("""
SELECT resource_manager || ' ' || record_type, coalesce(block_ref, ''), record_length, fpi_length
  FROM pg_get_wal_records_info(CAST(:begin AS pg_lsn), CAST(:end AS pg_lsn))
""")
# A partition is shown as the table or the index that it is a part of.
_RELATIONS = text("""
SELECT pg_relation_filenode(c.oid)::text, coalesce(p.relname, c.relname)
  FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = i.inhparent
 WHERE pg_relation_filenode(c.oid) IS NOT NULL
""")
_REL = re.compile(r"rel \d+/\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class _Log:
    """What a statement has written: bytes a message, and of these by relation or kind of record, where known."""

    total: float
    parts: Counter[str]

    def __str__(self) -> str:
        return f"{self.total:,.0f} B"


class _Meter:
    """Reads the log of a server on which nothing else works."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            self._connection.execute(text("CREATE EXTENSION IF NOT EXISTS pg_walinspect"))
            self._inspects = True
        except DBAPIError:
            self._inspects = False

    def __enter__(self) -> _Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def of(self, count: int, work: Callable[[], object]) -> _Log:
        """Return what ``work`` wrote for each of ``count`` messages."""
        begin = self._connection.scalar(_AT)
        work()
        span = {"begin": begin, "end": self._connection.scalar(_AT)}
        if not self._inspects:
            return _Log(float(self._connection.scalar(_BYTES, span) or 0) / count, Counter())
        self._connection.execute(_FLUSH)
        names: dict[str, str] = dict(self._connection.execute(_RELATIONS).tuples().all())
        parts: Counter[str] = Counter()
        for kind, blocks, length, images in self._connection.execute(_RECORDS, span):
            # Records begin at multiples of eight.
            name = next((names[node] for node in _REL.findall(blocks) if node in names), kind)
            # Of the catalog, autovacuum writes.
            if not name.startswith("pg_"):
                parts[name] += -(-(length - images) // 8) * 8
        return _Log(parts.total() / count, Counter({name: bytes_ / count for name, bytes_ in parts.items()}))


def run(lab: Lab) -> Iterator[Figure]:
    """Measure each statement of a message's way: sent alone, then dispatched, consumed and confirmed in batches."""
    engine, count = lab.engine("main"), lab.scale(20_000, 2_000)
    outbox = Outbox(engine, settings=Settings(confirm_grace=0.0, listen=False))
    handmade.create(engine)
    bare = create_engine(engine.url)
    logs: dict[str, _Log] = {}
    with _Meter(engine) as meter, lab.worker_connection("main") as connection:
        ours = _Ours(outbox, engine, connection)
        ours.all(_BEFORE)
        _by_hand(bare, _BEFORE)
        fill.vacuum(engine)
        for name, work in ours.steps(count).items():
            lab.say(f"wal: {name}")
            logs[name] = meter.of(count, work)
        lab.say("wal: by hand")
        by_hand = meter.of(count, partial(_by_hand, bare, count))
    total = sum(log.total for log in logs.values())
    ratio = total / by_hand.total
    yield Figure(
        "a message, from send to confirmed ÷ INSERT and batched DELETE",
        f"{total:,.0f} B",
        str(by_hand),
        Ratio(ratio, ratio, ratio),
        f"≤ {_BAR}",
        ratio <= _BAR,
    )
    for name, log in {**logs, "by hand": by_hand}.items():
        yield Figure(name, *(("", str(log)) if name == "by hand" else (str(log),)))
        for part, bytes_ in log.parts.most_common():
            if bytes_ >= 0.5:
                yield Figure(f"  {name}: {part}", f"{bytes_:,.1f} B")


class _Ours:
    """The way of our messages."""

    def __init__(self, outbox: Outbox, engine: Engine, connection: Connection) -> None:
        self._outbox, self._engine, self._connection = outbox, engine, connection
        outbox.known_group(TOPIC, group=_GROUP)
        delays = outbox.settings.retry_delays
        subscription = Subscription(TOPIC, _nothing, group=_GROUP, retry_delays=delays, batch=_BATCH)
        self._consumer = Consumer(subscription, outbox.settings, lambda: False)
        self._consumer.start(connection, connection)

    def steps(self, count: int) -> dict[str, Callable[[], object]]:
        """Return what is done for so many messages, in this order."""
        return {
            "send": lambda: self._send(count),
            "dispatch": lambda: fill.dispatch_all(self._connection, self._outbox.settings),
            "consume": self._consume,
            "confirm": self._confirm,
        }

    def all(self, count: int) -> None:
        """Do it."""
        for work in self.steps(count).values():
            work()

    def _send(self, count: int) -> None:
        for _ in range(count):
            order = new_order()
            with Session(self._engine) as session, session.begin():
                self._outbox.send(session, TOPIC, order, key=order["receiver"])

    def _consume(self) -> None:
        while self._consumer.consume_once(self._connection, self._connection):
            pass

    def _confirm(self) -> None:
        groups = self._outbox.groups_to_confirm()
        while confirm_once(self._connection, self._outbox.settings, groups=groups, callbacks={}):
            pass


def _by_hand(engine: Engine, count: int) -> None:
    for _ in range(count):
        order = new_order()
        with Session(engine) as session, session.begin():
            session.execute(handmade.INSERT, handmade.values(TOPIC, order["receiver"], order))
    taken = 1
    while taken:
        with engine.begin() as connection:
            taken = connection.exec_driver_sql(handmade.TAKE, (_BATCH,)).rowcount


def _nothing(message: Message, session: Session) -> None:
    pass


BENCHMARK = Benchmark(run)
