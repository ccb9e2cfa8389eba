"""The examples in three languages: each consumer gets the orders, and a producer that died is asked about its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from outbox import Outbox, Settings
from outbox.worker import Worker
from tests.kit import wait_until
from tests.kit.processes import ROOT
from tests.kit.programs import lacks
from tests.rocketmq.conformance.bridge import command, is_built, is_without
from tests.rocketmq.conftest import NewServer

_EXAMPLES = ROOT / "examples" / "rocketmq"
_NODE_MODULES = ROOT / "tests" / "node" / "node_modules"
#: A process that was started, and a function that tells whether it has printed a line.
Started = tuple[subprocess.Popen[str], Callable[[str], bool]]


@pytest.fixture
def address(engine: Engine, new_server: NewServer) -> Iterator[str]:
    """Where a server is, with a worker that dispatches beside it; halves are asked about soon."""
    settings = Settings(immunity=1.0, check_interval=1.0)
    with Worker(Outbox(engine, settings=settings)):
        yield new_server(settings).addresses[0]


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of Java's examples, built by Maven as their page says."""
    folder = tmp_path_factory.mktemp("java")
    for needed in ("java", "mvn"):
        if shutil.which(needed) is None:
            lacks(needed, "apt-get install openjdk-17-jdk-headless maven")
    project = shutil.copytree(_EXAMPLES / "java", folder / "project")
    if not is_built(["mvn", "-q", "-B", "package"], project):
        is_without("Java's client of RocketMQ", "Maven couldn't fetch it; let it reach Maven Central once")
    classes = f"{project}/target/classes:{project}/target/lib/*"
    return ["java", "-XX:TieredStopAtLevel=1", f"-Duser.home={folder}", "-cp", classes]


@contextmanager
def started(tmp_path: Path, *words: str) -> Iterator[Started]:
    """Run a program whose logs go into the folder; it is killed at the end."""
    output = tmp_path / f"{len(list(tmp_path.iterdir()))}.out"
    environment = {**os.environ, "HOME": str(tmp_path), "NODE_PATH": str(_NODE_MODULES)}
    with output.open("w") as file:
        process = subprocess.Popen(words, text=True, env=environment, cwd=tmp_path, stdout=file, stderr=file)

    def told(line: str) -> bool:
        assert process.poll() in {None, 1} or line in output.read_text(), output.read_text()
        return line in output.read_text()

    try:
        yield process, told
    finally:
        process.kill()
        process.wait()


def test_each_language_gets_the_orders(address: str, java: list[str], tmp_path: Path) -> None:
    """Consumers in Python, Node and Java, of a group each, get what Java's producer has committed."""
    python, node = command("P", tmp_path)[0], command("N", tmp_path)[0]
    consumers = {
        "billing": (python, str(_EXAMPLES / "consumer.py"), address),
        "shipping": (node, str(_EXAMPLES / "consumer.js"), address),
        "reporting": (*java, "OrderConsumer", address),
    }
    with ExitStack() as stack:
        _, told = stack.enter_context(started(tmp_path, *java, "OrderProducer", address, "booked.txt", "o-1", "o-2"))
        wait_until(lambda: told("sent o-2"), "both are sent")
        running = {group: stack.enter_context(started(tmp_path, *words)) for group, words in consumers.items()}
        for order in ("o-1", "o-2"):
            for group, (_, told) in running.items():
                wait_until(lambda told=told, group=group: told(f"{group} got {order} (attempt 1)"), f"{group} gets it")  # type: ignore[misc]  # noqa: B023


def test_a_producer_that_died_is_asked(address: str, java: list[str], tmp_path: Path) -> None:
    """Killed between booking and commit; the next one says that the order was booked, and the consumer gets it once."""
    python = command("P", tmp_path)[0]
    producer = (*java, "OrderProducer", address, "booked.txt")
    with ExitStack() as stack:
        process, _ = stack.enter_context(started(tmp_path, *producer, "o-1", "--crash"))
        assert process.wait(60) == 1
        assert (tmp_path / "booked.txt").read_text() == "o-1\n"
        _, asked = stack.enter_context(started(tmp_path, *producer, "--stay"))
        wait_until(lambda: asked("asked about o-1: booked"), "the next producer is asked")
        _, told = stack.enter_context(started(tmp_path, python, str(_EXAMPLES / "consumer.py"), address))
        wait_until(lambda: told("billing got o-1 (attempt 1)"), "the consumer gets the order")
