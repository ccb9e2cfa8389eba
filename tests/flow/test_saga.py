"""Sagas: done everywhere, or undone; refusals at each step, time-outs, late answers, and races of the two."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from outbox import Delivery, Flow, Message, Outbox, Park, Saga, Settings, testing
from outbox.calling.function import CalledFunctions
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.flow.saga import read_flows
from outbox.message.model import DeliveryStatus, uuid7
from outbox.prune.prune_pass import prune_producer_once
from outbox.telemetry import hooks
from outbox.telemetry.events import SagaOverdue, StepDoneAfterAll, UndoRefused, UndoUndeliverable
from outbox.telemetry.hooks import TelemetryEvent
from outbox.testing import drain
from tests.flow.support import STEPS, World, age_end
from tests.kit import wait_until


@pytest.fixture
def world(engine: Engine, settings: Settings) -> World:
    """All services in one database."""
    return World(engine, (engine,) * 3, settings)


@pytest.fixture
def events() -> Iterator[list[TelemetryEvent]]:
    """What is told of sagas."""
    found: list[TelemetryEvent] = []
    end = hooks.add_hook(lambda each: found.append(each) if each.area == "flow" else None)
    yield found
    end()


def test_a_trip_of_four_services_with_a_database_each(new_engine: Callable[..., Engine], settings: Settings) -> None:
    """Each step is done once, in order; the flow is one conversation, and its end is told once."""
    world = World(new_engine(), (new_engine(), new_engine(), new_engine()), settings)
    trip = world.start({"to": "Oslo"})
    world.go()
    flow = world.flow(trip)
    assert (flow.status, flow.reason, flow.body) == ("completed", None, {"to": "Oslo"})
    assert flow.answers == {step: {"booked": step} for step in STEPS}
    assert flow.ended_at is not None
    assert world.changes(trip) == ["book flight", "book hotel", "book car"]
    assert world.ends == [(trip, "completed")]
    world.late()
    assert world.flow(trip).status == "completed"
    conversations = "SELECT DISTINCT coalesce(headers ->> 'outbox-conversation', id::text) FROM outbox.half_message"
    assert {each for tables in world.at.values() for each in tables.rows(conversations)} == {str(trip)}


@pytest.mark.parametrize("refusing", STEPS)
def test_a_refusal_undoes_what_was_done_in_reverse_order(world: World, refusing: str) -> None:
    """And nothing else: the step that refused isn't undone, nor those that were never asked."""
    world.refusing = {refusing}
    trip = world.start()
    world.go()
    flow, done = world.flow(trip), STEPS[: STEPS.index(refusing)]
    assert (flow.status, flow.reason) == ("compensated", f"{refusing} was refused: sold out")
    assert world.changes(trip) == [f"{change} {step}" for step in done for change in ("book", "cancel")]
    undone = [step for step, kind in world.sent(trip) if kind == "compensation"]
    assert undone == list(reversed(done))
    assert world.ends == [(trip, "compensated")]


def test_an_undo_names_the_message_that_it_undoes(world: World) -> None:
    """As its correlation."""
    world.refusing = {"hotel"}
    world.start()
    world.go()
    (row,) = world.at[world.owner].rows(
        "SELECT (SELECT message_id FROM booking WHERE change = 'book')::text"
        "     = (SELECT headers ->> 'outbox-correlation' FROM outbox.half_message WHERE topic = 'flight.cancel')"
    )
    assert row


def test_the_one_that_is_late_is_undone_when_it_answers(world: World, events: list[TelemetryEvent]) -> None:
    """Until then nobody knows, and the trip hasn't ended; the others are undone at once."""
    world.silent = {"hotel"}
    trip = world.start()
    world.go()
    assert world.flow(trip).status == "running"
    world.late()
    flow = world.flow(trip)
    assert (flow.status, flow.reason) == ("compensating", "hotel has not answered within 60 s")
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel"]
    assert world.ends == []
    world.answer("hotel")
    assert world.flow(trip).status == "compensated"
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]
    assert world.ends == [(trip, "compensated")]
    assert [(type(each), getattr(each, "step", "")) for each in events] == [(SagaOverdue, "hotel")]


def test_a_late_refusal_has_nothing_to_undo(world: World) -> None:
    """The trip ends with it."""
    world.silent = {"car"}
    trip = world.start()
    world.go()
    world.late()
    world.answer("car", refused=True)
    assert world.flow(trip).status == "compensated"
    assert ("car", "compensation") not in world.sent(trip)
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]


def test_an_answer_that_comes_twice_counts_once(world: World) -> None:
    """Of a participant that answers twice, or says no after it has said yes."""
    world.silent = {"car"}
    trip = world.start()
    world.go()
    world.unanswered *= 3
    for refused in (False, False, True):
        world.answer("car", refused=refused)
    assert world.flow(trip).status == "completed"
    assert world.ends == [(trip, "completed")]


