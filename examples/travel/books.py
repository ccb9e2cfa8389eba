"""The books of all five services at the end: how the trips ended, where the money is, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from uuid import UUID

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from outbox.flow.saga import SagaStatus, read_flows

from . import agency, bank, vendors
from .bank import Account, Payment, Refund
from .vendors import Booking, Cancellation

VENDORS = (vendors.flights, vendors.hotels, vendors.cars)
_ALL = 1_000_000


@dataclass(slots=True)
class Service:
    """What one service has done and undone: trips by what it did, prices by message, undone messages."""

    name: str
    done: list[tuple[UUID, UUID, Decimal]]
    undone: list[tuple[UUID, UUID | None]]

    @property
    def net(self) -> Decimal:
        """Return the steps that were done and stay."""
        undone = {message_id for _, message_id in self.undone}
        return sum((price for _, message_id, price in self.done if message_id not in undone), Decimal())

    def faults(self, statuses: dict[UUID, str]) -> Iterator[str]:
        """Compare it with how the trips ended."""
        done, undone = Counter(each[0] for each in self.done), Counter(each[0] for each in self.undone)
        by_trip = {trip: message_id for trip, message_id, _ in self.done}
        for trip in done.keys() | undone.keys() | statuses.keys():
            status = statuses.get(trip)
            if done[trip] > 1 or undone[trip] > 1:
                yield f"{self.name}: trip {trip} was done {done[trip]} times and undone {undone[trip]} times"
            if undone[trip] and not done[trip]:
                yield f"{self.name}: trip {trip} was undone and never done"
            if status == SagaStatus.COMPLETED and (done[trip], undone[trip]) != (1, 0):
                yield f"{self.name}: trip {trip} is completed, and was done {done[trip]} times, undone {undone[trip]}"
            if status == SagaStatus.COMPENSATED and done[trip] != undone[trip]:
                yield f"{self.name}: trip {trip} is compensated, and was done {done[trip]} times, undone {undone[trip]}"
        for trip, message_id in self.undone:
            if by_trip.get(trip) != message_id:
                yield f"{self.name}: trip {trip}: message {message_id} was undone, which has done nothing"


@dataclass(slots=True)
class Books:
    """All books; ``undone`` counts by service, ``faults`` is empty at a good end."""

    trips: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    undone: Counter[str] = field(default_factory=Counter)
    sums: dict[str, Decimal] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def open_trips() -> int:
    """Count the trips that haven't ended."""
    with agency.engine.connect() as connection:
        query = select(agency.Trip.id).where(agency.Trip.status == agency.PLANNED)
        return len(connection.execute(query).all())


def read(opening: Decimal) -> Books:
    """Read all books; ``opening`` is what the accounts had together before."""
    books = Books()
    with Session(agency.engine) as session:
        trips = list(session.scalars(select(agency.Trip)))
        statuses = {flow.id: flow.status.value for flow in read_flows(session.connection(), "outbox", limit=_ALL)}
    books.trips.update(trip.status for trip in trips)
    # Of "car was refused: …" and "car has not answered …", the words up to the third.
    books.refused.update(" ".join((trip.reason or "").split()[:3]).strip(":") for trip in trips if trip.reason)
    for trip in trips:
        if statuses.get(trip.id) != trip.status:
            books.faults.append(f"trip {trip.id} is {trip.status} at the agency, and its saga {statuses.get(trip.id)}")
        if trip.ends != 1:
            books.faults.append(f"trip {trip.id} ended {trip.ends} times")
    services = [*(_vendor(vendor) for vendor in VENDORS), _bank()]
    for service in services:
        books.undone[service.name] = len(service.undone)
        books.faults.extend(service.faults(statuses))
    with Session(bank.engine) as session:
        balances = sum(session.scalars(select(Account.balance)), Decimal())
    books.sums = {
        "the completed trips cost": sum((trip.price or Decimal() for trip in trips), Decimal()),
        "the customers' accounts are lower by": opening - balances,
        "the bank has taken and not given back": services[-1].net,
        "the vendors have booked and not cancelled": sum((each.net for each in services[:-1]), Decimal()),
    }
    if len(set(books.sums.values())) != 1:
        books.faults.append(f"the sums differ: {', '.join(f'{what} {value}' for what, value in books.sums.items())}")
    return books


def _vendor(vendor: vendors.Vendor) -> Service:
    with vendor.engine.connect() as connection:
        done = connection.execute(select(Booking.trip_id, Booking.message_id, Booking.price))
        undone = connection.execute(select(Cancellation.trip_id, Cancellation.booked_by))
        return Service(vendor.step, [row._tuple() for row in done], [row._tuple() for row in undone])


def _bank() -> Service:
    with bank.engine.connect() as connection:
        done = connection.execute(select(Payment.trip_id, Payment.message_id, Payment.amount))
        undone = connection.execute(select(Refund.trip_id, Refund.paid_by))
        return Service("payment", [row._tuple() for row in done], [row._tuple() for row in undone])


def engines() -> dict[str, Engine]:
    """Return the databases by the name of their service."""
    named = {vendor.outbox.group: vendor.engine for vendor in VENDORS}
    return {"agency": agency.engine, **named, "bank": bank.engine}
