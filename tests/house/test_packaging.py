"""The distribution: its name in what the texts tell people to install, its wheel, and the types that a user sees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from outbox.errors import DISTRIBUTION, pip_install
from tests.house.checkout import ROOT, files

SAMPLE = ROOT / "tests" / "unit" / "typed_api.py"
#: The stranger's distribution: the bare name after "pip install", with or without options, quotes and extras.
_STRANGER = re.compile(r"pip install(?:\s+-\S+)*\s+['\"]?outbox(?![-\w/.])")
#: What the source distribution takes as a whole; files that git doesn't know yet are those of work that goes on.
_FOLDERS = ("outbox", "docs", "examples", "benchmarks", "migrations", "tests", ".ci")
_TEXTS = {".py", ".pyi", ".md", ".toml", ".html", ".txt", ".yml", ".yaml", ".sh", ".js"}


def test_no_text_installs_the_strangers_package() -> None:
    """``outbox`` in the package index is somebody else's SMTP client: no text of ours makes people install it."""
    texts = [path for folder in _FOLDERS for path in files(folder, *_TEXTS, "")]
    texts += [path for path in ROOT.iterdir() if path.suffix in _TEXTS]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts
        if path.is_file() and path != Path(__file__)
        for match in _STRANGER.finditer(path.read_text("utf-8", "replace"))
    ]
    assert found == []
    assert all(_STRANGER.search(bad) for bad in ("pip install outbox", "pip install -U 'outbox[demo]'"))
    assert not any(_STRANGER.search(good) for good in (pip_install(), pip_install("demo"), "pip install outbox/dist"))


def test_the_name_is_declared_once_for_the_code() -> None:
    """The constant that messages are made from is the name in the package's metadata, and every extra is one of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    extras = project["optional-dependencies"]
    mentioned = {
        extra
        for path in (ROOT / "outbox").rglob("*.py")
        for each in re.findall(r"pip_install\(([\"'][\"'a-z, -]+)\)", path.read_text("utf-8"))
        for extra in re.findall(r"[\w-]+", each)
    }
    assert mentioned
    assert mentioned <= set(extras)
    assert not [each for extra in ("demo", "reconcile", "console") for each in extras[extra] if "spark" in each]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as it would be uploaded."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh virtual environment: the wheel is installed there, and the libraries of this one."""
    home = tmp_path_factory.mktemp("user") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip())
    # Folders that a .pth file names have no .pth files of their own: an editable install of the checkout isn't there.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(packages),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return python


@pytest.mark.slow
def test_the_wheel_has_what_it_needs(wheel: Path) -> None:
    """The types' marker, the stub of the public names, migrations, pages and the demo are in; tests are not."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "outbox/py.typed",
        "outbox/__init__.pyi",
        "outbox/migrations/env.py",
        "outbox/examples/bank_transfer/demo.py",
        "outbox/console/templates/overview.html",
        "outbox/telemetry/files/alerts.yml",
        "outbox/telemetry/files/dashboard.json",
    } <= names
    assert wheel.name.startswith(DISTRIBUTION.replace("-", "_") + "-")
    assert {name.partition("/")[0] for name in names} == {"outbox", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}


@pytest.mark.slow
def test_the_source_distribution_has_the_whole_house(tmp_path: Path) -> None:
    """Each file that git knows is in, but for what is about the repository; and nothing that was made here."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except (FileNotFoundError, PermissionError):
        listed = ""
    if not listed:
        pytest.skip("git doesn't know this checkout")
    known = {name for name in listed.splitlines() if not name.startswith((".github/", ".gitignore"))}
    assert known - names == set()
    assert {name for name in names - known if not name.startswith(tuple(f"{each}/" for each in _FOLDERS))} == {
        ".gitignore",
        "PKG-INFO",
    }


@pytest.mark.slow
def test_the_installed_wheel_works(installed: Path, tmp_path: Path) -> None:
    """The public names can be imported, and the command line starts."""
    code = "import outbox; print(outbox.__file__); from outbox import *; print(Outbox, Worker)"
    ran = subprocess.run(
        [installed, "-c", code], cwd=tmp_path, env=_bare(), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert str(installed.parent.parent) in ran.stdout
    command = [str(installed), "-m", "outbox.cli", "version"]
    ran = subprocess.run(command, cwd=tmp_path, env=_bare(), capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("outbox "), ran.stderr


@pytest.mark.slow
def test_mypy_accepts_an_application(installed: Path, tmp_path: Path) -> None:
    """mypy, strictly, reads the types of the wheel: every public call, and each mistake in the sample is one."""
    shutil.copy(SAMPLE, tmp_path / "app.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--python-executable", str(installed)]
    # What it knows of the libraries is kept; of another wheel it knows that it is another one.
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "wheel")]
    ran = subprocess.run([*command, "app.py"], cwd=tmp_path, env=_bare(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_pyright_accepts_an_application(installed: Path, tmp_path: Path) -> None:
    """So does pyright (the wheel basedpyright brings its own Node), which also finds each mistake of the sample."""
    text = SAMPLE.read_text("utf-8")
    (tmp_path / "app.py").write_text(text)
    (tmp_path / "wrong.py").write_text(re.sub(r" +# type: ignore\[[^\]]*\]", "", text))
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "reportUnusedFunction": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", str(installed)]
    ran = subprocess.run(command, cwd=tmp_path, env=_bare(), capture_output=True, text=True, check=False)
    errors = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in json.loads(ran.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert [error for error in errors if error[0] == "app.py"] == []
    wrong = {number for number, line in enumerate(text.splitlines(), 1) if "# type: ignore[" in line}
    assert {line for _, line, _ in errors} == wrong, errors


@pytest.mark.slow
def test_the_types_are_complete(installed: Path, tmp_path: Path) -> None:
    """Nothing that the wheel exports has a type which one type checker could infer otherwise than another."""
    command = [sys.executable, "-m", "basedpyright", "--verifytypes", "outbox", "--ignoreexternal", "--outputjson"]
    command += ["--pythonpath", str(installed)]
    # Before the libraries of this environment, in which a checkout may be installed.
    (packages,) = installed.parent.parent.glob("lib/*/site-packages")
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**_bare(), "PYTHONPATH": os.pathsep.join([str(packages), sysconfig.get_path("purelib")])},
        capture_output=True,
        text=True,
        check=False,
    )
    completeness = json.loads(ran.stdout)["typeCompleteness"]
    assert completeness["packageRootDirectory"] == str(packages / "outbox")
    # The demo and the migrations in the wheel are run, not imported by users.
    run = ("outbox.examples.", "outbox.migrations.")
    symbols = [symbol for symbol in completeness["symbols"] if not symbol["name"].startswith(run)]
    assert len(symbols) > 1_000
    assert [f"{symbol['name']}: {each['message']}" for symbol in symbols for each in symbol["diagnostics"]] == []


def _bare() -> dict[str, str]:
    """The environment without what would show the checkout to the installed package."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}
