"""The differences of a run as data: an Arrow table with names in place of numbers, and a folder of Parquet files.

A folder is a data set that any reader of Hive's layout knows (Spark, DuckDB, Polars, pyarrow): each run of a pair is a
file of its own in the folder of the day (UTC) on which it began, ``day=2026-03-14/RUN.parquet``. It is there at once
and whole, and the same run takes the place of its own file. A run without differences has a file without rows.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from outbox.reader import plain
from outbox.reconcile.job import KINDS, Outcome
from outbox.reconcile.rows import DIGESTS, FINDING, JobResult, PairResult, Torn, to_uuids
from outbox.reconcile.tables.declare import InboxState, ProducerState
from outbox.text import whole

#: What of a finding isn't as `rows.FINDING` has it: numbers stand for names there.
_NAMES: dict[str, type[enum.IntEnum]] = {"state": ProducerState, "torn": Torn, "status": InboxState}

#: One row for each difference that is listed. ``began_at`` is when the run began, by the databases' clock; ``action``
#: is what the policy does about it, ``result`` what came of that: ``done``, ``healed``, or why it was refused; null
#: where it wasn't tried. The rest is what either side says of the message (`rows.PRODUCER`, `rows.CONSUMER`), null
#: where it says nothing; ``effects`` is null where no business table is named. ``message_id`` is the id as its own
#: table has it.
FINDINGS: pa.Schema = pa.schema(
    [
        pa.field("run", pa.string(), nullable=False),
        pa.field("began_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("action", pa.string(), nullable=False),
        pa.field("result", pa.string()),
        *(
            pa.field(field.name, pa.string() if field.name in _NAMES else field.type)
            for field in FINDING
            if field.name not in {"id", "outcome", "foreign_id", *DIGESTS}
        ),
    ]
)

#: Under which a file says in its own metadata how the pair fared: all that is counted, and the part left out.
_KEY = b"outbox"


def findings_of(result: JobResult) -> pa.Table:
    """Return the differences of all pairs of a job, as `FINDINGS`.

    Of each pair they are those that ``max_findings`` lets be listed; `PairResult.left_out` is how many it doesn't.
    """
    return pa.concat_tables([FINDINGS.empty_table(), *(_of_pair(pair, result) for pair in result.pairs)])


def write_findings(folder: Path, result: JobResult) -> None:
    """Write the differences of each pair of a job as a file of a data set, and make the folder if need be.

    Raises:
        OSError: a file can't be written; nothing of it remains under its name.
    """
    for pair in result.pairs:
        rows = _of_pair(pair, result)
        of_day = folder / f"day={pair.begun_at.astimezone(dt.UTC):%Y-%m-%d}"
        of_day.mkdir(parents=True, exist_ok=True)
        counts = {outcome.label: number for outcome, number in sorted(pair.counts.items()) if number}
        facts = {"counts": counts, "left_out": pair.left_out, "healed": pair.healed, "applied": result.applied}
        facts |= {"since": pair.window.since, "until": pair.window.until}
        with whole(of_day / f"{pair.run_id}.parquet") as file:
            pq.write_table(rows.replace_schema_metadata({_KEY: json.dumps(plain(facts))}), file, compression="zstd")


def _of_pair(pair: PairResult, result: JobResult) -> pa.Table:
    found, number = pair.findings, pair.findings.num_rows
    ids = to_uuids(found)
    results = {repaired.id: repaired.result for repaired in pair.repairs}
    actions = {kind: kind.repair(result.policy) for kind in KINDS}
    columns = named(found) | {
        "run": pa.repeat(str(pair.run_id), number),
        "began_at": pa.repeat(pa.scalar(pair.begun_at, FINDINGS.field("began_at").type), number),
        "topic": pa.repeat(pair.pair.topic, number),
        "group": pa.repeat(pair.pair.group, number),
        "action": _names({int(kind): action.value for kind, action in actions.items()}, found["outcome"]),
        "result": pa.array([results.get(each) for each in ids], pa.string()),
    }
    return pa.table([columns[name] for name in FINDINGS.names], schema=FINDINGS)


def named(found: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Return the columns of a table of findings (`rows.FINDING`), with names for numbers, and ids as texts."""
    columns = {name: found[name] for name in found.column_names if name not in {"id", "outcome", "foreign_id"}}
    ids = pa.array([str(each) for each in to_uuids(found)], pa.string())
    columns["message_id"] = pc.coalesce(found["foreign_id"], ids)
    columns["kind"] = _names({int(outcome): outcome.label for outcome in Outcome}, found["outcome"])
    columns["effects"] = pc.if_else(pc.less(found["effects"], 0), None, found["effects"])
    for name, kind in _NAMES.items():
        # A finding that isn't torn says nothing about that.
        names = {each.value: each.name.lower() for each in kind if each is not Torn.NO}
        columns[name] = _names(names, found[name])
    return columns


def _names(names: dict[int, str], numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the names of numbers; null where there is none."""
    known = pa.array([names.get(number) for number in range(max(names) + 1)], pa.string())
    return pc.take(known, numbers)
