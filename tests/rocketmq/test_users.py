"""Requests are signed by users, who may do what their patterns say; all else is refused in the body."""

from __future__ import annotations

import hashlib
import hmac
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import text as sql

from outbox import Settings
from outbox.errors import InvalidSettings
from outbox.rocketmq.mapping import recall_handle
from outbox.rocketmq.options import GroupOptions, RocketmqOptions, UserOptions
from outbox.rocketmq.server import RocketmqServer
from outbox.telemetry.events import ClientRefused
from outbox.telemetry.hooks import TelemetryEvent
from tests.kit.passes import dispatch_all
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, code, handle_of, message, text

SHOP = UserOptions("s3cret", send=("orders", "order-*"), receive=("orders",), groups=("mail*",))
SHOP_RIGHTS = SHOP.send, SHOP.receive, SHOP.groups
READER = UserOptions("other", receive=("*",), groups=("*",))


@pytest.fixture
def guarded(new_server: NewServer) -> RocketmqServer:
    """A server with two users."""
    return new_server(users={"shop": SHOP, "reader": READER})


def header(access_key: str, secret: str, moment: str, change: Any = str) -> dict[str, str]:
    """Return the metadata of a signed request."""
    signature = hmac.new(secret.encode(), moment.encode(), hashlib.sha1).hexdigest()
    signed = f"Credential={access_key}, SignedHeaders=x-mq-date-time, Signature={change(signature)}"
    return {"authorization": f"MQv2-HMAC-SHA1 {signed}", "x-mq-date-time": moment}


def test_signatures(guarded: RocketmqServer) -> None:
    """Of any date, in either case of hex, with the region that Go's client adds; and none but right ones."""
    with RawClient(guarded.addresses[0]) as raw:
        for good in (
            header("shop", "s3cret", "20260101T000000Z"),
            header("shop", "s3cret", "20200101T000000Z", str.upper),
            header("shop//Rocketmq", "s3cret", "x"),
        ):
            assert code(raw.send(message("orders"), **good)) == 20000
        for bad, words in (
            (header("guest", "s3cret", "x"), "User:guest is not found."),
            (header("shop", "wrong", "x"), "check signature failed."),
            (header("shop", "s3cret", "x") | {"x-mq-date-time": "y"}, "check signature failed."),
            ({}, "username cannot be null."),
            (header("", "s3cret", "x"), "username cannot be null."),
            (header("//Rocketmq", "s3cret", "x"), "username cannot be null."),
            ({"authorization": "Basic x"}, "authentication header is incorrect."),
            (header("shop", "s3cret", "x", lambda _: "zz"), "authentication header is incorrect."),
        ):
            answer = raw.send(message("orders"), **bad)
            assert (code(answer), text(answer)) == (40100, words)


def test_every_call_is_guarded(guarded: RocketmqServer, heard: list[TelemetryEvent]) -> None:
    """Also the stream, by a command; each refusal is told, without the secret."""
    with RawClient(guarded.addresses[0]) as raw:
        topic = {"topic": {"name": "orders"}}
        for call in ("QueryRoute", "Heartbeat", "SendMessage", "EndTransaction", "QueryAssignment", "RecallMessage",
                     "AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue",
                     "NotifyClientTermination"):  # fmt: skip
            answer = raw.call(
                call, topic if call not in {"Heartbeat", "SendMessage", "NotifyClientTermination"} else {}
            )
            assert (call, code(answer)) == (call, 40100)
        assert code(raw.parts("orders", "mail")[0]) == 40100
        stream = raw.telemetry()
        command = stream.get()
        assert command is not None
        assert code(command) == 40100
        assert stream.get() is None
    refused = [each for each in heard if isinstance(each, ClientRefused)]
    assert len(refused) == 12
    assert "s3cret" not in str(refused)


def test_rights(guarded: RocketmqServer) -> None:
    """By topic to send and to receive, and by group."""
    with RawClient(guarded.addresses[0], "shop", "s3cret") as shop, RawClient(
        guarded.addresses[0], "reader", "other"
    ) as reader:  # fmt: skip
        assert code(shop.send(message("order-7"))) == 20000
        forbidden = shop.send(message("others"))
        assert (code(forbidden), text(forbidden)) == (40300, "the user may not send to topic others")
        assert code(reader.send(message("orders"))) == 40300
        assert code(shop.parts("orders", "stock")[0]) == 40300
        assert code(shop.parts("order-7", "mail")[0]) == 40300
        assert code(shop.ack("order-7", "mail", "x")) == 40300
        assert code(shop.change("order-7", "mail", "x", "1s")) == 40300
        assert code(shop.end("others", "x", "COMMIT")) == 40300
        assert code(shop.call("RecallMessage", {"topic": {"name": "others"}})) == 40300
        assert code(shop.call("QueryRoute", {"topic": {"name": "others"}})) == 40300
        assert code(reader.call("QueryRoute", {"topic": {"name": "others"}})) == 20000
        assignment = {"topic": {"name": "orders"}, "group": {"name": "stock"}}
        assert code(shop.call("QueryAssignment", assignment)) == 40300


