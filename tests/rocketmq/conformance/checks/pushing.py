"""Push consumers: success and failure, order, leases that are renewed, clients that are killed."""

from __future__ import annotations

import itertools
import time

from tests.rocketmq.conformance.raw import Answer, attempt, body, ids, status
from tests.rocketmq.conformance.suite import OFFICIAL, Check, CheckRun, Heard

SUCCESS = Check(63, "success", "each once", topic="NORMAL", group="")


@SUCCESS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    heard = Heard("SUCCESS")
    c.push(heard)
    producer = c.producer()
    for number in range(20):
        producer.send(topic=c.topic, body=str(number))
    heard.until(20, 60)
    time.sleep(5)
    c.expect(sorted(map(int, heard.bodies)) == list(range(20)), heard.messages)


FAILURE = Check(
    64,
    "failures",
    "attempts 2, 3, 4 after the group's delays and 1 to 3 s; Node's client gives back at once, each 2 s",
    "after the group's delays, Node's too",
    "its client doesn't know these delays: the server keeps them",
    topic="NORMAL",
    group="backoff=1,2,4",
)


@FAILURE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    heard = Heard("FAILURE", "FAILURE", "FAILURE", "SUCCESS")
    c.push(heard)
    c.producer().send(topic=c.topic, body="a")
    heard.until(4, 70)
    c.expect(heard.attempts == [1, 2, 3, 4], heard.messages)
    if c.ours:
        times = [at for _, _, at in heard.messages]
        pauses = [round(after - before, 1) for before, after in itertools.pairwise(times)]
        c.expect(all(pause >= least * 0.9 for pause, least in zip(pauses, (1, 2, 4), strict=True)), f"pauses {pauses}")


RAISES = Check(65, "a listener that raises", "as a failure", topic="NORMAL", group="backoff=1,2,4")


@RAISES.by(OFFICIAL)
def _(c: CheckRun) -> None:
    heard = Heard("RAISE", "SUCCESS")
    c.push(heard)
    c.producer().send(topic=c.topic, body="a")
    heard.until(2, 60)
    c.expect(heard.attempts == [1, 2], heard.messages)


LONG = Check(
    66, "a listener that takes 75 s", "one delivery: its lease is renewed", topic="NORMAL", group="", seconds=180
)


@LONG.by(OFFICIAL, night=True)
def _(c: CheckRun) -> None:
    heard = Heard("SUCCESS", wait=75)
    c.push(heard)
    c.producer().send(topic=c.topic, body="a")
    heard.until(1, 60)
    time.sleep(100)
    c.expect(len(heard.messages) == 1, heard.messages)


SHARED = Check(67, "two consumers of a group", "they share, none comes twice", topic="NORMAL", group="")


@SHARED.by(OFFICIAL)
def _(c: CheckRun) -> None:
    both = Heard("SUCCESS", wait=0.05), Heard("SUCCESS", wait=0.05)
    for each in both:
        c.push(each, own=True)
    producer = c.producer()
    sent = [producer.bridge.start("send", on=producer.name, topic=c.topic, body=str(i)) for i in range(200)]
    for future in sent:
        future.result(60)
    end = time.monotonic() + 60
    while sum(len(each.messages) for each in both) < 200 and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(3)
    bodies = [found for each in both for found in each.bodies]
    shares = [len(each.messages) for each in both]
    c.expect(sorted(map(int, bodies)) == list(range(200)), f"{shares[0]} and {shares[1]}")


ORDER = Check(
    68,
    "FIFO: the first fails once",
    "Python's and Java's repeat it, then go on; Node's sends it to the dead letters; Go's goes on at once",
    topic="FIFO",
    group="fifo",
)

#: What each client makes of an order whose first message fails: so many times, then success; of four messages.
_REPEATED = {"N": 1}


@ORDER.by(OFFICIAL)
def _(c: CheckRun) -> None:
    heard = Heard("FAILURE", "SUCCESS")
    producer = c.producer()
    for number in range(4):
        producer.send(topic=c.topic, body=str(number), group="k")
    c.push(heard)
    count = 4 if c.client == "N" else 5
    heard.until(count, 60)
    time.sleep(2)
    if c.client == "G":
        c.expect(
            heard.bodies.count("0") == 2 and [each for each in heard.bodies if each != "0"] == ["1", "2", "3"],
            heard.messages,
        )
    else:
        c.expect(heard.bodies == (["0"] if c.client != "N" else []) + ["0", "1", "2", "3"], heard.messages)


