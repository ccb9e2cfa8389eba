"""Report the half messages of a run: how many there were, and how each orphan was decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from .audit import Audit
from .bank_a_tcc import ABANDONED, CANCELLED, CONFIRMED
from .halves import COMMIT, Halves, Orphan

_SHOWN = 10


def as_facts(audit: Audit) -> dict[str, Any]:
    """Return what JSON says."""
    halves = audit.halves
    return {
        "written": halves.written,
        "committed": {by: n for (by, resolution), n in sorted(halves.decided.items()) if resolution == COMMIT},
        "rolled_back": {by: n for (by, resolution), n in sorted(halves.decided.items()) if resolution != COMMIT},
        "parked": halves.parked,
        "undecided": halves.undecided,
        "checks": {asked: _answers(halves, asked) for asked in sorted({asked for asked, _ in halves.checks})},
        "outlived_a_check": halves.outlived,
        "orphans": [
            {
                "order": orphan.transfer,
                "asked": orphan.asked,
                "answers": orphan.answers,
                "verdict": orphan.verdict,
                "executed_by_another_half": orphan.executed,
            }
            for orphan in halves.orphans
        ],
        "reservations": audit.reservations,
    }


def tables(audit: Audit) -> Iterator[Table]:
    """Yield the tables for people."""
    halves = audit.halves
    yield _counts(audit)
    if halves.orphans:
        yield _orphans(halves.orphans)


def _counts(audit: Audit) -> Table:
    halves = audit.halves
    table = Table(title="The half messages", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_column(style="dim")
    table.add_row(f"{halves.written:,}", "prepared")
    for (by, resolution), number in sorted(halves.decided.items()):
        did = "committed" if resolution == COMMIT else "rolled back"
        table.add_row(f"{number:,}", did, f"by the {by}" if by in {"producer", "operator"} else f"orphans, by the {by}")
    for asked in sorted({asked for asked, _ in halves.checks}):
        answers = _answers(halves, asked)
        detail = ", ".join(f"{number:,} {answer}" for answer, number in answers.items())
        table.add_row(f"{sum(answers.values()):,}", "checks", f"of the {asked}: {detail}")
    table.add_row(f"{halves.outlived:,}", "outlived a check", "the teller was still at work, and decided")
    if audit.reservations:
        states = ", ".join(f"{audit.reservations[state]:,} {state}" for state in (CONFIRMED, CANCELLED, ABANDONED))
        table.add_row(f"{audit.reservations.total():,}", "reservations", states)
    table.add_row(f"{halves.parked:,}", "parked", "for a human")
    table.add_row(f"{halves.undecided:,}", "undecided")
    return table


def _orphans(orphans: tuple[Orphan, ...]) -> Table:
    table = Table(title="The orphans", title_justify="left")
    for name in ("order", "asked", "answers", "verdict", "the order"):
        table.add_column(name, justify="right" if name == "order" else "left", no_wrap=True)
    for orphan in orphans[:_SHOWN]:
        after = "executed by another half" if orphan.executed else "not executed"
        table.add_row(str(orphan.transfer), orphan.asked, _shortened(orphan.answers), orphan.verdict, after)
    if len(orphans) > _SHOWN:
        table.caption = f"… and {len(orphans) - _SHOWN:,} more"
        table.caption_justify = "left"
    return table


def _answers(halves: Halves, asked: str) -> dict[str, int]:
    return {answer: number for (by, answer), number in sorted(halves.checks.items()) if by == asked}


def _shortened(answers: tuple[str, ...]) -> str:
    return ", ".join(answer if n == 1 else f"{n} times {answer}" for answer, n in Counter(answers).items())
