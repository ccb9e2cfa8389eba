"""The report as tables on a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outbox.reconcile.job import Outcome
from outbox.reconcile.report import (
    PairReport,
    amount,
    backlog_of,
    cost_of,
    first_rows,
    listed_of,
    reports,
    sentence_of,
    verdict,
)
from outbox.reconcile.rows import JobResult, MeasureResult, MeasureRow
from outbox.text import counted, duration, key_text, plain

_ROWS_SHOWN = 20


def print_report(result: JobResult, console: Console, findings: int = 20) -> None:
    """Print the report with at most so many findings in all, each pair and each kind with its share."""
    pairs = ((*_pair(pair), *_findings(pair)) for pair in reports(result, findings))
    for parts in (*pairs, *map(_measure, result.measures)):
        for part in parts:
            console.print(part)
        console.print()
    begun = result.begun_at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    repairs = "with" if result.applied else "without"
    console.print(Text(f"begun at {begun}Z, took {duration(result.seconds)}, {repairs} repairs", "dim"))
    reached = verdict(result)
    console.print(Text(plain(reached.sentence), "bold green" if reached.in_sync else "bold red"))


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
            (f"{pair.counts[outcome]:,}", outcome.label, outcome.meaning)
            for outcome in Outcome
            if not outcome.differs and (pair.counts[outcome] or outcome is Outcome.CONSUMED)
        ],
    )
    yield ""
    if report.kinds:
        yield _table(
            ("messages>", "difference", "left>", "repair"),
            [
                (
                    f"{kind.number:,}",
                    Text(kind.kind.label, "bold"),
                    Text(f"{kind.left:,}", "bold red" if kind.left else "green"),
                    kind.repair,
                )
                for kind in report.kinds
            ],
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
    if cost := cost_of(plan):
        yield "cost", cost
    if pair.seconds:
        stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in pair.seconds.items())
        yield "took", f"{duration(sum(pair.seconds.values()))}: {stages}"
    if report.lag:
        yield "lag", report.lag
    if behind := backlog_of(pair):
        yield "backlog", behind
    if bounded := listed_of(pair):
        yield "listed", bounded
    if pair.healed:
        yield "healed", f"{counted(pair.healed, 'difference')} at the second look"


def _findings(report: PairReport) -> Iterator[RenderableType]:
    for kind in report.kinds:
        yield ""
        yield Text(kind.kind.label, "bold").append(f": {kind.kind.meaning}", "default")
        yield Padding(Text(f"mend: {plain(kind.mend)}"), (0, 0, 0, 2), expand=False)
        shown = [finding for finding in report.findings if finding.outcome is kind.kind]
        rows = [(finding.name, sentence_of(finding, report.result.begun_at)) for finding in shown]
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
    rows = [_cells(row, "") for row in shown] + [_cells(row, "bold") for row in measure.totals]
    yield _table(
        (", ".join(measure.by), "value", "producer>", "rolled\nback>", "consumer>", "in\nflight>", "unexplained>"), rows
    )
    explained = len(measure.rows) - len(wrong)
    more = len(wrong) - len(shown)
    left_out = f"{counted(more, 'more row')} with something unexplained; " if more else ""
    yield Text(f"{left_out}{counted(explained, 'row')} {'adds' if explained == 1 else 'add'} up", "dim")


def _cells(row: MeasureRow, style: str) -> list[Text]:
    texts = (key_text(row.key), row.value, *map(amount, (row.producer, row.rolled_back, row.consumer, row.in_flight)))
    unexplained = Text(amount(row.unexplained), "bold red" if row.unexplained else style)
    return [*(Text(plain(text), style) for text in texts), unexplained]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Return rows as a table; a column name that ends with ``>`` is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for column in columns:
        # Folded where it doesn't fit, and never cut: half a number is another number.
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(value if isinstance(value, Text) else Text(plain(value)) for value in row))
    return table
