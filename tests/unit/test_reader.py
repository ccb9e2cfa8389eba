"""One reader for every way in: what it makes of texts and data, and what it says of what it refuses."""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

from outbox.errors import InvalidRequest, InvalidSettings
from outbox.reader import FieldShape, Reader, Seconds, environment, grouped, option, plain, shape_of

ID = UUID("01975a5e-0c6f-7a3e-8000-5d0e6f0c1a2b")
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


class Colour(enum.StrEnum):
    """Texts."""

    RED = "red"
    DARK_BLUE = "dark blue"


class Grade(enum.IntEnum):
    """Numbers, whose names are written in lower case."""

    GOOD = 1
    NOT_SO_GOOD = 2


@dataclass(frozen=True, slots=True)
class Inner:
    """A table inside a table."""

    name: str
    size: int = 1


def upper(text: Any) -> str:
    """Return a text in capitals."""
    if not isinstance(text, str) or not text.isalpha():
        raise ValueError("letters")
    return text.upper()


@dataclass(frozen=True, slots=True)
class Everything:
    """One field of each type."""

    text: str = option("", "Some text.", most=5)
    number: int = option(1, least=0, most=10)
    ratio: float = option(0.5, above=0, below=1)
    flag: bool = False
    wait: Seconds = 1.0
    age: dt.timedelta | None = None
    at: dt.datetime | None = None
    day: dt.date | None = None
    id: UUID | None = None
    file: Path | None = None
    colour: Colour | None = None
    grade: Grade | None = None
    kind: Literal["a", "b"] | None = None
    texts: tuple[str, ...] = option((), aliases=("text-list",))
    numbers: frozenset[int] = frozenset()
    waits: list[Seconds] | None = None
    colours: tuple[Colour, ...] = ()
    header: tuple[str, str] | None = None
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    labels: Mapping[str, str] | None = None
    grades: Mapping[Grade, Colour] | None = None
    capitals: str = option("", parse=upper)
    password: str = option("", secret=True, most=10)
    anything: Any = None


def data(**values: Any) -> Everything:
    """Read data."""
    return Reader().read(Everything, values)


def text(**values: Any) -> Everything:
    """Read texts."""
    return Reader("text").read(Everything, values)


DATA: list[tuple[str, Any, Any]] = [
    ("text", "a b,c", "a b,c"),
    ("number", 3, 3),
    ("ratio", 0.25, 0.25),
    ("flag", True, True),
    ("wait", 5, 5),
    ("wait", "1h30m", 5400.0),
    ("wait", "1.5h", 5400.0),
    ("age", "2w", dt.timedelta(weeks=2)),
    ("at", "2026-03-01T13:00:00+01:00", NOON),
    ("at", NOON, NOON),
    ("day", "2026-03-01", NOON.date()),
    ("id", str(ID), ID),
    ("id", ID, ID),
    ("file", "a/b", Path("a/b")),
    ("colour", "dark blue", Colour.DARK_BLUE),
    ("grade", "not_so_good", Grade.NOT_SO_GOOD),
    ("kind", "b", "b"),
    ("texts", ["a", "b,c"], ("a", "b,c")),
    ("text-list", ["a"], ("a",)),
    ("numbers", [1, 2, 2], frozenset({1, 2})),
    ("waits", [1, "2s"], [1, 2.0]),
    ("colours", ["red"], (Colour.RED,)),
    ("header", "a=b=c", ("a", "b=c")),
    ("header", ["a", "b"], ("a", "b")),
    ("inner", {"name": "n"}, Inner("n")),
    ("inners", [{"name": "n", "size": 2}], (Inner("n", 2),)),
    ("labels", {"a": "b"}, {"a": "b"}),
    ("grades", {"good": "red"}, {Grade.GOOD: Colour.RED}),
    ("capitals", "abc", "ABC"),
    ("anything", [1, None], [1, None]),
    ("age", None, None),
]
TEXT: list[tuple[str, Any, Any]] = [
    ("text", "a b,c", "a b,c"),
    ("text", ["one"], "one"),
    ("number", "3", 3),
    ("ratio", "2.5e-1", 0.25),
    ("flag", "Yes", True),
    ("flag", "off", False),
    ("wait", "5", 5.0),
    ("wait", "0.5", 0.5),
    ("wait", "90s", 90.0),
    ("age", "1d", dt.timedelta(days=1)),
    ("at", "2026-03-01T12:00:00Z", NOON),
    ("id", str(ID), ID),
    ("file", "a", Path("a")),
    ("colour", ["red"], Colour.RED),
    ("grade", "good", Grade.GOOD),
    ("texts", "a, b c", ("a", "b", "c")),
    ("texts", ["a b", "c,d"], ("a b", "c,d")),
    ("texts", "", ()),
    ("numbers", "1 2", frozenset({1, 2})),
    ("header", ["a=b c"], ("a", "b c")),
    ("labels", ["a=b", "c=d"], {"a": "b", "c": "d"}),
    ("labels", "a=b, c=d", {"a": "b", "c": "d"}),
    ("grades", ["good=red"], {Grade.GOOD: Colour.RED}),
    ("capitals", ["abc"], "ABC"),
]


