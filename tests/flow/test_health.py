"""What is wrong with sagas: flows that wait for an answer which is overdue, as doctor, overview and metrics say."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import Settings
from outbox.console.api.probes import exposition
from outbox.operator.health.examine import examine
from outbox.operator.health.rules import Diagnosis, Severity
from outbox.operator.health.stats import as_sample, stats
from tests.flow.support import World
from tests.operator.health import overview_of


def found(engine: Engine, settings: Settings) -> list[Diagnosis]:
    """Return what the doctor and the overview find of sagas; they find the same."""
    shown = [each for each in overview_of(trips=engine).findings if each.code.startswith("saga.")]
    examined = [each for each in examine(engine, settings).findings if each.code.startswith("saga.")]
    assert [each.details["flow_id"] for each in shown] == [each.details["flow_id"] for each in examined]
    return shown


def test_an_overdue_answer(engine: Engine, settings: Settings) -> None:
    """It is a finding after five minutes, with its step and the way out; when it is there, no more."""
    world = World(engine, (engine,) * 3, settings, silent={"hotel"})
    trip = world.start()
    world.go()
    assert found(engine, settings) == []
    world.late()
    for minutes, number in ((60, 0), (-70, 1)):  # however slow this test is, it isn't five minutes before, and is then
        world.at[engine].run(
            "UPDATE outbox.saga_command SET overdue_at = overdue_at + make_interval(mins => :minutes)", minutes=minutes
        )
        assert len(found(engine, settings)) == number
    hotel = world.flow(trip).commands[1].message_id
    (problem,) = found(engine, settings)
    assert problem.sentence.startswith(
        f"1 flow of saga 'trip' waits for an answer that is overdue, the first ({trip}) for "
    )
    assert problem.severity is Severity.PROBLEM
    assert f"outbox sagas answer {hotel} done" in problem.mend
    assert (problem.page, problem.query["saga"], problem.query["overdue"]) == ("sagas", "trip", "yes")
    world.answer("hotel")
    assert world.flow(trip).status == "compensated"
    assert found(engine, settings) == []


def test_flows_are_counted(engine: Engine, settings: Settings) -> None:
    """Open ones, those that undo, and those that are overdue: in statistics, a minute's sample and metrics."""
    world = World(engine, (engine,) * 3, settings, silent={"hotel"})
    world.start()
    world.go()
    world.late()
    world.start()
    world.go()
    world.silent.clear()
    world.start()
    world.go()
    with engine.connect() as connection:
        numbers = stats(connection, settings, ["producer", "consumer"])
    (saga,) = numbers.sagas
    assert (saga.saga, saga.open, saga.compensating, saga.overdue) == ("trip", 2, 1, 1)
    sampled = as_sample(numbers)["sagas"]["trip"]
    assert {name: sampled[name] for name in ("open", "overdue")} == {"open": 2, "overdue": 1}
    lines = exposition(overview_of(trips=engine)).decode().splitlines()
    assert 'outbox_open_flows{database="trips",saga="trip"} 2.0' in lines
    assert 'outbox_overdue_flows{database="trips",saga="trip"} 1.0' in lines
