"""The airline, the hotels and the cars: each books and cancels in a database of its own, and knows nothing of sagas.

Their tables would take the same booking, or its cancellation, twice: that neither happens is the framework's work, and
`books` looks for it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from decimal import Decimal
from typing import ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, Engine, Identity, Numeric, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from outbox import Message, Outbox

from .message import TripPlanned

#: Where no flights go, where there are no hotels, and the age from which a customer may rent a car.
NO_FLIGHTS, NO_HOTELS, OLD_ENOUGH = "Atlantis", "Antarctica", 21


class Base(DeclarativeBase):
    """The tables of each vendor."""

    type_annotation_map: ClassVar = {Decimal: Numeric(14, 2), int: BigInteger}


class Booking(Base):
    """A booking for a trip, by the message that asked for it."""

    __tablename__ = "booking"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    trip_id: Mapped[UUID]
    message_id: Mapped[UUID]
    price: Mapped[Decimal]


class Cancellation(Base):
    """The cancellation of what a message has booked."""

    __tablename__ = "cancellation"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    trip_id: Mapped[UUID]
    booked_by: Mapped[UUID | None]


class Vendor:
    """A service that books ``step`` of a trip, unless ``objection`` gives a reason not to."""

    def __init__(self, name: str, step: str, objection: Callable[[TripPlanned], str | None]) -> None:
        self.step = step
        self.engine: Engine = create_engine(
            os.environ.get(f"{name.upper()}_URL", f"postgresql+psycopg://localhost/{name}")
        )
        self.outbox = Outbox(self.engine, group=name)
        self._objection = objection
        agency = os.environ.get("AGENCY_URL", "postgresql+psycopg://localhost/agency")
        self.outbox.consumer(f"{step}.book", group=name, source=agency, model=TripPlanned)(self.book)
        self.outbox.consumer(f"{step}.cancel", group=name, source=agency, model=TripPlanned)(self.cancel)

    def book(self, message: Message[TripPlanned], session: Session) -> None:
        """Book, or refuse."""
        if (reason := self._objection(message.body)) is not None:
            message.refuse(session, reason)
            return
        trip_id = UUID(message.key)
        price = Decimal(random.Random(f"{self.step} {trip_id}").randint(5_000, 90_000)).scaleb(-2)
        session.add(Booking(trip_id=trip_id, message_id=message.id, price=price))
        message.reply(session, {"price": str(price)})

    def cancel(self, message: Message[TripPlanned], session: Session) -> None:
        """Cancel what was booked; whether there was anything to cancel is seen at the end."""
        session.add(Cancellation(trip_id=UUID(message.key), booked_by=message.correlation))
        message.reply(session, {})


def _no_flights(trip: TripPlanned) -> str | None:
    return f"no flights to {NO_FLIGHTS}" if trip.destination == NO_FLIGHTS else None


def _no_hotels(trip: TripPlanned) -> str | None:
    return f"no hotels in {NO_HOTELS}" if trip.destination == NO_HOTELS else None


def _too_young(trip: TripPlanned) -> str | None:
    return f"{trip.age} is too young to rent a car" if trip.age < OLD_ENOUGH else None


flights = Vendor("flights", "flight", _no_flights)
hotels = Vendor("hotels", "hotel", _no_hotels)
cars = Vendor("cars", "car", _too_young)
