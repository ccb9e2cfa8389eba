"""A transaction held open for the whole run: ours against itself without one, and the hand-written queue likewise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from sqlalchemy import Engine, text

from benchmarks import bank, fill, handmade
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Arm, Figure, Ratio, compared, interleave, per_second, rate
from benchmarks.readers import TOPIC, Ours
from outbox import Outbox, Settings
from outbox.worker.connections import WorkerDatabase

_TRANSACTIONS, _TOGETHER = 20, 100
_MESSAGES = _TRANSACTIONS * _TOGETHER
_BATCH = 100


def run(lab: Lab) -> Iterator[Figure]:
    """Send, dispatch and consume, chunk after chunk; a database for each arm, since a snapshot holds back its own."""
    names = ("free", "snapshot", "writing", "hand_free", "hand_pinned")
    with ExitStack() as open_:
        arms: dict[str, Arm] = {}
        for name in names:
            engine = lab.engine(name)
            handmade.create(engine)
            if name not in {"free", "hand_free"}:
                open_.enter_context(held_open(lab.engine(name), writing=name == "writing"))
            chunk = _by_hand(engine) if name.startswith("hand") else _ours(engine, open_)
            arms[name] = partial(rate, _MESSAGES, chunk)
        lab.say("pinned: send, dispatch and consume")
        results = interleave(arms, lab.scale(60, 8))
    what = "send + dispatch + consume, "
    for name, how in (("snapshot", "a snapshot held open"), ("writing", "a writing transaction held open")):
        yield compared(what + how, "messages", results[name], "without", results["free"], 0.95)
        yield _decay(f"{how}: last quarter of the run ÷ first", results[name], results["free"], 0.95)
    yield compared(
        "hand-written queue, a snapshot held open",
        "messages",
        results["hand_pinned"],
        "without",
        results["hand_free"],
        None,
    )
    what = "hand-written queue, a snapshot held open: last quarter ÷ first"
    yield _decay(what, results["hand_pinned"], results["hand_free"], None)


@contextmanager
def held_open(engine: Engine, *, writing: bool) -> Iterator[None]:
    """Hold a transaction open that has a snapshot and, if ``writing``, an xid."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.execute(text("SELECT count(*) FROM outbox.topic"))
        if writing:
            connection.execute(text("SELECT pg_current_xact_id()"))
        yield
        connection.rollback()


def _ours(engine: Engine, open_: ExitStack) -> Arm:
    outbox = Outbox(engine, settings=Settings())
    connection = open_.enter_context(engine.connect())
    worker = open_.enter_context(WorkerDatabase(engine).connect())
    consumer = Ours(worker, worker, outbox.settings, lambda _message, _session: None, _BATCH)

    def chunk() -> float:
        for _ in range(_TRANSACTIONS):
            with connection.begin():
                for order in [bank.new_order() for _ in range(_TOGETHER)]:
                    outbox.send(connection, TOPIC, order, key=order["receiver"])
        fill.dispatch_all(worker, outbox.settings)
        consumer.all()
        return 0.0

    return chunk


def _by_hand(engine: Engine) -> Arm:
    def chunk() -> float:
        with engine.connect() as connection:
            for _ in range(_TRANSACTIONS):
                orders = [bank.new_order() for _ in range(_TOGETHER)]
                connection.execute(handmade.INSERT_ALL, handmade.columns(TOPIC, orders))
                connection.commit()
            while rows := connection.exec_driver_sql(handmade.TAKE, (_BATCH,)).fetchall():
                connection.exec_driver_sql(handmade.INBOX, ([row[0] for row in rows],))
                connection.commit()
        return 0.0

    return chunk


def _decay(what: str, pinned: list[float], free: list[float], bar: float | None) -> Figure:
    """Compare the ratio to the free run at the end with that at the beginning: what grew worse with time."""
    quarter = max(len(pinned) // 4, 1)
    first, last = (Ratio.of(pinned[part], free[part]).median for part in (slice(quarter), slice(-quarter, None)))
    change = last / first
    return Figure(
        what,
        per_second(pinned[-quarter:]),
        per_second(pinned[:quarter]),
        Ratio(change, change, change),
        "" if bar is None else f"≥ {bar:.2f}",
        None if bar is None else change >= bar,
    )


BENCHMARK = Benchmark(run, ("free", "snapshot", "writing", "hand_free", "hand_pinned"))
