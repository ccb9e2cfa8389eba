"""What the tests of sagas share: a saga of three steps, whose participants book, refuse, or hold their answers."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import Flow, Message, Outbox, Park, Saga, Settings
from outbox.message.model import SendOptions
from outbox.testing import confirm, drain
from tests.kit import Tables

STEPS = ("flight", "hotel", "car")
BOOKINGS = (
    "CREATE TABLE IF NOT EXISTS booking (n serial PRIMARY KEY, trip uuid, step text, change text, message_id uuid)"
)
NOTE = text("INSERT INTO booking (trip, step, change, message_id) VALUES (:trip, :step, :change, :id)")


@dataclass
class World:
    """Trips of three steps; ``owner`` and ``others`` are the databases of the saga and of the participants in order.

    ``refusing`` are the steps that say no, ``silent`` those that don't answer (yet), ``stubborn`` those that refuse to
    undo, ``parking`` the topics that park. What they have changed is in a table that takes everything.
    """

    owner: Engine
    others: tuple[Engine, ...]
    settings: Settings
    options: dict[str, Any] = field(default_factory=dict)
    refusing: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    stubborn: set[str] = field(default_factory=set)
    parking: set[str] = field(default_factory=set)
    unanswered: list[Message] = field(default_factory=list)
    ends: list[tuple[UUID, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trips = Outbox(self.owner, group="trips", settings=self.settings)
        self.saga: Saga[dict[str, Any]] = Saga(self.trips, "trip", model=dict[str, Any], **self.options)
        self.outboxes = [self.trips]
        self.at = {engine: Tables(engine) for engine in {self.owner, *self.others}}
        for step, engine in zip(STEPS, self.others, strict=True):
            self.at[engine].run(BOOKINGS)
            source = None if engine is self.owner else engine
            self.saga.step(step, f"{step}.book", compensate=f"{step}.cancel", group=step, source=source)
            self.outboxes.append(self.participant(step, engine))
        self.saga.ended(self.note_end)

    def note_end(self, flow: Flow[Any], _: Session) -> None:
        """Take note of the end of a trip."""
        self.ends.append((flow.id, flow.status.value))

    def participant(self, step: str, engine: Engine) -> Outbox:
        """Return the service that books one step."""
        outbox = Outbox(engine, group=step, settings=self.settings)
        source = None if engine is self.owner else self.owner

        @outbox.consumer(f"{step}.book", group=step, source=source)
        def book(message: Message, session: Session) -> Park | None:
            if message.topic in self.parking:
                return Park("no such room")
            if step in self.silent:
                self.unanswered.append(message)
            elif step in self.refusing:
                message.refuse(session, "sold out")
                return None
            self.change(session, step, "book", message)
            if step not in self.silent:
                message.reply(session, {"booked": step})
            return None

        @outbox.consumer(f"{step}.cancel", group=step, source=source)
        def cancel(message: Message, session: Session) -> Park | None:
            if message.topic in self.parking:
                return Park("no such room")
            if step in self.stubborn:
                message.refuse(session, "too late")
                return None
            self.change(session, step, "cancel", message)
            message.reply(session, {})
            return None

        return outbox

    def change(self, session: Session, step: str, change: str, message: Message) -> None:
        """Write down what a participant does."""
        session.execute(NOTE, {"trip": UUID(message.key), "step": step, "change": change, "id": message.id})

    def start(self, body: dict[str, Any] | None = None, **options: Any) -> UUID:
        """Start a trip."""
        with Session(self.owner) as session, session.begin():
            return self.saga.start(session, body or {"to": "Rome"}, **options)

    def go(self, **options: Any) -> None:
        """Have everybody do what there is to do."""
        drain(*self.outboxes, **options)

    def confirm(self) -> None:
        """Have the saga's service learn what the participants have parked or lost, and everybody go on."""
        confirm(self.trips)
        self.go()

    def retry(self, step: str, topic: str) -> None:
        """Have a participant try again what it has parked of a topic, which it can do by now."""
        self.parking.clear()
        engine = self.others[STEPS.index(step)]
        parked = "SELECT message_id FROM outbox.consumer_message WHERE status = 'parked' AND topic = :topic"
        outbox = self.outboxes[1 + STEPS.index(step)]
        outbox.operator.retry(self.at[engine].rows(parked, topic=topic), group=step, by="me", why="it can now")
        self.go()

    def late(self) -> None:
        """Have the time of all that waits for an answer be over."""
        self.at[self.owner].run(
            "UPDATE outbox.scheduled_message d SET deliver_at = clock_timestamp() FROM outbox.half_message h"
            " WHERE h.id = d.half_id AND h.topic = 'trip.deadline'"
        )
        self.go()

    def answer(self, step: str, *, refused: bool = False) -> None:
        """Answer what a step has left unanswered."""
        message = next(each for each in self.unanswered if each.topic == f"{step}.book")
        self.unanswered.remove(message)
        outbox, engine = self.outboxes[1 + STEPS.index(step)], self.others[STEPS.index(step)]
        with Session(engine) as session, session.begin():
            if refused:
                session.execute(text("DELETE FROM booking WHERE message_id = :id"), {"id": message.id})
            options: SendOptions = {"correlation": message.id, "conversation": message.conversation}
            options["refusal"] = "no" if refused else None
            outbox.send(session, str(message.reply_to), {"booked": step}, **options)
        self.go()

    def flow(self, flow_id: UUID) -> Flow[dict[str, Any]]:
        """Return a trip as it is."""
        with self.owner.connect() as connection:
            found = self.saga.flow(connection, flow_id)
        assert found is not None
        return found

    def changes(self, flow_id: UUID) -> list[str]:
        """Return what the participants have done, in the order of the steps."""
        return [
            f"{change} {step}"
            for step, engine in zip(STEPS, self.others, strict=True)
            for change in self.at[engine].rows(
                "SELECT change FROM booking WHERE trip = :id AND step = :step ORDER BY n", id=flow_id, step=step
            )
        ]

    def sent(self, flow_id: UUID) -> list[tuple[str, str]]:
        """Return the commands of a trip in order."""
        return [(each.step, each.kind.value) for each in self.flow(flow_id).commands]

    def statuses(self) -> Counter[str]:
        """Count the trips by status."""
        return Counter(self.at[self.owner].rows("SELECT status FROM outbox.saga"))


def age_end(world: World, days: float) -> None:
    """Have all trips have ended so long ago."""
    ago = dt.timedelta(days=days)
    world.at[world.owner].run("UPDATE outbox.saga SET ended_at = ended_at - :ago WHERE ended_at IS NOT NULL", ago=ago)
