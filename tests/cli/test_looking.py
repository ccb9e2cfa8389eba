"""``outbox stats`` and ``outbox messages``: on a database in which all there is has happened."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import plistlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from outbox import Message, Outbox, Park, Settings
from outbox.cli import groups
from outbox.cli.output import Code
from outbox.consumer.consumer import Consumer
from outbox.database import migration
from outbox.dispatch.dispatch_pass import dispatch_once
from outbox.operator.health import stats
from outbox.operator.look import message_sql
from outbox.testing import drain
from tests.cli.conftest import Cli

ESCAPE = "\x1b[31mred\x1b[0m [bold]x[/bold]"


@dataclass
class World:
    """The ids of messages in each state."""

    consumed: UUID
    failed: UUID
    parked: UUID
    plain_text: UUID
    binary: UUID
    left_out: UUID
    scheduled: UUID
    recalled: UUID
    undecided: UUID
    rolled_back: UUID
    committed: UUID


def consume(engine: Engine, outbox: Outbox, source: Engine | None = None) -> None:
    """Run all consumers until there is nothing left."""
    with engine.connect() as connection, (source or engine).connect() as other:
        reader = connection if source is None else other
        for subscription in outbox.subscriptions.values():
            consumer = Consumer(subscription, outbox.settings)
            consumer.start(connection, reader)
            while consumer.consume_once(connection, reader).more:
                pass


def handle(message: Message, session: Any) -> Park | None:
    """Do what the body says."""
    match message.body:
        case {"do": "fail"}:
            raise RuntimeError("the till is locked\nsecond line")
        case {"do": "park"}:
            return Park("looks wrong")
    return None


def send_all(outbox: Outbox, engine: Engine) -> World:
    """Bring a message into each state; the last is committed and not dispatched."""

    def send(topic: str, body: Any, **options: Any) -> UUID:
        with engine.begin() as connection:
            return outbox.send(connection, topic, body, **options)

    consumed = send("orders", {"do": "nothing"}, key=ESCAPE, tag="new", headers={"trace": "1"})
    failed = send("orders", {"do": "fail"}, key="b")
    parked = send("orders", {"do": "park"}, key="c")
    plain_text = send("orders", "grüße", key="d")
    binary = send("orders", b"\x00\xff", key="e")
    left_out = send("orders", {}, tag="old")
    scheduled = send("orders", {}, delay=3600)
    recalled = send("orders", {}, delay=3600)
    with engine.begin() as connection:
        undecided = outbox.prepare(connection, "payments", {}, key="a", immunity=60)
        rolled_back = outbox.prepare(connection, "payments", {}, key="a")
    outbox.rollback(rolled_back)
    with engine.connect() as connection:
        while dispatch_once(connection, outbox.settings):
            pass
    outbox.operator.recall(recalled, by="ann", why="a mistake")
    committed = send("payments", {})
    return World(consumed, failed, parked, plain_text, binary, left_out, scheduled, recalled, undecided, rolled_back,
                 committed)  # fmt: skip


@pytest.fixture
def outbox(engine: Engine) -> Outbox:
    """An outbox with one consumer."""
    outbox = Outbox(engine, group="shop", settings=Settings())
    outbox.consumer("orders", group="till", tags={"new", "t"}, keys=None)(handle)
    outbox.subscriptions.clear()
    outbox.consumer("orders", group="till", keys=["*"])(handle)
    return outbox


@pytest.fixture
def world(outbox: Outbox, engine: Engine) -> World:
    """Messages in each state, consumed as far as they can be."""
    world = send_all(outbox, engine)
    consume(engine, outbox)
    return world


def test_stats(cli: Cli, world: World) -> None:
    """Each number is where it belongs, as JSON and nothing else on stdout."""
    result = cli("stats", "-o", "json")
    assert (result.code, result.err) == (0, "")
    shown = result.json
    orders, payments = shown["topics"]
    assert orders.pop("next_due") > shown["at"]
    assert orders == {
        "topic": "orders", "undecided": 0, "parked": 0, "orphans": 0, "unasked": 0, "oldest_undecided": None,
        "oldest_parked": None, "parked_id": None, "undispatched": 0, "oldest_undispatched": None, "scheduled": 1,
        "overdue": 0, "oldest_overdue": None, "messages": 6, "committed": 8, "rolled_back": 0, "checks": 0,
        "capped": [],
        "exhausted": 0, "oldest_exhausted": None, "exhausted_id": None, "exhausted_group": None,
    }  # fmt: skip
    assert payments["oldest_undecided"] > 0
    assert payments["oldest_undispatched"] > 0
    assert (payments["undecided"], payments["undispatched"], payments["messages"]) == (1, 1, 0)
    (group,) = shown["groups"]
    assert group.pop("consumed") > 0
    assert group.pop("oldest_parked") > 0
    assert group.pop("parked_id") == str(world.parked)
    assert group == {
        "group": "till", "topic": "orders", "lag": 0, "oldest_lag": None, "failed": 1, "oldest_due": None, "overdue": 0,
        "waiting": 0, "taken": 0, "lapsed": 0, "parked": 1, "paused": False, "breaker_open": False, "lost": 0,
        "newest_loss": None, "lost_id": None, "differences": None, "unfollowed": None, "moves": 0, "capped": [],
    }  # fmt: skip


def test_stats_as_table(cli: Cli, world: World) -> None:
    """The table is for people, and shows the same."""
    result = cli("stats")
    assert (result.code, result.err) == (0, "")
    assert "Topics at 20" in result.out
    assert any(line.split()[:2] == ["till", "orders"] for line in result.out.splitlines())


def test_stats_counts_stop_at_a_limit(cli: Cli, world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that reached its limit says so."""
    monkeypatch.setattr(stats, "LIMIT", 1)
    orders, payments = cli("stats", "-o", "json").json["topics"]
    assert set(orders["capped"]) == {"undecided", "scheduled", "undispatched"}
    assert payments["undecided"] == 1
    assert cli("stats").out.count("1+") >= 3


