"""Consumers get messages under leases, and settle them once; late words are told so."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import threading
import time
from contextlib import suppress
from typing import Any, cast

import grpc
import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy import text as sql

from outbox import Outbox, Settings
from outbox.rocketmq import receiving
from outbox.rocketmq.options import GroupOptions
from outbox.rocketmq.receiving import Poll, SharedTaker
from outbox.rocketmq.server import RocketmqServer
from outbox.telemetry.events import ClientFiltersDiffer
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit import wait_until
from tests.kit.passes import dispatch_all, send_each
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, bodies, body_of, code, handle_of, message, text


def store(raw: RawClient, engine: Engine, *each: bytes, topic: str = "orders", **system: Any) -> None:
    """Send messages, and have them dispatched."""
    for body in each:
        assert code(raw.send(message(topic, body, **system))) == 20000
    dispatch_all(engine)


def statuses(engine: Engine) -> list[tuple[str, int]]:
    """Return status and attempts of the inbox rows."""
    with engine.connect() as connection:
        rows = connection.execute(sql("SELECT status, attempts FROM outbox.consumer_message ORDER BY 1, 2"))
        return [(status, attempts) for status, attempts in rows]


def lapse(engine: Engine) -> None:
    """Have all leases end now."""
    with engine.begin() as connection:
        connection.execute(
            sql("UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() WHERE status = 'taken'")
        )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls that find nothing end soon: the least time of the protocol is five seconds."""
    monkeypatch.setattr(receiving, "_LEAST_POLLING", 0.5)
    monkeypatch.setattr(RawClient, "polling", "1s")


@pytest.mark.usefixtures("impatient")
def test_a_message_comes_out_as_it_went_in(raw: RawClient, engine: Engine) -> None:
    """With all that its sender said of it, and what the server adds; acknowledged, it comes no more."""
    sent = message("orders", b"\x00\xff", {"a": "b"}, tag="t", keys=["k", "l"], message_group="g", born_host="h",
                   trace_context="00-1")  # fmt: skip
    raw.send(sent)
    dispatch_all(engine)
    parts = raw.parts("orders", "mail")
    assert [next(iter(part)) for part in parts] == ["status", "message", "delivery_timestamp"]
    got = parts[1]["message"]
    assert (got["topic"], got["user_properties"], body_of(got)) == ({"name": "orders"}, {"a": "b"}, b"\x00\xff")
    system = got["system_properties"]
    digest = {"type": "MD5", "checksum": hashlib.md5(b"\x00\xff").hexdigest().upper()}  # noqa: S324 - the protocol's
    expected = sent["system_properties"] | {"message_type": "FIFO", "delivery_attempt": 1, "body_digest": digest}
    assert {name: system[name] for name in expected} == expected
    assert {"store_timestamp", "store_host", "queue_offset"} < system.keys()
    assert code(raw.ack("orders", "mail", handle_of(got))) == 20000
    assert statuses(engine) == [("consumed", 1)]
    assert raw.receive("orders", "mail") == (40401, [])


def test_an_empty_poll(raw: RawClient) -> None:
    """It lasts as long as it was asked for, five seconds at least, and says that there is nothing."""
    began = time.monotonic()
    parts = raw.parts("orders", "mail", long_polling_timeout="1s")
    assert time.monotonic() - began > 4.5
    assert [next(iter(part)) for part in parts] == ["status", "delivery_timestamp"]
    assert (code(parts[0]), text(parts[0])) == (40401, "no new message")


