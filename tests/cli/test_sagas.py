"""``outbox sagas``: what was started, and what came of it."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import Settings
from outbox.cli.output import Code
from outbox.message.model import uuid7
from tests.cli.conftest import Cli
from tests.flow.support import World


def test_sagas_are_listed_and_shown(engine: Engine, settings: Settings, cli: Cli) -> None:
    """By status, and each with its commands."""
    world = World(engine, (engine,) * 3, settings, refusing={"hotel"})
    undone = world.start()
    world.go()
    world.silent = {"flight"}
    waiting = world.start()
    world.go()
    rows = cli("sagas", "list", "-o", "json").json["items"]
    assert [(row["id"], row["status"]) for row in rows] == [(str(waiting), "running"), (str(undone), "compensated")]
    assert [row["id"] for row in cli("sagas", "list", "--open", "-o", "json").json["items"]] == [str(waiting)]
    assert cli("sagas", "list", "--status", "completed", "--saga", "trip", "-o", "json").json["items"] == []
    assert cli("sagas", "list", "--overdue", "-o", "id").out == ""
    shown = cli("sagas", "show", str(undone), "-o", "json").json
    assert [(each["step"], each["kind"], each["answer"]) for each in shown["commands"]] == [
        ("flight", "action", "done"),
        ("hotel", "action", "refused"),
        ("flight", "compensation", "done"),
    ]
    assert "hotel was refused: sold out" in cli("sagas", "show", str(undone)).out
    assert "trip" in cli("sagas", "list").out
    unknown = cli("sagas", "show", str(uuid7()))
    assert (unknown.code, "of a saga, as far as its workers have come" in unknown.err) == (Code.NOT_FOUND, True)


def test_an_answer_for_a_participant(engine: Engine, settings: Settings, cli: Cli) -> None:
    """With a reason, and not without a confirmation; the saga goes on with it."""
    world = World(engine, (engine,) * 3, settings, silent={"flight"})
    trip = world.start()
    world.go()
    command = str(world.flow(trip).commands[0].message_id)
    asked = cli("sagas", "answer", command, "done", "--reason", "by phone")
    assert (asked.code, "give --yes" in asked.err) == (Code.USAGE, True)
    wrong = cli("sagas", "answer", command, "done", "--result", "{", "--reason", "by phone", "--yes")
    assert (wrong.code, "the result isn't JSON" in wrong.err) == (Code.USAGE, True)
    done = cli("sagas", "answer", command, "done", "--result", '{"seat": 1}', "--reason", "by phone", "--yes")
    assert (done.code, "is answered: done" in done.err) == (Code.DONE, True)
    world.go()
    assert world.flow(trip).answers["flight"] == {"seat": 1}
    again = cli("sagas", "answer", command, "refused", "--reason", "by phone", "--yes")
    assert (again.code, "it is answered already: done" in again.err) == (Code.CONFLICT, True)
    (row,) = cli("audit", "list", "--action", "answer", "-o", "json").json["items"]
    assert (row["target"], row["reason"]) == (command, "by phone")
