"""The servers that checks are run against: ours, as a process on a database of its own, or a real RocketMQ.

``OUTBOX_TEST_ROCKETMQ=HOST:PORT`` names a real one, which was started afresh with the topics and groups that
``python -m tests.rocketmq.conformance.servers`` prints, one a line: ``topic NAME TYPE`` and ``group NAME [fifo]
[attempts=N] [backoff=SECONDS,…]``; its time of immunity and its check interval are 3 s, with 3 checks at most.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.bank_transfer.ports import free_port
from tests.kit import wait_until
from tests.kit.processes import ROOT
from tests.kit.programs import program

if TYPE_CHECKING:
    from tests.rocketmq.conformance.suite import Check

#: Where a real one is; empty: ours is started.
REAL = os.environ.get("OUTBOX_TEST_ROCKETMQ", "")
#: What the real one was started with beside the defaults: ``auth``, ``norecall``, …, by commas.
REAL_HAS = frozenset(os.environ.get("OUTBOX_TEST_ROCKETMQ_HAS", "").split(","))
#: Access key and secret where a server has users.
KEY = "alice:secret-of-alice"
#: As the real one is started. Node's and Java's clients send nothing for UNKNOWN, which takes a checker's whole time.
_SETTINGS = {
    "OUTBOX_IMMUNITY": "3",
    "OUTBOX_CHECK_INTERVAL": "3",
    "OUTBOX_MAX_CHECKS": "3",
    "OUTBOX_CHECK_TIMEOUT": "2",
}


@dataclass
class CheckedServer:
    """A server that clients may use: where it is, in plaintext and with TLS; ``key`` is access key and secret."""

    endpoints: str
    tls: str
    ours: bool
    key: str = ""
    #: The database of ours.
    url: str = ""
    #: What it writes to its standard error; the real one's is elsewhere.
    log: Path | None = None

    def told(self) -> str:
        """Return the end of what it wrote."""
        return self.log.read_text(errors="replace")[-6000:] if self.log else ""


def real(needs: str) -> CheckedServer:
    """Return the real one; it has TLS on the same port."""
    return CheckedServer(REAL, REAL, ours=False, key=KEY if needs == "auth" else "")


def lines_of(checks: Iterable[Check]) -> list[str]:
    """Return the topics and groups of checks, as the real one takes them."""
    found = set()
    for check in checks:
        for client in check.clients:
            if check.topic:
                found.add(f"topic {check.topic_of(client)} {check.topic}")
            if check.needs == "tables":
                found.add(f"topic {check.topic_of(client)}-back {check.topic}")
            if check.group is not None:
                found.add(f"group {check.group_of(client)} {check.group}".strip())
    return sorted(found)


def options_of(checks: Iterable[Check], needs: str) -> str:
    """Return the same as options of ours, in TOML."""
    lines = ["[rocketmq]", f"recall = {str(needs != 'norecall').lower()}"]
    for kind, name, *words in (line.split() for line in lines_of(checks)):
        lines.append(f"[rocketmq.{kind}s.{name}]")
        if kind == "topic":
            lines += [f'type = "{words[0]}"']
            continue
        for word in words:
            what, _, value = word.partition("=")
            named = {
                "fifo": "fifo = true",
                "attempts": f"max_attempts = {value}",
                "backoff": f"retry_delays = [{value}]",
            }
            lines.append(named[what])
    if needs == "auth":
        user, _, secret = KEY.partition(":")
        lines += [f"[rocketmq.users.{user}]", f'secret = "{secret}"']
        lines += [f'{what} = ["*"]' for what in ("send", "receive", "groups")]
    return "\n".join(lines) + "\n"


class ServerProcess:
    """``outbox rocketmq serve`` on a database that is migrated, with ``outbox run`` beside it; it can start again."""

    def __init__(self, url: str, checks: Iterable[Check], needs: str, folder: Path) -> None:
        config, self._errors, certificate = (folder / f"{name}{needs}" for name in ("config", "errors", "cert"))
        config.write_text(options_of(checks, needs))
        key = certificate.with_suffix(".key")
        openssl = (program("openssl", package="openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
        files = ("-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate))
        subprocess.run([*openssl, *files], check=True, capture_output=True)
        self._ports = free_port(), free_port()
        plain, tls = map(str, self._ports)
        where = ("--port", plain, "--tls-port", tls, "--cert", str(certificate), "--key", str(key))
        self._serve = ("rocketmq", "serve", "--config", str(config), *where)
        self._url, self._key = url, KEY if needs == "auth" else ""
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> CheckedServer:
        """Start both, and wait until the server listens."""
        environment = {**os.environ, **_SETTINGS, "OUTBOX_DATABASE_URL": self._url, "PYTHONPATH": str(ROOT)}
        with self._errors.open("a") as log:
            for words in (self._serve, ("run", "--url", self._url)):
                command = [sys.executable, "-m", "outbox.cli", *words]
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                self._processes.append(process)

        def listens() -> bool:
            assert self._processes[0].poll() is None, f"our server has ended: {self._errors.read_text()[-3000:]}"
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", self._ports[1])) == 0

        wait_until(listens, "our server listens")
        plain, tls = (f"127.0.0.1:{port}" for port in self._ports)
        return CheckedServer(plain, tls, ours=True, key=self._key, url=self._url, log=self._errors)

    def end(self, number: int = signal.SIGTERM) -> None:
        """End both by a signal, and wait until they have ended."""
        for process in self._processes:
            process.send_signal(number)
        for process in self._processes:
            process.wait(60)
        self._processes.clear()


@contextmanager
def ours(url: str, checks: Iterable[Check], needs: str, folder: Path) -> Iterator[CheckedServer]:
    """Run our server."""
    process = ServerProcess(url, checks, needs, folder)
    try:
        yield process.start()
    finally:  # also where one of the two hasn't come up: the other would go on in a database that others use then
        process.end()


def main() -> None:
    """Print the topics and groups of all checks."""
    from tests.rocketmq.conformance.checks import CHECKS

    sys.stdout.write("\n".join(lines_of(CHECKS.values())) + "\n")


if __name__ == "__main__":
    main()
