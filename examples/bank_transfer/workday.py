"""The banks at work: all processes are started, looked after and killed, until every order is settled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import audit, halves, teller
from .monkey import Monkey
from .opening import Banks
from .options import DemoOptions, Way
from .source import Source, Survey
from .staff import Employee, Staff
from .steps import BETWEEN, SECOND
from .words import counted

DISPATCHERS = 2
_POLL_SECONDS = 0.05
_STALL_SECONDS = 60.0

#: Orphans are to be decided within the run, so that check and tellers have less patience than by default (seconds).
_IMPATIENT = {
    "OUTBOX_IMMUNITY": "0.5",
    "OUTBOX_CHECK_INTERVAL": "0.5",
    "OUTBOX_CHECK_TIMEOUT": "1",
    "BANK_A_PATIENCE": "1",
}
_HOW = {
    Way.SEND: "",
    Way.TWO_PHASE: " Each order begins with a half message, and ends in the transaction that debits.",
    Way.TCC: " Each order is tried, then confirmed or cancelled.",
}


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
        return f"Two banks, a database each. {orders}; {staff}{monkey}.{_HOW[options.way]}"


def work(plan: Plan, banks: Banks, told: Console) -> Staff:
    """Let the banks work until every order is refused or settled at bank B, and every half message decided.

    When nothing moves any more, it ends too: the audit is going to say what is missing.

    Returns the staff, all of it stopped, for what it counted.

    Raises:
        StaffError: a process ends again and again without having been killed.
    """
    staff = Staff()
    try:
        moments = () if plan.options.way is Way.SEND else (BETWEEN, SECOND)
        monkey = Monkey(staff, _hire(plan, banks, staff), plan.options.planned_kills, plan.options.seed, moments)
        with _progress(plan.survey.shares.total(), told) as show:
            _settle(plan.survey.shares.total(), banks, staff, monkey, show)
    finally:
        staff.stop()
    return staff


@contextmanager
def at_work(banks: Banks) -> Iterator[Staff]:
    """Have a worker of each bank at work, without tellers, and without kills."""
    staff = Staff()
    try:
        staff.hire("dispatcher", "worker", ["bank_a"], banks.environment)
        staff.hire("consumer", "worker", ["bank_b"], banks.environment)
        yield staff
    finally:
        staff.stop()


def wait_for(fact: Callable[[], bool], staff: Staff) -> None:
    """Return when it is so, or when waiting has been in vain for long; the audit is going to say what is missing.

    Raises:
        StaffError: a process ends again and again without having been killed.
    """
    until = time.monotonic() + _STALL_SECONDS
    while not fact() and time.monotonic() < until:
        staff.look_after()
        time.sleep(_POLL_SECONDS)


def _hire(plan: Plan, banks: Banks, staff: Staff) -> dict[Employee, int]:
    """Start all processes; return the tellers with the number of orders each has to execute."""
    options = plan.options
    where = banks.environment if options.way is Way.SEND else banks.environment | _IMPATIENT
    for _ in range(DISPATCHERS):
        staff.hire("dispatcher", "worker", ["bank_a"], where)
    for _ in range(options.consumers):
        staff.hire("consumer", "worker", ["bank_b"], where)
    tellers = {}
    for number in range(options.producers):
        arguments = teller.arguments(plan.source, number, options.producers, options.way)
        tellers[staff.hire("teller", "teller", arguments, where)] = plan.survey.shares[number]
    return tellers


def _settle(orders: int, banks: Banks, staff: Staff, monkey: Monkey, show: Callable[[int], None]) -> None:
    done, waiting, moved_at = -1, 0, time.monotonic()
    while (done < orders or not monkey.content or waiting) and time.monotonic() - moved_at < _STALL_SECONDS:
        staff.look_after()
        with banks.b.connect() as b:
            now = audit.settled(b) + len(staff.refusals)
        with banks.a.connect() as a:
            # An orphan of the last order may outlive it.
            left = halves.waiting(a) if now >= orders else 0
        if (now, left) != (done, waiting):
            done, waiting, moved_at = now, left, time.monotonic()
            show(done)
        monkey.act(done)
        time.sleep(_POLL_SECONDS)


@contextmanager
def _progress(orders: int, told: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("settled"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=told, transient=True, disable=not told.is_terminal) as progress:
        task = progress.add_task("settled", total=orders)
        yield lambda done: progress.update(task, completed=done)
