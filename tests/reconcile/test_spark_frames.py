"""Two DataFrames compared: the same as the engine finds in the tables, and rows of any other origin."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from outbox.errors import InvalidSettings
from outbox.reconcile.job import FIRST_ID, Outcome, Range
from outbox.reconcile.rows import to_findings
from outbox.reconcile.spark.frames import COMPARED, FrameRules, compare
from outbox.reconcile.tables import InboxState, ProducerState
from tests.reconcile.spark_fixtures import Night, night
from tests.reconcile.spark_rows import BEGAN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["night"]

NOW = dt.datetime.fromtimestamp(BEGAN + 86_400, dt.UTC)
LONG_AGO = NOW - dt.timedelta(hours=5)
SENT = "id string, at timestamp, state string"
KNOWN = "id string, status string, changed_at timestamp"


def frame(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> DataFrame:
    """Return rows as a frame."""
    return spark.createDataFrame(rows, schema)


def frame_of(spark: SparkSession, table: pa.Table) -> DataFrame:
    """Return a table as a frame, which Spark takes as it is from 4.0 on only."""
    return spark.createDataFrame(table.to_pylist(), from_arrow_schema(table.schema))


def outcomes(found: DataFrame) -> dict[str, str]:
    """Return the kind of each message."""
    rows = found.select("message_id", "kind").collect()
    kinds = {row["message_id"]: row["kind"] for row in rows}
    assert len(kinds) == len(rows)
    return kinds


def as_words(table: pa.Table, column: str, kind: Any) -> pa.Table:
    """Return a table with the names of a column's numbers, and ids as text."""
    words = pa.array([kind(number).name.lower() for number in table[column].to_pylist()], pa.string())
    ids = pa.array([str(UUID(bytes=value)) for value in table["id"].to_pylist()], pa.string())
    table = table.set_column(table.column_names.index(column), column, words)
    return table.set_column(table.column_names.index("id"), "id", ids)


def test_the_same_is_found_as_in_the_tables(spark: SparkSession, night: Night) -> None:
    """What both sides of two databases say, as frames, comes to what the comparison of the databases comes to."""
    comparison, everything = night.comparison, [Range(FIRST_ID, None)]
    producer, consumer = comparison.producer.read(everything), comparison.consumer.read(everything)
    sent = frame_of(spark, as_words(producer, "state", ProducerState).drop_columns(["torn", "opinion"]))
    known = frame_of(spark, as_words(consumer, "status", InboxState))
    (result,) = (comparison(task) for task in night.tasks(1))
    expected = {str(each.id): each for each in to_findings(result.table)}
    rules = FrameRules(NOW, offsets=comparison.rules.offsets)

    found = {row["message_id"]: row for row in compare(sent, known, rules).collect()}

    assert {id_: row["kind"] for id_, row in found.items()} == {
        id_: each.outcome.label for id_, each in expected.items()
    }
    for id_, each in expected.items():
        row = found[id_]
        assert (row["queue"], row["position"], row["attempts"]) == (each.queue, each.position, each.attempts)
        assert (row["state"], row["status"]) == tuple(
            None if number is None else number.name.lower() for number in (each.state, each.status)
        )
        assert row["at"] == (None if each.at is None else each.at.astimezone().replace(tzinfo=None))
    counted = Counter(outcomes(compare(sent, known, rules, every=True)).values())
    assert counted == {outcome.label: number for outcome, number in result.counts.items()}


def test_a_legacy_table_needs_an_id_and_a_time(spark: SparkSession) -> None:
    """Ids of any text, every message sent, every row of the consumer an effect: nothing else is needed."""
    sent = frame(
        spark, [("4711", LONG_AGO), ("order/ä", LONG_AGO), ("f7", NOW), ("ffff", LONG_AGO)], "id string, at timestamp"
    )
    known = frame(spark, [("4711",), ("stranger",)], "id string")
    assert outcomes(compare(sent, known, FrameRules(NOW), every=True)) == {
        "4711": "consumed",
        "order/ä": "missing",
        "ffff": "missing",
        "f7": "in_flight",
        "stranger": "phantom",
    }
    assert compare(sent, known, FrameRules(NOW)).columns == COMPARED.names


