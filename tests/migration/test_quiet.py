"""What the migrations don't do to the process around them."""

from __future__ import annotations

import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outbox.database import migration
from outbox.database.migration import chain

ROOT = Path(__file__).parents[2]


def test_prints_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither stdout nor stderr gets a word, and logging stays as it was."""
    handlers = list(logging.getLogger().handlers)
    migration.upgrade(url)
    migration.check(url)
    migration.sql()
    migration.downgrade(url)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers


def test_only_here_is_alembic_imported() -> None:
    """Settings and schema don't pay for Alembic."""
    code = "import sys, outbox.database.tables, outbox.settings; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parts_depend_on_the_newest_common() -> None:
    """Installing one part from the SQL text brings all of `common`."""
    for part in chain.PARTS:
        assert chain.head("common") in chain.applied([chain.head(part)])


def test_revision_ids_begin_with_their_branch() -> None:
    """A revision's id tells its part, also to code which doesn't know the revision."""
    found = {script.revision for script in chain.scripts().walk_revisions()}
    assert found == {revision for branch in chain.BRANCHES for revision in chain.history(branch)}
    assert all(r.startswith(f"{b}_") for b in chain.BRANCHES for r in chain.history(b))


def test_wheel_has_the_migrations(tmp_path: Path, url: str) -> None:
    """The built package finds the revisions inside itself."""
    pytest.importorskip("hatchling")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("outbox*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from outbox.database import migration; from outbox.database.migration import chain\n"
        "assert sys.argv[1] in chain.__file__ and sys.argv[1] in chain.scripts().dir\n"
        "migration.upgrade(sys.argv[2]); print(migration.check(sys.argv[2]))"
    )
    run = [sys.executable, "-I", "-c", code, str(tmp_path / "installed"), url]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
