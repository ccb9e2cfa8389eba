"""What a fleet comes to as one HTML file, in the style of the page of a job: no script, and nothing that is loaded."""

from __future__ import annotations

from pathlib import Path

from outbox.reconcile.fleet.report import findings_shown, fleet_verdict, in_sync, sentence
from outbox.reconcile.fleet.run import FleetResult
from outbox.reconcile.report import verdict
from outbox.reconcile.report.html import LIMIT, ROWS, template
from outbox.reconcile.rows import JobResult
from outbox.text import whole


def write_fleet_html(path: Path, result: FleetResult, limit: int = LIMIT) -> None:
    """Write the page, at once and whole, with at most so many findings."""
    with whole(path) as file:
        file.write(render_fleet(result, limit).encode())


def render_fleet(result: FleetResult, limit: int = LIMIT) -> str:
    """Return the page."""
    troubles = [
        *((str(each.member), each.error) for each in result.members if each.error),
        *result.unreachable.items(),
        *(("", fault) for fault in result.faults),
    ]
    return template("fleet.html.j2").render(
        result=result,
        sentence=sentence(result),
        verdict=fleet_verdict(result),
        is_well=in_sync(result),
        messages=sum(pair.counts.total() for _, each in result.results for pair in each.pairs),
        troubles=troubles,
        measures_of=_measures,
        findings=list(findings_shown(result, limit)),
        rows_shown=ROWS,
    )


def _measures(result: JobResult) -> tuple[str, ...]:
    return verdict(result).measures
