"""Jars of Java programs: Maven brings them, once, into a folder that outlives the run."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

#: Where they are kept from one run to the next.
CACHE = Path(os.environ.get("OUTBOX_TEST_JARS", "~/.cache/outbox-jars")).expanduser()
#: RocketMQ's client in Java, as `installed` takes it.
ROCKETMQ_CLIENT = ("rocketmq-client-5.2.0", "org.apache.rocketmq:rocketmq-client-java:5.2.0")
#: The exit code where Maven couldn't fetch them, which it has told of.
NO_JARS = 3

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>outbox</groupId><artifactId>to-try</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>{dependencies}</dependencies>
</project>
"""
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"


def _do_nothing(_: Path) -> None: ...


def installed(name: str, *artifacts: str, finish: Callable[[Path], None] = _do_nothing) -> Path:
    """Return the folder ``name`` of the cache, whose ``lib`` has these artifacts (``group:name:version``) with theirs.

    If no earlier run did, it is made now; ``finish`` puts in what else it needs.

    Raises:
        SystemExit: of `NO_JARS`.
    """
    home = CACHE / name
    if home.exists():
        return home
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        new, pom = Path(folder, "new"), Path(folder, "pom.xml")
        pom.write_text(_POM.format(dependencies="".join(_DEPENDENCY.format(*each.split(":")) for each in artifacts)))
        copy = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={new / 'lib'}")
        command = ("mvn", "-q", "-B", "-f", str(pom), *copy)
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=2).returncode:  # noqa: S603 - Maven
            raise SystemExit(NO_JARS)
        finish(new)
        if not home.exists():  # another process may have been faster
            new.rename(home)
    return home
