"""What may be sent, how it comes back, and what is refused with which code."""

from __future__ import annotations

import base64
import concurrent.futures
import gzip
import time
import zlib
from collections.abc import Mapping
from typing import Any

import grpc

from tests.rocketmq.conformance.raw import body, ids, status, utc
from tests.rocketmq.conformance.suite import OFFICIAL, Check, CheckRun, text
from tests.rocketmq.conformance.tap import Tap

_MOST = 4 << 20

ALIKE = Check(11, "tag, keys, properties and body come back alike", "alike, attempt 1", topic="NORMAL", group="")


@ALIKE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple()
    receipt = producer.send(topic=c.topic, body="grüße", tag="T", keys=["k1", "k2"], props={"a": "1", "ü": "ö x"})
    [found] = c.drain(consumer, 1)
    wanted = {"id": receipt["id"], "tag": "T", "keys": ["k1", "k2"], "props": {"a": "1", "ü": "ö x"}, "attempt": 1}
    c.expect({name: found[name] for name in wanted} == wanted and text(found) == "grüße", found)
    c.expect(not found.get("corrupted") and not found.get("group"), "its digest is right, it has no message group")


AT_ONCE = Check(12, "100 messages at once", "all are sent, and received once", topic="NORMAL", group="")


@AT_ONCE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple()
    began = time.monotonic()
    sent = [producer.bridge.start("send", on=producer.name, topic=c.topic, body=str(i)) for i in range(100)]
    answers = [future.result(90) for future in sent]
    c.expect(all("ok" in each for each in answers), f"100 sent in {time.monotonic() - began:.2f} s")
    found = c.drain(consumer, 100, 60, max=32)
    c.expect(sorted(int(text(each)) for each in found) == list(range(100)), f"{len(found)} received")


LARGEST = Check(
    13, "a body of 4 MiB, and one byte more", "taken; refused by the client, else 41301", topic="NORMAL", group=""
)


@LARGEST.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer = c.producer()
    c.accepted(lambda: producer.send(topic=c.topic, size=_MOST), "4 MiB:")
    c.refused(lambda: producer.send(topic=c.topic, size=_MOST + 1), what="+1:")


@LARGEST.by("R")
def _(c: CheckRun) -> None:
    c.answers(c.raw.send(c.raw.message(c.topic, b"x" * _MOST)), 20000, "4 MiB:")
    c.answers(c.raw.send(c.raw.message(c.topic, b"x" * (_MOST + 1))), 41301, "+1:")
    c.settle()
    _, found = c.raw.receive(c.topic, c.group)
    c.expect([len(base64.b64decode(each["body"])) for each in found] == [_MOST], f"{len(found)} received")


#: Arguments of `CheckClient.message` by what is wrong with them; of what begins with a ? nothing is expected.
Wrong = Mapping[str, dict[str, Any]]


def _refused(c: CheckRun, expected: int, wrong: Wrong) -> None:
    """Send messages by the raw client, each of which must be refused with a code."""
    for what, arguments in wrong.items():
        given = dict(arguments)
        answer = c.raw.send(c.raw.message(given.pop("topic", c.topic), **given))
        if what.startswith("?"):
            c.say(f"{what[1:]}: {status(answer)}")
        else:
            c.answers(answer, expected, f"{what}:")


EMPTY = Check(14, "an empty body", "Python and Java refuse it, else 41302", topic="NORMAL")


@EMPTY.by(OFFICIAL)
def _(c: CheckRun) -> None:
    allowed = (41302,) if c.client in "NG" else ("IllegalArgument",)
    c.refused(lambda: c.producer().send(topic=c.topic, body=""), *allowed)


@EMPTY.by("R")
def _(c: CheckRun) -> None:
    _refused(c, 41302, {"empty": {"content": b""}})


MESSAGE_ID = Check(15, "a blank message id", "40009", topic="NORMAL")


@MESSAGE_ID.by("R")
def _(c: CheckRun) -> None:
    _refused(c, 40009, {"none": {"message_id": None}, "empty": {"message_id": ""}, "blanks": {"message_id": "  "}})


