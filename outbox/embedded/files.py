"""The folder of an embedded server: ``data``, ``server.log``, ``outbox.conf``, ``password`` if its data stay."""

from __future__ import annotations

import os
import random
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from outbox.embedded.binaries import Binaries
from outbox.errors import EmbeddedError

HOST = "127.0.0.1"

_DEFAULTS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_prepared_transactions": "20",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}

# synchronous_commit stays on: without fsync it costs nearly nothing, and a killed server would otherwise
# forget transactions whose commit was answered, which is what crash tests look for.
_NOT_DURABLE = {"fsync": "off", "full_page_writes": "off"}

_OURS = frozenset(
    {
        "config_file",
        "data_directory",
        "hba_file",
        "ident_file",
        "lc_messages",
        "listen_addresses",
        "logging_collector",
        "port",
        "unix_socket_directories",
    }
)

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?", re.IGNORECASE)

# Below the ports which Linux and macOS hand out to outgoing connections: while the server restarts, a client
# that dials such a port again and again can end up connected to itself, and the port is taken.
_PORTS = range(20_000, 32_000)

# How much of the log (bytes) an error shows.
_TAIL = 4_000

# Not the module's shared generator: two test processes with the same seed would try the same ports.
_random = random.SystemRandom()


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse settings that aren't valid names and values, or that the embedded server decides itself.

    Raises:
        EmbeddedError: names the first such setting.
    """
    for name, value in settings.items():
        if not _NAME.fullmatch(name):
            raise EmbeddedError(f"setting {name!r} is not a name of a PostgreSQL setting")
        if name.lower() in _OURS:
            raise EmbeddedError(f"setting {name!r} is decided by the embedded server; leave it out")
        if not isinstance(value, str) or not value.isprintable():
            raise EmbeddedError(f"setting {name!r} must be printable text, not {value!r}")


def render(settings: Mapping[str, str], *, durable: bool, port: int) -> str:
    """Return the text of the configuration file; ``settings`` win over the defaults."""
    chosen = {**_DEFAULTS, **({} if durable else _NOT_DURABLE), **settings}
    chosen |= {
        "listen_addresses": HOST,
        "port": str(port),
        "unix_socket_directories": "",
        "logging_collector": "off",
        "lc_messages": "C",
    }
    lines = (f"{name} = '{_quoted(value)}'" for name, value in chosen.items())
    return "\n".join(["# Written at every start; changes here are lost.", *lines, ""])


def free_port() -> int:
    """Return a port of the loopback address on which no program listens just now.

    Raises:
        EmbeddedError: a hundred ports tried at random are all taken.
    """
    for port in _random.sample(_PORTS, 100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise EmbeddedError(f"no free port on {HOST} between {_PORTS.start} and {_PORTS.stop - 1}")


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "''")


def prepared(folder: Path, binaries: Binaries) -> Path:
    """Make ``folder`` if it isn't there, or check that its data fit ``binaries``.

    Raises:
        EmbeddedError: something else is in the folder, or data of another major version.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        strange = next(folder.iterdir(), None) and not (folder / "lock").exists()
    except OSError as error:
        raise EmbeddedError(f"{folder} can't be used: {error}") from error
    if strange:
        raise EmbeddedError(f"{folder} is not empty and was not made by an embedded server; choose another")
    version = folder / "data" / "PG_VERSION"
    if version.exists() and version.read_text().strip() != str(binaries.version[0]):
        raise EmbeddedError(
            f"{folder} holds data of PostgreSQL {version.read_text().strip()}, but found was {binaries}; "
            "mend: name its binaries in OUTBOX_PG_BIN, or choose another folder"
        )
    return folder.resolve()


def log_tail(folder: Path, since: int) -> str:
    """Return the last lines that were logged after the first ``since`` bytes."""
    try:
        with (folder / "server.log").open("rb") as log:
            log.seek(max(since, log.seek(0, os.SEEK_END) - _TAIL))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""
