"""A saga: a trip is a flight and a hotel, or neither; what was booked is undone where the next step is refused.

It prints::

    Oslo: completed (nothing was refused)
    Rome: compensated (hotel was refused: no rooms)
    booked: ['flight to Oslo', 'hotel in Oslo']
"""

from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Saga, embedded
from outbox.database import migration
from outbox.testing import drain

# Three services; here all of them have one database.
trips, flights, hotels = Outbox(group="trips"), Outbox(group="flights"), Outbox(group="hotels")
trip: Saga[dict[str, Any]] = Saga(trips, "trip", model=dict, timeout=30)
trip.step("flight", "flight.book", compensate="flight.cancel", group="flights")
trip.step("hotel", "hotel.book", group="hotels")
booked: list[str] = []


@flights.consumer("flight.book", group="flights")
def book_flight(message: Message, session: Session) -> None:
    """Book a flight, and say so in the same transaction."""
    booked.append(f"flight to {message.body['to']}")
    message.reply(session, {"seat": "12A"})


@flights.consumer("flight.cancel", group="flights")
def cancel_flight(message: Message, session: Session) -> None:
    """Undo the step whose message is `message.correlation`."""
    booked.remove(f"flight to {message.body['to']}")
    message.reply(session, {})


@hotels.consumer("hotel.book", group="hotels")
def book_hotel(message: Message, session: Session) -> None:
    """Book a room, or refuse: the saga undoes what was done before."""
    if message.body["to"] == "Rome":
        message.refuse(session, "no rooms")
    else:
        booked.append(f"hotel in {message.body['to']}")
        message.reply(session, {"room": 5})


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        for outbox in (trips, flights, hotels):
            outbox.bind(engine)
        with Session(engine) as session, session.begin():
            for city in ("Oslo", "Rome"):
                trip.start(session, {"to": city})
        drain(trips, flights, hotels)
        with Session(engine) as session:
            for flow in trip.flows(session)[::-1]:
                print(f"{flow.body['to']}: {flow.status} ({flow.reason or 'nothing was refused'})")
        print(f"booked: {booked}")
        engine.dispose()
