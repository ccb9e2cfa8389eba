"""What a query on a topic's log doesn't want is left in the database, and nothing that it does want."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from typing_extensions import TypedDict

from outbox.errors import InvalidSettings, MessagesPruned, SourceError
from outbox.message.topic import Topic
from outbox.reader import Reader
from outbox.reconcile.spark.body import body_type
from outbox.reconcile.spark.log import LogOptions, TableReader, register
from tests.reconcile.test_spark_log import log_url  # noqa: F401 - a fixture
from tests.reconcile.test_topic_log import TOPIC, send
from tests.reconcile.town import Town, url_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]
STRANGE = "{s}' %(after)s \\ %"
LATE = dt.datetime.max.replace(tzinfo=dt.UTC)


@pytest.fixture
def options(town: Town, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LogOptions]:
    """How the log of a topic with a few messages, of several keys and times, is read."""
    monkeypatch.setenv("LOG_URL", url_of(town.producer))
    for key in ("a", "b", None, STRANGE):
        send(town, range(5), key=key, tag="t" if key == "a" else None)

    def read(**more: str) -> LogOptions:
        known = {"topic": TOPIC, "url_env": "LOG_URL", "rows_per_partition": "3"}
        return Reader(form="text").read(LogOptions, known | more)

    return read


def rows_of(options: LogOptions, filters: Sequence[Filter] = ()) -> tuple[list[Row], list[Filter]]:
    """Return the rows of a table of which Spark has pushed these filters, and the filters that it must see to."""
    table = TableReader(options)
    left = list(table.pushFilters(list(filters)))
    batches = [batch for each in table.partitions() for batch in table.read(each)]
    return pa.Table.from_batches(batches).to_pylist() if batches else [], left


#: Filters by a row in the midst of the log, and what each says of another row.
PUSHED: dict[str, Callable[[Row], tuple[Filter, Callable[[Row], Any]]]] = {
    "queue": lambda row: (EqualTo(("queue",), row["queue"]), lambda each: each["queue"] == row["queue"]),
    "queues": lambda row: (In(("queue",), (row["queue"], 99)), lambda each: each["queue"] == row["queue"]),
    "no queue": lambda _: (GreaterThan(("queue",), 1000), lambda _: False),
    "position": lambda row: (EqualTo(("position",), row["position"]), lambda each: each["position"] == row["position"]),
    "positions": lambda _: (In(("position",), (1, 3)), lambda each: each["position"] in {1, 3}),
    "behind": lambda _: (GreaterThan(("position",), 1), lambda each: each["position"] > 1),
    "up to": lambda _: (LessThanOrEqual(("position",), 2), lambda each: each["position"] <= 2),
    "below all": lambda _: (LessThan(("position",), -5), lambda _: False),
    "beyond all": lambda _: (LessThanOrEqual(("position",), 2**63 - 1), lambda _: True),
    "since": lambda row: (
        GreaterThanOrEqual(("visible_at",), row["visible_at"]),
        lambda each: each["visible_at"] >= row["visible_at"],
    ),
    "after": lambda row: (
        GreaterThan(("visible_at",), row["visible_at"]),
        lambda each: each["visible_at"] > row["visible_at"],
    ),
    "until": lambda row: (
        LessThanOrEqual(("visible_at",), row["visible_at"]),
        lambda each: each["visible_at"] <= row["visible_at"],
    ),
    "before": lambda row: (
        LessThan(("visible_at",), row["visible_at"]),
        lambda each: each["visible_at"] < row["visible_at"],
    ),
    "at the end of times": lambda _: (LessThanOrEqual(("visible_at",), LATE), lambda _: True),
    "born": lambda row: (LessThan(("born_at",), row["born_at"]), lambda each: each["born_at"] < row["born_at"]),
    "key": lambda _: (EqualTo(("key",), "a"), lambda each: each["key"] == "a"),
    "a strange key": lambda _: (EqualTo(("key",), STRANGE), lambda each: each["key"] == STRANGE),
    "keys": lambda _: (In(("key",), ("b", STRANGE)), lambda each: each["key"] in {"b", STRANGE}),
    "no key": lambda _: (IsNull(("key",)), lambda each: each["key"] is None),
    "a tag": lambda _: (IsNotNull(("tag",)), lambda each: each["tag"] is not None),
    "id": lambda row: (
        EqualTo(("message_id",), row["message_id"]),
        lambda each: each["message_id"] == row["message_id"],
    ),
    "ids": lambda row: (
        In(("message_id",), (row["message_id"],)),
        lambda each: each["message_id"] == row["message_id"],
    ),
    "send number": lambda _: (EqualTo(("send_number",), 2), lambda _: False),
}


@pytest.mark.parametrize("name", PUSHED)
def test_each_filter_leaves_what_fits(options: Callable[..., LogOptions], name: str) -> None:
    """The database leaves out the others, alone and beside another filter."""
    whole, _ = rows_of(options())
    filter_, fits = PUSHED[name](sorted(whole, key=lambda row: row["born_at"])[11])
    rows, left = rows_of(options(), [filter_])
    assert (rows, left) == ([row for row in whole if fits(row)], [])
    rows, _ = rows_of(options(), [IsNotNull(("key",)), filter_])
    assert rows == [row for row in whole if fits(row) and row["key"] is not None]


@pytest.mark.parametrize(
    "filter_",
    [
        GreaterThan(("key",), "a"),
        Not(EqualTo(("key",), "a")),
        EqualTo(("headers", "a"), "b"),
        EqualTo(("message_id",), "01975A5E-0C6F-7A3E-8000-5D0E6F0C1A2B"),
        EqualTo(("message_id",), "7"),
        EqualTo(("key",), "a\0"),
        EqualTo(("queue",), 2**70),
        EqualTo(("queue",), True),
        EqualTo(("visible_at",), dt.datetime(2026, 1, 1)),  # noqa: DTZ001 - one without a zone is meant
        In(("key",), ("a", None)),
        EqualTo(("body",), b"1"),
    ],
    ids=str,
)
def test_what_the_database_would_answer_otherwise_is_sparks(
    options: Callable[..., LogOptions], filter_: Filter
) -> None:
    """It is given back, and leaves nothing out."""
    rows, left = rows_of(options(), [filter_, filter_])
    assert len(left) == 2
    assert left[0] is filter_
    assert len(rows) == 20


@pytest.mark.parametrize("name", ["since", "after", "until", "before"])
def test_a_filter_on_times_is_exact_where_a_clock_went_back(
    options: Callable[..., LogOptions], town: Town, name: str
) -> None:
    """What isn't in the order of its positions is found, and left out, all the same."""
    town.at_producer("UPDATE {s}.message SET visible_at = visible_at - interval '1 hour' WHERE position IN (2, 3)")
    whole, _ = rows_of(options())
    for row in whole[::5]:
        filter_, fits = PUSHED[name](row)
        assert rows_of(options(), [filter_])[0] == [each for each in whole if fits(each)]


