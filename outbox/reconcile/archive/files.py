"""The files of an archive: each is whole, or isn't there under its name.

What an archive is made of, and how it is written down.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from outbox.errors import SourceError
from outbox.reconcile.job import Effect, Pair, Range
from outbox.reconcile.rows import CONSUMER, PRODUCER

Kind = Literal["producer", "consumer"]

#: The version of what is written; archives of other versions are refused.
VERSION = 1
FORMAT = "outbox archive"


@dataclass(frozen=True, slots=True)
class Content:
    """Which rows an archive has: those of one side of a pair."""

    kind: Kind
    pair: Pair

    @classmethod
    def of(cls, kind: Kind, pair: Pair) -> Content:
        """Return the content; the producer's rows know nothing of the consumer's business table."""
        return cls(kind, replace(pair, effect=None) if kind == "producer" else pair)

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Content:
        """Return what `told` wrote.

        Raises:
            KeyError, TypeError, ValueError: nothing of that kind.
        """
        effect = told["effect"]
        pair = Pair.of(told["topic"], told["group"], told["tags"], told["keys"], effect and Effect(**effect))
        if told["kind"] not in {"producer", "consumer"}:
            raise ValueError(told["kind"])
        return cls(told["kind"], pair)

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it, after format and version."""
        pair = self.pair
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "topic": pair.topic,
            "group": pair.group,
            "tags": None if pair.tags is None else sorted(pair.tags),
            "keys": None if pair.keys is None else sorted(pair.keys),
            "effect": None if pair.effect is None else asdict(pair.effect),
        }

    @property
    def schema(self) -> pa.Schema:
        """The columns of its rows."""
        return PRODUCER if self.kind == "producer" else CONSUMER

    def __str__(self) -> str:
        pair = self.told()
        rest = ", ".join(f"{name} {pair[name]}" for name in ("tags", "keys", "effect") if pair[name] is not None)
        return f"the {self.kind} of {self.pair}" + (f" ({rest})" if rest else "")


@dataclass(frozen=True, slots=True)
class Part:
    """All rows of a range of ids, as they were at ``taken_at`` by the database's clock.

    Ids below ``horizon`` may have been pruned by then. ``unsettled`` of the rows could still change.
    """

    file: str
    range: Range
    rows: int
    unsettled: int
    taken_at: dt.datetime
    horizon: UUID

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Self:
        """Return what `told` wrote.

        Raises:
            KeyError, TypeError, ValueError: nothing of that kind.
        """
        return cls(
            file=told["file"],
            range=Range(UUID(told["first"]), UUID(told["end"])),
            rows=told["rows"],
            unsettled=told["unsettled"],
            taken_at=dt.datetime.fromisoformat(told["taken_at"]),
            horizon=UUID(told["horizon"]),
        )

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "file": self.file,
            "first": str(self.range.first),
            "end": str(self.range.end),
            "rows": self.rows,
            "unsettled": self.unsettled,
            "taken_at": self.taken_at.isoformat(),
            "horizon": str(self.horizon),
        }

    @property
    def complete(self) -> bool:
        """Is every message of the range in it that ever was?"""
        return self.range.first >= self.horizon


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in an archive; the parts are in the order of their ids."""

    folder: Path
    content: Content
    parts: tuple[Part, ...]

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
    """Return what is in an archive.

    Raises:
        SourceError: the folder is no archive, or one of another version.
    """
    path = folder / MANIFEST
    try:
        told = json.loads(path.read_bytes())
        _check_version(told, path)
        return Manifest(folder, Content.read(told), tuple(map(Part.read, told["parts"])))
    except OSError as error:
        raise SourceError(f"{folder} is no archive: {MANIFEST} can't be read: {error.strerror}") from None
    except _NOT_AS_WRITTEN as error:
        raise SourceError(f"{folder} is no archive: {MANIFEST} isn't as it was written: {error!r}") from None


def write_manifest(manifest: Manifest) -> None:
    """Write the list of an archive's parts in place of the last one."""
    told = {**manifest.content.told(), "parts": [part.told() for part in manifest.parts]}
    with _whole(manifest.folder / MANIFEST) as file:
        file.write(json.dumps(told, indent=1).encode())


def describe_part(path: Path) -> tuple[Content, Part]:
    """Return what a part says of itself.

    Raises:
        SourceError: it is damaged, no part of an archive, or of another version.
    """
    with _reading(path):
        metadata = pq.read_schema(path).metadata or {}
    try:
        told = json.loads(metadata[_KEY])
        _check_version(told, path)
        return Content.read(told), Part.read(told)
    except _NOT_AS_WRITTEN as error:
        raise SourceError(f"{path} is no part of an archive: its metadata isn't as it was written: {error!r}") from None


def read_part(path: Path, content: Content, ranges: Sequence[Range]) -> pa.Table:
    """Return the rows of a part that lie in ranges; of the file, only what is needed for them is read.

    Raises:
        SourceError: it is damaged or gone, or has other columns.
    """
    with _reading(path):
        source = ds.dataset(path, format=_CHECKED)
        columns = source.schema.remove_metadata()
        if columns != content.schema:
            raise SourceError(
                f"{path} has other columns than this code reads ({', '.join(columns.names)}); "
                "read it with the version of outbox that wrote it, or archive its window again"
            )
        return source.to_table(filter=_within(ranges)).replace_schema_metadata()


def write_part(path: Path, content: Content, part: Part, rows: pa.Table) -> None:
    """Write a part."""
    told = json.dumps({**content.told(), **part.told()})
    with _whole(path) as file:
        pq.write_table(
            rows.replace_schema_metadata({_KEY: told}),
            file,
            row_group_size=_ROWS_OF_GROUP,
            compression="zstd",
            use_dictionary=[name for name in rows.column_names if name not in {"id", "digest"}],
            write_page_checksum=True,
        )


@contextmanager
def _whole(path: Path) -> Iterator[Any]:
    """Open a file that appears under its name when it is whole and on the disk, and never otherwise."""
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
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


def _check_version(told: Mapping[str, Any], path: Path) -> None:
    if told["format"] != FORMAT or told["version"] != VERSION:
        raise SourceError(
            f"{path} is of version {told['version']!r} of archives, and this code reads {VERSION}; "
            "read it with the version of outbox that wrote it, or archive its window again"
        )


def _within(ranges: Sequence[Range]) -> pc.Expression:
    """Return the filter of ranges; halved again and again, since Arrow walks it recursively."""
    if len(ranges) > 1:
        half = len(ranges) // 2
        return _within(ranges[:half]) | _within(ranges[half:])
    ((first, end),) = ranges
    from_first = pc.field("id") >= _scalar(first)
    return from_first if end is None else from_first & (pc.field("id") < _scalar(end))


def _scalar(id_: UUID) -> pa.Scalar:
    return pa.scalar(id_.bytes, pa.binary(16))