TOPIC = Check(16, "an illegal topic", "40002", topic="NORMAL")


@TOPIC.by("R")
def _(c: CheckRun) -> None:
    names = ("a b", "", "a.b", "a" * 128, "TBW102", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_x")
    _refused(c, 40002, {f"{name[:30]!r} of {len(name)}": {"topic": name} for name in names})


TAG = Check(17, "an illegal tag", "Python and Java refuse it, else 40004", topic="NORMAL")


@TAG.by(OFFICIAL)
def _(c: CheckRun) -> None:
    allowed = (40004,) if c.client in "NG" else ("IllegalArgument",)
    c.refused(lambda: c.producer().send(topic=c.topic, body="a", tag="a|b"), *allowed)


@TAG.by("R")
def _(c: CheckRun) -> None:
    _refused(c, 40004, {repr(tag): {"tag": tag} for tag in ("a|b", " ", "a||b", "a\x01b")} | {"?empty": {"tag": ""}})


KEY = Check(18, "an illegal key", "40005", topic="NORMAL")


@KEY.by("R")
def _(c: CheckRun) -> None:
    _refused(c, 40005, {"blank": {"keys": [" "]}, "control": {"keys": ["a\x01"]}, "?empty": {"keys": [""]}})


GROUP = Check(19, "message groups of 63 and 64 bytes", "taken; 40006", topic="FIFO")


@GROUP.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer = c.producer()
    c.accepted(lambda: producer.send(topic=c.topic, body="a", group="g" * 63), "63:")
    c.refused(lambda: producer.send(topic=c.topic, body="a", group="g" * 64), 40006, what="64:")


@GROUP.by("R")
def _(c: CheckRun) -> None:
    groups = ("g" * 64, "g" * 65, " ", "a\x01")
    _refused(c, 40006, {repr(each[:9]): {"message_group": each, "message_type": "FIFO"} for each in groups})


PROPERTIES = Check(20, "129 properties, or more than 16 KiB of them", "43101", topic="NORMAL")


@PROPERTIES.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer = c.producer()

    def send(props: Mapping[str, str]) -> Any:
        return producer.send(topic=c.topic, body="a", props=props)

    c.accepted(lambda: send({f"k{i}": "v" for i in range(128)}), "128:")
    c.refused(lambda: send({f"k{i}": "v" for i in range(129)}), 43101, what="129:")
    c.accepted(lambda: send({"k": "v" * 16383}), "16 KiB:")
    c.refused(lambda: send({"k": "v" * 16384}), 43101, what="16 KiB and 1 byte:")


@PROPERTIES.by("R")
def _(c: CheckRun) -> None:
    many = {f"k{i}": "v" for i in range(129)}
    _refused(c, 43101, {"129": {"properties": many}, "16 KiB and 1 byte": {"properties": {"k": "v" * 16384}}})


RESERVED = Check(21, "a property of the system's", "40007", topic="NORMAL")


@RESERVED.by(OFFICIAL)
def _(c: CheckRun) -> None:
    c.refused(lambda: c.producer().send(topic=c.topic, body="a", props={"UNIQ_KEY": "x"}), 40007)


@RESERVED.by("R")
def _(c: CheckRun) -> None:
    names = ("UNIQ_KEY", "KEYS", "TAGS", "DELAY", "TRAN_MSG", "PGROUP", "MIN_OFFSET", "REAL_TOPIC", "WAIT")
    _refused(c, 40007, {name: {"properties": {name: "x"}} for name in names})


CONTROL = Check(22, "a control character in a property", "40007", topic="NORMAL")


@CONTROL.by("R")
def _(c: CheckRun) -> None:
    wrong = {
        repr(name + value): {"properties": {name: value}}
        for name, value in (("a", "x\x01y"), ("a", "x\ny"), ("a\x02", "x"))
    }
    right = {
        f"?{name!r}: {value!r}": {"properties": {name: value}} for name, value in (("a", ""), ("a", " "), (" ", "a"))
    }
    _refused(c, 40007, {**wrong, **right})


TYPE = Check(23, "a message of another type than its topic's", "refused by the client, else 40014", topic="NORMAL")


@TYPE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    c.refused(lambda: c.producer().send(topic=c.topic, body="a", group="g"), what="FIFO to NORMAL:")


@TYPE.by("R")
def _(c: CheckRun) -> None:
    wrong: Wrong = {
        "FIFO": {"message_group": "g", "message_type": "FIFO"},
        "a group, but type NORMAL": {"message_group": "g"},
        "DELAY": {"message_type": "DELAY", "delivery_timestamp": "2020-01-01T00:00:00Z"},
        "TRANSACTION": {"message_type": "TRANSACTION"},
        "?no type": {"message_type": None},
    }
    _refused(c, 40014, wrong)


TOPICS = Check(24, "two topics in a request, or no message", "40016", topic="NORMAL")


@TOPICS.by("R")
def _(c: CheckRun) -> None:
    c.answers(c.raw.send(c.raw.message(c.topic), c.raw.message("t25r")), 40016, "two:")
    c.answers(c.raw.send(), 40016, "none:")


BATCH = Check(
    25,
    "a batch of 3 messages",
    "one entry for all",
    "one entry for each",
    "the protocol says one for each; no official client sends a batch",
    topic="NORMAL",
    group="",
)


@BATCH.by("R")
def _(c: CheckRun) -> None:
    answer = c.raw.send(*(c.raw.message(c.topic, each) for each in (b"a", b"b", b"c")))
    c.answers(answer, 20000)
    c.expect(len(answer["entries"]) == c.either(real=1, ours=3), f"{len(answer['entries'])} entries")
    c.settle()
    _, found = c.raw.receive(c.topic, c.group)
    c.expect(sorted(map(body, found)) == ["a", "b", "c"], f"{len(found)} received")
    mixed = c.raw.send(c.raw.message(c.topic), c.raw.message(c.topic, tag="a|b"))
    c.say(f"one of two is wrong: {status(mixed)} {mixed.get('entries')}")


AGAIN = Check(
    26,
    "the same message id twice",
    "two messages",
    "one message",
    "a client repeats what it has no answer to",
    topic="NORMAL",
    group="",
)


@AGAIN.by("R")
def _(c: CheckRun) -> None:
    message = c.raw.message(c.topic)
    one, two = c.raw.send(message), c.raw.send(message)
    c.answers(one, 20000, "once:")
    c.answers(two, 20000, "twice:")
    c.settle()
    found = [each for _ in range(3) for each in c.raw.receive(c.topic, c.group, polling=5)[1]]
    c.expect(len(found) == c.either(real=2, ours=1), f"{len(found)} received: {[ids(each)[0] for each in found]}")
    c.expect({ids(each)[0] for each in found} == {message["system_properties"]["message_id"]}, "its id is the client's")
    odd = c.raw.message(c.topic, message_id="018f6f1c-2b7e-7a1c-9c1e-0123456789ab")
    c.answers(c.raw.send(odd), 20000, "another form of id:")


LOST = Check(
    27,
    "an answer to a send is lost, and the client sends again",
    "delivered twice",
    "delivered once",
    "it is one message: its id is the same",
    topic="NORMAL",
    group="",
)


@LOST.by(OFFICIAL)
def _(c: CheckRun) -> None:
    with Tap(c.server.endpoints) as tap:
        producer = c.producer(endpoints=tap.endpoints, timeout=3)
        tap.lose("SendMessage", 1)
        receipt = producer.send(topic=c.topic, body="a")
        c.expect(tap.calls["SendMessage"] == 2, f"sent {tap.calls['SendMessage']} times")
    consumer = c.simple(wait=6)
    found = c.drain(consumer, 2, 15)
    c.expect([each["id"] for each in found] == [receipt["id"]] * c.either(real=2, ours=1), f"{len(found)} delivered")


BUSY = Check(
    28, "a server that is too busy", "42900 was never got: sends had no answer in 30 s", topic="NORMAL", needs="busy"
)


@BUSY.by("R", night=True)
def _(c: CheckRun) -> None:
    def send(_: int) -> str:
        try:
            return status(c.raw.send(c.raw.message(c.topic, b"x" * 1000)))
        except grpc.RpcError as failure:
            return f"gRPC {failure.code()}"

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(send, range(1000)))
    counts = {answer: answers.count(answer) for answer in set(answers)}
    c.expect(not c.ours or all(answer[:5] in {"20000", "42900"} for answer in counts), counts)


