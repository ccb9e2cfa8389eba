"""Two DataFrames, compared as a reconciliation compares two databases: messages of any origin, judged by its rules.

The frames come from wherever Spark reads: a lake, a warehouse, a legacy outbox over JDBC. One has a row for each
message that was sent, the other a row for each message that the consumer knows; their columns are `PRODUCER_COLUMNS`
and `CONSUMER_COLUMNS`. Rows of the same id are brought together by one shuffle, and nothing is collected.
"""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings
from outbox.reconcile.job import FIRST_ID, KINDS, Outcome
from outbox.reconcile.judge import Both, Rules, judge
from outbox.reconcile.report.findings import FINDINGS, named
from outbox.reconcile.rows import InboxState, ProducerState, fixed_ids

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_IDS = ("string", "binary", *_INTEGERS)
_TIME = pa.timestamp("us", tz="UTC")
#: Beyond each position.
_ALL_READ = 2**62


@dataclass(frozen=True, slots=True)
class FrameColumn:
    """A column of a DataFrame: its name, the types that Spark may call it, and what it is to the judge.

    Where it isn't there, and isn't ``required``, each row has the ``default``. ``words`` are the texts that it may
    have, which stand for numbers.
    """

    name: str
    types: tuple[str, ...]
    arrow: pa.DataType
    required: bool = False
    default: Any = None
    words: Mapping[str, int] | None = None


def _words(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {each.name.lower(): each.value for each in kind}


#: One row for each message that was sent, or is to be: ``state`` is how far it has come (`rows.ProducerState` in lower
#: case), ``at`` since when; ``sends`` how often it was sent, the last time to ``queue`` and ``position``. ``digest`` is
#: of its body, ``addressed`` whether it is meant for the group.
PRODUCER_COLUMNS: tuple[FrameColumn, ...] = (
    FrameColumn("id", _IDS, pa.binary(), required=True),
    FrameColumn("at", ("timestamp",), _TIME, required=True),
    FrameColumn("state", ("string",), pa.int8(), default="dispatched", words=_words(ProducerState)),
    FrameColumn("sends", _INTEGERS, pa.int16(), default=1),
    FrameColumn("queue", _INTEGERS, pa.int32(), default=0),
    FrameColumn("position", _INTEGERS, pa.int64(), default=1),
    FrameColumn("digest", ("string", "binary"), pa.binary()),
    FrameColumn("addressed", ("boolean",), pa.bool_(), default=True),
    FrameColumn("compensated", ("boolean",), pa.bool_(), default=False),
)

#: One row for each message that the consumer knows: ``status`` is what it says of it (`rows.InboxState` in lower case),
#: ``changed_at`` since when, ``effects`` how many rows of it its business table has, -1 where that isn't known.
CONSUMER_COLUMNS: tuple[FrameColumn, ...] = (
    FrameColumn("id", _IDS, pa.binary(), required=True),
    FrameColumn("status", ("string",), pa.int8(), default="consumed", words=_words(InboxState)),
    FrameColumn("received_at", ("timestamp",), _TIME),
    FrameColumn("changed_at", ("timestamp",), _TIME),
    FrameColumn("attempts", _INTEGERS, pa.int32(), default=1),
    FrameColumn("digest", ("string", "binary"), pa.binary()),
    FrameColumn("effects", _INTEGERS, pa.int64(), default=-1),
    FrameColumn("skipped", ("boolean",), pa.bool_(), default=False),
)

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
            offsets=dict(self.offsets or {}),
            starts=dict(self.starts),
            max_resends=self.max_resends,
        )


