"""``outbox run`` as processes of its own: the throughput of 1, 2 and 4; what one with many groups takes while idle."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, text

from benchmarks import fill
from benchmarks.lab import Lab
from benchmarks.peers.app import GROUP, TOPIC
from benchmarks.peers.contest import Cost, Costs
from benchmarks.usage import ServerProcesses, processor_seconds

COUNTS = (1, 2, 4)
SEVERAL = "outbox run --processes N, exactly-once effect, batch=100, a call each"
IDLE_GROUPS = 50
_READY = text("SELECT count(*) FROM outbox.worker")
_HANDLED = text("SELECT count(*) FROM outbox.consumer_message WHERE consumer_group = :group AND status = 'consumed'")
_PAUSE = 0.02
#: Until what a worker does at its start is over (seconds).
_SETTLE = 5.0


def contests(lab: Lab, server: ServerProcesses) -> Iterator[tuple[str, dict[str, Costs]]]:
    """Yield the costs by the number of processes, which take turns."""
    engine, messages, handled = lab.engine("several"), lab.scale(40_000, 2_000), 0
    costs: dict[int, list[Cost]] = {count: [] for count in COUNTS}
    for number in range(lab.scale(3, 1)):
        for count in COUNTS if number % 2 == 0 else reversed(COUNTS):
            lab.say(f"{SEVERAL}: {count}")
            with _workers(lab.urls["several"], engine, count) as pid:
                python, of_server, began = processor_seconds(pid), server.seconds, time.perf_counter()
                fill.backlog(engine, TOPIC, messages)
                handled += messages
                with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                    while (connection.scalar(_HANDLED, {"group": GROUP}) or 0) < handled:
                        time.sleep(_PAUSE)
                seconds = time.perf_counter() - began
                python, of_server = processor_seconds(pid) - python, server.seconds - of_server
            costs[count].append(Cost(messages / seconds, python / messages * 1e6, of_server / messages * 1e6))
    yield SEVERAL, {f"{count} process{'es' * (count > 1)}": Costs(rounds) for count, rounds in costs.items()}


def idle(lab: Lab, server: ServerProcesses) -> str:
    """Return what a worker of 50 groups takes of a processor, and has the server take, while nothing happens."""
    seconds, engine = lab.scale(30, 6), lab.engine("several")
    lab.say(f"a worker of {IDLE_GROUPS} groups with nothing to do")
    with _workers(lab.urls["several"], engine, 1, IDLE_GROUPS) as pid:
        time.sleep(_SETTLE)
        shares: list[tuple[float, float]] = []
        for _ in range(3):
            python, of_server, began = processor_seconds(pid), server.seconds, time.perf_counter()
            time.sleep(seconds / 3)
            passed = time.perf_counter() - began
            shares.append(((processor_seconds(pid) - python) / passed, (server.seconds - of_server) / passed))
    python, of_server = (statistics.median(each) * 100 for each in zip(*shares, strict=True))
    return f"{python:.1f} % + {of_server:.1f} % of one processor"


@contextmanager
def _workers(url: str, engine: Engine, processes: int, groups: int = 1) -> Iterator[int]:
    """Run workers until the block ends; yield the process of the command, once all have reported."""
    command = ["run", "--app", "benchmarks.peers.app:make()", "--processes", str(processes), "--log-level", "warning"]
    environment = {**os.environ, "OUTBOX_BENCH_URL": url, "OUTBOX_BENCH_GROUPS": str(groups)}
    process = subprocess.Popen([sys.executable, "-m", "outbox.cli", *command], env=environment)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while (connection.scalar(_READY) or 0) < processes:
                assert process.poll() is None, "the workers have ended"
                time.sleep(_PAUSE)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