def test_stats_lag_and_due_retries(cli: Cli, world: World, outbox: Outbox, engine: Engine) -> None:
    """Messages after the offset are the lag; a retry whose time has come is due."""
    with engine.begin() as connection:
        for number in range(3):
            outbox.send(connection, "orders", {}, key=str(number))
        connection.execute(text("UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '90 s' "
                                "WHERE status = 'failed'"))  # fmt: skip
    assert cli("stats", "-o", "json").json["topics"][0]["undispatched"] == 3
    with engine.connect() as connection:
        dispatch_once(connection, outbox.settings)
    shown = cli("stats", "-o", "json").json
    assert shown["topics"][0]["undispatched"] == 0
    assert shown["groups"][0]["lag"] == 3
    assert shown["groups"][0]["oldest_lag"] > 0
    assert shown["groups"][0]["oldest_due"] >= 90


def undispatched(connection: Connection, settings: Settings) -> int:
    """Return the number that the statistics show."""
    return sum(row.undispatched or 0 for row in stats.stats(connection, settings, ["producer"]).topics)


def test_stats_while_a_backlog_is_cut(engine: Engine, outbox: Outbox) -> None:
    """Undispatched ops are counted right between the batches of a cut, with others still in flight."""
    settings = outbox.settings
    with engine.connect() as slow, engine.connect() as connection:
        late = slow.begin()
        outbox.send(slow, "orders", {})
        slow.execute(text("SELECT pg_current_xact_id()"))
        for _ in range(5):
            with connection.begin():
                outbox.send(connection, "orders", {})
        expected = 5
        assert undispatched(connection, settings) == expected
        sent_between = False
        while counts := dispatch_once(connection, settings, limit=2):
            expected -= counts.done
            assert undispatched(connection, settings) == expected
            if not sent_between:
                sent_between = True
                for _ in range(2):
                    with connection.begin():
                        outbox.send(connection, "orders", {})
                expected += 2
                assert undispatched(connection, settings) == expected
        assert expected == 0
        late.commit()
        assert undispatched(connection, settings) == 1
        while dispatch_once(connection, settings):
            pass
        assert undispatched(connection, settings) == 0


def test_stats_after_a_restore(engine: Engine, outbox: Outbox) -> None:
    """In another cluster the xids mean nothing: counted is what is no message yet, also before the first dispatch."""
    settings = outbox.settings
    with engine.connect() as connection:
        with connection.begin():
            outbox.send(connection, "orders", {})
        dispatch_once(connection, settings)
        with connection.begin():
            outbox.send(connection, "orders", {})
        with connection.begin():
            connection.execute(text("UPDATE outbox.dispatch_cursor SET system_identifier = 1, next_xid = '999999999'"))
        assert undispatched(connection, settings) == 1
        dispatch_once(connection, settings)
        assert undispatched(connection, settings) == 1
        while dispatch_once(connection, settings):
            pass
        assert undispatched(connection, settings) == 0
        with connection.begin():
            connection.execute(text("DELETE FROM outbox.dispatch_cursor"))
        assert undispatched(connection, settings) == 0