def test_a_poll_is_woken(raw: RawClient, engine: Engine) -> None:
    """A message that comes while a poll waits ends it at once."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(raw.receive("orders", "mail", long_polling_timeout="20s")))
    thread.start()
    time.sleep(1)
    store(raw, engine, b"1")
    thread.join()
    assert list(bodies(got[0][1])) == [b"1"]


@pytest.mark.usefixtures("impatient")
def test_polls_of_a_group_share_a_taker(raw: RawClient, engine: Engine, rocketmq: RocketmqServer) -> None:
    """Of many polls each message goes to one, and all are taken."""
    got: list[Any] = []

    def poll() -> None:
        got.extend(raw.receive("orders", "mail", batch_size=4, long_polling_timeout="2s")[1])

    threads = [threading.Thread(target=poll) for _ in range(10)]
    for thread in threads:
        thread.start()
    wait_until(lambda: rocketmq._receiving._takers, "a poll waits")
    assert len(rocketmq._receiving._takers) == 1
    store(raw, engine, *(b"%d" % number for number in range(20)))
    for thread in threads:
        thread.join()
    assert sorted(bodies(got)) == sorted(b"%d" % number for number in range(20))


@pytest.mark.parametrize(
    ("fields", "expected", "words"),
    [
        ({"invisible_duration": "9s"}, 40011, "the invisibleTime is too small. min is 10000"),
        ({"invisible_duration": None}, 40011, "the invisibleTime is too small. min is 10000"),
        ({"invisible_duration": "43201s"}, 40011, "the invisibleTime is too large. max is 43200000"),
        ({"filter_expression": {"type": "TAG", "expression": "||"}}, 40010, "subString split error"),
        ({"batch_size": -1}, 40000, "batch size -1 must be 0 or more"),
        ({"group": {"name": "a b"}}, 40003,
         "the specified group[a b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ({"group": {"name": ""}}, 40003, "the specified group is blank"),
        ({"group": {"name": "CID_RMQ_SYS_x"}}, 40003, "cannot use system consumer group"),
    ],
)  # fmt: skip
def test_what_can_not_be_received_so(raw: RawClient, fields: dict[str, Any], expected: int, words: str) -> None:
    """Durations, filters and groups are checked as at the proxy."""
    (part,) = raw.parts("orders", "mail", **fields)
    assert (code(part), text(part)) == (expected, words)


def test_a_filter_that_is_no_sql(raw: RawClient) -> None:
    """It is refused at each receive."""
    for wrong in ("a >", "", "a = 1; DROP"):
        (part,) = raw.parts("orders", "mail", filter_expression={"type": "SQL", "expression": wrong})
        assert code(part) == 40010


def test_a_deadline_that_leaves_no_time(raw: RawClient) -> None:
    """Less than five seconds are too few; a longer poll is answered before its deadline."""
    (part,) = raw.parts("orders", "mail", timeout=4)
    assert code(part) == 40018
    # A machine that is busy misses a deadline; a server that knows of none misses all.
    for deadline in (7, 12, 17):
        with suppress(grpc.RpcError):  # missed
            parts = raw.parts("orders", "mail", timeout=deadline, long_polling_timeout="20s")
            break
    assert code(parts[0]) == 40401


def test_an_unknown_topic(new_server: NewServer) -> None:
    """It is said, not made."""
    with RawClient(new_server(auto_create=False).addresses[0]) as raw:
        (part,) = raw.parts("orders", "mail")
        assert code(part) == 40402


@pytest.mark.usefixtures("impatient")
def test_filters(raw: RawClient, engine: Engine, heard: list[TelemetryEvent]) -> None:
    """By tag and by properties; what one passes by, its group never gets, other groups do."""
    for tag, value in (("a", "1"), ("b", "2"), ("c", "3")):
        raw.send(message("orders", tag.encode(), {"n": value}, tag=tag))
    dispatch_all(engine)

    def receive(group: str, kind: str, expression: str) -> list[bytes]:
        found: list[bytes] = []
        while (got := raw.receive("orders", group, filter_expression={"type": kind, "expression": expression}))[1]:
            found += bodies(got[1])
        return sorted(found)

    assert receive("tags", "TAG", " a || c ") == [b"a", b"c"]
    assert receive("sql", "SQL", "n > 1 AND TAGS <> 'c'") == [b"b"]
    assert receive("all", "TAG", "") == [b"a", b"b", b"c"]
    assert receive("tags", "TAG", "*") == []
    assert [each.group for each in heard if isinstance(each, ClientFiltersDiffer)] == ["tags"]


# --- settling ----------------------------------------------------------------------------------------------------


def receive_one(raw: RawClient, group: str = "mail", **more: Any) -> dict[str, Any]:
    """Return the one message that comes."""
    _, (got,) = raw.receive("orders", group, **more)
    return dict(got)


def test_acks(raw: RawClient, engine: Engine) -> None:
    """Again is in order; by another group, of another topic, of garbage or too late isn't."""
    store(raw, engine, b"1", b"2")
    _, got = raw.receive("orders", "mail")
    one, two = map(handle_of, got)
    assert code(raw.ack("orders", "mail", one)) == code(raw.ack("orders", "mail", one)) == 20000
    for topic, group, handle in (
        ("orders", "others", two),
        ("others", "mail", two),
        ("orders", "mail", "garbage"),
        ("orders", "mail", ""),
        ("orders", "mail", two[:-3]),
    ):
        assert code(raw.ack(topic, group, handle)) == 40013
    mixed = raw.ack("orders", "mail", two, "garbage")
    assert code(mixed) == 30000
    assert [code(entry) for entry in mixed["entries"]] == [20000, 40013]
    assert statuses(engine) == [("consumed", 1)] * 2
    assert code(raw.ack("orders", "mail")) == 40000


