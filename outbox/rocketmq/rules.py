"""Check what clients send as RocketMQ's proxy does: the same limits, codes and texts.

The names are those of its ``GrpcValidator``, ``TopicValidator`` and ``MessageConst``; what the real one answers to each
is in the checks 13 to 24, 31 and 53 of the conformance suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from outbox.database.execute import CONTENDED, sqlstate
from outbox.errors import InvalidMessage, OutboxBusy
from outbox.message.content import MAX_GROUP, MAX_TOPIC, check_any_topic
from outbox.rocketmq.wire import WIRE, WireCode, millis
from outbox.text import message_of, storable

MAX_BODY = 4 * 1024 * 1024
MAX_PROPERTIES = 128
MAX_PROPERTY_BYTES = 16 * 1024
MAX_MESSAGE_GROUP = 64
MAX_DELAY = 86_400
MAX_RECOVERY = 3_600
MIN_INVISIBLE, MAX_INVISIBLE = 10, 12 * 3_600
#: So many bytes a text may have that has no smaller limit of its own, so many parts a list, so many bytes the address
#: that a client has asked by: each queue of a route has it.
MAX_TEXT, MAX_PARTS, MAX_ENDPOINTS = 16 * 1024, 1_000, 4 * 1024

TYPES: Mapping[str, int] = WIRE.enums["MessageType"]
NORMAL, FIFO, DELAY, TRANSACTION = (TYPES[name] for name in ("NORMAL", "FIFO", "DELAY", "TRANSACTION"))
_TYPE_NAMES = {number: name for name, number in TYPES.items()}

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_ALLOWED = "^[%|a-zA-Z0-9_-]+$"
#: So many characters of a refused name are told.
_SHOWN = 255
#: As Java's `Character.isISOControl`.
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")
#: Properties that RocketMQ keeps for itself (`MessageConst.STRING_HASH_SET`).
_RESERVED_WORDS = """
KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID ORIGIN_MESSAGE_ID
TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION TRACE_ON UNIQ_KEY EXTEND_UNIQ_INFO
MAX_RECONSUME_TIMES CONSUME_START_TIME TRAN_PREPARED_QUEUE_OFFSET TRANSACTION_CHECK_TIMES
CHECK_IMMUNITY_TIME_IN_SECONDS INSTANCE_ID CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER
MSG_TYPE POP_CK POP_CK_OFFSET 1ST_POP_TIME INNER_NUM INNER_BASE DUP_INFO INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET
TIMER_DELAY_LEVEL TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES
TIMER_OUT_MS TIMER_DEL_UNIQKEY __transactionId__
"""
RESERVED: frozenset[str] = frozenset(_RESERVED_WORDS.split())
#: With which code a field of this name is refused that is too large; any other one with that of a bad request.
_CODES: Mapping[str, WireCode] = {
    "tag": WireCode.ILLEGAL_MESSAGE_TAG,
    "keys": WireCode.ILLEGAL_MESSAGE_KEY,
    "message_group": WireCode.ILLEGAL_MESSAGE_GROUP,
    "expression": WireCode.ILLEGAL_FILTER_EXPRESSION,
    "receipt_handle": WireCode.INVALID_RECEIPT_HANDLE,
    "transaction_id": WireCode.INVALID_TRANSACTION_ID,
}
_IN_LISTS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE})
#: Headers of ours begin so; a property of this name would be taken for one.
OWN_PREFIXES = ("outbox-", "rocketmq-")


class Refused(Exception):
    """A request that is answered with a code and a text; nothing was done of it."""

    def __init__(self, code: WireCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def refusal_of(error: Exception) -> Refused:
    """Return the code and text with which an error of the framework's is told to a client."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OutboxBusy):
        return Refused(WireCode.TOO_MANY_REQUESTS, message_of(error))
    if sqlstate(error) in CONTENDED:
        return Refused(WireCode.TOO_MANY_REQUESTS, "another transaction is in the way; try again later")
    if isinstance(error, InvalidMessage):
        return Refused(WireCode.BAD_REQUEST, message_of(error))
    return Refused(WireCode.INTERNAL_SERVER_ERROR, "the server failed at this request; its log has the reason")


