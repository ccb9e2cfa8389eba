"""RocketMQ's own Python client against our server, and against a real RocketMQ if one is named.

`OUTBOX_TEST_ROCKETMQ` has the address of a real one, with topics and groups as the client needs them, and
`OUTBOX_TEST_ROCKETMQ_PIDS` its processes. Ours are the servers, a worker that dispatches, and PostgreSQL.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import create_engine

from benchmarks.lab import Benchmark, Lab, backend_pid
from benchmarks.measure import Figure, Ratio
from benchmarks.usage import ServerProcesses, processor_seconds
from outbox import Outbox
from outbox.rocketmq.options import RocketmqOptions, ServedTopic
from outbox.rocketmq.server import Listen, RocketmqServer
from outbox.worker import Worker

_PARTS = {"send": 1.0, "receive and acknowledge": 1.25, "push": None, "transaction": 1.0}
#: What each part took: messages a second, and milliseconds of the server's and of the client's processor a message.
Taken = dict[str, tuple[float, float, float]]


def serve(url: str, port: str) -> int:
    """Run a server until SIGTERM."""
    topics = {name: ServedTopic() for name in ("bench", "bench-tx")}
    return RocketmqServer(Outbox(create_engine(url)), RocketmqOptions(topics=topics), [Listen(port=int(port))]).run()


def dispatch(url: str, _: str) -> int:
    """Run a worker until SIGTERM that dispatches what clients send."""
    return Worker(Outbox(create_engine(url)), roles=["dispatch", "release"]).run()


def run(lab: Lab) -> Iterator[Figure]:
    """Measure one server process, two, and the real one."""
    messages, transactions = lab.scale(20_000, 300), lab.scale(5_000, 100)
    ours: dict[int, Taken] = {}
    for number in (1, 2):
        lab.say(f"{number} server processes")
        with _ours(lab, f"rocketmq{number}", number) as (address, seconds):
            ours[number] = _measured(list(_PARTS), seconds, address, messages, transactions)
    lab.say("the library itself")
    with _ours(lab, "rocketmq1", 0) as (_, seconds):
        direct = _measured(["send", "consume"], seconds, lab.urls["rocketmq1"], messages, module="rocketmq_direct")
    for part, (rate, server, client) in direct.items():
        shown = f"{rate:,.0f}/s, {server:.2f} ms CPU a message, the service itself {client:.2f} ms"
        yield Figure(f"{part}, by the library without a server", shown)
    real: Taken = {}
    if named := os.environ.get("OUTBOX_TEST_ROCKETMQ"):
        lab.say("a real one")
        pids = [int(pid) for pid in os.environ.get("OUTBOX_TEST_ROCKETMQ_PIDS", "").split(",") if pid]
        real = _measured(list(_PARTS), lambda: sum(map(processor_seconds, pids)), named, messages, transactions)
    for part, bar in _PARTS.items():
        for number, taken in ours.items():
            rate, server, client = taken[part]
            what = f"{part}, {number} server process{'es' if number > 1 else ''}"
            shown = f"{rate:,.0f}/s, {server:.2f} ms CPU a message, client {client:.2f} ms"
            if part not in real:
                yield Figure(what, shown)
                continue
            theirs = f"{real[part][0]:,.0f}/s, {real[part][1]:.2f} ms"
            ratio = server / real[part][1] if real[part][1] else 0.0
            met = None if bar is None or number > 1 else ratio <= bar
            bar_text = f"≤ {bar} of its CPU" if bar is not None and number == 1 else ""
            yield Figure(f"{what} ÷ RocketMQ", shown, theirs, Ratio(ratio, ratio, ratio), bar_text, met)


@contextmanager
def _ours(lab: Lab, database: str, servers: int) -> Iterator[tuple[str, Callable[[], float]]]:
    url = lab.urls[database]
    with ExitStack() as stack, lab.engine(database).connect() as connection:
        held = stack.enter_context(socket.socket())  # bound, not listened at: nothing else gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        kinds = ["serve"] * servers + ["dispatch"]
        processes = [stack.enter_context(_process("benchmarks.rocketmq", kind, url, port)) for kind in kinds]
        postgres = ServerProcesses(backend_pid(connection))
        if servers:
            _wait_for(int(port))
        yield f"127.0.0.1:{port}", lambda: postgres.seconds + sum(processor_seconds(each.pid) for each in processes)


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _wait_for(port: int) -> None:
    while True:
        with socket.socket() as dialled:
            if dialled.connect_ex(("127.0.0.1", port)) == 0:
                return


def _measured(
    parts: Sequence[str], seconds: Callable[[], float], *arguments: object, module: str = "rocketmq_client"
) -> Taken:
    taken, before = Taken(), 0.0
    with _process(f"benchmarks.{module}", *map(str, arguments)) as client:
        for line in client.stdout:
            said = json.loads(line)
            if "begins" in said:
                before = seconds()
            else:
                number, of_server = said["messages"], seconds() - before
                of_client = said["cpu"] / number * 1000
                taken[said["ends"]] = number / said["seconds"], of_server / number * 1000, of_client
            if len(taken) == len(parts):
                break
            client.stdin.write("\n")
            client.stdin.flush()
    if len(taken) < len(parts):
        raise RuntimeError(f"the client ended before its part {parts[len(taken)]!r}; what it said is above")
    return taken


BENCHMARK = Benchmark(run, ("rocketmq1", "rocketmq2"))

if __name__ == "__main__":
    sys.exit({"serve": serve, "dispatch": dispatch}[sys.argv[1]](*sys.argv[2:]))
