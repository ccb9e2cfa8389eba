"""What two tables may be and what they can't: odd values, errors that name their mend, masks, lost connections."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, create_engine, text

from outbox import Settings
from outbox.cli.output import Code
from outbox.database.execute import Statement
from outbox.database.sql import plan_by_index
from outbox.errors import InvalidSettings, SourceError, SourceLost
from outbox.reconcile import source
from outbox.reconcile.columns import TablesJob, compare
from outbox.reconcile.columns.compare import TablesResult, compare_tables
from outbox.reconcile.columns.report import as_json, write_html
from outbox.reconcile.job import Access, Interrupted, NoProgress
from tests.cli.conftest import Result, run_cli
from tests.kit import wait_until
from tests.reconcile.foreign import run
from tests.reconcile.town import url_of


@pytest.fixture
def both(new_engine: Callable[[], Engine]) -> tuple[Engine, Engine]:
    """Two databases."""
    return new_engine(), new_engine()


def job(both: tuple[Engine, Engine], left: str = "a", right: str = "", *key: str, **options: Any) -> TablesJob:
    """Return the job that compares tables of two databases, by ``id`` unless told otherwise."""
    producer, consumer = (Access(url_of(each), Settings()) for each in both)
    return TablesJob(producer, consumer, left, right, key=key or ("id",), **options)


def found(result: TablesResult) -> list[tuple[str, str | None, str | None]]:
    """Return column and values of the sample."""
    return [(row["column"] or row["kind"], row["left"], row["right"]) for row in result.sample.to_pylist()]


@pytest.fixture
def digests() -> Iterator[None]:
    """Digest tables of any size, in ranges of a row or two."""
    with mock.patch.multiple(compare, _FEW_ROWS=0, _ROWS_OF_RANGE=1):
        yield


ODD = {
    "double precision": ["NULL", "0", "1", "'NaN'", "'Infinity'", "'-Infinity'"],
    "real": ["NULL", "0", "'NaN'", "1"],
    "numeric": ["NULL", "0", "1", "'NaN'", "-1"],
    "bigint": ["NULL", "0", "1", "-1", "4294967295", "4294967296"],
    "text": ["NULL", "''", "'NULL'", "' '", "E'\\n'"],
    "char(3)": ["NULL", "''", "'a'"],
    "jsonb": ["NULL", "'[]'", "'{}'", "'[[]]'", "'null'", "'0'", "'\"\"'", "'true'", "'1'"],
    "boolean": ["NULL", "false", "true"],
    "bytea": ["NULL", "''", "'\\x00'"],
    "timestamptz": ["NULL", "'infinity'", "'-infinity'", "'0044-03-15 BC'", "'12026-01-01'", "'2000-01-01 00:00+00'"],
    "date": ["NULL", "'infinity'", "'2000-01-01'"],
    "interval": ["NULL", "'0'", "'1 day'"],
    "int[]": ["NULL", "'{}'", "'{NULL}'", "'{0}'"],
}


@pytest.mark.usefixtures("digests")
@pytest.mark.parametrize("type_", list(ODD))
def test_no_two_odd_values_are_equal(both: tuple[Engine, Engine], type_: str) -> None:
    """NULL, zero, nothing and infinity differ from each other, also by their hashes, and are equal to themselves."""
    pairs = [(one, other) for one in ODD[type_] for other in ODD[type_]]
    for at, engine in enumerate(both):
        rows = ", ".join(f"({number}, CAST({pair[at]} AS {type_}))" for number, pair in enumerate(pairs))
        run(engine, f"CREATE TABLE a (id int PRIMARY KEY, v {type_})", f"INSERT INTO a VALUES {rows}")
    result = compare_tables(job(both, sample=1000))
    expected = {str(number) for number, (one, other) in enumerate(pairs) if one != other}
    assert {row["key"]["id"] for row in result.sample.to_pylist()} == expected
    assert result.differ == len(expected)


@pytest.mark.usefixtures("digests")
def test_rows_that_swap_their_values_differ(both: tuple[Engine, Engine]) -> None:
    """Two rows of one range that have each other's values are no equal rows, and not hashed as such."""
    for at, engine in enumerate(both):
        run(
            engine,
            "CREATE TABLE a (id int PRIMARY KEY, v bigint)",
            f"INSERT INTO a SELECT i, CASE WHEN i % 5 = 0 THEN i # {at} ELSE i END FROM generate_series(1, 2000) i",
        )
    run(both[1], "UPDATE a SET v = id # 1 WHERE (id # 1) % 5 = 0")
    with mock.patch.object(compare, "_ROWS_OF_RANGE", 100):
        result = compare_tables(job(both))
    assert result.differ == 800
    assert result.ranges < 100


