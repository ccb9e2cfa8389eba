"""Digest the rows of two sides by ranges of ids, inside both databases; tell ranges in sync from others.

Digests of our tables are made table by table, with nothing joined: fast, and stricter than the judge. Undecided halves
of another topic, a message that was sent twice or has expired, and a business table that other groups write too make a
range look different. Such ranges are digested once more by the rows that the judge would be given, which are joined in
the database: these digests are what the judge says. Sides that aren't ours are digested in that way alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import Row, Statement, execute
from outbox.reconcile import sql
from outbox.reconcile.job import Outcome, Pair, Part, Range
from outbox.reconcile.plan import Digested
from outbox.reconcile.source import PostgresSide, Snapshot, Snapshots, reaching
from outbox.reconcile.tables import WITHDRAWN, InboxState, ProducerState

_FAST_SINCE = 14  # bit_xor, hash_record_extended


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
    result, doubtful = Digested(), list[Range]()
    firsts = [gap.first for gap in gaps]
    for number, bucket in enumerate(of_producer.buckets, 1):
        if bucket.clipped(gaps[max(bisect_right(firsts, bucket.first) - 1, 0)]) is None:
            continue
        counts = tables.clean(number)
        if counts is None and _is_pruned(bucket, horizon):
            counts = tables.pruned(number)
        if counts is None and tables.is_doubtful(number):
            doubtful.append(bucket)
        else:
            result.add(bucket, counts, tables.rows(number))
    if doubtful:
        by_part = {part: PostgresSide(each.access, part, pair) for part, each in snapshots.of.items()}
        joined = SideDigester(snapshots, by_part, united(doubtful), mixing).digest(doubtful, horizon)
        result.clean = sorted([*result.clean, *joined.clean], key=itemgetter(0))
        result.differing = sorted([*result.differing, *joined.differing], key=itemgetter(0))
        result.doubted, result.excused = len(doubtful), len(joined.clean)
    return result


def _is_pruned(bucket: Range, horizon: UUID | None) -> bool:
    return horizon is not None and bucket.end is not None and bucket.end <= horizon


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
        agree = (
            (halves, half_mix or 0) == (ops, op_mix or 0)
            and (commits, commit_mix or 0) == (messages, message_mix or 0)
            and sends == 1
            and (sent, sent_mix or 0) == (of_topic - back, self._without(topic_mix, back_topic_mix))
            and bucket not in compensated
            and rows == consumed == addressed - back_addressed
            and (inbox_mix or 0) == self._without(addressed_mix, back_mix)
        )
        for effects, effect_mix in (table.get(bucket, (0, 0)) for table in of_effects):
            agree = agree and (effects, effect_mix or 0) == (rows, id_mix or 0)
        if not agree:
            return None
        left_out = (of_topic - addressed) - (back - back_addressed)
        return +Counter({Outcome.CONSUMED: rows, Outcome.ROLLED_BACK: back, Outcome.LEFT_OUT: left_out})

    def is_doubtful(self, bucket: int) -> bool:
        """May a bucket that isn't clean be so to the judge? Not one of which all was sent, and the inbox has other."""
        _, _, of_topic, addressed, addressed_mix, topic_mix = self.producer[0].get(bucket, (0,) * 6)
        _, _, _, sent, sent_mix = self.producer[2].get(bucket, (0,) * 5)
        back, back_addressed, back_mix, back_topic_mix = self.producer[3].get(bucket, (0,) * 4)
        rows, _, inbox_mix, _ = self.consumer[0].get(bucket, (0,) * 4)
        all_sent = (sent, sent_mix or 0) == (of_topic - back, self._without(topic_mix, back_topic_mix))
        expected = addressed - back_addressed, self._without(addressed_mix, back_mix)
        return not all_sent or (rows, inbox_mix or 0) == expected

    def _without(self, mix: int | None, other: int | None) -> int:
        ours, theirs = mix or 0, other or 0
        return ours ^ theirs if self.xor else ours - theirs

    def pruned(self, bucket: int) -> Counter[Outcome] | None:
        """Return the counts of a bucket of which the producer has nothing left; None if it has anything."""
        if any(bucket in table for table in self.producer):
            return None
        return Counter({Outcome.UNJUDGED: int(self.consumer[0].get(bucket, (0,))[0])})

    def rows(self, bucket: int) -> int:
        """Return how many rows both sides have in a bucket."""
        return int(self.producer[0].get(bucket, (0, 0, 0))[2]) + int(self.consumer[0].get(bucket, (0,))[0])