def test_settings_and_heartbeats_have_rights(new_server: NewServer, heard: list[TelemetryEvent]) -> None:
    """By those for another's group a client learns nothing of it, is none of its members, and holds up no deletion."""
    stock = UserOptions("stock", send=("stock",), receive=("stock",), groups=("stock",))
    groups = {"mail": GroupOptions(fifo=True, max_attempts=3, retry_delays=(7.0,))}
    server = new_server(users={"shop": SHOP, "stock": stock}, groups=groups)
    with RawClient(server.addresses[0], "stock", "stock") as raw:
        command = raw.telemetry().send({"settings": raw.consuming("mail", "orders", "stock")}).get()
        assert command is not None
        assert (code(command), text(command)) == (40300, "the user may not consume for group mail")
        assert command["settings"]["backoff_policy"]["max_attempts"] == 17
        assert not command["settings"]["subscription"]["fifo"]
        beaten = raw.call("Heartbeat", {"group": {"name": "mail"}, "client_type": "SIMPLE_CONSUMER"})
        assert code(beaten) == 40300
        ((group, topic),) = {(each["group"], each["topic"]) for each in server.clients.handlers()}
        assert (group, topic) == (None, "")
        raw.telemetry(raw.consuming("stock", "orders", "stock"))
        raw.telemetry(raw.producing("orders"))
        assert "orders" not in {each["topic"] for each in server.clients.handlers()}
    assert {each.call for each in heard if isinstance(each, ClientRefused)} == {"Telemetry", "Heartbeat"}


def test_halves_are_shown_to_those_that_may_send_alone(guarded: RocketmqServer) -> None:
    """A client that names a topic in its settings, and may not send to it, isn't asked about its halves."""
    with RawClient(guarded.addresses[0], "reader", "other") as reader:
        reader.telemetry(reader.producing("orders"))
        assert guarded.clients.producers("orders", reader.id) == []
        assert guarded.clients.topics_with_producers() == set()
    with RawClient(guarded.addresses[0], "shop", "s3cret") as shop:
        shop.telemetry(shop.producing("orders", "others"))
        assert guarded.clients.topics_with_producers() == {"orders"}


def test_a_client_id_is_of_one_user(guarded: RocketmqServer) -> None:
    """What another user does under the same client id isn't taken for its: it is shown no half by that."""
    with RawClient(guarded.addresses[0], "reader", "other") as reader, RawClient(
        guarded.addresses[0], "shop", "s3cret"
    ) as shop:  # fmt: skip
        reader.id = shop.id
        reader.telemetry(reader.producing("orders"))
        assert code(shop.send(message("orders", message_type="TRANSACTION"))) == 20000
        assert guarded.clients.producers("orders", shop.id) == []
        assert guarded.clients.topics_with_producers() == set()


def test_a_goodbye_is_of_one_user(new_server: NewServer, engine: Engine) -> None:
    """Another user that says it under a client's id ends nothing of that client's."""
    server = new_server(users={"shop": SHOP, "twin": UserOptions("s3cret", None, *SHOP_RIGHTS)})
    address, goodbye = server.addresses[0], {"group": {"name": "mail"}}
    with RawClient(address, "shop", "s3cret") as shop, RawClient(address, "twin", "s3cret") as twin:
        twin.id = shop.id
        shop.send(message("orders"))
        dispatch_all(engine)
        _, (got,) = shop.receive("orders", "mail", invisible_duration="3600s")
        assert code(twin.call("NotifyClientTermination", goodbye)) == 20000
        assert lease_left(engine) > 3000
        assert code(shop.ack("orders", "mail", handle_of(got))) == 20000


def lease_left(engine: Engine) -> float:
    """Return for how many seconds the one message that is taken is so."""
    left = "SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM outbox.consumer_message"
    with engine.connect() as connection:
        return float(connection.execute(sql(f"{left} WHERE status = 'taken'")).scalar_one())


