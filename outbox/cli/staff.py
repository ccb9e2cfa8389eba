"""``outbox workers`` and ``outbox handlers``: who runs, and what is registered there."""

from __future__ import annotations

from typing import Annotated, TypeVar

import typer

from outbox.cli.arguments import Where, gathered
from outbox.cli.lists import Shape, print_rows
from outbox.cli.output import Form, print_json
from outbox.operator.model import HandlerRow, WorkerRow

Row = TypeVar("Row", WorkerRow, HandlerRow)

FormOption = Annotated[Form, typer.Option("--output", "-o", help="The form of the data on stdout.")]

WORKERS = Shape(
    WorkerRow,
    ("id", "name", "version", "alive", "started", "seen", "roles"),
    lambda row: (row.id, row.name, row.version, row.alive, row.started_at, row.seen_at, ", ".join(row.roles)),
    lambda row: row.id,
)
HANDLERS = Shape(
    HandlerRow,
    ("kind", "topic", "group", "name", "workers"),
    lambda row: (row.kind, row.topic, row.group, row.name, ", ".join(row.workers)),
    lambda row: row.name,
)


@gathered
def show_workers(where: Where, output: FormOption = Form.TABLE) -> None:
    """List the workers that run, or have died.

    \b
    Example:
      outbox workers
    """
    with where.opened() as admin:
        rows = [row for row in admin.workers() if where.only in (None, row.database)]
        _print(rows, WORKERS, output, several=len(admin.databases) > 1)


@gathered
def show_handlers(
    where: Where,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    output: FormOption = Form.TABLE,
) -> None:
    """List what is registered on the workers that run: consumers, checkers, compensations.

    A topic without a compensation can't be compensated; one without a checker or fence can't be checked.

    \b
    Example:
      outbox handlers --topic transfer
    """
    with where.opened() as admin:
        rows = [row for row in admin.handlers() if where.only in (None, row.database) and topic in (None, row.topic)]
        _print(rows, HANDLERS, output, several=len(admin.databases) > 1)


def _print(rows: list[Row], shape: Shape[Row], output: Form, *, several: bool) -> None:
    if output is Form.JSON:
        print_json({"items": [shape.fields(row) for row in rows]})
    else:
        print_rows(rows, shape, output, databases=several)
