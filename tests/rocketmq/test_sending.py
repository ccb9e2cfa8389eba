"""What clients send is stored once, as they sent it, or refused with the codes and texts of RocketMQ's proxy."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
import zlib
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Message, Outbox, Settings
from outbox.rocketmq import sending
from outbox.rocketmq.mapping import half_ids
from outbox.rocketmq.options import RocketmqOptions, UserOptions
from outbox.rocketmq.server import RocketmqServer
from outbox.rocketmq.tables import Tables
from outbox.telemetry.events import ClientCallFailed
from outbox.testing import drain
from tests.kit.passes import dispatch_all
from tests.rocketmq.conftest import NewServer
from tests.rocketmq.raw import RawClient, client_id, code, message
from tests.rocketmq.raw import text as text_of


def stored(engine: Engine) -> list[Any]:
    """Return the half messages."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT * FROM outbox.half_message ORDER BY born_at, id")))


def ops(engine: Engine) -> int:
    """Return how many halves are decided."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outbox.op_message")).scalar_one())


def test_a_message_is_stored_as_it_was_sent(raw: RawClient, engine: Engine) -> None:
    """Tag, group, properties are tag, key, headers; all else is in headers of the protocol."""
    sent = message("orders", b"\x00\xff", {"shop": "nord", "ü": "ß"}, tag="new", keys=["a b", "c"], message_group="42",
                   message_type="FIFO", born_host="host-1", trace_context="00-1")  # fmt: skip
    answer = raw.send(sent)
    assert code(answer) == 20000
    (entry,) = answer["entries"]
    assert entry["message_id"] == entry["transaction_id"] == sent["system_properties"]["message_id"]
    (half,) = stored(engine)
    assert (half.topic, half.tag, half.key, bytes(half.body)) == ("orders", "new", "42", b"\x00\xff")
    assert half.content_type == "application/octet-stream"
    headers = dict(half.headers)
    assert headers.pop("rocketmq-born-at").isdecimal()
    assert json.loads(headers.pop("rocketmq-keys")) == ["a b", "c"]
    assert headers == {
        "shop": "nord",
        "ü": "ß",
        "rocketmq-id": entry["message_id"],
        "rocketmq-client": raw.id,
        "rocketmq-type": "FIFO",
        "rocketmq-born-host": "host-1",
        "rocketmq-trace": "00-1",
    }
    assert ops(engine) == 1


def test_a_python_handler_gets_it(raw: RawClient, engine: Engine) -> None:
    """What a client sends a consumer in Python gets: the body by the content type of the topic, gzip opened."""
    got: list[Message] = []
    outbox = Outbox(engine, settings=Settings())
    outbox.consumer("orders", group="mail")(lambda message, session: got.append(message))
    raw.send(message("orders", gzip.compress(b"large " * 1000), tag="new", body_encoding="GZIP"))
    drain(outbox)
    assert [(each.raw, each.tag) for each in got] == [(b"large " * 1000, "new")]


def test_the_same_id_again_is_no_second_message(raw: RawClient, engine: Engine) -> None:
    """A retry after a lost answer gets the same answer; the same id in another topic is another message."""
    sent = message("orders", message_id=client_id())
    assert [code(raw.send(sent)) for _ in range(3)] == [20000] * 3
    assert len(stored(engine)) == ops(engine) == 1
    raw.send(message("others", message_id=sent["system_properties"]["message_id"]))
    assert len(stored(engine)) == 2


def test_ids_are_of_their_client(raw: RawClient, rocketmq: RocketmqServer, engine: Engine) -> None:
    """Clients in containers make the same ids; each has its own message, under its own id, when it comes out too."""
    sent = client_id()
    with RawClient(rocketmq.addresses[0]) as other:
        answers = [each.send(message("orders", each.id.encode(), message_id=sent)) for each in (raw, other, raw, other)]
        assert [code(answer) for answer in answers] == [20000] * 4
        assert sorted(bytes(half.body) for half in stored(engine)) == sorted([raw.id.encode(), other.id.encode()])
        dispatch_all(engine)
        _, got = other.receive("orders", "mail")
    assert [each["system_properties"]["message_id"] for each in got] == [sent] * 2


def test_ids_are_of_their_user(new_server: NewServer, engine: Engine) -> None:
    """A user's client that calls itself as another's does swallows none of its messages."""
    users = {name: UserOptions(name, send=("*",)) for name in ("one", "two")}
    address, sent = new_server(users=users).addresses[0], client_id()
    with RawClient(address, "one", "one") as one, RawClient(address, "two", "two") as two:
        two.id = one.id
        for raw, body in ((one, b"1"), (two, b"2")):
            assert code(raw.send(message("orders", body, message_id=sent))) == 20000
    assert sorted(bytes(half.body) for half in stored(engine)) == [b"1", b"2"]


@pytest.mark.parametrize("compress_above", [0, 10])
@pytest.mark.parametrize(
    ("what", "body", "fields"),
    [
        ("body", b"another", {}),
        ("body", b"x" * 99 + b"y", {}),
        ("type", b"x" * 100, {"message_type": "TRANSACTION"}),
        ("type", b"x" * 100, {"delivery_timestamp": "2020-01-01T00:00:00Z"}),
        ("tag", b"x" * 100, {"tag": "t"}),
    ],
    ids=["a body", "its last byte", "a half", "a delay", "a tag"],
)
def test_another_message_under_an_id_is_refused(
    new_server: NewServer, engine: Engine, compress_above: int, what: str, body: bytes, fields: dict[str, Any]
) -> None:
    """An OK would say that it is stored; in one request too. What is really sent again is told so, before and after."""
    with RawClient(new_server(Settings(compress_above=compress_above)).addresses[0]) as raw:
        id_ = client_id()
        first, other = message("orders", b"x" * 100, message_id=id_), message("orders", body, message_id=id_, **fields)
        together = raw.send(first, other)
        assert [code(entry) for entry in together["entries"]] == [20000, 40009]
        alone = raw.send(other)
        words = f"message {id_} of topic orders was sent before with another {what}; give it an id of its own"
        assert (code(alone), text_of(alone["entries"][0])) == (40009, words)
        assert code(raw.send(first)) == 20000
    assert len(stored(engine)) == ops(engine) == 1


def test_a_batch_has_an_entry_each(raw: RawClient, engine: Engine) -> None:
    """Several messages in one request are stored in its order, also one that is there twice."""
    again = message("orders", b"2")
    answer = raw.send(message("orders", b"1"), again, again, message("orders", b"3"))
    assert len(answer["entries"]) == 4
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT body FROM outbox.half_message h JOIN outbox.op_message o ON o.half_id = h.id ORDER BY sequence"
            )
        )
        assert [bytes(body) for (body,) in rows] == [b"1", b"2", b"3"]


def test_what_comes_together_is_one_transaction(engine: Engine) -> None:
    """Messages that wait in the same moment commit together, and each is answered after that."""
    tables = Tables(Outbox(engine, settings=Settings()), RocketmqOptions())
    tables.declare(["orders"])
    items = [sending.SendItem("sender", "orders", _parsed(message("orders")), 1) for _ in range(20)]

    async def send_at_once() -> None:
        commits = sending.SendCalls(tables, hand_over=lambda *_: None).commits
        await asyncio.gather(*[commits.write([item]) for item in items])

    try:
        asyncio.run(send_at_once())
    finally:
        tables.end(60)
    with engine.connect() as connection:
        transactions = connection.execute(text("SELECT count(DISTINCT xid) FROM outbox.op_message")).scalar_one()
    assert {each.id for each in stored(engine)} == {item.half_id for item in items}
    assert (len(items), transactions) == (20, 1)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("no id", {"message_id": None}, 40009, "message id cannot be empty"),
    ("a blank id", {"message_id": "  "}, 40009, "message id cannot be empty"),
    ("an empty body", {"body": b""}, 41302, "message body cannot be empty"),
    ("a large body", {"body": b"x" * 4194305}, 41301, "message body cannot exceed the max 4194304"),
    ("a tag with a bar", {"tag": "a|b"}, 40004, "tag cannot contain '|'"),
    ("a blank tag", {"tag": " "}, 40004, "tag cannot be the char sequence of whitespace"),
    ("a control character in the tag", {"tag": "a\x01"}, 40004, "tag cannot contain control character"),
    ("a blank key", {"keys": [" "]}, 40005, "key cannot be the char sequence of whitespace"),
    ("a control character in a key", {"keys": ["\x7f"]}, 40005, "key cannot contain control character"),
    ("a group of 64 bytes", {"message_group": "g" * 64}, 40006, "message group exceed the max size 64"),
    ("a blank group", {"message_group": "\t "}, 40006, "message group cannot be the char sequence of whitespace"),
    ("129 properties", {"properties": {str(n): "" for n in range(129)}}, 43101, "too many user properties, max is 128"),
    (
        "16 KiB of properties",
        {"properties": {"a": "x" * 16384}},
        43101,
        "the total size of user property is too large, max is 16384",
    ),
    ("a reserved one", {"properties": {"UNIQ_KEY": "1"}}, 40007, "property is used by system: UNIQ_KEY"),
    ("one of ours", {"properties": {"rocketmq-id": "1"}}, 40007, "property is used by system: rocketmq-id"),
    ("a control character", {"properties": {"a": "\n"}}, 40007,
     "the value of property cannot contain control character"),
    ("a far day", {"delivery_timestamp": "2200-01-01T00:00:00Z"}, 40012,
     "the max delay time of message is too large, max is 86400000"),
    ("a lite topic", {"lite_topic": "x"}, 50500, "lite topics and priorities are not supported by this server"),
    ("a long recovery", {"message_type": "TRANSACTION", "orphaned_transaction_recovery_duration": "3601s"}, 40000,
     "the max orphaned transaction recovery duration is too large, max is 3600"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "fields", "expected", "words"), REFUSED, ids=[each[0] for each in REFUSED])
def test_limits_are_the_proxys(
    raw: RawClient, engine: Engine, what: str, fields: dict[str, Any], expected: int, words: str
) -> None:
    """Nothing of a request is stored if one of its messages is refused, and the answer has no entries."""
    body, properties = fields.pop("body", b"b"), fields.pop("properties", {})
    answer = raw.send(message("orders"), message("orders", body, properties, **fields))
    fields |= {"body": body, "properties": properties}
    assert (code(answer), text_of(answer)) == (expected, words)
    assert "entries" not in answer
    assert stored(engine) == []


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("a b", "The specified topic[a b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("a.b", "The specified topic[a.b] contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("", "The specified topic is blank"),
        ("t" * 128, "The specified topic is longer than topic max length 127."),
        ("TBW102", "cannot access system topic"),
        ("RMQ_SYS_x", "cannot access system topic"),
    ],
)
def test_topics_are_checked(raw: RawClient, topic: str, words: str) -> None:
    """A topic that clients can't name, or that is the system's, is refused as at the proxy."""
    answer = raw.send(message(topic))
    assert (code(answer), text_of(answer)) == (40002, words)


def test_what_is_just_within_the_limits_is_taken(raw: RawClient, engine: Engine) -> None:
    """The largest body, 128 properties, a group of 63 bytes, empty texts, and a property that isn't reserved."""
    many = {f"p{number}": "x" for number in range(128)}
    limits: list[dict[str, Any]] = [
        {"body": b"x" * 4194304},
        {"properties": many, "keys": ["k"], "message_group": "g" * 63, "trace_context": "t"},
        {"properties": {"a": "x" * 16383}},
        {"tag": "", "keys": [""], "properties": {"": "", " ": " ", "__SHARDINGKEY": "k"}},
    ]
    for each in limits:
        answer = raw.send(message("orders", each.pop("body", b"b"), each.pop("properties", {}), **each))
        assert code(answer) == 20000, answer
    assert len(stored(engine)) == 4