# --- digests of the judge's rows -------------------------------------------------------------------------

_SAMPLE = "SELECT r.id FROM ({rows}) r WHERE {one} %% %(step)s = 0"

_NOW = "statement_timestamp()"
_DISPATCHED, _CONSUMED, _UNKNOWN = ProducerState.DISPATCHED.value, InboxState.CONSUMED.value, InboxState.NONE.value
_WITHDRAWN = "({})".format(", ".join(str(each.value) for each in WITHDRAWN))
_NO_WORD = f"r.opinion IN (-1, {_UNKNOWN})"
_SENT = f"r.state = {_DISPATCHED} AND NOT r.compensated AND r.torn = 0 AND r.at <= {_NOW}"
# What needn't be read: sent, meant for the group and left as it is; taken back; left out by the group. A producer that
# has an opinion has the one that the consumer bears out then. And what is in
# the business table alone, which is no concern of the group's unless the producer has it.
_PLAIN: Mapping[Part, Sequence[str]] = {
    "producer": (
        f"{_SENT} AND r.addressed AND r.opinion IN (-1, {_CONSUMED})",
        f"r.state IN {_WITHDRAWN} AND NOT r.compensated AND r.torn = 0 AND {_NO_WORD}",
        f"{_SENT} AND NOT r.addressed AND {_NO_WORD}",
    ),
    "consumer": (
        f"r.status = {_CONSUMED} AND (r.effects IN (-1, 1) OR r.skipped AND r.effects = 0)"
        f" AND coalesce(greatest(r.received_at, r.changed_at) <= {_NOW}, true)",
        f"r.status = {_UNKNOWN}",
    ),
}

_DIGEST = """
SELECT width_bucket(r.id, %(bounds)s::uuid[]), count(*), {mix}({mixed}) FILTER (WHERE {plain}){counts}
  FROM ({rows}) r GROUP BY 1
"""

_UNTOUCHED = "SELECT r.id FROM ({rows}) r WHERE NOT ({plain})"


def sample(every: Statement, mixing: sql.Mixing, step: int) -> Statement:
    """Read about every ``step``-th id of the rows of a side, chosen by a hash. Rows: ``(id,)``, in no order."""
    one = mixing.one.format(id="r.id")
    return Statement(_SAMPLE.format(rows=every.sql, one=one), {**dict(every.values), "step": step})


def digests(part: Part, every: Statement, bounds: Sequence[UUID], mixing: sql.Mixing, *, bodies: bool) -> Statement:
    """Digest the rows of a side, of ours or of a foreign one, by bucket; bucket n begins with the n-th of ``bounds``.

    Rows: ``(bucket, rows, mix of the plain ones, plain ones, …)``; of the producer then also how many were taken back
    and are left out by the group, of the consumer how many are in the business table alone. With ``bodies`` the digests
    of bodies are in the hashes. Of rows that are there twice an exclusive or leaves nothing: a foreign side, whose ids
    may be, is mixed by a sum.
    """
    hashed = (mixing.two if bodies else mixing.one).format(id="r.id", digest="r.digest")
    counts = "".join(f", count(*) FILTER (WHERE {plain})" for plain in _PLAIN[part])
    text = _DIGEST.format(mix=mixing.mix, mixed=hashed, plain=_PLAIN[part][0], counts=counts, rows=every.sql)
    return Statement(text, {**dict(every.values), "bounds": sql.as_array(bounds)})


