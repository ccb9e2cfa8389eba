"""Make messages of ours of those of the wire, and the other way; ids and handles too.

Tag, key and properties are tag, key and headers here. What else a client says of a message is in headers that begin
with ``rocketmq-``, so that it comes out as it went in; a handler in Python sees them as any header. The key of a
message is its message group; keys, of which a message may have several and by which nothing is ordered, are a header.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import UUID

from outbox.consumer.leased.settlement import MessageLease, sealed, unsealed
from outbox.errors import InvalidMessage
from outbox.message.compression import decompress
from outbox.message.content import BYTES, ENCODING_HEADER, StoredBytes
from outbox.message.ids import message_id
from outbox.message.model import VERSION_AND_VARIANT, Message, Orphan, Outgoing, SendOptions
from outbox.rocketmq.rules import DELAY, FIFO, NORMAL, OWN_PREFIXES, TRANSACTION, TYPES, Refused
from outbox.rocketmq.wire import WIRE, WireCode, millis, new, time_fields
from outbox.text import storable, topic_of

#: Headers of what a client has said. The id is there if the client made one, the type if it isn't NORMAL.
ID_HEADER = "rocketmq-id"
TYPE_HEADER = "rocketmq-type"
KEYS_HEADER = "rocketmq-keys"
BORN_AT_HEADER = "rocketmq-born-at"
BORN_HOST_HEADER = "rocketmq-born-host"
TRACE_HEADER = "rocketmq-trace"
#: The header by which the framework's spans know the one that sends, where a client's trace context is of this form.
PARENT_HEADER = "traceparent"
CLIENT_HEADER = "rocketmq-client"
DELIVER_AT_HEADER = "rocketmq-deliver-at"
BODY_ENCODING_HEADER = "rocketmq-encoding"

#: How the id of a client begins, where it has the time in it, and when that time began (Unix seconds).
_WITH_TIME, _EPOCH = "01", 1_609_459_200
_ID_LENGTH = 34
#: So far (seconds) a client's clock may be off, that its time is taken; around that border both ids are looked for.
NEAR, _BORDER = 600.0, 120.0
_GZIP = WIRE.enums["Encoding"]["GZIP"]
_IDENTITY = WIRE.enums["Encoding"]["IDENTITY"]
_MD5 = WIRE.enums["DigestType"]["MD5"]
_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,15}", re.ASCII)
_GZIP_MAGIC = b"\x1f\x8b"
_TYPE_NAMES = {number: name for name, number in TYPES.items()}
_LATEST = dt.datetime(9999, 1, 1, tzinfo=dt.UTC).timestamp()


def half_ids(topic: str, sender: tuple[str, str], text: str, now: float) -> list[UUID]:
    """Return the id that stands for a client's id of a message to a topic, the same for each try to send it.

    ``sender`` is the client by its user and its own id: clients make ids of hardware address, process and second, and
    those of two containers are often the same.

    Two where the first that is there counts: a client's clock is off by about `NEAR`, so that a later try may be on the
    other side of that border. ``now`` is the database's Unix time. An id whose time is near makes a UUIDv7 of that
    second, which is stored with the messages of its day; any other one makes the id of a business string.
    """
    named = "\0".join((*sender, text))
    other = message_id(topic, named)
    if len(text) != _ID_LENGTH or not text.startswith(_WITH_TIME):
        return [other]
    try:
        seconds = int(text[18:26], 16) + _EPOCH
    except ValueError:
        return [other]
    hashed = int.from_bytes(hashlib.sha256(f"{topic}\0{named}".encode()).digest()[:10], "big")
    rest = hashed & ~(0xF << 76) & ~(0b11 << 62) | VERSION_AND_VARIANT
    of_time, off = UUID(int=(seconds * 1000 << 80) | rest), abs(now - seconds)
    if abs(off - NEAR) < _BORDER:
        return [of_time, other] if off < NEAR else [other, of_time]
    return [of_time] if off < NEAR else [other]


class Inbound(NamedTuple):
    """What a message of the wire is here: the message, the protocol's headers, and for how long a half is left alone.

    ``immunity`` (seconds) is None if the client names none, or it is no half.
    """

    outgoing: Outgoing
    own: dict[str, str]
    immunity: float | None


def inbound(message: Any, kind: int, half_id: UUID, client: str, content_type: str | None) -> Inbound:
    """Return what a message of the wire is here; ``kind`` is its type, ``content_type`` that of its topic."""
    system = message.system_properties
    own = {ID_HEADER: system.message_id, CLIENT_HEADER: client}
    if kind != NORMAL:
        own[TYPE_HEADER] = _TYPE_NAMES[kind]
    if system.keys:
        own[KEYS_HEADER] = json.dumps(list(system.keys), ensure_ascii=False)
    if system.HasField("born_timestamp"):
        own[BORN_AT_HEADER] = str(millis(system.born_timestamp))
    own |= {
        name: text
        for name, text in ((BORN_HOST_HEADER, system.born_host), (TRACE_HEADER, system.trace_context))
        if text
    }
    if system.body_encoding == _GZIP:
        own[BODY_ENCODING_HEADER] = "GZIP"
        if message.body.startswith(_GZIP_MAGIC):  # old clients say so of zlib's streams, too, which handlers can't read
            own[ENCODING_HEADER] = "gzip"
    headers = dict(message.user_properties)
    if _PARENT.fullmatch(system.trace_context):
        headers.setdefault(PARENT_HEADER, system.trace_context)
    options: SendOptions = {
        "id": half_id,
        "key": system.message_group or None,
        "tag": system.tag if system.HasField("tag") else None,
        "headers": headers,
        "content_type": content_type or BYTES,
    }
    if system.HasField("delivery_timestamp"):
        own[DELIVER_AT_HEADER] = str(due := millis(system.delivery_timestamp))
        options["deliver_at"] = dt.datetime.fromtimestamp(min(max(due / 1000, 0), _LATEST), dt.UTC)
    recovery = millis(system.orphaned_transaction_recovery_duration) / 1000
    immunity = recovery if kind == TRANSACTION and recovery > 0 else None
    return Inbound(Outgoing(StoredBytes(message.body), **options), own, immunity)


def difference(message: Any, kind: int, stored: Sequence[Any]) -> str:
    """Return what of a message differs from one that is stored as its type, encoding, key, tag and body; "" if nothing.

    What a client may say otherwise at each try, such as the time of the message, isn't looked at.
    """
    of_type, encoding, key, tag, body = stored
    system, sent = message.system_properties, message.body
    named = {
        "type": (of_type or _TYPE_NAMES[NORMAL], _TYPE_NAMES[kind]),
        "message group": (key, system.message_group or None),
        "tag": (tag, system.tag if system.HasField("tag") else None),
        "body": (body, sent),
    }
    if body != sent and encoding is not None:
        with suppress(InvalidMessage):  # it differs then
            named["body"] = decompress(body, encoding, len(sent)), sent
    return next((what for what, (one, other) in named.items() if one != other), "")


def wire_message(message: Message | Orphan, topic: Any, *, fifo: bool = False) -> Any:
    """Return a message as clients receive it; its headers of ours aren't among the properties.

    ``topic`` is the Resource by which the client knows its topic.

    ``fifo``: for a group that keeps the order of keys, where the key of a message that no client has sent is its
    message group; elsewhere it is one of its keys.
    """
    headers = message.headers
    from_client = ID_HEADER in headers
    gzip = headers.get(BODY_ENCODING_HEADER) == "GZIP"
    try:
        body = message.stored if gzip else message.raw
    except InvalidMessage:  # larger than this server may decompress: the client can
        body, gzip = message.stored, True
    system = new(
        "SystemProperties",
        message_id=headers.get(ID_HEADER) or str(message.id),
        keys=keys_of(headers),
        body_digest={"type": _MD5, "checksum": hashlib.md5(body, usedforsecurity=False).hexdigest().upper()},
        body_encoding=_GZIP if gzip else _IDENTITY,
        message_type=TYPES.get(headers.get(TYPE_HEADER, ""), NORMAL),
        born_timestamp=time_fields(_number(headers.get(BORN_AT_HEADER)) or _unix_ms(message.born_at)),
        born_host=headers.get(BORN_HOST_HEADER, ""),
    )
    if message.tag is not None:
        system.tag = message.tag
    properties = {name: text for name, text in headers.items() if not name.startswith(OWN_PREFIXES)}
    if (trace := headers.get(TRACE_HEADER, headers.get(PARENT_HEADER))) is not None:
        system.trace_context = trace
        if from_client and properties.get(PARENT_HEADER) == trace:  # it was no property of the sender's
            del properties[PARENT_HEADER]
    if message.key is not None:
        if from_client or fifo:
            system.message_group = message.key
            if not from_client:
                system.message_type = FIFO
        else:
            system.keys.append(message.key)
    if (due := _number(headers.get(DELIVER_AT_HEADER))) is not None and system.message_type == DELAY:
        system.delivery_timestamp.seconds, rest = divmod(due, 1000)
        system.delivery_timestamp.nanos = rest * 1_000_000
    return new("Message", topic=topic, user_properties=properties, system_properties=system, body=body)


def keys_of(headers: Mapping[str, str]) -> list[str]:
    """Return the keys that a client has given a message."""
    try:
        found = json.loads(headers.get(KEYS_HEADER, "[]"))
    except (ValueError, RecursionError):  # another sender has written the header, by hand
        return []
    return [storable(key) for key in found if isinstance(key, str)] if isinstance(found, list) else []


def _number(text: str | None) -> int | None:
    """Return the number that a header is; None where another sender has written something else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _unix_ms(moment: dt.datetime) -> int:
    return int(moment.timestamp() * 1000)