def check_bounds(request: Any, where: str = "") -> None:
    """Raise Refused, which names the field, if a text or a list in a request is too large for any call.

    ``where`` is the path of a part, with a dot at its end. Bodies and properties have limits of their own.
    """
    if request.ByteSize() < 2 * MAX_PARTS:  # no more fits in: so are nearly all
        return
    for field, value in request.ListFields():
        path, code = f"{where}{field.name}", _CODES.get(field.name, WireCode.BAD_REQUEST)
        if isinstance(value, str):
            _check_size(path, code, len(value.encode()), MAX_TEXT)
        elif field.name == "endpoints":
            _check_size(path, WireCode.ILLEGAL_ACCESS_POINT, value.ByteSize(), MAX_ENDPOINTS)
        elif hasattr(value, "ListFields"):
            check_bounds(value, f"{path}.")
        elif field.type in _IN_LISTS and not hasattr(value, "keys"):
            _check_size(path, code, len(value), MAX_PARTS, "parts")
            for number, part in enumerate(value):
                if isinstance(part, str):
                    _check_size(f"{path}[{number}]", code, len(part.encode()), MAX_TEXT)
                else:
                    check_bounds(part, f"{path}[{number}].")


def _check_size(path: str, code: WireCode, size: int, most: int, what: str = "bytes") -> None:
    if size > most:
        raise Refused(code, f"{path} has {size} {what}, max is {most}")


def check_topic(name: str) -> str:
    """Return the name of a topic; raise Refused if it isn't one, or the system's."""
    if not name.strip():
        raise Refused(WireCode.ILLEGAL_TOPIC, "The specified topic is blank")
    if len(name) > MAX_TOPIC:
        raise Refused(WireCode.ILLEGAL_TOPIC, f"The specified topic is longer than topic max length {MAX_TOPIC}.")
    if not _NAME.fullmatch(name):
        text = f"The specified topic[{storable(name)}] contains illegal characters, allowing only {_ALLOWED}"
        raise Refused(WireCode.ILLEGAL_TOPIC, text)
    try:
        return check_any_topic(name)
    except InvalidMessage:
        raise Refused(WireCode.ILLEGAL_TOPIC, "cannot access system topic") from None


def is_topic(name: str) -> bool:
    """Tell whether a topic can have this name."""
    try:
        check_topic(name)
    except Refused:  # this is what is asked
        return False
    return True


def check_group(name: str) -> str:
    """Return the name of a consumer group; raise Refused if it isn't one, or the system's."""
    if not name.strip():
        raise Refused(WireCode.ILLEGAL_CONSUMER_GROUP, "the specified group is blank")
    if len(name) > MAX_GROUP:
        text = f"the specified group is longer than group max length {MAX_GROUP}."
        raise Refused(WireCode.ILLEGAL_CONSUMER_GROUP, text)
    if not _NAME.fullmatch(name):
        text = f"the specified group[{storable(name)}] contains illegal characters, allowing only {_ALLOWED}"
        raise Refused(WireCode.ILLEGAL_CONSUMER_GROUP, text)
    if name.startswith("CID_RMQ_SYS_"):
        raise Refused(WireCode.ILLEGAL_CONSUMER_GROUP, "cannot use system consumer group")
    return name


def check_message(message: Any, now: float, most: int = MAX_BODY) -> int:
    """Return the type that a message has by what is in it; raise Refused if the proxy would.

    ``now`` is a Unix time, ``most`` how many bytes a body may have here, at most those that it may have there.
    """
    system = message.system_properties
    if not system.message_id.strip():
        raise Refused(WireCode.ILLEGAL_MESSAGE_ID, "message id cannot be empty")
    if _CONTROL.search(system.message_id) or len(system.message_id.encode()) > 255:
        text = "message id must have at most 255 bytes, and no control character"
        raise Refused(WireCode.ILLEGAL_MESSAGE_ID, text)
    if not message.body:
        raise Refused(WireCode.MESSAGE_BODY_EMPTY, "message body cannot be empty")
    if len(message.body) > (most := min(most, MAX_BODY)):
        raise Refused(WireCode.MESSAGE_BODY_TOO_LARGE, f"message body cannot exceed the max {most}")
    _check_texts(system)
    _check_properties(message)
    if (system.HasField("lite_topic") and system.lite_topic) or system.HasField("priority"):
        raise Refused(WireCode.UNSUPPORTED, "lite topics and priorities are not supported by this server")
    if millis(system.orphaned_transaction_recovery_duration) > MAX_RECOVERY * 1000:
        text = f"the max orphaned transaction recovery duration is too large, max is {MAX_RECOVERY}"
        raise Refused(WireCode.BAD_REQUEST, text)
    return _type_of(system, now)


