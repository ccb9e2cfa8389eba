"""What follows from a state is sent under the same id again: databases that fall back, and what they send once more."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from outbox import DeadLetter, Delivery, Message, Outbox, Park, Saga, Settings, testing
from outbox.embedded import ServerLike
from outbox.message.ids import FIRST_BUSINESS_ID, derived_id, message_id
from outbox.message.model import uuid7
from outbox.testing import drain
from tests.flow.support import STEPS, World
from tests.kit import ROOT
from tests.kit.databases import clones

BOOKED = "SELECT trip::text || ' ' || change FROM booking WHERE step = :step"


class Owner:
    """The database of sagas, which can be saved, and fall back to what was saved."""

    def __init__(self, server: ServerLike, engine: Engine) -> None:
        self.server, self.engine, self.name = server, engine, "fallible"
        self.is_saved = False

    def save(self) -> None:
        """Keep the database as it is."""
        self.engine.dispose()
        self.server.create_database(f"{self.name}_saved", template=self.name)
        self.is_saved = True

    def fall_back(self) -> None:
        """Have the database be as it was when it was saved."""
        self.engine.dispose()
        self.server.drop_database(self.name)
        self.server.create_database(self.name, template=f"{self.name}_saved")
        self.end()

    def end(self) -> None:
        """Forget what was saved."""
        if self.is_saved:
            self.server.drop_database(f"{self.name}_saved")
        self.is_saved = False


@pytest.fixture
def fallible(server: ServerLike, template: str) -> Iterator[Owner]:
    """A database that can fall back."""
    with clones(server, template, "fallible") as (engine,):
        owner = Owner(server, engine)
        yield owner
        owner.end()


def booked(world: World) -> Counter[str]:
    """Count what the participants did, by step, trip and change."""
    return Counter(
        f"{step} {done}"
        for step, engine in zip(STEPS, world.others, strict=True)
        for done in world.at[engine].rows(BOOKED, step=step)
    )


@pytest.mark.parametrize("refusing", ["", "car"])
@pytest.mark.parametrize("saved", ["before it begins", "on the way"])
def test_an_owner_that_falls_back_books_nothing_twice(
    refusing: str, saved: str, fallible: Owner, new_engine: Callable[..., Engine], settings: Settings
) -> None:
    """Each participant has booked, and undone, each of five flows once; what it has answered is taken."""
    world = World(fallible.engine, (new_engine(), new_engine(), new_engine()), settings, refusing={refusing})
    trips = [world.start() for _ in range(5)]
    if saved == "on the way":
        world.silent = {"hotel"}
        world.go()
        world.silent = set()
        fallible.save()
        for _ in trips:
            world.answer("hotel")
    else:
        fallible.save()
        world.go()
    end = "compensated" if refusing else "completed"
    assert world.statuses() == {end: 5}
    before = booked(world)
    assert set(before.values()) == {1}
    commands = [[each.message_id for each in world.flow(trip).commands] for trip in trips]
    fallible.fall_back()
    assert world.statuses() in ({}, {"running": 5})
    world.go(failed=True)
    assert world.statuses() == {end: 5}
    assert booked(world) == before
    assert [[each.message_id for each in world.flow(trip).commands] for trip in trips] == commands


def test_another_way_to_the_same_undo_is_the_same_command(
    fallible: Owner, new_engine: Callable[..., Engine], settings: Settings
) -> None:
    """A flow that had turned back for a deadline gets the answer now, and turns back later: nothing is undone twice."""
    world = World(fallible.engine, (new_engine(), new_engine(), new_engine()), settings, silent={"hotel"})
    trip = world.start()
    world.go()
    fallible.save()
    world.late()
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel"]
    world.silent, world.refusing = set(), {"car"}
    world.answer("hotel")
    assert world.flow(trip).status == "compensated"
    fallible.fall_back()
    world.go(failed=True)
    assert world.flow(trip).status == "compensated"
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]


def test_a_participant_that_falls_back_answers_the_same(
    fallible: Owner, new_engine: Callable[..., Engine], settings: Settings
) -> None:
    """It has lost its bookings and books again; its answers are those that the saga has taken already."""
    owner = new_engine()
    world = World(owner, (new_engine(), fallible.engine, new_engine()), settings)
    trips = [world.start({"to": str(number)}) for number in range(3)]
    fallible.save()
    world.go()
    ids = "SELECT id FROM outbox.half_message ORDER BY id"
    answers, others = world.at[fallible.engine].rows(ids), world.at[owner].rows(ids)
    fallible.fall_back()
    assert world.at[fallible.engine].rows(ids) == []
    world.go()
    assert world.at[fallible.engine].rows(ids) == answers
    assert world.at[owner].rows(ids) == others
    assert world.at[owner].value("SELECT count(*) FROM outbox.consumer_message WHERE topic = 'trip.reply.hotel'") == 3
    assert booked(world) == Counter(f"{step} {trip} book" for step in STEPS for trip in trips)
    assert len(world.ends) == 3


def test_a_deadline_that_is_read_again_is_sent_once(engine: Engine, settings: Settings) -> None:
    """An operator who has the group read again what it has handled gets no error, and no second deadline."""
    world = World(engine, (engine,) * 3, settings, silent={"flight"})
    world.start()
    world.go()
    world.late()
    deadlines = "SELECT count(*) FROM outbox.half_message WHERE topic = 'trip.deadline'"
    assert world.at[engine].value(deadlines) == 2
    world.trips.operator.reset_group("trip", "trip.deadline", "first", by="me", why="test")
    world.go()
    assert world.at[engine].value(deadlines) == 2
    assert world.at[engine].value("SELECT count(*) FROM outbox.consumer_message WHERE status <> 'consumed'") == 0


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which no id is drawn any more."""

    def drawn() -> UUID:
        raise AssertionError("an id was drawn")

    def forbid() -> None:
        monkeypatch.setattr("outbox.producer.producer.uuid7", drawn)

    return forbid