def test_a_lease_that_ended(raw: RawClient, engine: Engine) -> None:
    """The message comes again as the next attempt; the handle of before settles nothing, and is told so."""
    store(raw, engine, b"1")
    first = receive_one(raw)
    lapse(engine)
    late = raw.ack("orders", "mail", handle_of(first))
    assert (code(late), text(late["entries"][0])) == (40013, "receipt handle is expired")
    second = receive_one(raw)
    assert second["system_properties"]["delivery_attempt"] == 2
    assert code(raw.ack("orders", "mail", handle_of(first))) == 40013
    assert code(raw.ack("orders", "mail", handle_of(second))) == 20000


def test_a_change_of_the_invisible_time(raw: RawClient, engine: Engine) -> None:
    """It gives a new handle, and the old one is none any more; 0 is at once; after an ack it is too late."""
    store(raw, engine, b"1")
    old = handle_of(receive_one(raw))
    changed = raw.change("orders", "mail", old, "20s")
    new = changed["receipt_handle"]
    assert code(changed) == 20000
    assert new != old
    refused = raw.change("orders", "mail", old, "20s")
    assert (code(refused), refused["receipt_handle"]) == (40013, old)
    long = raw.change("orders", "mail", new, "46800s")
    assert (code(long), long["receipt_handle"]) == (40011, new)
    assert code(raw.change("orders", "mail", new, "0s")) == 20000
    again = receive_one(raw)
    assert again["system_properties"]["delivery_attempt"] == 2
    assert code(raw.ack("orders", "mail", handle_of(again))) == 20000
    assert code(raw.change("orders", "mail", handle_of(again), "10s")) == 40013
    assert statuses(engine) == [("consumed", 2)]


def test_an_ack_before_a_change_of_old_and_new(raw: RawClient, engine: Engine) -> None:
    """Old and new handle in one ack: the new one counts."""
    store(raw, engine, b"1")
    old = handle_of(receive_one(raw))
    new = raw.change("orders", "mail", old, "20s")["receipt_handle"]
    both = raw.ack("orders", "mail", old, new)
    assert [code(both), *(code(entry) for entry in both["entries"])] == [30000, 40013, 20000]


@pytest.mark.usefixtures("impatient")
def test_the_last_attempt_parks(new_server: NewServer, engine: Engine) -> None:
    """After as many deliveries as the group allows, whether they lapsed or were given back."""
    server = new_server(groups={"mail": GroupOptions(max_attempts=2, retry_delays=(0,))})
    with RawClient(server.addresses[0]) as raw:
        store(raw, engine, b"1")
        for attempt in (1, 2):
            assert receive_one(raw)["system_properties"]["delivery_attempt"] == attempt
            lapse(engine)
        assert raw.receive("orders", "mail") == (40401, [])
        assert statuses(engine) == [("parked", 2)]


