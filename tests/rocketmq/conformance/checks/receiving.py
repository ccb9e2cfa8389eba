"""Receive, ack and change by simple consumers; filters; attempts and the dead letter queue."""

from __future__ import annotations

import time

import grpc

from tests.rocketmq.conformance.bridge import ClientRaised
from tests.rocketmq.conformance.raw import Answer, attempt, body, ids, status
from tests.rocketmq.conformance.suite import OFFICIAL, Check, CheckRun, text
from tests.rocketmq.raw import code

ONCE = Check(
    51,
    "receive, ack, no more",
    "as said; status, messages, time; the queue asked for is ignored",
    topic="NORMAL",
    group="",
    seconds=18,
)


@ONCE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=6)
    producer.send(topic=c.topic, body="a")
    found = c.drain(consumer, 1, invisible=10)
    c.expect(len(found) == 1, f"{len(found)} received")
    again = c.drain(consumer, 1, 14, invisible=10)
    c.expect(not again, f"then {len(again)} in 14 s")


@ONCE.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    for number in range(8):
        c.raw.send(c.raw.message(c.topic, str(number).encode()))
    broker = {"name": "broker-a", "endpoints": c.raw.endpoints}
    queue = {"topic": {"name": c.topic}, "id": 0, "broker": broker}
    found: list[Answer] = []
    for _ in range(3):
        head, more = c.raw.receive(c.topic, c.group, message_queue=queue)
        c.expect(head["parts"][0] == "status" and head["parts"][-1] == "delivery_timestamp", head)
        found += more
        if len(found) >= 8:
            break
    c.expect(sorted(map(body, found)) == [str(number) for number in range(8)], f"asked for queue 0: {len(found)}")
    c.answers(c.raw.ack(c.topic, c.group, *map(ids, found)), 20000, "ack of all:")


NOTHING = Check(52, "nothing is there", "no message after the time of waiting; raw 40401", topic="NORMAL", group="")


@NOTHING.by(OFFICIAL)
def _(c: CheckRun) -> None:
    consumer = c.simple(wait=6)
    began = time.monotonic()
    found = consumer.receive()
    # Go's asks the server for no time: it waits until shortly before its deadline.
    c.expect(found == [] and time.monotonic() - began > 5, f"{found} after {time.monotonic() - began:.2f} s")


@NOTHING.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    began = time.monotonic()
    head, _ = c.raw.receive(c.topic, c.group, polling=5)
    c.answers(head, 40401, f"after {time.monotonic() - began:.2f} s:")
    c.expect("delivery_timestamp" in head["parts"], head)


INVISIBLE = Check(53, "an invisible time of 9 s, and of more than 12 h", "40011", topic="NORMAL", group="")


@INVISIBLE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    consumer = c.simple()
    c.refused(lambda: consumer.receive(invisible=9), 40011)
    c.refused(lambda: consumer.receive(invisible=43201), 40011)


@INVISIBLE.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    for seconds, expected in ((9, 40011), (10, 40401), (43200, 40401), (43201, 40011), (0, 40011), (None, 40011)):
        head, _ = c.raw.receive(c.topic, c.group, invisible=seconds)
        c.answers(head, expected, f"{seconds}:")


CHANGE = Check(
    54,
    "change to 5 s; then ack with the old handle and the new one",
    "attempt 2 after 7 to 8 s; the old handle stays good, and its ack is OK without effect",
    "attempt 2 after 5 s; the old handle is 40013",
    "an ack that has no effect must say so",
    topic="NORMAL",
    group="",
    seconds=26,
)


@CHANGE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    producer.send(topic=c.topic, body="a")
    [first] = _received(c, consumer, invisible=60)
    began = time.monotonic()
    consumer.change(ref=first["ref"], seconds=5)
    found = c.drain(consumer, 1, 40)
    c.expect([each["attempt"] for each in found] == [2], f"again after {time.monotonic() - began:.1f} s: {found}")