EQUAL = [
    ("real", "1.5", "double precision", "1.5"),
    ("numeric", "0.1", "double precision", "0.1"),
    ("numeric", "0.1", "real", "0.1"),
    ("integer", "7", "numeric", "7.000"),
    ("bigint", "7", "double precision", "7"),
    ("double precision", "'-0'", "double precision", "0"),
    ("date", "'2026-03-01'", "timestamptz", "'2026-03-01 01:00+01'"),
    ("timestamp", "'2026-03-01'", "timestamptz", "'2026-03-01 00:00Z'"),
    ("json", '\'{"b": 1, "a": 1.0}\'', "jsonb", '\'{"a": 1, "b": 1.00}\''),
    ("char(5)", "'a'", "varchar", "'a'"),
    ("mood", "'glad'", "text", "'glad'"),
    ("short", "'x'", "text", "'x'"),
    ("uuid", "'0192A4C3-8F21-7A1B-9C3D-5E6F7A8B9C0D'", "text", "'0192a4c3-8f21-7a1b-9c3d-5e6f7a8b9c0d'"),
]


@pytest.mark.usefixtures("digests")
@pytest.mark.parametrize(("left", "one", "right", "other"), EQUAL)
def test_types_are_compared_by_value(both: tuple[Engine, Engine], left: str, one: str, right: str, other: str) -> None:
    """A value of one type equals the same value of another, whichever side has which, and no other value."""
    for engine in both:
        run(engine, "CREATE TYPE mood AS ENUM ('glad', 'sad')", "CREATE DOMAIN short AS varchar(3)")
    for (type_, value), engine in zip(((left, one), (right, other)), both, strict=True):
        run(engine, f"CREATE TABLE a (id int PRIMARY KEY, v {type_})", f"INSERT INTO a VALUES (1, {value}), (2, NULL)")
    assert compare_tables(job(both)).equal
    assert compare_tables(job((both[1], both[0]))).equal
    run(both[1], "UPDATE a SET v = NULL WHERE id = 1")
    assert not compare_tables(job(both)).equal


@pytest.mark.usefixtures("digests")
@pytest.mark.parametrize("looked_up", [0.0, 2.0])
def test_names_are_names(both: tuple[Engine, Engine], looked_up: float) -> None:
    """A schema, a table and columns may be called whatever PostgreSQL allows, but for colons and commas in a column."""
    for at, engine in enumerate(both):
        run(
            engine,
            'CREATE SCHEMA "od d%%"',
            'CREATE TABLE "od d%%"."ta""ble.{0} %%(s)s" ("k%%(d)s" int PRIMARY KEY, "v{c}" text)',
            f"""INSERT INTO "od d%%"."ta""ble.{{0}} %%(s)s"
                SELECT i, i + {at} * (i % 2) FROM generate_series(1, 9) i""",
        )
    with mock.patch.object(compare, "_BY_INDEX", looked_up):
        result = compare_tables(job(both, 'od d%%.ta"ble.{0} %%(s)s', "", "k%%(d)s"))
    assert [each["key"] for each in result.sample.to_pylist()] == [{"k%%(d)s": str(n)} for n in (1, 3, 5, 7, 9)]


