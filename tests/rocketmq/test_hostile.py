"""Whatever a client sends, in whatever field, is answered by a status in the body, and crashes nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from sqlalchemy import Engine
from sqlalchemy import text as sql
from sqlalchemy.orm import Session

from outbox import Outbox
from outbox.consumer.leased.settlement import sealed
from outbox.rocketmq.server import RocketmqServer
from outbox.rocketmq.wire import PACKAGE, WIRE
from tests.kit import tries
from tests.kit.passes import dispatch_all
from tests.rocketmq.raw import RawClient, code, message

_TEXTS = (
    "",
    " ",
    "orders",
    "a" * 5000,
    "ü\u0000x",
    "\x7f",
    "%DLQ%x",
    "..",
    "0",
    "\U0001f600",
    "' OR 1=1 --",
    "TRUE = ",
)
_NUMBERS = (0, 1, -1, 2, 5, 2**31 - 1, -(2**31))
_LARGE = (0, 1, -1, 2**63 - 1, -(2**63), 253402300799, 10**18)
#: Of the calls that answer at once; a stream of commands is tried by itself.
_CALLS = sorted(
    name
    for name in WIRE.calls
    if name not in {"Telemetry", "PullMessage", "UpdateOffset", "GetOffset", "QueryOffset", "SyncLiteSubscription"}
)


_TOPIC, _GROUP = {"name": "orders"}, {"name": "mail"}
#: What calls are to have beside, so that they come further than to the check of a name.
_NAMED: dict[str, dict[str, Any]] = {
    "SendMessage": {"messages": [message("orders", message_group="g")]},
    "AckMessage": {"topic": _TOPIC, "group": _GROUP, "entries": [{"receipt_handle": "x"}]},
    "ReceiveMessage": {"message_queue": {"topic": _TOPIC}, "group": _GROUP, "invisible_duration": "30s"},
    "EndTransaction": {"topic": _TOPIC, "transaction_id": "01975a5e-0c6f-7a3e-8000-5d0e6f0c1a2b", "resolution": 1},
    "ChangeInvisibleDuration": {"topic": _TOPIC, "group": _GROUP},
    "ForwardMessageToDeadLetterQueue": {"topic": _TOPIC, "group": _GROUP},
    "QueryAssignment": {"topic": _TOPIC, "group": _GROUP},
    "QueryRoute": {"topic": _TOPIC},
    "RecallMessage": {"topic": _TOPIC},
}


def fill(made: Any, draw: random.Random, depth: int = 0, left_out: float = 0.35) -> Any:
    """Fill a message with values of the right types that no client would send."""
    for field in made.DESCRIPTOR.fields:
        if draw.random() < left_out:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(draw.choice((0, 1, 3, 200))):
                getattr(made, field.name)[draw.choice(_TEXTS)] = draw.choice(_TEXTS)
        elif field.message_type is not None:
            if depth < 5:
                several = field.is_repeated
                for _ in range(draw.choice((1, 1, 2)) if several else 1):
                    child = getattr(made, field.name).add() if several else getattr(made, field.name)
                    child.SetInParent() if not several else None
                    fill(child, draw, depth + 1, left_out)
        elif field.is_repeated:
            getattr(made, field.name).extend(scalar(field, draw) for _ in range(draw.choice((0, 1, 3))))
        else:
            setattr(made, field.name, scalar(field, draw))
    return made


def scalar(field: Any, draw: random.Random) -> Any:
    """Return a value of a field's type."""
    values: dict[int, tuple[Any, ...]] = {
        field.TYPE_STRING: _TEXTS,
        field.TYPE_BYTES: (b"", b"x", b"\x1f\x8b", b"\xff" * 1000),
        field.TYPE_BOOL: (False, True),
        field.TYPE_FLOAT: (0.0, -1.0, 1e38, float("inf")),
        field.TYPE_INT64: _LARGE,
        field.TYPE_ENUM: (*_NUMBERS[:5], 99),
    }
    return draw.choice(values.get(field.type, _NUMBERS))


