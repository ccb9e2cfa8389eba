"""The banks at work: all processes are started, looked after and killed, until every order is settled."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import bank_b_desk, halves, states, teller
from .banks import Banks
from .exchange import Exchange
from .lifeline import BETWEEN, SECOND
from .message import OUTCOMES, TOPIC
from .monkey import Monkey
from .options import DemoOptions, Mode, Via
from .processes import BankProcess, Processes
from .sentences import counted
from .source import Source, Survey

DISPATCHERS = 2
_POLL_SECONDS = 0.05
# On a busy machine processes that were killed may need a minute until they are back at work.
_STALL_SECONDS = 180.0

#: Transfers are to end, and orphans to be decided, within the run: all has shorter times than by default (seconds).
_SHORT_TIMES = {
    "OUTBOX_CONFIRM_INTERVAL": "0.5",
    "OUTBOX_CONFIRM_GRACE": "0.5",
    "BANK_A_REFUND_AFTER": "0.5",
    "OUTBOX_IMMUNITY": "0.5",
    "OUTBOX_CHECK_INTERVAL": "0.5",
    "OUTBOX_CHECK_TIMEOUT": "1",
    "BANK_A_CONFIRM_WITHIN": "1",
}
#: As many as are parked: the limit is for a real bank, which wouldn't refund a whole day's business while it sleeps.
_ANY_NUMBER = 1_000_000_000
_OUT_OF_REACH = "postgresql+psycopg://the-other-bank.invalid/bank"
_BETWEEN = {
    Via.KAFKA: "Kafka",
    Via.RABBITMQ: "RabbitMQ",
    Via.NATS: "NATS JetStream",
    Via.REDIS: "a server with Redis Streams",
    Via.WEBHOOK: "HTTP: each posts webhooks to the other",
    Via.ROCKETMQ: "gRPC: each serves RocketMQ's client of the other from its own tables",
}
_HOW = {
    Mode.SEND: "",
    Mode.TWO_PHASE: " Each order begins with a half message, and ends in the transaction that debits.",
    Mode.TCC: " Each order is tried, then confirmed or cancelled.",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The orders of a run, and how they are to be executed.

    ``closing``: the orders about which bank A has just asked when the receiver closes the account.
    """

    options: DemoOptions
    source: Source
    survey: Survey
    closing: Sequence[int] = ()
    exchange: Exchange | None = None

    def environment(self, banks: Banks) -> dict[str, str]:
        """Return the variables that the processes of both banks need."""
        # With the console, the operator refunds.
        policy = {"OUTBOX_COMPENSATE_PARKED": "0" if self.options.console else str(_ANY_NUMBER)}
        return banks.environment | _SHORT_TIMES | policy

    def environments(self, banks: Banks) -> tuple[dict[str, str], dict[str, str]]:
        """Return the variables that the processes of bank A need, and those that the processes of bank B need.

        Where there is something between the banks, neither can reach the database of the other one.
        """
        both = self.environment(banks)
        if self.exchange is None:
            return both, both
        both |= self.exchange.between.environment
        return both | {"BANK_B_URL": _OUT_OF_REACH}, both | {"BANK_A_URL": _OUT_OF_REACH}

    def __str__(self) -> str:
        options, kills = self.options, self.options.planned_kills
        processes = (
            f"{counted(options.producers, 'teller')} and {counted(DISPATCHERS, 'dispatcher')} at bank A, "
            f"{counted(options.consumers, 'consumer')} and a desk at bank B"
        )
        orders = f"{counted(self.survey.rows, 'order')} ({self.source})"
        monkey = f"; {counted(kills, 'time')} one of them is killed" if kills else ""
        monkey += f"; {counted(len(self.closing), 'account')} of bank B closed meanwhile" if self.closing else ""
        between = f" Between them is {_BETWEEN[options.via]}." if options.via else ""
        return f"Two banks, a database each. {orders}; {processes}{monkey}.{_HOW[options.mode]}{between}"


def work(plan: Plan, banks: Banks, screen: Console) -> Processes:
    """Let the banks work until every order is refused, credited or refunded, and every half message decided.

    When nothing moves any more, it ends too: the audit is going to say what is missing.

    Returns the processes, all of them stopped, for what they counted.

    Raises:
        ProcessError: a process ends again and again without having been killed.
    """
    processes = Processes()
    processes.broker = plan.exchange.broker if plan.exchange else None
    moments = () if plan.options.mode is Mode.SEND else (BETWEEN, SECOND)
    with socket.create_server(("127.0.0.1", 0)) as desk:
        try:
            tellers = _start_all(plan, banks, processes, desk)
            monkey = Monkey(processes, tellers, plan.options.planned_kills, plan.options.seed, moments)
            with _progress(plan.survey.shares.total(), screen) as show:
                _settle(plan, banks, processes, monkey, show)
        finally:
            processes.stop()
    return processes