REFUSED = [
    ("no table", {"left": "nothing"}, "the producer has no table nothing"),
    ("no column", {"columns": ("w",)}, "has no column w; it has id, v, email"),
    ("no key column", {"key": ("idd",)}, "has no column idd"),
    (
        "types",
        {"columns": ("v:ok",)},
        "v of the producer's table a is integer, and ok of the consumer's table b",
    ),
    ("a float as key", {"key": ("v:share",)}, "they can't be a key; choose another key"),
    ("a tolerance of a text", {"tolerances": ("email=1",)}, "email is neither a number nor a time"),
    ("no tolerance", {"tolerances": ("v=few",)}, "tolerance v = 'few' must be a number as 0.01, or a share as 1%"),
    ("a tolerance of the key", {"tolerances": ("id=1",)}, "id is of the key"),
    ("an unknown mask", {"masks": ("w",)}, "masks: w is none of the compared columns"),
]


@pytest.mark.parametrize(("options", "why"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_what_cannot_be_compared_is_refused(both: tuple[Engine, Engine], options: dict[str, Any], why: str) -> None:
    """Tables, columns, types and tolerances that can't be right are errors that name them, before a row is read."""
    columns = "id int PRIMARY KEY, v int, email text"
    run(both[0], f"CREATE TABLE a ({columns})")
    run(both[1], f"CREATE TABLE b ({columns}, ok boolean, share double precision)")
    options = {"left": "a", "right": "b", "key": ("id",)} | options
    producer, consumer = (Access(url_of(each), Settings()) for each in both)
    with (
        mock.patch.object(compare, "_plan", side_effect=AssertionError("it was read")),
        pytest.raises(InvalidSettings) as error,
    ):
        compare_tables(TablesJob(producer, consumer, **options))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"left": ""}, "left: name the producer's table"),
        ({"key": ()}, "key: name the columns"),
        ({"columns": ("id",)}, "id is named twice"),
        ({"tolerances": ("v",)}, "'v' must be column=amount"),
    ],
)
def test_a_job_that_says_too_little_is_refused(options: dict[str, Any], why: str) -> None:
    """A job names a table, a key, each column once, and how much a tolerance is."""
    nowhere = Access("postgresql+psycopg://nowhere", Settings())
    with pytest.raises(InvalidSettings, match=why):
        TablesJob(nowhere, nowhere, **{"left": "a", "key": ("id",)} | options)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ("(1, 'x', 1), (1, 'x', 2)", "has 2 rows of the key id = 1, shop = x; name all columns of its key"),
        ("(1, NULL, 1), (2, NULL, 1)", "the key shop of the consumer's table a is NULL in 2 rows"),
    ],
)
def test_rows_without_a_key_of_their_own_are_named(both: tuple[Engine, Engine], rows: str, why: str) -> None:
    """A key that is there twice, or NULL, is an error on either side: no row would be compared with the right one."""
    for engine in both:
        run(engine, "CREATE TABLE a (id int, shop text, v int)", "INSERT INTO a VALUES (1, 'x', 1)")
    run(both[1], "TRUNCATE a", f"INSERT INTO a VALUES {rows}")
    with pytest.raises(InvalidSettings) as error:
        compare_tables(job(both, "a", "", "id", "shop"))
    assert why in str(error.value)


def test_texts_of_two_encodings_are_no_key(both: tuple[Engine, Engine]) -> None:
    """Bytes, by which texts are ordered, depend on the encoding: ranges of such keys would be others on either side."""
    latin = both[1].url.set(database=f"{both[1].url.database}_latin")
    create = f"CREATE DATABASE {latin.database} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    other, outside = create_engine(latin), both[1].execution_options(isolation_level="AUTOCOMMIT")
    try:
        run(outside, create)
        for engine in (both[0], other):
            run(engine, "CREATE TABLE a (id int PRIMARY KEY, name text NOT NULL)", "INSERT INTO a VALUES (1, 'ä')")
        assert compare_tables(job((both[0], other))).equal
        with pytest.raises(InvalidSettings, match="encodings LATIN1 and UTF8, in which texts have another order"):
            compare_tables(job((both[0], other), "a", "", "name"))
    finally:
        other.dispose()
        run(outside, f"DROP DATABASE IF EXISTS {latin.database} WITH (FORCE)")