def test_every_field(rocketmq: RocketmqServer, raw: RawClient, engine: Engine) -> None:
    """Each answer has a status that isn't the server's failure, but of handles to recall by; then all works."""
    draw = random.Random(45)  # noqa: S311 - no secret
    answered = 0
    for number in range(tries(80)):
        for name in _CALLS:
            kind = WIRE.classes[WIRE.calls[name][0]]
            named = json_format.ParseDict(_NAMED.get(name, {}), kind())
            made = fill(named, draw, left_out=0.9) if number % 2 else fill(kind(), draw)
            if name == "ReceiveMessage":
                made.batch_size = min(made.batch_size, 0)  # so that it doesn't wait
            call = raw._calls[name](made, timeout=30, metadata=raw.metadata({}))
            for part in [*call] if WIRE.calls[name][3] else [call]:
                if WIRE.calls[name][3] and not part.HasField("status"):
                    continue
                assert part.status.code, (number, name, made)
                assert part.status.code != 50001 or name == "RecallMessage", (number, name, part, made)
                answered += 1
    assert answered >= 80 * len(_CALLS)
    assert code(raw.send(message("orders"))) == 20000
    with engine.connect() as connection:
        assert connection.execute(sql("SELECT count(*) FROM outbox.half_message WHERE topic = 'orders'")).scalar_one()
    assert rocketmq.is_alive()


