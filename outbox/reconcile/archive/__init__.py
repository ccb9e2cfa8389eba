"""Archives: the rows that a comparison reads of one side, as Parquet files, for when the database has pruned them.

An archive is a folder of parts and their list, ``manifest.json``. Each part has all rows of a range of ids, sorted,
and says what it is in its own metadata. Parts don't overlap. A part appears under its name when it is whole, and in
the list after that; so whatever happens to the writer, what is listed can be read, and a second try goes on.

A row is archived as it was at the time. So take an archive of messages that are long settled, and before the retention
ends; a part in which some weren't is read again when the same window is archived again.

Whatever can't be read, here and in `files`, raises `SourceError`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.errors import InvalidSettings, SourceError
from outbox.message.ids import uuid7_at
from outbox.message.model import Status
from outbox.reconcile import plan
from outbox.reconcile.archive import files
from outbox.reconcile.archive.files import ArchivePart, Content, Manifest
from outbox.reconcile.compare import Side
from outbox.reconcile.job import (
    FIRST_ID,
    Access,
    InboxState,
    NoProgress,
    Pair,
    Part,
    ProducerState,
    Progress,
    Range,
    Window,
)
from outbox.reconcile.rows import fixed_ids
from outbox.reconcile.source import PostgresSide, Snapshot, Snapshots, as_time, pruned_below, snapshots_of


def merged(counts: pa.Table, other: pa.Table) -> pa.Table:
    """Return the rows of two tables of a side, sorted by id; of an id that both have, the row of the first counts."""
    if not other.num_rows:
        return counts
    new = other.filter(pa.array(~np.isin(fixed_ids(other), fixed_ids(counts))))
    return pa.concat_tables([counts, new]).sort_by("id") if new.num_rows else counts


@dataclass(frozen=True, slots=True)
class ParquetSide:
    """One side of a pair, from archives; a value that can be sent to another process which has the same folders.

    Of a message that several archives have, the row that was taken last counts.
    """

    folders: tuple[Path, ...]
    kind: Part
    pair: Pair

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.PRODUCER` or `rows.CONSUMER`)."""
        content = Content.of(self.kind, self.pair)
        rows = content.schema.empty_table()
        manifests = map(files.read_manifest, self.folders)
        for manifest in sorted(manifests, key=lambda each: (each.parts != (), each.taken_at), reverse=True):
            if manifest.content != content:
                raise SourceError(f"{manifest.folder} is an archive of {manifest.content}, not of {content}")
            needed = [part for part in manifest.parts if any(part.range.clipped(each) for each in ranges)]
            tables = [files.read_part(manifest.folder / part.file, content, ranges) for part in needed]
            rows = merged(rows, pa.concat_tables([content.schema.empty_table(), *tables]))
        return rows