@contextmanager
def workers_running(environment: Mapping[str, str]) -> Iterator[Processes]:
    """Have a worker of each bank at work, without tellers, and without kills."""
    processes = Processes()
    try:
        processes.start("dispatcher", "worker", ["bank_a"], environment)
        processes.start("consumer", "worker", ["bank_b"], environment)
        yield processes
    finally:
        processes.stop()


def wait_for(fact: Callable[[], bool], processes: Processes) -> None:
    """Return when it is so, or when waiting has been in vain for long; the audit is going to say what is missing.

    Raises:
        ProcessError: a process ends again and again without having been killed.
    """
    until = time.monotonic() + _STALL_SECONDS
    while not fact() and time.monotonic() < until:
        processes.restart_dead()
        time.sleep(_POLL_SECONDS)


def _start_all(plan: Plan, banks: Banks, processes: Processes, desk: socket.socket) -> dict[BankProcess, int]:
    """Start all processes; return the tellers with the number of orders each has to execute.

    ``desk`` is where bank B listens to inquiries: it stays open while the process that answers is killed.
    """
    options = plan.options
    host, port = desk.getsockname()
    at_a, at_b = plan.environments(banks)
    at_a["BANK_B_DESK"] = f"http://{host}:{port}"
    bank_a, bank_b = ("bank_a_via", "bank_b_via") if plan.exchange else ("bank_a", "bank_b")
    for _ in range(DISPATCHERS):
        processes.start("dispatcher", "worker", [bank_a], at_a)
    for _ in range(options.consumers):
        processes.start("consumer", "worker", [bank_b], at_b)
    processes.start("desk", "bank_b_desk", bank_b_desk.arguments(desk, plan.closing), at_b, [desk.fileno()])
    if plan.exchange:
        _start_carriers(plan.exchange, processes, bank_a, OUTCOMES, at_a)
        _start_carriers(plan.exchange, processes, bank_b, TOPIC, at_b)
    tellers = {}
    for number in range(options.producers):
        arguments = teller.arguments(plan.source, number, options.producers, options.mode)
        tellers[processes.start("teller", "teller", arguments, at_a)] = plan.survey.shares[number]
    return tellers


def _start_carriers(exchange: Exchange, processes: Processes, bank: str, taken: str, where: Mapping[str, str]) -> None:
    """Start what publishes for the other bank, and what takes the topic ``taken`` from it."""
    if exchange.between.kind is Via.ROCKETMQ:
        served = next(topic for topic in exchange.between.publish_at if topic != taken)
        processes.start("gateway", "gateway", [bank, served], where)
        processes.start("collector", "collector", [bank], where)
        return
    processes.start("relay", "worker", [bank, "publisher", "consume"], where)
    if (listening := exchange.endpoints.get(taken)) is None:
        processes.start("intake", "worker", [bank, "intake", "intake"], where)
    else:
        number = listening.fileno()
        processes.start("endpoint", "endpoint", [bank, str(number)], where, [number])


def _settle(plan: Plan, banks: Banks, processes: Processes, monkey: Monkey, show: Callable[[int], None]) -> None:
    orders, by_hand = plan.survey.shares.total(), plan.options.console
    done, waiting, moved_at = -1, 0, time.monotonic()
    while (done < orders or not monkey.done or waiting) and time.monotonic() - moved_at < _STALL_SECONDS:
        processes.restart_dead()
        with banks.a.connect() as a, banks.b.connect() as b:
            now = states.settled(a) + (states.parked(b) if by_hand else 0) + len(processes.refusals)
            # An orphan of the last order may outlive it.
            left = halves.waiting(a) if now >= orders else 0
        if (now, left) != (done, waiting):
            done, waiting, moved_at = now, left, time.monotonic()
            show(done)
        monkey.act(done)
        time.sleep(_POLL_SECONDS)


@contextmanager
def _progress(orders: int, screen: Console) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("settled"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("settled", total=orders)
        yield lambda done: progress.update(task, completed=done)
