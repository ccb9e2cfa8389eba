"""What a comparison costs, by measured constants: how small the ranges are that pay, and when reading is cheaper.

A message is a row of each side: a half with its op and its message, and a row of the inbox. Times are of processors, of
both servers and of this process together, in microseconds; ``python -m benchmarks --only reconcile_cost`` measures them
anew. Another machine is slower or faster by a factor, which changes no choice: only ratios do.

A range differs if one of the differences is in it. Where they are scattered, of which nothing else is known, a range
with ``m`` of them on average has one with the probability 1 - exp(-m), so that the share of ranges that differ tells m.
Differences that lie together are seen by the share of rows in small ranges that differ, which a probe tells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from outbox.reconcile.rows import Estimate

#: A message that is digested by a scan of both sides.
SCANNED = 1.6
#: The same by the indexes, as a range that is digested once more is.
RESCANNED = 1.8
#: A range that is digested: a row of each table, made, sent, and compared with the others.
BUCKET = 40.0
#: A range that is cut up and digested once more: where it begins and ends is looked up in each table.
SPLIT = 150.0
#: A row of either side that is read and judged.
ROW = 2.3
#: A range that is read by itself: looked up in each table.
RANGE = 185.0
#: Seconds until anything is read: connections, snapshots, what is settled, samples.
FIXED = 0.15

#: Bytes to and from a server: of a row of either side, and of the digests of a range with its bounds.
BYTES_OF_ROW, BYTES_OF_BUCKET = 63, 600

#: Rows of a side in a range; smaller ones are never worth a digest, and larger ones hardly cheaper.
_SIZES = (30, 45, 60, 90, 120, 180, 250, 350, 500, 700, 1_000, 1_400, 2_000, 2_800, 4_000, 5_600, 8_000)
#: Into how many pieces a range may be cut that is digested once more, and how often one after the other.
_PIECES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_LEVELS = 2
#: Beyond so many ranges at once, to number a row's range takes longer than reading does.
MOST_BUCKETS = 65_536


@dataclass(frozen=True, slots=True)
class Probe:
    """What a few small ranges, evenly spread, have told: so many of them differ, of ``rows`` rows of a side each."""

    ranges: int
    differing: int
    rows: float

    @property
    def density(self) -> float:
        """Differences in a row, if they are scattered; half of one where none was seen."""
        return scattered(self.ranges, max(self.differing, 0.5)) / self.rows

    @property
    def share(self) -> float:
        """How much of the rows lies in ranges of this size that differ, 0 to 1."""
        return self.differing / self.ranges

    def __str__(self) -> str:
        return f"{self.differing:,} of {self.ranges:,} probed ranges of {self.rows:,.0f} rows differ"


@dataclass(frozen=True, slots=True)
class Digesting:
    """How a comparison by digests is expected to go: the rows of a side in a range, and what it comes to.

    ``micros`` is the work of all processors.
    """

    size: int
    micros: float
    rows: int
    buckets: int

    @property
    def pays(self) -> bool:
        """Is there any reason for digests?"""
        return self.buckets > 0


def scattered(ranges: float, differing: float) -> float:
    """Return how many differences a range has on average, as so many of the ranges differ.

    Where all differ, any number may be in them; half a range is taken as in sync.
    """
    return -math.log(1 - min(differing, ranges - 0.5) / ranges) if ranges else 0.0


def reading(rows: float, ranges: float) -> float:
    """Return what it costs to read so many rows of both sides, in so many ranges."""
    return ROW * rows + RANGE * ranges


def estimate(micros: float, rows: float, buckets: int, workers: int) -> Estimate:
    """Return what to expect: both servers work at once, and so do the readers, up to two."""
    sent = BYTES_OF_ROW * rows + BYTES_OF_BUCKET * buckets
    return Estimate(round(rows), round(sent), FIXED + micros / 1e6 / min(workers, 2))


def everything(messages: float) -> Digesting:
    """Return what it comes to if all of so many messages are read."""
    return Digesting(0, reading(2 * messages, 1), round(2 * messages), 0)


def known_ranges(messages: float, ranges: int, differing: int, size: int) -> Digesting:
    """Return what it comes to if so many ranges are digested, and so many of them read."""
    rows = min(2 * size * differing, 2 * messages)
    micros = RESCANNED * messages + BUCKET * ranges + reading(rows, differing)
    return Digesting(size, micros, round(rows), ranges)


def first_digests(messages: float, density: float) -> Digesting:
    """Return the best way to compare so many messages with so many scattered differences in a row of a side.

    It is `everything` where digests don't pay.
    """
    best = everything(messages)
    for size in _SIZES:
        buckets = max(messages / size, 1.0)
        if buckets > MOST_BUCKETS and size != _SIZES[-1]:
            continue
        in_range = density * size
        differing = buckets * -math.expm1(-in_range)
        each, rows = _of_range(size, in_range / max(-math.expm1(-in_range), 1e-12), _LEVELS)
        micros = SCANNED * messages + BUCKET * buckets + differing * each
        if micros < best.micros:
            best = Digesting(size, micros, round(differing * rows), round(buckets))
    return best


def pieces_of(size: float, differences: float) -> int:
    """Return into how many pieces a range that differs is cut before it is read; 1 if it is to be read as it is.

    ``size`` is its rows of a side, ``differences`` how many it is expected to have, at least one.
    """
    return _best(size, differences, _LEVELS)[0]


def _of_range(size: float, differences: float, levels: int) -> tuple[float, float]:
    """Return what a range that differs costs, and how many rows of both sides are read of it."""
    _, micros, rows = _best(size, differences, levels)
    return micros, rows


# Costs are arguments, since a test may change them.
def _best(size: float, differences: float, levels: int) -> tuple[int, float, float]:
    return _search(round(size, 1), round(max(differences, 1.0), 2), levels, (RESCANNED, BUCKET, SPLIT, ROW, RANGE))


@lru_cache(maxsize=4096)
def _search(size: float, differences: float, levels: int, costs: tuple[float, ...]) -> tuple[int, float, float]:
    rescanned, bucket, split, row, range_ = costs
    best, least, read = 1, range_ + row * 2 * size, 2 * size
    if levels == 0:
        return best, least, read
    for pieces in _PIECES:
        if size / pieces < 1:
            break
        differing = pieces * (1 - (1 - 1 / pieces) ** differences)
        _, each, rows = _search(round(size / pieces, 1), round(max(differences / differing, 1.0), 2), levels - 1, costs)
        micros = split + rescanned * size + bucket * pieces + differing * each
        if micros < least:
            best, least, read = pieces, micros, differing * rows
    return best, least, read