def test_a_push_consumer_gives_back(new_server: NewServer, engine: Engine) -> None:
    """Its change is a failure: counted, with its reason, and due after its time; the last one parks."""
    server = new_server(groups={"mail": GroupOptions(max_attempts=2)})
    with RawClient(server.addresses[0]) as raw:
        raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
        store(raw, engine, b"1")
        push: dict[str, Any] = {"auto_renew": True, "invisible_duration": None}
        got = receive_one(raw, **push)
        assert code(raw.change("orders", "mail", handle_of(got), "0s")) == 20000
        assert statuses(engine) == [("failed", 1)]
        again = receive_one(raw, **push)
        assert again["system_properties"]["delivery_attempt"] == 2
        assert code(raw.change("orders", "mail", handle_of(again), "1s")) == 20000
        assert statuses(engine) == [("parked", 2)]
        with engine.connect() as connection:
            reason = connection.execute(sql("SELECT last_error FROM outbox.consumer_message")).scalar_one()
        assert reason == f"client {raw.id} gave it back"


def test_an_impatient_client_waits(new_server: NewServer, engine: Engine) -> None:
    """Node's client gives back with 0 s whatever it was told: it waits as the group says."""
    server = new_server(groups={"mail": GroupOptions(retry_delays=(600,))})
    with RawClient(server.addresses[0]) as raw:
        settings = raw.consuming("mail", "orders", kind="PUSH_CONSUMER") | {"user_agent": {"language": "NODE_JS"}}
        raw.telemetry(settings)
        store(raw, engine, b"1")
        got = receive_one(raw, auto_renew=True, invisible_duration=None)
        assert code(raw.change("orders", "mail", handle_of(got), "0s")) == 20000
        with engine.connect() as connection:
            wait = connection.execute(
                sql("SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM outbox.consumer_message")
            ).scalar_one()
        assert 500 < wait < 700


def test_dead_letters(raw: RawClient, engine: Engine) -> None:
    """A client's last word parks the message; the same call again, or a late one, is answered with OK."""
    store(raw, engine, b"1")
    got = receive_one(raw)

    def forward(handle: str) -> int:
        named = {"group": {"name": "mail"}, "topic": {"name": "orders"}, "receipt_handle": handle}
        return code(raw.call("ForwardMessageToDeadLetterQueue", named | {"delivery_attempt": 3}))

    assert forward(handle_of(got)) == forward(handle_of(got)) == 20000
    assert statuses(engine) == [("parked", 1)]
    assert forward("garbage") == 40013


def test_a_client_that_ends(raw: RawClient, engine: Engine) -> None:
    """What it has taken is due again in a second, for others of its group."""
    raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
    store(raw, engine, b"1")
    receive_one(raw, auto_renew=True, invisible_duration=None)
    assert code(raw.call("NotifyClientTermination", {"group": {"name": "mail"}})) == 20000
    with RawClient(f"127.0.0.1:{raw.port}") as other:
        again = receive_one(other)
        assert again["system_properties"]["delivery_attempt"] == 2


