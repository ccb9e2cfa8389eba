"""What came out of a run: the table, the verdict, and the same as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table

from . import report_reconciliation, report_via
from .audit import Audit, Sums
from .bank_a_tables import CREDITED, DEBITED, REFUNDED
from .exchange import Carried
from .options import Mode
from .orders import Refusal
from .reconciliation import Reconciliation
from .report_halves import as_facts, tables
from .sentences import counted


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the demo.

    ``kills`` and ``restarts`` are by kind of process, ``aimed_kills`` the kills of tellers at a step, ``stalls`` the
    tellers that were stopped at a step for a while. ``late`` is how often a teller was too slow for the check, and
    began an order anew.
    """

    orders: int
    refusals: tuple[Refusal, ...]
    before: Sums
    audit: Audit
    mode: Mode
    kills: Counter[str]
    aimed_kills: Counter[str]
    stalls: Counter[str]
    late: int
    restarts: Counter[str]
    reconciliation: Reconciliation | None
    carried: Carried | None
    seconds: float

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything that is wrong, as sentences."""
        if self.reconciliation is None:
            return self.audit.faults
        return (*self.reconciliation.faults(len(self.audit.parked)), *self.audit.faults)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if self.faults:
            return f"Not settled: {counted(len(self.faults), 'fault')}."
        parked = f", {len(self.audit.parked):,} of them parked" if self.audit.parked else ""
        planted = sum(map(len, self.reconciliation.planted.values())) if self.reconciliation else 0
        found = ((self.kills.total(), "kill"), (len(self.audit.halves.orphans), "orphan"), (planted, "fault"))
        *others, last = [counted(number, noun) for number, noun in found if number] or [""]
        spite = f"{', '.join(others)} and {last}" if others else last
        spite = f", in spite of {spite}" if spite else ""
        parked += f", {len(self.audit.refunded):,} refunded" if self.audit.refunded else ""
        return f"Settled: {counted(self.audit.transfers, 'transfer')}{parked}, and not a cent is missing{spite}."

    def as_json(self) -> str:
        """Return the report as one JSON object; money is a string."""
        after = self.audit.sums
        facts: dict[str, Any] = {
            "ok": not self.faults,
            "verdict": self.verdict,
            "faults": self.faults,
            "orders": self.orders,
            "refused": [{"line": refusal.line, "reason": refusal.reason} for refusal in self.refusals],
            "transfers": self.audit.transfers,
            "messages": self.audit.messages,
            "inbox_rows": self.audit.inbox_rows,
            "retries": self.audit.retries,
            "parked": [
                {"transfer": p.transfer, "amount": f"{p.amount:.2f}", "reason": p.reason} for p in self.audit.parked
            ],
            "states": {"refused": len(self.refusals), **self._states()},
            "slowest": round(self.audit.states.slowest, 1),
            "refunded": {str(transfer): f"{amount:.2f}" for transfer, amount in self.audit.refunded.items()},
            "in_flight": self.audit.in_flight,
            "kills": self.kills,
            "restarts": self.restarts,
            "money": {"before": _money(self.before), "after": _money(after)},
            "seconds": round(self.seconds, 1),
        }
        if self.mode is not Mode.SEND:
            facts |= {
                "aimed_kills": self.aimed_kills,
                "stalls": self.stalls,
                "late": self.late,
                "halves": as_facts(self.audit),
            }
        if self.carried:
            facts["via"] = report_via.as_facts(self.carried, self._messages)
        if self.reconciliation:
            facts["reconciliation"] = report_reconciliation.as_facts(self.reconciliation)
        return json.dumps(facts, indent=2)

    def print(self, console: Console) -> None:
        """Print the tables and the verdict."""
        console.print(self._counts())
        console.print(self._ends())
        if self.carried:
            console.print(report_via.table(self.carried, self._messages))
        if self.mode is not Mode.SEND:
            for table in tables(self.audit):
                console.print(table)
        if self.reconciliation:
            for table in report_reconciliation.tables(self.reconciliation):
                console.print(table)
        console.print(self._money())
        style = "bold red" if self.faults else "bold green"
        console.print(self.verdict, style=style, highlight=False, soft_wrap=True)
        for fault in self.faults:
            console.print(f"  - {fault}", style="red", highlight=False, markup=False)

    def _counts(self) -> Table:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(justify="right", style="bold")
        table.add_column()
        table.add_column(style="dim")
        rows = [
            (self.orders, "orders", f"{len(self.refusals):,} refused"),
            (self.audit.transfers, "transfers", "debited at bank A"),
            (self.audit.messages, "messages", "dispatched by bank A"),
            (self.audit.inbox_rows, "inbox rows", "at bank B"),
            (self.audit.retries, "retries", "at bank B"),
            (len(self.audit.parked), "parked", "for a human"),
            (self.audit.in_flight, "in flight", ""),
            (self.kills.total(), "kills", _by_role(self.kills)),
            (self.restarts.total(), "restarts", _by_role(self.restarts)),
        ]
        if self.mode is not Mode.SEND:
            rows[-1:-1] = [(self.aimed_kills.total(), "of them aimed", _by_role(self.aimed_kills))]
            rows.append((self.stalls.total(), "stalls", _by_role(self.stalls)))
            rows.append((self.late, "late", "the check was faster, the order was begun anew"))
        for count, what, more in rows:
            table.add_row(f"{count:,}", what, more)
        table.add_row(f"{self.seconds:.1f}", "seconds", "")
        return table

    def _ends(self) -> Table:
        """How each order ended."""
        table = Table(title="The orders", title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(justify="right", style="bold")
        table.add_column()
        table.add_column(style="dim")
        slowest = f"; the slowest after {self.audit.states.slowest:.1f} s" if self.audit.states.slowest else ""
        meaning = {
            CREDITED: f"bank B has confirmed it{slowest}",
            REFUNDED: "bank B couldn't credit it any more; the sender has the money back",
            DEBITED: "neither credited nor refunded",
        }
        table.add_row(f"{len(self.refusals):,}", "refused", "before the debit, by one of the banks")
        for state, number in self._states().items():
            table.add_row(f"{number:,}", state, meaning[state])
        return table

    @property
    def _messages(self) -> int:
        """How many messages the banks sent each other."""
        return self.audit.messages + self.audit.answers

    def _states(self) -> dict[str, int]:
        return {state: self.audit.states.counts[state] for state in (CREDITED, REFUNDED, DEBITED)}

    def _money(self) -> Table:
        table = Table(title="The money", title_justify="left")
        for name in ("", "bank A", "bank B", "parked", "in flight", "total"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for name, sums in (("before", self.before), ("after", self.audit.sums)):
            table.add_row(name, *(f"{amount:,.2f}" for amount in _amounts(sums).values()))
        return table


def _amounts(sums: Sums) -> dict[str, Decimal]:
    return {
        "bank_a": sums.bank_a,
        "bank_b": sums.bank_b,
        "parked": sums.parked,
        "in_flight": sums.in_flight,
        "total": sums.total,
    }


def _money(sums: Sums) -> dict[str, str]:
    return {name: f"{amount:.2f}" for name, amount in _amounts(sums).items()}


def _by_role(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))
