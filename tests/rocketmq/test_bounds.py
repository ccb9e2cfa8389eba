"""A client can't take the server's memory, its event loop, or what belongs to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from sqlalchemy import Engine

from outbox.consumer.leased import settlement
from outbox.rocketmq import clients, mapping, receiving
from outbox.rocketmq.clients import Clients, CommandStream
from outbox.rocketmq.options import ANYONE, NamedUser
from outbox.rocketmq.server import RocketmqServer
from outbox.rocketmq.wire import new
from outbox.telemetry.events import ClientFiltersDiffer, PassFailed
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit.passes import dispatch_all
from tests.rocketmq.raw import RawClient, body_of, code, handle_of, message


def test_settings_have_a_largest_size(raw: RawClient) -> None:
    """A thousand topics pass; a command of more than a megabyte ends its stream."""
    raw.telemetry(raw.producing(*(f"{number:0>120}" for number in range(1000))))
    stream = raw.telemetry()
    stream.send({"settings": raw.producing(*(f"{number:0>120}" for number in range(10_000)))})
    assert stream.get() is None
    assert stream.failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stream.failure.details().endswith("is too large, max is 1048576")


def test_answers_that_a_client_does_not_take_stop_its_stream(rocketmq: RocketmqServer, raw: RawClient) -> None:
    """While the last answer waits, no further settings are read."""
    read: list[int] = []
    settings = new("TelemetryCommand", settings={"publishing": {"topics": [{"name": "orders"}]}})

    async def commands() -> AsyncIterator[Any]:
        for number in range(3):
            read.append(number)
            yield settings

    async def hear() -> list[int]:
        counts = list[int]()
        client = rocketmq.clients.heard(raw.id, ANYONE, {}, "host")
        stream = CommandStream(asyncio.get_running_loop())
        hearing = asyncio.create_task(rocketmq._routes.hear(commands(), client, stream))
        for _ in range(3):
            command = await stream.next()
            assert command.settings.publishing.max_body_size
            for _ in range(20):  # what could go on has done so
                await asyncio.sleep(0)
            counts.append(len(read))
        await hearing
        return counts

    assert asyncio.run_coroutine_threadsafe(hear(), rocketmq._loop).result(60) == [2, 3, 3]


def test_groups_by_any_name_are_forgotten(
    rocketmq: RocketmqServer, raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many that were used once, only some are kept; what one of them has taken is settled all the same."""
    monkeypatch.setattr(receiving, "_FORGET", 5)
    raw.send(message("orders"))
    dispatch_all(engine)
    _, (first,) = raw.receive("orders", "mail")
    declared = len(rocketmq.tables.outbox.subscriptions)
    for number in range(20):
        raw.receive("orders", f"mail-{number}")
    assert len(rocketmq._receiving._groups) <= 5
    assert len(rocketmq._receiving._takers) <= 5
    assert len(rocketmq.tables.outbox.subscriptions) == declared
    assert code(raw.ack("orders", "mail", handle_of(first))) == 20000
    raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
    assert code(raw.change("orders", "mail", handle_of(first), "10s")) == 40013


def test_what_is_told_of_filters_is_short(
    raw: RawClient, monkeypatch: pytest.MonkeyPatch, heard: list[TelemetryEvent]
) -> None:
    """Of long ones their beginning, and of many some."""
    monkeypatch.setattr(receiving, "_LEAST_POLLING", 0.5)
    monkeypatch.setattr(receiving, "_MOST_SHOWN", 1)
    for tag in ("a", "b", "c"):
        tags = {"type": "TAG", "expression": tag * 16_000}
        assert raw.receive("orders", "mail", filter_expression=tags, long_polling_timeout="1s")[0] == 40401
    told = [each.filters for each in heard if isinstance(each, ClientFiltersDiffer)]
    assert [[each[:5] for each in filters] for filters in told] == [["TAG a", "TAG b"], ["TAG a", "TAG c"]]
    assert {len(each) for filters in told for each in filters} == {200}


