"""Bodies to bytes and back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import threading
import uuid
from decimal import Decimal
from typing import Any, NamedTuple

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.errors import InvalidMessage
from outbox.message.content import BYTES, JSON, TEXT, decode, encode
from outbox.message.topic import Topic

text = st.text(st.characters(exclude_categories=["Cs"]))
jsonable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    ANN = "ann"


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass
class Line:
    item: uuid.UUID
    price: Decimal


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    number: int
    at: dt.datetime
    lines: list[Line]


class Model(pydantic.BaseModel):
    amount: Decimal
    day: dt.date
    inner: Model | None = None


@given(jsonable)
def test_json_comes_back(value: Any) -> None:
    """What JSON knows comes back as it went, whatever the text; str has a content type of its own."""
    raw, content_type = encode(value)
    assert content_type == (TEXT if isinstance(value, str) else JSON)
    assert decode(raw, content_type) == value


@given(st.binary())
def test_bytes_come_back(value: bytes) -> None:
    """Bytes, bytearray and memoryview are stored as they are."""
    for given_value in (value, bytearray(value), memoryview(value)):
        assert encode(given_value) == (value, BYTES)
    assert decode(value, BYTES) == value


@given(text)
def test_text_comes_back(value: str) -> None:
    """Text is stored as UTF-8."""
    raw, content_type = encode(value)
    assert (raw, content_type) == (value.encode(), TEXT)
    assert decode(raw, content_type) == value


@given(st.decimals(allow_nan=False), st.uuids(), st.datetimes(timezones=st.just(dt.UTC)), st.dates(), st.times())
def test_business_types_come_back(
    amount: Decimal, id_: uuid.UUID, at: dt.datetime, day: dt.date, time: dt.time
) -> None:
    """Decimal, UUID, dates and times travel as text, exactly, and a model reads them again."""
    raw, content_type = encode({"amount": amount, "id": id_, "at": at, "day": day, "time": time})
    body = decode(raw, content_type)
    assert all(isinstance(value, str) for value in body.values())
    assert (Decimal(body["amount"]), uuid.UUID(body["id"])) == (amount, id_)
    assert (dt.datetime.fromisoformat(body["at"]), dt.date.fromisoformat(body["day"])) == (at, day)
    assert dt.time.fromisoformat(body["time"]) == time


@given(st.lists(st.builds(Line, st.uuids(), st.decimals(allow_nan=False, allow_infinity=False, places=2)), max_size=3))
def test_dataclass_comes_back(lines: list[Line]) -> None:
    """A dataclass, also frozen with slots and with others in it, is read as itself again."""
    order = Order(7, dt.datetime(2030, 1, 2, tzinfo=dt.UTC), lines)
    raw, content_type = encode(order)
    assert decode(raw, content_type, Order) == order


@given(st.decimals(allow_nan=False, allow_infinity=False), st.dates())
def test_pydantic_model_comes_back(amount: Decimal, day: dt.date) -> None:
    """A pydantic model is written and read by its own rules, alone and inside of a dict."""
    model = Model(amount=amount, day=day, inner=Model(amount=amount, day=day))
    raw, content_type = encode(model)
    assert decode(raw, content_type, Model) == model
    raw, content_type = encode({"model": model, "models": [model]})
    assert decode(raw, content_type, dict[str, Model | list[Model]]) == {"model": model, "models": [model]}


@pytest.mark.parametrize(
    ("value", "json_value"),
    [
        (Color.RED, "red"),
        ([Level.HIGH, Name.ANN], [3, "ann"]),
        ({"k": {3, 1, 2}, "f": frozenset([2, 1])}, {"k": [1, 2, 3], "f": [1, 2]}),
        (dt.timedelta(minutes=1), 60.0),
        (Pair(1, "b"), [1, "b"]),
        ((), []),
        (None, None),
        (0, 0),
        (Decimal("0.10"), "0.10"),
        ({"line": Line(uuid.UUID(int=1), Decimal("1.50"))}, {"line": {"item": str(uuid.UUID(int=1)), "price": "1.50"}}),
    ],
)
def test_json_form(value: Any, json_value: Any) -> None:
    """Enums, sets, tuples, durations and Decimals have one plain form."""
    raw, content_type = encode(value)
    assert content_type == JSON
    assert json.loads(raw) == json_value


def test_text_in_json_is_not_escaped() -> None:
    """JSON is written in UTF-8 and without blanks: bytes are what the limit counts."""
    assert encode({"ä": ["€", 1]}) == ('{"ä":["€",1]}'.encode(), JSON)


class Unserializable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    lock: Any


@dataclasses.dataclass
class HasLock:
    lock: Any


circular: dict[str, Any] = {}
circular["self"] = circular
deep: list[Any] = []
for _ in range(100_000):
    deep = [deep]
loop = HasLock(None)
loop.lock = loop


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (object(), "type object.*object has no JSON form"),
        ({"a": [object()]}, "type dict.*object has no JSON form"),
        (lambda: None, "type function"),
        (Model, "ModelMetaclass"),
        (Order, "type type"),
        (circular, "Circular"),
        (deep, "type list"),
        (loop, "type HasLock"),
        (float("nan"), "not JSON compliant"),
        ({"a": float("inf")}, "not JSON compliant"),
        ("\ud800", "character that UTF-8 can't hold"),
        ({"a": "\ud800"}, "surrogates not allowed"),
        ({uuid.UUID(int=1): 1}, "keys must be str"),
        ({(1, 2): 1}, "keys must be str"),
        ({1, "a"}, "type set"),
        (HasLock(threading.Lock()), "type HasLock"),
        ({"a": b"bytes"}, "bytes has no JSON form"),
        (1 + 2j, "complex has no JSON form"),
        (Unserializable(lock=object()), "type Unserializable"),
        (Unserializable(lock="\ud800"), "type Unserializable"),
        ({"a": Unserializable(lock=object())}, "type dict"),
        (10**5000, "type int"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_unencodable(body: Any, said: str) -> None:
    """A body without an encoding is an InvalidMessage that names the type or the value, whatever the cause."""
    with pytest.raises(InvalidMessage, match=said):
        encode(body)


@pytest.mark.parametrize(
    ("raw", "content_type", "model"),
    [
        (b"{", JSON, None),
        (b"\xff", JSON, None),
        (b"\xff", TEXT, None),
        (b"", JSON, None),
        (b"{}", JSON, Model),
        (b'{"amount":"x","day":"2030-01-01"}', JSON, Model),
        (b"[" * 100_000, JSON, None),
        (b"x", TEXT, int),
    ],
)
def test_unreadable(raw: bytes, content_type: str, model: Any) -> None:
    """Bytes that don't fit the content type or the model are an InvalidMessage that names both."""
    with pytest.raises(InvalidMessage, match="can't be read") as error:
        decode(raw, content_type, model)
    assert content_type in str(error.value)
    assert model is None or model.__name__ in str(error.value)


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"]
)
def test_json_by_any_of_its_names(content_type: str) -> None:
    """JSON is recognised with parameters, in capitals and as a suffix."""
    assert decode(b'{"a":1}', content_type) == {"a": 1}
    assert decode(b'{"a":1}', content_type, dict[str, int]) == {"a": 1}


