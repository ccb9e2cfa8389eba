"""The report as tables on a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outbox.reconcile.job import Outcome
from outbox.reconcile.report import MEANING, KindSummary, PairReport, amount, document, first_rows, sentence_of
from outbox.reconcile.rows import JobResult, MeasureResult, MeasureRow
from outbox.text import counted, duration, plain

_NO_DIFFERENCE = tuple(outcome for outcome in Outcome if not outcome.differs)
_ROWS_SHOWN = 20


def print_report(result: JobResult, console: Console, findings: int = 20) -> None:
    """Print the report with at most so many findings in all, each pair and each kind with its share."""
    report = document(result, findings)
    for pair in report.pairs:
        for part in (*_pair(pair), *_findings(pair)):
            console.print(part)
        console.print()
    for measure in result.measures:
        for part in _measure(measure):
            console.print(part)
        console.print()
    begun = result.begun_at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    repairs = "with" if result.applied else "without"
    console.print(Text(f"begun at {begun}Z, took {duration(result.seconds)}, {repairs} repairs", "dim"))
    console.print(Text(plain(report.verdict.sentence), "bold green" if report.verdict.in_sync else "bold red"))


def _pair(report: PairReport) -> Iterator[RenderableType]:
    pair = report.result
    yield Text(plain(str(pair.pair)), "bold")
    facts = Table.grid("", "", padding=(0, 2))
    for name, text in _facts(report):
        facts.add_row(name, Text(plain(text)))
    yield facts
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
    if report.kinds:
        yield _table(
            ("messages>", "difference", "left>", "repair"),
            [(f"{kind.number:,}", Text(kind.kind.label, "bold"), _left(kind), kind.repair) for kind in report.kinds],
        )
    else:
        yield Text("no differences", "bold green")


def _facts(report: PairReport) -> Iterator[tuple[str, str]]:
    pair, plan = report.result, report.result.plan
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
    if report.lag:
        yield "lag", report.lag
    if pair.healed:
        yield "healed", f"{counted(pair.healed, 'difference')} at the second look"


def _left(kind: KindSummary) -> Text:
    return Text(f"{kind.left:,}", "bold red" if kind.left else "green")


def _findings(report: PairReport) -> Iterator[RenderableType]:
    for kind in report.kinds:
        yield ""
        yield Text(kind.kind.label, "bold").append(f": {kind.meaning}", "default")
        yield Padding(Text(f"mend: {plain(kind.mend)}"), (0, 0, 0, 2), expand=False)
        shown = [finding for finding in report.findings if finding.outcome is kind.kind]
        rows = [(str(finding.id), sentence_of(finding, report.result.begun_at)) for finding in shown]
        yield Padding(_table((), rows), (0, 0, 0, 2), expand=False)
        if kind.number > len(rows):
            rest = f"  … and {kind.number - len(rows):,} more" if rows else f"  {kind.number:,} of them"
            yield Text(rest, "dim")


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


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for column in columns:
        # Folded where it doesn't fit, and never cut: half a number is another number.
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else Text(plain(value)) for value in row))
    return table