def test_requests_without_one_topic_are_refused(raw: RawClient) -> None:
    """Two topics in a request, or no message."""
    two, none = raw.send(message("a"), message("b")), raw.send()
    assert (code(two), text_of(two)) == (40016, "topic in message is not same")
    assert (code(none), text_of(none)) == (40016, "no message to send")


def test_types_are_those_of_the_topic(new_server: NewServer) -> None:
    """A topic that is declared takes its type alone, by what a message has, not by what it says."""
    topics = {"normal": {"type": "NORMAL"}, "fifo": {"type": "FIFO"}}
    server = new_server(**_read(topics=topics))
    with RawClient(server.addresses[0]) as raw:
        expected = "TopicMessageType validate failed, the expected type is NORMAL, but actual type is "
        conflicts: tuple[tuple[dict[str, Any], str], ...] = (
            ({"message_group": "g"}, "FIFO"),
            ({"delivery_timestamp": "2020-01-01T00:00:00Z"}, "DELAY"),
            ({"message_type": "TRANSACTION"}, "TRANSACTION"),
        )
        for fields, actual in conflicts:
            answer = raw.send(message("normal", **fields))
            assert (code(answer), text_of(answer)) == (40014, expected + actual)
        assert code(raw.send(message("normal", message_type=None))) == 20000
        assert code(raw.send(message("fifo"))) == 40014
        assert code(raw.send(message("fifo", message_group="g"))) == 20000


