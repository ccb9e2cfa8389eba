"""Write an archive: range by range, so that it is whole at any time, and a second try goes on.

Take an archive of a pair: both sides of a window, each as of one snapshot.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings, SourceError
from outbox.message.model import uuid7_at
from outbox.reconcile import plan
from outbox.reconcile.archive import clipped, merged
from outbox.reconcile.archive.files import (
    TEMPORARY,
    Content,
    Kind,
    Manifest,
    Part,
    describe_part,
    read_part,
    write_manifest,
    write_part,
)
from outbox.reconcile.compare import Side
from outbox.reconcile.job import Access, NoProgress, Pair, Progress, Range, Window
from outbox.reconcile.plan import without
from outbox.reconcile.rows import InboxState, ProducerState
from outbox.reconcile.source import PostgresSide, Snapshot, Snapshots, as_time, snapshots_of

_LOCK = ".lock"
#: What becomes something else by itself.
_UNSETTLED: dict[Kind, tuple[str, tuple[int, ...]]] = {
    "producer": ("state", (ProducerState.UNDECIDED, ProducerState.COMMITTED, ProducerState.SCHEDULED)),
    "consumer": ("status", (InboxState.FAILED, InboxState.PARKED)),
}


def write_archive(
    side: Side,
    ranges: Sequence[Range],
    folder: Path,
    *,
    kind: Kind,
    pair: Pair,
    taken_at: dt.datetime,
    horizon: UUID,
    done: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Archive the rows of ranges, which are in order and don't overlap; return what is in the archive then.

    Each range is read at once, and becomes a file. What the archive has already isn't read again, unless it wasn't
    settled. ``taken_at`` is the time by the clock of the database, below ``horizon`` it may have pruned. ``done`` is
    called with how many ranges are finished.

    Raises:
        InvalidSettings: a range without an end, in which there will be more ids later.
        SourceError: the side can't be read; the folder has an archive of something else, or is being written to.
    """
    if any(each.end is None for each in ranges):
        raise InvalidSettings(f"archive {folder}: what has no end can't be archived; give until, a time that is past")
    content = Content.of(kind, pair)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for left in folder.glob(f".*{TEMPORARY}"):
            left.unlink()
        parts = {part.range: part for part in _found(folder, content)}
        for number, each in enumerate(_to_read(ranges, list(parts.values())), 1):
            rows, since = side.read([each]), horizon
            if (old := parts.get(each)) is not None:
                # What was pruned meanwhile was settled in the end, and is in the archive only.
                rows, since = merged(rows, read_part(folder / old.file, content, [each])), old.horizon
            assert each.end is not None  # noqa: S101 - refused above
            part = Part(
                f"{each.first.hex}-{each.end.hex}.parquet",
                each.first,
                each.end,
                rows.num_rows,
                _unsettled(rows, kind),
                taken_at,
                since,
            )
            write_part(folder / part.file, content, part, rows)
            parts[each] = part
            done(number)
        manifest = Manifest(folder, content, tuple(parts[each] for each in sorted(parts)))
        write_manifest(manifest)
    return manifest


def _found(folder: Path, content: Content) -> Iterator[Part]:
    """Yield the parts that are there, listed or not: the last writer may not have come to its list."""
    for path in sorted(folder.glob("*.parquet")):
        has, part = describe_part(path)
        if has != content:
            raise SourceError(f"{folder} has an archive of {has}; archive {content} into a folder of its own")
        yield part


def _to_read(ranges: Sequence[Range], parts: Sequence[Part]) -> list[Range]:
    """Return what isn't archived, or wasn't settled when it was."""
    archived = sorted(part.range for part in parts)
    new = [gap for each in ranges for gap in without(each, _inside(each, archived))]
    return sorted([*new, *(part.range for part in parts if part.unsettled and _inside(part.range, ranges))])


def _inside(whole: Range, ranges: Sequence[Range]) -> list[Range]:
    return [part for each in ranges if (part := clipped(each, whole))]


def _unsettled(rows: pa.Table, kind: Kind) -> int:
    column, states = _UNSETTLED[kind]
    return pc.sum(pc.is_in(rows[column], value_set=pa.array(states, pa.int8()))).as_py() or 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against other writers; the system lets go of it when this process ends, however it does."""
    import fcntl  # noqa: PLC0415 - Unix only; archives can be read elsewhere

    with (folder / _LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SourceError(f"{folder} is being written to by another process; wait until it is done") from None
        yield


def take_archive(
    producer: Access, consumer: Access, pair: Pair, window: Window, folder: Path, progress: Progress | None = None
) -> tuple[Manifest, Manifest]:
    """Archive both sides of a pair into folders of its own within ``folder``; return what they have then.

    What is younger than the window's grace period isn't settled, and isn't archived. What is there already isn't read
    again, so that after a crash, or each night, the same call goes on.

    Raises:
        InvalidSettings: nothing in the window is old enough.
        SourceError: a database can't be read; a folder has an archive of something else, or is being written to.
        SchemaMissing, SchemaOutdated: a database isn't migrated.
    """
    progress = progress or NoProgress()
    own = folder / f"{quote(pair.topic, safe='')}.{quote(pair.group, safe='')}"
    with snapshots_of(producer, consumer) as snapshots:
        ranges = _ranges(window, snapshots)
        databases: tuple[tuple[Snapshot, Kind, float], ...] = (
            (snapshots.producer, "producer", producer.settings.retention),
            (snapshots.consumer, "consumer", consumer.settings.inbox_retention),
        )
        manifests = []
        for snapshot, kind, retention in databases:
            progress.stage(f"{pair}: archive of the {kind}", len(ranges))
            manifests.append(
                write_archive(
                    PostgresSide(snapshot.access, kind, pair, snapshot.name),
                    ranges,
                    own / kind,
                    kind=kind,
                    pair=pair,
                    taken_at=as_time(snapshot.now),
                    horizon=_horizon(snapshot, retention),
                    done=progress.done,
                )
            )
    return manifests[0], manifests[1]


def _ranges(window: Window, snapshots: Snapshots) -> Sequence[Range]:
    """Return what of the window is old enough, cut so that each part fits in memory."""
    oldest = min(snapshots.producer.now, snapshots.consumer.now) / 1e6 - window.grace
    settled = UUID(int=uuid7_at(oldest).int >> 80 << 80)
    first, end = window.range
    if end is None or end > settled:
        end = settled
    if first >= end:
        raise InvalidSettings(
            f"nothing can be archived of {window}: it is younger than the grace period of {window.grace:.0f} s"
        )
    size = plan.size_of(snapshots)
    points = plan.points(snapshots, size, plan.POINTS)
    return [each for each, _ in plan.weighed([Range(first, end)], points, size)]


def _horizon(snapshot: Snapshot, retention: float) -> UUID:
    return uuid7_at(max(snapshot.now / 1e6 - retention, 0))