def test_unknown_content_type_stays_bytes() -> None:
    """What isn't JSON or text is handed over as it is."""
    assert decode(b"\x00\xff", "image/png") == b"\x00\xff"


class Measured(pydantic.BaseModel):
    value: float | None = None
    by_number: dict[int | str, str] = {}


class Counted(pydantic.BaseModel):
    by_number: dict[int, str]


class MeasuredText(pydantic.BaseModel):
    value: float
    none: None = None
    more: Any = None

    @pydantic.field_serializer("value")
    def as_text(self, value: float) -> str:
        """Write a number that isn't one as a text."""
        return str(value)


@dataclasses.dataclass
class Numbered:
    lines: dict[Any, str]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({1: "a", "1": "b"}, "the key 1 is of type int, and would come back as str"),
        ({"a": [{"b": {2.5: 0}}]}, "the key 2.5 at 'a.0.b' is of type float"),
        ({"a": ({None: 0},)}, "the key None at 'a.0' is of type NoneType"),
        ({"a": {True: 0}}, "the key True at 'a' is of type bool"),
        ({"a": {Level.HIGH: 0}}, "the key <Level.HIGH: 3> at 'a' is of type Level"),
        ({"a": {(1, 2): 0}}, "keys must be str"),
        ({"a": [0.5, float("nan")]}, "Out of range float values"),
        ({"a": {"b": float("-inf")}}, "Out of range float values"),
        ({"a": {"b": "\ud800"}}, "'utf-8' codec can't encode"),
        ({"a": [{"\udfff": 1}]}, "'utf-8' codec can't encode"),
        ({"a": [object()]}, "object has no JSON form"),
        ({"a": [1, b"x"]}, "bytes has no JSON form"),
        ([10**5000], "Exceeds the limit"),
        (Measured(value=float("nan")), "would come back as null"),
        ([{"m": Measured(value=float("inf"))}], "would come back as null"),
        (MeasuredText(value=0, more={"deep": [1, float("nan")]}), "would come back as null"),
        (Measured(by_number={1: "a", "1": "b"}), "the key 1 at 'by_number' is of type int, and would come back as str"),
        (Numbered({1: "a", "1": "b"}), "the key 1 at 'lines' is of type int, and would come back as str"),
        ({"a": Numbered({1: "a", "1": "b"})}, "the key 1 at 'a.lines' is of type int, and would come back as str"),
        ({"a": Measured(by_number={1: "a", "1": "b"})}, "the key 1 at 'by_number' is of type int"),
    ],
)
def test_what_would_not_come_back_is_refused(body: Any, said: str) -> None:
    """A JSON object has texts as its keys, and each once."""
    with pytest.raises(InvalidMessage) as error:
        encode(body)
    assert said in str(error.value)


