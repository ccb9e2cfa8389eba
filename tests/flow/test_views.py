"""What operators see of sagas, and how they answer for a participant: to the end of the flow, once, and on record."""

from __future__ import annotations

from uuid import UUID

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.errors import ActRefused, InvalidRequest, NotFound
from outbox.flow.saga import CommandAnswer, SagaStatus
from outbox.flow.views import FlowFilter, Sagas
from outbox.message.model import uuid7
from outbox.operator.databases import Databases
from outbox.operator.model import PageRequest
from tests.flow.support import World


@pytest.fixture
def world(engine: Engine, settings: Settings) -> World:
    """All services in one database; the hotel doesn't answer."""
    return World(engine, (engine,) * 3, settings, silent={"hotel"})


@pytest.fixture
def sagas(engine: Engine, settings: Settings) -> Sagas:
    """The operator's view of the database."""
    return Sagas(Databases.open({"trips": engine}, settings))


def in_doubt(world: World) -> tuple[UUID, UUID]:
    """Start a trip whose hotel isn't answered; return its id, and that of the command."""
    trip = world.start()
    world.go()
    return trip, world.flow(trip).commands[-1].message_id


def listed(sagas: Sagas, **criteria: object) -> list[UUID]:
    """Return the flows that fit."""
    return [row.id for row in sagas.flows(FlowFilter(**criteria), PageRequest()).items]  # type: ignore[arg-type]  # of a test


def test_flows_are_listed_by_their_state(world: World, sagas: Sagas) -> None:
    """The newest first, page by page."""
    overdue, _ = in_doubt(world)
    world.late()
    waiting, _ = in_doubt(world)
    world.silent.clear()
    done = world.start()
    world.go()
    assert listed(sagas) == [done, waiting, overdue]
    assert listed(sagas, open=True) == [waiting, overdue]
    assert listed(sagas, overdue=True) == [overdue]
    assert listed(sagas, status=(SagaStatus.COMPLETED, SagaStatus.RUNNING)) == [done, waiting]
    assert listed(sagas, saga="other") == listed(sagas, saga="trip", overdue=True, status=(SagaStatus.RUNNING,)) == []
    first = sagas.flows(FlowFilter(), PageRequest(size=2))
    second = sagas.flows(FlowFilter(), PageRequest(size=2, token=first.next_page_token))
    assert [row.id for row in (*first.items, *second.items)] == [done, waiting, overdue]
    assert second.next_page_token is None


def test_a_flow_is_shown_with_its_deadlines(world: World, sagas: Sagas) -> None:
    """Of what isn't answered; what an operator can answer is said."""
    trip, hotel = in_doubt(world)
    flight, asked = sagas.flow(trip).commands
    (due,) = world.at[world.owner].rows(
        "SELECT d.deliver_at FROM outbox.scheduled_message d JOIN outbox.half_message h ON h.id = d.half_id"
        " WHERE h.headers ->> 'outbox-correlation' = :id",
        id=str(hotel),
    )
    assert (flight.deadline_at, flight.answers) == (None, [])
    assert (asked.message_id, asked.deadline_at, asked.answers) == (hotel, due, list(CommandAnswer))
    with pytest.raises(NotFound, match="no registered database"):
        sagas.flow(uuid7())


def test_done_says_the_operator(world: World, sagas: Sagas) -> None:
    """The saga goes on with the result; a late answer of the participant's is one too many."""
    trip, hotel = in_doubt(world)
    said = sagas.answer(hotel, "done", by="olga", why="by phone", result='{"room": 5}')
    assert said.outcome == f"the action of step hotel, message {hotel}, is answered: done"
    world.go()
    flow = world.flow(trip)
    assert (flow.status, flow.answers["hotel"]) == ("completed", {"room": 5})
    world.answer("hotel")
    assert world.flow(trip).status == "completed"
    assert world.ends == [(trip, "completed")]
    audited = "SELECT actor, target, reason, result ->> 'answer', result ->> 'flow' FROM outbox.audit"
    rows = [tuple(row) for row in world.at[world.owner].rows(audited)]
    assert rows == [("olga", str(hotel), "by phone", "done", str(trip))]


def test_refused_says_the_operator(world: World, sagas: Sagas) -> None:
    """What was done is undone. If the participant was faster than was known, its part is undone as well, once."""
    trip, hotel = in_doubt(world)
    world.late()
    sagas.answer(hotel, CommandAnswer.REFUSED, by="olga", why="they never got it")
    world.go()
    flow = world.flow(trip)
    assert flow.status == "compensated"
    assert flow.commands[1].reason == "they never got it (says olga)"
    world.answer("hotel")
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]
    assert world.ends == [(trip, "compensated")]


def test_two_operators_answer(world: World, sagas: Sagas) -> None:
    """The first one counts; the second finds the answer, or, before the saga has come to it, changes nothing."""
    trip, hotel = in_doubt(world)
    sagas.answer(hotel, "done", by="olga", why="by phone")
    sagas.answer(hotel, "refused", by="otto", why="by mail")
    world.go()
    assert world.flow(trip).status == "completed"
    with pytest.raises(ActRefused, match="it is answered already: done"):
        sagas.answer(hotel, "refused", by="otto", why="by mail")


def test_what_can_not_be_answered(world: World, sagas: Sagas) -> None:
    """An undo with a no; and a message that is no command."""
    world.stubborn, world.refusing, world.silent = {"flight"}, {"hotel"}, set()
    trip = world.start()
    world.go()
    undo = world.flow(trip).commands[-1].message_id
    with pytest.raises(ActRefused, match="it undoes a step, which can't be refused"):
        sagas.answer(undo, "refused", by="olga", why="no")
    with pytest.raises(NotFound, match="no registered database"):
        sagas.answer(trip, "done", by="olga", why="no command")
    wrong_results = ({"result": "{"}, {"result": "NaN"}, {"answer": "refused", "result": "1"})
    for wrong in ({"why": " "}, {"answer": "maybe"}, *wrong_results):
        with pytest.raises(InvalidRequest):
            sagas.answer(undo, **({"answer": "done", "by": "olga", "why": "because"} | wrong))
    sagas.answer(undo, "done", by="olga", why="cancelled by phone")
    world.go()
    assert world.flow(trip).status == "compensated"
