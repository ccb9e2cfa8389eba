"""The rules of the house, run as tests: what is imported by whom, what importing costs, what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

import outbox
from tests.house.circles import circles

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this interpreter in the checkout."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    """Modules import only what the layers allow."""
    # What the console script `lint-imports` calls.
    result = run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_module_imports_itself_by_way_of_others() -> None:
    """There is no circle of imports, also none in a function or for types alone."""
    assert circles(ROOT / "outbox") == []


def test_a_worker_that_should_be_refused_ends_with_its_test() -> None:
    """One that starts all the same would go on beside all later tests of its process: `with Worker(…)` ends it."""
    left = re.compile(r"raises\([^\n]*\n? +Worker\([^\n]*\)\.start\(\)")
    assert [str(path) for path in (ROOT / "tests").rglob("*.py") if left.search(path.read_text("utf-8"))] == []


def test_style_holds() -> None:
    """Ruff finds nothing to mend."""
    result = run("-m", "ruff", "check", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_outbox_imports_nothing_heavy() -> None:
    """`from outbox import Outbox` brings SQLAlchemy's core and none of the optional or heavy libraries."""
    code = "import sys; from outbox import Outbox, Message; print(' '.join(m.partition('.')[0] for m in sys.modules))"
    imported = set(run("-c", code).stdout.split())
    assert "sqlalchemy" in imported
    assert not imported & {
        "alembic",
        "apscheduler",
        "typer",
        "click",
        "rich",
        "pydantic",
        "psycopg",
        "psycopg2",
        "asyncpg",
        "sqlmodel",
        "flask",
        "django",
        "pyspark",
        "fastapi",
        "opentelemetry",
        "prometheus_client",
        "grpc",
        "google",
    }


def test_what_is_tried_with_the_oldest_libraries_needs_few() -> None:
    """`.ci/run` has hardly any other library there: a module of these tests that imports one would fail there alone."""
    _, _, rest = (ROOT / ".ci" / "run").read_text().partition('"$oldest" -m pytest')
    command, _, _ = rest.partition("\n#")
    folders = re.findall(r"tests/\w+", command)
    absent = ("django", "duckdb", "flask", "hatchling", "numpy", "pandas", "pyarrow", "pyspark", "sqlmodel")
    code = f"""if True:
        import importlib, pathlib, sys
        class Absent:
            def find_spec(name, *_):
                assert name.partition(".")[0] not in {absent}, name
        sys.meta_path.insert(0, Absent)
        for path in (path for each in {folders} for path in pathlib.Path(each).rglob("*.py")):
            importlib.import_module(".".join(path.with_suffix("").parts))"""
    assert run("-c", code).stderr == ""


def test_importing_outbox_leaves_the_orm_to_its_users() -> None:
    """The ORM is imported by whoever passes a Session, not by `import outbox`."""
    code = "import sys; from outbox import Outbox; print('sqlalchemy.orm' in sys.modules)"
    assert run("-c", code).stdout.strip() == "False"


def modules() -> list[Path]:
    """Return the modules of the package."""
    return sorted((ROOT / "outbox").rglob("*.py"))


def test_a_module_is_one_whole_thought() -> None:
    """No module has over 700 lines, no package over 12 modules beside its face, and hardly any module is a fragment.

    How many modules there are is a matter of what the package does. Whether it is cut too fine shows in their lengths:
    each has a head of its own to read, and a thought that is spread over five files is read five times. So a module has
    40 lines at least, unless a framework or a command looks for it by its name, and half of them have 200.
    """
    folders = ("outbox", "examples", "migrations")
    lengths = {path: len(path.read_text().splitlines()) for each in folders for path in (ROOT / each).rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > 700} == {}
    # Django's migrations are copies of one text, which tests/house/test_django.py holds to it.
    written = [path for path in modules() if path.parent.name != "migrations"]
    packages = Counter(path.parent for path in written if path.name != "__init__.py")
    assert {str(path): n for path, n in packages.items() if n > 12} == {}
    by_name = {"outbox/django/management/commands/outbox_run.py", "outbox/reconcile/spark/submit.py"}
    own = {str(path.relative_to(ROOT)): lengths[path] for path in written if not path.name.startswith("__")}
    assert {path: n for path, n in own.items() if n < 40} == {path: own[path] for path in by_name}
    assert median(own.values()) >= 200


def test_every_public_name_exists_and_is_described() -> None:
    """What `__all__` promises can be imported, and has a docstring where it can have one."""
    values = {name: getattr(outbox, name) for name in outbox.__all__}
    assert [name for name, value in values.items() if isinstance(value, type) and not value.__doc__] == []


def test_readme_opens_with_the_two_commands() -> None:
    """The README has a command for the demo and one for the tests, each in one code block."""
    readme = (ROOT / "README.md").read_text()
    for marker in ("demo-command", "test-command"):
        block = re.search(rf"<!-- {marker} -->\n```\w*\n(.+?)\n```\n<!-- end -->", readme, re.DOTALL)
        assert block, marker
        assert "\n" not in block[1]