def _read(**tables: Any) -> dict[str, Any]:
    """Return options as a file has them."""
    from outbox.reader import Reader
    from outbox.rocketmq.options import RocketmqOptions

    read = Reader().read(RocketmqOptions, tables)
    return {name: getattr(read, name) for name in tables}


def test_an_unknown_topic_is_not_made(new_server: NewServer, engine: Engine) -> None:
    """Without auto_create a topic must be declared: here, by the application, or by its first message."""
    outbox = Outbox(engine, settings=Settings())
    outbox.declare_topic("by-hand", 2)
    server = new_server(outbox=outbox, auto_create=False, **_read(topics={"declared": {"queues": 3}}))
    with RawClient(server.addresses[0]) as raw:
        assert code(raw.send(message("unknown"))) == 40402
        assert code(raw.send(message("by-hand"))) == code(raw.send(message("declared"))) == 20000
    with engine.connect() as connection:
        queues = connection.execute(text("SELECT name, queues FROM outbox.topic ORDER BY 1")).all()
    assert queues == [("by-hand", 2), ("declared", 3)]


def test_a_full_topic_says_come_again(new_server: NewServer, engine: Engine) -> None:
    """A topic over its limit answers 42900, and stores nothing; another one goes on, in the same transaction too."""
    server = new_server(Settings(max_undispatched=1))
    with RawClient(server.addresses[0]) as raw:
        for _ in range(50):
            raw.send(message("full"))
        answer = raw.send(message("full"))
        assert (code(answer), answer["entries"][0]["status"]["code"]) == (42900, "TOO_MANY_REQUESTS")
        before = len(stored(engine))
        items = [sending.SendItem("c", topic, _parsed(message(topic)), 1) for topic in ("full", "free", "full", "free")]
        server._sending.commits.write_now(items)
        assert [item.refused is None for item in items] == [False, True, False, True]
        assert len(stored(engine)) == before + 2


