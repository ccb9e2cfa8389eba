"""Where Spark runs: what is asked for, what its configuration says, and who can reach which database from there."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url

from outbox.errors import InvalidSettings
from outbox.reconcile.job import Spark


@dataclass(frozen=True, slots=True)
class Master:
    """A master (``local[2]``, ``spark://host:7077``, ``yarn``) or a Spark Connect server, of whose address no token."""

    address: str

    @property
    def connect(self) -> bool:
        """Is it a Spark Connect server?"""
        return self.address.startswith("sc://")

    @property
    def in_process(self) -> bool:
        """Are the executors threads of the driver's own Java process?"""
        return self.address.startswith("local") and not self.address.startswith("local-cluster")

    @property
    def on_this_host(self) -> bool:
        """Do driver and executors see the same loopback? Of Kubernetes that is never known."""
        if self.address.startswith("local"):
            return True
        return self.address.startswith(("spark://", "sc://")) and all(map(is_loopback, self._hosts))

    @property
    def _hosts(self) -> list[str]:
        addresses = self.address.partition("://")[2].partition("/")[0].split(",")
        return [re.sub(r":\d+$", "", address).strip("[]") for address in addresses]

    def __str__(self) -> str:
        return self.address


def master_of(options: Spark, workers: int, defaults: Mapping[str, str]) -> Master:
    """Return where to start Spark: as asked, else as its own configuration says, else in this process.

    ``defaults`` is what `spark_defaults` found.

    Raises:
        InvalidSettings: both a master and a Spark Connect server are asked for.
    """
    if options.master and options.remote:
        raise InvalidSettings("Spark has either a master or a Spark Connect server (remote); leave one of them out")
    master = options.master or options.conf.get("spark.master")
    if remote := options.remote or (None if master else os.environ.get("SPARK_REMOTE")):
        return connect_server(remote)
    found = master or _submitted_master() or os.environ.get("MASTER") or defaults.get("spark.master")
    return Master(found or f"local[{workers}]")


def connect_server(remote: str) -> Master:
    """Return a Spark Connect server.

    Raises:
        InvalidSettings: that isn't the address of one.
    """
    # What follows the ; may be a token.
    address = remote.partition(";")[0].rstrip("/")
    if not address.startswith("sc://"):
        raise InvalidSettings(f"remote = {address!r} isn't the address of a Spark Connect server; write sc://host:port")
    return Master(address)


def spark_defaults() -> dict[str, str]:
    """Return what ``spark-defaults.conf`` says, which ours must not override; nothing where there is none."""
    folder = os.environ.get("SPARK_CONF_DIR") or Path(os.environ.get("SPARK_HOME", "/nonexistent"), "conf")
    try:
        lines = Path(folder, "spark-defaults.conf").read_text().splitlines()
    except OSError:
        return {}
    pairs = (re.split(r"[\s=]+", line.strip(), maxsplit=1) for line in lines if not line.lstrip().startswith("#"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def refuse_loopback(master: Master, url: str) -> None:
    """See that executors can reach the database of a URL.

    Raises:
        InvalidSettings: it is on a loopback address, and the executors are, or may be, on other hosts.
    """
    if master.on_this_host:
        return
    for host in _database_hosts(make_url(url)):
        if is_loopback(host):
            raise InvalidSettings(
                f"the database on {host or 'the local socket'} can't be read from {master}: there each executor would "
                "look on its own host; mend: name the database by an address that the executors reach"
            )


def _database_hosts(url: URL) -> list[str]:
    query = url.query.get("host", ())
    named = [*([url.host] if url.host else []), *([query] if isinstance(query, str) else query)]
    if not named and ("service" in url.query or "PGHOST" in os.environ or "PGSERVICE" in os.environ):
        # The executors' own environment says where it is.
        return []
    return [host for name in named or [""] for host in name.split(",")]


def is_loopback(host: str) -> bool:
    """Does this name or address (empty or a path: a local socket) mean the host itself?"""
    if not host or host.startswith(("/", "@")) or host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".").endswith(".localhost")


def _submitted_master() -> str | None:
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--master":
            return following
        if word.startswith("--master="):
            return word.partition("=")[2]
    return None
