"""The outbox beside a service that has Alembic migrations of its own, in the same database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from outbox.database import migration
from outbox.database.migration import chain
from outbox.errors import InvalidSettings
from tests.doctor.support import raw
from tests.kit.revisions import next_release
from tests.kit.warm import warm_python

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
            [warm_python(), "-c", ALEMBIC, *commands],
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


# --- in the service's own history -------------------------------------------------------------------------------------

REVISION = """
from pathlib import Path
from alembic import op
from outbox.database import migration
from outbox.database.migration import chain
chain.folder = lambda: Path({folder!r})
revision, down_revision, branch_labels, depends_on = {id!r}, {before!r}, None, None

def upgrade():
    for statement in migration.statements({start!r}, {end!r}):
        op.execute(statement)

def downgrade():
    for statement in migration.statements({end!r} or {newest!r}, {start!r}):
        op.execute(statement)
"""
ROWS = "SELECT string_agg(version_num, ' ' ORDER BY version_num) FROM outbox.outbox_version"
FIRST = tuple(chain.head(part) for part in migration.PARTS)


def scalar(engine: Engine, sql: str) -> object:
    """Return the first value of a query."""
    with engine.connect() as connection:
        return connection.scalar(text(sql))


@pytest.fixture
def newest(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The revisions of the next release, which this code is."""
    with next_release(tmp_path / "next") as install:
        yield tuple(install())


@pytest.fixture
def service(url: str, tmp_path: Path, newest: tuple[str, ...]) -> Project:
    """A service whose history has an own table, our first revisions, and what came after these."""
    project = Project(tmp_path, url, "")
    project.run("revision --autogenerate -m accounts")
    (made,) = (tmp_path / "alembic" / "versions").glob("*_accounts.py")
    first = re.search(r'(?m)^revision: str = ["\'](\w+)', made.read_text())
    assert first is not None
    before = first[1]
    for number, (start, end) in enumerate((((), FIRST), (FIRST, None)), 2):
        folder = str(tmp_path / "next")
        code = REVISION.format(id=f"own{number}", before=before, start=start, end=end, newest=newest, folder=folder)
        (tmp_path / "alembic" / "versions" / f"own{number}.py").write_text(code)
        before = f"own{number}"
    return project


def test_in_the_service_history(url: str, engine: Engine, service: Project, newest: tuple[str, ...]) -> None:
    """Our tables come and go with the service's revisions, as if `upgrade` had made them; autogenerate sees nothing."""
    service.run("upgrade own2")
    assert migration.current(url) == {"common": "common_0001", "producer": FIRST[0], "consumer": FIRST[1]}
    said = service.run("upgrade head", "check", "revision --autogenerate -m nothing", "upgrade head")
    assert "No new upgrade operations detected" in said
    assert service.revision("nothing").count("pass") == 2
    assert tuple(migration.current(url)[part] for part in migration.PARTS) == newest
    ours = scalar(engine, ROWS)
    assert migration.upgrade(url) == []
    migration.downgrade(url)
    migration.upgrade(url)
    assert scalar(engine, ROWS) == ours
    service.run("downgrade own2")
    assert migration.current(url)["producer"] == FIRST[0]
    service.run("downgrade -1")
    assert migration.current(url) == dict.fromkeys(chain.BRANCHES)
    assert "account" in inspect(engine).get_table_names()


def test_in_the_service_history_offline(url: str, engine: Engine, service: Project, newest: tuple[str, ...]) -> None:
    """What Alembic writes out for the service's administrators makes the same tables."""
    written = service.run("upgrade head --sql")
    sql = written[written.index("BEGIN;") : written.rindex("COMMIT;") + len("COMMIT;")]
    with closing(raw(url, autocommit=True)) as connection:
        connection.execute("DROP TABLE alembic_version")  # autogenerate has made it
        connection.execute(re.sub(r"(?m)^INFO .*$", "", sql).encode())
    assert tuple(migration.current(url)[part] for part in migration.PARTS) == newest
    assert all("note" in line or "_tag" in line for line in migration.check(url))
    assert "account" in inspect(engine).get_table_names()


def test_statements(newest: tuple[str, ...]) -> None:
    """None of them has a parameter in SQLAlchemy's eyes, nor is more than one; what can't be is refused."""
    made = migration.statements(schema="mail")
    assert made == migration.statements((), newest, schema="mail")
    for statement in made:
        assert not text(statement)._bindparams, statement
    assert migration.statements(newest) == []
    assert all("producer" not in each for each in migration.statements(parts=["consumer"]) if "version" in each)
    with pytest.raises(InvalidSettings, match="no revision 'producer_9'"):
        migration.statements("producer_9")
    with pytest.raises(InvalidSettings, match="as two migrations"):
        migration.statements((newest[0], FIRST[1]), (FIRST[0], newest[1]))