def test_leases_are_renewed_while_their_client_is_there(
    raw: RawClient, engine: Engine, rocketmq: RocketmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same handle; not once it was settled, nor when its client is gone."""
    stream = raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
    store(raw, engine, b"1", b"2")
    push: dict[str, Any] = {"auto_renew": True, "invisible_duration": None}
    _, got = raw.receive("orders", "mail", **push)

    def renew() -> list[float]:
        rocketmq._in_loop(rocketmq._receiving.renewals.once())
        with engine.connect() as connection:
            left = "SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM outbox.consumer_message"
            return [float(seconds) for (seconds,) in connection.execute(sql(f"{left} WHERE status = 'taken'"))]

    with engine.begin() as connection:
        soon = "clock_timestamp() + interval '5 s'"
        connection.execute(sql(f"UPDATE outbox.consumer_message SET next_attempt_at = {soon} WHERE status = 'taken'"))
    assert all(50 < left <= 60 for left in renew())
    raw.ack("orders", "mail", handle_of(got[0]))
    assert len(renew()) == 1
    assert len(rocketmq._receiving.renewals._held["mail", "orders"]) == 1
    stream.cut()
    (client,) = rocketmq.clients._clients.values()
    wait_until(lambda: not client.streams, "the stream is gone")
    client.heard_at -= 60
    renew()
    assert rocketmq._receiving.renewals._held == {}
    assert code(raw.ack("orders", "mail", handle_of(got[1]))) == 20000


# --- order ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ordered(new_server: NewServer) -> RocketmqServer:
    """A server with a group that keeps the order of message groups."""
    return new_server(groups={"ordered": GroupOptions(fifo=True, max_attempts=2, retry_delays=(0,))})


@pytest.mark.usefixtures("impatient")
def test_a_group_that_keeps_the_order(ordered: RocketmqServer, engine: Engine) -> None:
    """Later ones of a message group wait until the earlier are settled; other groups go on."""
    with RawClient(ordered.addresses[0]) as raw:
        store(raw, engine, b"a1", b"a2", b"a3", message_group="a")
        _, first = raw.receive("orders", "ordered", batch_size=2)
        assert list(bodies(first)) == [b"a1", b"a2"]
        store(raw, engine, b"b1", message_group="b")
        _, other = raw.receive("orders", "ordered")
        assert list(bodies(other)) == [b"b1"]
        store(raw, engine, b"a4", b"a5", message_group="a")
        assert raw.receive("orders", "ordered")[0] == 40401
        for each in first:
            raw.ack("orders", "ordered", handle_of(each))
        # What has waited comes together.
        _, others = raw.receive("orders", "ordered")
        assert list(bodies(others)) == [b"a3", b"a4", b"a5"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["PUSH_CONSUMER", "SIMPLE_CONSUMER"])
def test_those_behind_a_change_of_the_invisible_time(ordered: RocketmqServer, engine: Engine, kind: str) -> None:
    """A push consumer's is a failure, behind which they wait at no attempt's cost; another one's is only more time."""
    with RawClient(ordered.addresses[0]) as raw:
        raw.telemetry(raw.consuming("ordered", "orders", kind=kind))
        store(raw, engine, b"a1", b"a2", message_group="a")
        _, (first, second) = raw.receive("orders", "ordered")
        assert code(raw.change("orders", "ordered", handle_of(first), "600s")) == 20000
        if kind == "SIMPLE_CONSUMER":
            assert code(raw.ack("orders", "ordered", handle_of(second))) == 20000
            assert statuses(engine) == [("consumed", 1), ("taken", 0)]
        else:
            assert code(raw.ack("orders", "ordered", handle_of(second))) == 40013
            assert statuses(engine) == [("failed", 1), ("waiting", 0)]


@pytest.mark.usefixtures("impatient")
def test_those_behind_a_dead_letter_stay_with_their_client(ordered: RocketmqServer, engine: Engine) -> None:
    """It holds nothing back: clients that keep the order go on with the next one that they have."""
    with RawClient(ordered.addresses[0]) as raw:
        store(raw, engine, b"a1", b"a2", message_group="a")
        _, (first, second) = raw.receive("orders", "ordered")
        named = {"group": {"name": "ordered"}, "topic": {"name": "orders"}, "receipt_handle": handle_of(first)}
        assert code(raw.call("ForwardMessageToDeadLetterQueue", named)) == 20000
        assert code(raw.ack("orders", "ordered", handle_of(second))) == 20000
        assert statuses(engine) == [("consumed", 1), ("parked", 1)]


@pytest.mark.usefixtures("impatient")
def test_the_same_attempt_again(ordered: RocketmqServer, engine: Engine) -> None:
    """A receive that is repeated under its id has the same messages, under new handles, at the same attempt."""
    with RawClient(ordered.addresses[0]) as raw:
        store(raw, engine, b"a1", b"a2", message_group="a")
        _, first = raw.receive("orders", "ordered", attempt_id="A")
        _, again = raw.receive("orders", "ordered", attempt_id="A")
        assert list(bodies(again)) == list(bodies(first)) == [b"a1", b"a2"]
        assert [each["system_properties"]["delivery_attempt"] for each in again] == [1, 1]
        assert {*map(handle_of, again)}.isdisjoint(map(handle_of, first))
        assert raw.receive("orders", "ordered", attempt_id="B")[0] == 40401
        assert code(raw.ack("orders", "ordered", *map(handle_of, again))) == 20000


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "other", [{}, {"batch_size": 1}, {"filter_expression": {"type": "TAG", "expression": "t || other"}}]
)
def test_an_attempt_is_of_one_client_and_one_kind(ordered: RocketmqServer, engine: Engine, other: Any) -> None:
    """Under its id another client, another batch size or filter takes anew: the leases of before stay as they are."""
    with RawClient(ordered.addresses[0]) as raw, RawClient(ordered.addresses[0]) as stranger:
        store(raw, engine, b"a1", b"a2", message_group="a", tag="t")
        _, first = raw.receive("orders", "ordered", attempt_id="A")
        assert (raw if other else stranger).receive("orders", "ordered", attempt_id="A", **other) == (40401, [])
        assert code(raw.ack("orders", "ordered", *map(handle_of, first))) == 20000


