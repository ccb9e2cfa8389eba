"""Official clients as processes: requests and answers are JSON lines (`clients/client.py` says which).

Letters name them (`NAMES`); R is the raw client, which needs no process.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from examples.bank_transfer import jars
from tests.kit import ROOT
from tests.kit.programs import lacks

#: The clients' programs.
CLIENTS = Path(__file__).with_name("clients")
NAMES = {"P": "python", "N": "node", "J": "java", "G": "go", "R": "raw"}
_NODE_MODULES = ROOT / "tests" / "node" / "node_modules"
_PATIENCE = 90.0

Handler = Callable[[dict[str, Any]], str]


def command(letter: str, folder: Path) -> list[str]:
    """Return the command of a client; what has to be made for it comes into the folder.

    Where the machine lacks it, the test ends here.
    """
    return {"P": _python, "N": _node, "J": _java, "G": _go}[letter](folder)


def _python(_: Path) -> list[str]:
    if find_spec("rocketmq") is None:
        lacks("Python's client of RocketMQ", "pip install rocketmq-python-client")
    return [sys.executable, str(CLIENTS / "client.py")]


def _node(_: Path) -> list[str]:
    if shutil.which("node") is None or not (_NODE_MODULES / "rocketmq-client-nodejs").exists():
        lacks("Node with its client of RocketMQ", "npm install --prefix tests/node")
    return ["node", str(CLIENTS / "client.js")]


def is_built(words: list[str], folder: Path) -> bool:
    """Tell whether a client could be built; not where its registry answers nothing for long."""
    with suppress(subprocess.TimeoutExpired):
        return not subprocess.run(words, cwd=folder, check=False, stdin=subprocess.DEVNULL, timeout=240).returncode
    return False


def is_without(what: str, mend: str) -> NoReturn:
    """End the test: a client can't be had here, where its registry isn't in reach.

    That is no failure, also where all programs are required, unless clients are, too.
    """
    if os.environ.get("OUTBOX_TEST_CLIENTS_REQUIRED") == "1":
        lacks(what, mend)
    pytest.skip(f"{what} isn't there: {mend}")


def _java(folder: Path) -> list[str]:
    for needed in ("javac", "mvn"):
        if shutil.which(needed) is None:
            lacks(needed, "apt-get install openjdk-17-jdk-headless maven")
    try:
        lib = jars.installed(*jars.ROCKETMQ_CLIENT) / "lib"
    except SystemExit:
        is_without("Java's client of RocketMQ", "Maven couldn't fetch it; let it reach Maven Central once")
    classes = folder / "classes"
    if not classes.exists():
        subprocess.run(
            ["javac", "-nowarn", "-cp", f"{lib}/*", "-d", str(classes), str(CLIENTS / "Client.java")], check=True
        )
    quick = ("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={folder}")
    return ["java", *quick, "-cp", f"{classes}:{lib}/*", "Client"]


def _go(folder: Path) -> list[str]:
    if shutil.which("go") is None:
        is_without("go", "install Go 1.25 from https://go.dev/dl")
    program = folder / "goclient"
    if not program.exists() and not is_built(["go", "build", "-o", str(program), "."], CLIENTS / "go"):
        is_without("Go's client of RocketMQ", "Go couldn't build it; let it reach its module proxy once")
    return [str(program)]


class ClientRaised(Exception):
    """An error that a client raised, with the server's code if it tells it."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error['type']} {error.get('code') or ''} {error['text']}")
        self.type: str = error["type"]
        self.code: int | None = error.get("code")


class Bridge:
    """A client's process: requests to it, and handlers of what it asks."""

    def __init__(self, letter: str, program: list[str], home: Path, errors: IO[str]) -> None:
        self.letter = letter
        # They write logs into the home.
        environment = {**os.environ, "HOME": str(home), "NODE_PATH": str(_NODE_MODULES)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self.process = subprocess.Popen(program, text=True, env=environment, **pipes)  # type: ignore[call-overload]
        self.handlers: dict[str, Handler] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self.process.stdin.write(json.dumps(record) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            record = json.loads(line)
            if "call" in record:
                threading.Thread(target=self._answer, args=(record,), daemon=True).start()
            else:
                self._waiting.pop(record["n"]).set_result(record)
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(RuntimeError("the client's process has ended"))

    def _answer(self, record: Mapping[str, Any]) -> None:
        answer = self.handlers[record["on"]](record["message"])
        try:
            self._write({"call": record["call"], "answer": answer})
        except (BrokenPipeError, ValueError):
            return  # the process was killed while it waited for this

    def start(self, op: str, **request: Any) -> concurrent.futures.Future[Any]:
        """Begin a request; the future has its record."""
        number = next(self._numbers)
        future = self._waiting[number] = concurrent.futures.Future()
        self._write({"n": number, "op": op, **request})
        return future

    def call(self, op: str, wait: float = _PATIENCE, **request: Any) -> Any:
        """Return what the client answers in so many seconds.

        Raises:
            ClientRaised: it raised an error.
        """
        record = self.start(op, **request).result(wait)
        if "error" in record:
            raise ClientRaised(record["error"])
        return record["ok"]

    def kill(self) -> None:
        """Kill the process, as a machine does that fails."""
        self.process.kill()
        self.process.wait()
        with self._lock, suppress(BrokenPipeError):  # a request that it hasn't taken
            self.process.stdin.close()
        self._reader.join()
        self.process.stdout.close()


class ClientThing:
    """A producer, a consumer or a transaction in a client's process; a method of any other name is a request on it."""

    def __init__(self, bridge: Bridge, name: str) -> None:
        self.bridge, self.name = bridge, name

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return lambda **request: self.bridge.call(op, **{"on": self.name, **request})

    def begin(self) -> ClientThing:
        """Begin a transaction."""
        name = f"{self.name}-t{next(_TRANSACTIONS)}"
        self.bridge.call("begin", on=self.name, **{"as": name})  # type: ignore[arg-type]
        return ClientThing(self.bridge, name)


_TRANSACTIONS = itertools.count(1)
