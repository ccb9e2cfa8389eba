"""Two DataFrames, compared as a reconciliation compares two databases: messages of any origin, judged by its rules.

The frames come from wherever Spark reads: a lake, a warehouse, a legacy outbox over JDBC. One has a row for each
message that was sent, the other a row for each message that the consumer knows; their columns are `PRODUCER_COLUMNS`
and `CONSUMER_COLUMNS` of `outbox.reconcile.tables.declare`. Rows of the same id are brought together by one shuffle,
and nothing is collected.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings
from outbox.reconcile.job import KINDS, Outcome
from outbox.reconcile.judge import Both, Rules, judge
from outbox.reconcile.report.findings import FINDINGS, named
from outbox.reconcile.tables.columns import shaped
from outbox.reconcile.tables.declare import CONSUMER_COLUMNS, INTEGERS, PRODUCER_COLUMNS, TableColumn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_TIME = pa.timestamp("us", tz="UTC")


#: The columns of what `compare` returns: ``message_id`` as the frames have it, its ``kind``, what either side says.
COMPARED: pa.Schema = pa.schema(
    [
        FINDINGS.field(name)
        for name in FINDINGS.names
        if name not in {"run", "began_at", "topic", "group", "action", "result"}
    ]
)


@dataclass(frozen=True, slots=True)
class FrameRules:
    """What the outcome of a message depends on besides its rows.

    ``now`` is when both frames were read, ``grace`` (seconds) how long a message may be on its way. ``offsets`` are the
    positions up to which the group has read each queue: None, and it has read everything; ``starts`` those after which
    it began. What only the consumer has, and received before ``pruned_before``, isn't judged.

    Raises:
        InvalidSettings: a time without a time zone, or a negative grace.
    """

    now: dt.datetime
    grace: float = 300.0
    offsets: Mapping[int, int] | None = None
    starts: Mapping[int, int] = field(default_factory=dict)
    pruned_before: dt.datetime | None = None
    max_resends: int = 3

    def __post_init__(self) -> None:
        for name in ("now", "pruned_before"):
            moment = getattr(self, name)
            if moment is not None and moment.tzinfo is None:
                raise InvalidSettings(f"{name} = {moment!r} has no time zone; write datetime.now(UTC), say")
        if self.grace < 0:
            raise InvalidSettings(f"grace = {self.grace!r} must be 0 or more")

    @property
    def rules(self) -> Rules:
        """The rules of the judge."""
        now = int(self.now.timestamp() * 1_000_000)
        return Rules(
            producer_now=now,
            consumer_now=now,
            grace=int(self.grace * 1_000_000),
            horizon=None,
            offsets=None if self.offsets is None else dict(self.offsets),
            starts=dict(self.starts),
            max_resends=self.max_resends,
        )


def compare(
    producer: DataFrame, consumer: DataFrame, rules: FrameRules, *, every: bool = False, partitions: int | None = None
) -> DataFrame:
    """Return the differences between two frames and the messages in flight, or ``every`` message (`COMPARED`).

    The frames are those of one topic and one group. Ids are texts, bytes or integers, the same on both sides to the
    letter (`tables.columns`); an integer is the text of its digits. One that is there twice on a
    side fails the job, and is named. ``partitions`` is how many tasks compare, each of which has its share of both
    frames in memory; None: as many as Spark shuffles into.

    Raises:
        InvalidSettings: a frame lacks a column (``received_at`` too where ``pruned_before`` is given), has one of
            another type, or ids of the frames differ in type; names the frame, the column, and the mend.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    types = _checked(producer, "producer", PRODUCER_COLUMNS), _checked(consumer, "consumer", CONSUMER_COLUMNS)
    if rules.pruned_before is not None and "received_at" not in types[1]:
        raise InvalidSettings("pruned_before needs the column received_at in the consumer's frame; add it")
    for name in ("id", "digest"):
        if len({each[name] for each in types if name in each}) > 1:
            ours, theirs = (each[name] for each in types)
            raise InvalidSettings(f"{name} is {ours} in the producer's frame and {theirs} in the consumer's; cast one")
    pruned_before = rules.pruned_before
    of_judge = rules.rules

    def judged(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = shaped(ours, "producer", called="the producer's frame")
        known = shaped(theirs, "consumer", called="the consumer's frame")
        _, found = judge(Both(sent, known), of_judge, every=True)
        if pruned_before is not None:
            found = _unjudged(found, pruned_before)
        if not every:
            found = found.filter(_is_reported(found["outcome"]))
        columns = named(found)
        return pa.table([columns[name] for name in COMPARED.names], schema=COMPARED)

    def known(frame: DataFrame, columns: Sequence[TableColumn]) -> DataFrame:
        # Of an integer its digits, before it decides where the row goes.
        id_ = frame["id"].cast("string") if dict(frame.dtypes)["id"] in INTEGERS else frame["id"]
        return frame.select(*(each.name for each in columns if each.name in frame.columns)).withColumn("id", id_)

    sent, received = known(producer, PRODUCER_COLUMNS), known(consumer, CONSUMER_COLUMNS)
    return brought_together(sent, received, judged, from_arrow_schema(COMPARED), partitions)


def brought_together(
    producer: DataFrame,
    consumer: DataFrame,
    judge: Callable[[pa.Table, pa.Table], pa.Table],
    columns: StructType | str,
    partitions: int | None = None,
) -> DataFrame:
    """Return what ``judge`` makes of the rows of two frames, by shares of their ids; its answer has these columns.

    ``partitions`` is how many shares there are; None: as many as Spark shuffles into.
    """
    from pyspark.sql import functions  # noqa: PLC0415 - an extra

    number = partitions or int(producer.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    by = functions.pmod(functions.xxhash64("id"), functions.lit(number)).alias("share")
    shares = [frame.withColumn("share", by).groupBy("share") for frame in (producer, consumer)]
    return shares[0].cogroup(shares[1]).applyInArrow(judge, columns)


def _is_reported(outcomes: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.or_(pc.equal(outcomes, int(Outcome.IN_FLIGHT)), pc.greater_equal(outcomes, int(KINDS[0])))


def _unjudged(found: pa.Table, before: dt.datetime) -> pa.Table:
    """Return findings with what only the consumer has, and received before a time, as not to be judged."""
    old = pc.and_(pc.is_null(found["state"]), pc.less(found["received_at"], pa.scalar(before, _TIME)))
    outcomes = pc.if_else(pc.fill_null(old, False), pa.scalar(int(Outcome.UNJUDGED), pa.int8()), found["outcome"])
    return found.set_column(found.column_names.index("outcome"), "outcome", outcomes)


def _checked(frame: DataFrame, side: str, columns: Sequence[TableColumn]) -> dict[str, str]:
    """Return the types of a frame's columns as far as they are known; `InvalidSettings` where one can't be used."""
    types = dict(frame.dtypes)
    for column in columns:
        kind = types.get(column.name)
        if kind is None and column.required:
            there = ", ".join(types) or "none"
            raise InvalidSettings(f"the {side}'s frame has no column {column.name}; rename or add one (it has {there})")
        if kind is not None and kind not in column.types:
            raise InvalidSettings(
                f"column {column.name} of the {side}'s frame is {kind}; cast it to {' or '.join(column.types)}"
            )
    known = {column.name: types[column.name] for column in columns if column.name in types}
    return known | {"id": "string" if known["id"] in INTEGERS else known["id"]}
