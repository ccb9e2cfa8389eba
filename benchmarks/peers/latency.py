"""Latency: from the end of a COMMIT to the start of the handler, at 200 messages a second from another process."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks import handmade
from benchmarks.lab import Lab
from benchmarks.measure import Figure
from benchmarks.peers.business import asyncpg_url, libpq_url, new_order
from outbox import Message, Outbox, Settings
from outbox.worker import Worker

RATE = 200
#: The pause (seconds) of consumers that look again and again: one by hand, and pgmq.
_POLL = 0.010
_IMPORT_SECONDS, _WARM_UP, _DEADLINE = 3.0, 0.5, 30.0
QUEUE = "latency"

#: The number of a message to the moment (`time.monotonic`, the same clock in all processes of a machine).
Moments = dict[int, float]
#: Handles messages until it is told to stop: the URL, what to note their starts in, when to stop.
Listen = Callable[[str, Moments, threading.Event], None]


def measure(lab: Lab) -> Iterator[tuple[str, float, float]]:
    """Yield each library with the median of its rounds' p50 and p99, in milliseconds."""
    found: dict[str, list[list[float]]] = {name: [] for name in LISTENERS}
    for number in range(lab.scale(3, 1)):
        for name in LISTENERS if number % 2 == 0 else reversed(LISTENERS):
            lab.say(f"latency at {RATE}/s: {name}")
            found[name].append(_latencies(name, lab.urls[DATABASES[name]], lab.scale(6, 2)))
    for name, rounds in found.items():
        p50, p99 = (statistics.median(_percentile(each, percent) for each in rounds) for percent in (50, 99))
        yield name, p50, p99


def bars(figures: Mapping[str, tuple[float, float]]) -> Iterator[Figure]:
    """Yield how ours compares with the best of the others, each by its medians of this run."""
    for place, title in enumerate(("p50", "p99")):
        mine = figures["ours"][place]
        best = min(found[place] for name, found in figures.items() if name != "ours")
        what = f"commit → handler at {RATE}/s, {title} ÷ the best of the others"
        yield Figure(what, f"{mine:.1f} ms", f"{best:.1f} ms ({mine / best:.2f})", None, "≤ 1.0", mine <= best)


def _latencies(name: str, url: str, seconds: int) -> list[float]:
    started: Moments = {}
    stop = threading.Event()
    thread = threading.Thread(target=LISTENERS[name], args=(url, started, stop))
    thread.start()
    try:
        begin_at, first = time.monotonic() + _IMPORT_SECONDS, time.time_ns()
        with get_context("spawn").Pool(1) as pool:
            committed = pool.apply(produce, (name, url, first, seconds * RATE, begin_at))
        deadline = time.monotonic() + _DEADLINE
        while (missing := committed.keys() - started.keys()) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert not missing, f"{len(missing)} messages of {name} never arrived"
    # A handler may start before the producer has seen the answer to its COMMIT.
    return [max(started[n] - at, 0.0) * 1000 for n, at in committed.items() if at > begin_at + _WARM_UP]


def produce(name: str, url: str, first: int, count: int, begin_at: float) -> Moments:
    """Send at a fixed rate, one message a transaction; return when each was committed, by its number."""
    committed: Moments = {}
    with SENDERS[name](url) as send:
        for number in range(first, first + count):
            time.sleep(max(begin_at + (number - first) / RATE - time.monotonic(), 0))
            send(new_order() | {"number": number})
            committed[number] = time.monotonic()
    return committed


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


# --- senders ---------------------------------------------------------------------------------------------------------

Send = Callable[[dict[str, Any]], object]


@contextmanager
def _send_ours(url: str) -> Iterator[Send]:
    engine = create_engine(url)
    outbox = Outbox(engine, settings=Settings())

    def send(order: dict[str, Any]) -> None:
        with engine.begin() as connection:
            outbox.send(connection, QUEUE, order, key=str(order["receiver"]))

    yield send


@contextmanager
def _send_by_hand(url: str) -> Iterator[Send]:
    engine = create_engine(url)

    def send(order: dict[str, Any]) -> None:
        with engine.begin() as connection:
            connection.execute(handmade.INSERT, handmade.values(QUEUE, str(order["receiver"]), order))

    yield send


@contextmanager
def _send_pgmq(url: str) -> Iterator[Send]:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        yield lambda order: connection.execute("SELECT pgmq.send(%s, %s::jsonb)", (QUEUE, json.dumps(order)))


@contextmanager
def _send_pgqueuer(url: str) -> Iterator[Send]:
    import asyncpg
    from pgqueuer.queries import Queries

    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(libpq_url(url)))
        queries = Queries.from_asyncpg_connection(connection)
        yield lambda order: runner.run(queries.enqueue(QUEUE, json.dumps(order).encode()))
        runner.run(connection.close())


@contextmanager
def _send_procrastinate(url: str) -> Iterator[Send]:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=libpq_url(url)))
    with app.open():
        yield lambda order: app.configure_task(QUEUE, queue=QUEUE).defer(**order)