def test_what_is_not_undone_is_told_again_and_again(world: World, events: list[TelemetryEvent]) -> None:
    """A refusal to undo, and the command is sent again; the trip goes on to its end when it is done at last."""
    world.refusing, world.stubborn = {"hotel"}, {"flight"}
    trip = world.start()
    world.go()
    assert [type(each) for each in events] == [UndoRefused]
    assert world.flow(trip).status == "compensating"
    world.stubborn.clear()
    world.at[world.owner].run("UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")
    world.go()
    assert world.flow(trip).status == "compensated"
    assert world.changes(trip) == ["book flight", "cancel flight"]


def test_a_command_that_is_parked_counts_as_refused(
    new_engine: Callable[..., Engine], settings: Settings, events: list[TelemetryEvent]
) -> None:
    """Nobody waits. If an operator has it tried again after all, what it does is undone; the end is told once."""
    world = World(new_engine(), (new_engine(), new_engine(), new_engine()), settings, parking={"hotel.book"})
    trip = world.start()
    world.go()
    assert world.flow(trip).status == "running"
    world.confirm()
    flow = world.flow(trip)
    assert (flow.status, flow.reason) == ("compensated", "hotel is parked in group hotel: no such room")
    assert world.changes(trip) == ["book flight", "cancel flight"]
    assert events == []
    world.retry("hotel", "hotel.book")
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]
    assert world.flow(trip).status == "compensated"
    assert world.ends == [(trip, "compensated")]
    assert [type(each) for each in events] == [StepDoneAfterAll]


def test_what_is_tried_again_while_others_are_undone_is_undone_too(world: World) -> None:
    """Before the end: that is told once, after both."""
    world.parking, world.stubborn = {"hotel.book"}, {"flight"}
    trip = world.start()
    world.go()
    world.confirm()
    world.retry("hotel", "hotel.book")
    assert (world.flow(trip).status, world.ends) == ("compensating", [])
    world.stubborn.clear()
    world.at[world.owner].run("UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")
    world.go()
    assert world.changes(trip) == ["book flight", "cancel flight", "book hotel", "cancel hotel"]
    assert world.ends == [(trip, "compensated")]


def test_a_command_that_is_lost_counts_as_refused(engine: Engine, settings: Settings) -> None:
    """After it was sent again as often as the settings say."""
    world = World(engine, (engine,) * 3, replace(settings, confirm_resends=0), silent={"car"})
    trip = world.start()
    world.go()
    world.at[engine].run("DELETE FROM outbox.consumer_message WHERE topic = 'car.book'")
    world.confirm()
    flow = world.flow(trip)
    assert flow.status == "compensated"
    assert str(flow.reason).startswith("car is lost to group car: sent again 0 times")


def test_an_undo_that_is_parked_is_told_and_not_sent_again(world: World, events: list[TelemetryEvent]) -> None:
    """For the parked one may yet be tried: the step must not be undone twice."""
    world.refusing, world.parking = {"hotel"}, {"flight.cancel"}
    trip = world.start()
    world.go()
    world.confirm()
    assert [type(each) for each in events] == [UndoUndeliverable]
    undo = world.flow(trip).commands[-1]
    assert (undo.reason, undo.answer) == ("is parked in group flight: no such room", None)
    assert undo.overdue_at is not None
    world.retry("flight", "flight.cancel")
    assert world.flow(trip).status == "compensated"
    assert world.changes(trip) == ["book flight", "cancel flight"]
    assert world.flow(trip).commands[-1].reason is None


def test_what_another_group_parks_is_no_refusal(world: World) -> None:
    """Nor is a message that no saga has sent."""

    @world.trips.consumer("hotel.book", group="audit")
    def note(message: Message, session: Session) -> Park:
        return Park("no paper")

    world.parking = {"flight.book"}
    with world.owner.begin() as connection:
        world.trips.send(connection, "flight.book", {}, key=str(uuid7()))
    world.go()
    world.parking.clear()
    trip = world.start()
    world.go()
    world.confirm()
    assert world.flow(trip).status == "completed"


def test_a_parked_command_races_its_late_answer(world: World) -> None:
    """The second one waits for the first, and sees what it did: done and undone once, or completed."""
    for first in ("answer", "parked"):
        world.silent = {"flight"}
        trip = world.start()
        world.go()
        world.silent = set()
        (message,) = world.unanswered
        world.unanswered.clear()
        world.ends.clear()
        answer = _message("trip.reply.flight", {"booked": "flight"}, {"outbox-correlation": str(message.id)})
        delivery = Delivery(message, "flight", DeliveryStatus.PARKED, "no such room")
        acts: dict[str, Callable[[Session], Any]] = {
            "answer": partial(world.saga._read_answer, answer),
            "parked": partial(world.saga._give_up, delivery),
        }
        _one_after_the_other(world, acts.pop(first), *acts.values())
        world.go()
        flow = world.flow(trip)
        assert flow.status == ("completed" if first == "answer" else "compensated"), first
        assert world.ends == [(trip, flow.status.value)]
        assert world.changes(trip).count("cancel flight") == (0 if first == "answer" else 1)