def test_masked_values_show_nowhere(both: tuple[Engine, Engine], tmp_path: Path) -> None:
    """What is named as a secret or masked by option is masked in sample, file and errors; `shown` shows it."""
    for engine, secret in zip(both, ("s3cret-a", "s3cret-b"), strict=True):
        run(
            engine,
            "CREATE TABLE a (id int, email text, city text)",
            f"INSERT INTO a VALUES (1, '{secret}', '{secret}'), (2, 'same', NULL)",
        )
    path = tmp_path / "found.parquet"
    result = compare_tables(job(both, masks=("city",)), parquet=path)
    assert found(result) == [("email", "***", "***"), ("city", "***", "***")]
    assert "s3cret" not in str(pq.read_table(path).to_pylist())
    shown = compare_tables(job(both, shown=("email",), masks=("city",)))
    assert found(shown)[0] == ("email", "s3cret-a", "s3cret-b")
    run(both[0], "INSERT INTO a VALUES (3, 's3cret-a', NULL)")
    with pytest.raises(InvalidSettings, match=r"2 rows of the key \*\*\*"):
        compare_tables(job(both, "a", "", "email", columns=("city",)))


@pytest.mark.parametrize(
    ("statements", "why"),
    [
        (["CREATE TABLE heir () INHERITS (a)", "INSERT INTO heir VALUES (1, 2)"], "has 2 rows of the key id = 1"),
        (
            [
                "ALTER TABLE a DROP CONSTRAINT a_pkey, ALTER id DROP NOT NULL",
                "INSERT INTO a VALUES (NULL, 1)",
                "ALTER TABLE a ADD CONSTRAINT later NOT NULL id NOT VALID",
            ],
            "the key id of the consumer's table a is NULL in 1 row",
        ),
    ],
)
def test_constraints_that_say_too_little_are_not_believed(
    both: tuple[Engine, Engine], statements: list[str], why: str
) -> None:
    """A primary key says nothing of tables that inherit, nor a constraint that isn't validated of rows of before."""
    for engine in both:
        run(engine, "CREATE TABLE a (id int PRIMARY KEY, v int)", "INSERT INTO a VALUES (1, 1)")
    with both[0].connect() as connection:
        number = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
        if "NOT VALID" in statements[-1] and number < 180_000:
            pytest.skip("PostgreSQL 18 is the first in which NOT NULL can be left to be validated")
    run(both[1], *statements)
    with pytest.raises(InvalidSettings) as error:
        compare_tables(job(both))
    assert why in str(error.value)