def test_large_answers_are_not_made_in_the_loop(
    raw: RawClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold up all other calls; small ones are."""
    made: dict[int, str] = {}
    original = mapping.wire_message

    def wire_message(sent: Any, *more: Any, **options: Any) -> Any:
        made[len(sent.stored)] = threading.current_thread().name
        return original(sent, *more, **options)

    monkeypatch.setattr(receiving, "wire_message", wire_message)
    for body in (b"small", b"x" * 100_000):
        raw.send(message("orders", body))
        dispatch_all(engine)
        _, (received,) = raw.receive("orders", "mail")
        assert body_of(received) == body
    assert made[5] == "outbox-rocketmq-loop"
    assert made[100_000].startswith("outbox-rocketmq_")


def test_a_group_that_fails_leaves_the_others_their_leases(
    rocketmq: RocketmqServer,
    raw: RawClient,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    heard: list[TelemetryEvent],
) -> None:
    """Those that can't be renewed are told, and tried again."""
    renewed: list[str] = []
    original = settlement.renew

    def renew(connection: Any, schema: str, leases: Any, seconds: float) -> Any:
        renewed.append(leases[0].group)
        if leases[0].group == "ill" and renewed.count("ill") == 1:
            raise RuntimeError("no")
        return original(connection, schema, leases, seconds)

    raw.send(message("orders"))
    dispatch_all(engine)
    for group in ("ill", "well"):
        assert raw.receive("orders", group, auto_renew=True, invisible_duration=None)[0] == 20000
    monkeypatch.setattr(settlement, "renew", renew)
    for _ in range(2):
        asyncio.run_coroutine_threadsafe(rocketmq._receiving.renewals.once(), rocketmq._loop).result(60)
    assert sorted(renewed) == ["ill", "ill", "well", "well"]
    assert [each.duty for each in heard if isinstance(each, PassFailed)] == ["rocketmq renewal"]
    assert len(rocketmq._receiving.renewals._held) == 2


async def test_clients_are_forgotten_in_the_order_in_which_they_were_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many, the one that was heard the longest ago is forgotten; never one that is connected."""
    monkeypatch.setattr(clients, "_MOST", 3)
    known = Clients(asyncio.get_running_loop())
    first = known.heard("0", ANYONE, {}, "host")
    stream = known.open(first)
    for id_ in ("1", "2", "1", "3", "4"):
        known.heard(id_, ANYONE, {}, "host")
    assert {each["name"] for each in known.handlers()} == {"0", "3", "4"}
    known.close(first, stream)
    for id_ in ("3", "4", "5"):
        known.heard(id_, ANYONE, {}, "host")
    assert {each["name"] for each in known.handlers()} == {"3", "4", "5"}


async def test_clients_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are few: each new one takes some with it."""
    known = Clients(asyncio.get_running_loop())
    for number in range(5):
        known.heard(str(number), ANYONE, {}, "host")
    monkeypatch.setattr(clients, "_REMEMBERED", -1.0)
    for number in range(5, 8):
        known.heard(str(number), ANYONE, {}, "host")
    assert len(known._clients) < 5


async def test_no_client_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows of a report each user has as many as the others, and so has each of its clients."""
    monkeypatch.setattr(clients, "MOST_ROWS", 8)
    known = Clients(asyncio.get_running_loop())
    users = {name: NamedUser(send=("*",), name=name) for name in ("many", "few")}
    for number in range(20):
        settings = new("Settings", publishing={"topics": [{"name": f"t{each}"} for each in range(20)]})
        known.settle(known.heard(f"m{number}", users["many"], {}, "host"), settings)
    one, other = (
        new("Settings", publishing={"topics": [{"name": "orders"}]}),
        known.heard("f", users["few"], {}, "host"),
    )
    known.settle(other, one)
    rows = [(each["name"], each["topic"]) for each in known.handlers()]
    assert (len(rows), rows[1]) == (8, ("f", "orders"))
    assert {name for name, _ in rows} == {"f", *(f"m{number}" for number in range(7))}
    known.settle(other, new("Settings", publishing={"topics": [{"name": f"o{each}"} for each in range(20)]}))
    assert [each["name"] for each in known.handlers()].count("f") == 4
