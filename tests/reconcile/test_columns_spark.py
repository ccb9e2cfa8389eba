"""Two DataFrames compared column by column: the same differences as two tables of the same rows have."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine

from outbox.errors import InvalidSettings
from outbox.reconcile.columns.compare import compare_tables
from outbox.reconcile.spark.columns import columns_that_differ
from tests.reconcile.test_columns import BEGAN, KEYS, TOLERANCES, Tables, oracle, world

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The columns of `test_columns.COLUMNS` that Spark has, with the types of both sides.
TYPES = {
    "n": ("int", "bigint"),
    "price": ("decimal(20,4)", "decimal(12,3)"),
    "share": ("double", "double"),
    "loss": ("decimal(20,4)", "double"),
    "at": ("timestamp", "timestamp"),
    "said": ("string", "string"),
    "ok": ("boolean", "boolean"),
}


def pairs_of(frame: DataFrame) -> set[tuple[tuple[str, ...], str, str | None]]:
    """Return what differs: key, kind, column."""
    rows = frame.collect()
    found = {(tuple(row["key"]), row["kind"], row["column"]) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(("kind", "types"), [("integer", "id int"), ("two columns", "shop string, id int")])
def test_the_same_is_found_as_in_tables(
    spark: SparkSession, new_engine: Callable[[], Engine], kind: str, types: str
) -> None:
    """Rows of one side and columns that differ, with values of other types, tolerances, NULL and NaN."""
    columns, make = KEYS[kind]
    rows = world(random.Random(f"Spark {kind}"), make, 150)  # noqa: S311 - no secret
    tables = Tables(new_engine(), new_engine())
    tables.make(columns, rows)
    tolerances = tuple(f"{name}={amount}" for name, amount in TOLERANCES.items())
    result = compare_tables(tables.job(*columns, columns=tuple(TYPES), tolerances=tolerances))
    expected = {(tuple(row["key"].values()), row["kind"], row["column"]) for row in result.to_arrow().to_pylist()}
    assert expected == {each for each in oracle(rows["l"], rows["r"]) if each[2] != "body"}

    def frame(at: int, name: str) -> DataFrame:
        schema = ", ".join([types, *(f"{column} {of_both[at]}" for column, of_both in TYPES.items())])
        values = [
            (*key, *(_float(row[column], of_both[at]) for column, of_both in TYPES.items()))
            for key, row in rows[name].items()
        ]
        return spark.createDataFrame(values, schema)

    found = columns_that_differ(frame(0, "l"), frame(1, "r"), list(columns), tolerances=TOLERANCES)
    assert pairs_of(found) == expected
    values = {(row["key"]["id"], row["left"], row["right"]) for row in found.where("column = 'n'").collect()}
    assert values == {
        (row["key"]["id"], row["left"], row["right"]) for row in result.to_arrow().to_pylist() if row["column"] == "n"
    }


def _float(value: Any, kind: str) -> Any:
    return float(value) if kind == "double" and value is not None else value


def test_each_kind_of_number_and_time_has_its_tolerance(spark: SparkSession) -> None:
    """Integers, decimals, floats and times are near by their tolerance, up to it and no farther; infinity never is."""
    schema = "id int, n bigint, d decimal(10,2), f double, at timestamp"

    def changed(id_: int, n: int, d: str, f: float, seconds: float) -> tuple[Any, ...]:
        return id_, n, Decimal(d), f, BEGAN.replace(tzinfo=None) + dt.timedelta(seconds=seconds)

    left = spark.createDataFrame([changed(i, 10, "1.00", 100.0, 0) for i in (1, 2, 3)], schema)
    right = spark.createDataFrame(
        [
            changed(1, 11, "1.01", 101.0, 2),
            changed(2, 12, "1.02", 102.1, 2.001),
            changed(3, 10, "1.00", float("inf"), -2),
        ],
        schema,
    )
    tolerances = {"n": "1", "d": "1%", "f": "1%", "at": "2s"}
    found = pairs_of(columns_that_differ(left, right, ["id"], tolerances=tolerances))
    assert {(key[0], column) for key, _, column in found} == {
        *(("2", name) for name in ("n", "d", "f", "at")),
        ("3", "f"),
    }


@pytest.mark.parametrize("rows", [[(1, "a"), (1, "b")], [(None, "a")]])
def test_a_key_that_tells_no_row_fails_the_job(spark: SparkSession, rows: list[tuple[Any, ...]]) -> None:
    """A key that is there twice, or NULL, fails the job on either side, whatever is read of its result."""
    frame = spark.createDataFrame(rows, "email int, v string")
    other = spark.createDataFrame([], "email int, v string")
    for sides in ((frame, other), (other, frame)):
        with pytest.raises(Exception, match=r"there twice in a frame; leave such rows out: .*\*\*\*"):
            columns_that_differ(*sides, ["email"]).count()


def test_masked_values_stay_so(spark: SparkSession) -> None:
    """Columns with a telling name are masked, also as a key, unless they are to be shown."""
    left, right = (spark.createDataFrame([(1, each)], "id int, email string") for each in ("a@x", "b@x"))
    (row,) = columns_that_differ(left, right, ["id"]).collect()
    assert (row["left"], row["right"]) == ("***", "***")
    (row,) = columns_that_differ(left, right, ["id"], shown=["email"]).collect()
    assert (row["left"], row["right"]) == ("a@x", "b@x")
    assert {key for key, _, _ in pairs_of(columns_that_differ(left, right, ["email"], ["id"]))} == {("***",)}


@pytest.mark.parametrize(
    ("key", "columns", "tolerances", "why"),
    [
        ("nothing", [], {}, "the left frame has no column nothing"),
        ("share", [], {}, "they can't be a key"),
        ("id", ["v"], {}, "column v is string in the left frame and int in the right: they can't be compared"),
        ("id", ["tags"], {}, "they can't be compared"),
        ("id", ["share"], {"v": "1"}, "tolerances: v is none of the compared columns: share"),
        ("id", ["share"], {"share": "few"}, "tolerance share = 'few' must be a number"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    spark: SparkSession, key: str, columns: list[str], tolerances: dict[str, str], why: str
) -> None:
    """Columns, types and tolerances that can't be right are errors before anything is read."""
    left, right = (
        spark.createDataFrame([], f"id int, v {of_v}, share double, tags map<string,int>") for of_v in ("string", "int")
    )
    with pytest.raises(InvalidSettings) as error:
        columns_that_differ(left, right, [key], columns, tolerances)
    assert why in str(error.value)
