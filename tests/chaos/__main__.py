"""Run the chaos: ``python -m tests.chaos [--kills 10000] [--flows 2000]``; the exit code is 1 if anything is amiss."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos.run import Outcome, chaos


def main() -> int:
    """Run it from the command line; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description="Kill everything, and count the money.")
    parser.add_argument("--kills", type=int, default=1_000, help="how many kills at least (default: %(default)s)")
    parser.add_argument("--flows", type=int, default=0, help="how many orders at least (default: as it comes)")
    parser.add_argument("--seed", type=int, default=1, help="of the dice; the moments of the kills differ all the same")
    options = parser.parse_args()
    screen = Console(stderr=True)
    columns = (TextColumn("kills"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("kills", total=options.kills)
        outcome = chaos(
            options.kills, options.seed, flows=options.flows, show=lambda made: progress.update(task, completed=made)
        )
    Console().print(_table(outcome), *outcome.faults, sep="\n")
    return 1 if outcome.faults else 0


def _table(outcome: Outcome) -> Table:
    audit = outcome.audit
    table = Table("what", "number", title=f"{outcome.kills.total():,} kills in {outcome.seconds:,.0f} s")
    table.columns[1].justify = "right"
    rows = [
        *((f"killed: {what}", number) for what, number in outcome.kills.most_common()),
        ("orders executed, as tellers were told", outcome.told["executed"]),
        ("orders refused", outcome.told["refused"]),
        ("transfers of bank A", audit.transfers),
        ("halves decided by the check", len(audit.halves.orphans)),
        *((f"transfers {state}", number) for state, number in sorted(audit.states.counts.items())),
        ("seconds to the end of the slowest transfer", round(audit.states.slowest)),
        ("transfers lost or still on their way", audit.in_flight),
        ("money at the end", audit.sums.total),
        ("faults", len(outcome.faults)),
    ]
    for what, number in rows:
        table.add_row(what, f"{number:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