def test_a_table_begins_and_ends_where_it_is_said(options: Callable[..., LogOptions]) -> None:
    """By a time, by a position, by positions of queues; the end isn't in it."""
    whole, _ = rows_of(options())
    times = sorted(row["visible_at"] for row in whole)
    since, until = times[5], times[15]
    rows, _ = rows_of(options(start=since.isoformat(), end=until.isoformat()))
    assert rows == [row for row in whole if since <= row["visible_at"] < until]
    rows, _ = rows_of(options(start="2", end="3"))
    assert rows == [row for row in whole if row["position"] == 2]
    rows, _ = rows_of(options(end=f"{whole[0]['queue']}:2"))
    assert [row for row in rows if row["queue"] == whole[0]["queue"]] == whole[:1]
    assert rows_of(options(start="now")) == ([], [])


def test_where_a_table_begins_may_be_pruned(options: Callable[..., LogOptions], town: Town) -> None:
    """Then it is told, unless that is to be skipped; before an end, and behind a filter, it is meant to be as it is."""
    whole, _ = rows_of(options())
    town.at_producer("DELETE FROM {s}.message WHERE position = 1")
    kept = [row for row in whole if row["position"] > 1]
    for start in ("1", whole[0]["visible_at"].isoformat()):
        with pytest.raises(MessagesPruned, match="of topic 'paid', queue"):
            rows_of(options(start=start))
        assert {row["message_id"] for row in rows_of(options(start=start, on_pruned="skip"))[0]} <= {
            row["message_id"] for row in kept
        }
    assert rows_of(options(end="2"))[0] == []
    assert rows_of(options(), [GreaterThanOrEqual(("position",), 1)])[0] == kept


def test_only_the_columns_that_are_named_are_read(options: Callable[..., LogOptions], town: Town) -> None:
    """In their order; half messages are read only where a column or a filter is of theirs."""
    whole, _ = rows_of(options())
    rows, _ = rows_of(options(columns="visible_at, queue"))
    assert rows == [{name: row[name] for name in ("visible_at", "queue")} for row in whole]
    rows, _ = rows_of(options(columns="body"), [EqualTo(("tag",), "t")])
    assert rows == [{"body": row["body"]} for row in whole if row["tag"] == "t"]
    town.at_producer("DELETE FROM {s}.half_message WHERE id = CAST(:id AS uuid)", id=whole[3]["message_id"])
    assert len(rows_of(options(columns="queue,position"))[0]) == len(whole)
    for columns, filters in (("key", []), ("queue", [EqualTo(("key",), "none has it")])):
        with pytest.raises(SourceError, match=f"{whole[3]['message_id']} of topic 'paid' has no half message"):
            rows_of(options(columns=columns), filters)


