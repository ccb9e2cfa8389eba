"""The travel agency: owns the saga, and writes down what becomes of each trip."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import ClassVar
from uuid import UUID

from sqlalchemy import Numeric, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Flow, Outbox, Saga

from .message import PaymentDue, TripPlanned

engine = create_engine(os.environ.get("AGENCY_URL", "postgresql+psycopg://localhost/agency"))
outbox = Outbox(engine, group="agency")

PLANNED = "planned"


class Base(DeclarativeBase):
    """The tables of the agency."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2)}


class Trip(Base):
    """A trip, by the id of its saga; how it ended, why, and what it cost."""

    __tablename__ = "trip"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    status: Mapped[str] = mapped_column(server_default=PLANNED)
    reason: Mapped[str | None]
    price: Mapped[Decimal | None]
    ends: Mapped[int] = mapped_column(server_default="0")


def price_of(flow: Flow[TripPlanned]) -> Decimal:
    """Return what the bookings of a trip cost together."""
    return sum((Decimal(flow.answers[step]["price"]) for step in ("flight", "hotel", "car")), Decimal())


def payment_of(flow: Flow[TripPlanned]) -> PaymentDue:
    """Return what the customer has to pay for."""
    return PaymentDue(customer=flow.body.customer, amount=price_of(flow))


def _url(name: str) -> str:
    return os.environ.get(f"{name.upper()}_URL", f"postgresql+psycopg://localhost/{name}")


trips = Saga(outbox, "trip", model=TripPlanned, timeout=float(os.environ.get("TRAVEL_TIMEOUT", "30")))
trips.step("flight", "flight.book", compensate="flight.cancel", group="flights", source=_url("flights"))
trips.step("hotel", "hotel.book", compensate="hotel.cancel", group="hotels", source=_url("hotels"))
trips.step("car", "car.book", compensate="car.cancel", group="cars", source=_url("cars"))
trips.step("payment", "payment.take", compensate="payment.give", group="bank", source=_url("bank"), body=payment_of)


@trips.ended
def note_end(flow: Flow[TripPlanned], session: Session) -> None:
    """Write down how a trip ended, in the transaction in which it does."""
    trip = session.get_one(Trip, flow.id)
    trip.status, trip.reason = flow.status, flow.reason
    trip.ends += 1
    if flow.status == "completed":
        trip.price = price_of(flow)


def plan(trip: TripPlanned) -> UUID:
    """Take down a trip and start its saga, both or neither; return its id."""
    with Session(engine) as session, session.begin():
        trip_id = trips.start(session, trip)
        session.add(Trip(id=trip_id, customer=trip.customer))
    return trip_id
