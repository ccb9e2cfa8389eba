"""Where a report goes: a file or folder of this host, or what a URL names, as far as pyarrow or fsspec can write it.

pyarrow knows ``s3://``, ``gs://``, ``abfs://``, ``hdfs://`` and ``file://`` by itself, and takes credentials from
where their own tools do. All other schemes are those of fsspec, which must be installed with what it needs for one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit
from uuid import uuid4

from outbox.errors import InvalidSettings
from outbox.text import whole

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: What pyarrow calls those in which an object is there when all of it was written.
_OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})
_CHUNK = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Remote:
    """A URL to which a report is written, a file's or a folder's."""

    url: str

    def __truediv__(self, name: str) -> Remote:
        parts = urlsplit(self.url)
        return Remote(parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl())

    def __str__(self) -> str:
        # Options of a store may have a secret.
        return urlsplit(self.url)._replace(query="").geturl()

    def opened(self) -> tuple[FileSystem, str]:
        """Return the file system, and the path in it.

        Raises:
            InvalidSettings: nothing that is installed can write there; names the mend.
        """
        import pyarrow as pa  # noqa: PLC0415 - of this form alone
        from pyarrow import fs  # noqa: PLC0415 - of this form alone

        try:
            return cast("tuple[FileSystem, str]", fs.FileSystem.from_uri(self.url))
        except pa.ArrowInvalid as error:
            if "Unrecognized filesystem" not in str(error):
                why = str(error).replace(self.url, str(self))
                raise InvalidSettings(f"{self}: {why}; write it as FileSystem.from_uri of pyarrow reads it") from None
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - a library of the user's

            system, path = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise InvalidSettings(
                f"{self}: pyarrow can't write there, nor can fsspec: {error}; mend: install fsspec with what it "
                f"needs for {urlsplit(self.url).scheme}://"
            ) from None
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path


#: A path of this host, or a URL.
Destination = Path | Remote


def destination(text: object) -> Destination:
    """Return where a text says that a report goes.

    Raises:
        ValueError: a URL with a password, which logs would show.
    """
    if not isinstance(text, str) or "://" not in text:
        return Path(cast("Any", text))
    if urlsplit(text).password is not None:
        raise ValueError("a URL without a password; credentials come from where the store's own tools have them")
    return Remote(text)


@contextmanager
def whole_at(where: Destination) -> Iterator[BinaryIO]:
    """Open a file that appears under its name when it is whole, and never otherwise; its folder is made if need be.

    Raises:
        OSError: it can't be written.
    """
    if isinstance(where, Path):
        where.parent.mkdir(parents=True, exist_ok=True)
        with whole(where) as file:
            yield file
        return
    with TemporaryFile() as file:
        yield file
        file.seek(0)
        system, path = where.opened()
        if system.type_name in _OBJECT_STORES:
            _copied(file, system, path)
            return
        folder, _, name = path.rpartition("/")
        system.create_dir(folder, recursive=True)
        temporary = f"{folder}/.{name}.{uuid4().hex}"
        _copied(file, system, temporary)
        # HDFS, say, moves nothing over what is there.
        if system.type_name != "local" and system.get_file_info(path).is_file:
            system.delete_file(path)
        system.move(temporary, path)


def _copied(file: BinaryIO, system: FileSystem, path: str) -> None:
    try:
        with system.open_output_stream(path) as stream:
            shutil.copyfileobj(file, cast("BinaryIO", stream), _CHUNK)
    except BaseException:
        # Its stream was closed with what it had by then, and a part of a file must not be taken for all of it.
        with suppress(OSError):
            system.delete_file(path)
        raise