def test_what_a_model_brings_back() -> None:
    """Its keys have types, and what it writes of a number that isn't one is its own choice; tuples become lists."""
    numbered = Counted(by_number={1: "a", 2: "c"})
    assert decode(*encode(numbered), Counted) == numbered
    assert decode(*encode(Numbered({1: "a", 2: "b"})), dict[str, dict[int, str]]) == {"lines": {1: "a", 2: "b"}}
    assert encode(MeasuredText(value=float("nan")))[0] == b'{"value":"nan","none":null,"more":null}'
    assert decode(*encode([MeasuredText(value=float("inf"))])) == [{"value": "inf", "none": None, "more": None}]
    assert decode(*encode({"a": (1, (2,)), "zero": -0.0, "big": 10**4000})) == {
        "a": [1, [2]],
        "zero": -0.0,
        "big": 10**4000,
    }
    assert decode(*encode({Name.ANN: Level.HIGH})) == {"ann": 3}
    assert decode(*encode(Numbered({Level.HIGH: "c", 4: "d"}))) == {"lines": {"3": "c", "4": "d"}}
    assert decode(*encode(Numbered({Name.ANN: "c", "d": "e"}))) == {"lines": {"ann": "c", "d": "e"}}
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    assert decode(*encode(deep)) == deep


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (Measured, Measured(value=float("nan"))),
        (dict[Any, str], {1: "a", "1": "b"}),
        (Measured, {"by_number": {1: "a", "1": "b"}}),
    ],
)
def test_a_declared_topic_refuses_the_same(model: Any, body: Any) -> None:
    """Its model writes the JSON."""
    topic: Topic[Any] = Topic("t", model)
    with pytest.raises(InvalidMessage, match="come back as"):
        topic.encode(topic.validated(body))
    assert topic.encode(topic.validated({}))
