"""Run all contests, or some: ``python -m benchmarks.peers [--quick] [--markdown] [--only handling,sending]``.

It needs the extra ``peers``. With ``--quick`` the server doesn't wait for its disk, so that only the time of the
processors tells something, and roughly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, text

from benchmarks import fill, table
from benchmarks.__main__ import SERVER_SETTINGS
from benchmarks.lab import Lab, backend_pid, peak_memory
from benchmarks.measure import Figure, Ratio
from benchmarks.peers import business, handling, latency, processes, sending
from benchmarks.peers.contest import Bar, Costs
from benchmarks.usage import ServerProcesses
from outbox import embedded
from outbox.database import migration

NAMES = ("handling", "sending", "latency", "processes", "idle")
_LIBRARIES = ("pgmq", "pgqueuer", "procrastinate", "faststream-outbox")
_TEMPLATE = "migrated"
_HEAD = ("What", "Messages a second", "CPU a message: Python + PostgreSQL", "Compared with")


@dataclass
class Outcome:
    """Rows of the table, under their titles; bars; and notes about them."""

    rows: dict[str, list[tuple[str, str, str, str]]] = field(default_factory=dict)
    bars: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, title: str, costs: dict[str, Costs], bars: tuple[Bar, ...], compared: dict[str, str]) -> None:
        """Take over what came of a contest; ``compared`` names for an arm another one, to which it has a ratio."""
        rows = self.rows.setdefault(title, [])
        for name, found in costs.items():
            ratio = Ratio.of(found.rates, costs[compared[name]].rates) if name in compared else None
            python, server = (median(getattr(cost, part) for cost in found.rounds) for part in ("python", "server"))
            against = "" if ratio is None else f"{ratio} of {compared[name]}"
            rows.append((name, f"{median(found.rates):,.0f}/s", f"{python:,.0f} + {server:,.0f} µs", against))
        for bar in bars:
            if (reached := bar.ratio(costs)) is not None:
                met = reached.median >= bar.least
                ours, theirs = str(costs[bar.ours]), str(costs[bar.against])
                self.bars.append(Figure(bar.what, ours, theirs, reached, f"≥ {bar.least:.2f}", met))
            else:
                self.notes.append(f"{bar.what}: left out, since one of the two isn't there")


def main() -> None:
    """Run the contests asked for, and print the tables."""
    options = _options()
    outcome = Outcome()
    with embedded.server([_TEMPLATE], durable=not options.quick, settings=SERVER_SETTINGS) as server:
        migration.upgrade(server.url(_TEMPLATE))
        prepared = Lab({_TEMPLATE: server.url(_TEMPLATE)}, options.quick).engine(_TEMPLATE)
        business.create(prepared)
        prepared.dispose()
        names = (*handling.DATABASES, "several")
        for name in names:
            server.create_database(name, template=_TEMPLATE)
        lab = Lab({name: server.url(name) for name in names}, options.quick)
        with ExitStack() as stack:
            _run(options.only, lab, stack, outcome)
        lab.say("")
    _print(outcome, markdown=options.markdown)


def _run(only: tuple[str, ...], lab: Lab, stack: ExitStack, outcome: Outcome) -> None:
    observer = stack.enter_context(lab.engine("ours").connect().execution_options(isolation_level="AUTOCOMMIT"))
    server = ServerProcesses(backend_pid(observer))
    # What handles also installs the tables of each library, for the contests after it.
    arms = handling.arms(lab, stack)
    if "handling" in only:
        for title, costs in handling.contests(lab, server, arms):
            outcome.add(title, costs, handling.BARS.get(title, ()), {})
    if "sending" in only:
        _settle(lab, observer)
        for title, costs in sending.contests(lab, server, stack):
            outcome.add(title, costs, sending.BARS, sending.BARE)
    if "latency" in only:
        _settle(lab, observer)
        found = {name: (p50, p99) for name, p50, p99 in latency.measure(lab)}
        outcome.rows[f"commit → handler at {latency.RATE}/s"] = [
            (name, "", "", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms") for name, (p50, p99) in found.items()
        ]
        outcome.bars += latency.bars(found)
    if "processes" in only:
        _settle(lab, observer)
        for title, costs in processes.contests(lab, server):
            outcome.add(title, costs, (), dict.fromkeys(list(costs)[1:], next(iter(costs))))
    if "idle" in only:
        _settle(lab, observer)
        row = (f"{processes.IDLE_GROUPS} groups", "", processes.idle(lab, server), "")
        outcome.rows["a worker with nothing to do: Python + PostgreSQL"] = [row]


def _settle(lab: Lab, observer: Connection) -> None:
    """Have the server clean up and write what contests have left behind: else the next one would pay for it."""
    lab.say("cleaning up")
    for name in lab.urls:
        engine = lab.engine(name)
        fill.vacuum(engine)
        engine.dispose()
    observer.execute(text("CHECKPOINT"))


def _print(outcome: Outcome, *, markdown: bool) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    results = {"bars": (outcome.bars, peak_memory())} if outcome.bars else {}
    if markdown:
        print("\n".join(_markdown(outcome)), *([table.markdown(results)] if results else ()), sep="\n\n")
        print(*(f"- {note}" for note in (versions, *outcome.notes)), sep="\n")
        return
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, justify in zip(_HEAD, ("left", "right", "right", "left"), strict=True):
        shown.add_column(title, justify="right" if justify == "right" else "left", overflow="fold")
    for title, rows in outcome.rows.items():
        shown.add_row(f"[bold]{title}[/]")
        for row in rows:
            shown.add_row(*row)
        shown.add_section()
    console = Console()
    console.width = console.width if console.is_terminal else 150
    console.print(shown)
    if results:
        table.show(results)
    console.print(*(versions, *outcome.notes), sep="\n")


def _markdown(outcome: Outcome) -> Iterator[str]:
    yield f"| {' | '.join(_HEAD)} |"
    yield "|---|---:|---:|---|"
    for title, rows in outcome.rows.items():
        yield f"| **{title}** | | | |"
        yield from (f"| {' | '.join(row)} |" for row in rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.peers", description="Measure the outbox beside its peers.")
    names = partial(table.names, known=NAMES)
    parser.add_argument("--only", type=names, default=NAMES, metavar="NAMES", help=f"some of {','.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: rough figures in three minutes")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    return parser.parse_args()


if __name__ == "__main__":
    main()
