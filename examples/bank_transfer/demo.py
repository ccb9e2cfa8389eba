"""The demo from end to end: databases, accounts, processes, kills, the audit, the report."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outbox import embedded

from . import audit, opening, teller
from .monkey import Monkey
from .opening import Banks
from .orders import OrdersUnreadable, Refusal
from .report import Report
from .source import Source, Survey, survey
from .staff import Employee, Staff, StaffError

SETTLED, MONEY_MISSING, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

DISPATCHERS = 2
_DEFAULT_KILLS = 30
_POLL_SECONDS = 0.02
_STALL_SECONDS = 60.0
_RICHEST = Decimal("999999999999.99")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is asked to do.

    ``orders``: a file of payment orders (see `orders`); None generates ``transfers`` of them from ``seed``.
    ``accounts``: a file of the account ids that bank A knows; None: all that the orders name.
    ``opening_balance``: what every account of bank A begins with; None: what covers its orders.
    ``producers``, ``consumers``: numbers of processes of tellers at bank A, and of workers at bank B.
    ``crash``: kill processes at random; ``kills`` says how many (and implies ``crash``), by default 30.
    ``strict``: refused orders make the exit code 1. ``json``: print one JSON object instead of the tables.

    Raises:
        ValueError: a number out of range; names the option.
    """

    orders: Path | None = None
    accounts: Path | None = None
    opening_balance: Decimal | None = None
    transfers: int = 1000
    producers: int = 2
    consumers: int = 2
    crash: bool = False
    kills: int | None = None
    seed: int = 1
    strict: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("transfers", self.transfers, 10_000_000),
            ("producers", self.producers, 64),
            ("consumers", self.consumers, 64),
            ("kills", self.kills, 100_000),
        ):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} = {value} must be between 1 and {most:,}")
        if (balance := self.opening_balance) is not None and not (
            0 <= balance <= _RICHEST and balance == round(balance, 2)
        ):
            raise ValueError(
                f"opening_balance = {balance} must be between 0 and {_RICHEST:,}, with at most 2 decimals"
            )

    @property
    def planned_kills(self) -> int:
        """How many kills the run will see."""
        return self.kills or (_DEFAULT_KILLS if self.crash else 0)


def run(options: DemoOptions, *, before_audit: Callable[[Banks], None] | None = None) -> int:
    """Run the demo and print its report; return the exit code.

    0: everything is settled and not a cent is missing. 1: it isn't, or orders were refused and ``strict`` is
    set. 2: the orders can't be read. 130: interrupted. ``before_audit`` is called when all is settled and the
    processes have ended: the moment for a thief.

    Raises:
        EmbeddedError: there is no PostgreSQL to run it on.
    """
    told = Console(stderr=True)
    try:
        with _terminated_like_interrupted():
            report = _run(options, told, before_audit)
    except OrdersUnreadable as error:
        told.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return BAD_INPUT
    except StaffError as error:
        told.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return MONEY_MISSING
    except KeyboardInterrupt:
        told.print("interrupted: all processes were stopped")
        return INTERRUPTED
    _show(report, options, told)
    return MONEY_MISSING if report.faults or (options.strict and report.refusals) else SETTLED


def _run(options: DemoOptions, told: Console, before_audit: Callable[[Banks], None] | None) -> Report:
    source = Source(options.orders, options.transfers, options.seed)
    seen = survey(source, options.producers)
    known = opening.read_accounts(options.accounts) if options.accounts else None
    told.print(_headline(options, source, seen), highlight=False, markup=False, soft_wrap=True)

    with (
        embedded.server(["bank_a", "bank_b"], durable=False) as server,
        closing(Banks.at(server.url("bank_a"), server.url("bank_b"))) as banks,
    ):
        begun = time.monotonic()
        opening.create_tables(banks)
        opening.open_accounts(banks, seen, known, options.opening_balance)
        before = audit.money(banks)
        with _staffed() as staff:
            _settle(options, source, seen, banks, staff, told)
        if before_audit is not None:
            before_audit(banks)
        refusals = sorted({*seen.refusals, *staff.refusals})
        return Report(
            orders=seen.rows,
            refusals=tuple(refusals),
            before=before,
            audit=audit.audit(banks, before, seen.rows - len(refusals)),
            kills=staff.kills,
            restarts=staff.restarts,
            seconds=time.monotonic() - begun,
        )


def _settle(
    options: DemoOptions, source: Source, seen: Survey, banks: Banks, staff: Staff, told: Console
) -> None:
    """Let the banks work until every order is refused, or settled at bank B; give up when nothing moves."""
    orders = seen.shares.total()
    monkey = Monkey(staff, _hire(options, source, seen, banks, staff), options.planned_kills, options.seed)
    with _progress(orders, told) as show, banks.b.connect() as inbox:
        done, moved = -1, time.monotonic()
        while (done < orders or not monkey.content) and time.monotonic() - moved < _STALL_SECONDS:
            staff.look_after()
            if (now := audit.settled(inbox) + len(staff.refusals)) != done:
                done, moved = now, time.monotonic()
                show(done)
            inbox.rollback()
            monkey.act(done)
            time.sleep(_POLL_SECONDS)


def _hire(
    options: DemoOptions, source: Source, seen: Survey, banks: Banks, staff: Staff
) -> dict[Employee, int]:
    """Start all processes; return the tellers with the number of orders each has to execute."""
    where = banks.environment
    for _ in range(DISPATCHERS):
        staff.hire("dispatcher at A", "worker", ["bank_a"], where)
    for _ in range(options.consumers):
        staff.hire("consumer at B", "worker", ["bank_b"], where)
    tellers = {}
    for number in range(options.producers):
        arguments = teller.arguments(source, number, options.producers)
        tellers[staff.hire("teller at A", "teller", arguments, where)] = seen.shares[number]
    return tellers


def _headline(options: DemoOptions, source: Source, seen: Survey) -> str:
    processes = f"{options.producers} tellers, {DISPATCHERS} dispatchers, {options.consumers} consumers"
    kills = f"; {options.planned_kills} times one of them is killed" if options.planned_kills else ""
    return f"Two banks, a database each; {seen.rows:,} orders ({source}); {processes}{kills}."


def _show(report: Report, options: DemoOptions, told: Console) -> None:
    name = options.orders or "order"
    for refusal in report.refusals:
        told.print(f"{name}:{refusal.line}: {refusal.reason}", highlight=False, markup=False, soft_wrap=True)
    if options.json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        report.print(Console())


@contextmanager
def _staffed() -> Iterator[Staff]:
    staff = Staff()
    try:
        yield staff
    finally:
        staff.stop()


@contextmanager
def _progress(orders: int, told: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("settled"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=told, transient=True, disable=not told.is_terminal) as progress:
        task = progress.add_task("settled", total=orders)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM stop the demo as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
