"""Transactions: commit, rollback, and the question to a producer that hasn't decided."""

from __future__ import annotations

import time

from tests.rocketmq.conformance.bridge import ClientRaised
from tests.rocketmq.conformance.raw import body, ids, next_command
from tests.rocketmq.conformance.suite import OFFICIAL, Asked, Check, CheckRun

#: So long (seconds) nothing more is to come after the last question or delivery; checks come each 3 s at most.
_QUIET = 8

COMMIT = Check(35, "commit", "delivered, of type TRANSACTION; not asked about", topic="TRANSACTION", group="")


@COMMIT.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("ROLLBACK")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    transaction, receipt = c.half(producer, tag="T", keys=["k"], props={"a": "b"})
    c.expect(receipt["tx"] != "", f"transaction id {receipt['tx']}, message id {receipt['id']}")
    transaction.commit()
    found = c.drain(consumer, 1)
    c.expect(len(found) == 1 and found[0]["id"] == receipt["id"] and found[0]["tag"] == "T", found)
    again = c.drain(consumer, 1, _QUIET)
    if c.ours:
        c.expect(not asked.times and not again, f"asked {len(asked.times)} times, delivered again {len(again)} times")
    c.say(f"asked {len(asked.times)} times")


ROLLBACK = Check(36, "rollback", "never delivered", topic="TRANSACTION", group="", seconds=21)


@ROLLBACK.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("COMMIT")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    c.half(producer)[0].rollback()
    found = c.drain(consumer, 1, 12)
    c.expect(not found, f"{len(found)} delivered; asked {len(asked.times)} times")


ORPHAN = Check(
    37,
    "an undecided half, whose checker says COMMIT",
    "asked once, delivered once",
    topic="TRANSACTION",
    group="",
    seconds=18,
)


@ORPHAN.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("COMMIT")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    receipt = c.half(producer, tag="T", props={"a": "b"})[1]
    found = c.drain(consumer, 1, 60)
    c.expect(len(found) == 1 and found[0]["id"] == receipt["id"], f"{len(found)} delivered; asked {asked.times}")
    last = asked.last
    same = bool(last) and last["props"].get("a") == "b" and last["tag"] == "T" and last["id"] == receipt["id"]
    c.expect(same, f"asked with {last}")
    again = c.drain(consumer, 1, _QUIET)
    c.expect(not again and len(asked.times) == 1, f"later: {len(again)} delivered; asked {asked.times}")


ASKED_ROLLBACK = Check(
    38, "its checker says ROLLBACK", "asked once, never delivered", topic="TRANSACTION", group="", seconds=20
)


@ASKED_ROLLBACK.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("ROLLBACK")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    c.half(producer)
    found = c.drain(consumer, 1, 25)
    c.expect(not found and len(asked.times) == 1, f"{len(found)} delivered; asked {asked.times}")


UNKNOWN = Check(
    39, "its checker says UNKNOWN, then COMMIT", "asked twice, delivered once", topic="TRANSACTION", group=""
)
RAISES = Check(41, "its checker raises, then says COMMIT", "asked twice, delivered once", topic="TRANSACTION", group="")


@UNKNOWN.by(OFFICIAL)
@RAISES.by("PNJ")  # a checker that panics ends a process of Go
def _(c: CheckRun) -> None:
    asked = Asked("UNKNOWN" if c.check is UNKNOWN else "RAISE", "COMMIT")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    c.half(producer)
    found = c.drain(consumer, 1, 60)
    c.expect(len(found) == 1 and len(asked.times) == 2, f"{len(found)} delivered; asked {asked.times}")


ALWAYS_UNKNOWN = Check(
    40,
    "its checker always says UNKNOWN",
    "asked 3 times, then gone: a late commit is 50001",
    "asked 3 times, then parked: a late commit is taken",
    "the verdict is the sender's",
    topic="TRANSACTION",
    group="",
    seconds=45,
)


@ALWAYS_UNKNOWN.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("UNKNOWN")
    producer, consumer = c.producer(handler=asked), c.simple(wait=10)
    transaction, _ = c.half(producer)
    found = c.drain(consumer, 1, 40)
    c.expect(not found and len(asked.times) == 3, f"{len(found)} delivered; asked {asked.times}")
    if c.ours:
        transaction.commit()
        c.expect(len(c.drain(consumer, 1, 20)) == 1, "a late commit is taken, and the message delivered")
        return
    try:
        c.say(f"a late commit, at a time when a check was late, too: {transaction.commit()}")
    except ClientRaised as raised:
        c.expect(raised.code in {50001, None}, f"a late commit: {raised}")


