"""The raw client of checks: what no official client sends, and answers with all that came."""

from __future__ import annotations

import base64
import hashlib
import hmac
import queue
import time
from collections.abc import Sequence
from typing import Any

from tests.rocketmq.raw import RawClient, Telemetry, code, message

Answer = dict[str, Any]


def status(answer: Answer) -> str:
    """Return number and text of the answer's status."""
    return f"{code(answer)} {answer.get('status', {}).get('message', '')}".strip()


def body(received: Answer) -> str:
    """Return the body of a message that came."""
    return base64.b64decode(received["body"]).decode("latin-1")


def ids(received: Answer) -> tuple[str, str]:
    """Return message id and receipt handle of a message that came."""
    return received["system_properties"]["message_id"], received["system_properties"]["receipt_handle"]


def attempt(received: Answer) -> int:
    """Return which delivery a message that came is, from 1."""
    return int(received["system_properties"]["delivery_attempt"])


def utc(seconds: float = 0.0) -> str:
    """Return the time so many seconds from now."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def signature(key: str, date: str) -> str:
    """Return the header that signs a request of this date; the key has the secret behind its colon."""
    access, _, secret = key.partition(":")
    signed = hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    return f"MQv2-HMAC-SHA1 Credential={access}, SignedHeaders=x-mq-date-time, Signature={signed}"


def next_command(stream: Telemetry, seconds: float = 20) -> Answer | None:
    """Return the server's next command; None if the stream has ended, or none comes in time."""
    try:
        return stream.get(seconds)
    except queue.Empty:
        return None


class CheckClient:
    """A client at a server; ``key`` is access key and secret, with a colon between them, or empty."""

    def __init__(self, endpoints: str, key: str = "", credentials: Any = None, options: Sequence[Any] = ()) -> None:
        access, _, secret = key.partition(":")
        self._client = RawClient(endpoints, access, secret, credentials, options)
        self.endpoints = self._client.endpoints()
        self.close = self._client.channel.close

    def call(self, name: str, request: Answer, timeout: float = 30, **metadata: str | None) -> Any:
        """Return the answer; of a streaming RPC, the list of its parts."""
        return self._client.call(name, request, timeout, **metadata)

    def telemetry(self, settings: Answer | None, **metadata: str | None) -> Telemetry:
        """Open a telemetry stream, and send settings if there are any."""
        stream = self._client.telemetry(None, **metadata)
        return stream if settings is None else stream.send({"settings": settings})

    def settings(self, kind: str, topics: Sequence[str] = (), group: str = "") -> Answer:
        """Return the settings of a client."""
        if kind == "PRODUCER":
            return self._client.producing(*topics)
        return self._client.consuming(group, *topics, kind=kind)

    def message(self, topic: str, content: bytes = b"body", properties: Answer | None = None, **system: Any) -> Answer:
        """Return a message; a system property that is None isn't sent."""
        return message(topic, content, properties, **{"born_host": "raw", **system})

    def send(self, *messages: Answer, **metadata: str | None) -> Answer:
        """Send messages in one request."""
        return self._client.send(*messages, **metadata)

    def receive(
        self,
        topic: str,
        group: str,
        size: int = 16,
        invisible: float | None = 30,
        polling: float | None = 5,
        timeout: float | None = None,
        filter_: str = "*",
        **more: Any,
    ) -> tuple[Answer, list[Answer]]:
        """Return the status part and the messages; ``parts`` of the first tells the order of the parts."""
        kind, _, text = filter_.rpartition(":") if filter_.startswith("SQL:") else ("TAG", "", filter_)
        broker = {"name": "broker-a", "endpoints": self.endpoints}
        queue_ = {"topic": {"name": topic}, "id": -1, "broker": broker, "permission": "READ_WRITE"}
        fields: Answer = {
            "message_queue": {**queue_, "accept_message_types": ["NORMAL"]},
            "filter_expression": {"type": kind, "expression": text},
            "batch_size": size,
            "invisible_duration": None if invisible is None else f"{invisible}s",
            "long_polling_timeout": None if polling is None else f"{polling}s",
        }
        parts = self._client.parts(topic, group, timeout or (polling or 20) + 10, **{**fields, **more})
        head: Answer = {"parts": [next(iter(part)) for part in parts]}
        for part in parts:
            head.update({name: value for name, value in part.items() if name == "status"})
        return head, [part["message"] for part in parts if "message" in part]

    def ack(self, topic: str, group: str, *pairs: tuple[str, str]) -> Answer:
        """Ack messages by id and handle."""
        entries = [{"message_id": message_id, "receipt_handle": handle} for message_id, handle in pairs]
        return dict(self.call("AckMessage", {"topic": {"name": topic}, "group": {"name": group}, "entries": entries}))

    def change(self, topic: str, group: str, message_id: str, handle: str, seconds: float) -> Answer:
        """Change how long a message is invisible from now on."""
        both = {"topic": {"name": topic}, "group": {"name": group}}
        which = {"message_id": message_id, "receipt_handle": handle, "invisible_duration": f"{seconds}s"}
        return dict(self.call("ChangeInvisibleDuration", {**both, **which}))

    def end(
        self, topic: str, message_id: str, transaction_id: str, resolution: str, source: str = "SOURCE_CLIENT"
    ) -> Answer:
        """Decide a half."""
        half = {"topic": {"name": topic}, "message_id": message_id, "transaction_id": transaction_id}
        return dict(self.call("EndTransaction", {**half, "resolution": resolution, "source": source}))

    def recall(self, topic: str, handle: str) -> Answer:
        """Take a delayed message back."""
        return dict(self.call("RecallMessage", {"topic": {"name": topic}, "recall_handle": handle}))

    def route(self, topic: str, **more: Any) -> Answer:
        """Ask for a topic's route."""
        return dict(self.call("QueryRoute", {"topic": {"name": topic}, "endpoints": self.endpoints, **more}))
