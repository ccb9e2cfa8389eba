"""An act on a name that doesn't exist is refused with exit code 3: a slip of the pen doesn't pass for an act."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Outbox
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import DECLARATIONS
from outbox.cli.output import Code
from outbox.errors import NotFound
from tests.cli.conftest import Cli

WHY = ("--reason", "a test", "--yes")
ID = str(uuid4())
PLACES = {"message": "messages", "half": "half", "inbox": "inbox"}
GROUP_OF = {"discard": "dead", "restore": "dead"}

#: How each act is done to what doesn't exist; those on messages follow from their table.
COMMANDS: dict[str, tuple[str, ...]] = {
    "reset_group": ("group", "reset", "nobody", "--topic", "orders", "--to", "first", *WHY),
    "skip_group": ("group", "skip", "nobody", "--topic", "orders", *WHY),
    "delete_group": ("group", "delete", "nobody", "--topic", "orders", *WHY),
    "pause_group": ("group", "pause", "nobody", *WHY),
    "resume_group": ("group", "resume", "nobody", *WHY),
    "set_rate": ("group", "rate", "nobody", "5/s", *WHY),
    "pause_topic": ("topics", "pause", "ordres", *WHY),
    "resume_topic": ("topics", "resume", "ordres", *WHY),
    "delete_topic": ("topics", "delete", "ordres", *WHY),
    "pause_cron": ("cron", "pause", "nightyl", *WHY),
    "resume_cron": ("cron", "resume", "nightyl", *WHY),
    "run_cron": ("cron", "run", "nightyl", *WHY[:2]),
    "delete_cron": ("cron", "delete", "nightyl", *WHY),
    "end": ("lock", "end", "6564f1a2.1267", *WHY),
    "answer": ("sagas", "answer", ID, "done", *WHY),
    "silence": ("rule", "silence", "no.rule", "--lasts", "1h", *WHY[:2]),
    "lift_silence": ("rule", "lift", "no.rule"),
    "delete_filter": ("filter", "delete", "nobody", "--of", "messages"),
    "note": ("dead", "note", "0f3a91c2d4e5b6a7", "--owner", "payments"),
    **{
        name: (GROUP_OF.get(name, PLACES[act.noun]), name, f"nobody/{ID}" if act.noun == "inbox" else ID, *WHY)
        for name, act in ACTS.items()
    },
}
#: Orders that the console alone takes, and an act that makes what has the name.
ORDERED = {"reconcile", "repair", "save_filter"}


@pytest.mark.parametrize("name", [each.name for each in DECLARATIONS if each.name not in ORDERED])
def test_every_act(name: str, cli: Cli, url: str, tmp_path: Path) -> None:
    """Each act that there is says that there is no such thing, and writes nothing into the audit."""
    body = tmp_path / "body.json"
    body.write_text("{}")
    commands = COMMANDS | {"edit": ("messages", "edit", ID, "--body", str(body), *WHY)}
    done = cli(*commands[name])
    # A session isn't known before it holds a lock, and after.
    assert (done.code, done.err.count("\n")) == (Code.CONFLICT if name == "end" else Code.NOT_FOUND, 1), done.err
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outbox.audit")) == 0
    engine.dispose()


def test_a_topic_before_its_first_message(cli: Cli) -> None:
    """It is paused where that is asked for, and resumed like any other."""
    refused = cli("topics", "pause", "orders", *WHY)
    assert (refused.code, "--create" in refused.err) == (Code.NOT_FOUND, True)
    assert cli("topics", "pause", "orders", "--create", *WHY).code == Code.DONE
    assert cli("topics", "resume", "orders", "--yes").code == Code.DONE


def test_in_python(engine: Engine) -> None:
    """The operator raises; with ``create`` a topic is paused before its first message."""
    operator = Outbox(engine).operator
    calls: list[tuple[type[Exception], Callable[..., str], tuple[str, ...]]] = [
        (NotFound, operator.pause_topic, ("ordres",)),
        (NotFound, operator.resume_topic, ("ordres",)),
        (NotFound, operator.delete_topic, ("ordres",)),
        (NotFound, operator.pause_group, ("nobody",)),
        (NotFound, operator.resume_group, ("nobody",)),
        (NotFound, operator.set_rate, ("nobody", "5/s")),
        (NotFound, operator.reset_group, ("nobody", "orders", "first")),
        (NotFound, operator.skip_group, ("nobody", "orders")),
        (NotFound, operator.delete_group, ("nobody", "orders")),
    ]
    for error, call, names in calls:
        with pytest.raises(error):
            call(*names, by="ada", why="a test")
    assert "is paused" in operator.pause_topic("ordres", by="ada", why="a test", create=True)