OTHER = Check(42, "the sender is gone", "another producer of the topic is asked", topic="TRANSACTION", group="")


@OTHER.by(OFFICIAL)
def _(c: CheckRun) -> None:
    first, second = Asked("COMMIT"), Asked("COMMIT")
    sender, _, consumer = c.producer(own=True, handler=first), c.producer(handler=second), c.simple(wait=10)
    c.half(sender)
    sender.bridge.kill()
    found = c.drain(consumer, 1, 90)
    c.expect(len(found) == 1 and len(second.times) == 1, f"{len(found)} delivered; asked {first.times}, {second.times}")


NO_PRODUCER = Check(
    43,
    "no producer for a time that all checks would take",
    "the checks are used up: a producer that comes isn't asked, and nothing is delivered",
    "a producer that comes is asked",
    "a question without a client is none",
    topic="TRANSACTION",
    group="",
    seconds=24,
)


@NO_PRODUCER.by(OFFICIAL)
def _(c: CheckRun) -> None:
    sender, consumer = c.producer(own=True, handler=Asked("COMMIT")), c.simple(wait=5)
    c.half(sender)
    sender.bridge.kill()
    time.sleep(20)
    asked = Asked("COMMIT")
    c.producer(handler=asked)
    found = c.drain(consumer, 1, 30)
    seen = f"{len(found)} delivered; asked {asked.times}"
    c.expect((len(found), len(asked.times)) == c.either(real=(0, 0), ours=(1, 1)), seen)


NO_CHECKER = Check(44, "begin without a checker", "refused by the client, but by Go's", topic="TRANSACTION")


@NO_CHECKER.by("PNJ")
def _(c: CheckRun) -> None:
    c.refused(lambda: c.producer().begin(), "IllegalArgument", "Assertion", "NullPointer")


SECOND = Check(45, "a second message in a transaction", "refused by the client, but by Go's", topic="TRANSACTION")


@SECOND.by("PNJ")
def _(c: CheckRun) -> None:
    producer = c.producer(handler=Asked("ROLLBACK"))
    transaction, _ = c.half(producer)
    c.refused(lambda: producer.send(topic=c.topic, body="b", tx=transaction.name))


WITH_GROUP = Check(46, "a transaction with a message group or a delay", "refused by the client", topic="TRANSACTION")


@WITH_GROUP.by(OFFICIAL)
def _(c: CheckRun) -> None:
    producer = c.producer(handler=Asked("ROLLBACK"))
    c.refused(lambda: c.half(producer, group="g"), what="group:")
    c.refused(lambda: c.half(producer, at=int(time.time()) + 60), what="delay:")


TWICE = Check(
    47,
    "commit twice, rollback twice; resolution 0, then commit",
    "50001 for the second: its entry is used up",
    "OK",
    "the same verdict again is no error, and UNKNOWN is none",
    topic="TRANSACTION",
    group="",
)


@TWICE.by("R")
def _(c: CheckRun) -> None:
    second = c.either(real=50001, ours=20000)
    for verdict in ("COMMIT", "ROLLBACK"):
        half = c.raw_half()
        c.answers(c.raw.end(c.topic, *half, verdict), 20000, f"{verdict} once:")
        c.answers(c.raw.end(c.topic, *half, verdict), second, f"{verdict} twice:")
    half = c.raw_half()
    c.answers(c.raw.end(c.topic, *half, "TRANSACTION_RESOLUTION_UNSPECIFIED"), 20000, "resolution 0:")
    c.answers(c.raw.end(c.topic, *half, "COMMIT"), second, "COMMIT after it:")
    for source in ("SOURCE_SERVER_CHECK", "SOURCE_UNSPECIFIED"):
        c.answers(c.raw.end(c.topic, *c.raw_half(), "COMMIT", source), 20000, f"{source}, unasked:")


OPPOSITE = Check(
    48,
    "commit after rollback, rollback after commit",
    "50001",
    "42800, with the verdict that was first",
    "the sender learns that its message was decided otherwise",
    topic="TRANSACTION",
    group="",
)


