"""What the migrations don't do to the process around them."""

from __future__ import annotations

import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from outbox.database import migration
from outbox.database.migration import chain

ROOT = Path(__file__).parents[2]


def test_prints_nothing(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither stdout nor stderr gets a word, and logging stays as it was."""
    handlers = list(logging.getLogger().handlers)
    migration.upgrade(url)
    migration.check(url)
    migration.statements()
    migration.downgrade(url)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers


def test_who_only_reads_pays_for_no_alembic(url: str) -> None:
    """Workers and commands are imported, and revisions read and required, without it."""
    code = (
        "import sys, outbox.cli, outbox.worker, sqlalchemy; from outbox.database import migration\n"
        "with sqlalchemy.create_engine(sys.argv[1]).connect() as connection:\n"
        "    migration.require(connection)\n"
        "    assert None not in migration.current(connection).values()\n"
        "sys.exit('alembic' in sys.modules)"
    )
    migration.upgrade(url)
    assert subprocess.run([sys.executable, "-c", code, url], check=False).returncode == 0


def test_parts_depend_on_the_newest_common() -> None:
    """Installing one part from the SQL text brings all of `common`."""
    for part in chain.PARTS:
        assert chain.head("common") in chain.applied([chain.head(part)])


def test_alembic_reads_the_same_chain() -> None:
    """What is read from the text of the files is what Alembic finds when it runs them."""
    config = Config()
    config.set_main_option("script_location", str(chain.folder()))
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    assert known == {revision for branch in chain.BRANCHES for revision in chain.history(branch)}
    for branch in chain.BRANCHES:
        line = [script.revision for script in scripts.walk_revisions("base", f"{branch}@head")]
        assert chain.history(branch) == [revision for revision in line if revision.startswith(f"{branch}_")]
        assert chain.applied([chain.head(branch)]) == set(line)


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
        "assert sys.argv[1] in chain.__file__ and sys.argv[1] in str(chain.folder())\n"
        "migration.upgrade(sys.argv[2]); print(migration.check(sys.argv[2]))"
    )
    run = [sys.executable, "-I", "-c", code, str(tmp_path / "installed"), url]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
