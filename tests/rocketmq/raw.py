"""A raw gRPC client of our own wire table: requests and answers are dicts in protobuf's JSON form."""

from __future__ import annotations

import base64
import hashlib
import hmac
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import json_format

from outbox.rocketmq.wire import SERVICE, WIRE

_CODES = WIRE.enums["Code"]
_SIZES = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


def to_dict(message: Any) -> dict[str, Any]:
    """Return a message in protobuf's JSON form, with the names of the wire."""
    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


def code(answer: dict[str, Any]) -> int:
    """Return the number of an answer's status."""
    value = answer.get("status", {}).get("code", 0)
    return int(_CODES.get(value, value))


def text(answer: dict[str, Any]) -> str:
    """Return the text of an answer's status."""
    return str(answer["status"].get("message", ""))


def message(
    topic: str, body: bytes = b"body", properties: dict[str, str] | None = None, **system: Any
) -> dict[str, Any]:
    """Return a message to send, with an id of its own; system properties that are None are left out."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    system = {
        "message_id": client_id(),
        "message_type": "NORMAL",
        "body_encoding": "IDENTITY",
        "born_timestamp": now,
    } | system
    return {
        "topic": {"name": topic},
        "body": base64.b64encode(body).decode(),
        "user_properties": properties or {},
        "system_properties": {name: value for name, value in system.items() if value is not None},
    }


def is_listening(address: str) -> bool:
    """Does anything listen at an address, such as a server that was started?"""
    host, _, port = address.rpartition(":")
    with socket.socket() as dialled:
        return dialled.connect_ex((host, int(port))) == 0


def client_id(seconds: float | None = None) -> str:
    """Return a message id as clients make them, with the time of now or another Unix time."""
    since = int((time.time() if seconds is None else seconds) - 1_609_459_200)
    return f"01{uuid.uuid4().hex[:16]}{since:08x}{uuid.uuid4().hex[:8]}".upper()


class Telemetry:
    """A telemetry stream: send a command, get the server's next one; ``failure`` is how it ended, if badly."""

    def __init__(self, call: Any) -> None:
        self._out: queue.Queue[Any] = queue.Queue()
        self._commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.failure: Any = None
        self.call = call(iter(self._out.get, None))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for command in self.call:
                self._commands.put(to_dict(command))
        except grpc.RpcError as failure:  # kept for the test
            self.failure = failure
        self._commands.put(None)

    def send(self, command: dict[str, Any]) -> Telemetry:
        """Send a command."""
        self._out.put(json_format.ParseDict(command, WIRE.classes["TelemetryCommand"]()))
        return self

    def get(self, seconds: float = 60) -> dict[str, Any] | None:
        """Return the server's next command; None once the stream has ended."""
        return self._commands.get(timeout=seconds)

    def nothing(self, seconds: float) -> bool:
        """Tell whether no command comes within so many seconds."""
        try:
            self._commands.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def half_close(self) -> None:
        """End the client's half."""
        self._out.put(None)

    def cut(self) -> None:
        """Break the stream off."""
        self.call.cancel()