def test_ids_of_others_mean_nothing(spark: SparkSession) -> None:
    """Neither the time of a UUIDv7 nor the first digit of a business string's is read from ids of any origin."""
    strangers = [str(uuid4()) for _ in range(200)] + [f"{n:x}" for n in range(200)]
    sent = frame(spark, [], "id string, at timestamp")
    known = frame(spark, [(each, LONG_AGO) for each in strangers], "id string, received_at timestamp")
    found = outcomes(compare(sent, known, FrameRules(NOW, pruned_before=LONG_AGO - dt.timedelta(days=1))))
    assert found == dict.fromkeys(strangers, "phantom")
    found = outcomes(compare(sent, known, FrameRules(NOW, pruned_before=NOW), every=True))
    assert found == dict.fromkeys(strangers, "unjudged")
    assert outcomes(compare(sent, known, FrameRules(NOW, pruned_before=NOW))) == {}


@pytest.mark.parametrize("kinds", [("long", "int"), ("int", "string"), ("binary", "binary")])
def test_ids_of_any_type(spark: SparkSession, kinds: tuple[str, str]) -> None:
    """Numbers are the texts of their digits; bytes may be as long as they like, and are shown as hex."""
    ids: list[Any] = list(range(50))
    values = [[str(each) if kind == "string" else each for each in ids] for kind in kinds]
    if kinds[0] == "binary":
        values = [[bytes([each] * 5) for each in ids] for _ in kinds]
    sent = frame(spark, [(each, LONG_AGO) for each in values[0]], f"id {kinds[0]}, at timestamp")
    known = frame(spark, [(each,) for each in values[1][:-1]], f"id {kinds[1]}")
    (missing,) = outcomes(compare(sent, known, FrameRules(NOW), partitions=7)).items()
    assert missing == ("3131313131" if kinds[0] == "binary" else "49", "missing")


def test_ids_are_the_same_to_the_letter(spark: SparkSession) -> None:
    """Whatever the number of tasks: two spellings are two ids, and neither hides the other."""
    id_ = str(uuid4())
    sent = frame(spark, [(id_, LONG_AGO)], "id string, at timestamp")
    known = frame(spark, [(id_.upper(),)], "id string")
    for partitions in (1, 5):
        found = outcomes(compare(sent, known, FrameRules(NOW), partitions=partitions))
        assert found == {id_: "missing", id_.upper(): "phantom"}


@pytest.mark.parametrize(
    ("state", "status", "kind"),
    [
        ("dispatched", "parked", Outcome.PARKED),
        ("dispatched", "failed", Outcome.FAILED),
        ("rolled_back", "consumed", Outcome.CONSUMED_THOUGH_ROLLED_BACK),
        ("rolled_back", None, None),
        ("committed", None, Outcome.UNDISPATCHED),
        ("undecided", None, Outcome.UNDECIDED),
        ("undecided", "consumed", Outcome.PHANTOM),
    ],
)
def test_states_are_words(spark: SparkSession, state: str, status: str | None, kind: Outcome | None) -> None:
    """What either side says is said in the words of the report."""
    sent = frame(spark, [("m", LONG_AGO, state)], SENT)
    known = frame(spark, [("m", status, LONG_AGO)] if status else [], KNOWN)
    assert outcomes(compare(sent, known, FrameRules(NOW))) == ({"m": kind.label} if kind else {})


def test_an_opinion_is_compared(spark: SparkSession) -> None:
    """What the producer believes, in the words of the consumer's status; null is no opinion."""
    rows = [("a", "consumed"), ("b", "failed"), ("c", None), ("d", "no_opinion"), ("e", "none"), ("f", "failed")]
    sent = frame(spark, [(id_, LONG_AGO, word) for id_, word in rows], "id string, at timestamp, opinion string")
    known = frame(spark, [*((each, "consumed", LONG_AGO) for each in "abcd"), ("e", "consumed", NOW)], KNOWN)
    found = {row["message_id"]: row for row in compare(sent, known, FrameRules(NOW), every=True).collect()}
    assert {id_: row["kind"] for id_, row in found.items()} == {
        **dict.fromkeys("acde", "consumed"),
        "b": "opinion_differs",
        "f": "missing",
    }
    assert [found[each]["opinion"] for each in "abcdef"] == ["consumed", "failed", None, None, "none", "failed"]