@pytest.mark.parametrize(("name", "value", "made"), DATA)
def test_data(name: str, value: Any, made: Any) -> None:
    """TOML and JSON have numbers and booleans of their own; the rest of the types are texts there."""
    field = {"text-list": "texts"}.get(name, name)
    read = getattr(data(**{name: value}), field)
    assert (read, type(read)) == (made, type(made))


@pytest.mark.parametrize(("name", "value", "made"), TEXT)
def test_text(name: str, value: Any, made: Any) -> None:
    """In an environment, a query or a command every value is a text, or a list of texts."""
    read = getattr(text(**{name: value}), name)
    assert (read, type(read)) == (made, type(made))


REFUSED: list[tuple[str, Any, str]] = [
    ("text", 3, "text = 3 must be a text"),
    ("text", "abcdef", "text = 'abcdef' must be at most 5 characters"),
    ("text", "a\0", r"text = 'a\x00' must be a text"),
    ("text", "\ud800", r"text = '\ud800' must be a text"),
    ("text", None, "text = None must be a text"),
    ("number", "3", "number = '3' must be a whole number"),
    ("number", True, "number = True must be a whole number"),
    ("number", 1.0, "number = 1.0 must be a whole number"),
    ("number", 11, "number = 11 must be from 0 to 10"),
    ("ratio", float("nan"), "ratio = nan must be a finite number"),
    ("ratio", 1, "ratio = 1 must be greater than 0 and less than 1"),
    ("flag", "yes", "flag = 'yes' must be true or false"),
    ("flag", 1, "flag = 1 must be true or false"),
    (
        "wait",
        "5",
        "wait = '5' must be a duration: 0 seconds or more, or a text such as '250ms', '1h30m' or '7d'",
    ),
    ("wait", -1, "wait = -1 must be a duration"),
    ("wait", True, "wait = True must be a duration"),
    ("wait", float("inf"), "wait = inf must be a duration"),
    ("age", "soon", "age = 'soon' must be a duration"),
    ("at", "2026-03-01T12:00", "at = '2026-03-01T12:00' must be a time with a zone, such as 2026-03-01T00:00:00+01:00"),
    ("at", dt.date(2026, 3, 1), "at = 2026-03-01 must be a time with a zone"),
    ("day", NOON, "day = 2026-03-01T12:00:00+00:00 must be a date, such as 2026-03-01"),
    ("id", "x", "id = 'x' must be an id, such as"),
    ("id", 3, "id = 3 must be an id"),
    ("file", 3, "file = 3 must be a path"),
    ("colour", "blue", "colour = 'blue' must be one of red, dark blue"),
    ("grade", 1, "grade = 1 must be one of good, not_so_good"),
    ("grade", [], "grade = [] must be one of good, not_so_good"),
    ("kind", "c", "kind = 'c' must be one of a, b"),
    ("texts", "a", "texts = 'a' must be a list, each of it a text"),
    ("texts", ["a", 1], "texts[2] = 1 must be a text"),
    ("header", "a", "header = 'a' must be a pair, written name=value"),
    ("header", "=a", "header = '=a' must be a pair"),
    ("inner", "a", "inner = 'a' must be a table"),
    ("inner", {}, "inner.name is missing; it must be a text"),
    ("inner", {"name": "n", "sise": 1}, "inner.sise is unknown; did you mean size?"),
    ("inners", [{"name": "n"}, {"name": 1}], "inners[2].name = 1 must be a text"),
    ("inners", {"name": "n"}, "inners = {'name': 'n'} must be a list, each of it a table"),
    ("labels", {"a": 1}, "labels.a = 1 must be a text"),
    ("labels", "a", "labels = 'a' must be a table"),
    ("grades", {"god": "red"}, "grades.god is unknown; did you mean good?"),
    ("capitals", "1", "capitals = '1' must be letters"),
    ("password", "hunter2hunter2", "password must be at most 10 characters"),
    ("password", 3, "password must be a text"),
    ("colur", "red", "colur is unknown; did you mean colour?"),
    ("zzz", 1, "zzz is unknown; known are text, number"),
]


@pytest.mark.parametrize(("name", "value", "said"), REFUSED)
def test_refused_data(name: str, value: Any, said: str) -> None:
    """The error has the field, the value and the mend."""
    with pytest.raises(InvalidSettings) as refused:
        data(**{name: value})
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("number", "٣", "number = '٣' must be a whole number"),
        ("number", "1_0", "number = '1_0' must be a whole number"),
        ("number", "9" * 30, "number = '999999999999999999999999999999' must be a whole number"),
        ("ratio", "nan", "ratio = 'nan' must be a finite number"),
        ("ratio", "1_0", "ratio = '1_0' must be a finite number"),
        ("flag", "maybe", "flag = 'maybe' must be true or false"),
        ("wait", "9" * 400, "wait = '999"),
        ("text", ["a", "b"], "text is there 2 times; give it once"),
        ("capitals", ["a", "b"], "capitals is there 2 times; give it once"),
        ("labels", ["a"], "labels[1] = 'a' must be a pair, written name=value"),
        ("numbers", ["1", "x"], "numbers[2] = 'x' must be a whole number"),
    ],
)
def test_refused_texts(name: str, value: Any, said: str) -> None:
    """Texts that look like numbers to Python alone are none; what is there twice isn't guessed at."""
    with pytest.raises(InvalidSettings) as refused:
        text(**{name: value})
    assert str(refused.value).startswith(said)


