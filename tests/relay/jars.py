"""The jars of Debezium; nothing but Python is needed to fetch them."""

from __future__ import annotations

from pathlib import Path

from examples.bank_transfer import jars

_VERSION = "3.6.1.Final"
_NAMES = ("debezium-api", "debezium-embedded", "debezium-connector-postgres")


def debezium() -> Path:
    """Return the folder of its jars.

    Raises:
        SystemExit: Maven couldn't fetch them.
    """
    artifacts = [f"io.debezium:{name}:{_VERSION}" for name in _NAMES]
    # Without a binding of its log it says nothing.
    return jars.installed(f"debezium-{_VERSION}", *artifacts, "org.slf4j:slf4j-simple:1.7.36") / "lib"
