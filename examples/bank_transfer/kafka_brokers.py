"""Run brokers of a real Kafka (KRaft), and say where they listen, as one line of JSON.

``python -m examples.bank_transfer.kafka_brokers BROKERS [PORT]``. Maven brings the jars, once, into a folder of the
cache; the data are in a temporary one. The brokers end with this process, and this process with its parent. SIGHUP
starts those again that were killed, with their data and ports, and says where all are.

A client of Kafka connects to where a broker says that it is. So a broker that is to be reached through a proxy has one
more listener, and says that it is at the proxy's ``PORT``.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NoReturn

from . import jars
from .ports import free_port

VERSION, LOG4J = "4.4.0", "2.25.5"
_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
_PATIENCE = 180
_ARTIFACTS = (f"org.apache.kafka:kafka_2.13:{VERSION}", f"org.apache.logging.log4j:log4j-slf4j-impl:{LOG4J}")

_SETTINGS = """process.roles=broker,controller
node.id={node}
log.dirs={log}
listeners=PLAIN://127.0.0.1:{ports[0]},SECURE://127.0.0.1:{ports[1]},CONTROLLER://127.0.0.1:{ports[2]},\
PROXIED://127.0.0.1:{ports[3]}
advertised.listeners=PLAIN://127.0.0.1:{ports[0]},SECURE://127.0.0.1:{ports[1]},PROXIED://127.0.0.1:{proxy}
listener.security.protocol.map=PLAIN:PLAINTEXT,SECURE:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT
inter.broker.listener.name=PLAIN
controller.listener.names=CONTROLLER
controller.quorum.voters={voters}
sasl.enabled.mechanisms=PLAIN
listener.name.secure.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\
  user_alice="alice-secret" user_admin="admin-secret";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:admin
auto.create.topics.enable=false
default.replication.factor={copies}
min.insync.replicas={in_sync}
offsets.topic.num.partitions=1
offsets.topic.replication.factor={copies}
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={in_sync}
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr={in_sync}
group.initial.rebalance.delay.ms=0
"""

#: The ports of a broker: without a password, with one, of the controllers, of a proxy.
Ports = tuple[int, int, int, int]


def _end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _spawn(*command: str, out: IO[bytes] | int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=_end_with_parent)  # noqa: PLW1509, S603 - of one thread


def _java(lib: Path, heap: str, *arguments: str, out: IO[bytes] | int) -> subprocess.Popen[bytes]:
    options = (f"-Xmx{heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=WARN")
    return _spawn("java", *options, "-cp", f"{lib}/*", *arguments, out=out)


def installed() -> Path:
    """Return the folder with the jars and an empty log, which are made unless an earlier run did."""
    return jars.installed(f"kafka-{VERSION}", *_ARTIFACTS, finish=_format)


def _format(new: Path) -> None:
    """Make the empty log."""
    settings = _write_settings(new, 1, {1: (1, 2, 3, 4)}, new / "log")
    command = ("kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(settings))
    if _java(new / "lib", "128m", *command, out=subprocess.DEVNULL).wait():
        raise SystemExit("Kafka couldn't format its log")
    settings.unlink()


def _write_settings(folder: Path, node: int, ports: dict[int, Ports], log: Path, proxy: int = 0) -> Path:
    voters = ",".join(f"{each}@127.0.0.1:{own[2]}" for each, own in ports.items())
    path = folder / f"{node}.properties"
    copies = {"copies": min(3, len(ports)), "in_sync": min(2, len(ports))}
    own = {"ports": ports[node], "proxy": proxy or ports[node][3]}
    path.write_text(_SETTINGS.format(node=node, log=log, voters=voters, **own, **copies))
    return path


def _known_brokers(port: int) -> int:
    """Ask a broker for its metadata (version 4, of no topic), and return how many brokers it knows."""
    request = struct.pack(">hhihi?", 3, 4, 1, -1, 0, False)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            return int(struct.unpack(">iiii", connection.makefile("rb").read(16))[3])
    except (OSError, struct.error):
        return 0


def _start(processes: dict[int, subprocess.Popen[bytes]], ports: dict[int, Ports], home: Path, folder: Path) -> None:
    """Start the brokers that don't run, wait until each knows all, and say so."""
    begin, started = time.monotonic(), set[int]()
    while any(_known_brokers(own[0]) < len(ports) for own in ports.values()) or not started:
        # One that was killed is there until the last of its threads has ended.
        dead = {node for node in ports if node not in processes or processes[node].poll() is not None}
        if dead & started or time.monotonic() - begin > _PATIENCE:
            raise SystemExit("Kafka didn't start\n" + "".join(out.read_text()[-2000:] for out in folder.glob("*.out")))
        for node in dead:
            with (folder / f"{node}.out").open("ab") as out:
                settings = str(folder / f"{node}.properties")
                processes[node] = _java(home / "lib", "256m", "kafka.Kafka", settings, out=out)
        started |= dead
        time.sleep(0.1)
    addresses = {
        name: ",".join(f"127.0.0.1:{own[i]}" for own in ports.values())
        for i, name in ((0, "bootstrap"), (1, "sasl"), (3, "proxied"))
    }
    print(json.dumps({**addresses, "pids": {node: process.pid for node, process in processes.items()}}), flush=True)


def main(brokers: int, proxy: int = 0) -> NoReturn:
    """Run them until a signal comes."""
    _end_with_parent(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    home = installed()
    ports = {node: (free_port(), free_port(), free_port(), free_port()) for node in range(1, brokers + 1)}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="kafka-") as name:
        folder = Path(name)
        for node in ports:
            log = shutil.copytree(home / "log", folder / f"log{node}")
            (log / "meta.properties").write_text(f"version=1\ncluster.id={_CLUSTER}\nnode.id={node}\n")
            _write_settings(folder, node, ports, log, proxy)
        try:
            while True:
                _start(processes, ports, home, folder)
                signal.sigwaitinfo({signal.SIGHUP})
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            for process in processes.values():  # the data goes too, so nothing needs to end in order
                process.kill()
                process.wait()


if __name__ == "__main__":
    os.chdir("/")
    main(*map(int, sys.argv[1:]))
