"""Describe a fleet: databases by name, patterns of the pairs to compare between them, and the bounds of a run.

A file says it, or a folder of files, whose ``[[database]]``, ``[[compare]]`` and ``[[total]]`` are put together;
``docs/reconciling.md`` has a whole one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from outbox.errors import InvalidMessage, InvalidSettings
from outbox.reader import Reader, Seconds, option, unknown_name
from outbox.reconcile.config import Address, Values, read_mapping, read_toml
from outbox.reconcile.job import MAX_TIME, NO_DATABASE, Access, Pair, Part
from outbox.reconcile.measure import Sums
from outbox.reconcile.tables import ForeignTable

_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
#: What a ``[[compare]]`` says of its pairs, as a ``[[pair]]`` of a job does.
_FILTERS = frozenset(each.name for each in fields(Pair)) - {"topic", "group", "feed"}
#: What of a job the fleet itself says, and its ``[job]`` can't.
_OF_FLEET = ("producer", "consumer", "pair", "pairs", "measure", "measures")


@dataclass(frozen=True, slots=True)
class DatabaseFamily(Address):
    """Databases that a file names alike: ``{name}`` in an address is each one's name, ``{NAME}`` that of a variable.

    ``producer_table`` and ``consumer_table`` are what they have in place of our tables of a side; in what names a table
    or a path of Spark's, ``{name}`` stands for the same.
    """

    names: tuple[str, ...] = ()
    producer_table: ForeignTable | None = None
    consumer_table: ForeignTable | None = None

    def accesses(self, number: int, environ: Mapping[str, str]) -> dict[str, Access]:
        """Return the access to each; ``number`` is the place of the table in its file, for errors."""
        path = f"database[{number}]"
        if not self.names:
            raise InvalidSettings(f"{path}.names is missing; name at least one database")
        if self.tables is not None:
            raise InvalidSettings(f"{path}.tables: a fleet's database may be either side; write producer_table, say")
        found: dict[str, Access] = {}
        for name in self.names:
            if not _NAME.fullmatch(name):
                raise InvalidSettings(f"{path}.names: {name!r} must have letters, digits, _ and - only, 63 at most")
            if name in found:
                raise InvalidSettings(f"{path}.names has {name!r} twice")
            address = Address(_named(self.url, name), _named(self.url_env, name), _named(self.schema, name))
            by_spark = [table for table in self.foreign(name).values() if table.by_spark]
            if by_spark and address.is_named:
                raise InvalidSettings(f"{path} {name}: {by_spark[0]} is read by Spark; leave the URL out")
            found[name] = NO_DATABASE if by_spark else address.access(f"{path} {name}", environ)
        return found

    def foreign(self, name: str) -> dict[Part, ForeignTable]:
        """Return what one of them has in place of our tables, by side."""
        both: dict[Part, ForeignTable | None] = {"producer": self.producer_table, "consumer": self.consumer_table}
        return {
            part: replace(
                table, table=_named(table.table, name), query=_named(table.query, name), path=_named(table.path, name)
            )
            for part, table in both.items()
            if table is not None
        }


def _named(text: str | None, name: str) -> str | None:
    return text and text.replace("{name}", name).replace("{NAME}", name.upper().replace("-", "_"))


@dataclass(frozen=True, slots=True)
class PairPattern:
    """Choose the pairs to compare and their databases, by patterns with ``*``, ``?`` and ``[…]``.

    In ``topics`` and ``groups``, ``{producer}`` and ``{consumer}`` stand for the names of the databases. ``filters`` is
    what a pair has besides its names, ``measures`` what each pair's business tables must agree on, without its names.
    """

    producers: tuple[str, ...] = option(("*",), "The producers' databases.")
    consumers: tuple[str, ...] = option(("*",), "The consumers' databases.")
    topics: tuple[str, ...] = option(("*",), "The topics.")
    groups: tuple[str, ...] = option(("*",), "The groups.")
    priority: int = option(0, "Databases with a higher one are compared first.")
    measures: tuple[Mapping[str, Any], ...] = option((), "What each pair must agree on.", aliases=("measure",))
    filters: Values = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TotalPart:
    """What some databases have of a total: a SELECT that each of those which the patterns name runs."""

    databases: tuple[str, ...] = option(help="The databases.")
    select: str = option(help="Returns the columns of the key and the values.")


@dataclass(frozen=True, slots=True)
class FleetTotal(Sums):
    """Add up the tables of many databases: to nothing, together with the sums under way between them.

    For five banks: what is in their accounts, less what was paid in, plus the transfers that one has debited and the
    other not credited yet. Of what isn't to be added up the SELECT returns the negative. ``in_flight`` is as that of a
    `Measure`; ``topics`` and ``groups`` are patterns of the pairs that move what is added up, of those which the fleet
    compares between these databases.

    Raises:
        InvalidSettings: names the total, what is wrong with it, and the mend.
    """

    called: ClassVar[str] = "total"
    name: str
    values: tuple[str, ...]
    in_flight: Mapping[str, str]
    parts: tuple[TotalPart, ...] = option(help="What is added up.", aliases=("part",))
    by: tuple[str, ...] = ()
    topics: tuple[str, ...] = ("*",)
    groups: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        for wrong in self.wrong():
            raise self.refused(wrong)
        if not self.parts:
            raise self.refused("no part; say what is added up in tables [[total.part]]")

    @property
    def selects(self) -> dict[str, str]:
        """The SELECT statements, by the place of their part."""
        return {f"part[{number}]": part.select for number, part in enumerate(self.parts, 1)}


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a run of a fleet takes at once, and in all."""

    at_once: int = option(2, "Jobs (of two databases) compared at once.", least=1, metavar="N")
    sessions: int = option(10, "Sessions on each server at once, at most.", least=1, metavar="N")
    jitter: Seconds = option(0.0, "Each job begins up to so much later, at random.", metavar="DURATION")
    max_time: Seconds = option(
        MAX_TIME, "How long the whole fleet may take; no job begins after it.", above=0, metavar="DURATION"
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """Databases by name, what is compared between them and added up, what every job has (`Values`), and the bounds.

    ``only`` are patterns of the databases that are compared this time, without totals; none is all. ``foreign`` is what
    some databases have in place of our tables of a side; which topics and groups they have, a pattern names.

    Raises:
        InvalidSettings: nothing to compare, or a job that a fleet can't have; names the mend.
    """

    databases: Mapping[str, Access]
    patterns: tuple[PairPattern, ...]
    job: Values = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)
    totals: tuple[FleetTotal, ...] = ()
    only: tuple[str, ...] = ()
    foreign: Mapping[str, Mapping[Part, ForeignTable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.databases:
            raise InvalidSettings("no database; name them in tables [[database]]")
        if not self.patterns:
            raise InvalidSettings("nothing to compare; say what in tables [[compare]]")


def read_fleet(path: Path, environ: Mapping[str, str] | None = None) -> Fleet:
    """Return the fleet of a file, or of all ``*.toml`` of a folder. ``environ`` is that of the process unless given.

    Raises:
        InvalidSettings: a file can't be read, or something in it can't be right; names the file, the key, the mend.
    """
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not files:
        raise InvalidSettings(f"{path} has no file *.toml")
    whole = _Gathered(os.environ if environ is None else environ)
    for each in files:
        document = read_toml(each)
        try:
            whole.add(document)
        except (InvalidSettings, InvalidMessage) as error:
            raise InvalidSettings(f"{each}: {error}") from None
    try:
        bounds, totals = Bounds(**whole.bounds), tuple(whole.totals)
        return Fleet(whole.databases, tuple(whole.patterns), whole.job, bounds, totals, foreign=whole.foreign)
    except InvalidSettings as error:
        raise InvalidSettings(f"{path}: {error}") from None


@dataclass(slots=True)
class _Gathered:
    """What the files of a fleet say, put together."""

    environ: Mapping[str, str]
    databases: dict[str, Access] = field(default_factory=dict)
    foreign: dict[str, dict[Part, ForeignTable]] = field(default_factory=dict)
    patterns: list[PairPattern] = field(default_factory=list)
    totals: list[FleetTotal] = field(default_factory=list)
    job: Values = field(default_factory=dict)
    bounds: dict[str, Any] = field(default_factory=dict)

    def add(self, document: Values) -> None:
        """Add a file; what only one can say is refused in a second."""
        reader, rest = Reader(), dict(document)
        for number, table in enumerate(_tables(rest, "database"), 1):
            family = reader.read(DatabaseFamily, table, f"database[{number}]")
            found = family.accesses(number, self.environ)
            if twice := sorted(found.keys() & self.databases.keys()):
                raise InvalidSettings(f"database[{number}].names has {twice[0]!r}, which is there already")
            self.databases |= found
            self.foreign |= {name: family.foreign(name) for name in found}
        self.patterns += [
            _pattern(reader, table, f"compare[{number}]") for number, table in enumerate(_tables(rest, "compare"), 1)
        ]
        self.totals += [
            reader.read(FleetTotal, table, f"total[{number}]") for number, table in enumerate(_tables(rest, "total"), 1)
        ]
        job = rest.pop("job", {})
        if not isinstance(job, Mapping):
            raise InvalidSettings(f"job = {job!r} must be a table")
        if names := [name for name in _OF_FLEET if name in job]:
            raise InvalidSettings(f"job.{names[0]}: a fleet names it in tables [[database]] and [[compare]]")
        if unknown := [key for key in rest if key not in {each.name for each in fields(Bounds)}]:
            known = ("database", "compare", "total", "job", *(each.name for each in fields(Bounds)))
            raise InvalidSettings("; ".join(unknown_name(key, known) for key in unknown))
        bounds = reader.values(Bounds, rest)
        if (job and self.job) or bounds.keys() & self.bounds.keys():
            twice = ["job"] if job and self.job else sorted(bounds.keys() & self.bounds.keys())
            raise InvalidSettings(f"{twice[0]} is there in another file of the folder already; give it once")
        self.job = self.job or read_mapping(job, self.environ)
        self.bounds |= bounds


def _tables(document: dict[str, Any], name: str) -> list[Mapping[str, Any]]:
    tables = document.pop(name, [])
    if not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
        raise InvalidSettings(f"{name} must be tables, written [[{name}]]")
    return tables


def _pattern(reader: Reader, table: Mapping[str, Any], path: str) -> PairPattern:
    own = {key: value for key, value in table.items() if key not in _FILTERS}
    if "filters" in own:
        raise InvalidSettings(f"{path}.filters is unknown; write {', '.join(sorted(_FILTERS))} themselves")
    filters = {key: value for key, value in table.items() if key in _FILTERS}
    pattern = reader.read(PairPattern, own, path)
    return replace(pattern, filters=reader.values(Pair, filters, f"{path}."))
