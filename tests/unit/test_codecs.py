"""Codecs: which bodies they write and read, what they refuse, and how topics and console use them."""

from __future__ import annotations

import datetime as dt
import json
import plistlib
from decimal import Decimal
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from pydantic import BaseModel

from outbox import Outbox, Topic
from outbox.errors import InvalidHandler, InvalidMessage
from outbox.message.content import Codec, Codecs
from outbox.message.topic import VERSION_HEADER
from outbox.operator.look.redactor import Redactor

PLIST = "application/x-plist"
STRUCT = "application/vnd.shop.order+protobuf"


def to_plist(body: Any) -> bytes:
    """Encode as a property list, which knows bytes and times, and no None."""
    return plistlib.dumps(body, fmt=plistlib.FMT_BINARY)


def plists() -> Codecs:
    """Return the codecs of an application that also has property lists and a message of protobuf."""
    outbox = Outbox()
    outbox.codec(PLIST, encode=to_plist, decode=plistlib.loads)
    outbox.codec(
        STRUCT,
        encode=struct_pb2.Struct.SerializeToString,
        decode=struct_pb2.Struct.FromString,
        show=json_format.MessageToDict,
    )
    return outbox.codecs


def order(**values: Any) -> struct_pb2.Struct:
    """Return a message of protobuf."""
    return json_format.ParseDict(values, struct_pb2.Struct())


class Order(BaseModel):
    """A model with values that only JSON's rules make of texts."""

    id: int
    total: Decimal
    placed: dt.date


ORDER = Order(id=7, total=Decimal("12.50"), placed=dt.date(2026, 11, 23))


@pytest.mark.parametrize("content_type", [PLIST, f"{PLIST}; version=1", "Application/X-PList"])
def test_a_codec_writes_and_reads_its_content_type(content_type: str) -> None:
    """Parameters and capitals change nothing; what the codec knows beyond JSON comes back as it was."""
    body = {"at": dt.datetime(2026, 11, 23), "raw": b"\0\xff", "n": 7}  # noqa: DTZ001 - as a property list has it
    raw, written = plists().encode(body, content_type)
    assert (raw[:6], written) == (b"bplist", content_type)
    assert plists().decode(raw, content_type) == body


def test_bytes_of_a_type_with_a_codec_are_a_value_like_others() -> None:
    """The choice of a content type is the choice of its codec, for every body."""
    raw, _ = plists().encode(b"\0", PLIST)
    assert raw != b"\0"
    assert plists().decode(raw, PLIST) == b"\0"


@pytest.mark.parametrize(
    ("body", "content_type", "raw"),
    [
        ({"a": 1}, "application/vnd.shop+json", b'{"a":1}'),
        ("a", "application/json", b'"a"'),
        ("grüße", "text/csv", "grüße".encode()),
        (b"{", "application/json", b"{"),
        (bytearray(b"\0"), "image/png", b"\0"),
        (b"\0", "application/octet-stream", b"\0"),
    ],
)
def test_content_types_without_a_codec(body: Any, content_type: str, raw: bytes) -> None:
    """JSON and texts of all kinds are encoded, bytes are taken as they are."""
    assert Codecs().encode(body, content_type) == (raw, content_type)


def test_what_nobody_reads_stays_bytes() -> None:
    """A reader without the codec gets the bytes."""
    raw, _ = plists().encode({"a": 1}, PLIST)
    assert Codecs().decode(raw, PLIST) == raw


@pytest.mark.parametrize("content_type", ["", "json", "a/b/c", "a b/c", "ä/b", "a/b\n", "a/b; \0", "a/" + "b" * 254, 7])
def test_no_content_type(content_type: Any) -> None:
    """What isn't one is refused, with the value."""
    with pytest.raises(InvalidMessage, match="content_type"):
        Codecs().encode(b"", content_type)


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        ({"a": 1}, "application/msgpack", r"dict can't be sent as 'application/msgpack': register a codec by outbox.c"),
        ("a", "application/octet-stream", "str can't be sent as 'application/octet-stream'"),
        (object(), "application/json", "object can't be encoded as JSON"),
        ({"a": object()}, PLIST, f"dict can't be encoded by the codec of '{PLIST}': TypeError"),
        ("x", "application/x-bad", "must make bytes, not str"),
    ],
)
def test_bodies_that_can_not_be_encoded(body: Any, content_type: str, said: str) -> None:
    """The error names the type of the body, the content type and the codec's own error."""
    codecs = plists()
    codecs.register(Codec("application/x-bad", str, bytes))  # type: ignore[arg-type]  # the mistake
    with pytest.raises(InvalidMessage, match=said):
        codecs.encode(body, content_type)


def test_bytes_that_a_codec_can_not_read() -> None:
    """Whatever the codec raises is the error of a message that can't be read."""
    with pytest.raises(InvalidMessage, match=f"can't be read by the codec of '{PLIST}': InvalidFileException"):
        plists().decode(b"{}", PLIST)


@pytest.mark.parametrize(
    ("content_type", "options", "said"),
    [
        ("application/json", {}, "are read without a codec"),
        ("application/vnd.shop+json", {}, "are read without a codec"),
        ("text/csv", {}, "are read without a codec"),
        ("application/octet-stream", {}, "are read without a codec"),
        (f"{PLIST}; a=b", {}, "without parameters, in lower case: 'application/x-plist', not"),
        ("application/MsgPack", {}, "in lower case: 'application/msgpack', not"),
        ("application/msgpack", {"encode": None}, "encode = None must be a function"),
        ("application/msgpack", {"show": "x"}, "show = 'x' must be a function"),
        (PLIST, {}, "has a codec already"),
    ],
)
def test_codecs_that_can_not_be(content_type: str, options: dict[str, Any], said: str) -> None:
    """A mistake is told where the codec is registered."""
    outbox = Outbox()
    outbox.codec(PLIST, encode=to_plist, decode=plistlib.loads)
    with pytest.raises(InvalidHandler, match=said):
        outbox.codec(content_type, **{"encode": to_plist, "decode": plistlib.loads, **options})