GZIP = Check(74, "a body that the client has compressed", "the same bytes, with MD5 of them", topic="NORMAL", group="")


@GZIP.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    plain = b"hello" * 100
    for name, packed in {"gzip": gzip.compress(plain), "zlib, under the same name": zlib.compress(plain)}.items():
        c.answers(c.raw.send(c.raw.message(c.topic, packed, body_encoding="GZIP")), 20000, f"{name}:")
        _, [found] = c.raw.receive(c.topic, c.group)
        system = found["system_properties"]
        c.expect(base64.b64decode(found["body"]) == packed and system["body_encoding"] == "GZIP", f"{name}: {system}")
        c.expect(system["body_digest"]["type"] == "MD5", "a digest that all clients read alike")
        c.raw.ack(c.topic, c.group, ids(found))


NOWHERE = Check(
    103,
    "a topic or group that isn't there",
    "send 40014, receive 50001; a group is made by its first use; illegal names 40003",
    "send and receive 40402; groups as there",
    "the code that says what is wrong",
    topic="NORMAL",
    group="",
)


@NOWHERE.by("R")
def _(c: CheckRun) -> None:
    c.answers(c.raw.send(c.raw.message("no-such-topic")), c.either(real=40014, ours=40402), "send:")
    c.settle()
    head, _ = c.raw.receive("no-such-topic", c.group)
    c.answers(head, c.either(real=50001, ours=40402), "receive:")
    c.settle(group="no-such-group-a")
    head, _ = c.raw.receive(c.topic, "no-such-group-a")
    c.answers(head, 40401, "receive by an unknown group:")
    for group in ("a b", "", "g.x", "CID_RMQ_SYS_x"):
        head, _ = c.raw.receive(c.topic, group)
        c.answers(head, 40003, f"group {group!r}:")


