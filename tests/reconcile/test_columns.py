"""Two tables compared column by column: against a comparison in plain Python, by each way to read them."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.reconcile.columns import TablesJob, compare
from outbox.reconcile.columns.compare import TablesResult, compare_tables
from outbox.reconcile.job import Access
from outbox.reconcile.sql import PORTABLE
from tests.kit import tries

#: The rows of a table: their values, by key.
Rows = dict[tuple[Any, ...], dict[str, Any]]
#: A difference: the key, the kind, the column.
Difference = tuple[tuple[str, ...], str, str | None]

BEGAN = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
#: The columns of the left table and of the right one, with other types for the same values.
COLUMNS = {
    "n": ("integer", "bigint"),
    "price": ("numeric(20,4)", "numeric"),
    "share": ("double precision", "double precision"),
    "loss": ("numeric", "double precision"),
    "at": ("timestamptz", "timestamp"),
    "said": ("text", "varchar(200)"),
    "body": ("json", "jsonb"),
    "ok": ("boolean", "boolean"),
}
TOLERANCES = {"price": "0.01", "share": "1%", "at": "2s"}


#: The values of each column, odd ones among them.
VALUES: Mapping[str, Callable[[random.Random], Any]] = {
    "n": lambda chance: chance.choice([0, -1, 2**31 - 1, chance.randrange(1000)]),
    "price": lambda chance: chance.choice([Decimal("0.10"), Decimal(chance.randrange(10**6)) / 100, Decimal(-7)]),
    "loss": lambda chance: chance.choice([Decimal("0.10"), Decimal(chance.randrange(10**6)) / 100, Decimal(7)]),
    "share": lambda chance: chance.choice([0.0, -0.0, math.nan, math.inf, 0.1 + 0.2, chance.random()]),
    "at": lambda chance: BEGAN + dt.timedelta(microseconds=chance.randrange(10**12)),
    "said": lambda chance: chance.choice(["", "NULL", "ß ö", 'say "x", \\ and %', "a" * chance.randrange(50)]),
    "body": lambda chance: chance.choice(['{"a": 1, "b": [true, null]}', "[]", f'{{"n": {chance.randrange(9)}.5}}']),
    "ok": lambda chance: chance.random() < 0.5,
}


def value_of(chance: random.Random, column: str) -> Any:
    """Return a value of a column; now and then NULL."""
    return None if chance.random() < 0.1 else VALUES[column](chance)


def near(chance: random.Random, column: str, value: Any) -> Any:
    """Return a value that a tolerance, or a type, makes equal; or the value itself."""
    if value is None:
        return None
    match column:
        case "price":
            return value + Decimal(chance.choice(["0.01", "-0.005"]))
        case "share":
            return value * 1.005
        case "at":
            return value + dt.timedelta(seconds=chance.choice([-2, 1.5]))
        case "body":
            return json.dumps(json.loads(value), indent=1).replace("1,", "1.0,")
    return value


def equal(column: str, left: Any, right: Any) -> bool:
    """Compare two values as one is told to, in plain Python."""
    if left is None or right is None:
        return left is right
    if column == "price":
        return bool(abs(left - right) <= Decimal("0.01"))
    if column == "share":
        finite = math.isfinite(left) and math.isfinite(right)
        close = finite and abs(left - right) <= 0.01 * max(abs(left), abs(right))
        return left == right or (math.isnan(left) and math.isnan(right)) or close
    if column == "at":
        return bool(abs(left - right) <= dt.timedelta(seconds=2))
    if column == "body":
        return bool(json.loads(left) == json.loads(right))
    return bool(left == right)


def oracle(left: Rows, right: Rows) -> set[Difference]:
    """Return what differs, in plain Python."""
    found: set[Difference] = set()
    for key in left.keys() | right.keys():
        texts = tuple(str(each).lower() if each is True or each is False else str(each) for each in key)
        if key not in right:
            found.add((texts, "only_left", None))
        elif key not in left:
            found.add((texts, "only_right", None))
        else:
            ours, theirs = left[key], right[key]
            found |= {(texts, "differs", name) for name in COLUMNS if not equal(name, ours[name], theirs[name])}
    return found


def differences(result: TablesResult) -> set[Difference]:
    """Return what a comparison has found, all of it; and check its counts."""
    rows = result.to_arrow().to_pylist()
    found = {(tuple(row["key"].values()), row["kind"], row["column"]) for row in rows}
    assert len(found) == len(rows)
    assert {each.name: each.differ for each in result.columns} == {
        each.name: sum(column == each.name for _, _, column in found) for each in result.columns
    }
    assert result.differ == len({key for key, kind, _ in found if kind == "differs"})
    assert (result.only["only_left"], result.only["only_right"]) == tuple(
        sum(kind == each for _, kind, _ in found) for each in ("only_left", "only_right")
    )
    assert result.equal is (not found)
    return found


class Tables:
    """Two tables in two databases, called ``l`` and ``r``."""

    def __init__(self, left: Engine, right: Engine) -> None:
        self.engines = {"l": left, "r": right}

    def job(self, *key: str, **options: Any) -> TablesJob:
        """Return the job that compares them, and shows all that differs."""
        left, right = (
            Access(each.url.render_as_string(hide_password=False), Settings()) for each in self.engines.values()
        )
        return TablesJob(left, right, "l", "r", key=key, **{"sample": 10**9} | options)

    def run(self, name: str, *statements: str) -> None:
        """Run statements in one of the databases."""
        with self.engines[name].begin() as connection:
            for each in statements:
                connection.exec_driver_sql(each)

    def make(self, key: Mapping[str, tuple[str, str]], rows: Mapping[str, Rows], index: bool = True) -> None:
        """Make both tables of these columns of a key, with rows."""
        for at, (name, of_table) in enumerate(rows.items()):
            columns = [f"{column} {types[at]}" for column, types in {**key, **COLUMNS}.items()]
            primary = f", PRIMARY KEY ({', '.join(key)})" if index else ""
            self.run(name, f"DROP TABLE IF EXISTS {name}", f"CREATE TABLE {name} ({', '.join(columns)}{primary})")
            values = [dict(zip(key, each, strict=True)) | row for each, row in of_table.items()]
            if name == "r":
                values = [{**each, "at": each["at"] and each["at"].replace(tzinfo=None)} for each in values]
            names = [*key, *COLUMNS]
            places = ", ".join(
                f"CAST(:{each} AS {({**key, **COLUMNS})[each][at].partition(' COLLATE')[0]})" for each in names
            )
            with self.engines[name].begin() as connection:
                if values:
                    connection.execute(text(f"INSERT INTO {name} ({', '.join(names)}) VALUES ({places})"), values)


@pytest.fixture
def tables(new_engine: Callable[[], Engine]) -> Tables:
    """Two databases."""
    return Tables(new_engine(), new_engine())


class Bytes(bytes):
    """Bytes whose text is as PostgreSQL writes it."""

    def __str__(self) -> str:
        return rf"\x{self.hex()}"


def time_of(n: int) -> dt.time:
    """Return the n-th time of a day."""
    return (BEGAN + dt.timedelta(seconds=7 * n)).time()


KEYS: Mapping[str, tuple[dict[str, tuple[str, str]], Callable[[random.Random, int], tuple[Any, ...]]]] = {
    "integer": ({"id": ("integer", "bigint")}, lambda _, n: (n * 7 - 500,)),
    "uuid": ({"id": ("uuid", "uuid")}, lambda chance, _: (UUID(int=chance.getrandbits(128)),)),
    "uuid as text": ({"id": ("uuid", "text")}, lambda chance, _: (UUID(int=chance.getrandbits(128)),)),
    "text": ({"id": ('text COLLATE "C"', "varchar")}, lambda chance, n: (f"{chance.choice('aÄZ z')}-{n}",)),
    "numeric": ({"id": ("numeric", "bigint")}, lambda _, n: (n,)),
    "time": (
        {"id": ("timestamptz", "timestamptz")},
        lambda _, n: ((BEGAN + dt.timedelta(seconds=n)).strftime("%Y-%m-%d %H:%M:%S+00"),),
    ),
    "date": ({"id": ("date", "date")}, lambda _, n: ((BEGAN + dt.timedelta(days=n)).date(),)),
    "bytes": ({"id": ("bytea", "bytea")}, lambda _, n: (Bytes(n.to_bytes(2, "big") * (n % 3 + 1)),)),
    "boolean first": ({"ok_": ("boolean", "boolean"), "id": ("time", "time")}, lambda _, n: (n % 2 == 0, time_of(n))),
    "two columns": (
        {"shop": ("text", "text"), "id": ("smallint", "integer")},
        lambda chance, n: (chance.choice(["large", "large", "large", "small"]), n),
    ),
    "few values first": ({"a": ("integer", "integer"), "b": ("uuid", "uuid")}, lambda c, n: (n % 3, UUID(int=n))),
}


def world(chance: random.Random, make: Callable[[random.Random, int], tuple[Any, ...]], size: int) -> dict[str, Rows]:
    """Return the rows of two tables that are nearly the same."""
    left: Rows = {make(chance, n): {name: value_of(chance, name) for name in COLUMNS} for n in range(size)}
    right: Rows = {}
    for key, row in left.items():
        fate = chance.random()
        if fate < 0.02:
            continue
        changed = dict(row)
        if fate < 0.3:
            name = chance.choice(list(COLUMNS))
            changed[name] = value_of(chance, name) if fate < 0.1 else near(chance, name, row[name])
        right[key] = changed
    for key in [key for key in left if chance.random() < 0.02]:
        del left[key]
    return {"l": left, "r": right}


WAYS: Mapping[str, dict[str, Any]] = {
    "as they are": {"_FEW_ROWS": 20_000},
    "digests": {"_FEW_ROWS": 0, "_ROWS_OF_RANGE": 3, "_BY_INDEX": 0.0},
    "digests, looked up": {"_FEW_ROWS": 0, "_ROWS_OF_RANGE": 3, "_BY_INDEX": 2.0},
    "few places to cut at": {"_FEW_ROWS": 0, "_ROWS_OF_RANGE": 2, "_MOST_OF_VARIABLE": 4},
    "portable hashes": {"_FEW_ROWS": 0, "_ROWS_OF_RANGE": 3, "mixing_of": lambda _: PORTABLE},
}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compare by each way, whatever the size of the tables."""
    with mock.patch.multiple(compare, **WAYS[request.param]):
        yield request.param


@pytest.mark.parametrize("kind", list(KEYS))
def test_what_is_found_is_what_plain_python_finds(tables: Tables, way: str, kind: str) -> None:
    """Rows of one side alone, and columns that differ, of tables whose columns have other types: all, and no others."""
    columns, make = KEYS[kind]
    for seed in range(tries(1)):
        chance = random.Random(f"{seed} {kind}")  # noqa: S311 - no secret
        rows = world(chance, make, chance.choice([0, 1, 60, 200]) if seed else 150)
        tables.make(columns, rows, index=chance.random() < 0.8)
        job = tables.job(*columns, tolerances=tuple(f"{name}={amount}" for name, amount in TOLERANCES.items()))
        result = compare_tables(job)
        assert differences(result) == oracle(rows["l"], rows["r"])
        assert result.rows == {"producer": len(rows["l"]), "consumer": len(rows["r"])}
        assert result.compared == len(rows["l"].keys() & rows["r"].keys())
        assert (result.ranges > 1) is (way != "as they are" and bool(rows["l"]))
        assert differences(compare_tables(replace(job, columns=("said", "ok"), tolerances=()))) == {
            each for each in oracle(rows["l"], rows["r"]) if each[2] in {None, "said", "ok"}
        }