KILL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE application_name LIKE 'outbox reconcile%' AND datname = current_database()
"""


@pytest.mark.parametrize("fate", ["once", "always"])
def test_a_lost_connection_leaves_no_half_file(both: tuple[Engine, Engine], tmp_path: Path, fate: str) -> None:
    """A connection that is killed while rows are read is begun again; where it is lost for good, no file is left."""
    for at, engine in enumerate(both):
        # Several batches of rows: a server that is killed behind the first can't have sent the others.
        run(
            engine,
            "CREATE TABLE a (id int PRIMARY KEY, v text, pad text)",
            f"""INSERT INTO a SELECT i, CASE WHEN i % 10 = 0 THEN '{at}' END, repeat('x', 20000)
                  FROM generate_series(1, 2000) i""",
        )
    read, kills = compare._batches, list[int]()

    def killed(*args: Any) -> Iterator[Any]:
        for batch in read(*args):
            yield batch
            if args[0].found.part == "producer" and (fate == "always" or not kills):
                kills.append(1)
                with both[0].connect() as connection:
                    connection.execute(text(KILL))

    path, told = tmp_path / "found.parquet", mock.Mock(spec=NoProgress)
    with (
        mock.patch.object(compare, "_batches", killed),
        mock.patch.multiple(source, _FIRST_WAIT=0.01, _LONGEST_WAIT=0.01),
    ):
        if fate == "always":
            with pytest.raises(SourceLost):
                compare_tables(job(both), told, parquet=path)
            assert list(tmp_path.iterdir()) == []
        else:
            assert compare_tables(job(both), told, parquet=path).differ == 200
            assert pq.read_table(path).num_rows == 200
            assert [each.name for each in tmp_path.iterdir()] == ["found.parquet"]
    assert "begun again" in told.say.call_args_list[0].args[0]


def test_an_interrupted_comparison_leaves_nothing(both: tuple[Engine, Engine], tmp_path: Path) -> None:
    """A progress that ends the comparison while rows are read leaves no file, and no session in the databases."""
    for engine in both:
        run(
            engine,
            "CREATE TABLE a (id int PRIMARY KEY, pad text)",
            "INSERT INTO a SELECT i, repeat('x', 20000) FROM generate_series(1, 2000) i",
        )

    class Impatient(NoProgress):
        def done(self, steps: int) -> None:
            if steps:
                raise Interrupted("enough")

    with pytest.raises(Interrupted, match="enough"):
        compare_tables(job(both), Impatient(), parquet=tmp_path / "found.parquet")
    assert list(tmp_path.iterdir()) == []

    def no_session() -> bool:
        numbers = []
        for engine in both:
            with engine.connect() as connection:
                numbers.append(connection.scalar(text(SESSIONS)))
        return numbers == [0, 0]

    wait_until(no_session, "the sessions to end")


SESSIONS = """
SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'outbox reconcile%' AND datname = current_database()
"""


def test_what_a_database_refuses_is_told_at_once(both: tuple[Engine, Engine]) -> None:
    """A value that can't be cast is an error of the side that has it, and no reason to begin again."""
    run(both[0], "CREATE TABLE a (id int PRIMARY KEY, v numeric)", "INSERT INTO a VALUES (1, 1e400)")
    run(both[1], "CREATE TABLE a (id int PRIMARY KEY, v double precision)", "INSERT INTO a VALUES (1, 1)")
    told = mock.Mock(spec=NoProgress)
    with pytest.raises(SourceError, match="out of range") as error:
        compare_tables(job(both), told)
    assert not isinstance(error.value, SourceLost)
    assert told.say.call_args_list == []
    with pytest.raises(SourceError, match=r'"\*\*\*" is out of range') as error:
        compare_tables(job(both, masks=("v",)))
    assert "0000" not in str(error.value)


def test_shares_have_whole_buckets() -> None:
    """However the rows of two sides come, a share has all rows of its buckets, in order, and few others are held."""
    chance = random.Random(7)  # noqa: S311 - no secret
    sides = [sorted(chance.choices(range(300), k=2000)) for _ in range(2)]

    def batches(buckets: list[int]) -> Iterator[pa.Table | None]:
        at = 0
        while at < len(buckets):
            size = chance.choice([0, 1, 7, 50])
            yield pa.table({"bucket": pa.array(buckets[at : at + size], pa.int64())})
            at += size
        yield None

    shares = list(compare.aligned(*(batches(each).__next__ for each in sides)))
    numbers = [[each["bucket"].to_pylist() if each.num_columns else [] for each in share] for share in shares]
    assert [list(itertools.chain(*(share[at] for share in numbers))) for at in range(2)] == sides
    for before, after in itertools.pairwise(numbers):
        assert max(before[0] + before[1]) < min(after[0] + after[1])
    assert max(len(ours) + len(theirs) for ours, theirs in numbers) < 200


@pytest.mark.parametrize(
    "type_", ["int", "bigint", "uuid", "numeric", "timestamptz", "date", 'text COLLATE "C"', 'varchar(40) COLLATE "C"']
)
def test_few_ranges_are_looked_up_by_the_index(both: tuple[Engine, Engine], type_: str) -> None:
    """Where few rows lie in ranges that differ, no row of other ranges is read, whatever type the key has."""
    of_number = {
        "uuid": "lpad(i::text, 32, '0')::uuid",
        "timestamptz": "timestamptz '2026-01-01' + i * interval '1 s'",
        "date": "date '2000-01-01' + i",
    }.get(type_, "i")
    for engine in both:
        run(
            engine,
            f"CREATE TABLE a (id {type_} PRIMARY KEY, v int)",
            "INSERT INTO a SELECT * FROM (SELECT " + of_number + " AS id, i FROM generate_series(1, 3000) i) s",
        )
    run(both[1], "UPDATE a SET v = -v WHERE v = 1500", "DELETE FROM a WHERE v = 1")
    read, plans = compare._batches, list[str]()

    def explained(side: Any, statement: Statement, *rest: Any) -> Any:
        side.ask(plan_by_index())
        plans.append("\n".join(str(row[0]) for row in side.ask(replace(statement, sql=f"EXPLAIN {statement.sql}"))))
        return read(side, statement, *rest)

    with mock.patch.multiple(compare, _FEW_ROWS=0, _ROWS_OF_RANGE=10, _batches=explained):
        result = compare_tables(job(both))
    assert (result.differ, result.only["only_left"]) == (1, 1)
    assert result.rows_read < 600
    assert len(plans) == 2
    for plan in plans:
        assert "Index Scan" in plan
        assert "Seq Scan" not in plan


