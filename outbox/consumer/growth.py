"""A topic that got more queues: which messages a group may read, so that the order of no key breaks.

With the number of queues the queue of most keys changes. A growth therefore notes, under dispatch's lock, the last
position of each queue that there was (`outbox.dispatch.sql.declare_topic`). A message sent later, into an old queue or
a new one, is behind the growth; the group reads it when it has consumed the old queues up to those positions.

Of the old queues only those count that had a key of this queue. A key's queue is its hash modulo the number of queues,
so both have the same remainder modulo what divides both numbers: from 8 to 16 queues, queue 11 waits for queue 3 alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from outbox.consumer import sql
from outbox.database.execute import read_source

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True)
class Growth:
    """The number of ``queues`` that a topic got, and the position at which each of the former ones ended then."""

    queues: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a group may read a queue: over the growths to at most ``grown`` queues, up to ``end`` (None: no end).

    It was found out at the offset ``position``.
    """

    grown: int = 0
    end: int | None = None
    position: int = 0


#: How far a group may read a queue of a topic that has never got more.
UNBOUNDED: Reach = Reach()


def read(text: str) -> list[Growth]:
    """Return the growths of a topic, the first one first."""
    return [Growth(queues, tuple(ends)) for queues, ends in sorted((int(n), e) for n, e in json.loads(text).items())]


def reaches(
    source: Connection, schema: str, topic: str, growths: Sequence[Growth], offsets: Mapping[int, int]
) -> dict[int, Reach]:
    """Return how far a group may read each queue of a topic, by its offsets.

    Older offsets than the true ones do no harm, as long as the group only goes forward.
    """
    passed = dict(offsets)
    if unfinished := {old for growth in growths for old, end in enumerate(growth.ends) if offsets.get(old, 0) < end}:
        # Messages that were pruned before the group came to them are not waited for.
        bounds = {"queues": list(unfinished), "positions": [offsets.get(queue, 0) for queue in unfinished]}
        before_next = sql.before_next(schema, topic=topic, growths=len(growths), **bounds)
        passed |= {row[0]: row[1] for row in read_source(source, before_next)[0]}
    return {queue: reach(growths, queue, passed, position) for queue, position in offsets.items()}


def reach(growths: Sequence[Growth], queue: int, passed: Mapping[int, int], position: int = 0) -> Reach:
    """Return how far a group may read a queue whose offset is ``position``; ``passed`` has what it has of each."""
    queues = 0
    for number, growth in enumerate(growths):
        step = gcd(len(growth.ends), *(later.queues for later in growths[number:]))
        had_its_keys = range(queue % step, len(growth.ends), step)
        if any(passed.get(old, 0) < growth.ends[old] for old in had_its_keys):
            return Reach(queues, growth.ends[queue] if queue < len(growth.ends) else 0, position)
        queues = growth.queues
    return Reach(queues, None, position)