@pytest.mark.parametrize("how", ["", "refusing", "silent", "stubborn", "parking"])
def test_a_saga_draws_no_id(how: str, engine: Engine, settings: Settings, undrawn: Callable[[], None]) -> None:
    """Neither on its way nor on its way back: commands, deadlines, answers and refusals, and what is sent again."""
    world = World(engine, (engine,) * 3, settings)
    if how == "stubborn":
        world.stubborn, world.refusing = {"flight"}, {"car"}
    elif how == "parking":
        world.parking = {"hotel.book"}
    elif how:
        setattr(world, how, {"hotel"})
    trip = world.start()
    undrawn()
    world.go()
    if how == "silent":
        world.late()
        world.late()
    if how == "parking":
        world.confirm()
    status = {"": "completed", "stubborn": "compensating", "silent": "compensating"}.get(how, "compensated")
    assert world.flow(trip).status == status


def test_called_functions_draw_no_id(engine: Engine, settings: Settings, undrawn: Callable[[], None]) -> None:
    """Handlers of each kind of transaction, callbacks, and compensations: the same call sends the same ids."""
    app = Outbox(engine, settings=settings)
    saga: Saga[Any] = Saga(app, "inner")
    saga.step("only", "only.do")
    sent: list[UUID] = []
    outside: list[UUID] = []
    called: list[UUID] = []
    fails = [True]

    @app.consumer("asked", group="g")
    def handle(message: Message, session: Session) -> Park | None:
        if message.body == "park":
            return Park("no")
        sent.append(app.send(session, "told", {"to": message.body}))
        sent.append(app.send(session, "told", {"to": message.body}))
        sent.append(app.send(session.connection(), "told", {"to": message.body}, key="k"))
        sent.append(message.reply(session, {"n": len(sent)}))
        sent.append(message.refuse(session, "no"))
        sent.append(saga.start(session, {}))
        if fails.pop() if fails else False:
            raise ValueError("once")
        return None

    @app.consumer("asked", group="outside", transactional=False)
    def handle_outside(message: Message) -> None:
        with Session(engine) as session, session.begin():
            outside.append(message.reply(session, "yes"))
            outside.append(message.reply(session, "yes"))

    @app.on_delivered("asked")
    def delivered(delivery: Delivery, session: Session) -> None:
        called.append(app.send(session, "told", delivery.group))

    @app.on_parked("asked")
    def parked(letter: DeadLetter, session: Session) -> None:
        called.append(app.send(session, "told", letter.reason))

    app.known_group("asked", group="g")
    with Session(engine) as session, session.begin():
        app.send(session, "asked", "a", reply_to="answered")
        app.send(session, "asked", "park", reply_to="answered")
    undrawn()
    drain(app, failed=True)
    testing.confirm(app)
    drain(app)
    assert (sent[:6], len(set(sent)), len(sent)) == (sent[6:], 6, 12)
    assert (outside[::2], len(set(outside)), len(outside)) == (outside[1::2], 2, 4)
    assert len(set(called)) == len(called) == 4
    with engine.connect() as connection:
        (count,) = connection.execute(text("SELECT count(*) FROM outbox.half_message WHERE topic = 'answered'")).one()
    assert count == 4


#: What draws an id, and why nothing sends it again.
DRAWS = {
    "flow/views.py": "an operator answers: an act, and each is another one",
    "operator/bulk/jobs.py": "an operator orders a job",
    "operator/edit.py": "an operator sends a copy",
    "worker/report.py": "a worker begins",
    "rocketmq/server.py": "a server begins",
    "producer/process.py": "a process begins",
    "producer/producer.py": "an application sends from outside of what is handled",
    "reconcile/record/orders.py": "a person orders a run, or a repair",
    **dict.fromkeys(("reconcile/follow/record.py", "reconcile/record/write.py"), "a run begins"),
    "reconcile/fleet/totals.py": "a comparison begins",
}


def test_only_what_begins_draws_an_id() -> None:
    """All else is derived: what draws an id of a message, a run or a job is in a list that says why."""
    found = set()
    for path in (ROOT / "outbox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "uuid7":
                found.add(str(path.relative_to(ROOT / "outbox")))
    assert found == set(DRAWS)


def test_derived_ids() -> None:
    """They have the time of their source, or none, tell their coordinates apart, and are the same for ever."""
    source = UUID("0198f0a2-7c3e-7abc-9def-0123456789ab")
    made = derived_id(source, "a", 1)
    assert made == UUID("0198f0a2-7c3e-8e2b-baf2-71b29e62ce49")
    assert (made.version, made.int >> 80) == (8, source.int >> 80)
    assert derived_id(made, "b").int >> 80 == source.int >> 80
    for timeless in (message_id("t", "x"), uuid4()):
        assert derived_id(timeless, "a") >= FIRST_BUSINESS_ID
        assert derived_id(timeless, "a").version == 8
    others: list[Any] = [
        (source,),
        (source, "a"),
        (source, "a1"),
        (source, "a", 2),
        (source, 1, "a"),
        (uuid7(), "a", 1),
    ]
    assert len({made, *(derived_id(*each) for each in others)}) == 7