class RawClient:
    """A client at one address; ``secret`` signs its requests."""

    #: For how long a receive waits unless it says otherwise.
    polling = "5s"

    def __init__(
        self, address: str, access_key: str = "", secret: str = "", credentials: Any = None, options: Any = ()
    ) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.id = f"raw@{uuid.uuid4().hex[:8]}"
        self._access_key, self._secret = access_key, secret
        options = [*_SIZES, *options]
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options)
        else:
            self.channel = grpc.secure_channel(address, credentials, options)
        self._calls: dict[str, Any] = {}
        for name, (request, response, many_in, many_out) in WIRE.calls.items():
            kind = f"{'stream' if many_in else 'unary'}_{'stream' if many_out else 'unary'}"
            self._calls[name] = getattr(self.channel, kind)(
                f"/{SERVICE}/{name}",
                request_serializer=WIRE.classes[request].SerializeToString,
                response_deserializer=WIRE.classes[response].FromString,
            )

    def metadata(self, more: dict[str, str | None]) -> list[tuple[str, str]]:
        """Return the metadata of a request; what ``more`` says is None is left out."""
        moment = time.strftime("%Y%m%dT%H%M%SZ")
        found: dict[str, str | None] = {
            "x-mq-client-id": self.id,
            "x-mq-language": "PYTHON",
            "x-mq-client-version": "5.1.2",
            "x-mq-date-time": moment,
        }
        if self._access_key:
            signature = hmac.new(self._secret.encode(), moment.encode(), hashlib.sha1).hexdigest()
            signed = f"Credential={self._access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"
            found["authorization"] = f"MQv2-HMAC-SHA1 {signed}"
        return [(name, value) for name, value in (found | more).items() if value is not None]

    def call(self, name: str, request: dict[str, Any], timeout: float = 60, **metadata: str | None) -> Any:
        """Return the answer to a call; of one that streams, the list of its parts."""
        made = json_format.ParseDict(request, WIRE.classes[WIRE.calls[name][0]]())
        more = {key.replace("_", "-"): value for key, value in metadata.items()}
        answer = self._calls[name](made, timeout=timeout, metadata=self.metadata(more))
        return [to_dict(part) for part in answer] if WIRE.calls[name][3] else to_dict(answer)

    def telemetry(self, settings: dict[str, Any] | None = None, **metadata: str | None) -> Telemetry:
        """Open a telemetry stream; with settings, send them and take the answer."""
        more = {key.replace("_", "-"): value for key, value in metadata.items()}
        stream = Telemetry(lambda commands: self._calls["Telemetry"](commands, metadata=self.metadata(more)))
        if settings is not None:
            answer = stream.send({"settings": settings}).get()
            assert answer is not None
            assert code(answer) == 20000
        return stream

    def endpoints(self) -> dict[str, Any]:
        """Return the address that it dials, as clients name it."""
        return {"scheme": "IPv4", "addresses": [{"host": self.host, "port": self.port}]}

    def producing(self, *topics: str) -> dict[str, Any]:
        """Return the settings of a producer."""
        named = [{"name": topic} for topic in topics]
        return {"client_type": "PRODUCER", "access_point": self.endpoints(), "publishing": {"topics": named}}

    def consuming(self, group: str, *topics: str, kind: str = "SIMPLE_CONSUMER") -> dict[str, Any]:
        """Return the settings of a consumer."""
        everything = {"type": "TAG", "expression": "*"}
        entries = [{"topic": {"name": topic}, "expression": everything} for topic in topics]
        named = {"group": {"name": group}, "subscriptions": entries}
        return {"client_type": kind, "access_point": self.endpoints(), "subscription": named}

    def send(self, *messages: dict[str, Any], **metadata: Any) -> dict[str, Any]:
        """Send messages."""
        return dict(self.call("SendMessage", {"messages": list(messages)}, **metadata))

    def end(self, topic: str, transaction_id: str, resolution: str, source: str = "SOURCE_CLIENT") -> dict[str, Any]:
        """Decide a transaction."""
        named = {"topic": {"name": topic}, "message_id": "any", "transaction_id": transaction_id}
        return dict(self.call("EndTransaction", named | {"resolution": resolution, "source": source}))

    def receive(self, topic: str, group: str, **more: Any) -> tuple[int, list[dict[str, Any]]]:
        """Return the code of a receive, and the messages; options are fields of the request."""
        polling = float(str(more.get("long_polling_timeout", self.polling)).rstrip("s"))
        parts = self.parts(topic, group, timeout=polling + 30, **more)
        status = next(part for part in parts if "status" in part)
        return code(status), [part["message"] for part in parts if "message" in part]

    def parts(self, topic: str, of_group: str, timeout: float = 60, **more: Any) -> list[dict[str, Any]]:
        """Return the parts of the answer to a receive."""
        return [to_dict(part) for part in self.poll(topic, of_group, timeout, **more)]

    def poll(self, topic: str, of_group: str, timeout: float = 60, **more: Any) -> Any:
        """Begin a receive; return the call, which can be cancelled."""
        request = {
            "group": {"name": of_group},
            "message_queue": {"topic": {"name": topic}, "id": -1},
            "filter_expression": {"type": "TAG", "expression": "*"},
            "batch_size": 32,
            "invisible_duration": "30s",
            "long_polling_timeout": self.polling,
        }
        kept = {name: value for name, value in (request | more).items() if value is not None}
        made = json_format.ParseDict(kept, WIRE.classes["ReceiveMessageRequest"]())
        return self._calls["ReceiveMessage"](made, timeout=timeout, metadata=self.metadata({}))

    def ack(self, topic: str, group: str, *handles: str) -> dict[str, Any]:
        """Acknowledge messages by their handles."""
        entries = [{"message_id": "any", "receipt_handle": handle} for handle in handles]
        return dict(self.call("AckMessage", {"topic": {"name": topic}, "group": {"name": group}, "entries": entries}))

    def change(self, topic: str, group: str, handle: str, duration: str) -> dict[str, Any]:
        """Change for how long a message is invisible."""
        named = {"topic": {"name": topic}, "group": {"name": group}, "receipt_handle": handle}
        return dict(self.call("ChangeInvisibleDuration", named | {"invisible_duration": duration, "message_id": "any"}))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


def handle_of(received: dict[str, Any]) -> str:
    """Return the receipt handle of a message."""
    return str(received["system_properties"]["receipt_handle"])


def body_of(received: dict[str, Any]) -> bytes:
    """Return the body of a message."""
    return base64.b64decode(received.get("body", ""))


def bodies(received: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the bodies of messages."""
    return map(body_of, received)