def test_what_stays_unanswered_is_an_error_from_the_second_time_on(world: World, events: list[TelemetryEvent]) -> None:
    """And told at longer and longer intervals."""
    world.silent = {"flight"}
    trip = world.start()
    world.go()
    world.late()
    world.late()
    assert [(each.level, each.facts()["times"]) for each in events] == [(30, 1), (40, 2)]
    delays = """SELECT extract(epoch FROM h.deliver_at - h.born_at) FROM outbox.half_message h
                 WHERE h.topic = 'trip.deadline' ORDER BY h.born_at"""
    assert [round(seconds) for seconds in world.at[world.owner].rows(delays)] == [60, 120, 240]
    assert world.flow(trip).status == "compensating"


def test_an_answer_races_a_deadline(world: World) -> None:
    """The second one waits for the first, and sees what it did: the trip goes one way."""
    for first in ("answer", "deadline"):
        world.silent = {"flight"}
        trip = world.start()
        world.go()
        world.silent = set()
        (message,) = world.unanswered
        world.unanswered.clear()
        world.ends.clear()
        body = {"command": str(message.id), "times": 0}
        answer = _message("trip.reply.flight", {"booked": "flight"}, {"outbox-correlation": str(message.id)})
        deadline = _message("trip.deadline", body, {})
        acts: dict[str, Callable[[Session], Any]] = {
            "answer": partial(world.saga._read_answer, answer),
            "deadline": partial(world.saga._remind, deadline),
        }
        _one_after_the_other(world, acts.pop(first), *acts.values())
        world.go()
        flow = world.flow(trip)
        assert flow.status == ("completed" if first == "answer" else "compensated"), first
        assert world.ends == [(trip, flow.status.value)]
        assert world.changes(trip).count("cancel flight") == (0 if first == "answer" else 1)


def _one_after_the_other(world: World, first: Callable[[Session], Any], second: Callable[[Session], Any]) -> None:
    """Run the second while the transaction of the first is open; it waits for that."""

    def run_second() -> None:
        with Session(world.owner) as session, session.begin():
            second(session)

    with Session(world.owner) as session, session.begin():
        first(session)
        session.flush()
        thread = threading.Thread(target=run_second)
        thread.start()
        wait_until(lambda: _lock_waits(world), "the second one waits")
    thread.join()


def _lock_waits(world: World) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return bool(world.at[world.owner].value(waiting))


def _message(topic: str, body: Any, headers: dict[str, str]) -> Message:
    now = dt.datetime.now(dt.UTC)
    raw = json.dumps(body).encode()
    return Message(uuid7(), topic, 0, 1, None, None, "application/json", raw, now, now, headers=headers)


def test_a_transition_whose_commit_fails_happens_once(world: World) -> None:
    """The answer is read again, and nothing of the first time is left."""
    trip = world.start()
    failing = [True]

    def fail_once(flow: Flow[Any], session: Session) -> None:
        world.note_end(flow, session)
        if failing:
            failing.clear()
            raise ValueError("not now")

    world.saga._functions = CalledFunctions()
    world.saga.ended(fail_once)
    world.go()
    assert world.flow(trip).status == "running"
    world.go(failed=True)
    assert world.flow(trip).status == "completed"
    assert world.changes(trip) == ["book flight", "book hotel", "book car"]


def test_bodies_of_commands_are_made_of_earlier_answers(engine: Engine, settings: Settings) -> None:
    """By ``body=``; a step without an undo is left as it is, and a refused one isn't undone."""
    outbox = Outbox(engine, settings=settings)
    saga: Saga[int] = Saga(outbox, "sum", model=int)
    saga.step("one", "add", body=lambda flow: flow.body + 1)
    saga.step("two", "add", body=lambda flow: flow.answers["one"] + 1)

    @outbox.consumer("add", group="adder")
    def add(message: Message, session: Session) -> None:
        message.reply(session, message.body * 10)

    with Session(engine) as session, session.begin():
        flow_id = saga.start(session, 4)
    drain(outbox)
    with Session(engine) as session:
        flow = saga.flow(session, flow_id)
        assert flow is not None
        assert (flow.status, flow.answers) == ("completed", {"one": 50, "two": 510})