def test_a_sample_is_of_each_column(both: tuple[Engine, Engine]) -> None:
    """So many differences of each column are shown, and all are counted."""
    for at, engine in enumerate(both):
        run(
            engine,
            "CREATE TABLE a (id int PRIMARY KEY, often int, only_left int)",
            f"INSERT INTO a SELECT i, {at}, CASE WHEN i = 7 THEN {at} END FROM generate_series(1 + {at}, 50 + {at}) i",
        )
    result = compare_tables(job(both, sample=2))
    assert [each.differ for each in result.columns] == [49, 1]
    assert [name for name, _, _ in found(result)] == ["only_left", "only_right", "often", "often", "only_left"]
    assert result.sentence == "49 rows in which columns differ; 1 row of the left alone; 1 row of the right alone"
    assert list(result.to_pandas()["column"].dropna()) == ["often", "often", "only_left"]


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture
def sides(both: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Engine]:
    """Two databases with a table each, named by the environment."""
    for name, engine in zip(("PRODUCER", "CONSUMER"), both, strict=True):
        monkeypatch.setenv(f"OUTBOX_{name}_URL", url_of(engine))
        run(
            engine,
            "CREATE TABLE shop_order (id bigint PRIMARY KEY, total numeric, email text)",
            "INSERT INTO shop_order SELECT i, i, '<b>' || i FROM generate_series(1, 9) i",
        )
    return both


def tables(*arguments: str) -> Result:
    """Run ``outbox reconcile tables`` in this process."""
    return run_cli("reconcile", "tables", *arguments)


@pytest.mark.usefixtures("sides")
def test_equal_tables_are_0() -> None:
    """Equal tables leave with 0, and say so."""
    result = tables("--left", "shop_order", "--key", "id")
    assert result.code == Code.DONE, result.err
    assert result.out.splitlines()[-1] == "equal"


