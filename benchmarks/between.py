"""Compare this checkout with another one: ``python -m benchmarks.between ../before [--rounds 24] [--only send,list]``.

Two runs, one after the other, tell nothing below a tenth: the speed of a machine that others share changes by more. So
each checkout has a process and a server of its own, which take turns arm by arm, and the ratios are taken round by
round. The arms are ours of `benchmarks.peers`, as the other checkout has them; beside them a hand-written one, which is
the same in both, and tells how much to trust the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab import Lab, backend_pid, peak_memory
from benchmarks.measure import Figure, Ratio

#: No change may make anything slower than this.
LEAST = 0.97
_HERE = Path(__file__).resolve().parents[1]
_DATABASES = ("ours", "hand")


def main() -> None:
    """Compare, and print the figures."""
    parser = argparse.ArgumentParser("python -m benchmarks.between", description="Compare two checkouts.")
    parser.add_argument("other", type=Path, nargs="?", help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=24, help="so many of each arm count (24)")
    parser.add_argument("--only", type=lambda names: names.split(","), metavar="ARMS", help="arms, with commas")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve()
        return
    if options.other is None or not (options.other / "benchmarks" / "peers").is_dir():
        parser.error(f"{options.other} is no folder of a checkout with benchmarks/peers")
    from benchmarks import table

    figures = list(_compared(options.other.resolve(), options.rounds, options.only))
    table.show({"both ÷ what it was": (figures, peak_memory())})
    sys.exit(any(figure.met is False for figure in figures))


def _compared(other: Path, rounds: int, only: list[str] | None) -> Iterator[Figure]:
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(_Served(folder)) for folder in (_HERE, other))
        names = [name for name in ours.names if name in theirs.names and (only is None or name in only)]
        if unknown := sorted(set(only or ()).difference(names)):
            raise SystemExit(f"no such arms: {', '.join(unknown)}; there are {', '.join(ours.names)}")
        costs: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in names}
        for number in range(rounds + 1):
            for name in names:
                turns = (ours, theirs) if number % 2 else (theirs, ours)
                found = {each: each.measure(name) for each in turns}
                if number:  # the first is warm-up
                    costs[name].append((found[ours], found[theirs]))
                Lab({}, quick=False).say(f"round {number} of {rounds}: {name}")
    for name, each in costs.items():
        rates = Ratio.of(*([cost[side][0] for cost in each] for side in (0, 1)))
        cpus = Ratio.of(*([sum(cost[side][1:]) for cost in each] for side in (1, 0)))
        now, before = (_text([cost[side] for cost in each]) for side in (0, 1))
        bar = "" if name.endswith("by hand") else f"≥ {LEAST}"
        for what, ratio in (("rate", rates), ("CPU", cpus)):
            yield Figure(f"{name}, by {what}", now, before, ratio, bar, ratio.median >= LEAST if bar else None)


def _text(costs: list[list[float]]) -> str:
    rate, python, server = (median(column) for column in zip(*costs, strict=True))
    return f"{rate:,.0f}/s ({python:,.0f} + {server:,.0f} µs)"


class _Served:
    """A process with the arms of a checkout, one of which it runs when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Not as a module: the other checkout may be older than this file.
        command = [sys.executable, "-P", __file__, "--serve"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        pipe: Any = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.names: list[str] = self._answer()

    def measure(self, name: str) -> list[float]:
        """Return messages a second, and microseconds of Python and of the server for each."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        found: list[float] = self._answer()
        return found

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"the process of {self._folder} ended")
        return json.loads(line)

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def _serve() -> None:
    """Run the arms that are named on stdin, and answer what each cost."""
    from benchmarks.__main__ import SERVER_SETTINGS
    from benchmarks.peers import business, hand, ours, sending
    from benchmarks.peers.contest import measured_cost
    from benchmarks.usage import ServerProcesses
    from outbox import Outbox, Settings, embedded
    from outbox.database import migration

    answers, sys.stdout = sys.stdout, sys.stderr
    with embedded.server(["migrated"], settings=SERVER_SETTINGS) as server, ExitStack() as stack:
        migration.upgrade(server.url("migrated"))
        prepared = Lab({"migrated": server.url("migrated")}, quick=False).engine("migrated")
        business.create(prepared)
        prepared.dispose()
        for name in _DATABASES:
            server.create_database(name, template="migrated")
        lab = Lab({name: server.url(name) for name in _DATABASES}, quick=False)
        observer = lab.engine("ours").connect().execution_options(isolation_level="AUTOCOMMIT")
        processes = ServerProcesses(backend_pid(stack.enter_context(observer)))
        mine, by_hand = ours.OurArms(lab.urls["ours"], stack), hand.HandArms(lab.urls["hand"], stack)
        outbox = Outbox(lab.engine("ours"), settings=Settings())

        def send(session: Any, order: dict[str, Any]) -> None:
            outbox.send(session, "sent", order, key=str(order["receiver"]))

        arms = {
            "session": (400, mine.arm(ours.credit, batch=1)),
            "cursor": (400, dict(mine.cursor_arms(batch=1))["ours, cursor"]),
            "one by hand": (400, by_hand.arm(hand.each, 1)),
            "session in batches": (2_000, mine.arm(ours.credit, batch=100)),
            "cursor in batches": (2_000, dict(mine.cursor_arms(batch=100))["ours, cursor"]),
            "pipeline": (2_000, dict(mine.cursor_arms(batch=100))["ours, cursor, pipeline"]),
            "list": (8_000, mine.arm(ours.credit_all, batch=100, takes_batch=True)),
            "nothing": (8_000, mine.arm(ours.nothing, batch=100)),
            "lists of nothing": (8_000, mine.arm(ours.nothing_all, batch=100, takes_batch=True)),
            "nothing by hand": (8_000, by_hand.arm(None)),
            "send": (300, sending._arm(lab, "ours", send)),
        }
        print(json.dumps(list(arms)), file=answers, flush=True)
        for name in iter(sys.stdin.readline, ""):
            messages, arm = arms[name.strip()]
            arm.fill(messages)
            gc.collect()
            cost = measured_cost(partial(arm.handle, messages), messages, processes)
            print(json.dumps([cost.rate, cost.python, cost.server]), file=answers, flush=True)


if __name__ == "__main__":
    main()
