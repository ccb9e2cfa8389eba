"""The folder of an embedded server: ``data``, ``server.log``, ``outbox.conf``, ``password`` if it is kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outbox.embedded.binaries import Binaries
from outbox.embedded.errors import EmbeddedError

_TAIL = 4_000


def temporary() -> Path:
    """Make a folder that only this user can enter."""
    return Path(tempfile.mkdtemp(prefix="outbox-pg-")).resolve()


def kept(folder: Path, binaries: Binaries) -> Path:
    """Make ``folder`` if it isn't there, or check that its data fit ``binaries``.

    Raises:
        EmbeddedError: something else is in the folder, or data of another major version.

    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        strange = next(folder.iterdir(), None) and not (folder / "lock").exists()
    except OSError as error:
        raise EmbeddedError(f"{folder} can't be used: {error}") from error
    if strange:
        raise EmbeddedError(f"{folder} is not empty and was not made by an embedded server; choose another")
    version = folder / "data" / "PG_VERSION"
    if version.exists() and version.read_text().strip() != str(binaries.version[0]):
        raise EmbeddedError(
            f"{folder} holds data of PostgreSQL {version.read_text().strip()}, but found was {binaries}; "
            "mend: name its binaries in OUTBOX_PG_BIN, or choose another folder"
        )
    return folder.resolve()


def log_size(folder: Path) -> int:
    """Return the bytes in the server's log so far."""
    log = folder / "server.log"
    return log.stat().st_size if log.exists() else 0


def log_tail(folder: Path, since: int) -> str:
    """Return the last lines that were logged after the first ``since`` bytes."""
    try:
        with (folder / "server.log").open("rb") as log:
            log.seek(max(since, log.seek(0, os.SEEK_END) - _TAIL))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""
