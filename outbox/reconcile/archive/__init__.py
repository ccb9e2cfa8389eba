"""Archives: the rows that a comparison reads of one side, as Parquet files, for when the database has pruned them.

An archive is a folder of parts and their list, ``manifest.json``. Each part has all rows of a range of ids, sorted,
and says what it is in its own metadata. Parts don't overlap. A part appears under its name when it is whole, and in
the list after that; so whatever happens to the writer, what is listed can be read, and a second try goes on.

A row is archived as it was at the time. So take an archive of messages that are long settled, and before the retention
ends; a part in which some weren't is read again when the same window is archived again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa

from outbox.errors import SourceError
from outbox.reconcile.archive.files import MANIFEST, Content, Kind, Manifest, read_manifest, read_part
from outbox.reconcile.compare import Side
from outbox.reconcile.job import FIRST_ID, Pair, Range
from outbox.reconcile.rows import fixed_ids


def clipped(each: Range, within: Range) -> Range | None:
    """Return the part of a range that lies within another; None if there is none."""
    first = max(each.first, within.first)
    ends = [end for end in (each.end, within.end) if end is not None]
    end = min(ends, default=None)
    return Range(first, end) if end is None or first < end else None


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
    kind: Kind
    pair: Pair

    def read(self, ranges: Sequence[Range]) -> pa.Table:
        """Return the rows of the ranges, sorted by id (`rows.PRODUCER` or `rows.CONSUMER`).

        Raises:
            SourceError: a folder is no archive, or one of something else; a file is damaged or gone.
        """
        content = Content.of(self.kind, self.pair)
        newest_first = sorted((_manifest(folder, content) for folder in self.folders), key=_taken, reverse=True)
        return reduce(merged, (_read(manifest, ranges) for manifest in newest_first), content.schema.empty_table())


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
        """Return the rows of the ranges, sorted by id.

        Raises:
            SourceError: the database or an archive can't be read.
        """
        old = [part for each in ranges if (part := clipped(each, Range(FIRST_ID, self.horizon)))]
        # The database first: what is pruned after that, or was before, is in the one or in the other.
        live = self.live.read(ranges)
        return merged(live, self.archive.read(old)) if old else live


def with_archives(live: Side, folders: Iterable[Path], kind: Kind, pair: Pair, horizon: UUID) -> Side:
    """Return a side that reads archives for what its database may have pruned, the ids below ``horizon``.

    The folders, and those in them, may have archives of other sides and pairs, which are left alone.

    Raises:
        SourceError: a folder has no archive in it.
    """
    own = tuple(manifest.folder for manifest in _of(folders, Content.of(kind, pair)))
    return UnionSide(live, ParquetSide(own, kind, pair), horizon) if own else live


def complete_from(folders: Iterable[Path], pair: Pair, horizon: UUID) -> UUID:
    """Return the id from which on nothing of the producer is missing, database and archives taken together.

    That is ``horizon``, or an earlier id if archives that were complete when they were taken reach up to it.

    Raises:
        SourceError: a folder has no archive in it.
    """
    manifests = _of(folders, Content.of("producer", pair))
    complete = [part.range for manifest in manifests for part in manifest.parts if part.complete]
    for first, end in sorted(complete, key=lambda each: each.end or each.first, reverse=True):
        if end is not None and first < horizon <= end:
            horizon = first
    return horizon


def archives_in(folder: Path) -> list[Manifest]:
    """Return the archives in a folder, or in folders within it.

    Raises:
        SourceError: there are none, or one of them can't be read.
    """
    found = [read_manifest(path.parent) for path in sorted(folder.rglob(MANIFEST))]
    if not found:
        raise SourceError(f"{folder} is no archive: there is no {MANIFEST} in it")
    return found


def _of(folders: Iterable[Path], content: Content) -> list[Manifest]:
    return [manifest for folder in folders for manifest in archives_in(folder) if manifest.content == content]


def _manifest(folder: Path, content: Content) -> Manifest:
    manifest = read_manifest(folder)
    if manifest.content != content:
        raise SourceError(f"{folder} is an archive of {manifest.content}, not of {content}")
    return manifest


def _read(manifest: Manifest, ranges: Sequence[Range]) -> pa.Table:
    content = manifest.content
    needed = [part for part in manifest.parts if any(clipped(part.range, each) for each in ranges)]
    tables = [read_part(manifest.folder / part.file, content, ranges) for part in needed]
    return pa.concat_tables([content.schema.empty_table(), *tables])


def _taken(manifest: Manifest) -> float:
    return manifest.taken_at.timestamp() if manifest.taken_at else 0.0