@OPPOSITE.by("R")
def _(c: CheckRun) -> None:
    for first, second in (("ROLLBACK", "COMMIT"), ("COMMIT", "ROLLBACK")):
        half = c.raw_half()
        c.answers(c.raw.end(c.topic, *half, first), 20000, f"{first}:")
        c.answers(c.raw.end(c.topic, *half, second), c.either(real=50001, ours=42800), f"then {second}:")


UNKNOWN_ID = Check(
    49,
    "an empty and an unknown transaction id, and that of another topic",
    "40008; 50001",
    "40008",
    "the code that says what is wrong",
    topic="TRANSACTION",
    group="",
)


@UNKNOWN_ID.by("R")
def _(c: CheckRun) -> None:
    message_id, transaction_id = c.raw_half()
    unknown = c.either(real=50001, ours=40008)
    c.answers(c.raw.end(c.topic, message_id, "", "COMMIT"), 40008, "empty:")
    c.answers(c.raw.end(c.topic, message_id, "  ", "COMMIT"), 40008, "blank:")
    c.answers(c.raw.end(c.topic, message_id, "unknown", "COMMIT"), unknown, "unknown:")
    c.answers(c.raw.end(c.topic, message_id, "018f6f1c-2b7e-7a1c-9c1e-0123456789ab", "COMMIT"), unknown, "no half's:")
    c.answers(c.raw.end(c.topic, "", transaction_id, "COMMIT"), 20000, "an empty message id:")
    c.answers(c.raw.end("t35p", *c.raw_half(), "COMMIT"), unknown, "another topic:")


LATE = Check(
    50,
    "a late commit, no producer connected",
    "50001 after 30 s",
    "OK",
    "a half waits for its verdict for as long as it is kept",
    topic="TRANSACTION",
    group="",
    seconds=70,
)


@LATE.by("R", night=True)
def _(c: CheckRun) -> None:
    halves = {wait: c.raw_half(orphaned_transaction_recovery_duration="3600s") for wait in (15, 28, 35, 60)}
    plain = c.raw_half()
    began = time.monotonic()
    for wait, half in halves.items():
        time.sleep(max(0, began + wait - time.monotonic()))
        expected = c.either(real=20000 if wait < 30 else 50001, ours=20000)
        c.answers(c.raw.end(c.topic, *half, "COMMIT"), expected, f"after {wait} s, recovery in an hour:")
    c.answers(c.raw.end(c.topic, *plain, "COMMIT"), c.either(real=50001, ours=20000), "after 60 s:")
    c.settle()
    found = [each for _ in range(3) for each in c.raw.receive(c.topic, c.group)[1]]
    c.expect(len(found) == c.either(real=2, ours=5), f"{len(found)} delivered")


BY_TURNS = Check(
    107,
    "two producers of a topic: which one is asked",
    "by turns",
    "the one that sent the half",
    "it alone may know",
    topic="TRANSACTION",
    seconds=20,
)


@BY_TURNS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    first, second = Asked("ROLLBACK"), Asked("ROLLBACK")
    sender, _ = c.producer(own=True, handler=first), c.producer(own=True, handler=second)
    # The real one needs their settings, which some clients send a second after their start.
    time.sleep(3)
    for number in range(6):
        c.half(sender, str(number))
    end = time.monotonic() + 30
    while len(first.times) + len(second.times) < 6 and time.monotonic() < end:
        time.sleep(0.1)
    counts = len(first.times), len(second.times)
    c.expect(
        counts == (6, 0) if c.ours else sum(counts) >= 6,
        f"6 halves of the first: asked {counts[0]} and {counts[1]} times",
    )


IMMUNITY = Check(
    108,
    "a recovery duration of the sender's own",
    "counted as checks while it lasts: of 20 s, never asked. More than an hour is 40000",
    "asked when it is over. More than an hour as there",
    "a question is due when its sender says",
    topic="TRANSACTION",
    seconds=33,
)


