"""The pages of reconciliations: runs and timetables, one run with sums and findings, one finding with both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Response

from outbox.console.api.lists import of_each
from outbox.console.pages.lists import Listing
from outbox.console.pages.view import PageView, View
from outbox.errors import NotFound
from outbox.operator.health.overview import MOST_ROWS
from outbox.operator.model import MessageView
from outbox.operator.operator import Operator
from outbox.reconcile.record.orders import ReconciliationOrders, RunOrder
from outbox.reconcile.record.views import MOST_LEFT, FindingFilter, FindingView, RunFilter, RunState, Schedule

router: APIRouter = APIRouter(prefix="/reconciliations", include_in_schema=False)

#: What a finding's facts are called, on the side that has them.
_NAMES = {
    "state": "State",
    "sends": "Sends",
    "queue": "Queue",
    "position": "Position",
    "at": "Since",
    "compensated": "Compensated",
    "torn": "Torn",
    "status": "Status",
    "attempts": "Attempts",
    "received_at": "Received",
    "changed_at": "Changed",
    "effects": "Rows in the business table",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a side: as it was found, and as it is now; None where that side doesn't say it."""

    name: str
    found: Any
    now: Any


def _timetables(operator: Operator) -> list[tuple[Schedule, list[RunOrder]]]:
    """Return the reconciliations that workers have, each with the orders that wait."""
    reconciliations = ReconciliationOrders(operator.databases)
    orders = reconciliations.orders()

    def waiting(row: Schedule) -> list[RunOrder]:
        return [each for each in orders if each.schedule == row.name and (each.topic, each.group) in row.pairs[:1]]

    return [(each, waiting(each)) for each in reconciliations.schedules()]


@router.get("")
def runs(view: View) -> Response:
    """Show the runs, and what workers run by a timetable."""
    found = Listing(view, RunFilter, view.context.reconciliations.runs)
    schedules, unreached = of_each(view.operator, _timetables)
    shown = {"schedules": schedules, "most": MOST_ROWS, "unreached": unreached}
    shown |= {"states": list(RunState), "most_left": MOST_LEFT}
    return view.page("reconciliations.html", found.status, list=found, **shown)


@router.get("/{run_id}")
def run(view: View, run_id: UUID) -> Response:
    """Show a run: its differences by kind, the sums, and the findings."""
    reconciliations = view.context.reconciliations
    found = reconciliations.run(run_id)
    findings = Listing(view, FindingFilter, lambda criteria, page: reconciliations.findings(run_id, criteria, page))
    return view.page("reconciliation_run.html", findings.status, view=found, run=found.run, list=findings)


@router.get("/{run_id}/findings/{message_id}")
def finding(view: View, run_id: UUID, message_id: UUID) -> Response:
    """Show both sides of a finding, as they were and as they are, and what can be done."""
    found = view.context.reconciliations.finding(run_id, message_id)
    message = _message(view, message_id)
    producer, consumer = _facts(found, message)
    return view.page("finding.html", found=found, run=found.run, message=message, producer=producer, consumer=consumer)


def _message(view: PageView, message_id: UUID) -> MessageView | None:
    """Return the message as it is now; None if nothing but its findings is left of it."""
    try:
        message = view.operator.message(message_id)
    except NotFound:  # the page says so
        return None
    return message if message.half or message.inbox or message.unseen else None


def _facts(found: FindingView, message: MessageView | None) -> tuple[list[Fact], list[Fact]]:
    """Return the facts of the producer's side and of the consumer's, side by side with how they are now."""
    now: dict[str, Any] = {}
    if message is not None:
        last = message.sends[-1] if message.sends else {}
        now = {"state": message.status, "sends": last.get("send_number"), "at": last.get("visible_at")}
        now |= {name: last.get(name) for name in ("queue", "position")}
        now["compensated"] = message.compensation is not None or None
        for row in message.inbox:
            if (row.group, row.database) == (found.run.group, found.run.database):
                now |= {name: getattr(row, name) for name in ("status", "attempts", "received_at", "changed_at")}

    def facts(side: Mapping[str, Any]) -> list[Fact]:
        return [Fact(_NAMES[name], value, now.get(name)) for name, value in side.items()]

    return facts(found.producer), facts(found.consumer)
