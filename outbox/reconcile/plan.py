"""What is compared how: which ranges need not be read, where the others are cut, and whether digests pay.

Every choice comes with a sentence, which is shown.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

from outbox.database.execute import Statement, execute
from outbox.reconcile import sql
from outbox.reconcile.compare import Task
from outbox.reconcile.job import EngineName, Job, Part, Range, Tier
from outbox.reconcile.source import Snapshot, Snapshots, reaching

#: Rows of a side in a bucket that is digested: small, so that little is read for one difference. A million rows take as
#: long to digest in 16,000 buckets as in 1,000.
_ROWS_OF_BUCKET = 60
#: The same between settled ranges. Most of what is there differed before and will again: all but a few rows around
#: each difference get settled, and the next night reads next to nothing for it.
_ROWS_OF_SMALL_BUCKET = 50
#: Up to so many rows between settled ranges their ids are read to cut them.
_FEW_ROWS = 2_000_000
#: So the number of buckets grows with the rows; beyond it, to number a row's bucket takes longer than reading does.
_MOST_BUCKETS = 65_536
#: Rows of a side in a task: bounds the memory, and is worth a task's overhead.
_ROWS_OF_TASK = 400_000
#: Below so many rows of a side, reading them is as fast as digesting them.
_WORTH_DIGESTS = 20_000
#: Above this share of rows in differing ranges, it is faster to read everything at once.
READ_ALL_ABOVE = 0.4
#: Points by which the rows of a range are reckoned.
POINTS = 2_000
#: RunIds in one statement: each range is a subquery.
_RANGES_OF_TASK = 200
_BYTES_OF_ROW = 250


#: About how many rows each side has.
Size = dict[Part, int]


def size_of(snapshots: Snapshots) -> Size:
    """Return about how many halves and inbox rows the databases have, by their statistics."""

    def rows(part: Part, snapshot: Snapshot) -> int:
        with reaching(snapshot.access):
            (((rows, size),),) = execute(snapshot.connection, sql.size(part, snapshot.access.schema))
        return int(rows) or int(size) // _BYTES_OF_ROW

    return {"producer": rows("producer", snapshots.producer), "consumer": rows("consumer", snapshots.consumer)}


def points(snapshots: Snapshots, size: Size, count: int) -> list[UUID]:
    """Return about ``count`` ids that are evenly spread over the larger side, in order."""
    return _sampled(snapshots, size, lambda part, schema: sql.sample(part, schema, count)) if count > 0 else []


def points_between(snapshots: Snapshots, size: Size, gaps: Sequence[Range], settled: int) -> list[UUID]:
    """Return the ids that cut ``gaps`` into ranges to be digested, in order.

    ``settled`` is how many messages lie in the settled ranges between them.
    """
    larger = max(size.values())
    rows = larger - settled
    if not settled or rows > _FEW_ROWS:
        return points(snapshots, size, min(larger // _ROWS_OF_BUCKET, _MOST_BUCKETS) - 1)
    step = max(rows // _MOST_BUCKETS, _ROWS_OF_SMALL_BUCKET)
    return _sampled(snapshots, size, lambda part, schema: sql.sample_ranges(part, schema, gaps, step))


def _sampled(snapshots: Snapshots, size: Size, sample: Callable[[Part, str], Statement]) -> list[UUID]:
    """Return ids of the larger side, in order; ``sample`` reads them in a schema."""
    part: Part = "producer" if size["producer"] >= size["consumer"] else "consumer"
    snapshot = snapshots.producer if part == "producer" else snapshots.consumer
    with reaching(snapshot.access):
        (rows,) = execute(snapshot.connection, sample(part, snapshot.access.schema))
    return sorted({row[0] for row in rows})


def cut(ranges: Iterable[Range], at: Sequence[UUID]) -> list[Range]:
    """Cut ranges, which are in order, at points, which are too."""
    pieces: list[Range] = []
    for first, end in ranges:
        inner = at[bisect_right(at, first) :]
        edges = [first, *(point for point in inner if end is None or point < end)]
        pieces += [Range(begin, stop) for begin, stop in zip(edges, [*edges[1:], end], strict=True)]
    return pieces


def without(whole: Range, settled: Sequence[Range]) -> list[Range]:
    """Return what is left of a range without those inside it, which are in order and don't overlap."""
    gaps, begin = [], whole.first
    for first, end in settled:
        if first > begin:
            gaps.append(Range(begin, first))
        if end is None:
            return gaps
        begin = end
    if whole.end is None or begin < whole.end:
        gaps.append(Range(begin, whole.end))
    return gaps


def weighed(gaps: Sequence[Range], at: Sequence[UUID], size: Size) -> list[tuple[Range, int]]:
    """Cut ranges into pieces that bound a task, by points that are evenly spread over the rows.

    Returns them with the number of rows on both sides that they have, about.
    """
    rows_of_point = sum(size.values()) / max(len(at), 1)
    step = max(int(2 * _ROWS_OF_TASK / max(rows_of_point, 1)), 1)

    def index(bound: UUID | None) -> int:
        return len(at) if bound is None else bisect_left(at, bound)

    pieces = cut(gaps, at[::step])
    return [(each, int((index(each.end) - index(each.first)) * rows_of_point)) for each in pieces]


def joined(ranges: Sequence[tuple[Range, int]]) -> list[tuple[Range, int]]:
    """Join neighbours, as long as a task can hold them."""
    result: list[tuple[Range, int]] = []
    for each, rows in ranges:
        if result and result[-1][0].end == each.first and result[-1][1] + rows <= 2 * _ROWS_OF_TASK:
            before, rows_before = result.pop()
            result.append((Range(before.first, each.end), rows_before + rows))
        else:
            result.append((each, rows))
    return result


def few_tasks(differing: Sequence[tuple[Range, int]]) -> list[Task]:
    """Return tasks that read scattered ranges together, as many as bound their rows."""
    tasks: list[Task] = []
    ranges: list[Range] = []
    rows = 0
    for each, size in differing:
        if ranges and (rows + size > 2 * _ROWS_OF_TASK or len(ranges) == _RANGES_OF_TASK):
            tasks.append(Task(len(tasks), tuple(ranges)))
            ranges, rows = [], 0
        ranges.append(each)
        rows += size
    return [*tasks, Task(len(tasks), tuple(ranges))] if ranges else tasks


def choose_engine(job: Job) -> tuple[EngineName, str]:
    """Return the engine for a job, and why."""
    if job.engine is not EngineName.AUTO:
        return job.engine, f"engine {job.engine}, as asked"
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return EngineName.SPARK, "engine spark: it was submitted to one"
    if job.spark.master or job.spark.remote or job.spark.jdbc_jar:
        return EngineName.SPARK, "engine spark: one is named"
    return EngineName.LOCAL, "engine local: on one machine Spark is no faster, and takes seconds to start"


def choose_tier(job: Job, rows: int) -> tuple[Tier, str]:
    """Return the tier for about so many rows of a side that aren't settled, and why."""
    if job.archives:
        return Tier.FULL, "every row is read: archives have no digests"
    if job.tier is not Tier.AUTO:
        return job.tier, f"tier {job.tier}, as asked"
    if rows < _WORTH_DIGESTS:
        return Tier.FULL, f"every row is read: about {rows:,} rows a side are too few for digests to pay"
    return Tier.DIGEST, f"digests first: about {rows:,} rows a side"
