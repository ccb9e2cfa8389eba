"""May two releases live beside each other? What the schemas say is held against what the models really read."""

from __future__ import annotations

import datetime as dt
import enum
import re
from decimal import Decimal
from typing import Annotated, Any, Literal, Union

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from outbox.errors import InvalidSettings
from outbox.message.compatibility import (
    Form,
    TopicProblem,
    as_json,
    from_json,
    problems,
    publish,
    unpublished,
    unreadable,
)
from outbox.message.topic import Topic
from tests.kit import tries


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Fewer(enum.Enum):
    RED = "red"


#: Another enum of the name that `Fewer` has in a schema.
Renamed: Any = enum.Enum("Fewer", {"RED": "red", "BLUE": "blue"})  # type: ignore[misc]  # the other name is the point
Short = Annotated[str, Field(max_length=2)]


class Point(BaseModel):
    x: int
    y: int = 0


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


class Tree(BaseModel):
    name: str
    children: list[Tree] = []


class NamedTree(BaseModel):
    name: str
    children: list[NamedTree] = []
    note: str | None = None


class NumberedTree(BaseModel):
    name: int
    children: list[NumberedTree] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


def form(model: Any) -> Form:
    """Return what a model reads and writes."""
    return Form.of(Topic("t", model))


def why(reader: Any, writer: Any) -> list[str]:
    """Return why what one model writes may not be read by the other."""
    return list(unreadable(form(reader).reads, form(writer).writes))


@pytest.mark.parametrize(
    ("reader", "writer", "reason"),
    [
        (int, str, "the body is string, and integer is expected"),
        (int, float, "the body is number, and integer is expected"),
        (float, int, None),
        (int, Any, "the body is of any type, and integer is expected"),
        (Any, Point, None),
        (str | None, str, None),
        (str, str | None, "the body is null, and string is expected"),
        (Decimal, Decimal, None),
        (Decimal, str, "field|the body"),
        (Annotated[Decimal, Field(ge=0)], Decimal, "the body may be string"),
        (Decimal, Annotated[Decimal, Field(ge=0)], None),
        (dt.datetime, dt.datetime, None),
        (dt.date, dt.datetime, "the body must have format"),
        (str, dt.date, None),
        (dt.date, str, "the body must have format"),
        (Color, Color, None),
        (Color, Fewer, None),
        (Fewer, Color, 'the body may be "blue"'),
        (Color, str, "the body may be anything"),
        (str, Color, None),
        (Literal[1, 2], Literal[1], None),
        (int, Literal[1, 2], None),
        (int, Literal[True], "the body is boolean, and integer is expected"),
        (Annotated[int, Field(ge=1)], Annotated[int, Field(gt=0)], "must have minimum 1"),
        (Annotated[int, Field(gt=0)], Annotated[int, Field(ge=1)], None),
        (Annotated[int, Field(le=5)], Annotated[int, Field(le=5)], None),
        (Annotated[int, Field(lt=5)], Annotated[int, Field(le=5)], "must have exclusiveMaximum 5"),
        (Annotated[int, Field(ge=1)], int, "must have minimum 1"),
        (Annotated[str, Field(max_length=5)], Annotated[str, Field(max_length=6)], "must have maxLength 5"),
        (Annotated[str, Field(max_length=6)], Annotated[str, Field(max_length=5)], None),
        (Annotated[str, Field(min_length=1)], str, "must have minLength 1"),
        (Annotated[str, Field(pattern="a+")], Annotated[str, Field(pattern="a")], "must have pattern"),
        (list[int], list[str], r"field \* is string"),
        (list[float], list[int], None),
        (tuple[int, str], tuple[int, str], None),
        (tuple[int, str], tuple[int, int], "field 1 is integer"),
        (tuple[int, str], tuple[int, str, str], "must have maxItems 2"),
        (list[int], tuple[int, int], None),
        (set[int], list[int], "must have uniqueItems"),
        (list[int], set[int], None),
        (dict[str, int], dict[str, str], r"field \* is string"),
        (dict[str, int], Point, None),
        (dict[str, str], dict[Annotated[str, Field(pattern="^a")], int], r"field \* is integer"),
        (dict[str, int], dict[Annotated[str, Field(pattern="^a")], int], None),
        (dict[Annotated[str, Field(pattern="^a")], int], dict[str, int], "must have patternProperties"),
        (dict[Color, int], dict[Color, int], None),
        (dict[Color, int], dict[Fewer, int], None),
        (dict[Fewer, int], dict[Color, int], r'field \(name\) may be "blue"'),
        (dict[Fewer, int], dict[Renamed, int], r'field \(name\) may be "blue"'),
        (dict[int, int], dict[str, int], r"field \(name\) must have format"),
        (dict[int, int], dict[int, int], None),
        (dict[str, int], dict[int, int], None),
        (dict[Short, int], dict[Short, int], None),
        (dict[Short, int], dict[str, int], r"field \(name\) must have maxLength 2"),
        (Point, dict[str, int], "field x is required, and isn't always written"),
        (Point, Closed, None),
        (Closed, Point, "field y isn't known to a reader that forbids other fields"),
        (Pet, Cat, None),
        (Pet, Pet, None),
        (Cat, Pet, "field lives is required"),
        (Cat | Dog, Pet, None),
        (Tree, Tree, None),
        (Tree, NamedTree, None),
        (NamedTree, Tree, None),
        (NumberedTree, Tree, "field name is string"),
        (Tree | NumberedTree, list[Tree], "the body"),
    ],
)
def test_what_a_reader_can_read(reader: Any, writer: Any, reason: str | None) -> None:
    """Of each rule of a schema, a pair that keeps it and one that doesn't."""
    found = why(reader, writer)
    if reason is None:
        assert found == []
    else:
        assert found != []
        assert re.search(reason, found[0]), found


