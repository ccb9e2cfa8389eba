"""The chaos itself: who is killed and when, and what must hold at the end.

A kill is a SIGKILL of a process (a teller, a worker of either bank, the operator), also of one that was stopped first;
a connection that the server ends; or a SIGKILL of all of a database server, which then recovers. All of them fall at
random moments of work. At the end the survivors finish what there is, so that each transfer is credited or refunded,
and three things are compared: what tellers were told, what bank A has, and what bank B has.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Engine, TextClause, text
from sqlalchemy.exc import DBAPIError

from examples.bank_transfer.audit import Audit, Sums, audit, money
from examples.bank_transfer.banks import Banks, create_tables, open_accounts
from examples.bank_transfer.source import Survey
from outbox.embedded import Server
from tests.chaos import children

BALANCE = Decimal("1000000.00")
#: So many orders may be on their way: more of them, and the banks would only fall behind.
_BACKLOG = 300
_GRANT = 10
#: Seconds: between two kills on average, how long a process is stopped, between two looks at the banks.
_PAUSE = 0.1
_STOPPED = 1.0
_LOOK = 0.5
#: Without any progress for so long (seconds) the banks are stuck.
_STUCK = 180.0

_TERMINATE = text("""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1
""")
_UNSETTLED = text("""
SELECT (SELECT count(*) FROM outbox.half_message), (SELECT count(*) FROM outbox.half_check),
       (SELECT count(*) FROM transfer WHERE state = 'debited')
""")
_ROLLED_BACK = text("SELECT count(*) FROM outbox.op_message WHERE resolution = 'rollback'")
_SETTLED = text("SELECT count(*) FROM outbox.consumer_message WHERE status IN ('consumed', 'quarantined')")
_OPEN_JOBS = text("SELECT count(*) FROM outbox.bulk_job WHERE finished_at IS NULL")
# A consumer of a queue handles it in the order of its positions, whatever was killed; a retry comes when it is due.
_POSITIONS = text("SELECT half_id, queue, position FROM outbox.message WHERE send_number = 1")
_HANDLED = text("""
SELECT l.message_id FROM ledger_entry l JOIN outbox.consumer_message c ON c.message_id = l.message_id
 WHERE c.attempts = 1 ORDER BY l.id
""")

#: How often each kind of kill comes, in a thousand.
_KINDS = {"process": 830, "stopped": 40, "connection": 120, "server": 10}


class Stuck(Exception):
    """Nothing moves any more, though everything that was killed runs again; or a process has ended by itself."""


@dataclass(slots=True)
class Member:
    """A process that is started again whenever it was killed."""

    role: str
    start: Callable[[], tuple[BaseProcess, Pipe]]
    process: BaseProcess = field(init=False)
    reports: Pipe = field(init=False)
    #: It has begun its work, and may be killed.
    ready: bool = field(default=False, init=False)
    #: Orders that a teller may still execute.
    granted: int = field(default=0, init=False)

    def begin(self) -> None:
        """Start it."""
        self.ready, self.granted = False, 0
        self.process, self.reports = self.start()

    def end(self) -> None:
        """Kill it, and wait for its end; what it reported can still be read."""
        self.process.kill()
        self.process.join()


@dataclass(slots=True)
class Outcome:
    """What came of it. ``faults`` are sentences; there must be none."""

    kills: Counter[str]
    told: Counter[str]
    audit: Audit
    faults: list[str]
    seconds: float


def chaos(kills: int, seed: int, *, flows: int = 0, show: Callable[[int], None] = lambda _: None) -> Outcome:
    """Make so many kills, go on killing until so many orders (``flows``) were given, let the banks finish, and compare.

    ``show`` hears how many kills were made.

    Raises:
        Stuck: the banks don't get on any more.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="outbox-chaos-")))
        settings = {"max_connections": "100"}
        servers = [stack.enter_context(Server(folder=folder / name, settings=settings)) for name in ("a", "b")]
        for server, name in zip(servers, ("bank_a", "bank_b"), strict=True):
            server.create_database(name)
        urls = servers[0].url("bank_a"), servers[1].url("bank_b")
        os.environ |= {
            "BANK_A_URL": urls[0],
            "BANK_B_URL": urls[1],
            children.LOG: str(folder / "log"),
            # Orphans are decided while it goes on; a message is not given up because its workers are killed.
            "OUTBOX_IMMUNITY": "0.5",
            "OUTBOX_CHECK_INTERVAL": "0.5",
            "OUTBOX_CHECK_TIMEOUT": "1",
            "OUTBOX_MAX_CHECKS": "1000",
            "OUTBOX_MAX_STARTS": "30000",
            "BANK_A_CONFIRM_WITHIN": "1",
            # Bank A hears of each transfer, and refunds what an operator doesn't.
            "OUTBOX_CONFIRM_INTERVAL": "0.5",
            "OUTBOX_CONFIRM_GRACE": "1",
            "OUTBOX_COMPENSATION_ATTEMPTS": "30000",
            "OUTBOX_COMPENSATE_PARKED": "1000000000",
            "BANK_A_REFUND_AFTER": "0.2",
        }
        return Chaos(servers, stack, random.Random(seed)).run(kills, flows, show)  # noqa: S311 - no secret