def _check_texts(system: Any) -> None:
    if system.HasField("tag"):
        _check_text(WireCode.ILLEGAL_MESSAGE_TAG, "tag", system.tag)
        if "|" in system.tag:
            raise Refused(WireCode.ILLEGAL_MESSAGE_TAG, "tag cannot contain '|'")
    for key in system.keys:
        _check_text(WireCode.ILLEGAL_MESSAGE_KEY, "key", key)
    if system.HasField("message_group"):
        _check_text(WireCode.ILLEGAL_MESSAGE_GROUP, "message group", system.message_group)
        if len(system.message_group.encode()) >= MAX_MESSAGE_GROUP:
            text = f"message group exceed the max size {MAX_MESSAGE_GROUP}"
            raise Refused(WireCode.ILLEGAL_MESSAGE_GROUP, text)


def _check_text(code: WireCode, what: str, text: str) -> None:
    if text and not text.strip():
        raise Refused(code, f"{what} cannot be the char sequence of whitespace")
    if _CONTROL.search(text):
        raise Refused(code, f"{what} cannot contain control character")


def _check_properties(message: Any) -> None:
    properties = message.user_properties
    if len(properties) > MAX_PROPERTIES:
        text = f"too many user properties, max is {MAX_PROPERTIES}"
        raise Refused(WireCode.MESSAGE_PROPERTIES_TOO_LARGE, text)
    system = message.system_properties
    size = sum(len(text.encode()) for text in (system.tag, *system.keys))
    for name, value in properties.items():
        if name in RESERVED or name.lower().startswith(OWN_PREFIXES):
            raise Refused(WireCode.ILLEGAL_MESSAGE_PROPERTY_KEY, f"property is used by system: {name[:_SHOWN]}")
        for what, text in (("key", name), ("value", value)):
            if _CONTROL.search(text):
                refused = f"the {what} of property cannot contain control character"
                raise Refused(WireCode.ILLEGAL_MESSAGE_PROPERTY_KEY, refused)
            size += len(text.encode())
    if size > MAX_PROPERTY_BYTES:
        text = f"the total size of user property is too large, max is {MAX_PROPERTY_BYTES}"
        raise Refused(WireCode.MESSAGE_PROPERTIES_TOO_LARGE, text)


def _type_of(system: Any, now: float) -> int:
    if system.HasField("delivery_timestamp"):
        if millis(system.delivery_timestamp) > (now + MAX_DELAY) * 1000:
            text = f"the max delay time of message is too large, max is {MAX_DELAY * 1000}"
            raise Refused(WireCode.ILLEGAL_DELIVERY_TIME, text)
        return TRANSACTION if system.message_type == TRANSACTION else DELAY
    if system.message_type == TRANSACTION:
        return TRANSACTION
    return FIFO if system.message_group else NORMAL


def check_type(expected: str, actual: int) -> None:
    """Raise Refused if a topic takes messages of another type alone; one that is MIXED takes all."""
    if expected not in {"MIXED", _TYPE_NAMES[actual]}:
        text = "TopicMessageType validate failed, the expected type is {}, but actual type is {}"
        raise Refused(WireCode.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, text.format(expected, _TYPE_NAMES[actual]))


def check_invisible(seconds: float, least: float = MIN_INVISIBLE) -> float:
    """Return for how long a message is to be invisible; raise Refused if that is too short or too long."""
    if seconds < least:
        text = f"the invisibleTime is too small. min is {least * 1000:.0f}"
        raise Refused(WireCode.ILLEGAL_INVISIBLE_TIME, text)
    if seconds > MAX_INVISIBLE:
        text = f"the invisibleTime is too large. max is {MAX_INVISIBLE * 1000}"
        raise Refused(WireCode.ILLEGAL_INVISIBLE_TIME, text)
    return seconds
