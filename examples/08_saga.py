"""A saga: a trip is a flight and a hotel, or neither; what was booked is undone where the next step is refused.

It prints::

    Oslo: completed
    Rome: compensated, because hotel was refused: no rooms
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
        return message.refuse(session, "no rooms")
    booked.append(f"hotel in {message.body['to']}")
    return message.reply(session, {"room": 5})


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        for outbox in (trips, flights, hotels):
            outbox.bind(engine)
        with Session(engine) as session, session.begin():
            ids = [trip.start(session, {"to": city}) for city in ("Oslo", "Rome")]
        drain(trips, flights, hotels)
        with Session(engine) as session:
            oslo, rome = (trip.flow(session, each) for each in ids)
        print(f"{oslo.body['to']}: {oslo.status}")
        print(f"{rome.body['to']}: {rome.status}, because {rome.reason}")
        print(f"booked: {booked}")
        engine.dispose()