def test_stats_of_a_consumer_alone(
    cli: Cli, empty_url: str, engine: Engine, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the producer is elsewhere, the lag is unknown, and nothing fails."""
    migration.upgrade(empty_url, ["consumer"])
    world = send_all(outbox, engine)
    other = create_engine(empty_url)
    consume(other, outbox, source=engine)
    other.dispose()
    monkeypatch.setenv("OUTBOX_DATABASE_URL", empty_url)
    shown = cli("stats", "-o", "json").json
    assert shown["topics"] == []
    assert shown["groups"][0]["lag"] is None
    assert shown["groups"][0]["parked"] == 1
    assert "?" in cli("stats").out
    refused = cli("messages", "list")
    assert refused.code == 78
    assert "only the consumer's tables" in refused.err
    assert cli("messages", "show", str(world.consumed), "-o", "json").json["inbox"][0]["status"] == "consumed"


def ids(shown: Any) -> list[str]:
    """Return the ids of a list."""
    return [row["id"] for row in shown["items"]]


def test_list(cli: Cli, world: World) -> None:
    """All messages, the newest id first, each with its status."""
    result = cli("messages", "list", "-o", "json")
    assert (result.code, result.err) == (0, "")
    shown = result.json
    assert ids(shown) == sorted(ids(shown), reverse=True)
    assert shown["next_page_token"] is None
    status = {row["id"]: row["status"] for row in shown["items"]}
    for name in ("scheduled", "recalled", "undecided", "rolled_back", "committed"):
        assert status[str(getattr(world, name))] == name
    assert status[str(world.consumed)] == status[str(world.failed)] == "dispatched"
    assert len(status) == 11


def test_list_since(cli: Cli, world: World, engine: Engine) -> None:
    """Durations and times bound the age, by the database's clock."""
    assert len(ids(cli("messages", "list", "--since", "1h", "-o", "json").json)) == 11
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.half_message SET born_at = now() - interval '3 h' WHERE key = 'b'"))
    assert str(world.failed) not in ids(cli("messages", "list", "--since", "1h", "-o", "json").json)
    assert len(ids(cli("messages", "list", "--since", "4h", "-o", "json").json)) == 11
    assert cli("messages", "list", "--since", "1h", "--status", "undecided", "-o", "json").json["items"]
    later = (dt.datetime.now(dt.UTC) + dt.timedelta(days=2)).isoformat()
    assert ids(cli("messages", "list", "--since", later, "-o", "json").json) == []


@pytest.mark.parametrize(("since", "hint"), [("yesterday", "must be a duration"), ("2026-01-31", "has no time zone")])
def test_list_since_something_else(cli: Cli, since: str, hint: str) -> None:
    """A time that can't be read is wrong usage, with the mend."""
    result = cli("messages", "list", "--since", since)
    assert (result.code, result.out) == (2, "")
    assert hint in result.err


def test_list_pages(cli: Cli, world: World) -> None:
    """Page by page one sees each message once."""
    seen: list[str] = []
    arguments: list[str] = []
    while True:
        page = cli("messages", "list", "--limit", "4", "-o", "json", *arguments).json
        seen += ids(page)
        if page["next_page_token"] is None:
            break
        arguments = ["--after", page["next_page_token"]]
    assert seen == ids(cli("messages", "list", "-o", "json").json)
    assert "there may be more: --after" in cli("messages", "list", "--limit", "4").err


def test_list_gives_up_and_says_where(cli: Cli, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing in its window says where to go on, and finds it there."""
    monkeypatch.setattr(message_sql, "WINDOW", 3)
    monkeypatch.setattr(groups, "SEARCHED", 3)
    arguments: list[str] = []
    for _ in range(5):
        page = cli("messages", "list", "--header", "trace=1", "-o", "json", *arguments).json
        if page["items"]:
            break
        arguments = ["--after", page["next_page_token"]]
    assert ids(page) == [str(world.consumed)]
    told = cli("messages", "list", "--header", "trace=1").err
    assert told.startswith("searched 3 messages; to search further: --after")


def test_list_never_steers_the_terminal(cli: Cli, world: World) -> None:
    """Control characters and markup in a key are shown, not obeyed."""
    out = cli("messages", "list").out
    assert "\x1b" not in out
    assert r"\x1b[31mred\x1b[0m [bold]x[/bold]" in out
    assert cli("messages", "list", "-o", "json").json["items"][-1]["key"] == ESCAPE


def test_show_consumed(cli: Cli, world: World) -> None:
    """The whole way of a message that went well; the body only when asked for."""
    result = cli("messages", "show", str(world.consumed), "-o", "json")
    assert (result.code, result.err) == (0, "")
    way = result.json
    assert way["half"]["status"] == "dispatched"
    assert way["half"]["producer_group"] == "shop"
    assert way["half"]["headers"] == {"trace": "1", "outbox-sender": way["half"]["headers"]["outbox-sender"]}
    assert way["half"]["body_bytes"] == len('{"do":"nothing"}')
    assert (way["op"]["resolution"], way["op"]["decided_by"]) == ("commit", "producer")
    assert [send["send_number"] for send in way["sends"]] == [1]
    (inbox,) = way["inbox"]
    assert (inbox["group"], inbox["status"], inbox["attempts"]) == ("till", "consumed", 1)
    assert (way["check"], way["scheduled"], way["audit"]) == (None, None, [])
    assert "body" not in way
    assert '"do"' not in result.out
    assert cli("messages", "show", str(world.consumed), "--body", "-o", "json").json["body"] == {"do": "nothing"}


def test_show_as_table(cli: Cli, world: World) -> None:
    """For people: in order of time, errors by their first line, nothing that steers the terminal."""
    out = cli("messages", "show", str(world.failed), "--body").out
    assert '{"do": "fail"}' in out
    steps = ["Half message written", "Committed by the producer", "Dispatched", "Failed in group till"]
    assert sorted(steps, key=lambda step: out.index(f"Z  {step}")) == steps
    assert "the till is locked" in out
    assert "second line" not in out
    assert "\x1b" not in cli("messages", "show", str(world.consumed)).out


def test_show_failures(cli: Cli, world: World) -> None:
    """Failed and parked messages show why."""
    failed = cli("messages", "show", str(world.failed), "-o", "json").json["inbox"][0]
    assert failed["status"] == "failed"
    assert failed["next_attempt_at"]
    assert "the till is locked" in failed["last_error"]
    (attempt,) = cli("messages", "show", str(world.failed), "-o", "json").json["attempts"]
    assert (attempt["attempt"], attempt["status"]) == (1, "failed")
    assert "Failed attempts" in cli("messages", "show", str(world.failed)).out
    parked = cli("messages", "show", str(world.parked), "-o", "json").json["inbox"][0]
    assert (parked["status"], "looks wrong" in parked["last_error"]) == ("parked", True)


def test_show_what_a_function_raised(cli: Cli, world: World, engine: Engine) -> None:
    """Its first line with the facts; all of it as JSON."""
    sql = "INSERT INTO outbox.half_error (half_id, error_kind, error) VALUES (:id, 'Declined', E'no money\\n\\ntrace')"
    with engine.begin() as connection:
        connection.execute(text(sql), {"id": world.undecided})
    out = cli("messages", "show", str(world.undecided)).out
    assert "no money" in out
    assert "trace" not in out
    assert cli("messages", "show", str(world.undecided), "-o", "json").json["raised"]["error"].endswith("trace")


def test_conversation(cli: Cli, world: World, outbox: Outbox, engine: Engine) -> None:
    """What a handler sent stands below its cause, indented."""

    @outbox.consumer("question", group="answering")
    def answer(message: Message, session: Session) -> None:
        outbox.send(session, "answer", {})

    with engine.begin() as connection:
        question = outbox.send(connection, "question", {})
    drain(outbox)
    messages = cli("messages", "conversation", str(question), "-o", "json").json["messages"]
    assert [(each["topic"], each["depth"], each["cause"]) for each in messages] == [
        ("question", 0, None), ("answer", 1, str(question)),
    ]  # fmt: skip
    out = cli("messages", "conversation", messages[1]["id"]).out
    assert out.index(str(question)) < out.index(f"  {messages[1]['id']}")
    assert "answering: consumed" in out


def test_show_bodies(cli: Cli, world: World) -> None:
    """What has no names is hidden; revealed, text is shown as text, of other bytes their number and digest."""
    for message_id, revealed in (
        (world.plain_text, "grüße"),
        (world.binary, {"bytes": 2, "sha256": hashlib.sha256(b"\x00\xff").hexdigest()}),
    ):
        show = ("messages", "show", str(message_id), "--body", "-o", "json")
        assert cli(*show).json["body"] == "***"
        assert cli(*show, "--reveal", "--actor", "ann").json["body"] == revealed
        assert cli("messages", "show", str(message_id), "--reveal").code == Code.USAGE
        audited = cli("audit", "list", "--target", str(message_id), "-o", "json").json["items"]
        assert ("ann", "reveal") in {(row["actor"], row["action"]) for row in audited}


def test_show_bodies_by_codecs(
    cli: Cli, outbox: Outbox, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codecs of the application read what is in a format of its own; without them it is bytes."""
    (tmp_path / "codecs_shop.py").write_text(
        "import plistlib\nfrom outbox import Outbox\noutbox = Outbox()\nprint('hello')\n"
        "outbox.codec('application/x-plist', encode=plistlib.dumps, decode=plistlib.loads)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with engine.begin() as connection:
        half_id = outbox.send(
            connection, "plists", plistlib.dumps({"iban": "DE89"}), content_type="application/x-plist"
        )
    show = ("messages", "show", str(half_id), "--body", "-o", "json")
    assert cli(*show).json["body"] == "***"
    assert cli(*show, "--app", "codecs_shop:outbox").json["body"] == {"iban": "***"}
    assert cli(*show, "--app", "codecs_shop:outbox", "--reveal").json["body"] == {"iban": "DE89"}
    export = ("messages", "export", "--topic", "plists", "--body")
    assert cli(*export).json["body"] is None
    assert json.loads(cli(*export, "--app", "codecs_shop:outbox").json["body"]) == {"iban": "***"}


def test_show_body_that_lies(cli: Cli, world: World, engine: Engine) -> None:
    """A body that isn't what its content type says is no reason to fail."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox.half_message SET content_type = 'application/json' WHERE key = 'e'"))
    body = cli("messages", "show", str(world.binary), "--body", "--reveal", "-o", "json").json["body"]
    assert body["bytes"] == 2
    assert "can't be read" in body["error"]


def test_show_groups_without_a_row(cli: Cli, world: World, outbox: Outbox, engine: Engine) -> None:
    """A group that filters the message out, and one that hasn't come so far, are told apart."""
    assert cli("messages", "show", str(world.left_out), "-o", "json").json["inbox"][0]["status"] == "left_out"
    with engine.begin() as connection:
        sent = outbox.send(connection, "orders", {}, key="z")
    assert cli("messages", "show", str(sent), "-o", "json").json["inbox"] == []
    with engine.connect() as connection:
        dispatch_once(connection, outbox.settings)
    assert cli("messages", "show", str(sent), "-o", "json").json["inbox"][0]["status"] == "unconsumed"
    assert "unconsumed" in cli("messages", "show", str(sent)).out


def test_show_undecided_and_recalled(cli: Cli, world: World) -> None:
    """Checks, schedule and what operators did are on the way too."""
    undecided = cli("messages", "show", str(world.undecided), "-o", "json").json
    assert undecided["half"]["status"] == "undecided"
    assert undecided["check"]["check_times"] == 0
    assert "next check" in cli("messages", "show", str(world.undecided)).out
    recalled = cli("messages", "show", str(world.recalled), "-o", "json").json
    assert recalled["scheduled"]["recalled_by"] == "ann"
    assert [(act["actor"], act["action"], act["reason"]) for act in recalled["audit"]] == [
        ("ann", "recall", "a mistake")
    ]
    assert "a mistake  ann" in cli("messages", "show", str(world.recalled)).out


def test_show_with_another_consumers_database(cli: Cli, empty_url: str, engine: Engine, outbox: Outbox) -> None:
    """With --consumer-url the inbox may be in another database."""
    world = send_all(outbox, engine)
    refused = cli("messages", "show", str(world.consumed), "--consumer-url", empty_url)
    assert refused.code == 78
    migration.upgrade(empty_url, ["consumer"])
    other = create_engine(empty_url)
    consume(other, outbox, source=engine)
    other.dispose()
    way = cli("messages", "show", str(world.consumed), "--consumer-url", empty_url, "-o", "json").json
    assert [row["status"] for row in way["inbox"]] == ["consumed"]
    assert way["half"]["status"] == "dispatched"


def test_show_unknown(cli: Cli) -> None:
    """No trace of it: 3. No id at all: 2."""
    unknown = cli("messages", "show", str(uuid4()), "-o", "json")
    assert (unknown.code, unknown.out) == (3, "")
    assert unknown.err.startswith("error: no registered database ")
    assert cli("messages", "show", "42").code == 2


def test_looking_writes_nothing(cli: Cli, world: World, engine: Engine) -> None:
    """All runs in read-only transactions with a time limit."""
    with engine.connect() as connection:
        before = connection.scalar(text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))
        for command in (["stats"], ["messages", "list"], ["messages", "show", str(world.failed), "--body"]):
            assert cli(*command).code == 0
        connection.rollback()
        assert connection.scalar(text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")) == before