@dataclass(frozen=True, slots=True)
class UnionSide:
    """A database, and archives for what it may have pruned: the ids below ``horizon``.

    What the database has counts more, since it is newer. From the horizon on the archives aren't asked: nothing can
    have been pruned there, so that what is missing in the database is missing indeed.
    """

    live: Side
    archive: Side
    horizon: UUID

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id."""
        old = [part for each in ranges if (part := each.clipped(Range(FIRST_ID, self.horizon)))]
        # The database first: what is pruned after that, or was before, is in the one or in the other.
        live = self.live.read(ranges)
        return merged(live, self.archive.read(old)) if old else live


def with_archives(live: Side, folders: Iterable[Path], kind: Part, pair: Pair, horizon: UUID) -> Side:
    """Return a side that reads archives for what its database may have pruned, the ids below ``horizon``.

    The folders, and those in them, may have archives of other sides and pairs, which are left alone."""
    own = tuple(manifest.folder for manifest in _of(folders, Content.of(kind, pair)))
    return UnionSide(live, ParquetSide(own, kind, pair), horizon) if own else live


def complete_from(folders: Iterable[Path], pair: Pair, horizon: UUID) -> UUID:
    """Return the id from which on nothing of the producer is missing, database and archives taken together.

    That is ``horizon``, or an earlier id if archives that were complete when they were taken reach up to it."""
    manifests = _of(folders, Content.of("producer", pair))
    complete = [part for manifest in manifests for part in manifest.parts if part.complete]
    for part in sorted(complete, key=lambda part: part.end, reverse=True):
        if part.first < horizon <= part.end:
            horizon = part.first
    return horizon


def archives_in(folder: Path) -> list[Manifest]:
    """Return the archives in a folder, or in folders within it."""
    found = [files.read_manifest(path.parent) for path in sorted(folder.rglob(files.MANIFEST))]
    if not found:
        raise SourceError(f"{folder} is no archive: there is no {files.MANIFEST} in it")
    return found


def _of(folders: Iterable[Path], content: Content) -> list[Manifest]:
    return [manifest for folder in folders for manifest in archives_in(folder) if manifest.content == content]


# --- write -----------------------------------------------------------------------------------------------

#: What becomes something else by itself.
_UNSETTLED: dict[Part, tuple[str, tuple[int, ...]]] = {
    "producer": ("state", tuple(each for each in ProducerState if each.open)),
    "consumer": ("status", tuple({InboxState.of(each) for each in Status if each.open})),
}


def write_archive(
    side: Side,
    ranges: Sequence[Range],
    folder: Path,
    *,
    kind: Part,
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
    column, states = _UNSETTLED[kind]
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        for left in folder.glob(f".*{files.TEMPORARY}"):
            left.unlink()
        parts: dict[Range, ArchivePart] = {}
        # Those that are there, listed or not: the last writer may not have come to its list.
        for path in sorted(folder.glob("*.parquet")):
            has, part = files.describe_part(path)
            if has != content:
                raise SourceError(f"{folder} has an archive of {has}; archive {content} into a folder of its own")
            parts[part.range] = part
        for number, each in enumerate(_to_read(ranges, list(parts.values())), 1):
            rows, since = side.read([each]), horizon
            if (old := parts.get(each)) is not None:
                # What was pruned meanwhile was settled in the end, and is in the archive only.
                rows, since = merged(rows, files.read_part(folder / old.file, content, [each])), old.horizon
            unsettled = pc.sum(pc.is_in(rows[column], value_set=pa.array(states, pa.int8()))).as_py() or 0
            assert each.end is not None  # noqa: S101 - refused above
            name = f"{each.first.hex}-{each.end.hex}.parquet"
            part = ArchivePart(name, each.first, each.end, rows.num_rows, unsettled, taken_at, since)
            files.write_part(folder / part.file, content, part, rows)
            parts[each] = part
            done(number)
        manifest = Manifest(folder, content, tuple(parts[each] for each in sorted(parts)))
        files.write_manifest(manifest)
    return manifest


def _to_read(ranges: Sequence[Range], parts: Sequence[ArchivePart]) -> list[Range]:
    """Return what isn't archived, or wasn't settled when it was."""
    archived = sorted(part.range for part in parts)
    new = [gap for each in ranges for gap in plan.without(each, _inside(each, archived))]
    return sorted([*new, *(part.range for part in parts if part.unsettled and _inside(part.range, ranges))])


def _inside(whole: Range, ranges: Sequence[Range]) -> list[Range]:
    return [part for each in ranges if (part := each.clipped(whole))]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder against other writers; the system lets go of it when this process ends, however it does."""
    import fcntl  # noqa: PLC0415 - Unix only; archives can be read on other systems

    with (folder / ".lock").open("wb") as lock:
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
    with snapshots_of(producer, consumer, waiting=lambda: progress.done(0)) as snapshots:
        ranges = _ranges(window, snapshots)

        def archive(kind: Part, snapshot: Snapshot) -> Manifest:
            progress.stage(f"{pair}: archive of the {kind}", len(ranges))
            return write_archive(
                PostgresSide(snapshot.access, kind, pair, snapshot.name, snapshot.settings),
                ranges,
                own / kind,
                kind=kind,
                pair=pair,
                taken_at=as_time(snapshot.now),
                horizon=pruned_below(snapshot.access, kind, snapshot.now),
                done=progress.done,
            )

        return archive("producer", snapshots.producer), archive("consumer", snapshots.consumer)


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