def test_what_another_alternative_meets_again_fails_again() -> None:
    """A pair that one alternative has failed at isn't taken for one that is under way."""

    class Bad(BaseModel):
        tree: NumberedTree
        mark: Literal[1]

    class Worse(BaseModel):
        tree: NumberedTree
        mark: Literal[2]

    class Written(BaseModel):
        tree: Tree
        mark: Literal[2]

    assert why(Bad | Worse, Written) != []


# --- against the models themselves ------------------------------------------------------------------------------------

_SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-9, 9)),
    (float, st.floats(-9, 9)),
    (bool, st.booleans()),
    (str, st.text(max_size=3)),
    (type(None), st.none()),
    (Decimal, st.decimals(-9, 9, places=2)),
    (Annotated[Decimal, Field(ge=0)], st.decimals(0, 9, places=2)),
    (dt.date, st.dates()),
    (Color, st.sampled_from(Color)),
    (Fewer, st.just(Fewer.RED)),
    (Literal["red", "green"], st.sampled_from(["red", "green"])),
    (Annotated[int, Field(ge=0, le=5)], st.integers(0, 5)),
    (Annotated[int, Field(gt=0, lt=5)], st.integers(1, 4)),
    (Annotated[str, Field(min_length=1, max_length=2)], st.text(min_size=1, max_size=2)),
    (Annotated[str, Field(max_length=3)], st.text(max_size=3)),
]

Typed = tuple[Any, st.SearchStrategy[Any]]