# --- handles -------------------------------------------------------------------------------------------------------


def recall_handle(topic: str, half_id: UUID) -> str:
    """Return the handle by which a delayed message is recalled."""
    return sealed("recall", topic, half_id)


def recalled_id(handle: str, topic: str) -> UUID:
    """Return the id of the message that a handle recalls; raise Refused if it is no handle of this topic."""
    try:
        kind, of_topic, id_ = unsealed(handle, 3)
        if (kind, of_topic) == ("recall", topic):
            return UUID(id_)
    except ValueError:  # told below
        pass
    raise Refused(WireCode.INTERNAL_SERVER_ERROR, "recall handle is invalid")


def lease_of(handle: str, group: str, topic: str) -> MessageLease:
    """Return the lease that a receipt handle is; raise Refused if it is none, or another group's or topic's."""
    try:
        lease = MessageLease.of_handle(handle)
    except ValueError:
        text = "receipt handle is not one of this server's"
        raise Refused(WireCode.INVALID_RECEIPT_HANDLE, text) from None
    if (lease.group, topic_of(lease.topic)) != (group, topic):
        of = f"group {lease.group} and topic {topic_of(lease.topic)}"
        text = f"receipt handle is of {of}, not of {group} and {topic}"
        raise Refused(WireCode.INVALID_RECEIPT_HANDLE, text)
    return lease