# --- native and remote -----------------------------------------------------------------------------------------------


def test_what_python_sends(ordered: RocketmqServer, engine: Engine) -> None:
    """Its key is one of the keys, or the message group of a group that keeps the order; headers are properties."""
    outbox = Outbox(engine, settings=Settings(compress_above=10))
    send_each(outbox, "orders", {"n": "x" * 1000}, key="42", tag="new", headers={"shop": "nord"})
    dispatch_all(engine)
    with RawClient(ordered.addresses[0]) as raw:
        got = receive_one(raw)
        assert body_of(got) == b'{"n":"' + b"x" * 1000 + b'"}'
        assert got["user_properties"] == {"shop": "nord"}
        system = got["system_properties"]
        assert (system["tag"], system["keys"], system["message_type"]) == ("new", ["42"], "NORMAL")
        assert "message_group" not in system
        assert system["body_encoding"] == "IDENTITY"
        system = receive_one(raw, "ordered")["system_properties"]
        assert (system["message_group"], system["message_type"]) == ("42", "FIFO")
        assert "keys" not in system


def test_bodies_of_gzip_pass_through(raw: RawClient, engine: Engine) -> None:
    """The same bytes, and the same encoding."""
    sent = gzip.compress(b"x" * 1000)
    store(raw, engine, sent, body_encoding="GZIP")
    got = receive_one(raw)
    assert (body_of(got), got["system_properties"]["body_encoding"]) == (sent, "GZIP")


def test_a_committed_half_and_a_delayed_message(raw: RawClient, engine: Engine) -> None:
    """Their types are those that they were sent with."""
    entry = raw.send(message("orders", b"tx", message_type="TRANSACTION"))["entries"][0]
    raw.end("orders", entry["transaction_id"], "COMMIT")
    raw.send(message("orders", b"late", delivery_timestamp="2020-01-01T00:00:00Z"))
    dispatch_all(engine)
    _, got = raw.receive("orders", "mail")
    types = {body_of(each): each["system_properties"]["message_type"] for each in got}
    assert types == {b"tx": "TRANSACTION", b"late": "DELAY"}


def test_a_group_with_a_handler_is_refused(new_server: NewServer, engine: Engine) -> None:
    """A name can't mean a handler of this application and clients too."""
    outbox = Outbox(engine, settings=Settings())
    outbox.consumer("orders", group="mail")(lambda message, session: None)
    with RawClient(new_server(outbox=outbox).addresses[0]) as raw:
        (part,) = raw.parts("orders", "mail")
        assert code(part) == 40003


