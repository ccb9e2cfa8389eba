"""Ranges that differ are cut up and digested once more, inside both servers, until it costs less to read them.

Whatever is compared by digests is a `Digester`: the outbox's own tables, or others. All of its digests are of the same
two snapshots, so that what was clean at one level stays so at the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol
from uuid import UUID

from outbox.reconcile import plan, sql
from outbox.reconcile.digest import Digested, ProducerDigests, digested
from outbox.reconcile.digest.cost import MOST_BUCKETS, Probe, pieces_of, scattered
from outbox.reconcile.job import Pair, Range
from outbox.reconcile.source import Snapshots

#: A level beyond these would be of ranges that are hardly smaller.
_MOST_LEVELS = 5


class Digester(Protocol):
    """Digests ranges of ids on both sides."""

    def points(self, ranges: Sequence[Range], rows: int) -> list[UUID]:
        """Return ids, in order, that cut ranges into pieces of about so many rows of a side."""
        ...

    def digest(self, ranges: Sequence[Range], pieces: Sequence[Range]) -> Digested:
        """Digest the pieces into which ranges, in order, were cut; tell clean ones from differing."""
        ...


@dataclass(frozen=True, slots=True)
class PairDigester:
    """Digests the outbox's own tables of one pair. ``horizon`` is the id below which the producer may have pruned."""

    snapshots: Snapshots
    pair: Pair
    size: plan.Size
    mixing: sql.Mixing
    horizon: UUID

    def points(self, ranges: Sequence[Range], rows: int) -> list[UUID]:
        """Return ids, in order, that cut ranges into pieces of about so many rows of the larger side."""
        return plan.points_of_ranges(self.snapshots, self.size, self.pair, ranges, rows)

    def digest(self, ranges: Sequence[Range], pieces: Sequence[Range]) -> Digested:
        """Digest the pieces of ranges in both databases."""
        of_producer = ProducerDigests({self.pair.names: ranges}, [self.pair], pieces, self.mixing)
        return digested(self.snapshots, self.pair, of_producer, self.horizon)


def narrowed(
    digester: Digester, first: Digested, probe: Probe | None, say: Callable[[str], None] = lambda _: None
) -> Digested:
    """Return the ranges of a first level, those that differ cut up as far as it pays.

    ``probe`` are the facts of before; ``say`` is told what is digested once more.
    """
    result, level = first, first
    for _ in range(_MOST_LEVELS):
        if (size := _size_of_pieces(result, level, probe)) is None:
            break
        # Others may be smaller than most of them are.
        large = [each for each, rows in result.differing if rows >= 4 * size]
        pieces = plan.cut(large, digester.points(large, size)) if large else []
        if len(pieces) == len(large):
            break
        say(f"{len(large):,} ranges that differ are cut into {len(pieces):,}, which are digested once more")
        level = digester.digest(large, pieces)
        small = [each for each in result.differing if each[1] < 4 * size]
        result = Digested(
            sorted([*result.clean, *level.clean], key=itemgetter(0)),
            sorted([*small, *level.differing], key=itemgetter(0)),
        )
    return result


def _size_of_pieces(result: Digested, level: Digested, probe: Probe | None) -> int | None:
    """Return how many rows of a side the pieces of the next level are to have; None if there is to be none.

    ``level`` is what was digested last; how many of its ranges differ tells how many differences are in them.
    """
    rows = level.rows_differing
    if not rows:  # an op without a half is no row of either side
        return None
    size = rows / 2 / len(level.differing)
    differences = scattered(level.buckets, len(level.differing)) * level.buckets / len(level.differing)
    if probe is not None:
        # What lies together fills the ranges that differ: then there is nothing to be had by cutting them up.
        small = min(probe.share * result.rows / rows, 1.0)
        differences = max(differences, scattered(probe.ranges, small * probe.ranges) * size / probe.rows)
    pieces = pieces_of(size, differences)
    return None if pieces == 1 else max(int(size / pieces), rows // 2 // MOST_BUCKETS, 1)
