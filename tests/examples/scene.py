"""Bank A with a payment order, a teller that dies or lingers over it; checks and deliveries are made by hand."""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from sqlalchemy import text

from examples.bank_transfer import bank_a, bank_b
from examples.bank_transfer.audit import Audit, Sums, audit, money
from examples.bank_transfer.banks import Banks, open_accounts
from examples.bank_transfer.message import GROUP, TOPIC, TransferOrdered
from examples.bank_transfer.options import Mode
from examples.bank_transfer.source import Source, survey
from examples.bank_transfer.teller import arguments
from outbox import Counts, Outbox, Settings, testing
from outbox.consumer.consumer import Consumer
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.examples import paused_teller
from tests.examples.conftest import HEADER
from tests.kit import wait_until

#: One order for 30.00, and one to a receiver on the compliance desk's watch list.
GOOD, LISTED = '7;1;"AB";"71000001";30.00;"RENT"', '8;1;"AB";"71000013";30.00;"RENT"'


@dataclass(frozen=True)
class Teller:
    """The process of a teller, and the lines that it reports."""

    process: BaseProcess
    lines: IO[str]

    def reported(self) -> list[dict[str, Any]]:
        """Let it come to its end; return what it reported."""
        facts = [json.loads(line) for line in self.lines]
        self.process.join(60)
        assert self.process.exitcode == 0
        return [fact for fact in facts if "ready" not in fact and "step" not in fact]


@dataclass
class Scene:
    """The databases of both banks, the orders of one teller, and the money before."""

    banks: Banks
    mode: Mode
    source: Source
    folder: Path
    before: Sums

    @classmethod
    def of(cls, banks: Banks, mode: Mode, folder: Path, order: str) -> Scene:
        """Open the accounts for one order."""
        file = folder / "orders.csv"
        file.write_text(f"{HEADER}\n{order}\n")
        source = Source(file, 1, 1)
        open_accounts(banks, survey(source, 1))
        return cls(banks, mode, source, folder, money(banks))

    # --- the teller ----------------------------------------------------------------------------------------

    @contextmanager
    def paused(self, point: str) -> Iterator[Teller]:
        """Yield a teller that has stopped at the point; see `paused_teller`."""
        with self._teller(point) as teller:
            here = self.folder / "paused"
            wait_until(lambda: here.exists() or teller.process.exitcode is not None, f"the teller is at {point}")
            assert teller.process.exitcode is None
            yield teller

    def kill_at(self, point: str) -> None:
        """Let a teller work until it is at the point, and kill it there."""
        with self.paused(point):
            pass
        wait_until(lambda: not self._at_work(), "the database has noticed that the teller is gone")

    def go_on(self, teller: Teller) -> list[dict[str, Any]]:
        """Let a paused teller finish; return what it reported."""
        (self.folder / "go").touch()
        return teller.reported()

    def work(self) -> list[dict[str, Any]]:
        """Let a teller that nothing happens to execute the orders; return what it reported."""
        with self._teller("none:0") as teller:
            return teller.reported()

    @contextmanager
    def _teller(self, point: str) -> Iterator[Teller]:
        """Yield a teller that may execute all orders; it is killed at the end if it is still there."""
        context = multiprocessing.get_context("forkserver")
        (lifeline, held), (reports, said) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        os.write(held.fileno(), b"1000\n")
        mine = arguments(self.source, 0, 1, self.mode)
        told = (lifeline, said, self.banks.environment, self.folder, point, mine)
        process = context.Process(target=paused_teller.work, args=told, daemon=True)
        with lifeline, held, reports, open(reports.fileno(), closefd=False) as lines:
            process.start()
            said.close()
            try:
                yield Teller(process, lines)
            finally:
                process.kill()
                process.join()

    def _at_work(self) -> bool:
        others = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND (state <> 'idle' OR wait_event_type = 'Lock') AND backend_type = 'client backend'"
        )
        return bool(self._one(others))

    # --- the workers ---------------------------------------------------------------------------------------

    def check(self, *, after: dt.timedelta = dt.timedelta()) -> Counts:
        """Check what is undecided; see the function `check`."""
        return check(self.banks, after=after)

    # --- what is to be seen --------------------------------------------------------------------------------

    def audit(self, *, executed: int, by_hand: bool = False) -> Audit:
        """Return the audit, by which so many orders ought to have been executed."""
        return audit(self.banks, self.before, orders=executed, by_hand=by_hand)

    def states(self) -> list[str]:
        """Return the states of the transfers, in the order of their ids."""
        return [row[0] for row in self._rows("SELECT state FROM transfer ORDER BY id")]

    def halves(self) -> list[tuple[str | None, str | None]]:
        """Return resolution and decider of each half message, in the order in which they were prepared."""
        query = (
            "SELECT o.resolution, o.decided_by FROM outbox.half_message h "
            "LEFT JOIN outbox.op_message o ON o.half_id = h.id ORDER BY h.id"
        )
        return [(row[0], row[1]) for row in self._rows(query)]

    def answers(self) -> list[tuple[str, str, str | None]]:
        """Return what each check asked, its answer, and its error."""
        query = "SELECT asked, answer, error FROM outbox.check_history ORDER BY half_id, id"
        return [(row[0], row[1], row[2]) for row in self._rows(query)]

    def reservations(self) -> list[str]:
        """Return the states of the reservations, in the order in which they were made."""
        return [row[0] for row in self._rows("SELECT state FROM reservation ORDER BY half_id")]

    def account(self) -> tuple[Decimal, Decimal]:
        """Return balance and reserved amount of the sender."""
        ((balance, reserved),) = self._rows("SELECT balance, reserved FROM account")
        return balance, reserved

    def _one(self, query: str) -> Any:
        return self._rows(query)[0][0]

    def _rows(self, query: str) -> list[Any]:
        with self.banks.a.connect() as connection:
            return list(connection.execute(text(query)))


def check(banks: Banks, *, after: dt.timedelta) -> Counts:
    """Check what is undecided, as the workers of bank A do, and as if so much time had gone by."""
    with banks.a.begin() as connection:
        connection.execute(text("UPDATE outbox.half_message SET born_at = born_at - :after"), {"after": after})
    return testing.check(bank_a_at(banks))


def bank_a_at(banks: Banks, *, refund_after: float = 3600.0) -> Outbox:
    """Return bank A as its workers know it, on these databases; what is parked for so long (seconds) is refunded."""
    outbox = Outbox(banks.a, group="bank-a", settings=Settings())
    outbox.checkers.update(bank_a.outbox.checkers)
    outbox.known_group(TOPIC, group=GROUP, consumer=banks.b)
    outbox.on_delivered(TOPIC, model=TransferOrdered)(bank_a.note_credit)
    parked: dict[str, Any] = {"when": "parked", "after": refund_after}
    outbox.compensation(TOPIC, model=TransferOrdered, consumers=[banks.b], **parked)(bank_a.refund)
    return outbox


def deliver(banks: Banks) -> None:
    """Dispatch at bank A, consume at bank B all that there is, and let bank A know what became of it."""
    settings = Settings()
    consumer = Consumer(bank_b.outbox.subscriptions[TOPIC, GROUP], settings)
    with banks.a.connect() as source, banks.b.connect() as connection:
        dispatch_once(source, settings)
        consumer.start(connection, source)
        while consumer.consume_once(connection, source):
            pass
    bank = bank_a_at(banks)
    testing.confirm(bank)
    testing.drain(bank)
