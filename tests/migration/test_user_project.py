"""The outbox beside a service that has Alembic migrations of its own, in the same database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect

from outbox.database import migration

MODELS = """
from sqlalchemy import Column, Integer, MetaData, Table, Text
metadata = MetaData()
Table("account", metadata, Column("id", Integer, primary_key=True), Column("owner", Text, nullable=False))
"""
INCLUDE_ALL = """
            include_schemas=True,"""
HELPERS = {
    "plain": "",
    "include_name": INCLUDE_ALL + " include_name=outbox.database.migration.include_name,",
    "include_object": INCLUDE_ALL + " include_object=outbox.database.migration.include_object,",
}


#: The command ``alembic``, once for each argument: to start a process takes longer than most of the commands.
ALEMBIC = "import sys; from alembic.config import main; [main(command.split()) for command in sys.argv[1:]]"


class Project:
    """A service's Alembic project, made and run by the real command line."""

    def __init__(self, folder: Path, url: str, options: str) -> None:
        self.folder = folder
        self.run("init alembic")
        (folder / "models.py").write_text(MODELS)
        ini = folder / "alembic.ini"
        ini.write_text(
            re.sub(r"(?m)^sqlalchemy.url = .*$", f"sqlalchemy.url = {url.replace('%', '%%')}", ini.read_text())
        )
        env = folder / "alembic" / "env.py"
        imports = "import outbox.database.migration\nfrom models import metadata as target_metadata"
        code = env.read_text().replace("target_metadata = None", imports)
        env.write_text(code.replace("connection=connection,", f"connection=connection,{options}"))

    def run(self, *commands: str, fails: bool = False) -> str:
        """Run commands of ``alembic``, one after another in one process; return all that they printed."""
        done = subprocess.run(
            [sys.executable, "-c", ALEMBIC, *commands],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def revision(self, message: str) -> str:
        """Return the code of a revision that was generated."""
        (made,) = (self.folder / "alembic" / "versions").glob(f"*_{message}.py")
        return made.read_text()


@pytest.mark.parametrize("helper", HELPERS)
def test_each_minds_its_own_tables(url: str, engine: Engine, tmp_path: Path, helper: str) -> None:
    """The service's upgrade, autogenerate and check never see our tables, nor do ours see the service's."""
    migration.upgrade(url)
    project = Project(tmp_path, url, HELPERS[helper])
    project.run("revision --autogenerate -m accounts")
    first = project.revision("accounts")
    assert "create_table('account'" in first
    assert "outbox" not in first
    assert "drop_table('account'" in first.partition("def downgrade")[2]
    assert "drop_table" not in first.partition("def downgrade")[0]
    said = project.run("upgrade head", "check", "revision --autogenerate -m nothing", "upgrade head")
    assert "No new upgrade operations detected" in said
    second = project.revision("nothing")
    assert second.count("pass") == 2
    assert "outbox" not in second

    assert migration.check(url) == []
    removed = migration.downgrade(url, ["producer"])
    assert migration.upgrade(url, ["producer"]) == removed[::-1]
    project.run("downgrade base")
    assert migration.check(url) == []
    assert "account" not in inspect(engine).get_table_names()
    migration.downgrade(url)
    project.run("upgrade head")
    assert "account" in inspect(engine).get_table_names()


def test_all_schemas_without_the_helper(url: str, tmp_path: Path) -> None:
    """Without the helper a service that looks at all schemas would drop our tables: what the helper is for."""
    migration.upgrade(url)
    project = Project(tmp_path, url, INCLUDE_ALL)
    assert "remove_table" in project.run("check", fails=True)


def test_helper_with_another_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper hides the schema it is given, or that of the environment."""
    assert migration.include_name("outbox", "schema", {}) is False
    assert migration.include_name(None, "schema", {}) is True
    assert migration.include_name("outbox", "table", {}) is True
    assert migration.include_name("outbox", "schema", {}, schema="mail") is True
    monkeypatch.setenv("OUTBOX_SCHEMA", "mail")
    assert migration.include_name("mail", "schema", {}) is False
