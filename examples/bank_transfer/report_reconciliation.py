"""Report the reconciliation of a run: findings, repairs, mends by hand, and the sums that agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from outbox.reconcile.job import Outcome
from outbox.reconcile.measure.result import MeasureRow
from outbox.reconcile.report import as_json
from outbox.reconcile.rows import JobResult

from .reconciliation import Reconciliation, by_kind

_SHOWN, _OF_EACH = 10, 2


def as_facts(done: Reconciliation) -> dict[str, Any]:
    """Return the JSON: the numbers by kind, the mends by hand, and the reports of each comparison."""
    return {
        "planted": {kind.label: len(ids) for kind, ids in sorted(done.planted.items())},
        "found": _numbers(done.found),
        "repaired": dict(Counter(repair.kind.label for repair in done.repairs)),
        "by_hand": [{"id": str(hand.message), "kind": hand.kind.label, "did": hand.did} for hand in done.by_hand],
        "left": _numbers(done.after),
        "seconds": round(done.seconds, 1),
        "reports": {
            name: as_json(result, limit=_SHOWN)
            for name, result in (("found", done.found), ("repaired", done.repaired), ("after", done.after))
            if result is not None
        },
    }


def tables(done: Reconciliation) -> Iterator[Table]:
    """Yield the tables for people."""
    yield _plan(done.found)
    if done.planted or not done.found.in_sync:
        yield _kinds(done)
    if done.by_hand:
        yield _by_hand(done)
    for number, measure in enumerate(done.after.measures):
        states = {"after": measure.totals}
        if done.repaired:
            states = {"found": done.found.measures[number].totals, **states}
        yield _sums(measure.name, states)


def _plan(result: JobResult) -> Table:
    table = Table(title="The reconciliation", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_column(style="dim")
    for pair in result.pairs:
        plan = pair.plan
        table.add_row(f"{pair.counts.total():,}", "messages compared", f"{plan.engine} engine, {plan.tier} tier")
        table.add_row(f"{plan.rows_read:,}", "rows read", "; ".join(plan.why))
        table.add_row(f"{pair.counts[Outcome.CONSUMED]:,}", "in sync", "")
        if pair.counts[Outcome.ROLLED_BACK]:
            table.add_row(f"{pair.counts[Outcome.ROLLED_BACK]:,}", "rolled back", "or refunded, and never credited")
    return table


def _kinds(done: Reconciliation) -> Table:
    table = Table(title="The differences", title_justify="left")
    columns = ("planted", "found", "repaired", "by hand", "left")
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    found, left = by_kind(done.found), by_kind(done.after)
    repaired = Counter(repair.kind for repair in done.repairs)
    by_hand = Counter(hand.kind for hand in done.by_hand)
    numbers = {
        kind: (
            len(done.planted.get(kind, ())),
            len(found.get(kind, ())),
            repaired[kind],
            by_hand[kind],
            len(left.get(kind, ())),
        )
        for kind in sorted({*done.planted, *found, *left})
    }
    for kind, row in numbers.items():
        table.add_row(kind.label, *(f"{number:,}" if number else "" for number in row))
    table.add_section()
    table.add_row("all", *(f"{sum(column):,}" for column in zip(*numbers.values(), strict=True)))
    return table


def _by_hand(done: Reconciliation) -> Table:
    table = Table(title="By hand", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    shown = 0
    for kind in sorted({hand.kind for hand in done.by_hand}):
        for hand in [hand for hand in done.by_hand if hand.kind is kind][:_OF_EACH]:
            table.add_row(kind.label, hand.did)
            shown += 1
    if len(done.by_hand) > shown:
        table.caption = f"… and {len(done.by_hand) - shown:,} more"
        table.caption_justify = "left"
    return table


def _sums(name: str, states: Mapping[str, tuple[MeasureRow, ...]]) -> Table:
    table = Table(title=f"The sums: {name}", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for state, totals in states.items():
        for row in totals:
            table.add_column(f"{row.value}\n{state}", justify="right", no_wrap=True)
    rows = [row for totals in states.values() for row in totals]
    lines = {
        "bank A": [row.producer for row in rows],
        "bank B": [row.consumer for row in rows],
        "in flight": [row.in_flight for row in rows],
        "rolled back": [row.rolled_back for row in rows],
        "unexplained": [row.unexplained for row in rows],
    }
    for line, numbers in lines.items():
        table.add_row(line, *(f"{number:,}" for number in numbers))
    return table


def _numbers(result: JobResult) -> dict[str, int]:
    return {kind.label: len(ids) for kind, ids in by_kind(result).items()}
