"""``outbox sagas``: what was started, and what came of it."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import Settings
from outbox.cli.exits import Code
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
    rows = cli("sagas", "list", "-o", "json").json["sagas"]
    assert [(row["id"], row["status"]) for row in rows] == [(str(waiting), "running"), (str(undone), "compensated")]
    assert [row["id"] for row in cli("sagas", "list", "--open", "-o", "json").json["sagas"]] == [str(waiting)]
    assert cli("sagas", "list", "--status", "completed", "--saga", "trip", "-o", "json").json["sagas"] == []
    shown = cli("sagas", "show", str(undone), "-o", "json").json
    assert [(each["step"], each["command"], each["answer"]) for each in shown["commands"]] == [
        ("flight", "action", "done"),
        ("hotel", "action", "refused"),
        ("flight", "compensation", "done"),
    ]
    assert "hotel was refused: sold out" in cli("sagas", "show", str(undone)).out
    assert "trip" in cli("sagas", "list").out
    unknown = cli("sagas", "show", str(uuid7()))
    assert (unknown.code, "no saga" in unknown.err) == (Code.NOT_FOUND, True)