FIFO_DEAD = Check(
    69,
    "FIFO: three attempts at most",
    "the first three times (Node's once), then it is a dead letter and the others come",
    topic="FIFO",
    group="fifo attempts=3 backoff=1,2,5",
)


@FIFO_DEAD.by(OFFICIAL)
def _(c: CheckRun) -> None:
    times = _REPEATED.get(c.client, 3)

    class FirstFails(Heard):
        def __call__(self, message: dict[str, object]) -> str:
            super().__call__(message)
            return "FAILURE" if self.bodies[-1] == "0" else "SUCCESS"

    heard = FirstFails("SUCCESS")
    producer = c.producer()
    for number in range(3):
        producer.send(topic=c.topic, body=str(number), group="k")
    c.push(heard)
    heard.until(times + 2, 60)
    time.sleep(3)
    wanted = ["0"] * times + ["1", "2"]
    # Go's goes on with the next one, and repeats the first later.
    c.expect(sorted(heard.bodies) == wanted if c.client == "G" else heard.bodies == wanted, heard.messages)


SUBSCRIBE = Check(
    70,
    "subscribe and unsubscribe while it runs",
    "Python's as said; the others receive on after it",
    topic="NORMAL",
    group="",
)


@SUBSCRIBE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    heard, other = Heard("SUCCESS"), "t63" + c.client.lower()
    consumer, producer = c.push(heard), c.producer()
    consumer.subscribe(subs={other: "*"})
    producer.send(topic=other, body="other")
    end = time.monotonic() + 40
    while "other" not in heard.bodies and time.monotonic() < end:
        time.sleep(0.1)
    c.expect("other" in heard.bodies, f"after subscribe: {len(heard.messages)} messages")
    consumer.unsubscribe(topic=other)
    producer.send(topic=c.topic, body="still")
    end = time.monotonic() + 30
    while "still" not in heard.bodies and time.monotonic() < end:
        time.sleep(0.1)
    c.expect("still" in heard.bodies, "after unsubscribe, of the topic that stays")


SAME_ATTEMPT = Check(
    71,
    "FIFO receive: the same attempt id, and another one",
    "the same messages with new handles; another one waits for all acks, and so do all keys of the queue",
    "the same messages with new handles; another one waits for the key's acks; other keys come",
    "an order is one of a key",
    topic="FIFO",
    group="fifo",
    seconds=22,
)


@SAME_ATTEMPT.by("R")
def _(c: CheckRun) -> None:
    c.settle("PUSH_CONSUMER")

    def send(content: str, key: str = "k") -> None:
        c.answers(c.raw.send(c.raw.message(c.topic, content.encode(), message_type="FIFO", message_group=key)), 20000)

    def receive(attempt_id: str = "", size: int = 4, polling: int = 5) -> tuple[str, list[dict[str, object]]]:
        head, found = c.raw.receive(c.topic, c.group, size, 60, polling, attempt_id=attempt_id or None)
        return status(head), found

    for number in range(6):
        send(str(number))
    _, first = receive("A")
    # Ours answers with what is in the queue: dispatch may be at the others.
    took = len(first) if c.ours else 4
    c.expect(bool(first) and list(map(body, first)) == ["0", "1", "2", "3"][:took], f"A: {list(map(body, first))}")
    _, again = receive("A")
    c.expect(
        list(map(body, again)) == list(map(body, first)), f"A again: {[(body(each), attempt(each)) for each in again]}"
    )
    c.expect({attempt(each) for each in again} == {1}, "as attempt 1")
    for attempt_id in ("B", ""):
        said, other = receive(attempt_id)
        c.expect(not other, f"{attempt_id or 'none'}: {said} {list(map(body, other))}")
    c.answers(c.raw.ack(c.topic, c.group, ids(again[0])), 20000, "ack of 0:")
    said, other = receive("C")
    c.expect(not other, f"C after the ack of 0: {said} {list(map(body, other))}")
    for message in again[1:]:
        c.answers(c.raw.ack(c.topic, c.group, ids(message)), 20000, "ack:")
    said, other = receive("D", polling=10)
    last = other
    while c.ours and last and body(last[-1]) != "5":  # what has waited comes one by one
        for message in last:
            c.answers(c.raw.ack(c.topic, c.group, ids(message)), 20000, f"ack of {body(message)}:")
        last = receive(f"D after {body(last[-1])}", polling=10)[1]
        other += last
    rest = [str(number) for number in range(took, 6)]
    c.expect(list(map(body, other)) == rest, f"D after all acks: {said} {list(map(body, other))}")
    for number in range(8):
        send(f"key {number}", f"other{number}")
    found = {body(each) for turn in "EF" for each in receive(turn, 16)[1]}
    c.say(f"8 other keys while D is out: {len(found)}")
    if c.ours:
        c.expect(found == {f"key {number}" for number in range(8)}, sorted(found))


