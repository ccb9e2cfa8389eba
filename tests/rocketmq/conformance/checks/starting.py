"""Starts of clients: routes, settings, heartbeats, credentials, TLS."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from tests.rocketmq.conformance.raw import CheckClient, next_command, signature, status
from tests.rocketmq.conformance.suite import OFFICIAL, Check, CheckRun
from tests.rocketmq.raw import Telemetry, code

TWICE = Check(1, "start and stop twice", "all start and stop", topic="NORMAL", group="")


@TWICE.by(OFFICIAL)
def _(c: CheckRun) -> None:
    for kind in (c.producer, c.simple):
        for turn in (1, 2):
            began = time.monotonic()
            thing = kind()
            started = time.monotonic()
            thing.close()
            c.say(f"{kind.__name__} {turn}: start {started - began:.2f} s, stop {time.monotonic() - started:.2f} s")


WITHOUT_TOPICS = Check(2, "a producer without topics sends", "sent (Go's Start never returns)", topic="NORMAL")


@WITHOUT_TOPICS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    c.say(c.producer(topics=[]).send(topic=c.topic, body="a"))


UNKNOWN = Check(3, "an unknown topic at start", "Python starts, and its send raises; the others don't start. No code")


@UNKNOWN.by(OFFICIAL)
def _(c: CheckRun) -> None:
    def begin() -> object:
        return c.producer(topics=["no-such-topic"], own=True).send(topic="no-such-topic", body="a")

    c.refused(begin, "route", "TOPIC_NOT_FOUND", "RUNNING")


CREDENTIALS = Check(
    4,
    "access key and secret",
    "a wrong or missing one is 40100, of every RPC; any date, upper-case hex and AK//Rocketmq are taken",
    topic="NORMAL",
    needs="auth",
)


@CREDENTIALS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    def send(**keys: Any) -> object:
        return c.producer(own=True, **keys).send(topic=c.topic, body="a")

    c.accepted(send, "right:")
    for what, keys in {
        "wrong key:": {"ak": "nobody"},
        "wrong secret:": {"sk": "wrong"},
        "none:": {"ak": "", "sk": ""},
    }.items():
        # The route is what is refused: no client tells the code.
        c.refused(lambda keys=keys: send(**keys), what=what)  # type: ignore[misc]


@CREDENTIALS.by("R")
def _(c: CheckRun) -> None:
    key, now = c.server.key, time.strftime("%Y%m%dT%H%M%SZ")
    raw = c.another_raw(key="")
    access, _, secret = key.partition(":")

    def header(key: str, date: str = now) -> dict[str, str]:
        return {"x_mq_date_time": date, "authorization": signature(key, date)}

    def send(expected: int, what: str, **metadata: str) -> None:
        c.answers(raw.send(raw.message(c.topic), **metadata), expected, what)

    send(20000, "right:", **header(key))
    send(20000, "an old date:", **header(key, "20200101T000000Z"))
    send(20000, "AK//Rocketmq:", **header(f"{access}//Rocketmq:{secret}"))
    send(40100, "an unknown key:", **header(f"nobody:{secret}"))
    send(40100, "a wrong secret:", **header(f"{access}:wrong"))
    send(40100, "no header:")
    right = header(key)
    head, _, signed = right["authorization"].rpartition("=")
    send(20000, "hex in upper case:", **{**right, "authorization": f"{head}={signed.upper()}"})
    send(40100, "garbage:", **{**right, "authorization": "garbage"})
    c.answers(raw.route(c.topic), 40100, "QueryRoute:")
    c.answers(raw.call("Heartbeat", {"client_type": "PRODUCER"}), 40100, "Heartbeat:")
    stream = raw.telemetry(raw.settings("PRODUCER", [c.topic]))
    command = next_command(stream, 10)
    c.expect(command is not None and code(command) == 40100, f"Telemetry: {command}")
    stream.cut()


CLIENT_ID = Check(5, "no client id", "40017, of every RPC", topic="NORMAL", group="")


@CLIENT_ID.by("R")
def _(c: CheckRun) -> None:
    topic = {"name": c.topic}
    requests: dict[str, dict[str, Any]] = {
        "SendMessage": {"messages": [c.raw.message(c.topic)]},
        "QueryRoute": {"topic": topic, "endpoints": c.raw.endpoints},
        "Heartbeat": {"client_type": "PRODUCER"},
        "RecallMessage": {"topic": topic, "recall_handle": "x"},
        "EndTransaction": {"topic": topic},
    }
    for name, request in requests.items():
        c.answers(c.raw.call(name, request, x_mq_client_id=None), 40017, name)
    stream = c.raw.telemetry(c.raw.settings("PRODUCER", [c.topic]), x_mq_client_id=None)
    command = next_command(stream, 10)
    c.expect(command is not None and code(command) == 40017, f"Telemetry: {command}")
    stream.cut()


PUB_SUB = Check(6, "settings without publishing or subscription", "gRPC's INVALID_ARGUMENT ends the stream")


@PUB_SUB.by("R")
def _(c: CheckRun) -> None:
    settings = c.raw.settings("PRODUCER")
    del settings["publishing"]
    stream = c.raw.telemetry(settings)
    answer, failure = next_command(stream), stream.failure
    good = answer is None and failure is not None and failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    c.expect(good, f"{answer} {failure and failure.code()} {failure and failure.details()}")
    stream.cut()


HEARTBEAT = Check(
    7,
    "a heartbeat before settings",
    "40015",
    "OK",
    "Python's client sends none for up to ten minutes after a restart, and needs none",
    topic="NORMAL",
    group="",
)


@HEARTBEAT.by("R")
def _(c: CheckRun) -> None:
    def heartbeat(kind: str, **more: Any) -> Any:
        return c.raw.call("Heartbeat", {"client_type": kind, **more})

    group = {"group": {"name": c.group}}
    c.answers(heartbeat("PRODUCER"), c.either(real=40015, ours=20000), "producer:")
    c.answers(heartbeat("SIMPLE_CONSUMER", **group), c.either(real=40015, ours=20000), "consumer:")
    c.settle("PRODUCER")
    c.answers(heartbeat("PRODUCER"), 20000, "after settings:")
    c.answers(heartbeat("PUSH_CONSUMER", **group), 20000, "of another kind:")


ROUTE = Check(
    8,
    "the endpoint in a route",
    "its own, not the one that was asked for (local mode)",
    "the one that the client asked for",
    "so a client behind any forwarded port, name or TLS setting comes back by the way it came",
    topic="NORMAL",
)


@ROUTE.by("R")
def _(c: CheckRun) -> None:
    other = {"scheme": "DOMAIN_NAME", "addresses": [{"host": "mq.example", "port": 1234}]}
    answer = c.raw.route(c.topic, endpoints=other)
    first, *_ = queues = answer["message_queues"]
    c.expect((first["broker"]["endpoints"] == other) is c.ours, f"asked for mq.example:1234, got {first['broker']}")
    c.say(f"{len(queues)} queues, {first['permission']}, {first['accept_message_types']}")
    c.expect(bool(first["permission"] and first["accept_message_types"]), "what Java's client can't do without")
    c.answers(c.raw.call("QueryRoute", {"topic": {"name": c.topic}}), 20000, "without endpoints:")
    c.answers(c.raw.route("no-such-topic"), 40402, "unknown:")
    c.answers(
        c.raw.call("QueryRoute", {"topic": {"name": c.topic, "resource_namespace": "ns"}, "endpoints": other}),
        40402 if c.ours else 20000,
        "with a namespace:",
    )


NAMESPACES = Check(
    116,
    "a topic in a namespace",
    "the namespace is ignored: clients of each have one topic",
    "each has its own",
    "what is named apart is kept apart",
    topic="NORMAL",
)


@NAMESPACES.by("R")
def _(c: CheckRun) -> None:
    sent = c.raw.message(c.topic)
    sent["topic"]["resource_namespace"] = "another"
    c.answers(c.raw.send(sent), 40402 if c.ours else 20000, "in a namespace where there is no topic:")


ASSIGNMENT = Check(9, "assignments", "one of id -1; of a FIFO group one a queue", topic="FIFO", group="fifo")


@ASSIGNMENT.by("R")
def _(c: CheckRun) -> None:
    queues = len(c.raw.route(c.topic)["message_queues"])
    c.settle("PUSH_CONSUMER")
    for group, expected in {c.group: list(range(queues)), "g51r": [-1], "no-such-group": [-1]}.items():
        request = {"topic": {"name": c.topic}, "endpoints": c.raw.endpoints, "group": {"name": group}}
        answer = c.raw.call("QueryAssignment", request)
        found = [each["message_queue"].get("id", 0) for each in answer.get("assignments", [])]
        c.expect(found == expected, f"{group}: {status(answer)} queue ids {found}")


TLS = Check(10, "TLS", "Java and Go take any certificate; Python and Node verify it", topic="NORMAL")


@TLS.by("R")
def _(c: CheckRun) -> None:
    host, _, port = c.server.tls.rpartition(":")
    pem = ssl.get_server_certificate((host, int(port)))
    with TemporaryDirectory() as folder:
        path = Path(folder, "server.pem")
        path.write_text(pem)
        known = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]  # nothing public reads one
    c.say(f"certificate of {known['subject']}, also {known.get('subjectAltName')}, until {known['notAfter']}")
    name = {key: value for part in known["subject"] for key, value in part}.get("commonName", "localhost")
    credentials = grpc.ssl_channel_credentials(pem.encode())
    secure = CheckClient(c.server.tls, c.server.key, credentials, [("grpc.ssl_target_name_override", name)])
    c.answers(secure.send(secure.message(c.topic)), 20000, "sent, with its certificate as the root:")
    secure.close()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as tls:
        c.expect(tls.selected_alpn_protocol() == "h2", f"{tls.version()} {tls.selected_alpn_protocol()}")


@TLS.by(OFFICIAL)
def _(c: CheckRun) -> None:
    def send() -> object:
        return c.producer(own=True, tls=True, timeout=5, endpoints=c.server.tls).send(topic=c.topic, body="a")

    if c.client in "JG":
        c.accepted(send, "sent:")
    else:
        c.refused(send)


SETTINGS = Check(
    101, "settings that are answered", "merged: the server's fields over the client's", topic="NORMAL", group=""
)


@SETTINGS.by("R")
def _(c: CheckRun) -> None:
    for kind in ("PRODUCER", "SIMPLE_CONSUMER", "PUSH_CONSUMER"):
        raw = c.another_raw()
        _, answer = c.settle(kind, raw)
        c.expect(answer is not None and code(answer) == 20000, f"{kind}: {json.dumps(answer)}")
        settings = answer["settings"] if answer else {}
        policy = settings.get("backoff_policy", {})
        if kind == "PRODUCER":
            c.expect(settings["publishing"]["max_body_size"] == 4 << 20, "without it, no client sends anything")
            c.expect("exponential_backoff" in policy, "without it, Java's doesn't start, and Node's process dies")
        else:
            batch, poll = (
                settings["subscription"].get(name) for name in ("receive_batch_size", "long_polling_timeout")
            )
            c.expect(bool(batch and poll), "without them, push consumers of Java and Go receive nothing")
            c.expect(policy.get("max_attempts") == 17, "the group's attempts")
            c.expect(settings.get("client_type") == kind, "what the client is")
        c.answers(raw.call("Heartbeat", {"client_type": kind, "group": {"name": c.group}}), 20000, "heartbeat:")


HALF_CLOSED = Check(
    113,
    "a telemetry stream that the client half-closes",
    "ended by the server: Java's close() waits for that",
    topic="NORMAL",
)


def _ends(stream: Telemetry) -> bool:
    try:
        return stream.get(10) is None
    except queue.Empty:
        return False


@HALF_CLOSED.by("R")
def _(c: CheckRun) -> None:
    stream, _ = c.settle("PRODUCER")
    stream.half_close()
    ended = _ends(stream)
    c.expect(ended and stream.failure is None, f"ended: {ended} {stream.failure}")


UNCALLED = Check(104, "RPCs that no client calls", "UNIMPLEMENTED", topic="NORMAL", group="")


@UNCALLED.by("R")
def _(c: CheckRun) -> None:
    queue = {"topic": {"name": c.topic}, "broker": {"name": "broker-a", "endpoints": c.raw.endpoints}}
    requests: dict[str, dict[str, Any]] = {
        "PullMessage": {"message_queue": queue},
        "UpdateOffset": {},
        "GetOffset": {},
        "QueryOffset": {},
    }
    for name, request in requests.items():
        try:
            c.expect(False, f"{name} was answered: {c.raw.call(name, request, timeout=10)}")
        except grpc.RpcError as failure:
            found = failure.code()
            c.expect(found is grpc.StatusCode.UNIMPLEMENTED, f"{name}: {found}")