@pytest.mark.parametrize("act", ["Heartbeat", "Telemetry", "AckMessage"])
def test_a_goodbye_does_not_stick(act: str, rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """A client that goes on after one, which another may have said, is there again, and its leases are renewed."""
    stream = raw.telemetry(raw.consuming("mail", "orders", kind="PUSH_CONSUMER"))
    raw.send(message("orders"))
    dispatch_all(engine)
    assert raw.receive("orders", "mail", auto_renew=True, invisible_duration=None)[0] == 20000
    (client,) = rocketmq.clients._clients.values()
    rocketmq.clients.leave(client)
    rocketmq._in_loop(rocketmq._receiving.renewals.once())
    with engine.begin() as connection:
        soon = "UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() + interval '20 s'"
        connection.execute(sql(soon))
    rocketmq._in_loop(rocketmq._receiving.renewals.once())
    assert lease_left(engine) <= 20
    if act == "Telemetry":
        stream.send({"settings": raw.consuming("mail", "orders", kind="PUSH_CONSUMER")}).get()
    else:
        raw.call(act, {"group": {"name": "mail"}} | ({"topic": {"name": "orders"}} if act == "AckMessage" else {}))
    assert client.is_there
    rocketmq._in_loop(rocketmq._receiving.renewals.once())
    assert lease_left(engine) > 20


def test_a_question_is_answered_by_those_that_may(new_server: NewServer, engine: Engine) -> None:
    """A user that may send to another topic doesn't answer for this one, whatever topic it names."""
    pay = UserOptions("pay", send=("paid",))
    server = new_server(Settings(immunity=0, check_interval=0.3), users={"pay": pay, "shop": SHOP})
    with RawClient(server.addresses[0], "pay", "pay") as raw, RawClient(
        server.addresses[0], "shop", "s3cret"
    ) as shop:  # fmt: skip
        stream = raw.telemetry(raw.producing("paid"))
        transaction = raw.send(message("paid", message_type="TRANSACTION"))["entries"][0]["transaction_id"]
        assert stream.get() is not None
        assert code(shop.end("orders", transaction, "COMMIT")) == 40008
        assert code(raw.end("paid", transaction, "ROLLBACK")) == 20000
    with engine.connect() as connection:
        assert connection.execute(sql("SELECT resolution FROM outbox.op_message")).scalars().all() == ["rollback"]


def test_a_recall_is_of_the_topic_that_is_named(new_server: NewServer, engine: Engine) -> None:
    """A handle has no secret; one that names another topic than its message's recalls nothing."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    server = new_server(users={"pay": UserOptions("pay", send=("paid",)), "shop": SHOP})
    with RawClient(server.addresses[0], "pay", "pay") as raw, RawClient(
        server.addresses[0], "shop", "s3cret"
    ) as shop:  # fmt: skip
        assert code(raw.send(message("paid", delivery_timestamp=at))) == 20000
        with engine.connect() as connection:
            id_ = connection.execute(sql("SELECT id FROM outbox.half_message WHERE topic = 'paid'")).scalar_one()
        for handle in (recall_handle("orders", id_), recall_handle("orders", "x")):  # type: ignore[arg-type]
            refused = shop.call("RecallMessage", {"topic": {"name": "orders"}, "recall_handle": handle})
            assert (code(refused), text(refused).startswith("recall")) == (50001, True)
    with engine.connect() as connection:
        assert not connection.execute(
            sql("SELECT count(*) FROM outbox.op_message WHERE resolution = 'rollback'")
        ).scalar_one()


# --- the file ----------------------------------------------------------------------------------------------------


def written(folder: Path, text_: str) -> RocketmqOptions:
    """Return the options of a file."""
    path = folder / "rocketmq.toml"
    path.write_text(text_)
    return RocketmqOptions.of_file(path)


def test_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics, groups and users; a secret may be in the environment, and is shown nowhere."""
    monkeypatch.setenv("SHOP_SECRET", "from-the-environment")
    options = written(
        tmp_path,
        """
        [rocketmq]
        auto_create = true
        [rocketmq.topics.orders]
        type = "FIFO"
        queues = 4
        [rocketmq.groups.mail]
        fifo = true
        max_attempts = 3
        retry_delays = ["1s", "1m"]
        start = "now"
        [rocketmq.users.shop]
        secret_env = "SHOP_SECRET"
        send = ["orders"]
        [rocketmq.users.other]
        secret = "written-here"
        """,
    )
    assert (options.auto_create, options.topic("orders").type, options.topic("orders").queues) == (True, "FIFO", 4)
    group = options.group("mail")
    assert (group.fifo, group.max_attempts, group.retry_delays, group.start) == (True, 3, (1.0, 60.0), "now")
    assert options.group("any").max_attempts == 17
    secrets = {name: user.secret for name, user in options.users.items()}
    assert secrets == {"shop": "from-the-environment", "other": "written-here"}
    assert "written-here" not in repr(options)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[rocketmq]\nauto_creat = true", "rocketmq.auto_creat is unknown; did you mean auto_create"),
        ('[rocketmq.topics.a]\ntype = "LITE"', "rocketmq.topics.a.type = 'LITE' must be one of MIXED"),
        ("[rocketmq.groups.a]\nmax_attempts = 0", "must be from 1 to 1000"),
        ("[rocketmq.users.a]", "rocketmq.users.a: it has neither secret nor secret_env"),
        ('[rocketmq.users.a]\nsecret_env = "NOT_SET"', "the variable NOT_SET is not set"),
        ('[rocketmq.users.a]\nsecret = "x"\nsecret_env = "Y"', "give one of them"),
        ("[rocketmq", "can't be read as TOML"),
    ],
)
def test_a_file_that_can_not_work(tmp_path: Path, lines: str, words: str) -> None:
    """The message names the field and the mend."""
    with pytest.raises(InvalidSettings, match=words.replace("[", r"\[")):
        written(tmp_path, lines)
