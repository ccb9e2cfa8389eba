"""What comparing two tables comes to, for people and programs: tables of a terminal, one JSON object, one page.

As JSON: ``version``, ``begun_at``, ``seconds`` by stage, ``left`` and ``right`` (the tables), ``equal``, ``verdict``,
``rows`` ({left, right}), ``compared`` (rows that both have), ``differ``, ``only_left``, ``only_right``,
``uncompared`` ({left, right}: the columns that one of them alone has), and

    columns[]   {column, compared_as, tolerance, masked, differ}
    plan        {ranges, differing, rows_read}
    sample[]    {key: {column: text}, kind, column, left, right}     null is NULL
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from outbox.destination import Destination, whole_at
from outbox.reader import plain as as_plain
from outbox.reconcile.columns.compare import TablesResult
from outbox.reconcile.report import VERSION, table_of
from outbox.reconcile.report.html import template
from outbox.text import counted, cut, duration, plain

#: A value of more characters is cut on a terminal and on the page.
_SHOWN = 200


def as_json(result: TablesResult) -> Any:
    """Return a result as values of JSON."""
    return as_plain(
        {
            "version": VERSION,
            "begun_at": result.begun_at,
            "seconds": result.seconds,
            "left": result.job.left,
            "right": result.job.right,
            "equal": result.equal,
            "verdict": result.sentence,
            "rows": {"left": result.rows["producer"], "right": result.rows["consumer"]},
            "compared": result.compared,
            "differ": result.differ,
            **{kind: result.only[kind] for kind in ("only_left", "only_right")},
            "uncompared": result.uncompared,
            "columns": [
                {
                    "column": each.name,
                    "compared_as": each.pairing.kinds[0].name,
                    "tolerance": each.tolerance and str(each.tolerance),
                    "masked": each.masked,
                    "differ": each.differ,
                }
                for each in result.columns
            ],
            "plan": {"ranges": result.ranges, "differing": result.differing, "rows_read": result.rows_read},
            "sample": result.sample.to_pylist(),
        }
    )


def print_report(result: TablesResult, console: Console) -> None:
    """Print how many rows each column differs in, and the sample."""
    columns = [each for each in result.columns if each.differ]
    if columns:
        rows = [
            (f"{each.differ:,}", each.name, each.pairing.kinds[0].name, str(each.tolerance or "")) for each in columns
        ]
        console.print(table_of(("rows>", "column", "compared as", "tolerance"), rows))
        console.print()
    if sample := sample_of(result):
        console.print(table_of(("key", "column", "left", "right"), sample))
        console.print()
    if result.left_out:
        console.print(Text(plain(result.left_out), "bold red"))
    read = f"{counted(result.compared, 'row')} on both sides, {result.rows_read:,} read one by one"
    begun = result.begun_at.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
    console.print(Text(f"{read}; begun at {begun}Z, took {duration(sum(result.seconds.values()))}", "dim"))
    console.print(Text(plain(result.sentence), "bold green" if result.equal else "bold red"))


def sample_of(result: TablesResult) -> list[tuple[str, ...]]:
    """Return the sample as people read it: key, column, both values; of a row of one side which side that is."""
    return [
        (_key(row["key"]), row["column"] or "", _text(row, "left"), _text(row, "right"))
        for row in result.sample.to_pylist()
    ]


def _key(key: Mapping[str, str]) -> str:
    values = list(key.values())
    return plain(values[0] if len(values) == 1 else ", ".join(f"{name}={value}" for name, value in key.items()))


def _text(row: Mapping[str, Any], side: str) -> str:
    if row["kind"] != "differs":
        return "has it" if row["kind"] == f"only_{side}" else "has no such row"
    return "NULL" if row[side] is None else plain(cut(row[side], _SHOWN))


def write_html(path: Destination, result: TablesResult) -> None:
    """Write the page, at once and whole."""
    page = template("tables.html.j2").render(result=result, sample=sample_of(result))
    with whole_at(path) as file:
        file.write(page.encode())
