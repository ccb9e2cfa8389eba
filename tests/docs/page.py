"""Read the code blocks of a page, and run them one after another as a reader would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from outbox.errors import DISTRIBUTION
from tests.kit import wait_until
from tests.kit.warm import warm_python

ROOT = Path(__file__).parents[2]
#: A block of code; or Python in a comment, which sets up what the page's examples need and its readers have.
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)(?P<attributes>[^\n]*)\n(?P<text>.*?)\n(?P=indent)```$"
    r"|^<!-- setup\n(?P<setup>.*?)\n-->$",
    re.DOTALL | re.MULTILINE,
)
#: Commands that go on until they are stopped.
_SERVICES = ("outbox run", "outbox console --", "python -m outbox.embedded", "python manage.py outbox_run")
#: What is in the folder of programs of a virtual environment.
_PROGRAMS = {"python": "", "outbox": "-m outbox.cli", "pytest": "-m pytest", "django-admin": "-m django"}
# Keeps the names of a page's Python blocks, and answers each block with a line. A setup may `export` shell variables.
_INTERPRETER = """
import json, linecache, sys, traceback
sys.path.insert(0, "")
def export(name, value):
    with open(".env", "a") as file:
        print(f"{name}={value}", file=file)
names = {"__name__": "__page__", "export": export}
for line in sys.stdin:
    title, code = json.loads(line)
    linecache.cache[title] = (len(code), None, code.splitlines(True), title)
    try:
        exec(compile(code, title, "exec"), names)
        answer = ""
    except BaseException:
        answer = traceback.format_exc()
    sys.stdout.flush()
    print(json.dumps(answer), file=sys.stderr, flush=True)
"""


@dataclass(frozen=True)
class Block:
    """A code block: its language, the file it is to be saved as, why it isn't run (if it says so), where it stands."""

    language: str
    text: str
    title: str | None
    reason: str | None
    where: str


def blocks(page: Path) -> Iterator[Block]:
    """Return the code blocks of a page."""
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        if found["setup"] is not None:
            yield Block("python", found["setup"], None, None, _where(page, text, found.start("setup")))
            continue
        title = re.search(r'title="([^"]+)"', found["attributes"])
        body = "\n".join(line.removeprefix(found["indent"]) for line in found["text"].splitlines())
        where = _where(page, text, found.start("text"))
        yield Block(found["language"], body, title[1] if title else None, found["reason"], where)


def _where(page: Path, text: str, start: int) -> str:
    return f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, start) + 1}"


@dataclass
class Reader:
    """Somebody who pastes the blocks of a page, in an empty folder, with a database."""

    folder: Path
    url: str
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _python: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a shell in which the virtual environment is active."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
        path = os.pathsep.join([str(self.folder / "bin"), str(Path(sys.executable).parent), own["PATH"]])
        return {**own, "PATH": path, "PYTHONPATH": str(ROOT), "OUTBOX_DATABASE_URL": self.url, "COLUMNS": "200",
                # Of a package that is installed, pytest knows that by itself.
                "PYTEST_PLUGINS": "outbox.pytest_plugin"}  # fmt: skip

    def run(self, block: Block) -> None:
        """Run a block; raises AssertionError with what it said where it fails."""
        if block.reason:
            return
        match block.language:
            case "python" if block.title is None:
                self._execute(block)
            case "python":
                compile(block.text, block.title or "", "exec")
                (self.folder / str(block.title)).write_text(block.text + "\n")
            case "sh":
                self._shell(block)
            case "sql":
                with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
                    connection.execute(block.text.encode())
            case "toml":
                tomllib.loads(block.text)
                (self.folder / (block.title or "unnamed.toml")).write_text(block.text + "\n")
            case "json":
                json.loads(block.text)
            case "text":  # what is shown, not typed
                pass
            case other:
                raise AssertionError(f"{block.where}: no reader knows what to do with {other!r}")

    def _execute(self, block: Block) -> None:
        if self._python is None:
            self._python = subprocess.Popen(
                [warm_python(), "-W", "error", "-c", _INTERPRETER], cwd=self.folder, env=self.environment,
                stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        answer = self._ask(json.dumps([block.where, block.text]))
        assert answer == "", f"{block.where}:\n{answer}"

    def _ask(self, line: str) -> str:
        assert self._python is not None
        stdin, stderr = self._python.stdin, self._python.stderr
        assert stdin
        assert stderr
        print(line, file=stdin, flush=True)
        logged: list[str] = []
        for said in stderr:
            try:
                return str(json.loads(said))
            except ValueError:
                logged.append(said)  # of a logger
        raise AssertionError("".join(logged))

    def _shell(self, block: Block) -> None:
        text = block.text.replace("\\\n", " ")
        foreground: list[str] = []
        for line in text.splitlines():
            if "pip install" in line:
                self._installs(line, block.where)
            elif line.startswith(_SERVICES):
                self.script(foreground, block.where)
                foreground = []
                self._start(line)
            elif not line.startswith("export OUTBOX_DATABASE_URL="):
                foreground.append(line)
        self.script(foreground, block.where)

    def script(self, lines: list[str], where: str) -> None:
        script = "\n".join(["set -a; [ ! -e .env ] || . ./.env; set +a", *lines])
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.folder, env=self.environment, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        assert ran.returncode == 0, f"{where}: exit code {ran.returncode}\n{script}\n{ran.stdout}"

    def _installs(self, line: str, where: str) -> None:
        """Nothing is installed here; what is named must be ours, or a project of the world."""
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        for name, wanted in re.findall(r"([\w.-]*outbox[\w-]*|\.)\[([\w,-]+)\]", line):
            assert name in {DISTRIBUTION, "."}, where
            assert set(wanted.split(",")) <= extras, where

    def _start(self, line: str) -> None:
        if line.startswith("python -m outbox.embedded"):
            return  # the suite's PostgreSQL takes its place
        command = ["bash", "-c", f"exec {line}"]
        with self._log(len(self.services)).open("wb") as log:
            service = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.services.append(service)

    def close(self) -> None:
        """Stop what was started; what was a service must have run until now, and end in good order."""
        if self._python is not None:
            self._python.communicate()
        for number, service in enumerate(self.services):
            log = self._log(number)
            # What it says first comes from the program: a signal before that would end the interpreter.
            wait_until(partial(self._has_begun, service, log), f"{log.name} has begun")
            assert service.poll() is None, self.logs()
            service.send_signal(signal.SIGTERM)
        for service in self.services:
            assert service.wait(60) == 0, self.logs()

    def _log(self, number: int) -> Path:
        return self.folder / f"service-{number}.log"

    def _has_begun(self, service: subprocess.Popen[bytes], log: Path) -> bool:
        return bool(log.stat().st_size) or service.poll() is not None

    def kill(self) -> None:
        """End whatever still runs."""
        processes: list[subprocess.Popen[Any]] = [*self.services, *([self._python] if self._python else [])]
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stderr):
                if stream:
                    stream.close()

    def logs(self) -> str:
        """What the services said."""
        return "\n".join(path.read_text() for path in self.folder.glob("service-*.log"))


@contextmanager
def reader(folder: Path, url: str) -> Iterator[Reader]:
    """A reader with an empty folder and a database; whatever was started is gone afterwards."""
    (folder / "bin").mkdir(parents=True)
    for name, arguments in _PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {warm_python()} {arguments} "$@"\n')
        program.chmod(0o755)
    one = Reader(folder, url)
    try:
        yield one
        one.close()
    finally:
        one.kill()
