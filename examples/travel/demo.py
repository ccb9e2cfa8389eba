"""The run: trips are planned, booked or refused, while workers are killed; at the end all books are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from decimal import Decimal

from rich.console import Console
from sqlalchemy.orm import Session

from outbox.database.migration import upgrade
from outbox.worker import Worker

from . import agency, bank, books, vendors
from .message import TripPlanned
from .processes import Processes, running
from .worker import OUTBOXES

IN_SYNC, NOT_IN_SYNC = 0, 1
_CUSTOMERS = 40
_CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Perth", "Quito", vendors.NO_FLIGHTS, vendors.NO_HOTELS)
#: What a customer has at first; one of ten has next to nothing.
_RICH, _POOR = Decimal(1_000_000), Decimal("10.00")


#: How long (seconds) a worker may take to start, and what lies between two looks.
_START_SECONDS, _PAUSE = 60.0, 0.05


class NotFinished(Exception):
    """Trips don't come to an end."""


def run(flows: int, *, kills: int, seed: int, within: float) -> int:
    """Run it with the services' own databases, which are empty; print what came of it; return the exit code.

    ``kills`` workers are killed in turn, while there is work; without, they are threads of this process. After the last
    trip was planned, all must have ended ``within`` so many seconds.
    """
    console = Console(highlight=False, soft_wrap=True)
    opening = open_books()
    trips, began = make_trips(flows, seed), time.monotonic()
    if kills:
        with running(OUTBOXES) as processes:
            _plan_and_kill(trips, processes, kills, seed)
            _wait(console, flows, within, processes.restart_dead)
        killed = ", ".join(f"{service} {count}" for service, count in processes.kills.items())
        console.print(f"Workers killed by SIGKILL: {processes.kills.total()} ({killed}).")
    else:
        with _threads():
            for trip in trips:
                agency.plan(trip)
            _wait(console, flows, within)
    return report(console, books.read(opening), time.monotonic() - began)


def open_books() -> Decimal:
    """Create all tables and accounts; return what the accounts have together."""
    bases = {"agency": agency.Base, "bank": bank.Base}
    for service, engine in books.engines().items():
        upgrade(engine)
        bases.get(service, vendors.Base).metadata.create_all(engine)
    balances = {f"customer-{number:02}": _POOR if number % 10 == 0 else _RICH for number in range(_CUSTOMERS)}
    with Session(bank.engine) as session, session.begin():
        session.add_all(bank.Account(customer=name, balance=balance) for name, balance in balances.items())
    return sum(balances.values(), Decimal())


def make_trips(number: int, seed: int) -> list[TripPlanned]:
    """Return so many trips, of which each service will refuse some; the same seed gives the same ones."""
    dice = random.Random(seed)
    return [
        TripPlanned(
            customer=f"customer-{dice.randrange(_CUSTOMERS):02}",
            age=dice.randint(19, 70),
            destination=dice.choice(_CITIES),
        )
        for _ in range(number)
    ]


def _plan_and_kill(trips: Sequence[TripPlanned], processes: Processes, kills: int, seed: int) -> None:
    """Plan the trips in as many parts as there are kills, so that there is work left for each."""
    dice = random.Random(seed)
    for number in range(kills):
        for trip in trips[number * len(trips) // kills : (number + 1) * len(trips) // kills]:
            agency.plan(trip)
        victim = processes.members[number % len(processes.members)]
        deadline = time.monotonic() + _START_SECONDS
        while not victim.ready and time.monotonic() < deadline:
            processes.restart_dead()
            time.sleep(_PAUSE)
        time.sleep(dice.random())
        processes.kill(number)


def _wait(console: Console, flows: int, within: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Return when all trips have ended.

    Raises:
        NotFinished: that takes too long.
    """
    deadline, known = time.monotonic() + within, flows + 1
    while left := books.open_trips():
        meanwhile()
        if left < known - flows // 10:
            console.print(f"{flows - left:,} of {flows:,} trips have ended.")
            known = left
        if time.monotonic() > deadline:
            raise NotFinished(f"{left} of {flows} trips haven't ended {within:.0f} s after the last was planned")
        time.sleep(_PAUSE)


@contextmanager
def _threads() -> Iterator[None]:
    with ExitStack() as stack:
        for outbox in OUTBOXES.values():
            stack.enter_context(Worker(outbox))
        yield


def report(console: Console, found: books.Books, seconds: float) -> int:
    """Print how the trips ended and where the money is; return the exit code."""
    ended = ", ".join(f"{count:,} {status}" for status, count in sorted(found.trips.items()))
    console.print(f"{found.trips.total():,} trips in {seconds:.0f} s: {ended}.")
    for reason, count in found.refused.most_common():
        console.print(f"  {count:>6,} because {reason}")
    undone = ", ".join(f"{step} {count:,}" for step, count in found.undone.items())
    console.print(f"Bookings and payments undone: {found.undone.total():,} ({undone}).")
    for what, amount in found.sums.items():
        console.print(f"{amount:>16,} {what}")
    if found.faults:
        for fault in found.faults[:20]:
            console.print(fault, style="red")
        console.print(f"Not in sync: {len(found.faults)} faults.", style="bold red")
        return NOT_IN_SYNC
    good = "Each trip is booked and paid for as a whole, or not at all; nothing was undone twice; 0 cents are off."
    console.print(good, style="bold green")
    return IN_SYNC
