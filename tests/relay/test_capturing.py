"""What a real Debezium sees of `published`, configured as the page about it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, make_url

from outbox import Outbox, Settings, testing
from outbox.embedded import Server
from outbox.prune import segments as segments_module
from outbox.prune.segments import drop_segment, make_segment
from outbox.relay import PublishedLog
from outbox.telemetry.events import MessageParked
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import tries, wait_until
from tests.prune.yard import OLD, WIDE, YOUNG, Yard
from tests.relay.capturing import capture, logical_server
from tests.relay.debezium import Debezium, compiled, connected, slot
from tests.relay.test_published import Shop

#: Messages that are sent, as many are sent in vain.
MESSAGES = 400
#: How far (bytes) the slot is behind the end of the WAL.
_BEHIND = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint FROM pg_replication_slots"


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of the program that runs Debezium."""
    return compiled(tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def logical() -> Iterator[Server]:
    """A server whose WAL can be decoded."""
    with logical_server() as server:
        server.create_database("pristine", template="shop")
        yield server


@pytest.fixture
def url(logical: Server) -> Iterator[str]:
    """The URL of a database with a publication and a slot, which are gone at the end."""
    logical.create_database("captured", template="pristine")
    with slot(logical.url("captured")):
        yield logical.url("captured")
    logical.drop_database("captured")


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """An engine on it."""
    engine = create_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def debezium(url: str, class_path: str, tmp_path: Path) -> Iterator[Debezium]:
    """A Debezium on it, that has no right but to replicate; it has to be started."""
    with connected(url) as connection:
        connection.execute("CREATE ROLE debezium LOGIN REPLICATION PASSWORD 'hunter2'")
        role = make_url(url).set(username="debezium", password="hunter2")  # noqa: S106 - of a test
        debezium = Debezium(class_path, tmp_path, role.render_as_string(hide_password=False))
        yield debezium
        debezium.kill()
        connection.execute("DROP ROLE debezium")


def _ids(debezium: Debezium) -> list[UUID]:
    return [UUID(event.id) for event in debezium.events]


def test_what_debezium_sees(engine: Engine, settings: Settings, debezium: Debezium) -> None:
    """Of each message all that it has, byte for byte; of what isn't committed nothing; in the order of each key."""
    shop = Shop(engine, replace(settings, compress_above=100))
    debezium.start()
    headers = {"traceparent": "00-1-2-01", "type": "OrderPaid", "x": "☃"}
    whole = shop.send({"n": 1}, key="é", headers=headers)
    bodies = [b"", b"\xff\xfe\x00", b"z" * 100_000, bytes(range(256)) * 5]
    several = [shop.send(body, topic="order-lost", key="k") for body in bodies]
    keyless, empty = shop.send("keyless"), shop.send("empty", key="")
    with engine.connect() as connection:
        shop.app.send(connection, "order-paid", "rolled back")
        connection.rollback()
        with connection.begin_nested() as savepoint:
            shop.app.send(connection, "order-paid", "to a savepoint")
            savepoint.rollback()
        undecided = shop.app.prepare(connection, "order-paid", "undecided")
        connection.commit()
    shop.relay()
    shop.app.commit(undecided)
    shop.relay()
    wait_until(lambda: undecided in _ids(debezium), "the last one has come")
    found = {UUID(event.id): event for event in debezium.events}
    assert sorted(found) == sorted([whole, *several, keyless, empty, undecided])
    assert len(debezium.events) == len(found)
    event = found[whole]
    sent = shop.tables.value(
        "SELECT floor(extract(epoch FROM born_at) * 1000) FROM outbox.half_message WHERE id = :id", id=whole
    )
    assert (event.topic, event.partition, event.key, event.value) == ("shop.order-paid", None, "é", b'{"n":1}')
    assert event.timestamp == sent
    assert json.loads(event.headers["headers"]) == headers
    named = ("id", "ce_id", "ce_type", "content-type", "traceparent")
    assert [event.headers[name] for name in named] == [str(whole)] * 2 + ["OrderPaid", "application/json", "00-1-2-01"]
    assert found[keyless].headers["traceparent"] is None
    assert [(event.topic, event.value) for event in debezium.events if event.key == "k"] == [
        ("shop.order-lost", body) for body in bodies
    ]
    assert (found[keyless].key, found[empty].key, found[undecided].value) == (None, "", b"undecided")


@pytest.mark.slow
def test_a_killed_debezium_repeats_and_loses_nothing(url: str, class_path: str, tmp_path: Path) -> None:
    """Two SIGKILLs, and half of the messages never committed: each of the others comes, in order and unchanged."""
    count = tries(MESSAGES)
    seen = capture(tmp_path, url, class_path, count)
    assert (seen.committed, seen.never >= count // 2) == (count, True)
    assert (seen.missing, seen.undecided, seen.changed, seen.out_of_order) == (0, 0, 0, 0)
    assert seen.events == count + seen.repeated


def test_prune_does_not_disturb_it(engine: Engine, debezium: Debezium, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was emptied, and dropped, while it was away, comes when it is back; then it goes on."""
    monkeypatch.setattr(segments_module, "WAIT", 30.0)
    shop, yard = Shop(engine, YOUNG), Yard(engine)
    ids = [shop.send(number, key="k") for number in range(30)]
    assert shop.relay() == 30
    assert yard.empty() == 29
    assert drop_segment(yard.connection, OLD, WIDE)
    assert shop.rows("id") == []
    debezium.start()
    wait_until(lambda: len(debezium.events) >= 30, "all have come")
    assert make_segment(yard.connection, YOUNG, WIDE)
    ids.append(shop.send("later", key="k"))
    assert shop.relay() == 1
    wait_until(lambda: ids[-1] in _ids(debezium), "it goes on")
    yard.empty()
    ids.append(shop.send("last", key="k"))
    assert shop.relay() == 1
    wait_until(lambda: ids[-1] in _ids(debezium), "it goes on")
    assert _ids(debezium) == ids
    yard.connection.close()


def test_the_log_alone(
    engine: Engine, url: str, settings: Settings, class_path: str, tmp_path: Path, heard: list[TelemetryEvent]
) -> None:
    """Without a table: each message once, in the order of each key, with all that the router takes; no other."""
    app, debezium = (
        Outbox(engine, settings=replace(settings, compress_above=100)),
        Debezium(class_path, tmp_path, url, log=True),
    )
    app.relay("order-*", to=PublishedLog())
    debezium.start()
    bodies = ["", "é☃\0", "z" * 100_000, {"n": 1}]
    with engine.begin() as connection:
        ids = [app.send(connection, "order-paid", body, key="k", headers={"x": "☃"}) for body in bodies]
        ids.insert(2, app.send(connection, "order-paid", b"\xff", key="k"))
    with engine.connect() as connection:
        app.send(connection, "order-paid", "rolled back", key="k")
        app.prepare(connection, "order-paid", "undecided")
        connection.rollback()
    testing.drain(app)
    with engine.begin() as connection:
        ids.append(app.send(connection, "order-paid", "without a key"))
    testing.drain(app)
    try:
        wait_until(lambda: len(debezium.events) >= 5, "all have come")
        events = debezium.events
    finally:
        debezium.kill()
    assert [UUID(event.id) for event in events] == [*ids[:2], *ids[3:]]
    assert [event.value.decode() for event in events] == ["", "é☃\0", "z" * 100_000, '{"n":1}', "without a key"]
    assert [event.key for event in events] == [*["k"] * 4, None]
    assert {event.topic for event in events} == {"shop.order-paid"}
    assert json.loads(events[0].headers["headers"]) == {"x": "☃"}
    assert events[0].headers["ce_type"] == "order-paid"
    (parked,) = [each for each in heard if isinstance(each, MessageParked)]
    assert "isn't UTF-8" in parked.reason


@pytest.mark.slow
def test_the_slot_goes_on_while_others_write(engine: Engine, settings: Settings, debezium: Debezium) -> None:
    """It keeps no WAL of theirs; and a kill right after that loses nothing."""
    shop = Shop(engine, settings)
    debezium.start()
    shop.tables.run("CREATE TABLE other AS SELECT repeat('x', 1000) FROM generate_series(1, 10000)")

    def goes_on() -> Any:
        return shop.tables.value(_BEHIND) < 1_000_000

    wait_until(goes_on, "the slot has come to the end")
    debezium.kill()
    first = shop.send(1)
    shop.relay()
    debezium.start()
    wait_until(lambda: first in _ids(debezium), "what was relayed meanwhile has come")