# --- what dies -------------------------------------------------------------------------------------------------------


def test_a_handle_is_taken_by_any_server(new_server: NewServer, engine: Engine) -> None:
    """The server that has handed a message out may be gone."""
    first, second = new_server(), new_server()
    with RawClient(first.addresses[0]) as raw, RawClient(second.addresses[0]) as other:
        store(raw, engine, b"1", b"2")
        _, got = raw.receive("orders", "mail")
        first.stop()
        assert code(other.ack("orders", "mail", handle_of(got[0]))) == 20000
        assert code(other.change("orders", "mail", handle_of(got[1]), "0s")) == 20000
        assert body_of(receive_one(other)) == body_of(got[1])


def test_a_stop_answers_polls(rocketmq: RocketmqServer, raw: RawClient) -> None:
    """A poll that waits is answered, not cut off."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(raw.receive("orders", "mail", long_polling_timeout="20s")))
    thread.start()
    wait_until(lambda: any(not each.is_idle for each in rocketmq._receiving._takers.values()), "it waits")
    rocketmq.stop()
    thread.join()
    assert got == [(40401, [])]


def test_a_poll_whose_client_goes_away(raw: RawClient, engine: Engine, rocketmq: RocketmqServer) -> None:
    """It takes nothing from then on."""
    with RawClient(rocketmq.addresses[0]) as other:
        call = other._calls["ReceiveMessage"](_request("orders", "mail"), timeout=30, metadata=other.metadata({}))
        wait_until(lambda: rocketmq._receiving._takers, "it waits")
        call.cancel()
        taker = next(iter(rocketmq._receiving._takers.values()))
        wait_until(lambda: all(poll.ended for poll in taker._polls), "its poll has ended")
        store(other, engine, b"1")
        assert receive_one(other)["system_properties"]["delivery_attempt"] in {1, 2}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("attempt", [None, "A"])
def test_what_no_client_has_seen_is_no_attempt(
    attempt: str | None, new_server: NewServer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for a poll that has ended meanwhile, a message is due again as it was; it isn't parked for that."""
    taken, original = list[Any](), SharedTaker._take

    def take(self: SharedTaker, poll: Poll, connection: Connection) -> list[Any]:
        found = original(self, poll, connection)
        poll.ended = bool(found) and len(taken) < 2
        taken.extend(found)
        return found

    monkeypatch.setattr(SharedTaker, "_take", take)
    server = new_server(groups={"mail": GroupOptions(max_attempts=1, fifo=attempt is not None)})
    with RawClient(server.addresses[0]) as raw:
        store(raw, engine, b"1", message_group="g")
        for number in range(2):
            named = {} if attempt is None else {"attempt_id": f"{attempt}{number}"}
            assert raw.receive("orders", "mail", **named) == (40401, [])
        assert receive_one(raw)["system_properties"]["delivery_attempt"] == 1
    assert len(taken) == 3


async def test_a_poll_that_comes_as_the_last_take_ends() -> None:
    """It is served at once: it has a take of its own."""

    class Ready:
        """Tables whose takes are done at once."""

        async def lend(self, _: object) -> list[str]:
            return ["a message"]

    taker = SharedTaker(cast("Any", Ready()), cast("Any", None), None)
    first = asyncio.create_task(taker.poll(Poll("c", 1, 30, None), 60))
    await asyncio.sleep(0)  # its take is to begin
    second = asyncio.create_task(taker.poll(Poll("c", 1, 30, None), 60))
    got: list[Any] = [await asyncio.wait_for(each, 5) for each in (first, second)]
    assert got == [["a message"], ["a message"]]


