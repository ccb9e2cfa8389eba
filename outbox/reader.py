"""Read a mapping into a dataclass, by the dataclass's type hints: one reader for every way in.

A mapping is a table of a TOML file, a JSON object, the environment, a query, a form, or the options of a command. The
dataclass says once what there is: each field's type, its default, and an `option` with its help, bounds and aliases.

Why no library: pydantic 2.14, msgspec 0.20 and cattrs 25 were measured. Their errors ("Expected `int`, got `str` - at
`$.n`") have neither the value nor the mend, and none suggests the nearest known name. msgspec ignores keys that a
dataclass doesn't know, cattrs needs a hook for each type, and none reads ``90s``, ``on`` or ``a, b``. An import of
pydantic (70 ms) or cattrs (45 ms) is also more than the figure for importing `outbox` leaves.

Types: str, int, float, bool, `Seconds`, timedelta, datetime, date, UUID, Path, Enum, Literal, dataclasses, Any, and
``| None`` of these; tuple, list, set, frozenset of one type; ``tuple[str, str]``, written ``name=value``; Mapping.
A module that declares such a dataclass imports the types of its fields at run time.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import fnmatch
import functools
import math
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin
from uuid import UUID

from outbox.errors import InvalidSettings

T = TypeVar("T")

#: A duration as a number of seconds. A text may have units: ``90s``, ``1h30m``, ``7d``.
Seconds = Annotated[float, "seconds"]

_UNITS = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[wdhms]))+", re.ASCII)
_PLAIN = frozenset({bool, int, float, str})
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Option:
    """What a field says beside its type and default.

    ``least`` and ``most`` are inclusive bounds of a number, or of the length of a text; ``above`` and ``below`` leave
    the bound itself out. A ``secret`` value is shown nowhere. ``parse`` makes the value of what is written, and raises
    ValueError with what it must be. ``page`` is the page of the guide that explains the field. A command reads what a
    ``file`` has.
    """

    help: str = ""
    aliases: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    secret: bool = False
    parse: Callable[[Any], Any] | None = None
    metavar: str = ""
    page: str = ""
    file: bool = False


def option(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **more: Any) -> Any:  # noqa: A002 - what it is called in every library of options
    """Return the field of a dataclass with an `Option`; ``more`` are the other fields of the option."""
    known: Any = {"default": default, "default_factory": factory, "repr": not more.get("secret")}
    return field(**known, metadata={"option": Option(help, **more)})


@dataclass(frozen=True, slots=True)
class FieldShape:
    """A field as the reader knows it; options of commands and pages of the reference are made of these.

    ``hint`` is the type without ``| None``; ``item`` is the type of one value where there can be ``many``. ``default``
    is MISSING where a value is required.
    """

    name: str
    hint: Any
    item: Any
    many: bool
    optional: bool
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that one value can be; nothing where it can be any."""
        return tuple(_choices(self.item))

    @property
    def expected(self) -> str:
        """What it must be, in words: ``a whole number from 1 to 4096``."""
        one = f"{_expected(self.item)} {_bounds(self.option)}".strip()
        return f"a list, each of it {one}" if self.many else one


@functools.cache
def shape_of(kind: Any) -> tuple[FieldShape, ...]:
    """Return the fields of a dataclass that can be read."""
    hints = typing.get_type_hints(kind, include_extras=True)
    shapes = []
    for each in (each for each in dataclasses.fields(kind) if each.init):
        hint = _without_none(hints[each.name])
        many = _collection(hint) is not None
        item = _without_none(get_args(hint)[0]) if many else hint
        default = each.default if each.default_factory is MISSING else each.default_factory()
        known = each.metadata.get("option", Option())
        shapes.append(FieldShape(each.name, hint, item, many, hint is not hints[each.name], default, known))
    return tuple(shapes)