class Chaos:
    """Two banks, a server each, and their processes; entered into ``stack``, which ends them."""

    def __init__(self, servers: list[Server], stack: ExitStack, dice: random.Random) -> None:
        self._servers, self._dice = servers, dice
        self._banks = Banks.at(os.environ["BANK_A_URL"], os.environ["BANK_B_URL"])
        stack.callback(self._banks.close)
        self._open_accounts()
        self._kills: Counter[str] = Counter()
        self._least_kills = self._least_flows = 0
        self._told: dict[str, set[int]] = {"executed": set(), "refused": set()}
        self._stopped: dict[int, tuple[Member, float]] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.children"])
        self._members = list(stack.enter_context(self._started()))

    def run(self, kills: int, flows: int, show: Callable[[int], None]) -> Outcome:
        """Make the kills, let the banks finish, and compare."""
        self._least_kills, self._least_flows = kills, flows
        before, began = money(self._banks), time.monotonic()
        self._work(show)
        self._finish()
        return self._compare(before, time.monotonic() - began)

    # --- the processes ---------------------------------------------------------------------------------------

    @contextmanager
    def _started(self) -> Iterator[list[Member]]:
        lifeline, held = self._context.Pipe(duplex=False)
        roles: list[tuple[str, Callable[..., None], tuple[object, ...]]] = [
            *(("teller", children.teller, (share,)) for share in range(1, 5)),
            *(("worker of bank A", children.worker, ("bank_a",)) for _ in range(3)),
            *(("worker of bank B", children.worker, ("bank_b",)) for _ in range(3)),
            ("operator", children.operator, ()),
        ]
        members = [
            Member(role, lambda target=target, more=more: _start(self._context, target, lifeline, more))  # type: ignore[misc]
            for role, target, more in roles
        ]
        try:
            for member in members:
                member.begin()
            yield members
        finally:
            for member in members:
                member.end()
            held.close()

    def _open_accounts(self) -> None:
        create_tables(self._banks)
        receivers = {
            f"{bank}-{number}"
            for bank in ("AB", "CD", "EF")
            for number in children.RECEIVERS
            if number != children.CLOSED
        }
        open_accounts(self._banks, Survey(receivers=receivers), frozenset(range(1, children.ACCOUNTS + 1)), BALANCE)

    # --- the kills -------------------------------------------------------------------------------------------

    def _work(self, show: Callable[[int], None]) -> None:
        look_at = moved_at = 0.0
        unsettled = done = 0
        while self._goes_on():
            self._hear()
            now = time.monotonic()
            if now >= look_at:
                before, (unsettled, done) = done, self._unsettled() or (unsettled, done)
                look_at, moved_at = now + _LOOK, now if done != before or not moved_at else moved_at
                if now - moved_at > _STUCK:
                    raise Stuck(f"no message was settled for {_STUCK:.0f} s; {unsettled} are not")
            self._require_life()
            self._grant(unsettled)
            self._resume()
            if self._goes_on() and any(member.granted for member in self._members):
                self._kill(self._dice.choices(list(_KINDS), list(_KINDS.values()))[0])
            show(self._kills.total())
            # The moment of the next kill: it must be one that nothing else decides.
            time.sleep(self._dice.expovariate(1 / _PAUSE))

    def _goes_on(self) -> bool:
        """Are there kills to be made?"""
        return self._kills.total() < self._least_kills or sum(map(len, self._told.values())) < self._least_flows

    def _kill(self, kind: str) -> None:
        if kind == "server":
            index = self._dice.randrange(len(self._servers))
            self._servers[index].kill()
            self._servers[index].start()
            self._kills["server"] += 1
        elif kind == "connection":
            engine = self._dice.choice([self._banks.a, self._banks.b])
            with suppress(DBAPIError), engine.connect() as connection:
                self._kills["connection"] += bool(connection.scalar(_TERMINATE))
        else:
            # One that has begun its work, or else the same one could be killed again and again before it does any.
            working = [each for each in self._members if each.ready and id(each) not in self._stopped]
            if working:
                (member,) = self._dice.choices(working, [1 if each.role == "operator" else 5 for each in working])
                if kind == "stopped":
                    os.kill(member.process.pid or 0, signal.SIGSTOP)
                    until = time.monotonic() + self._dice.uniform(0, 2 * _STOPPED)
                    self._stopped[id(member)] = member, until
                else:
                    self._end(member, member.role)

    def _end(self, member: Member, what: str) -> None:
        member.end()
        self._hear()
        assert member.process.exitcode == -signal.SIGKILL, f"a {member.role} ended by itself"
        self._kills[what] += 1
        member.begin()

    def _resume(self, *, ending: bool = False) -> None:
        """Let stopped processes go on, all of them if it is ``ending``; every other one to its death."""
        for member, until in list(self._stopped.values()):
            if ending or time.monotonic() >= until:
                del self._stopped[id(member)]
                os.kill(member.process.pid or 0, signal.SIGCONT)
                if self._goes_on() and self._dice.random() < 1 / 2:
                    self._end(member, f"{member.role}, stopped")

    def _require_life(self) -> None:
        for member in self._members:
            if not member.process.is_alive():
                log = Path(os.environ[children.LOG]).read_text()[-4_000:]
                raise Stuck(f"a {member.role} ended by itself, with {member.process.exitcode}\n{log}")

    # --- the tellers -----------------------------------------------------------------------------------------

    def _hear(self) -> None:
        for member in self._members:
            # The end of the pipe: it was killed, and all that it said is heard.
            with suppress(EOFError, ConnectionResetError):
                while member.reports.poll():
                    what, number = member.reports.recv()
                    # Most processes are killed after they have done some of their work in this life: a teller would
                    # else never get beyond an order that must wait for the check, nor a worker to its first message.
                    member.ready |= what != "begun" or self._dice.random() < 1 / 4
                    if what in self._told:
                        self._told[what].add(number)
                        member.granted -= 1

    def _grant(self, unsettled: int) -> None:
        for member in self._members:
            if member.role == "teller" and member.granted <= 0 and unsettled < _BACKLOG:
                with suppress(BrokenPipeError):
                    member.reports.send(_GRANT)
                    member.granted = _GRANT

    # --- the end ---------------------------------------------------------------------------------------------

    def _unsettled(self) -> tuple[int, int] | None:
        """Return how many halves aren't settled, and how many are; None while a database is down."""
        try:
            with self._banks.a.connect() as a, self._banks.b.connect() as b:
                ((halves, undecided, debited),) = a.execute(_UNSETTLED)
                rolled_back, jobs = a.scalar(_ROLLED_BACK) or 0, a.scalar(_OPEN_JOBS) or 0
                # Bank A has a group of its own: that of on_delivered, which its notices tell.
                settled = rolled_back + (a.scalar(_SETTLED) or 0) + (b.scalar(_SETTLED) or 0)
                return halves - settled + undecided + debited + jobs, settled
        except DBAPIError:
            return None

    def _finish(self) -> None:
        """Let everything run until all is settled, and end the processes."""
        self._resume(ending=True)
        last, moved_at = None, time.monotonic()
        while (now := self._unsettled()) is None or now[0] or any(member.granted > 0 for member in self._members):
            self._hear()
            self._require_life()
            if now != last:
                last, moved_at = now, time.monotonic()
            if time.monotonic() - moved_at > _STUCK:
                raise Stuck(f"nothing was settled for {_STUCK:.0f} s; {now and now[0]} messages are not")
            time.sleep(_LOOK / 5)
        for member in self._members:
            member.end()
        self._hear()

    def _compare(self, before: Sums, seconds: float) -> Outcome:
        with self._banks.a.connect() as a:
            transfers = set(a.scalars(text("SELECT id FROM transfer")))
        audited = audit(self._banks, before, len(transfers), tried=children.is_tried)
        lost, sneaked = self._told["executed"] - transfers, self._told["refused"] & transfers
        faults = [
            *audited.faults,
            *([f"{len(lost)} transfers that a teller was told were committed are gone"] if lost else []),
            *([f"{len(sneaked)} transfers were executed, though refused"] if sneaked else []),
            *_out_of_order(self._banks),
        ]
        told = Counter({what: len(numbers) for what, numbers in self._told.items()})
        return Outcome(self._kills, told, audited, faults, seconds)


def _start(
    context: ForkServerContext, target: Callable[..., None], lifeline: Pipe, more: tuple[object, ...]
) -> tuple[BaseProcess, Pipe]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(lifeline, theirs, *more), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _out_of_order(banks: Banks) -> list[str]:
    places = {row[0]: (row[1], row[2]) for row in _rows(banks.a, _POSITIONS)}
    last: dict[int, int] = {}
    late = 0
    for (message_id,) in _rows(banks.b, _HANDLED):
        queue, position = places[message_id]
        late += position < last.get(queue, 0)
        last[queue] = max(position, last.get(queue, 0))
    return [f"{late} messages were handled after later ones of their queue"] if late else []


def _rows(engine: Engine, query: TextClause) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(query))