def test_where_the_group_is_decides(spark: SparkSession) -> None:
    """With offsets, what lies beyond them is unconsumed; without, everything was read."""
    sent = frame(
        spark, [("a", LONG_AGO, 0, 5), ("b", LONG_AGO, 1, 5)], "id string, at timestamp, queue int, position int"
    )
    known = frame(spark, [], "id string")
    assert outcomes(compare(sent, known, FrameRules(NOW, offsets={0: 5}))) == {"a": "missing", "b": "unconsumed"}
    assert outcomes(compare(sent, known, FrameRules(NOW))) == {"a": "missing", "b": "missing"}


def test_bodies_and_effects(spark: SparkSession) -> None:
    """Digests are compared as they are; the business table's rows are counted where the frame does so."""
    sent = frame(spark, [(each, LONG_AGO, "x") for each in "abc"], "id string, at timestamp, digest string")
    rows = [("a", "x", 1), ("b", "y", 1), ("c", "x", 2)]
    known = frame(spark, rows, "id string, digest string, effects long")
    assert outcomes(compare(sent, known, FrameRules(NOW))) == {"b": "digest_mismatch", "c": "duplicate_effect"}


@pytest.mark.parametrize(
    ("sent", "known", "said"),
    [
        ("id string", "id string", "the producer's frame has no column at; rename or add one"),
        ("id double, at timestamp", "id string", "id of the producer's frame is double; cast it to string or binary"),
        ("id long, at timestamp", "id binary", "id is string in the producer's frame and binary in the consumer's"),
        ("id string, at string", "id string", "column at of the producer's frame is string; cast it to timestamp"),
        ("id string, at timestamp", "id binary", "id is string in the producer's frame and binary in the consumer's"),
    ],
)
def test_frames_that_cant_be_compared(spark: SparkSession, sent: str, known: str, said: str) -> None:
    """The frame, the column and the mend are named before anything runs."""
    with pytest.raises(InvalidSettings, match=said):
        compare(frame(spark, [], sent), frame(spark, [], known), FrameRules(NOW))


def test_what_may_be_pruned_needs_a_time(spark: SparkSession) -> None:
    """Without it nobody could say what is old."""
    frames = frame(spark, [], "id string, at timestamp"), frame(spark, [], "id string")
    with pytest.raises(InvalidSettings, match="pruned_before needs the column received_at"):
        compare(*frames, FrameRules(NOW, pruned_before=NOW))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([("m", LONG_AGO, "sent")], "state = sent of the producer's frame must be one of: undecided, rolled_back"),
        ([("m", LONG_AGO, None)], "state = None of the producer's frame must be one of: undecided, rolled_back"),
        ([("m", LONG_AGO, "dispatched")] * 2, "id m is twice in the producer's frame; keep one row"),
        ([(None, LONG_AGO, "dispatched")], "an id of the producer's frame is null"),
    ],
)
def test_rows_that_cant_be_judged(spark: SparkSession, sent: list[tuple[Any, ...]], said: str) -> None:
    """A row that can't be is named, and the job fails: nothing is guessed."""
    from pyspark.errors import PythonException

    with pytest.raises(PythonException, match=said):
        compare(frame(spark, sent, SENT), frame(spark, [], KNOWN), FrameRules(NOW)).collect()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"now": NOW.replace(tzinfo=None)}, "now = .* has no time zone"), ({"grace": -1.0}, "grace = -1")],
)
def test_rules_that_cant_be(wrong: dict[str, Any], said: str) -> None:
    """They name what is wrong."""
    with pytest.raises(InvalidSettings, match=said):
        FrameRules(**{"now": NOW} | wrong)
