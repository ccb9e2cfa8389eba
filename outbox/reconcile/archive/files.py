"""The files of an archive, and what they say of themselves: each is whole, or isn't there under its name."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from outbox.errors import SourceError
from outbox.reader import Reader, plain
from outbox.reconcile.job import Pair, Part, Range
from outbox.reconcile.rows import SCHEMAS

#: The version of what is written; archives of other versions are refused.
VERSION = 2
FORMAT = "outbox archive"


@dataclass(frozen=True, slots=True)
class Content:
    """Which rows an archive has: those of one side of a pair."""

    kind: Part
    pair: Pair

    @classmethod
    def of(cls, kind: Part, pair: Pair) -> Content:
        """Return the content; the producer's rows know nothing of the consumer's business table."""
        return cls(kind, replace(pair, effect=None) if kind == "producer" else pair)

    @property
    def header(self) -> dict[str, Any]:
        """The content as JSON has it, after format and version."""
        return {"format": FORMAT, "version": VERSION, **plain(self)}

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return SCHEMAS[self.kind]

    def __str__(self) -> str:
        values = plain(self.pair)
        rest = ", ".join(
            f"{name} {values[name]}" for name in ("tags", "keys", "headers", "effect") if values[name] is not None
        )
        return f"the {self.kind} of {self.pair}" + (f" ({rest})" if rest else "")


@dataclass(frozen=True, slots=True)
class ArchivePart:
    """All rows of the ids from ``first`` up to ``end``, as they were at ``taken_at`` by the database's clock.

    Ids below ``horizon`` may have been pruned by then. ``unsettled`` of the rows could still change.
    """

    file: str
    first: UUID
    end: UUID
    rows: int
    unsettled: int
    taken_at: dt.datetime
    horizon: UUID

    @property
    def range(self) -> Range:
        """The ids of its rows."""
        return Range(self.first, self.end)

    @property
    def complete(self) -> bool:
        """Is every message of the range in it that ever was?"""
        return self.first >= self.horizon


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in an archive; the parts are in the order of their ids."""

    folder: Path
    content: Content
    parts: tuple[ArchivePart, ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(part.rows for part in self.parts)

    @property
    def taken_at(self) -> dt.datetime | None:
        """When its newest part was taken."""
        return max((part.taken_at for part in self.parts), default=None)


MANIFEST = "manifest.json"
#: How the name of a file ends that isn't whole yet.
TEMPORARY = ".tmp"

#: Under which a part says in its own metadata what it is.
_KEY = b"outbox"
#: Small enough that a range of a few hundred ids doesn't read much more.
_ROWS_OF_GROUP = 10_000
_CHECKED = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
_NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, AttributeError)


def read_manifest(folder: Path) -> Manifest:
    """Return what is in an archive."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_bytes())
        content = _content_of(values, path)
        return Manifest(folder, content, tuple(Reader().read(ArchivePart, each) for each in values["parts"]))
    except OSError as error:
        raise SourceError(f"{folder} is no archive: {MANIFEST} can't be read: {error.strerror}") from None
    except _NOT_AS_WRITTEN as error:
        raise SourceError(f"{folder} is no archive: {MANIFEST} isn't as it was written: {error!r}") from None


def write_manifest(manifest: Manifest) -> None:
    """Write the list of an archive's parts in place of the last one."""
    values = {**manifest.content.header, "parts": plain(manifest.parts)}
    with whole(manifest.folder / MANIFEST) as file:
        file.write(json.dumps(values, indent=1).encode())


def describe_part(path: Path) -> tuple[Content, ArchivePart]:
    """Return what a part says of itself."""
    with _reading(path):
        metadata = pq.read_schema(path).metadata or {}
    try:
        values = json.loads(metadata[_KEY])
        return _content_of(values, path), Reader().read(ArchivePart, values["part"])
    except _NOT_AS_WRITTEN as error:
        raise SourceError(f"{path} is no part of an archive: its metadata isn't as it was written: {error!r}") from None


def read_part(path: Path, content: Content, ranges: Sequence[Range]) -> pa.Table:
    """Return the rows of a part that lie in ranges; of the file, only what is needed for them is read."""
    with _reading(path):
        source = ds.dataset(path, format=_CHECKED)
        columns = source.schema.remove_metadata()
        if columns != content.schema:
            raise SourceError(
                f"{path} has other columns than this code reads ({', '.join(columns.names)}); "
                "read it with the version of outbox that wrote it, or archive its window again"
            )
        return source.to_table(filter=_within(ranges)).replace_schema_metadata()


def write_part(path: Path, content: Content, part: ArchivePart, rows: pa.Table) -> None:
    """Write a part."""
    values = json.dumps({**content.header, "part": plain(part)})
    with whole(path) as file:
        pq.write_table(
            rows.replace_schema_metadata({_KEY: values}),
            file,
            row_group_size=_ROWS_OF_GROUP,
            compression="zstd",
            use_dictionary=[name for name in rows.column_names if name not in {"id", "digest"}],
            write_page_checksum=True,
        )


@contextmanager
def whole(path: Path) -> Iterator[Any]:
    """Open a file that appears under its name when it is whole and on the disk, and never otherwise."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into a `SourceError` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise SourceError(f"{path} is gone; restore it from a backup, or archive its window again") from None
    except (OSError, pa.ArrowException) as error:
        raise SourceError(f"{path} can't be read, and may be damaged: {error}") from None


def _content_of(values: Mapping[str, Any], path: Path) -> Content:
    """Return what `Content.header` wrote; another error than `SourceError` is of what isn't as it was written."""
    if values["format"] != FORMAT or values["version"] != VERSION:
        raise SourceError(
            f"{path} is of version {values['version']!r} of archives, and this code reads {VERSION}; "
            "read it with the version of outbox that wrote it, or archive its window again"
        )
    return Reader().read(Content, {name: values[name] for name in ("kind", "pair")})


def _within(ranges: Sequence[Range]) -> pc.Expression:
    """Return the filter of ranges; halved again and again, since Arrow walks it recursively."""
    if len(ranges) > 1:
        half = len(ranges) // 2
        return _within(ranges[:half]) | _within(ranges[half:])
    ((first, end),) = ranges
    from_first = pc.field("id") >= pa.scalar(first.bytes, pa.binary(16))
    return from_first if end is None else from_first & (pc.field("id") < pa.scalar(end.bytes, pa.binary(16)))
