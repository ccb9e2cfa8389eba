"""The report as tables on a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outbox.reconcile.job import Outcome, Repair
from outbox.reconcile.report import (
    MEANING,
    KindSummary,
    amount,
    counted,
    first_findings,
    first_rows,
    kinds,
    lag_sentence,
    mend,
    seen,
    shares,
    verdict,
)
from outbox.reconcile.rows import JobResult, MeasureResult, MeasureRow, PairResult
from outbox.text import duration, plain

_NO_DIFFERENCE = tuple(outcome for outcome in Outcome if not outcome.differs)
_ROWS_SHOWN = 20


def print_report(result: JobResult, console: Console, findings: int = 20) -> None:
    """Print the report with at most so many findings in all, each pair and each kind with its share."""
    granted = shares([pair.findings.num_rows for pair in result.pairs], findings)
    for pair, limit in zip(result.pairs, granted, strict=True):
        for part in (*_pair(pair, result), *_findings(pair, result.policy, limit)):
            console.print(part)
        console.print()
    for measure in result.measures:
        for part in _measure(measure):
            console.print(part)
        console.print()
    console.print(Text(_when(result), "dim"))
    told = verdict(result)
    console.print(Text(plain(told.sentence), "bold green" if told.in_sync else "bold red"))


def _pair(pair: PairResult, result: JobResult) -> Iterator[RenderableType]:
    yield Text(plain(str(pair.pair)), "bold")
    told = Table.grid("", "", padding=(0, 2))
    for name, text in _facts(pair):
        told.add_row(name, Text(plain(text)))
    yield told
    yield ""
    yield _table(
        ("messages>", "outcome", ""),
        [
            (f"{pair.counts[outcome]:,}", outcome.label, MEANING[outcome])
            for outcome in _NO_DIFFERENCE
            if pair.counts[outcome] or outcome is Outcome.CONSUMED
        ],
    )
    yield ""
    told_kinds = kinds(pair, result)
    if told_kinds:
        yield _table(
            ("messages>", "difference", "left>", "repair"),
            [(f"{kind.number:,}", Text(kind.kind.label, "bold"), _left(kind), kind.repair) for kind in told_kinds],
        )
    else:
        yield Text("no differences", "bold green")


def _facts(pair: PairResult) -> Iterator[tuple[str, str]]:
    plan = pair.plan
    yield "window", f"{pair.window}, grace {duration(pair.window.grace)}"
    yield "plan", f"{plan.tier.value} tier, {plan.engine.value} engine"
    for why in plan.why:
        yield "", why
    ranges = [counted(plan.ranges, "range")]
    if plan.buckets:
        ranges += [f"{counted(plan.buckets, 'bucket')}", f"{plan.differing:,} differing", f"{plan.settled:,} settled"]
    yield "read", f"{counted(plan.rows_read, 'row')} of {', '.join(ranges)}"
    if pair.seconds:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in pair.seconds.items())
        yield "took", f"{duration(sum(pair.seconds.values()))}: {stages}"
    if lag := lag_sentence(pair):
        yield "lag", lag
    if pair.healed:
        yield "healed", f"{counted(pair.healed, 'difference')} at the second look"


def _left(kind: KindSummary) -> Text:
    return Text(f"{kind.left:,}", "bold red" if kind.left else "green")


def _findings(pair: PairResult, policy: Mapping[Outcome, Repair], limit: int) -> Iterator[RenderableType]:
    shown = first_findings(pair.findings, limit)
    for kind, number in pair.differences.items():
        yield ""
        yield Text(kind.label, "bold").append(f": {MEANING[kind]}", "default")
        yield Padding(Text(f"mend: {plain(mend(kind, policy))}"), (0, 0, 0, 2), expand=False)
        rows = [(str(finding.id), seen(finding, pair.begun_at)) for finding in shown if finding.outcome is kind]
        yield Padding(_table((), rows), (0, 0, 0, 2), expand=False)
        if number > len(rows):
            yield Text(f"  … and {number - len(rows):,} more" if rows else f"  {number:,} of them", "dim")


def _measure(measure: MeasureResult) -> Iterator[RenderableType]:
    yield Text(plain(f"{measure.name} ({measure.pair})"), "bold")
    for fault in measure.faults:
        yield Text(plain(fault), "bold red")
    wrong = measure.unexplained
    shown = [row for row in first_rows(measure, _ROWS_SHOWN) if row.unexplained]
    rows = [_cells(row, ", ".join(row.key), bold=False) for row in shown]
    rows += [_cells(row, ", ".join(row.key), bold=True) for row in measure.totals]
    yield _table(
        (", ".join(measure.by), "value", "producer>", "rolled\nback>", "consumer>", "in\nflight>", "unexplained>"), rows
    )
    explained = len(measure.rows) - len(wrong)
    left_out = (
        f"{counted(len(wrong) - len(shown), 'more row')} with something unexplained; "
        if len(wrong) > len(shown)
        else ""
    )
    yield Text(f"{left_out}{counted(explained, 'row')} {'adds' if explained == 1 else 'add'} up", "dim")


def _cells(row: MeasureRow, key: str, *, bold: bool) -> tuple[str | Text, ...]:
    numbers = (row.producer, row.rolled_back, row.consumer, row.in_flight)
    style = "bold" if bold else ""
    return (
        Text(plain(key), style),
        Text(plain(row.value), style),
        *(Text(amount(number), style) for number in numbers),
        Text(amount(row.unexplained), "bold red" if row.unexplained else style),
    )


def _when(result: JobResult) -> str:
    begun = result.begun_at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"begun at {begun}Z, took {duration(result.seconds)}, {'with' if result.applied else 'without'} repairs"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for column in columns:
        # Folded where it doesn't fit, and never cut: half a number is another number.
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else Text(plain(value)) for value in row))
    return table