def large(kind: Any, of: int, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield for each text of a kind of message its path, and a message with so many bytes there; lists have parts."""
    for field in kind.DESCRIPTOR.fields:
        name, sub = field.name, field.message_type
        if sub is not None and sub.GetOptions().map_entry:
            yield name, kind(**{name: {"name": "x" * of}})
            yield name, kind(**{name: {"x" * of: "value"}})
            continue
        if sub is not None and sub.file.package == PACKAGE and depth < 4:
            for path, value in large(WIRE.classes[sub.name], of, depth + 1):
                yield f"{name}.{path}", kind(**{name: [value] if field.is_repeated else value})
        if field.type == field.TYPE_STRING:
            yield name, kind(**{name: ["x" * of] if field.is_repeated else "x" * of})
        if field.is_repeated and field.type in {field.TYPE_STRING, field.TYPE_MESSAGE}:
            made = kind()
            for _ in range(of // 8):
                getattr(made, name).append("") if sub is None else getattr(made, name).add()
            yield name, made


_MANY = [(name, path, made) for name in _CALLS for path, made in large(WIRE.classes[WIRE.calls[name][0]], 1 << 20)]


def test_no_text_and_no_list_has_no_bound(raw: RawClient, engine: Engine) -> None:
    """A megabyte in any text of any request, or a hundred thousand parts, is refused in few words, with its field."""
    for name, path, made in _MANY:
        whole = json_format.ParseDict(_NAMED.get(name, {}), WIRE.classes[WIRE.calls[name][0]]())
        for ours in whole.DESCRIPTOR.fields:  # what is beside it is as it should be
            if ours.name == path.partition(".")[0] and ours.is_repeated:
                whole.ClearField(ours.name)
        whole.MergeFrom(made)
        call = raw._calls[name](whole, timeout=60, metadata=raw.metadata({}))
        status = (next(iter(call)) if WIRE.calls[name][3] else call).status
        assert 40000 <= status.code < 50000, (name, path, status)
        assert status.code != 40401, (name, path, status)
        assert len(status.message) < 400, (name, path, status)
        assert status.code != 40000 or path.rpartition(".")[2] in status.message, (name, path, status)
    with engine.connect() as connection:
        assert not connection.execute(sql("SELECT count(*) FROM outbox.half_message")).scalar_one()


def test_no_text_of_settings_has_no_bound(rocketmq: RocketmqServer) -> None:
    """A megabyte anywhere in a command ends its stream, and so do many parts; nothing is known of them."""
    for path, made in large(WIRE.classes["TelemetryCommand"], 1 << 20):
        with RawClient(rocketmq.addresses[0]) as raw:
            with pytest.raises(grpc.RpcError, match=r"max is|no publishing"):
                list(raw._calls["Telemetry"](iter([made]), timeout=60, metadata=raw.metadata({})))
            client = next(each for each in rocketmq.clients._clients.values() if each.id == raw.id)
            assert (client.group, client.topics) == (None, frozenset()), path


def test_every_command(rocketmq: RocketmqServer) -> None:
    """A stream of commands of any kind is answered, to a name of a group too; or ends with INVALID_ARGUMENT."""
    draw = random.Random(46)  # noqa: S311 - no secret
    for _ in range(tries(60)):
        with RawClient(rocketmq.addresses[0]) as raw:
            made = fill(WIRE.classes["TelemetryCommand"](), draw)
            call = raw._calls["Telemetry"](iter([made]), timeout=30, metadata=raw.metadata({}))
            try:
                for command in call:
                    assert command.status.code in {20000, 40003}
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert rocketmq.is_alive()


#: Characters of which a run could have an expression try each of its parts.
_RUNS = ("a", "a=", "=", " ", "0", "'", "/*", "--", "(", ",", "|", "%", "e1", "\u00fc", "\n")

_PATTERNS = """
import importlib, pkgutil, re, sys
import outbox.rocketmq
from outbox.rocketmq.options import RocketmqOptions, UserGuard, UserOptions
from outbox.rocketmq.rules import Refused
names = [each.name for each in pkgutil.iter_modules(outbox.rocketmq.__path__)]
modules = [importlib.import_module(f"outbox.rocketmq.{name}") for name in names]
patterns = {each for module in modules for each in vars(module).values() if isinstance(each, re.Pattern)}
guard = UserGuard(RocketmqOptions(users={"u": UserOptions("s")}))
for run in sys.argv[1:]:
    text = run * 300_000
    for pattern in patterns:
        for end in ("", "!"):
            pattern.match(text + end), pattern.fullmatch(text + end)
    for header in (f"MQv2-HMAC-SHA1 {text}", f"MQv2-HMAC-SHA1 Credential=u, Signature={text}", text):
        try:
            guard.user_of({"authorization": header})
        except Refused:
            pass
        else:
            raise AssertionError(header[:40])
print(len(patterns))
"""


def test_no_text_holds_the_loop() -> None:
    """No expression that a client's bytes come to takes the square of their number, signed or not: minutes of these."""
    done = subprocess.run(
        [sys.executable, "-c", _PATTERNS, *_RUNS], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.returncode, done.stderr
    assert int(done.stdout) >= 5


def test_metadata(raw: RawClient) -> None:
    """Long, binary and odd metadata are no failure."""
    for name, value in (("client-id", "i" * 3000), ("language", "~" * 500), ("client-version", "")):
        metadata = raw.metadata({f"x-mq-{name}": value})
        call = raw._calls["Heartbeat"](WIRE.classes["HeartbeatRequest"](client_type=1), timeout=30, metadata=metadata)
        assert call.status.code == 20000
    bare: Any = raw.channel.unary_unary("/apache.rocketmq.v2.MessagingService/Heartbeat")
    assert bare(b"", timeout=30, metadata=(("x-mq-client-id", "i"), ("x-odd-bin", b"\xff\x00")))
    assert code(raw.call("Heartbeat", {}, x_mq_client_id="  ")) == 40017


def test_handles_of_other_hands(raw: RawClient) -> None:
    """A handle with the right checksum, and what no lease has in it, is no handle; it takes no others along."""
    id_ = "01975a5e-0c6f-7a3e-8000-5d0e6f0c1a2b"
    for words in (
        ("x", 0, id_, 1),
        (0, "x", id_, 1),
        (0, 0, "x", 1),
        (0, 0, id_, "x"),
        (0, 0, id_, 2**63),
        (0, 2**64, id_, -1),
        (0, 0, id_, "9" * 5000),
    ):
        handle = sealed("1", "mail", "orders", *words)
        assert code(raw.ack("orders", "mail", handle)) == 40013
        assert code(raw.change("orders", "mail", handle, "30s")) == 40013


def test_headers_of_other_hands(raw: RawClient, engine: Engine) -> None:
    """A header that looks like the server's, with whatever in it, keeps no message from being received."""
    outbox = Outbox(engine)
    odd = ("--5", "-", "\u0663", "9" * 400, "[" * 2_600, "{}", '[1, "\\ud800", null]', "")
    for text in odd:
        with Session(engine) as session, session.begin():
            headers = {f"rocketmq-{name}": text for name in ("id", "keys", "born-at", "deliver-at", "type", "encoding")}
            outbox.send(session, "orders", {"a": 1}, key="k", headers=headers)
    dispatch_all(engine)
    sql92 = {"type": "SQL", "expression": "KEYS IS NULL OR KEYS IS NOT NULL"}
    got = raw.receive("orders", "mail", filter_expression=sql92)
    assert (got[0], len(got[1])) == (20000, len(odd))
