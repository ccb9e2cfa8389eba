"""The table of all figures, for a terminal or for `benchmarks/README.md`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Figure

_HEAD = ("What", "Ours", "Baseline", "Ratio (middle half)", "Bar", "Met")


def show(results: Mapping[str, tuple[Sequence[Figure], float]]) -> None:
    """Print the figures of each benchmark with its peak memory (MiB)."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, justify in zip(_HEAD, ("left", "right", "right", "right", "right", "left"), strict=True):
        table.add_column(title, justify="right" if justify == "right" else "left", overflow="fold")
    for name, (figures, peak) in results.items():
        table.add_row(f"[bold]{name}[/] [dim](peak memory {peak:.0f} MiB)[/]")
        for figure in figures:
            colour = {True: "green", False: "red", None: ""}[figure.met]
            table.add_row(*_cells(figure), style=colour)
        table.add_section()
    console = Console()
    # Into a file or a pipe, lines need not fit a terminal.
    console.width = console.width if console.is_terminal else 150
    console.print(table)


def markdown(results: Mapping[str, tuple[Sequence[Figure], float]]) -> str:
    """Return the figures as a markdown table."""
    lines = [f"| {' | '.join(_HEAD)} |", "|---|---:|---:|---:|---:|---|"]
    for name, (figures, peak) in results.items():
        lines.append(f"| **{name}** (peak memory {peak:.0f} MiB) | | | | | |")
        lines += [f"| {' | '.join(_cells(figure))} |" for figure in figures]
    return "\n".join(lines)


def names(given: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the names of benchmarks that an option has, separated by commas."""
    found = tuple(name.strip() for name in given.split(","))
    if unknown := sorted(set(found).difference(known)):
        raise argparse.ArgumentTypeError(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(known)}")
    return found


def _cells(figure: Figure) -> tuple[str, ...]:
    ratio = "" if figure.ratio is None else str(figure.ratio)
    met = {True: "yes", False: "no", None: ""}[figure.met]
    return figure.what, figure.ours.strip(), figure.baseline, ratio, figure.bar, met