@IMMUNITY.by("R")
def _(c: CheckRun) -> None:
    stream, _ = c.settle("PRODUCER")
    sent: dict[str, tuple[int, float, list[float]]] = {}
    for seconds in (0, 10, 20):
        more = {"orphaned_transaction_recovery_duration": f"{seconds}s"} if seconds else {}
        sent[c.raw_half(**more)[1]] = (seconds, time.time(), [])
    end = time.time() + 32
    while time.time() < end:
        recover = (next_command(stream, 1) or {}).get("recover_orphaned_transaction_command")
        if recover:
            c.expect(body(recover["message"]) == "body", "asked with its body")
            seconds, began, times = sent[recover["transaction_id"]]
            times.append(round(time.time() - began, 1))
    for seconds, _, times in sent.values():
        wanted = seconds == c.either(real=20, ours=-1)
        c.expect((not times) is wanted and all(each >= seconds for each in times), f"{seconds} s: asked at {times} s")
    long = c.raw.message(c.topic, message_type="TRANSACTION", orphaned_transaction_recovery_duration="3601s")
    c.answers(c.raw.send(long), 40000, "3601 s:")


DECIDED = Check(
    111,
    "asked about a half that was decided a moment ago",
    "asked all the same, and the answer counts: delivered twice, or though it was rolled back",
    "never asked, and the first verdict counts",
    "a half has one verdict",
    topic="TRANSACTION",
    group="",
    seconds=27,
)


@DECIDED.by("R")
def _(c: CheckRun) -> None:
    stream, _ = c.settle("PRODUCER")
    consumer = c.another_raw()
    c.settle(raw=consumer)
    halves = {}
    for number in range(6):
        verdict = ("COMMIT", "ROLLBACK")[number % 2]
        message_id, transaction_id = c.raw_half(tag=verdict)
        halves[transaction_id] = message_id
        c.answers(c.raw.end(c.topic, message_id, transaction_id, verdict), 20000, f"{verdict}:")
        time.sleep(0.7)
    end, asked = time.time() + 12, 0
    while time.time() < end:
        recover = (next_command(stream, 1) or {}).get("recover_orphaned_transaction_command")
        if recover:
            asked += 1
            late = c.raw.end(c.topic, *ids_of(halves, recover), "COMMIT", "SOURCE_SERVER_CHECK")
            c.say(f"asked, and answered COMMIT: {late}")
    if c.ours:
        # A client that answers a question too late, or one that another server asked.
        for number, (transaction_id, message_id) in enumerate(halves.items()):
            late = c.raw.end(c.topic, message_id, transaction_id, "COMMIT", "SOURCE_SERVER_CHECK")
            c.answers(late, (20000, 42800)[number % 2], "a late answer, COMMIT:")
    found = []
    for _ in range(3):
        _, more = consumer.receive(c.topic, c.group)
        for message in more:
            consumer.ack(c.topic, c.group, ids(message))
        found += [each["system_properties"]["tag"] for each in more]
    c.say(f"asked {asked} times, delivered {found}")
    if c.ours:
        c.expect(asked == 0 and found == ["COMMIT"] * 3, f"asked {asked} times, delivered {found}")


def ids_of(halves: dict[str, str], recover: dict[str, str]) -> tuple[str, str]:
    """Return message id and transaction id of a half that is asked about."""
    return halves[recover["transaction_id"]], recover["transaction_id"]


KILLED = Check(
    114,
    "a sender that is killed between half and commit, and started again",
    "asked, and delivered once",
    topic="TRANSACTION",
    group="",
)


@KILLED.by(OFFICIAL)
def _(c: CheckRun) -> None:
    sender, consumer = c.producer(own=True, handler=Asked("COMMIT")), c.simple(wait=10)
    c.half(sender)
    sender.bridge.kill()
    asked = Asked("COMMIT")
    c.producer(own=True, handler=asked)
    found = c.drain(consumer, 1, 60)
    c.expect(len(found) == 1 and len(asked.times) == 1, f"{len(found)} delivered; asked {asked.times}")


RECOVERED = Check(
    115,
    "a producer that named another topic at its start than it sends to",
    "Go's is asked, Java's isn't",
    "asked",
    "it has sent the half",
    topic="TRANSACTION",
)


@RECOVERED.by(OFFICIAL)
def _(c: CheckRun) -> None:
    asked = Asked("ROLLBACK")
    producer = c.producer(own=True, handler=asked, topics=["t35" + c.client.lower()])
    time.sleep(3)
    c.half(producer)
    end = time.monotonic() + 30
    while not asked.times and time.monotonic() < end:
        time.sleep(0.1)
    c.say(f"asked {asked.times}")
    if c.ours:
        c.expect(len(asked.times) == 1, f"asked {asked.times}")