#: Of so many ranges the ids are looked for in a business table at once.
_RANGES_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class SideDigester:
    """Digests two sides in PostgreSQL, ours or foreign ones, whose ids lie in ranges, which are in order."""

    snapshots: Snapshots
    by_part: Mapping[Part, PostgresSide]
    within: Sequence[Range]
    mixing: sql.Mixing

    def _read(self, part: Part, statement: Statement) -> list[Row]:
        snapshot = self.snapshots.of[part]
        with reaching(snapshot.access):
            return execute(snapshot.connection, sql.PLAN_FOR_ROWS, statement, sql.PLAN_AS_EVER)[1]

    def points(self, part: Part, step: int) -> list[UUID]:
        """Return about each ``step``-th id of a side, in order."""
        statement = sample(self.by_part[part].statement(self.within), self.mixing, step)
        return sorted(id_ for (id_,) in self._read(part, statement))

    def digest(self, buckets: Sequence[Range], horizon: UUID | None) -> Digested:
        """Digest both sides by bucket; ``horizon`` is the id below which the producer may have pruned."""
        bounds = [bucket.first for bucket in buckets]
        bodies = all(side.has_bodies for side in self.by_part.values())

        def digest(part: Part) -> dict[int, Row]:
            every = self.by_part[part].statement(self.within)
            statement = digests(part, every, bounds, self.mixing, bodies=bodies)
            return {row[0]: row[1:] for row in self._read(part, statement)}

        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            ours = pool.submit(digest, "producer")
            theirs = digest("consumer")
            sent = ours.result()
        each = {
            number: _BucketDigests(*sent.get(number, _NOTHING_SENT), *theirs.get(number, _NOTHING_KNOWN))
            for number in range(1, len(buckets) + 1)
        }
        touched = self._touched(buckets, [number for number, of_both in each.items() if of_both.is_ambiguous])
        result = Digested()
        for number, bucket in enumerate(buckets, 1):
            of_both = each[number]
            counts = None if number in touched else of_both.clean(is_pruned=_is_pruned(bucket, horizon))
            result.add(bucket, counts, of_both.rows + of_both.known)
        return result

    def _touched(self, buckets: Sequence[Range], numbers: Sequence[int]) -> set[int]:
        """Return those of these buckets in which a message that the group was not to handle is in the business table.

        The table has rows that the group's inbox doesn't know: of others, if none is of these messages.
        """
        if (effect := self.by_part["consumer"].pair.effect) is None:
            return set(numbers)
        touched = set[int]()
        bounds = [bucket.first for bucket in buckets]
        for ids in self._untouched([buckets[number - 1] for number in numbers]):
            statement = sql.effects_of(effect, ids)
            touched |= {bisect_right(bounds, id_) for (id_,) in self._read("consumer", statement)}
        return touched

    def _untouched(self, ranges: Sequence[Range]) -> Iterator[list[UUID]]:
        """Yield the ids in ranges that the group was not to handle, of some ranges at a time."""
        producer = self.by_part["producer"]
        for start in range(0, len(ranges), _RANGES_AT_ONCE):
            every = producer.statement(united(ranges[start : start + _RANGES_AT_ONCE]))
            text = _UNTOUCHED.format(rows=every.sql, plain=_PLAIN["producer"][0])
            yield [id_ for (id_,) in self._read("producer", Statement(text, every.values))]


@dataclass(frozen=True, slots=True)
class _BucketDigests:
    """What both sides say of a bucket (`digests`)."""

    rows: int
    sent_mix: int | None
    sent: int
    back: int
    left_out: int
    known: int
    known_mix: int | None
    consumed: int
    strays: int

    @property
    def is_ambiguous(self) -> bool:
        """Is it clean, if no stray is of a message that the group was not to handle?"""
        return bool(self.strays and self.back + self.left_out and self.clean(is_pruned=False))

    def clean(self, *, is_pruned: bool) -> Counter[Outcome] | None:
        """Return the counts of a bucket; None if it isn't clean."""
        known = self.known - self.strays
        if not self.rows and is_pruned:
            return +Counter({Outcome.UNJUDGED: known})
        agree = self.rows == self.sent + self.back + self.left_out and known == self.consumed == self.sent
        if not agree or (self.sent_mix or 0) != (self.known_mix or 0):
            return None
        return +Counter({Outcome.CONSUMED: self.sent, Outcome.ROLLED_BACK: self.back, Outcome.LEFT_OUT: self.left_out})


_NOTHING_SENT: Row = (0, None, 0, 0, 0)
_NOTHING_KNOWN: Row = (0, None, 0, 0)


@dataclass(frozen=True, slots=True)
class PairDigester:
    """Digests the outbox's own tables of one pair. ``horizon`` is the id below which the producer may have pruned."""

    snapshots: Snapshots
    pair: Pair
    mixing: sql.Mixing
    horizon: UUID

    def digest(self, ranges: Sequence[Range], pieces: Sequence[Range]) -> Digested:
        """Digest the pieces of ranges in both databases."""
        of_producer = ProducerDigests({self.pair.names: ranges}, [self.pair], pieces, self.mixing)
        return digested(self.snapshots, self.pair, of_producer, self.horizon)