def test_differences_are_6_in_each_form(sides: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Differences leave with 6; they are in the table, in JSON, on the page and in the file, masked everywhere."""
    run(
        sides[1],
        "UPDATE shop_order SET total = 7.5, email = 'unseen' WHERE id = 3",
        "DELETE FROM shop_order WHERE id = 5",
    )
    page, file = tmp_path / "page.html", tmp_path / "found.parquet"
    options = ("--tolerance", "total=1%", "--html", str(page), "--parquet", str(file))
    shown = tables("--left", "shop_order", "--key", "id", *options)
    assert shown.code == Code.PROBLEMS, shown.err
    assert {"7.5", "1%"} <= set(shown.out.split())
    assert shown.out.splitlines()[-1] == "1 row in which columns differ; 1 row of the left alone"
    result = tables("--left", "shop_order", "--key", "id", "-o", "json")
    assert result.code == Code.PROBLEMS
    value = result.json
    assert (value["equal"], value["compared"], value["only_left"], value["differ"]) == (False, 8, 1, 1)
    assert {"key": {"id": "3"}, "kind": "differs", "column": "total", "left": "3", "right": "7.5"} in value["sample"]
    html = page.read_text()
    assert "1 row in which columns differ" in html
    assert ">7.5</td>" in html
    assert "<script" not in html
    assert pq.read_table(file).num_rows == 3
    assert "unseen" not in shown.out + json.dumps(value) + html + str(pq.read_table(file).to_pylist())


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("--key", "id"), Code.CONFIG, "left: name the producer's table"),
        (("--left", "shop_order", "--key", "nothing"), Code.CONFIG, "has no column nothing"),
        (("--left", "shop_order", "--key", "id", "--html", "/nowhere/page.html"), Code.USAGE, "there is no folder"),
    ],
)
def test_wrong_usage_is_one_line(
    sides: tuple[Engine, Engine], arguments: tuple[str, ...], code: Code, why: str
) -> None:
    """What can't be compared is told in one line, without the password of a URL."""
    result = tables(*arguments)
    assert (result.code, result.out) == (code, ""), result.err
    assert why in result.err
    assert result.err.count("\n") == 1


def test_columns_that_one_table_alone_has_are_named(both: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Without names all that both have are compared; what is left out shows in each form, and is no silent equal."""
    run(both[0], "CREATE TABLE a (id int, i int, important text)", "INSERT INTO a VALUES (1, 2, 'x')")
    run(both[1], "CREATE TABLE a (i int, other text, id int)", "INSERT INTO a VALUES (2, NULL, 1)")
    result = compare_tables(job(both))
    assert (result.equal, result.sentence) == (True, "equal in what both have")
    assert as_json(result)["uncompared"] == {"left": ["important"], "right": ["other"]}
    write_html(tmp_path / "a.html", result)
    assert "not compared: important (left alone), other (right alone)" in (tmp_path / "a.html").read_text()
    named = compare_tables(job(both, columns=("i",)))
    assert (named.sentence, named.left_out) == ("equal", "")


def test_columns_have_any_name_where_none_is_given(both: tuple[Engine, Engine]) -> None:
    """What the syntax of the options takes for more than a name."""
    for engine, value in zip(both, (1, 2), strict=True):
        run(
            engine,
            'CREATE TABLE a (id int, "a:b" int, "c,d" int, "e=f" int)',
            f"INSERT INTO a VALUES (1, {value}, 1, 1)",
        )
    assert found(compare_tables(job(both))) == [("a:b", "1", "2")]


def test_rows_that_a_policy_hides_are_an_error(both: tuple[Engine, Engine]) -> None:
    """They would look like rows that one table alone has."""
    for engine in both:
        run(engine, "CREATE TABLE a (id int)", "INSERT INTO a VALUES (1)")
    role = f"sees_little_{both[1].url.database}"
    run(both[1], "ALTER TABLE a ENABLE ROW LEVEL SECURITY", f"CREATE ROLE {role} LOGIN PASSWORD '{role}'")
    run(both[1], f"GRANT SELECT ON a TO {role}")
    limited = job(both)
    url = both[1].url.set(username=role, password=role).render_as_string(hide_password=False)
    try:
        with pytest.raises(SourceError, match="row-level security"):
            compare_tables(replace(limited, consumer=Access(url, Settings())))
    finally:
        run(both[1], f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_settings_of_a_database_change_nothing(both: tuple[Engine, Engine]) -> None:
    """How it would write names and read texts isn't how our statements mean them."""
    for engine, value in zip(both, (r"a\b", r"a\c"), strict=True):
        run(engine, "CREATE TABLE a (id int, t text, j jsonb)")
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO a VALUES (1, :value, '{}')"), {"value": value})
        for setting in ("quote_all_identifiers = on", "standard_conforming_strings = off", "row_security = off"):
            run(engine, f"ALTER DATABASE {engine.url.database} SET {setting}")
        engine.dispose()
    assert found(compare_tables(job(both))) == [("t", r"a\b", r"a\c")]


def test_floats_too_far_apart_for_a_float(both: tuple[Engine, Engine]) -> None:
    """Their difference is infinite, and no warning."""
    for engine, value in zip(both, ("1e308", "-1e308"), strict=True):
        run(engine, "CREATE TABLE a (id int, v float8)", f"INSERT INTO a VALUES (1, {value})")
    assert found(compare_tables(job(both, tolerances=("v=1",)))) == [("v", "1e+308", "-1e+308")]