async def test_each_attempt_is_looked_at_as_it_comes() -> None:
    """It may be one that is repeated, since its answer was lost: no news tells of its messages, however many wait."""

    class Repeated:
        """Tables of which the take of attempt A has messages, and no other; its news never come by themselves."""

        async def lend(self, work: Any) -> list[str]:
            (poll,) = work.args
            looked.append(poll.take_id)
            return ["again"] if poll.take_id == "A" else []

        async def pause(self, news: asyncio.Event) -> None:
            await news.wait()

    looked: list[str | None] = []
    taker = SharedTaker(cast("Any", Repeated()), cast("Any", None), None)

    def poll(take_id: str | None) -> asyncio.Task[Any]:
        return asyncio.create_task(taker.poll(Poll("c", 1, 30, take_id), 60))

    others = [poll(take_id) for take_id in (None, "B", "C", None, "D", "E")]
    repeated = [poll("A"), poll("A")]
    got: list[Any] = [await asyncio.wait_for(each, 5) for each in repeated]
    later: Any = await asyncio.wait_for(poll("A"), 5)
    assert [*got, later] == [["again"]] * 3
    assert {"A", "B", "C", "D", "E"} <= set(looked)
    taker.end()
    assert await asyncio.gather(*others) == [[]] * 6


async def test_takes_that_find_nothing_together() -> None:
    """One of them looks again for the polls that are left."""

    class Slow:
        """Tables of which each take is done when the test says so."""

        def __init__(self) -> None:
            self.takes: list[asyncio.Future[list[str]]] = []

        def lend(self, _: object) -> asyncio.Future[list[str]]:
            self.takes.append(asyncio.get_running_loop().create_future())
            return self.takes[-1]

        async def pause(self, _: object) -> None: ...

    tables = Slow()
    taker = SharedTaker(cast("Any", tables), cast("Any", None), None)
    polls = [asyncio.create_task(taker.poll(Poll("c", 1, 30, None), 60)) for _ in range(3)]

    async def taking(number: int) -> None:
        while len(tables.takes) < number:
            await asyncio.sleep(0)

    await asyncio.wait_for(taking(1), 5)
    tables.takes[0].set_result(["first"])
    await asyncio.wait_for(taking(3), 5)
    for take in tables.takes[1:]:
        take.set_result([])
    await asyncio.wait_for(taking(4), 5)
    tables.takes[3].set_result(["later"])
    await asyncio.wait_for(taking(5), 5)
    tables.takes[4].set_result(["last"])
    got: list[Any] = [await asyncio.wait_for(each, 5) for each in polls]
    assert sorted(got) == [["first"], ["last"], ["later"]]


def _request(topic: str, group: str) -> Any:
    from google.protobuf import json_format

    from outbox.rocketmq.wire import WIRE

    named = {"group": {"name": group}, "message_queue": {"topic": {"name": topic}}, "batch_size": 1}
    waits = {"invisible_duration": "30s", "long_polling_timeout": "20s"}
    return json_format.ParseDict(named | waits, WIRE.classes["ReceiveMessageRequest"]())


def test_postgresql_is_restarted_under_polls(raw: RawClient, engine: Engine) -> None:
    """A poll that fails by that says so, and the next one takes."""
    store(raw, engine, b"1")
    receive_one(raw)
    with engine.begin() as connection:
        connection.execute(
            sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outbox-rocketmq%'")
        )
    store(raw, engine, b"2")
    got: list[Any] = []
    for _ in range(3):
        got = raw.receive("orders", "mail")[1]
        if got:
            break
    assert list(bodies(got)) == [b"2"]
    assert code(raw.ack("orders", "mail", handle_of(got[0]))) == 20000


def test_polling_times() -> None:
    """As long as asked for, from 5 to 20 s, and shorter than its call; Go's client asks for none."""
    from outbox.rocketmq.wire import new

    def polling(seconds: int | None, remaining: float | None) -> float:
        request = new("ReceiveMessageRequest")
        if seconds is not None:
            request.long_polling_timeout.seconds = seconds
        return receiving._polling(request, remaining)

    assert [polling(1, 60), polling(12, 60), polling(60, 60), polling(None, 60)] == [5, 12, 20, 20]
    assert [polling(20, 12), polling(None, 9)] == [10.5, 7.5]