def test_all_unknown_names_are_told_at_once() -> None:
    """A file with several slips is mended in one go."""
    with pytest.raises(InvalidSettings, match=r"colur is unknown; did you mean colour\?; numer is unknown; did you"):
        data(colur="red", numer=1)


def test_one_field_under_two_names() -> None:
    """A name and its alias contradict each other."""
    with pytest.raises(InvalidSettings, match="is there under two names"):
        data(**{"texts": ["a"], "text-list": ["b"]})


def test_the_error_is_the_callers() -> None:
    """A list's filter is refused as a request, with the field by itself."""
    with pytest.raises(InvalidRequest, match=r"filter.number = 'x' must be") as refused:
        Reader("text", InvalidRequest).read(Everything, {"number": "x"}, "filter")
    assert refused.value.field == "filter.number"


def test_zone() -> None:
    """A form's times are of the zone that it shows."""
    assert Reader("text", zone=dt.UTC).read(Everything, {"at": "2026-03-01T12:00"}).at == NOON


def test_queries() -> None:
    """The texts of a query are grouped by name; what is empty isn't there."""
    query = grouped([("texts", "a"), ("texts", " b "), ("number", ""), ("text", " ")])
    assert query == {"texts": ["a", "b"]}
    assert Reader("text").read(Everything, query).texts == ("a", "b")


def test_environment(tmp_path: Path) -> None:
    """Variables have a prefix; those of others are left alone; a secret may be in a file."""
    secret = tmp_path / "password"
    secret.write_text("hunter2\n")
    environ = {"APP_NUMBER": "3", "APP_PASSWORD_FILE": str(secret), "APP_URL": "x", "NUMBER": "9"}
    assert environment(Everything, "APP_", environ, ["APP_U*"]) == {"number": 3, "password": "hunter2"}
    with pytest.raises(InvalidSettings, match="APP_NUMER is unknown; did you mean APP_NUMBER"):
        environment(Everything, "APP_", {"APP_NUMER": "3"})
    with pytest.raises(InvalidSettings, match="APP_PASSWORD_FILE = '/nowhere' can't be read: No such file"):
        environment(Everything, "APP_", {"APP_PASSWORD_FILE": "/nowhere"})
    with pytest.raises(InvalidSettings, match="APP_TEXT_FILE is unknown"):
        environment(Everything, "APP_", {"APP_TEXT_FILE": "/nowhere"})


def test_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping the process's own variables are read."""
    monkeypatch.setenv("APP_NUMBER", "7")
    assert environment(Everything, "APP_") == {"number": 7}


def test_check() -> None:
    """What is made in code is checked by the same declaration; nothing but a list for a tuple is converted."""
    reader = Reader()
    made = Everything(texts=["a"], number=3)  # type: ignore[arg-type]
    reader.check(made)
    assert made.texts == ("a",)
    for wrong in (Everything(number=11), Everything(number="3"), Everything(wait="3s")):  # type: ignore[arg-type]
        with pytest.raises(InvalidSettings, match="must be"):
            reader.check(wrong)


def test_shapes() -> None:
    """A command line and the reference know of each field what it may be, and what it is without."""
    shapes = {shape.name: shape for shape in shape_of(Everything)}
    assert shapes["number"] == FieldShape(
        "number", int, int, many=False, optional=False, default=1, option=shapes["number"].option
    )
    assert shapes["number"].expected == "a whole number from 0 to 10"
    assert (shapes["colours"].item, shapes["colours"].many) == (Colour, True)
    assert shapes["colours"].choices == ("red", "dark blue")
    assert (shapes["at"].hint, shapes["at"].optional) == (dt.datetime, True)
    assert [shape.default for shape in shape_of(Inner)] == [MISSING, 1]


def test_plain() -> None:
    """What was read can be written as JSON and read again; secrets stay out."""
    made = data(
        at=NOON,
        id=ID,
        file="a",
        colour="red",
        grades={"good": "red"},
        inner={"name": "n"},
        age="90s",
        **{"password": "hunter2"},
    )
    written = json.loads(json.dumps(plain(made)))
    assert "password" not in written
    assert (written["at"], written["age"], written["grades"]) == ("2026-03-01T12:00:00+00:00", 90.0, {"good": "red"})
    again = data(**{name: value for name, value in written.items() if name != "capitals"})
    assert plain(again) == written
