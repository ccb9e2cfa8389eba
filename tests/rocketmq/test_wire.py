"""The messages made of the table are those of the official client, and both live in one process."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.rocketmq.wire import PACKAGE, WIRE, Code, Wire, new

stubs: Any = pytest.importorskip("rocketmq.grpc_protocol.service_pb2")
definitions: Any = pytest.importorskip("rocketmq.grpc_protocol.definition_pb2")


def _official() -> dict[str, Any]:
    """Return the descriptors of the official client's messages."""
    files = stubs.DESCRIPTOR, definitions.DESCRIPTOR
    return {name: each for file in files for name, each in file.message_types_by_name.items()}


def _shape(field: Any) -> tuple[object, ...]:
    of_type = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return field.number, field.type, field.is_repeated, field.has_presence, oneof, of_type and of_type.full_name


def test_each_message_is_the_official_one() -> None:
    """All fields have the same names, numbers, types, labels and oneofs, but for fields that the client hasn't yet."""
    official = _official()
    assert official.keys() - WIRE.classes.keys() <= {"GetOffsetRequest"}
    compared = 0
    for name, ours in ((name, kind.DESCRIPTOR) for name, kind in WIRE.classes.items() if name in official):
        theirs = {field.name: _shape(field) for field in official[name].fields}
        mine = {field.name: _shape(field) for field in ours.fields}
        assert {field: mine.get(field) for field in theirs} == theirs, name
        compared += len(theirs)
    assert compared > 100


def test_each_enum_is_the_official_one() -> None:
    """All names that the official client knows have the same numbers, and our codes are among them."""
    for name, theirs in definitions.DESCRIPTOR.enum_types_by_name.items():
        numbers = {value.name: value.number for value in theirs.values}
        assert {known: WIRE.enums[name].get(known) for known in numbers} == numbers, name
    assert {code.name: code.value for code in Code}.items() <= WIRE.enums["Code"].items()


def test_each_call_is_the_official_one() -> None:
    """The RPCs that the official client knows take and answer the same messages, as streams or not."""
    for method in stubs.DESCRIPTOR.services_by_name["MessagingService"].methods:
        streams = method.client_streaming, method.server_streaming
        assert WIRE.calls[method.name] == (method.input_type.name, method.output_type.name, *streams)


def test_a_message_comes_back_alike_from_the_official_class() -> None:
    """Bytes of ours are read by the official class, and written alike."""
    system = new("SystemProperties", tag="a", keys=["k", "l"], message_id="1", delivery_attempt=0)
    system.store_timestamp.FromMilliseconds(1_700_000_000_123)
    ours = new(
        "Message", topic={"name": "orders"}, user_properties={"a": "b"}, system_properties=system, body=b"\0\xff"
    )
    theirs = definitions.Message.FromString(ours.SerializeToString())
    assert theirs.system_properties.HasField("delivery_attempt")
    assert not theirs.system_properties.HasField("trace_context")
    assert theirs.system_properties.store_timestamp.ToMilliseconds() == 1_700_000_000_123
    assert dict(theirs.user_properties) == {"a": "b"}
    assert type(ours).FromString(theirs.SerializeToString()) == ours
    assert type(ours) is not type(theirs)
    assert type(ours).DESCRIPTOR.full_name == type(theirs).DESCRIPTOR.full_name == f"{PACKAGE}.Message"


def test_a_field_that_is_not_written_so_is_named() -> None:
    """A slip of the pen in the table says where it is."""
    with pytest.raises(ValueError, match="Resource has a field 'name'"):
        Wire("Resource name")