def _parsed(sent: dict[str, Any]) -> Any:
    from google.protobuf import json_format

    from outbox.rocketmq.wire import WIRE

    return json_format.ParseDict(sent, WIRE.classes["Message"]())


def test_one_that_fails_takes_no_other_along(rocketmq: RocketmqServer, engine: Engine) -> None:
    """Messages of a transaction that fails are tried in halves, until the one to blame is alone."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outbox.half_message ADD CHECK (tag IS DISTINCT FROM 'poison')"))
    tags = ["a", "b", "poison", "c", "d"]
    items = [sending.SendItem("c", "orders", _parsed(message("orders", tag=tag)), 1) for tag in tags]
    rocketmq._sending.commits.write_now(items)
    assert [item.refused.code if item.refused else 0 for item in items] == [0, 0, 50001, 0, 0]
    assert sorted(half.tag for half in stored(engine)) == ["a", "b", "c", "d"]


def test_connections_that_were_cut_are_made_anew(raw: RawClient, engine: Engine) -> None:
    """After PostgreSQL has ended all connections of the server, the next message is stored at the first try."""
    assert code(raw.send(message("orders"))) == 20000
    with engine.begin() as connection:
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-rocketmq'")
        )
    assert [code(raw.send(message("orders"))) for _ in range(3)] == [20000] * 3
    assert len(stored(engine)) == 4


def test_a_delayed_message_waits_and_can_be_recalled(raw: RawClient, engine: Engine) -> None:
    """Its handle recalls it, again too, but not once it is out; a handle of another topic, or garbage, is none."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    answer = raw.send(message("orders", message_type="DELAY", delivery_timestamp=at))
    (half,), entry = stored(engine), answer["entries"][0]
    assert half.deliver_at.timestamp() > time.time() + 3000
    handle = entry["recall_handle"]

    def recall(topic: str, handle: str) -> dict[str, Any]:
        return dict(raw.call("RecallMessage", {"topic": {"name": topic}, "recall_handle": handle}))

    for topic, wrong in (("others", handle), ("orders", handle[:-4]), ("orders", ""), ("orders", "ü")):
        refused = recall(topic, wrong)
        assert (code(refused), text_of(refused)) == (50001, "recall handle is invalid")
    for _ in range(2):
        recalled = recall("orders", handle)
        assert (code(recalled), recalled["message_id"]) == (20000, entry["message_id"])
    dispatch_all(engine)
    past = raw.send(message("orders", message_type="DELAY", delivery_timestamp="2020-01-01T00:00:00Z"))
    dispatch_all(engine)
    late = recall("orders", past["entries"][0]["recall_handle"])
    assert (code(late), text_of(late)) == (50001, "recall failed, timestamp invalid")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outbox.message")).scalar_one() == 1


def test_recalls_can_be_forbidden(new_server: NewServer) -> None:
    """With recall = false."""
    with RawClient(new_server(recall=False).addresses[0]) as raw:
        answer = raw.call("RecallMessage", {"topic": {"name": "orders"}, "recall_handle": "x"})
        assert (code(answer), text_of(answer)) == (50001, "recall failed, operation is forbidden")