@dataclass(frozen=True, slots=True)
class Reader:
    """How mappings are read.

    ``form`` is ``text`` (a value is a text or a list of texts: environment, query, form, options), ``data`` (numbers
    and booleans are such: TOML, JSON) or ``code`` (values are checked, and not converted). ``error`` makes the
    exception of a message and a field's path. ``zone`` is the zone of a time
    that has none; None refuses such a time. With ``partial`` a nested dataclass stays a dict of the values that are
    there, so that others can be put over them.

    All methods raise what ``error`` makes, of a value that can't be read, of unknown keys and of a missing one. The
    message names the field, the value unless it is secret, and the mend.
    """

    form: Literal["text", "data", "code"] = "data"
    error: Callable[[str, str], Exception] = lambda message, _: InvalidSettings(message)
    zone: dt.tzinfo | None = None
    partial: bool = False

    def read(self, kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
        """Return the dataclass; ``path`` is how the mapping is called in errors."""
        prefix = f"{path}." if path else ""
        found = self.values(kind, values, prefix)
        for each in shape_of(cast(Any, kind)):
            if each.default is MISSING and each.name not in found:
                name = prefix + each.name
                raise self.error(f"{name} is missing; it must be {each.expected}", name)
        return kind(**found)

    def values(
        self, kind: Any, values: Mapping[str, Any], prefix: str = "", called: Callable[[str], str] = str
    ) -> dict[str, Any]:
        """Return the values that are there, by field; in errors a key is ``prefix`` and ``called(key)``."""
        known = {key: each for each in shape_of(kind) for key in (each.name, *each.option.aliases)}
        if unknown := [key for key in values if key not in known]:
            names = [unknown_name(called(key), map(called, known), prefix) for key in unknown]
            raise self.error("; ".join(names), prefix + called(unknown[0]))
        found: dict[str, Any] = {}
        for key, value in values.items():
            if known[key].name in found:
                raise self.error(f"{prefix}{called(key)} is there under two names; give it once", prefix + called(key))
            found[known[key].name] = self.value(known[key], value, prefix + called(key))
        return found

    def check(self, instance: Any) -> None:
        """Check types and bounds of a dataclass that was made in code; a list becomes a tuple where that is meant."""
        reader = dataclasses.replace(self, form="code")
        for each in shape_of(cast(Any, type(instance))):
            value = getattr(instance, each.name)
            if (checked := reader.value(each, value, each.name)) is not value:
                object.__setattr__(instance, each.name, checked)

    def value(self, shape: FieldShape, value: Any, path: str) -> Any:
        """Return the value of a field, which errors call ``path``."""
        if value is None and shape.optional:
            return None
        if shape.option.parse is None or self.form == "code":
            return self._value(shape.hint, value, shape.option, path)
        value = value if shape.many else self._only(value, path)
        try:
            return shape.option.parse(value)
        except ValueError as error:
            raise self._refused(value, str(error), shape.option, path) from None

    def _value(self, hint: Any, value: Any, known: Option, path: str) -> Any:
        hint = _without_none(hint)
        if make := _collection(hint):
            return make(self._items(get_args(hint)[0], value, known, path))
        if get_origin(hint) is Mapping:
            return self._mapping(get_args(hint), value, known, path)
        value = value if get_origin(hint) is tuple and self.form != "text" else self._only(value, path)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and not isinstance(value, hint):
            if isinstance(value, Mapping) and self.form != "code":
                return self.values(hint, value, f"{path}.") if self.partial else self.read(hint, value, path)
            raise self._refused(value, "a table", known, path)
        try:
            made = self._scalar(hint, value)
        except (ValueError, OverflowError):
            raise self._refused(value, _expected(hint), known, path) from None
        if not _within(made, known):
            raise self._refused(value, _bounds(known) + " characters" * isinstance(made, str), known, path)
        return made

    def _scalar(self, hint: Any, value: Any) -> Any:
        """Return a value of a type that isn't made of others; raise ValueError if it is none."""
        if choices := _choices(hint):
            if isinstance(hint, type | UnionType) and isinstance(value, hint):
                return value
            return choices[_sure(value, isinstance(value, str) and value in choices)]
        if get_origin(hint) is tuple:
            return self._pair(value)
        if hint not in _SCALARS:  # Any, or a nested dataclass that is made already
            return value
        kind = _SCALARS[hint]
        if isinstance(value, str) and (self.form == "text" or (self.form == "data" and kind.written)):
            units = kind.expected is _A_DURATION and DURATION.fullmatch(value)
            numeric = hint in {int, float} or kind.expected is _A_DURATION
            _sure(value, not numeric or units or (self.form == "text" and _NUMERIC.fullmatch(value)))
            value = kind.parse(value)
        if hint is dt.timedelta and self.form == "data" and _is_finite(value):
            value = dt.timedelta(seconds=value)
        if hint == Seconds and self.form == "data" and isinstance(value, dt.timedelta):
            value = value.total_seconds()
        if hint is dt.datetime and isinstance(value, dt.datetime) and value.tzinfo is None:
            value = value.replace(tzinfo=self.zone)
        _sure(value, kind.fits(value))
        return value

    def _pair(self, value: Any) -> tuple[Any, ...]:
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(value, str) and self.form != "code":
            name, equals, text = value.partition("=")
            value = (name.strip(), text.strip()) if equals and name.strip() else ()
        return tuple(_sure(value, isinstance(value, tuple | list) and [type(part) for part in value] == [str, str]))

    def _items(self, item: Any, value: Any, known: Option, path: str) -> list[Any]:
        if isinstance(value, str) and self.form == "text":
            value = [word for word in re.split(r"[,\s]+", value) if word]
        if not isinstance(value, list | tuple | set | frozenset):
            raise self._refused(value, f"a list, each of it {_expected(item)}", known, path)
        reader = dataclasses.replace(self, partial=False)
        return [reader._value(item, each, known, f"{path}[{number}]") for number, each in enumerate(value, 1)]

    def _mapping(self, hints: tuple[Any, ...], value: Any, known: Option, path: str) -> dict[Any, Any]:
        if self.form == "text":
            value = dict(self._items(tuple[str, str], value, known, path))
        if not isinstance(value, Mapping):
            raise self._refused(value, "a table", known, path)
        names = _choices(hints[0]) if self.form != "code" else {}
        if unknown := [key for key in value if names and key not in names and key not in names.values()]:
            raise self.error("; ".join(unknown_name(key, names, f"{path}.") for key in unknown), path)
        return {names.get(key, key): self._value(hints[1], each, known, f"{path}.{key}") for key, each in value.items()}

    def _only(self, value: Any, path: str) -> Any:
        if self.form != "text" or not isinstance(value, list | tuple):
            return value
        if len(value) != 1:
            raise self.error(f"{path} is there {len(value)} times; give it once", path)
        return value[0]

    def _refused(self, value: Any, expected: str, known: Option, path: str) -> Exception:
        text = value.isoformat() if isinstance(value, dt.date) else repr(value)
        return self.error(f"{path if known.secret else f'{path} = {text[:80]}'} must be {expected}", path)


def unknown_name(name: str, known: Iterable[str], prefix: str = "", common: str = "") -> str:
    """Return what is wrong with a name that isn't known, with the nearest that is; ``common`` begins all known ones."""
    names = list(known)
    # What all have in common says nothing about which is nearest.
    close = get_close_matches(name, names, 1)
    mend = f"did you mean {common}{close[0]}?" if close else f"known are {', '.join(common + each for each in names)}"
    return f"{prefix}{name} is unknown; {mend}"


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return what a variable says that may be a secret: the variable itself, or what is in the file of ``NAME_FILE``.

    None if neither is set, or to nothing. ``environ`` is that of the process unless given.

    Raises:
        InvalidSettings: both are set, or the file can't be read; shows neither value.
    """
    variables = os.environ if environ is None else environ
    value, path = variables.get(name), variables.get(f"{name}_FILE")
    if value and path:
        raise InvalidSettings(f"{name} and {name}_FILE are both set; set one of them")
    return _content(f"{name}_FILE", path) or None if path else value or None


def _content(name: str, path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise InvalidSettings(f"{name} = {path!r} can't be read: {error.strerror}") from None


def environment(
    kind: Any, prefix: str, environ: Mapping[str, str] | None = None, others: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of variables such as ``PREFIX_FIELD``, by field; ``PREFIX_FIELD_FILE`` names a secret's file.

    ``environ`` is that of the process unless given. ``others`` are patterns of the variables with this prefix that are
    no field's: they are left alone.

    Raises:
        InvalidSettings: a value that can't be read, or an unknown variable with the prefix.
    """
    variables = os.environ if environ is None else environ
    secrets = {f"{each.name}_file": each.name for each in shape_of(kind) if each.option.secret}
    keys = [key for each in shape_of(kind) for key in (each.name, *each.option.aliases)]
    known = [f"{prefix}{key.upper()}" for key in (*keys, *secrets)]
    ours = [
        name
        for name in variables
        if name.startswith(prefix) and not any(fnmatch.fnmatchcase(name, each) for each in others)
    ]
    if unknown := [name for name in ours if name not in known]:
        known += [name for name in others if "*" not in name]
        rests = [name.removeprefix(prefix) for name in known]
        raise InvalidSettings(
            "; ".join(unknown_name(name.removeprefix(prefix), rests, prefix, prefix) for name in unknown)
        )
    texts: dict[str, str] = {}
    for name in ours:
        key, text = name.removeprefix(prefix).lower(), variables[name]
        if secrets.get(key, key) in texts:
            both = f"{prefix}{secrets.get(key, key).upper()}"
            raise InvalidSettings(f"{both} and {both}_FILE are both set; set one of them")
        texts[secrets.get(key, key)] = _content(name, text) if key in secrets else text
    return Reader("text").values(kind, texts, prefix, str.upper)


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the texts of a query or form by name, for a `Reader` of ``text``; an empty text counts as none."""
    found: dict[str, list[str]] = {}
    for name, text in pairs:
        if text.strip():
            found.setdefault(name, []).append(text.strip())
    return found


def plain(value: Any) -> Any:  # noqa: PLR0911 - one line a type
    """Return a value as JSON has it: a dataclass as a dict without its secrets, times in UTC, decimals as texts."""
    if value is None or type(value) in _PLAIN:  # nearly all, where there are many
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr}
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in (value if isinstance(value, Sequence) else sorted(value))]
    if isinstance(value, enum.Enum):
        return _name(value)
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return f"{value:f}"
    return value.hex() if isinstance(value, bytes) else str(value)


class _Scalar(NamedTuple):
    """A type that isn't made of others; ``written`` where JSON and TOML have it as a text."""

    expected: str
    parse: Callable[[str], Any]
    fits: Callable[[Any], object]
    written: bool = True


def _sure(value: Any, sure: object) -> Any:
    if not sure:
        raise ValueError
    return value


def seconds_of(text: str) -> float:
    """Return the seconds that a number is, or a `DURATION` such as ``1h30m``."""
    if not DURATION.fullmatch(text):
        return float(text)
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|[wdhms])", text))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_storable(value: Any) -> bool:
    """Can PostgreSQL store it? Not a null character, nor half of a surrogate pair."""
    return isinstance(value, str) and "\0" not in value and not re.search("[\ud800-\udfff]", value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


_A_DURATION = "a duration: 0 seconds or more, or a text such as '250ms', '1h30m' or '7d'"
_A_TIME = "a time with a zone, such as 2026-03-01T00:00:00+01:00"
_AN_ID = "an id, such as 01975a5e-0c6f-7a3e-8000-5d0e6f0c1a2b"
_SCALARS: Mapping[Any, _Scalar] = {
    str: _Scalar("a text", str, _is_storable),
    bool: _Scalar("true or false", lambda text: FLAGS.get(text.lower()), _is(bool), written=False),
    int: _Scalar("a whole number", int, _is(int), written=False),
    float: _Scalar("a finite number", float, _is_finite, written=False),
    Seconds: _Scalar(_A_DURATION, seconds_of, lambda value: _is_finite(value) and value >= 0),
    dt.timedelta: _Scalar(_A_DURATION, lambda text: dt.timedelta(seconds=seconds_of(text)), _is(dt.timedelta)),
    dt.datetime: _Scalar(
        _A_TIME, dt.datetime.fromisoformat, lambda value: isinstance(value, dt.datetime) and value.tzinfo
    ),
    dt.date: _Scalar("a date, such as 2026-03-01", dt.date.fromisoformat, _is(dt.date)),
    UUID: _Scalar(_AN_ID, UUID, _is(UUID)),
    Path: _Scalar("a path", Path, lambda value: isinstance(value, Path)),
}
#: Python reads more texts as numbers: other alphabets' digits, underscores between them, blanks around.
_NUMERIC = re.compile(r"[+-]?[0-9.]{1,18}(e[+-]?[0-9]{1,3})?", re.IGNORECASE)


def _without_none(hint: Any) -> Any:
    if type(None) not in (args := get_args(hint)):
        return hint
    return Union[tuple(each for each in args if each is not type(None))]  # noqa: UP007 - as many as there are


def _collection(hint: Any) -> Callable[[Iterable[Any]], Any] | None:
    """Return what makes a collection of one type; None for other types."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return tuple if args[-1] is Ellipsis else None
    return tuple if origin in {Sequence, Collection} else origin if origin in {list, set, frozenset} else None


def _choices(hint: Any) -> dict[str, Any]:
    if isinstance(hint, UnionType):
        return {name: each for part in get_args(hint) for name, each in _choices(part).items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {_name(each): each for each in hint}
    return {each: each for each in get_args(hint)} if get_origin(hint) is Literal else {}


def _name(member: enum.Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()


def _expected(hint: Any) -> str:
    if choices := _choices(_without_none(hint)):
        return f"one of {', '.join(choices)}"
    if get_origin(hint) is tuple:
        return "a pair, written name=value"
    return _SCALARS[hint].expected if hint in _SCALARS else "a table"


def _bounds(known: Option) -> str:
    if known.least is not None and known.most is not None:
        return f"from {known.least} to {known.most}"
    words = {"at least": known.least, "greater than": known.above, "at most": known.most, "less than": known.below}
    return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


def _within(value: Any, known: Option) -> bool:
    size = len(value) if isinstance(value, str) else value
    if not _is_finite(size) or isinstance(value, enum.Enum):
        return True
    low, high = known.least, known.most
    within = (low is None or size >= low) and (high is None or size <= high)
    return within and (known.above is None or size > known.above) and (known.below is None or size < known.below)
