"""The first tier: digests of many ranges, made inside both databases, tell which ranges need not be read.

A range is clean if all this holds of its messages, each shown by a count and a mix of hashes of ids:

- every half has an op, and there is no op without a half (of all topics: an op doesn't know its topic);
- every committed half is a message, once, and there is no other message; those of the topic are messages of the topic;
- what the inbox has, all of it consumed, is what was committed of the topic, with the same digests of the bodies;
- nothing was compensated; and the business table, if one is named, has one row for each.

Then every message of it is `CONSUMED`, `ROLLED_BACK` or `LEFT_OUT`, whatever time it is. A range that the producer may
have pruned, and of which it has nothing left, is clean too: its messages are `UNJUDGED`. Ranges that aren't clean
may still be in sync (a message was sent twice, another topic has a backlog); they are read.

Ranges that differ are cut up and digested once more, inside both servers, until it costs less to read them. All digests
are of the same two snapshots, so that what was clean at one level stays so at the next.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import Row, Statement, execute
from outbox.reconcile import plan, sql
from outbox.reconcile.job import Outcome, Pair, Range
from outbox.reconcile.plan import MOST_BUCKETS, Sample, pieces_of, scattered
from outbox.reconcile.source import Snapshot, Snapshots, reaching

_FAST_SINCE = 14  # bit_xor, hash_record_extended


@dataclass(frozen=True, slots=True)
class Digested:
    """Ranges, sorted into clean ones with their counts, and others with the number of their rows on both sides."""

    clean: list[tuple[Range, Counter[Outcome]]]
    differing: list[tuple[Range, int]]

    @property
    def buckets(self) -> int:
        """How many ranges were digested."""
        return len(self.clean) + len(self.differing)

    @property
    def rows(self) -> int:
        """How many rows of the producer's topic and the inbox are in all ranges, about."""
        return self.rows_differing + 2 * sum(counts.total() for _, counts in self.clean)

    @property
    def rows_differing(self) -> int:
        """How many of them are in ranges that differ."""
        return sum(rows for _, rows in self.differing)

    def spares(self, gaps: int) -> bool:
        """Does it cost less to read the ranges that differ than to read everything, which lies in so many gaps?"""
        some = plan.joined(self.differing)
        return not some or plan.reading(self.rows_differing, len(some)) < plan.reading(self.rows, gaps)

    def __str__(self) -> str:
        share = self.rows_differing / max(self.rows, 1)
        return f"{len(self.differing):,} of {self.buckets:,} ranges differ, with {share:.1%} of the rows"


@dataclass(slots=True)
class ProducerDigests:
    """The digests of a producer's tables, read once for all pairs of a job.

    ``gaps`` are what of the window isn't settled, of each pair. ``buckets`` are all of them, cut up so that each bucket
    lies wholly within the gaps of a pair, or wholly without. What the producer has written since they were read isn't
    in them: what a consumer knows of that makes a range differ, and it is read.
    """

    gaps: Mapping[tuple[str, str], Sequence[Range]]
    pairs: Sequence[Pair]
    buckets: Sequence[Range]
    mixing: sql.Mixing
    tables: list[dict[int, Row]] = field(default_factory=list)

    @property
    def bounds(self) -> list[UUID]:
        """Where the buckets begin."""
        return [bucket.first for bucket in self.buckets]

    def read(self, snapshot: Snapshot) -> None:
        """Read them, unless they were read already."""
        if not self.tables:
            ranges = united(self.buckets)
            statements = sql.producer_digests(snapshot.access.schema, self.pairs, ranges, self.bounds, self.mixing)
            self.tables = _by_bucket(snapshot, statements)

    def of(self, pair: Pair) -> list[dict[int, Row]]:
        """Return the tables with the columns of one pair only."""
        halves, ops, messages, rolled_back, compensated = self.tables
        number = [each.names for each in self.pairs].index(pair.names)
        of_pair, sent = (
            slice(width * number, width * (number + 1)) for width in (sql.COLUMNS_OF_PAIR, sql.COLUMNS_SENT)
        )
        return [
            {bucket: (*row[:2], *row[2:][of_pair]) for bucket, row in halves.items()},
            ops,
            {bucket: (*row[:3], *row[3:][sent]) for bucket, row in messages.items()},
            {bucket: row[of_pair] for bucket, row in rolled_back.items()},
            compensated,
        ]