def compare(
    producer: DataFrame, consumer: DataFrame, rules: FrameRules, *, every: bool = False, partitions: int | None = None
) -> DataFrame:
    """Return the differences between two frames and the messages in flight, or ``every`` message (`COMPARED`).

    The frames are those of one topic and one group. Ids are texts, bytes or integers, the same on both sides to the
    letter; an integer is the text of its digits. One that is there twice on a side fails the job, and is named.
    ``partitions`` is how many tasks compare, each of which has its share of both frames in memory; None: as many as
    Spark shuffles into.

    Raises:
        InvalidSettings: a frame lacks a column (``received_at`` too where ``pruned_before`` is given), has one of
            another type, or ids of the frames differ in type; names the frame, the column, and the mend.
    """
    from pyspark.sql import functions  # noqa: PLC0415 - an extra
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415 - an extra

    types = _checked(producer, "producer", PRODUCER_COLUMNS), _checked(consumer, "consumer", CONSUMER_COLUMNS)
    if rules.pruned_before is not None and "received_at" not in types[1]:
        raise InvalidSettings("pruned_before needs the column received_at in the consumer's frame; add it")
    for name in ("id", "digest"):
        if len({each[name] for each in types if name in each}) > 1:
            ours, theirs = (each[name] for each in types)
            raise InvalidSettings(f"{name} is {ours} in the producer's frame and {theirs} in the consumer's; cast one")
    number = partitions or int(producer.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
    by = functions.pmod(functions.xxhash64("id"), functions.lit(number)).alias("share")
    pruned_before = rules.pruned_before
    of_judge, reads_everything = rules.rules, rules.offsets is None

    def judged(ours: pa.Table, theirs: pa.Table) -> pa.Table:
        sent = _shaped(ours, PRODUCER_COLUMNS, "producer")
        here = of_judge
        if reads_everything:
            here = replace(of_judge, offsets=dict.fromkeys(pc.unique(sent["queue"]).to_pylist(), _ALL_READ))
        known = _shaped(theirs, CONSUMER_COLUMNS, "consumer")
        sent = sent.append_column("torn", pa.repeat(pa.scalar(0, pa.int8()), sent.num_rows))
        both = Both(sent.drop_columns("message_id"), known.drop_columns("message_id"))
        _, found = judge(both, here, every=True)
        if pruned_before is not None:
            found = _unjudged(found, pruned_before)
        if not every:
            found = found.filter(_is_reported(found["outcome"]))
        ids = dict(zip(_keys(sent), sent["message_id"].to_pylist(), strict=True))
        ids |= dict(zip(_keys(known), known["message_id"].to_pylist(), strict=True))
        columns = named(found) | {"message_id": pa.array([ids[each] for each in _keys(found)], pa.string())}
        return pa.table([columns[name] for name in COMPARED.names], schema=COMPARED)

    shares = []
    for frame, columns in ((producer, PRODUCER_COLUMNS), (consumer, CONSUMER_COLUMNS)):
        # Of an integer its digits, before it decides where the row goes.
        id_ = frame["id"].cast("string") if dict(frame.dtypes)["id"] in _INTEGERS else frame["id"]
        known_columns = [column.name for column in columns if column.name in frame.columns]
        shares.append(frame.select(*known_columns).withColumn("id", id_).withColumn("share", by).groupBy("share"))
    return shares[0].cogroup(shares[1]).applyInArrow(judged, from_arrow_schema(COMPARED))


def _is_reported(outcomes: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.or_(pc.equal(outcomes, int(Outcome.IN_FLIGHT)), pc.greater_equal(outcomes, int(KINDS[0])))


def _unjudged(found: pa.Table, before: dt.datetime) -> pa.Table:
    """Return findings with what only the consumer has, and received before a time, as not to be judged."""
    old = pc.and_(pc.is_null(found["state"]), pc.less(found["received_at"], pa.scalar(before, _TIME)))
    outcomes = pc.if_else(pc.fill_null(old, False), pa.scalar(int(Outcome.UNJUDGED), pa.int8()), found["outcome"])
    return found.set_column(found.column_names.index("outcome"), "outcome", outcomes)


def _checked(frame: DataFrame, side: str, columns: Sequence[FrameColumn]) -> dict[str, str]:
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
    return known | {"id": "string" if known["id"] in _INTEGERS else known["id"]}


def _shaped(rows: pa.Table, columns: Sequence[FrameColumn], side: str) -> pa.Table:
    """Return rows as the judge has them, in the order of their ids; ``message_id`` is the id as it was."""
    texts, keys = _ids(rows["id"], side)
    made: dict[str, Any] = {"id": keys, "message_id": texts}
    for column in columns[1:]:
        if column.name not in rows.column_names:
            default = column.words[column.default] if column.words else column.default
            made[column.name] = pa.repeat(pa.scalar(default, column.arrow), rows.num_rows)
        elif column.words:
            made[column.name] = _numbers(rows[column.name], column, side)
        else:
            made[column.name] = rows[column.name].cast(column.arrow)
    table = pa.table(made).sort_by("id")
    ids = fixed_ids(table)
    if (again := np.flatnonzero(ids[1:] == ids[:-1])).size:
        raise InvalidSettings(f"id {table['message_id'][int(again[0])]} is twice in the {side}'s frame; keep one row")
    return table


def _numbers(texts: pa.ChunkedArray, column: FrameColumn, side: str) -> pa.ChunkedArray:
    words = column.words or {}
    numbers = pc.index_in(texts, pa.array(list(words), texts.type))
    if numbers.null_count:
        wrong = texts.filter(pc.is_null(numbers))[0]
        raise InvalidSettings(f"{column.name} = {wrong} of the {side}'s frame must be one of: {', '.join(words)}")
    return pc.take(pa.array(list(words.values()), column.arrow), numbers)


def _ids(ids: pa.ChunkedArray, side: str) -> tuple[pa.Array, pa.Array]:
    """Return ids as texts, and as 16 bytes that are the same for the same id.

    They are hashes: what the judge reads from an id of ours (its time, or that it is a business string's) isn't in
    those of others. The first bit is 0, as in no id of a business string.
    """
    texts, keys = [], []
    for value in ids.to_pylist():
        if value is None:
            raise InvalidSettings(f"an id of the {side}'s frame is null; leave such rows out")
        raw = value if isinstance(value, bytes) else value.encode()
        texts.append(_text(value) if isinstance(value, bytes) else value)
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        keys.append(bytes([digest[0] & 0x7F]) + digest[1:])
    return pa.array(texts, pa.string()), pa.array(keys, pa.binary(16))


def _text(value: bytes) -> str:
    return str(UUID(bytes=value)) if len(value) == len(FIRST_ID.bytes) else value.hex()


def _keys(table: pa.Table) -> list[bytes]:
    keys: list[bytes] = table["id"].to_pylist()
    return keys