@pytest.mark.parametrize("said", [{"columns": "queue,queues"}, {"columns": "queue,queue"}, {"start": "soon"}])
def test_columns_and_bounds_that_cant_be(options: Callable[..., LogOptions], said: dict[str, str]) -> None:
    """They are named, with what there is."""
    with pytest.raises(InvalidSettings, match=next(iter(said.values()))):
        options(**said)


def test_what_is_pruned_behind_a_filter_is_counted(options: Callable[..., LogOptions], town: Town) -> None:
    """Also where the messages that were pruned wouldn't have been wanted: it isn't known of them."""
    table = TableReader(options())
    table.pushFilters([EqualTo(("key",), "a")])
    parts = table.partitions()
    stretch = parts[0].value
    town.at_producer(
        "DELETE FROM {s}.message WHERE queue = :queue AND position = :at", queue=stretch.queue, at=stretch.until
    )
    with pytest.raises(MessagesPruned, match="1 messages behind"):
        list(table.read(parts[0]))


def test_spark_pushes_what_a_query_asks_for(
    spark: SparkSession,
    town: Town,
    log_url: str,  # noqa: F811 - the fixture
    options: Callable[..., LogOptions],
) -> None:
    """Nothing is left to filter, the answer is Spark's own, and columns that aren't a log's are named."""
    from pyspark.errors import AnalysisException, PySparkException

    whole, _ = rows_of(options())
    register(spark)
    source = spark.read.format("outbox").options(topic=TOPIC, url=log_url, rows_per_partition="3")
    frame = source.load()
    since = whole[7]["visible_at"]
    some = frame.filter(
        (frame.key == "a") & (frame.visible_at >= since) & (frame.position < 3) & frame.queue.isin(0, 1, 2)
    )
    expected = [row for row in whole if row["key"] == "a" and row["visible_at"] >= since and row["position"] < 3]
    assert sorted(row.message_id for row in some.collect()) == sorted(
        row["message_id"] for row in expected if row["queue"] in {0, 1, 2}
    )
    assert "Filter" not in some._jdf.queryExecution().optimizedPlan().toString()
    narrow = source.schema("position bigint, key string").load()
    assert narrow.columns == ["position", "key"]
    assert narrow.filter("key = 'b'").count() == 5
    with pytest.raises((AnalysisException, PySparkException), match="position bigint"):
        source.schema("position string").load().collect()


class _Line(TypedDict):
    item: str
    price: Decimal


class _Order(BaseModel):
    number: int
    paid: bool | None = None
    at: dt.datetime
    day: dt.date
    lines: list[_Line]
    rates: dict[str, float]
    either: int | str
    before: _Order | None = None


def test_a_body_is_read_by_its_model(
    spark: SparkSession,
    town: Town,
    log_url: str,  # noqa: F811 - the fixture
) -> None:
    """Each field has its type; what Spark has none for is JSON; an empty list is none, and NULL is NULL."""
    from pyspark.sql import functions

    orders = Topic(TOPIC, model=_Order)
    at = dt.datetime(2026, 3, 1, 12, 30, tzinfo=dt.UTC)
    line = _Line(item="ä", price=Decimal("1.20"))
    order = _Order(number=1, at=at, day=at.date(), lines=[line], rates={"eur": 1.5}, either="x")
    send(town, [order.model_copy(update={"before": order, "lines": []}).model_dump(mode="json")])
    register(spark)
    log = spark.read.format("outbox").options(topic=TOPIC, url=log_url, columns="body").load()
    body = functions.from_json(functions.col("body").cast("string"), body_type(orders))  # type: ignore[arg-type]
    (row,) = log.select(body.alias("order")).select("order.*").collect()
    assert (row.number, row.paid, row.at.astimezone(dt.UTC), row.day) == (1, None, at, at.date())
    assert (row.lines, row.rates, row.either) == ([], {"eur": 1.5}, "x")
    assert json.loads(row.before)["lines"] == [{"item": "ä", "price": "1.20"}]
    assert body_type(_Line).simpleString() == "struct<item:string,price:string>"
    assert body_type(list[int]).simpleString() == "array<bigint>"