def test_bodies_of_zlib_pass_through(raw: RawClient, engine: Engine) -> None:
    """Old clients call zlib GZIP: the bytes and the name stay, and no handler is told that it is gzip."""
    sent = zlib.compress(b"old")
    raw.send(message("orders", sent, body_encoding="GZIP"))
    (half,) = stored(engine)
    assert bytes(half.body) == sent
    assert half.headers["rocketmq-encoding"] == "GZIP"
    assert "outbox-encoding" not in half.headers


def test_a_compressed_body_is_not_compressed_again(new_server: NewServer, engine: Engine) -> None:
    """A body that a client has compressed is stored so, also where the server would compress it."""
    with RawClient(new_server(Settings(compress_above=10)).addresses[0]) as raw:
        sent = gzip.compress(b"0" * 4_000_000)
        assert len(gzip.compress(sent)) < len(sent)
        raw.send(message("orders", sent, body_encoding="GZIP"))
    (half,) = stored(engine)
    assert (bytes(half.body), half.headers["outbox-encoding"]) == (sent, "gzip")


# --- ids -----------------------------------------------------------------------------------------------------------


def test_ids_follow_from_topic_and_text() -> None:
    """An id with a time that is near begins with it; any other text has the id of a business string."""
    now, me = 1_800_000_000.0, ("user", "client")
    near, far = client_id(now - 3), client_id(now - 3600)
    (of_near,) = half_ids("orders", me, near, now)
    assert of_near == half_ids("orders", me, near, now + 30)[0]
    assert of_near != half_ids("others", me, near, now)[0]
    for another in (("user", "other"), ("other", "client"), ("", "client")):
        assert half_ids("orders", another, near, now) != [of_near]
    assert of_near.version == 7
    assert of_near.variant == UUID(int=0).variant or of_near.int >> 62 & 3 == 2
    assert of_near.int >> 80 == int(now - 3) * 1000
    for text_ in (far, "order-4711", "x" * 34, near[:-1], str(of_near)):
        (other,) = half_ids("orders", me, text_, now)
        assert str(other).startswith("f")


def test_ids_at_the_border_are_looked_for() -> None:
    """Where a later try may see the other side of the border, both ids are looked for."""
    now, me = 1_800_000_000.0, ("user", "client")
    text_ = client_id(now - 599)
    first = half_ids("orders", me, text_, now)
    assert half_ids("orders", me, text_, now + 3) == first[::-1]


def test_a_retry_across_the_border_is_no_second_message(
    raw: RawClient, engine: Engine, rocketmq: RocketmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose clock is off by nearly ten minutes sends again a moment later."""
    sent = message("orders", message_id=client_id(time.time() - 598))
    raw.send(sent)
    monkeypatch.setattr(rocketmq.tables, "_offset", 5.0)
    assert code(raw.send(sent)) == 20000
    assert len(stored(engine)) == 1


def test_what_can_not_be_parsed_is_no_crash(raw: RawClient) -> None:
    """Bytes that are no message end that call alone."""
    import grpc

    call: Any = raw.channel.unary_unary("/apache.rocketmq.v2.MessagingService/SendMessage")
    with pytest.raises(grpc.RpcError):
        call(b"\xff\xff\xff", timeout=30, metadata=raw.metadata({}))
    assert code(raw.send(message("orders", base64.b64decode("AA==")))) == 20000


def test_an_outage_is_told_once(rocketmq: RocketmqServer, raw: RawClient, engine: Engine, heard: list[Any]) -> None:
    """Each call is answered with 50001 while the database takes no connection, and the first one is in the log."""
    raw.send(message("orders"))
    name = engine.url.database
    other = create_engine(engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with other.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
        )
        answers = [code(raw.send(message("orders"))) for _ in range(3)]
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    other.dispose()
    assert answers == [50001] * 3
    failed = [each for each in heard if isinstance(each, ClientCallFailed)]
    assert [each.repeated for each in failed] == [False, True, True]
    assert code(raw.send(message("orders"))) == 20000


def test_a_body_that_is_too_large_here(new_server: NewServer) -> None:
    """The setting's limit is told as that of the protocol is."""
    server = new_server(Settings(max_body_bytes=1000))
    with RawClient(server.addresses[0]) as raw:
        assert code(raw.send(message("orders", b"x" * 1000))) == 20000
        refused = raw.send(message("orders", b"x" * 1001))
    assert (code(refused), refused["status"]["message"]) == (41301, "message body cannot exceed the max 1000")
