"""``outbox audit``: who did what, why, with what result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outbox.cli.arguments import Listing, SinceOption, Span, UntilOption, Where, gathered
from outbox.cli.lists import Shape, every, print_page, print_stream, taken
from outbox.cli.messages import ExportForm, ExportOption, UpToOption, told
from outbox.operator.model import AuditFilter, AuditRow

app = typer.Typer(help="See who did what, why, and with what result.", no_args_is_help=True, rich_markup_mode=None)


def _way(origin: dict[str, Any]) -> str:
    return ", ".join(str(value) if name == "via" else f"{name} {value}" for name, value in origin.items())


SHAPE = Shape(
    AuditRow,
    ("when", "who", "did", "to", "why", "result", "by way of"),
    lambda row: (row.acted_at, row.actor, row.action, row.target, row.reason, row.result, _way(row.origin or {})),
    lambda row: row.id,
)


@dataclass(frozen=True, slots=True)
class AuditChoice:
    """Which acts."""

    by: Annotated[str | None, typer.Option(metavar="NAME", help="Only what this one did.")] = None
    action: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this, such as resend, retry, compensate.")
    ] = None
    target: Annotated[
        str | None, typer.Option(metavar="ID", help="Only what was done to this: a message, GROUP/ID, a bulk job.")
    ] = None
    since: SinceOption = None
    until: UntilOption = None

    def wanted(self, span: Span, database: str | None) -> AuditFilter:
        """Return the filter."""
        return AuditFilter(database, self.by, self.action, self.target, span.since, span.until)


@app.command("list")
@gathered
def show_list(where: Where, choice: AuditChoice, listing: Listing) -> None:
    """List what operators did, the newest first.

    \b
    Examples:
      outbox audit list --since 1d
      outbox audit list --target 01997a4e-6d0f-7c52-8c1e-9f2f5f0f3f11 -o json
    """
    with where.opened() as admin:
        span = Span.of(admin, choice.since, choice.until, listing.after)
        wanted = choice.wanted(span, where.only)
        page = taken(lambda page: admin.audit(wanted, page), listing.limit, span.token)
        print_page(span.onward(page), SHAPE, listing, admin, what="acts")


@app.command()
@gathered
def export(
    where: Where, choice: AuditChoice, limit: UpToOption = None, output: ExportOption = ExportForm.NDJSON
) -> None:
    """Export all that operators did, the newest first.

    \b
    Example:
      outbox audit export --since 2026-01-01T00:00:00+00:00 -o csv > audit.csv
    """
    with where.opened() as admin:
        wanted = choice.wanted(Span.of(admin, choice.since, choice.until), where.only)
        rows = (SHAPE.fields(row) for row in every(lambda page: admin.audit(wanted, page), limit))
        told(print_stream(rows, SHAPE.names, csv_=output is ExportForm.CSV), "acts")
