"""Bring this package to executors that aren't threads of the driver: as a zip, with the version that the driver has."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.reconcile.spark.place import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A zip has no older time. A fixed one makes the same zip of the same files.
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def ship(spark: SparkSession, place: Place, folder: Path) -> None:
    """Give the executors this package, unless they have it. ``folder`` lasts as long as a session of ours."""
    if place.in_process:
        return
    if place.connect:
        spark.addArtifacts(str(package_zip(folder)), pyfile=True)
        return
    context = spark.sparkContext
    # An executor that joins later fetches it then: it must be there as long as the context, whosever that is.
    context.addPyFile(str(package_zip(Path(context._temp_dir))))


def package_zip(folder: Path) -> Path:
    """Write the package into ``folder``; the name of the zip is the hash of its files."""
    contents = sorted(_sources(files("outbox"), "outbox"))
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
    path = folder / f"outbox-{digest}.zip"
    if not path.exists():
        new = path.with_suffix(".new")
        with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents:
                archive.writestr(zipfile.ZipInfo(name, _LONG_AGO), content)
        new.replace(path)
    return path


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        path = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry, path)
        elif entry.is_file() and not entry.name.endswith(".pyc"):
            yield path, entry.read_bytes()
