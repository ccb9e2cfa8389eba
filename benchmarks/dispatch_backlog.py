"""A backlog of 10 million: its rate from beginning to end, beside one of 200,000, and the memory that it takes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, text

from benchmarks import fill
from benchmarks.lab import Benchmark, Lab, backend_pid
from benchmarks.measure import Figure, Ratio, per_second, server_seconds
from outbox import Settings
from outbox.dispatch.dispatch_pass import dispatch_once

_TOPIC = "transfer"
_SMALL = 200_000
_PARTS = 10
#: How much (MiB) a process may grow over the whole backlog, and how much slower it may be than a small one.
_GROWTH = 32.0
_RATIO = 0.95
_TEMP = text("SELECT temp_bytes FROM pg_stat_database WHERE datname = current_database()")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a backlog: messages a second, CPU of the server process a message (µs), and MiB at its end."""

    rate: float
    cpu: float
    worker: float
    server: float


def run(lab: Lab) -> Iterator[Figure]:
    """Dispatch small backlogs, then the large one, each in tenths."""
    settings, engine = Settings(), lab.engine("main")
    small, large = lab.scale(_SMALL, 20_000), lab.scale(10_000_000, 100_000)
    # A session of its own for each: what a session has used once, it keeps.
    smalls = [_dispatched(lab, settings, small, 1)[0] for _ in range(lab.scale(5, 2))]
    with engine.connect() as connection:
        before = int(connection.scalar(_TEMP) or 0)
    parts = _dispatched(lab, settings, large, _PARTS)
    with engine.connect() as connection:
        spilled = int(connection.scalar(_TEMP) or 0) - before
    usual = [part.rate for part in smalls]
    rates = [part.rate for part in parts]
    middle = statistics.median(usual)
    ratio = Ratio.of(rates, [middle] * len(rates))
    yield Figure(
        f"backlog of {large:,}, its tenths ÷ backlogs of {small:,}",
        f"{per_second(rates)} messages",
        per_second(usual),
        ratio,
        f"≥ {_RATIO:.2f}",
        ratio.median >= _RATIO,
    )
    yield Figure("the same, tenth by tenth", ", ".join(f"{part.rate / 1000:.0f}" for part in parts) + " thousand/s")
    yield Figure(
        "CPU of the server process a message",
        f"{statistics.mean(part.cpu for part in parts):.1f} µs",
        f"{statistics.median(part.cpu for part in smalls):.1f} µs",
    )
    for who in ("worker", "server"):
        grown = getattr(parts[-1], who) - getattr(parts[0], who)
        yield Figure(
            f"memory of the {who} process, from the first tenth to the last",
            f"{getattr(parts[0], who):.0f} → {getattr(parts[-1], who):.0f} MiB",
            bar=f"≤ {_GROWTH:+.0f} MiB",
            met=grown <= _GROWTH,
        )
    yield Figure("temporary files that the backlog was written to", f"{spilled / 2**20:.0f} MiB")


def _dispatched(lab: Lab, settings: Settings, count: int, parts: int) -> list[_Part]:
    """Write a backlog and dispatch it; return its parts."""
    lab.say(f"dispatch_backlog: filling {count:,}")
    fill.backlog(lab.engine("main"), _TOPIC, count)
    fill.vacuum(lab.engine("main"))
    with lab.worker_connection("main") as connection:
        done = []
        for number in range(1, parts + 1):
            lab.say(f"dispatch_backlog: {count:,}, part {number} of {parts}")
            done.append(_part(connection, settings, count // parts, last=number == parts))
        return done


def _part(connection: Connection, settings: Settings, count: int, *, last: bool) -> _Part:
    pid, done = backend_pid(connection), 0
    began, cpu = time.perf_counter(), server_seconds(pid) or 0.0
    while done < count or last:
        counts = dispatch_once(connection, settings)
        done += counts.done
        if not counts and not counts.more:
            break
    seconds, used = time.perf_counter() - began, (server_seconds(pid) or 0.0) - cpu
    return _Part(done / seconds, used / max(done, 1) * 1e6, _private_mib(os.getpid()), _private_mib(pid))


def _private_mib(pid: int) -> float:
    """Return a process's memory in MiB, without what it shares (the server's buffers); 0 where it can't be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


BENCHMARK = Benchmark(run)