DELIVERED = Check(
    106,
    "system properties of what is delivered",
    "all of the send but its durations; user properties leak five of the broker's own",
    "the same; user properties are those of the sender",
    "what a sender didn't write isn't its property",
    topic="MIXED",
    group="",
)


@DELIVERED.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    sent: dict[str, dict[str, Any]] = {
        "normal": {"tag": "T", "keys": ["k1", "k2"], "trace_context": "trace", "queue_id": 3},
        "fifo": {"message_type": "FIFO", "message_group": "k"},
        "delay": {"message_type": "DELAY", "delivery_timestamp": utc(2)},
    }
    for name, system in sent.items():
        c.answers(c.raw.send(c.raw.message(c.topic, name.encode(), {"p": "q"}, **system)), 20000, f"{name}:")
    c.answers(c.raw.end(c.topic, *c.raw_half(tag="T"), "COMMIT"), 20000, "commit:")
    found = {body(each): each for _ in range(4) for each in c.raw.receive(c.topic, c.group)[1]}
    delivered: dict[str, dict[str, Any]] = {
        "normal": {"tag": "T", "keys": ["k1", "k2"], "message_type": "NORMAL", "trace_context": "trace"},
        "fifo": {"message_type": "FIFO", "message_group": "k"},
        "delay": {"message_type": "DELAY"},
        "body": {"message_type": "TRANSACTION", "tag": "T"},
    }
    for name, wanted in delivered.items():
        system = found[name]["system_properties"] if name in found else {}
        c.expect(wanted.items() <= system.items(), f"{name}: {system}")
        present = ("message_id", "body_digest", "born_timestamp", "born_host", "store_timestamp", "receipt_handle")
        c.expect(all(each in system for each in present) and system["delivery_attempt"] == 1, f"{name}: has all")
    if c.ours:
        properties = {name: each.get("user_properties", {}) for name, each in found.items()}
        written = {"normal": {"p": "q"}, "fifo": {"p": "q"}, "delay": {"p": "q"}, "body": {}}
        c.expect(properties == written, f"user properties: {properties}")
