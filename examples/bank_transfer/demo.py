"""The demo from end to end: databases, accounts, a day's work, the reconciliation, the audit, the report."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console

from outbox import embedded
from outbox.errors import ReconcileError
from outbox.reconcile.report.html import write_html

from . import audit, open_console, reconciliation
from .banks import Banks, create_tables, open_accounts, read_accounts
from .brokers import Missing, ServerDied
from .exchange import Exchange, opened
from .options import DemoOptions
from .orders import OrdersUnreadable
from .processes import ProcessError
from .report import Report
from .sentences import counted
from .source import Source, choose_closing, survey
from .workday import Plan, work

__all__ = ["DemoOptions", "run"]

SETTLED, NOT_SETTLED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run(options: DemoOptions, *, before_audit: Callable[[Banks], None] | None = None) -> int:
    """Run the demo, print its report, and return the exit code.

    0: everything is settled and not a cent is missing. 1: it isn't, or orders were refused and ``strict`` is
    set. 2: the orders can't be read, or a program isn't there that ``via`` needs. 130: interrupted.
    ``before_audit`` is called when all is settled and reconciled, and the processes have ended: the moment for a thief.

    Raises:
        EmbeddedError: there is no PostgreSQL to run it on.
    """
    screen = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        with _terminated_like_interrupted():
            report = _run(options, screen, before_audit)
    except OrdersUnreadable as error:
        screen.print(str(error), style="red")
        return BAD_INPUT
    except Missing as error:
        screen.print(str(error), style="red")
        return BAD_INPUT
    except (ProcessError, ReconcileError, ServerDied) as error:
        screen.print(str(error), style="red")
        return NOT_SETTLED
    except KeyboardInterrupt:
        screen.print("interrupted; all processes were stopped")
        return INTERRUPTED
    _show(report, options, screen)
    return NOT_SETTLED if report.faults or (options.strict and report.refusals) else SETTLED


def _run(options: DemoOptions, screen: Console, before_audit: Callable[[Banks], None] | None) -> Report:
    source = Source(options.orders, options.transfers, options.seed)
    known = read_accounts(options.accounts) if options.accounts else None
    closed = choose_closing(source, options.seed) if options.closes_accounts else ()
    plan = Plan(options, source, survey(source, options.producers, known), closed)
    screen.print(str(plan))

    with (
        _exchange_of(options) as exchange,
        embedded.server(["bank_a", "bank_b"], durable=False) as server,
        closing(Banks.at(server.url("bank_a"), server.url("bank_b"))) as banks,
    ):
        plan = replace(plan, exchange=exchange)
        begun = time.monotonic()
        create_tables(banks, via=exchange is not None)
        open_accounts(banks, plan.survey, known, options.opening_balance)
        before = audit.money(banks)
        processes = work(plan, banks, screen)
        carried = exchange.carried(processes.taken) if exchange else None
        if options.console:
            open_console.keep_open(banks, plan.environment(banks), options.console_port, screen)
        reconciled = reconciliation.run(banks, options, screen) if options.reconcile else None
        if before_audit is not None:
            before_audit(banks)
        refusals = sorted({*plan.survey.refusals, *processes.refusals})
        resent = reconciled.resent if reconciled else 0
        return Report(
            orders=plan.survey.rows,
            refusals=tuple(refusals),
            before=before,
            audit=audit.audit(
                banks, before, plan.survey.rows - len(refusals), resent, by_hand=options.console, carried=carried
            ),
            mode=options.mode,
            kills=processes.kills,
            aimed_kills=processes.aimed_kills,
            stalls=processes.stalls,
            late=processes.late,
            restarts=processes.restarts,
            reconciliation=reconciled,
            carried=carried,
            seconds=time.monotonic() - begun,
        )


def _exchange_of(options: DemoOptions) -> AbstractContextManager[Exchange | None]:
    """Run what is between the banks, if anything is."""
    if options.via is None:
        return nullcontext()
    return opened(options.via, options.seed, disturbed=options.planned_kills > 0)


def _show(report: Report, options: DemoOptions, screen: Console) -> None:
    for refusal in report.refusals:
        screen.print(f"{options.orders or 'order'}:{refusal.line}: {refusal.reason}")
    for parked in report.audit.parked:
        screen.print(f"parked: transfer {parked.transfer} of {parked.amount}: {parked.reason}")
    if options.report and report.reconciliation:
        write_html(options.report, report.reconciliation.for_the_page)
    if options.json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        report.print(Console())
    if options.strict and report.refusals:
        screen.print(f"{counted(len(report.refusals), 'order')} refused, which --strict makes an error", style="red")


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