@contextmanager
def _send_faststream(url: str) -> Iterator[Send]:
    from faststream_outbox import OutboxBroker, make_outbox_table
    from sqlalchemy import MetaData

    engine = create_async_engine(asyncpg_url(url))
    broker = OutboxBroker(engine, outbox_table=make_outbox_table(MetaData(), table_name="relay"), logger=None)

    async def send(order: dict[str, Any]) -> None:
        async with engine.begin() as connection:
            await broker.publish(order, queue=QUEUE, session=connection)

    with asyncio.Runner() as runner:
        yield lambda order: runner.run(send(order))
        runner.run(engine.dispose())


# --- handlers --------------------------------------------------------------------------------------------------------


def _listen_ours(url: str, started: Moments, stop: threading.Event) -> None:
    engine = create_engine(url)
    outbox = Outbox(engine, settings=Settings())

    @outbox.consumer(QUEUE, group="latency", batch=100, start="now")
    def note(message: Message, _session: Any) -> None:
        started[message.body["number"]] = time.monotonic()

    with Worker(outbox):
        stop.wait()
    engine.dispose()


def _listen_by_hand(url: str, started: Moments, stop: threading.Event) -> None:
    with psycopg.connect(libpq_url(url)) as connection:
        while not stop.wait(_POLL):
            rows: Any = connection.execute(handmade.TAKE, (100,)).fetchall()
            for row in rows:
                # The contest of sending has left some without a number.
                started[row[3].get("number")] = time.monotonic()
            if rows:
                connection.execute(handmade.INBOX, ([row[0] for row in rows],))
            connection.commit()


def _listen_pgmq(url: str, started: Moments, stop: threading.Event) -> None:
    from pgmq import PGMQueue

    queue = PGMQueue(conn_string=libpq_url(url), pool_size=1, init_extension=False)
    queue.create_queue(QUEUE)
    while not stop.is_set():
        found: Any = queue.read_with_poll(QUEUE, vt=60, qty=100, max_poll_seconds=1, poll_interval_ms=int(_POLL * 1000))
        for message in found or ():
            started[message.message["number"]] = time.monotonic()
        if found:
            queue.delete_batch(QUEUE, [message.msg_id for message in found])
    queue.close()


def _listen_pgqueuer(url: str, started: Moments, stop: threading.Event) -> None:
    import asyncpg
    from pgqueuer import PgQueuer

    async def run() -> None:
        connection = await asyncpg.connect(libpq_url(url))
        queuer = PgQueuer.from_asyncpg_connection(connection)

        @queuer.entrypoint(QUEUE)
        async def note(job: Any) -> None:
            started[json.loads(job.payload)["number"]] = time.monotonic()

        running = asyncio.create_task(queuer.qm.run(batch_size=10))
        await asyncio.to_thread(stop.wait)
        queuer.shutdown.set()
        await running
        await connection.close()

    asyncio.run(run())


def _listen_procrastinate(url: str, started: Moments, stop: threading.Event) -> None:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=libpq_url(url), min_size=1, max_size=4))

    @app.task(name=QUEUE, queue=QUEUE)
    async def note(**order: Any) -> None:
        started[order["number"]] = time.monotonic()

    async def run() -> None:
        async with app.open_async():
            worker = app.run_worker_async(
                queues=[QUEUE], concurrency=10, install_signal_handlers=False, delete_jobs="successful"
            )
            running = asyncio.create_task(worker)
            await asyncio.to_thread(stop.wait)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(run())


def _listen_faststream(url: str, started: Moments, stop: threading.Event) -> None:
    from faststream_outbox import OutboxBroker, make_outbox_table
    from sqlalchemy import MetaData

    async def run() -> None:
        engine = create_async_engine(asyncpg_url(url))
        broker = OutboxBroker(engine, outbox_table=make_outbox_table(MetaData(), table_name="relay"), logger=None)

        @broker.subscriber(QUEUE, max_workers=10)
        async def note(body: dict[str, Any]) -> None:
            started[body["number"]] = time.monotonic()

        await broker.start()
        await asyncio.to_thread(stop.wait)
        await broker.stop()
        await engine.dispose()

    asyncio.run(run())


#: Which of the databases of `benchmarks.peers.handling` has the tables of each.
DATABASES = {
    "ours": "ours",
    f"hand-written poller, each {_POLL * 1000:.0f} ms": "hand",
    f"pgmq, polling each {_POLL * 1000:.0f} ms": "pgmq",
    "PgQueuer": "pgqueuer",
    "procrastinate": "procrastinate",
    "faststream-outbox": "faststream",
}
SENDERS = dict(
    zip(
        DATABASES,
        (_send_ours, _send_by_hand, _send_pgmq, _send_pgqueuer, _send_procrastinate, _send_faststream),
        strict=True,
    )
)
LISTENERS: dict[str, Listen] = dict(
    zip(
        DATABASES,
        (_listen_ours, _listen_by_hand, _listen_pgmq, _listen_pgqueuer, _listen_procrastinate, _listen_faststream),
        strict=True,
    )
)
