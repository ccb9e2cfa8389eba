"""Archives: the rows that a comparison reads of one side, as Parquet files, for when the database has pruned them.

An archive is a folder of parts and their list, ``manifest.json``. Each part has all rows of a range of ids, sorted,
and says what it is in its own metadata. Parts don't overlap. A part appears under its name when it is whole, and in
the list after that; so whatever happens to the writer, what is listed can be read, and a second try goes on.

A row is archived as it was at the time. So take an archive of messages that are long settled, and before the retention
ends; a part in which some weren't is read again when the same window is archived again.
"""

from outbox.reconcile.archive.files import Manifest, Part, read_manifest
from outbox.reconcile.archive.sides import ParquetSide, UnionSide, archives_in, complete_from, with_archives
from outbox.reconcile.archive.write import take_archive, write_archive

__all__ = [
    "Manifest",
    "ParquetSide",
    "Part",
    "UnionSide",
    "archives_in",
    "complete_from",
    "read_manifest",
    "take_archive",
    "with_archives",
    "write_archive",
]
