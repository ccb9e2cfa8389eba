"""The first tier: digests of many ranges, made inside both databases, tell which ranges need not be read.

A range is clean if all this holds of its messages, each shown by a count and a mix of hashes of ids:

- every half has an op, and there is no op without a half (of all topics: an op doesn't know its topic);
- every committed half is a message, once, and there is no other message; those of the topic are messages of the topic;
- what the inbox has, all of it consumed, is what was committed of the topic, with the same digests of the bodies;
- nothing was compensated; and the business table, if one is named, has one row for each.

Then every message of it is `CONSUMED`, `ROLLED_BACK` or `LEFT_OUT`, whatever time it is. A range that the producer may
have pruned, and of which it has nothing left, is clean too: its messages are `UNJUDGED`. Ranges that aren't clean
may still be in sync (a message was sent twice, another topic has a backlog); they are read.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from outbox.database.execute import Row, execute
from outbox.reconcile import sql
from outbox.reconcile.job import Outcome, Pair, Part, Range
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
    def share(self) -> float:
        """How much of the rows of the producer's topic and the inbox lies in differing ranges, 0 to 1."""
        differing = sum(rows for _, rows in self.differing)
        total = differing + 2 * sum(counts.total() for _, counts in self.clean)
        return differing / total if total else 0.0

    def __str__(self) -> str:
        return f"{len(self.differing):,} of {self.buckets:,} ranges differ, with {self.share:.1%} of the rows"


def digested(
    snapshots: Snapshots, pair: Pair, gaps: Sequence[Range], buckets: Sequence[Range], horizon: UUID
) -> Digested:
    """Digest ``buckets``, which are ``gaps`` cut up, inside both databases; tell clean ranges from differing."""
    mixing = mixing_of(snapshots)
    bounds = [bucket.first for bucket in buckets]

    def read(part: Part, snapshot: Snapshot) -> list[dict[int, Row]]:
        statements = sql.digests(part, snapshot.access.schema, pair, gaps, bounds, mixing)
        with reaching(snapshot.access):
            return [{row[0]: row[1:] for row in rows} for rows in execute(snapshot.connection, *statements)]

    with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        ours = pool.submit(read, "producer", snapshots.producer)
        theirs = read("consumer", snapshots.consumer)
        tables = _Tables(ours.result(), theirs, mixing.xor)
    result = Digested([], [])
    for number, bucket in enumerate(buckets, 1):
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
        values = [execute(connection, sql.PROBE)[0] for connection in connections]
        if values[0] == values[1]:
            return sql.FAST
    return sql.PORTABLE


def _version(connection: Connection) -> int:
    version = connection.dialect.server_version_info
    return int(version[0]) if version else 0


@dataclass(frozen=True, slots=True)
class _Tables:
    """The digests of the tables of each side, by bucket; a bucket without rows isn't there. See `sql.digests`."""

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
