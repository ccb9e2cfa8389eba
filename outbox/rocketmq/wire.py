"""Make the messages of RocketMQ 5's clients from the table beside this module: ``wire.txt``.

No generated code: stubs of ours and those of the official client can't be in one process, since both would register
the package ``apache.rocketmq.v2``, and generated code refuses runtimes that are older. So the table becomes descriptors
in a pool of its own (protobuf's ``descriptor.proto`` says what they are).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2

PACKAGE = "apache.rocketmq.v2"
SERVICE = f"{PACKAGE}.MessagingService"

_FIELD: Any = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "": _FIELD.TYPE_STRING,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "float": _FIELD.TYPE_FLOAT,
}
_WELL_KNOWN = {"Timestamp", "Duration"}
_FIELD_FORM = re.compile(r"(\w+)(?::(\w*(?:\.\w+)?)([*?]?)(?:@(\w+))?)?=(\d+)")


class WireCode(enum.IntEnum):
    """The codes that the server answers with; the table has those of others too."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    UNSUPPORTED = 50500


def _records(text: str) -> Iterator[list[str]]:
    """Yield the words of each record of the table; a line that begins with blanks goes on with the one before."""
    record: list[str] = []
    for line in text.splitlines():
        if record and not line.startswith(" "):
            yield record
            record = []
        if not line.startswith("#"):
            record += line.split()
    if record:
        yield record


class Wire:
    """The table as descriptors.

    ``classes`` are the messages by name, ``enums`` the numbers by name of each enum, ``calls`` the RPCs: request,
    response, and of which of them there is a stream.
    """

    def __init__(self, text: str) -> None:
        self.enums: dict[str, dict[str, int]] = {}
        self.calls: dict[str, tuple[str, str, bool, bool]] = {}
        fields: dict[str, list[str]] = {}
        for head, *words in _records(text):
            if head == "enum":
                self.enums[words[0]] = {name: int(number) for name, number in (word.split("=") for word in words[1:])}
            elif head == "rpc":
                name, request, response = words
                streams = request.startswith("*"), response.startswith("*")
                self.calls[name] = request.lstrip("*"), response.lstrip("*"), *streams
            else:
                fields[head] = words
        pool: Any = descriptor_pool.DescriptorPool()
        for known in (timestamp_pb2, duration_pb2):
            pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
        pool.Add(self._file(fields))
        self.classes: dict[str, Any] = {
            name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in fields
        }

    def _file(self, fields: dict[str, list[str]]) -> Any:
        file: Any = descriptor_pb2.FileDescriptorProto(
            name="outbox/rocketmq/wire.proto",
            package=PACKAGE,
            syntax="proto3",
            dependency=["google/protobuf/timestamp.proto", "google/protobuf/duration.proto"],
        )
        messages = {name: file.message_type.add(name=name) for name in fields}
        for name, values in self.enums.items():
            owner, _, own = name.rpartition(".")
            made = (messages[owner] if owner else file).enum_type.add(name=own)
            for value, number in values.items():
                made.value.add(name=value, number=number)
        for name, words in fields.items():
            self._add_fields(messages[name], name, words)
        return file

    def _add_fields(self, message: Any, owner: str, words: list[str]) -> None:
        with_presence, oneofs = [], list[str]()
        for word in words:
            if (match := _FIELD_FORM.fullmatch(word)) is None:
                raise ValueError(f"wire.txt: {owner} has a field {word!r}, which isn't written name:type=number")
            name, kind, mark, oneof, number = match.groups()
            repeated = _FIELD.LABEL_REPEATED if mark == "*" or kind == "map" else _FIELD.LABEL_OPTIONAL
            field = message.field.add(name=name, number=int(number), label=repeated)
            self._type(message, owner, field, kind or "")
            if mark == "?":
                field.proto3_optional = True
                with_presence.append(field)
            if oneof:
                if oneof not in oneofs:
                    oneofs.append(oneof)
                    message.oneof_decl.add(name=oneof)
                field.oneof_index = oneofs.index(oneof)
        # The oneofs that stand for presence come behind the real ones, as protoc has them.
        for field in with_presence:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")

    def _type(self, message: Any, owner: str, field: Any, kind: str) -> None:
        """Give a field the type that the table names."""
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        elif kind in _WELL_KNOWN:
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".google.protobuf.{kind}"
        elif kind == "map":
            entry = message.nested_type.add(name="".join(map(str.title, field.name.split("_"))) + "Entry")
            entry.options.map_entry = True
            for number, part in enumerate(("key", "value"), 1):
                entry.field.add(name=part, number=number, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{owner}.{entry.name}"
        else:
            of_owner = f"{owner}.{kind}" in self.enums
            is_enum = of_owner or kind in self.enums
            field.type = _FIELD.TYPE_ENUM if is_enum else _FIELD.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{owner}.{kind}" if of_owner else f".{PACKAGE}.{kind}"


WIRE: Wire = Wire(Path(__file__).with_name("wire.txt").read_text("utf-8"))


def new(name: str, **fields: Any) -> Any:
    """Return a message of the table with these fields."""
    return WIRE.classes[name](**fields)


def status_of(code: WireCode, text: str = "") -> Any:
    """Return the status that each answer has in its body."""
    return new("Status", code=int(code), message=text or code.name)


def millis(span: Any) -> int:
    """Return the milliseconds of a Timestamp or Duration, of any that a client can put into it."""
    return int(span.seconds * 1000 + span.nanos // 1_000_000)


def time_fields(milliseconds: int) -> dict[str, int]:
    """Return a Timestamp or Duration of so many milliseconds, as the field of a message takes it."""
    seconds, rest = divmod(milliseconds, 1000)
    return {"seconds": seconds, "nanos": rest * 1_000_000}
