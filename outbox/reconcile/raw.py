"""The producer's rows, read table by table and joined here: a server joins millions of rows at three times the cost.

Most messages were sent once, or rolled back: their rows are made of those of the tables. All others are named by the
server, or left over from the join, and their rows are read as `outbox.reconcile.sql.rows` joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from outbox.reconcile import sql
from outbox.reconcile.job import Range
from outbox.reconcile.rows import PRODUCER, Array, fixed_ids
from outbox.reconcile.source import Ask, PostgresSide, shaped, storage_of
from outbox.reconcile.tables import ProducerState

#: More ranges are small ones, of which each would be looked up in each table.
_MOST_RANGES = 8
#: So many ids are read by themselves at once.
_ODD_AT_ONCE = 20_000


@dataclass(frozen=True, slots=True)
class ProducerSide(PostgresSide):
    """The producer's side of a pair, in tables of ours."""

    def fetch(self, ask: Ask, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of ranges (`rows.PRODUCER`), in any order."""
        if len(ranges) > _MOST_RANGES or all(each.first == each.last for each in ranges):
            return PostgresSide.fetch(self, ask, ranges)
        of_tables = {name: _ordered(ask(each)) for name, each in sql.raw(self.access.schema, self.pair, ranges).items()}
        plain, odd = joined(**{name.replace(" ", "_"): table for name, table in of_tables.items()})
        parts = [plain]
        for start in range(0, len(odd), _ODD_AT_ONCE):
            some = [Range.only(UUID(bytes=id_.ljust(16, b"\0"))) for id_ in odd[start : start + _ODD_AT_ONCE].tolist()]
            parts.append(shaped(ask(self.statement(some)), PRODUCER))
        return pa.concat_tables(parts)


def joined(halves: pa.Table, messages: pa.Table, rolled_back: pa.Table, odd: pa.Table) -> tuple[pa.Table, Array]:
    """Join what `sql.raw` reads, each in the order of its ids.

    Returns the rows (`rows.PRODUCER`) of messages that were sent once and of halves that were rolled back, and the ids
    of all others, in order.
    """
    ids, ids_sent, ids_odd = fixed_ids(halves), fixed_ids(messages), fixed_ids(odd)
    sent, without_half = _places(ids, ids_sent)
    back, _ = _places(ids, fixed_ids(rolled_back))
    was_sent, was_rolled_back = sent >= 0, back >= 0
    is_odd = (was_sent == was_rolled_back) | (_places(ids, ids_odd)[0] >= 0)
    is_plain = ~is_odd
    rows, was_sent = halves.filter(pa.array(is_plain)), was_sent[is_plain]
    queues, positions, times = (
        np.where(was_sent, _values(messages, name, sent[is_plain]), other)
        for name, other in (("queue", 0), ("position", 0), ("at", _values(rolled_back, "at", back[is_plain])))
    )
    states = np.where(was_sent, ProducerState.DISPATCHED.value, ProducerState.ROLLED_BACK.value)
    columns: dict[str, Any] = {
        "id": rows["id"],
        "state": states,
        "sends": was_sent,
        "queue": queues,
        "position": positions,
        "at": pa.array(times).cast(PRODUCER.field("at").type),
        "digest": rows["digest"],
        "addressed": rows["addressed"],
        "compensated": np.zeros(len(states), bool),
        "torn": np.zeros(len(states), np.int8),
    }
    return shaped(pa.table(columns), PRODUCER), np.unique(
        np.concatenate([ids[is_odd], ids_sent[without_half], ids_odd])
    )


def _ordered(table: pa.Table) -> pa.Table:
    """Return what was read, in the order of its ids."""
    table = table.set_column(0, PRODUCER.field("id"), storage_of(table["id"]).cast(PRODUCER.field("id").type))
    ids = fixed_ids(table)
    if (ids[:-1] <= ids[1:]).all():
        return table
    # As two numbers: to compare sixteen bytes takes ten times as long.
    halves = np.ascontiguousarray(ids).view(">u8").reshape(-1, 2).astype("u8")
    return table.take(pa.array(np.lexsort((halves[:, 1], halves[:, 0]))))


def _places(ids: Array, others: Array) -> tuple[Array, Array]:
    """Return where each id is among others, both in order, -1 where it isn't; and which of the others are no ids."""
    nearest = np.searchsorted(ids, others)
    alone = nearest == len(ids)
    alone[~alone] = ids[nearest[~alone]] != others[~alone]
    places = np.full(len(ids), -1)
    places[nearest[~alone]] = np.flatnonzero(~alone)
    return places, alone


def _values(table: pa.Table, name: str, places: Array) -> Array:
    """Return the numbers that a column has at places; any where the place is -1."""
    column = table[name]
    values = (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_numpy()
    found: Array = values[places] if len(values) else np.zeros(len(places), np.int64)
    return found