def united(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges, which may overlap, as few that don't, in order."""
    result: list[Range] = []
    for each in sorted(ranges, key=lambda each: each.first):
        if result and (result[-1].end is None or each.first <= result[-1].end):
            before = result.pop()
            ends = before.end, each.end
            result.append(Range(before.first, None if None in ends else max(end for end in ends if end is not None)))
        else:
            result.append(each)
    return result


def _by_bucket(snapshot: Snapshot, statements: Sequence[Statement]) -> list[dict[int, Row]]:
    with reaching(snapshot.access):
        return [{row[0]: row[1:] for row in rows} for rows in execute(snapshot.connection, *statements)]


def digested(snapshots: Snapshots, pair: Pair, of_producer: ProducerDigests, horizon: UUID) -> Digested:
    """Digest what of a pair isn't settled, inside both databases; tell clean ranges from differing."""
    gaps = of_producer.gaps[pair.names]
    mixing, bounds = of_producer.mixing, of_producer.bounds
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        ours = pool.submit(of_producer.read, snapshots.producer)
        statements = sql.consumer_digests(snapshots.consumer.access.schema, pair, gaps, bounds, mixing)
        theirs = _by_bucket(snapshots.consumer, statements)
        ours.result()
    tables = _Tables(of_producer.of(pair), theirs, mixing.xor)
    result = Digested([], [])
    firsts = [gap.first for gap in gaps]
    for number, bucket in enumerate(of_producer.buckets, 1):
        if bucket.clipped(gaps[max(bisect_right(firsts, bucket.first) - 1, 0)]) is None:
            continue
        counts = tables.clean(number)
        if counts is None and bucket.end is not None and bucket.end <= horizon:
            counts = tables.pruned(number)
        if counts is None:
            result.differing.append((bucket, tables.rows(number)))
        else:
            result.clean.append((bucket, counts))
    return result


def mixing_of(snapshots: Snapshots) -> sql.Mixing:
    """Return how both servers are to hash: fast, if they give the same values; else by md5, which all have."""
    connections = snapshots.producer.connection, snapshots.consumer.connection
    if all(_version(connection) >= _FAST_SINCE for connection in connections):
        values = [execute(connection, sql.FAST_VALUES)[0] for connection in connections]
        if values[0] == values[1]:
            return sql.FAST
    return sql.PORTABLE


def _version(connection: Connection) -> int:
    version = connection.dialect.server_version_info
    return int(version[0]) if version else 0


@dataclass(frozen=True, slots=True)
class _Tables:
    """The digests of the tables of each side, by bucket; a bucket without rows isn't there (`sql.producer_digests`)."""

    producer: list[dict[int, Row]]
    consumer: list[dict[int, Row]]
    xor: bool

    def clean(self, bucket: int) -> Counter[Outcome] | None:
        """Return the counts of a clean bucket; None if it isn't."""
        of_halves, of_ops, of_messages, of_rolled_back, compensated = self.producer
        inbox, *of_effects = self.consumer
        halves, half_mix, of_topic, addressed, addressed_mix, topic_mix = of_halves.get(bucket, (0,) * 6)
        ops, op_mix, commits, commit_mix = of_ops.get(bucket, (0, 0, 0, 0))
        messages, message_mix, sends, sent, sent_mix = of_messages.get(bucket, (0, 0, 1, 0, 0))
        back, back_addressed, back_mix, back_topic_mix = of_rolled_back.get(bucket, (0,) * 4)
        rows, consumed, inbox_mix, id_mix = inbox.get(bucket, (0, 0, 0, 0))
        without = operator.xor if self.xor else operator.sub
        agree = (
            (halves, half_mix or 0) == (ops, op_mix or 0)
            and (commits, commit_mix or 0) == (messages, message_mix or 0)
            and sends == 1
            and (sent, sent_mix or 0) == (of_topic - back, without(topic_mix or 0, back_topic_mix or 0))
            and bucket not in compensated
            and rows == consumed == addressed - back_addressed
            and (inbox_mix or 0) == without(addressed_mix or 0, back_mix or 0)
        )
        for effects, effect_mix in (table.get(bucket, (0, 0)) for table in of_effects):
            agree = agree and (effects, effect_mix or 0) == (rows, id_mix or 0)
        if not agree:
            return None
        left_out = (of_topic - addressed) - (back - back_addressed)
        return +Counter({Outcome.CONSUMED: rows, Outcome.ROLLED_BACK: back, Outcome.LEFT_OUT: left_out})

    def pruned(self, bucket: int) -> Counter[Outcome] | None:
        """Return the counts of a bucket of which the producer has nothing left; None if it has anything."""
        if any(bucket in table for table in self.producer):
            return None
        return Counter({Outcome.UNJUDGED: int(self.consumer[0].get(bucket, (0,))[0])})

    def rows(self, bucket: int) -> int:
        """Return how many rows both sides have in a bucket."""
        return int(self.producer[0].get(bucket, (0, 0, 0))[2]) + int(self.consumer[0].get(bucket, (0,))[0])


# --- levels ----------------------------------------------------------------------------------------------

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
    digester: Digester, first: Digested, sample: Sample | None, say: Callable[[str], None] = lambda _: None
) -> Digested:
    """Return the ranges of a first level, those that differ cut up as far as it pays.

    ``sample`` are the facts of before; ``say`` is told what is digested once more.
    """
    result, level = first, first
    for _ in range(_MOST_LEVELS):
        if (size := _size_of_pieces(result, level, sample)) is None:
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


def _size_of_pieces(result: Digested, level: Digested, sample: Sample | None) -> int | None:
    """Return how many rows of a side the pieces of the next level are to have; None if there is to be none.

    ``level`` is what was digested last; how many of its ranges differ tells how many differences are in them.
    """
    rows = level.rows_differing
    if not rows:  # an op without a half is no row of either side
        return None
    size = rows / 2 / len(level.differing)
    differences = scattered(level.buckets, len(level.differing)) * level.buckets / len(level.differing)
    if sample is not None:
        # What lies together fills the ranges that differ: then there is nothing to be had by cutting them up.
        small = min(sample.share * result.rows / rows, 1.0)
        differences = max(differences, scattered(sample.ranges, small * sample.ranges) * size / sample.rows)
    pieces = pieces_of(size, differences)
    return None if pieces == 1 else max(int(size / pieces), rows // 2 // MOST_BUCKETS, 1)