def test_a_tenant_has_the_same_codecs() -> None:
    """What is registered on one of them, also later, counts for both."""
    outbox = Outbox()
    assert outbox.codecs is not Outbox().codecs
    outbox.codec(PLIST, encode=to_plist, decode=plistlib.loads)
    assert list(outbox.codecs) == [PLIST]


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_chooses_the_content_type() -> None:
    """The model's values are those of its JSON, and come back as the model."""
    topic = Topic("orders", Order, content_type=PLIST)
    raw, written = topic.encode(ORDER, plists())
    assert (plistlib.loads(raw), written) == ({"id": 7, "total": "12.50", "placed": "2026-11-23"}, PLIST)
    assert topic.decode(raw, written, {}, plists()) == ORDER


def test_a_sender_may_choose_otherwise() -> None:
    """The readers of a topic read each message by its own content type."""
    topic = Topic("orders", Order, content_type=PLIST)
    raw, written = topic.encode(ORDER, plists(), "application/vnd.order+json")
    assert (json.loads(raw)["total"], written) == ("12.50", "application/vnd.order+json")
    assert topic.decode(raw, written, {}, plists()) == ORDER


def test_an_older_version_in_another_format() -> None:
    """Upcasters get what the codec reads."""
    topic = Topic("orders", Order, version=2, content_type=PLIST)
    topic.upcast(1)(lambda body: {**body, "placed": "2026-11-23"})
    assert topic.decode(to_plist({"id": 7, "total": "12.50"}), PLIST, {}, plists()) == ORDER
    assert topic.decode(to_plist(ORDER.model_dump(mode="json")), PLIST, {VERSION_HEADER: "2"}, plists()) == ORDER


def test_a_topic_whose_content_type_has_no_codec() -> None:
    """The send is refused; a reader says what it can't read, and shows none of it."""
    topic = Topic("orders", Order, content_type="application/msgpack")
    with pytest.raises(InvalidMessage, match=r"register a codec by outbox.codec\('application/msgpack'"):
        topic.encode(ORDER, plists())
    with pytest.raises(InvalidMessage, match=r"the body \(application/msgpack\) can't be read as Order"):
        topic.decode(b"hunter2", "application/msgpack", {}, plists())
    with pytest.raises(InvalidMessage, match="content_type 'msgpack'"):
        Topic("orders", Order, content_type="msgpack")


def test_what_a_codec_loses_is_found_at_the_send() -> None:
    """A codec that doesn't give back what the model needs fails where the message is made, by the field."""
    codecs = Codecs()
    codecs.register(Codec(PLIST, lambda body: to_plist({"id": body["id"]}), plistlib.loads))
    with pytest.raises(InvalidMessage, match="a body of topic 'orders' must be a Order: total: Field required"):
        Topic("orders", Order, content_type=PLIST).encode(ORDER, codecs)


# --- how it is shown -------------------------------------------------------------------------------------------------


def test_what_a_codec_reads_is_shown_and_masked_as_json() -> None:
    """Names decide what is masked, as in JSON; the size is that of the bytes, where all of them are shown."""
    raw = order(number=7, iban="DE89").SerializeToString()
    body = Redactor().body(STRUCT, raw, codecs=plists())
    assert (json.loads(body.text or ""), body.masked) == ({"number": 7.0, "iban": "***"}, ("iban",))
    assert (body.content_type, body.size) == (STRUCT, None)
    revealed = Redactor().body(STRUCT, raw, codecs=plists(), reveal=True)
    assert (json.loads(revealed.text or ""), revealed.size) == ({"number": 7.0, "iban": "DE89"}, len(raw))
    assert Redactor("hidden").body(STRUCT, raw, codecs=plists()).text is None
    assert Redactor().body(STRUCT, raw).text is None


@pytest.mark.parametrize("reveal", [False, True])
@pytest.mark.parametrize(
    ("content_type", "raw"),
    [(PLIST, b"no property list"), (PLIST, to_plist({"raw": b"\0"})), (PLIST, to_plist({"nan": float("nan")}))],
)
def test_what_can_not_be_shown_stays_bytes(content_type: str, raw: bytes, reveal: bool) -> None:
    """A codec that fails, or reads what has no JSON form, never fails the page."""
    assert Redactor().body(content_type, raw, codecs=plists(), reveal=reveal).text is None


def test_a_text_alone_has_no_name_to_be_judged_by() -> None:
    """What isn't an object or a list is hidden unless it is revealed, as in JSON."""
    raw = to_plist("4111 1111 1111 1111")
    assert Redactor().body(PLIST, raw, codecs=plists()).text is None
    assert Redactor().body(PLIST, raw, codecs=plists(), reveal=True).text == '"4111 1111 1111 1111"'


def test_a_value_without_a_json_form_names_the_mend() -> None:
    """The command says which function is missing."""
    codecs = Codecs()
    codecs.register(Codec(STRUCT, struct_pb2.Struct.SerializeToString, struct_pb2.Struct.FromString))
    with pytest.raises(InvalidMessage, match="give it show=, a function that makes a dict of it: TypeError"):
        codecs.as_json(order(number=7).SerializeToString(), STRUCT)
