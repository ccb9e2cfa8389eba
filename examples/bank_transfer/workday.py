"""The banks at work: all processes are started, looked after and killed, until every order is settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import audit, teller
from .monkey import Monkey
from .opening import Banks
from .options import DemoOptions
from .source import Source, Survey
from .staff import Employee, Staff
from .words import counted

DISPATCHERS = 2
_POLL_SECONDS = 0.05
_STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The orders of a run, and who is to execute them."""

    options: DemoOptions
    source: Source
    survey: Survey

    def __str__(self) -> str:
        options, kills = self.options, self.options.planned_kills
        staff = (
            f"{counted(options.producers, 'teller')} and {counted(DISPATCHERS, 'dispatcher')} at bank A, "
            f"{counted(options.consumers, 'consumer')} at bank B"
        )
        orders = f"{counted(self.survey.rows, 'order')} ({self.source})"
        monkey = f"; {counted(kills, 'time')} one of them is killed" if kills else ""
        return f"Two banks, a database each. {orders}; {staff}{monkey}."


def work(plan: Plan, banks: Banks, told: Console) -> Staff:
    """Let the banks work until every order is refused, or settled at bank B, or nothing moves any more.

    Returns the staff, all of it stopped, for what it counted.

    Raises:
        StaffError: a process ends again and again without having been killed.
    """
    staff = Staff()
    try:
        monkey = Monkey(staff, _hire(plan, banks, staff), plan.options.planned_kills, plan.options.seed)
        with _progress(plan.survey.shares.total(), told) as show:
            _settle(plan.survey.shares.total(), banks, staff, monkey, show)
    finally:
        staff.stop()
    return staff


def _hire(plan: Plan, banks: Banks, staff: Staff) -> dict[Employee, int]:
    """Start all processes; return the tellers with the number of orders each has to execute."""
    where, options = banks.environment, plan.options
    for _ in range(DISPATCHERS):
        staff.hire("dispatcher", "worker", ["bank_a"], where)
    for _ in range(options.consumers):
        staff.hire("consumer", "worker", ["bank_b"], where)
    tellers = {}
    for number in range(options.producers):
        arguments = teller.arguments(plan.source, number, options.producers)
        tellers[staff.hire("teller", "teller", arguments, where)] = plan.survey.shares[number]
    return tellers


def _settle(orders: int, banks: Banks, staff: Staff, monkey: Monkey, show: Callable[[int], None]) -> None:
    done, moved_at = -1, time.monotonic()
    while (done < orders or not monkey.content) and time.monotonic() - moved_at < _STALL_SECONDS:
        staff.look_after()
        with banks.b.connect() as connection:
            now = audit.settled(connection) + len(staff.refusals)
        if now != done:
            done, moved_at = now, time.monotonic()
            show(done)
        monkey.act(done)
        time.sleep(_POLL_SECONDS)


@contextmanager
def _progress(orders: int, told: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("settled"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=told, transient=True, disable=not told.is_terminal) as progress:
        task = progress.add_task("settled", total=orders)
        yield lambda done: progress.update(task, completed=done)
