"""What a fleet comes to: one table, one JSON object, one page, one file for Prometheus.

As JSON: ``version``, ``seconds``, ``in_sync``, ``verdict``, ``failed``, ``unreachable`` ({name: why}),
``faults[]`` (sentences), and

    doubles[]   {producer, topic, group, consumers[], number}
    totals[]    {name, by[], in_sync, verdict, faults[],
                 rows[]: {key[], value, parts: {database: amount}, in_flight, early, unexplained}}
    members[]   {producer, consumer, error, report}   ``error`` is empty if there is none; ``report`` is that of the job
                                                      (`outbox.reconcile.report`), null after an error
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from outbox.destination import Destination, whole_at
from outbox.reader import plain as as_plain
from outbox.reconcile import report
from outbox.reconcile.fleet.members import Member
from outbox.reconcile.fleet.run import FleetResult, MemberResult
from outbox.reconcile.job import Pair
from outbox.reconcile.report import VERSION, amount, reports, sentence_of, shares, table_of, verdict
from outbox.reconcile.report.prometheus import Gauges
from outbox.reconcile.rows import Finding
from outbox.text import counted, duration, key_text, plain


def print_report(result: FleetResult, console: Console, findings: int) -> None:
    """Print a row for each member, what differs in it, and so many of the findings in all."""
    heads = ("producer", "consumer", "pairs>", "messages>", "differences>", "left>", "took>", "")
    console.print(table_of(heads, [_cells(each) for each in result.members]))
    console.print()
    for double in result.doubles:
        where = ", ".join(double.consumers)
        console.print(
            plain(f"{double.topic} → {double.group} took {counted(double.number, 'message')} more than once: {where}")
        )
    for total in result.totals:
        console.print(plain(f"{total.name}: {total.verdict}" if total.in_sync else total.verdict))
        for row in (row for row in total.rows if row.unexplained):
            parts = ", ".join(f"{name} {amount(value)}" for name, value in row.parts.items())
            console.print(
                plain(
                    f"  {key_text(row.key)} {row.value}: {parts}, under way {amount(row.in_flight)}, "
                    f"early {amount(row.early)}: {amount(row.unexplained)} unexplained"
                )
            )
    for text in (*(f"{name}: {why}" for name, why in result.unreachable.items()), *result.faults):
        console.print(Text(plain(text), "bold red"))
    for member, pair, finding, text in findings_shown(result, findings):
        console.print(plain(f"{member} {pair} {finding.outcome.label} {finding.name}: {text}"))
    console.print(Text(f"took {duration(result.seconds)}", "dim"))
    console.print(Text(plain(result.sentence), "bold green" if result.in_sync else "bold red"))


def _cells(each: MemberResult) -> list[str | Text]:
    names = [each.member.producer, each.member.consumer, f"{len(each.member.job.pairs):,}"]
    if each.result is None:
        return [*names, "", "", "", "", Text(plain(each.error), "bold red")]
    reached, pairs = verdict(each.result), each.result.pairs
    kinds = [f"{pair.pair}: {number:,} {kind.label}" for pair in pairs for kind, number in pair.differences.items()]
    return [
        *names,
        f"{sum(pair.counts.total() for pair in pairs):,}",
        f"{reached.differences:,}",
        Text(f"{reached.left:,}", "bold red" if reached.left else "green"),
        duration(each.result.seconds),
        "; ".join([*kinds, *reached.measures, *([each.error] if each.error else [])]) or "in sync",
    ]


def findings_shown(result: FleetResult, limit: int) -> Iterator[tuple[Member, Pair, Finding, str]]:
    """Yield so many findings in all, with what was found in a sentence; each member that differs has its share."""
    differing = [(member, each) for member, each in result.results if not each.in_sync]
    granted = shares([sum(pair.findings.num_rows for pair in each.pairs) for _, each in differing], limit)
    for (member, each), some in zip(differing, granted, strict=True):
        for of_pair in reports(each, some):
            for finding in of_pair.findings:
                yield member, of_pair.result.pair, finding, sentence_of(finding, of_pair.result.begun_at)


def as_json(result: FleetResult, limit: int | None = None) -> dict[str, Any]:
    """Return the report as a value of plain JSON types, with at most so many findings of each member."""
    members = [
        {
            "producer": each.member.producer,
            "consumer": each.member.consumer,
            "error": each.error,
            "report": None if each.result is None else report.as_json(each.result, limit),
        }
        for each in result.members
    ]
    value: dict[str, Any] = as_plain(
        {
            "version": VERSION,
            "seconds": result.seconds,
            "in_sync": result.in_sync,
            "verdict": result.sentence,
            "failed": result.failed,
            "unreachable": result.unreachable,
            "faults": result.faults,
            "doubles": result.doubles,
            "totals": [each.as_json() for each in result.totals],
        }
    )
    return value | {"members": members}


def write_prometheus(path: Destination, result: FleetResult) -> None:
    """Write the gauges of all members to one file, with the labels ``producer`` and ``consumer``."""
    gauges = Gauges("producer", "consumer")
    for each in result.members:
        names = each.member.producer, each.member.consumer
        if each.result is None:
            gauges.fail(each.member.job.pairs, dt.datetime.now(dt.UTC), *names)
        else:
            gauges.add(each.result, *names)
    gauges.add_fleet(result.failed, {total.name: total.in_sync for total in result.totals})
    gauges.write(path)


def write_html(path: Destination, result: FleetResult, limit: int | None = None) -> None:
    """Write the page as one HTML file, at once and whole, with at most so many findings."""
    with whole_at(path) as file:
        file.write(render_fleet(result, limit).encode())


def write_findings(folder: Destination, result: FleetResult) -> None:
    """Write the differences of all members into one data set."""
    for _, each in result.results:
        report.write_findings(folder, each)


def render_fleet(result: FleetResult, limit: int | None = None) -> str:
    """Return the page, in the style of that of a job: no script, and nothing that is loaded."""
    from outbox.reconcile.report.html import LIMIT, ROWS, template  # noqa: PLC0415 - an extra

    troubles = [
        *((str(each.member), each.error) for each in result.members if each.error),
        *result.unreachable.items(),
        *(("", fault) for fault in result.faults),
    ]
    return template("fleet.html.j2").render(
        result=result,
        sentence=result.sentence,
        verdict=result.verdict,
        is_well=result.in_sync,
        messages=sum(pair.counts.total() for _, each in result.results for pair in each.pairs),
        troubles=troubles,
        measures_of=lambda each: verdict(each).measures,
        findings=list(findings_shown(result, LIMIT if limit is None else limit)),
        rows_shown=ROWS,
    )
