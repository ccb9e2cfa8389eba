"""What the tests of archives share; run as a program, it archives and kills itself on the way.

``python -m tests.reconcile.archiving URL FOLDER DEADLY RANGE…`` archives the producer's side, and dies just before the
file that is number DEADLY (from 1) would appear under its name.
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

from outbox import Settings
from outbox.message.ids import uuid7_at
from outbox.reconcile.archive import ParquetSide, write_archive
from outbox.reconcile.archive.files import TEMPORARY, Manifest
from outbox.reconcile.compare import Side
from outbox.reconcile.job import FIRST_ID, Access, Effect, Pair, Range
from outbox.reconcile.source import PostgresSide
from tests.reconcile.town import Town

PAIR = Pair("t", "g")
EFFECT = Effect("ledger")
EVERYTHING = Range(FIRST_ID, None)
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


def at(hour: float) -> UUID:
    """Return the first id of so many hours after noon."""
    return UUID(int=uuid7_at(NOON.timestamp() + hour * 3600).int >> 80 << 80)


def ids_of(hour: float, number: int = 1) -> list[UUID]:
    """Return ids that were made then, in order."""
    first = uuid7_at(NOON.timestamp() + hour * 3600).int
    return [UUID(int=first + n) for n in range(number)]


def hours(*bounds: float) -> list[Range]:
    """Return the ranges between hours."""
    return [Range(at(first), at(end)) for first, end in pairwise(bounds)]


def archive(side: Side, ranges: Sequence[Range], folder: Path, **changes: Any) -> Manifest:
    """Archive the producer's rows at noon, when nothing had been pruned yet."""
    said: dict[str, Any] = {"kind": "producer", "pair": PAIR, "taken_at": NOON, "horizon": FIRST_ID}
    return write_archive(side, ranges, folder, **said | changes)


def empty(town: Town) -> None:
    """Empty all tables that tests write into."""
    tables = ("half_message", "half_check", "op_message", "message", "scheduled_message", "compensation")
    town.at_producer(f"TRUNCATE {', '.join(f'{{s}}.{table}' for table in tables)}")
    town.run("TRUNCATE ledger, {s}.consumer_message, {s}.consumer_offset, {s}.consumer_start")


def producer(town: Town, pair: Pair = PAIR) -> PostgresSide:
    """Return the producer's side."""
    return PostgresSide(town.accesses[0], "producer", pair)


def consumer(town: Town, pair: Pair = PAIR) -> PostgresSide:
    """Return the consumer's side."""
    return PostgresSide(town.accesses[1], "consumer", pair)


def archived(*folders: Path, pair: Pair = PAIR) -> ParquetSide:
    """Return the producer's side from archives."""
    return ParquetSide(folders, "producer", pair)


def forget(town: Town, *ids: UUID) -> None:
    """Delete messages at the producer, as prune does."""
    for table, column in (("half_message", "id"), ("op_message", "half_id"), ("message", "half_id")):
        town.at_producer(f"DELETE FROM {{s}}.{table} WHERE {column} = ANY (:ids)", ids=list(ids))


def _die_before(number: int) -> None:
    appeared = 0

    def watch(event: str, values: tuple[object, ...]) -> None:
        nonlocal appeared
        if event == "os.rename" and str(values[0]).endswith(TEMPORARY):
            appeared += 1
            if appeared == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(url: str, folder: str, deadly: str, *bounds: str) -> None:
    """Archive, and die."""
    _die_before(int(deadly))
    side = PostgresSide(Access(url, Settings()), "producer", PAIR)
    archive(side, hours(*map(float, bounds)), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