KILLED = Check(
    73,
    "a client is killed",
    "its messages come after 109 to 132 s",
    "after 60 s at most",
    "its lease isn't renewed when it is gone",
    topic="NORMAL",
    group="",
    seconds=200,
)


@KILLED.by(OFFICIAL, night=True)
def _(c: CheckRun) -> None:
    first, second = Heard("SUCCESS", wait=300), Heard("SUCCESS")
    consumer, producer = c.push(first, own=True), c.producer()
    for number in range(10):
        producer.send(topic=c.topic, body=str(number))
    first.until(10, 40)
    held = len(first.messages)
    consumer.bridge.kill()
    c.push(second)
    second.began = time.monotonic()
    second.until(10, 420)
    latest = max((at for _, _, at in second.messages), default=0.0)
    # The real one delivers some of them twice.
    good = held > 0 and len(set(second.bodies)) == 10 and (not c.ours or (latest <= 90 and len(second.bodies) == 10))
    c.expect(good, f"{held} in hand; the last {latest} s after the kill: {second.messages}")


RESTARTED = Check(
    72,
    "the server is restarted under load",
    "Node's and Java's clients go on at once; push consumers of Python and Go get nothing for up to five minutes",
    "all send and receive again in seconds; Node's and Java's are asked; halves of Python's and Go's wait for their "
    "next sync, or for another producer",
    "a server needs no settings to let a client receive",
    topic="MIXED",
    group="",
    needs="restart",
    elsewhere=OFFICIAL,
)

FORWARD = Check(
    109,
    "forward to the dead letter queue",
    "OK, and the next of the key comes; a garbage handle 50001",
    "the same; a garbage handle 40013",
    "clients repeat it for ever unless it is 40013",
    topic="FIFO",
    group="fifo",
)


@FORWARD.by("R")
def _(c: CheckRun) -> None:
    c.settle("PUSH_CONSUMER")
    for content in (b"0", b"1"):
        c.raw.send(c.raw.message(c.topic, content, message_type="FIFO", message_group="k"))
    both = {"group": {"name": c.group}, "topic": {"name": c.topic}, "delivery_attempt": 3, "max_delivery_attempts": 3}

    def forward(message_id: str, handle: str) -> dict[str, object]:
        request = {**both, "message_id": message_id, "receipt_handle": handle}
        return c.raw.call("ForwardMessageToDeadLetterQueue", request)  # type: ignore[no-any-return]

    _, [first] = c.raw.receive(c.topic, c.group, size=1, auto_renew=True, invisible=None, polling=15)
    c.expect(body(first) == "0", "the first")
    c.answers(forward(*ids(first)), 20000, "forward:")
    _, found = c.raw.receive(c.topic, c.group, size=1, auto_renew=True, invisible=None, polling=10)
    c.expect(list(map(body, found)) == ["1"], f"next: {list(map(body, found))}")
    c.answers(forward("x", "garbage"), c.either(real=50001, ours=40013), "garbage:")


LEAVES = Check(110, "a consumer that says it ends", "what it held comes after 3 to 5 s", topic="NORMAL", group="")


@LEAVES.by("R")
def _(c: CheckRun) -> None:
    raw = c.another_raw()
    stream, _ = c.settle("PUSH_CONSUMER", raw)
    raw.call("Heartbeat", {"client_type": "PUSH_CONSUMER", "group": {"name": c.group}})
    raw.send(raw.message(c.topic))
    _, [message] = raw.receive(c.topic, c.group, auto_renew=True, invisible=None, polling=15)
    c.answers(raw.call("NotifyClientTermination", {"group": {"name": c.group}}), 20000, "termination:")
    stream.cut()
    began = time.monotonic()
    other = c.another_raw()
    c.settle(raw=other)
    found: list[Answer] = []
    while not found and time.monotonic() < began + 60:
        _, found = other.receive(c.topic, c.group, polling=20)
    spent = time.monotonic() - began
    c.expect(bool(found) and ids(found[0])[0] == ids(message)[0] and spent < 20, f"again after {spent:.1f} s")
    c.expect(bool(found) and attempt(found[0]) == 2, f"attempt {found and attempt(found[0])}")