def _received(c: CheckRun, consumer: object, seconds: float = 40, **request: object) -> list[dict[str, object]]:
    """Receive until something is there."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := consumer.receive(**request):  # type: ignore[attr-defined]  # a `ClientThing`
            return found  # type: ignore[no-any-return]
    raise AssertionError(f"nothing came in {seconds} s; {c.seen}")


@CHANGE.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    message_id, old = ids(_one(c, invisible=60))
    answer = c.raw.change(c.topic, c.group, message_id, old, 10)
    c.answers(answer, 20000, "change:")
    new = answer["receipt_handle"]
    refused = c.raw.change(c.topic, c.group, message_id, old, 20)
    c.answers(refused, c.either(real=20000, ours=40013), "change with the old handle:")
    if c.ours:
        c.expect(refused.get("receipt_handle") == old, "Java, Python and Go take the handle of an error, too")
    both = c.raw.ack(c.topic, c.group, (message_id, old), (message_id, new))
    c.answers(both, c.either(real=20000, ours=30000), "ack of both:")
    wanted = c.either(real=[20000, 20000], ours=[40013, 20000])
    c.expect([code(each) for each in both["entries"]] == wanted, both["entries"])
    _, found = c.raw.receive(c.topic, c.group, polling=15)
    c.expect(not found, f"{len(found)} redelivered")
    message_id, old = ids(_one(c, invisible=60))
    c.raw.change(c.topic, c.group, message_id, old, 10)
    c.answers(c.raw.ack(c.topic, c.group, (message_id, old)), c.either(real=20000, ours=40013), "ack of the old alone:")
    _, found = c.raw.receive(c.topic, c.group, polling=20)
    c.expect(len(found) == 1, f"then {len(found)} redelivered")


def _one(c: CheckRun, content: bytes = b"body", invisible: float = 30) -> Answer:
    """Send a message and receive it, by the raw client."""
    c.raw.send(c.raw.message(c.topic, content))
    for _ in range(3):
        _, found = c.raw.receive(c.topic, c.group, size=1, invisible=invisible, polling=15)
        if found:
            return found[0]
    raise AssertionError(f"nothing came; {c.seen}")


EXPIRED = Check(
    55,
    "ack after expiry, ack with garbage",
    "40013; 50001",
    "40013",
    "clients repeat an ack for ever unless it is 40013",
    topic="NORMAL",
    group="",
)


@EXPIRED.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    message = _one(c, invisible=10)
    time.sleep(10.5)
    c.answers(c.raw.ack(c.topic, c.group, ids(message)), 40013, "ack after expiry:")
    c.answers(c.raw.change(c.topic, c.group, *ids(message), 10), 40013, "change after expiry:")
    _, [again] = c.raw.receive(c.topic, c.group, invisible=30, polling=15)
    c.answers(c.raw.ack(c.topic, c.group, ids(message)), 40013, "ack after redelivery:")
    c.expect(attempt(again) == 2, f"attempt {attempt(again)}")
    c.answers(c.raw.ack(c.topic, c.group, ids(again)), 20000, "ack of the second:")
    garbage = c.either(real=50001, ours=40013)
    for handle in ("garbage", "", "MS4wLjAuMC4wLjAuMC4w"):
        c.answers(c.raw.ack(c.topic, c.group, ("x", handle)), garbage, f"handle {handle!r}:")
        c.answers(c.raw.change(c.topic, c.group, "x", handle, 10), garbage, f"change of {handle!r}:")
    c.say(f"no entry: {status(c.raw.ack(c.topic, c.group))}")


ACK_TWICE = Check(
    56,
    "ack twice; change after an ack",
    "OK; OK, and the acked message comes again",
    "OK; 40013",
    "what was settled stays settled",
    topic="NORMAL",
    group="",
)


@ACK_TWICE.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    message = _one(c)
    c.answers(c.raw.ack(c.topic, c.group, ids(message)), 20000, "once:")
    c.answers(c.raw.ack(c.topic, c.group, ids(message)), 20000, "twice:")
    c.answers(c.raw.change(c.topic, c.group, *ids(message), 10), c.either(real=20000, ours=40013), "change after ack:")


TO_ZERO = Check(
    57,
    "change to 0, and to 13 h",
    "again after 2 to 3.5 s; 40011",
    "again at once; 40011",
    "that is what 0 says",
    topic="NORMAL",
    group="",
)


@TO_ZERO.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    producer.send(topic=c.topic, body="a")
    [message] = _received(c, consumer, invisible=60)
    began = time.monotonic()
    consumer.change(ref=message["ref"], seconds=0)
    [message] = _received(c, consumer, invisible=60)
    c.expect(message["attempt"] == 2, f"again after {time.monotonic() - began:.1f} s, attempt {message['attempt']}")
    c.refused(lambda: consumer.change(ref=message["ref"], seconds=13 * 3600), 40011, what="13 h:")
    try:
        c.say(f"ack after that: {consumer.ack(ref=message['ref'])}")
    except ClientRaised as raised:  # the real one's error has no handle, which the client takes all the same
        c.expect(not c.ours, f"ack after that: {raised}")


TAGS = Check(
    58, "TAG a||b; two groups", "each group gets all that its filter lets through", topic="NORMAL", group="", seconds=26
)


@TAGS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    # The group of another check, on this topic.
    producer, one, two = c.producer(), c.simple(filter_="a||b"), c.simple(group="g11" + c.client.lower())
    for tag in ("a", "b", "c", None):
        producer.send(topic=c.topic, body=str(tag), tag=tag)
    found = sorted(map(text, c.drain(one, 3, 12)))
    c.expect(found == ["a", "b"], f"a||b: {found}")
    found = sorted(map(text, c.drain(two, 4, 20)))
    c.expect(found == ["None", "a", "b", "c"], f"the other group: {found}")
    found = list(map(text, c.drain(c.simple(), 1, 6)))
    c.expect(found == [], f"then the first group, without a filter: {found}")


SQL = Check(
    59,
    "SQL92 a > 1 AND b IS NOT NULL; an expression that is wrong",
    "as said; 50001, an empty one 40010",
    "as said; 40010",
    "the code that says what is wrong",
    topic="NORMAL",
    group="",
    seconds=18,
)


@SQL.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(filter_="SQL:a > 1 AND b IS NOT NULL")
    sent = ({"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "3"}, {"b": "x"}, {"a": "10", "b": "y"})
    for number, props in enumerate(sent, 1):
        producer.send(topic=c.topic, body=str(number), props=props)
    found = sorted(map(text, c.drain(consumer, 3, 12)))
    c.expect(found == ["2", "5"], found)


@SQL.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    for wrong in ("a >", "TAGS = 'x' OR", "a = 1; DROP", ""):
        head, _ = c.raw.receive(c.topic, c.group, filter_=f"SQL:{wrong}")
        c.answers(head, c.either(real=50001 if wrong else 40010, ours=40010), f"{wrong!r}:")
    for tags, expected in (("a||", 40401), ("||", 40010), ("", 40401), (" a || b ", 40401)):
        head, _ = c.raw.receive(c.topic, c.group, filter_=tags)
        c.answers(head, expected, f"TAG {tags!r}:")
    for right in (
        *("TAGS = 'x'", "a BETWEEN 1 AND 3", "b IN ('x','y')", "NOT (a = 3)", "a = '2'", "b CONTAINS 'x'"),
        *("c = TRUE", "a <> 1 AND b = 'x'", "b STARTSWITH 'x' AND b NOT ENDSWITH 'y'"),
    ):
        c.raw.send(c.raw.message(c.topic, properties={"a": "2", "b": "x", "c": "true"}, tag="x"))
        _, found = c.raw.receive(c.topic, c.group, filter_=f"SQL:{right}", polling=10)
        c.expect(len(found) == 1, f"{right}: {len(found)} of 1")
        if found:
            c.raw.ack(c.topic, c.group, *map(ids, found))


BATCH = Check(60, "a batch of 100", "32 at most", topic="NORMAL", group="")


@BATCH.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    for number in range(40):
        c.raw.send(c.raw.message(c.topic, str(number).encode()))
    _, found = c.raw.receive(c.topic, c.group, size=100)
    c.expect(0 < len(found) <= 32, f"{len(found)} of 40")
    for size in (0, -1):
        head, found = c.raw.receive(c.topic, c.group, size=size)
        c.say(f"size {size}: {status(head)} {len(found)}")


DEADLINE = Check(
    61,
    "a time of waiting that is longer than the deadline, or than 20 s",
    "shortened; 40018 if less than 5 s are left",
    topic="NORMAL",
    group="",
    seconds=28,
)


@DEADLINE.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    for polling, timeouts in ((20, (7, 12, 17)), (20, (4,)), (60, (40,))):
        for timeout in timeouts:
            began = time.monotonic()
            try:
                head, _ = c.raw.receive(c.topic, c.group, polling=polling, timeout=timeout)
            except grpc.RpcError as failure:
                # The real one answers when the deadline is there, which under load is after it. Ours does before it,
                # unless the machine is too busy: of several, it misses no three.
                c.expect(not c.ours or timeout < timeouts[-1], f"{polling} s, deadline {timeout} s: {failure}")
                continue
            spent = time.monotonic() - began
            c.answers(head, 40018 if timeout < 5 else 40401, f"{polling} s, deadline {timeout} s: after {spent:.1f} s")
            c.expect(spent < 25, "no server has a client wait longer than 20 s")
            break


DEAD = Check(
    62,
    "two attempts at most",
    "two deliveries, then it is in the topic %DLQ%group",
    "two deliveries, then it is parked",
    "a parked message is seen, retried and skipped by an operator; a topic of them isn't mapped",
    topic="NORMAL",
    group="attempts=2",
    seconds=34,
)


@DEAD.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    producer.send(topic=c.topic, body="a")
    attempts: list[object] = []
    end = time.monotonic() + 30
    while time.monotonic() < end:
        attempts += [each["attempt"] for each in consumer.receive(invisible=10)]
    c.expect(attempts == [1, 2], f"attempts {attempts}")


@DEAD.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    message = c.raw.message(c.topic, b"dead", {"a": "b"}, tag="T", keys=["k"])
    c.raw.send(message)
    attempts: list[int] = []
    end = time.monotonic() + 30
    while time.monotonic() < end:
        attempts += [attempt(each) for each in c.raw.receive(c.topic, c.group, invisible=10, polling=10)[1]]
    c.expect(attempts == [1, 2], f"attempts {attempts}")
    dead = f"%DLQ%{c.group}"
    c.answers(c.raw.route(dead), c.either(real=20000, ours=40002), f"route of {dead}:")


NO_SETTINGS = Check(
    102,
    "no settings before send, receive, ack, change, end",
    "receive and change 50001",
    "all OK",
    "Python's and Go's clients send none for minutes after a restart of the server",
    topic="MIXED",
    group="",
)


@NO_SETTINGS.by("R")
def _(c: CheckRun) -> None:
    c.answers(c.raw.send(c.raw.message(c.topic)), 20000, "send:")
    head, found = c.raw.receive(c.topic, c.group)
    c.answers(head, c.either(real=50001, ours=20000), "receive:")
    if not c.ours:
        raw = c.another_raw()
        c.settle(raw=raw)
        _, found = raw.receive(c.topic, c.group)
    [message] = found
    c.answers(c.raw.end(c.topic, *c.raw_half(), "COMMIT"), 20000, "end:")
    changed = c.raw.change(c.topic, c.group, *ids(message), 20)
    c.answers(changed, c.either(real=50001, ours=20000), "change:")
    handle = changed.get("receipt_handle") or ids(message)[1]
    c.answers(c.raw.ack(c.topic, c.group, (ids(message)[0], handle)), 20000, "ack:")


START = Check(105, "a new group's start", "at the first message there is", topic="NORMAL", group="")


@START.by("R")
def _(c: CheckRun) -> None:
    for number in range(20):
        c.raw.send(c.raw.message(c.topic, str(number).encode()))
    c.settle()
    found = [each for _ in range(3) for each in c.raw.receive(c.topic, c.group, size=32)[1]]
    c.expect(sorted(int(body(each)) for each in found) == list(range(20)), f"{len(found)} of 20 sent before")


FOREIGN = Check(
    112,
    "ack by another group, or under another topic; change after an ack",
    "OK, and it has no effect: they all come again",
    "40013; what was acked doesn't come again",
    "an ack that has no effect must say so",
    topic="NORMAL",
    group="",
    seconds=32,
)


@FOREIGN.by("R")
def _(c: CheckRun) -> None:
    c.settle()
    foreign = c.either(real=20000, ours=40013)
    first = _one(c, b"by another group", invisible=20)
    c.answers(c.raw.ack(c.topic, "g55r", ids(first)), foreign, "by another group:")
    second = _one(c, b"acked, then changed", invisible=20)
    c.raw.ack(c.topic, c.group, ids(second))
    c.answers(c.raw.change(c.topic, c.group, *ids(second), 10), foreign, "change after ack:")
    third = _one(c, b"under another topic", invisible=20)
    answer = c.raw.ack("t55r", c.group, ids(third))
    # The real one says OK or, where its queues differ, 50001.
    c.answers(answer, c.either(real=code(answer), ours=40013), "another topic:")
    found: set[str] = set()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found |= {body(each) for each in c.raw.receive(c.topic, c.group, invisible=60)[1]}
    wanted = {"by another group", "under another topic"} | c.either(real={"acked, then changed"}, ours=set())
    c.expect(found == wanted, f"redelivered: {sorted(found)}")
