"""Messages for later, and their recall."""

from __future__ import annotations

import time

from tests.rocketmq.conformance.raw import utc
from tests.rocketmq.conformance.suite import OFFICIAL, Check, CheckRun
from tests.rocketmq.raw import code

DUE = Check(29, "a delay of 10 s", "delivered 0.1 to 0.7 s after it", topic="DELAY", group="")


@DUE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    at = int(time.time()) + 10
    c.say(producer.send(topic=c.topic, body="a", at=at))
    found = c.drain(consumer, 1, 60)
    # Not before; after it, as late as the machine is busy.
    c.expect(len(found) == 1 and time.time() >= at - 0.5, f"delivered {time.time() - at:+.2f} s after it")


PAST = Check(30, "a time that is over", "delivered at once", topic="DELAY", group="")


@PAST.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    c.say(producer.send(topic=c.topic, body="a", at=int(time.time()) - 60))
    began = time.monotonic()
    found = c.drain(consumer, 1, 30)
    c.expect(len(found) == 1, f"delivered after {time.monotonic() - began:.2f} s")


TOO_LATE = Check(31, "a delay of more than a day", "40012", topic="DELAY")


@TOO_LATE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, day = c.producer(), int(time.time()) + 86400
    c.accepted(lambda: producer.send(topic=c.topic, body="a", at=day - 60), "a day less a minute:")
    c.refused(lambda: producer.send(topic=c.topic, body="a", at=day + 60), 40012, what="a day and a minute:")


RECALL = Check(
    32, "recall", "the message's id comes back, and it is never delivered", topic="DELAY", group="", seconds=20
)


@RECALL.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer, consumer = c.producer(), c.simple(wait=10)
    receipt = producer.send(topic=c.topic, body="a", at=int(time.time()) + 12)
    answer = producer.recall(topic=c.topic, handle=receipt["recall"])
    c.expect(answer["id"] == receipt["id"], f"recalled {answer}")
    found = c.drain(consumer, 1, 22)
    c.expect(not found, f"{len(found)} delivered")


HANDLES = Check(
    33,
    "recall with garbage, of another topic, twice, after delivery",
    "50001, but twice is OK",
    topic="DELAY",
    group="",
    seconds=20,
)


@HANDLES.by("R")
def _(c: CheckRun) -> None:
    def delayed(seconds: int) -> str:
        sent = c.raw.send(c.raw.message(c.topic, message_type="DELAY", delivery_timestamp=utc(seconds)))
        return str(sent["entries"][0]["recall_handle"])

    c.answers(c.raw.recall(c.topic, "garbage"), 50001, "garbage:")
    c.answers(c.raw.recall(c.topic, ""), 50001, "empty:")
    handle = delayed(60)
    c.answers(c.raw.recall("t29p", handle), 50001, "another topic:")
    c.answers(c.raw.recall(c.topic, handle), 20000, "once:")
    c.answers(c.raw.recall(c.topic, handle), 20000, "twice:")
    handle = delayed(4)
    c.settle()
    found = [each for _ in range(4) for each in c.raw.receive(c.topic, c.group)[1]]
    c.expect(len(found) == 1, f"{len(found)} delivered")
    answer = c.raw.recall(c.topic, handle)
    c.answers(answer, 50001, "after delivery:")


FORBIDDEN = Check(34, "recall where the server doesn't allow it", "50001", topic="DELAY", needs="norecall")


@FORBIDDEN.by("R")
def _(c: CheckRun) -> None:
    sent = c.raw.send(c.raw.message(c.topic, message_type="DELAY", delivery_timestamp=utc(30)))
    c.expect(code(sent) == 20000, sent)
    c.answers(c.raw.recall(c.topic, sent["entries"][0].get("recall_handle", "")), 50001)