def _deeper(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    some: Any = list, dict, tuple  # made into types by values, which mypy can't follow
    list_of, dict_of, tuple_of = some
    keys = st.sampled_from("abc")
    return st.one_of(
        inner.map(lambda one: (list_of[one[0]], st.lists(one[1], max_size=2))),
        inner.map(lambda one: (dict_of[str, one[0]], st.dictionaries(keys, one[1], max_size=2))),
        st.tuples(inner, inner).map(lambda two: (tuple_of[two[0][0], two[1][0]], st.tuples(two[0][1], two[1][1]))),
        st.tuples(inner, inner).map(lambda two: (_either(two[0][0], two[1][0]), two[0][1])),
        st.dictionaries(keys, st.tuples(inner, st.booleans()), max_size=3).flatmap(_model),
    )


def _either(one: Any, other: Any) -> Any:
    return Union[one, other]  # noqa: UP007 - None | None is no type


def _model(fields: dict[str, tuple[Typed, bool]]) -> st.SearchStrategy[Typed]:
    """Return models with these fields, optional where it says so, closed or open to others."""

    def make(extra: Literal["ignore", "forbid", "allow"]) -> Typed:
        typed: dict[str, Any] = {}
        for name, ((kind, _), optional) in fields.items():
            typed[name] = (_either(kind, None), None) if optional else (kind, ...)
        model = create_model("Made", __config__=ConfigDict(extra=extra), **typed)
        needed = {name: values for name, ((_, values), optional) in fields.items() if not optional}
        others = {name: values for name, ((_, values), optional) in fields.items() if optional}
        return model, st.fixed_dictionaries(needed, optional=others).map(lambda found: model(**found))

    return st.sampled_from(["ignore", "forbid", "allow"]).map(make)  # type: ignore[arg-type]  # literals


_TYPES = st.recursive(st.sampled_from(_SCALARS), _deeper, max_leaves=4)


@given(data=st.data(), reader=_TYPES, writer=_TYPES)
@settings(max_examples=tries(100), suppress_health_check=list(HealthCheck))
def test_what_is_judged_readable_is_read(data: st.DataObject, reader: Typed, writer: Typed) -> None:
    """Whatever a model writes, the other reads, if its schema was judged to allow it."""
    try:
        judged = why(reader[0], writer[0])
    except (TypeError, ValidationError):  # not every mixture is a type
        return
    if not judged:
        value = data.draw(writer[1])
        raw = TypeAdapter(writer[0]).dump_json(value, by_alias=True, warnings="none")
        TypeAdapter(reader[0]).validate_json(raw)


@given(model=_TYPES)
@settings(max_examples=tries(50), suppress_health_check=list(HealthCheck))
def test_a_model_reads_what_it_writes(model: Typed) -> None:
    """A release that changed nothing is compatible with itself."""
    try:
        found = why(model[0], model[0])
    except TypeError:
        return
    assert found == []


# --- the file of what was published -----------------------------------------------------------------------------------


class OrderOne(BaseModel):
    number: int


class OrderOneMore(BaseModel):
    number: int
    note: str = ""


class OrderTwo(BaseModel):
    number: str


def test_optional_fields_come_and_go() -> None:
    """Each form is added beside those before, which are all compared with."""
    published = publish({"orders": Topic("orders", OrderOne)}, {})
    more = {"orders": Topic("orders", OrderOneMore)}
    assert list(problems(more, published)) == []
    assert unpublished(more, published) == ["orders"]
    published = publish(more, published)
    assert len(published["orders"]["1"]) == 2
    assert unpublished(more, published) == []
    assert list(problems({"orders": Topic("orders", OrderOne)}, published)) == []


def test_another_type_needs_another_version() -> None:
    """The problem names the field and the mend."""
    published = publish({"orders": Topic("orders", OrderOne)}, {})
    assert list(problems({"orders": Topic("orders", OrderTwo)}, published)) == [
        TopicProblem(
            "orders",
            "can't read bodies of releases before: field number is integer, and string is expected; make it optional, "
            "or declare version 2 with an upcaster",
        )
    ]
    second = Topic("orders", OrderTwo, version=2)
    (problem,) = problems({"orders": second}, published)
    assert problem.problem == "has no upcaster from version 1 to 2: write @topic.upcast(1)"
    second.upcast(1)(lambda body: {"number": str(body["number"])})
    assert list(problems({"orders": second}, published)) == []


def test_a_version_never_goes_back_and_a_topic_never_vanishes() -> None:
    """Messages of both may wait in the log."""
    second = Topic("orders", OrderOne, version=2)
    published = publish({"orders": second}, {})
    assert [each.problem for each in problems({"orders": Topic("orders", OrderOne)}, published)] == [
        "is at version 1, but version 2 was published"
    ]
    assert [each.problem for each in problems({}, published)] == [
        "isn't declared any more, and messages of it may wait for years"
    ]


def test_the_file_keeps_what_was_published() -> None:
    """Written and read, it is the same."""
    published = publish({"orders": Topic("orders", OrderOne), "pets": Topic[Any]("pets", Tree)}, {})
    assert from_json(as_json(published)) == published


@pytest.mark.parametrize("document", [[], {"a": []}, {"a": {"x": []}}, {"a": {"1": [{}]}}, {"a": {"1": [1]}}, 7])
def test_a_file_that_is_something_else(document: Any) -> None:
    """It is named as what it isn't, and never taken for an empty one."""
    with pytest.raises(InvalidSettings, match="no file of published topics"):
        from_json(document)