def test_sagas_are_listed(world: World) -> None:
    """By name, status and id; the newest first."""
    world.refusing = {"car"}
    undone = world.start()
    world.go()
    world.refusing, world.silent = set(), {"hotel"}
    waiting = world.start()
    world.go()
    with world.owner.connect() as connection:
        assert [each.id for each in world.saga.flows(connection)] == [waiting, undone]
        assert read_flows(connection, "outbox", name="other") == []
        assert world.saga.flow(connection, uuid4()) is None


def test_ended_sagas_are_pruned_with_their_commands(world: World, settings: Settings) -> None:
    """After the retention; what hasn't ended stays. An answer that comes after that is set aside."""
    trip = world.start()
    world.go()
    world.silent = {"flight"}
    waiting = world.start()
    world.go()
    age_end(world, 89)
    for days, left in ((0, {trip, waiting}), (2, {waiting})):
        age_end(world, days)
        with world.owner.connect() as connection:
            prune_producer_once(connection, settings)
        assert set(world.at[world.owner].rows("SELECT id FROM outbox.saga")) == left
    assert world.at[world.owner].value("SELECT count(*) FROM outbox.saga_command") == 1


def test_an_answer_to_nothing_is_set_aside(world: World) -> None:
    """For a person to look at."""
    with world.owner.begin() as connection:
        world.trips.send(connection, "trip.reply.hotel", {}, correlation=uuid7())
        world.trips.send(connection, "trip.reply.hotel", {})
    world.go()
    errors = world.at[world.owner].rows("SELECT last_error FROM outbox.consumer_message WHERE status = 'parked'")
    assert len(errors) == 2
    assert all("it answers no command of saga 'trip'" in error for error in errors)


def test_a_start_in_a_transaction_that_rolls_back_is_none(world: World) -> None:
    """And the same id starts once."""
    with Session(world.owner) as session:
        world.saga.start(session, {})
    flow_id = uuid7()
    world.start(id=flow_id)
    with pytest.raises(Exception, match="duplicate key"):
        world.start(id=flow_id)
    world.go()
    assert world.statuses() == {"completed": 1}


def test_what_can_not_be_declared(engine: Engine, settings: Settings) -> None:
    """Names that are taken, a body that isn't a function, a saga without steps, a start with something else."""
    outbox = Outbox(engine, settings=settings)
    saga: Saga[Any] = Saga(outbox, "s", model=int)
    with pytest.raises(InvalidHandler, match="saga 's' has no steps"):
        saga.start(None, 1)
    saga.step("a", "t", body=lambda flow: flow)
    saga.ended(lambda flow, session: None)
    with pytest.raises(InvalidHandler, match="saga 's' has a step 'a' already"):
        saga.step("a", "t")
    with pytest.raises(InvalidHandler, match="step 'b': body must take"):
        saga.step("b", "t", body=lambda: 1)  # type: ignore[misc,arg-type]  # the mistake
    with pytest.raises(InvalidHandler, match="function for the end of 's' is declared already"):
        saga.ended(lambda flow, session: None)
    with pytest.raises(InvalidHandler, match=r"consumer of 's\.start' in group 's' is declared already"):
        Saga(outbox, "s")
    with pytest.raises(InvalidMessage):
        saga.start(None, "no number")
    outbox.on_undeliverable("mine")(lambda delivery, session: None)
    with pytest.raises(InvalidHandler, match="on_undeliverable of 'mine' is declared already"):
        saga.step("c", "mine", group="g")


def test_two_sagas_share_a_participant(engine: Engine, settings: Settings) -> None:
    """Each learns of its own commands that the group has parked."""
    outbox = Outbox(engine, settings=settings)
    sagas: list[Saga[int]] = [Saga(outbox, name, model=int).step("one", "add", group="adder") for name in "ab"]
    outbox.consumer("add", group="adder")(lambda message, session: Park("no more"))
    with Session(engine) as session, session.begin():
        ids = [saga.start(session, 1) for saga in sagas]
    drain(outbox)
    testing.confirm(outbox)
    drain(outbox)
    with Session(engine) as session:
        flows = [saga.flow(session, flow_id) for saga, flow_id in zip(sagas, ids, strict=True)]
    assert [flow and flow.reason for flow in flows] == ["one is parked in group adder: no more"] * 2


def test_a_step_that_the_code_has_lost_is_told(world: World) -> None:
    """The answer fails until the step is there again."""
    world.silent = {"hotel"}
    trip = world.start()
    world.go()
    hotel = world.saga.steps.pop(1)
    world.answer("hotel")
    errors = world.at[world.owner].rows("SELECT last_error FROM outbox.consumer_message WHERE status = 'failed'")
    assert "saga 'trip' has no step 'hotel', which flow" in errors[0]
    world.saga.steps.insert(1, hotel)
    world.silent = set()
    world.go(failed=True)
    assert world.flow(trip).status == "completed"
