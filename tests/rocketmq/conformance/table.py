"""Write the page of all checks: ``python -m tests.rocketmq.conformance.table``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.kit.processes import ROOT
from tests.rocketmq.conformance.bridge import NAMES
from tests.rocketmq.conformance.checks import CHECKS
from tests.rocketmq.conformance.suite import Check

#: The page.
PAGE: Path = ROOT / "docs" / "rocketmq-conformance.md"

_HEAD = """\
# RocketMQ's clients: conformance

What RocketMQ's own clients see of our server, check by check, beside what they see of RocketMQ 5.5.0. The clients are
the official ones, unmodified: Python 5.1.2, Node 1.0.8, Java 5.2.0 and Go 5.1.4; *raw* is a client of the tests, which
sends what they never send. The suite runs each check with each of its clients: against ours those of *raw* and what
the others mainly do with each push, and all by night (`OUTBOX_TEST_EFFORT=10`); against a real one by hand.

Where *ours* is empty, it answers as the real one. Where it isn't, the difference is wanted, and *why* says what for.

"""
_TAIL = """
The numbers up to 75 are those of a list that was made before the first line of the server; from 101 on come those that
were met on the way. One of them runs by `OUTBOX_TEST_EFFORT=10 python -m pytest tests/rocketmq/conformance -k 27-java`,
and with `OUTBOX_TEST_ROCKETMQ=HOST:PORT` before it against a real RocketMQ. Which topics and groups that one must have,
`python -m tests.rocketmq.conformance.servers` prints; `python -m tests.rocketmq.conformance.table` makes this page.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%DLQ%group", "`%DLQ%group`")


def _row(check: Check) -> str:
    clients = ", ".join(NAMES[each] for each in NAMES if each in check.clients)
    name = check.name + (" (by night)" if check.night >= set(check.clients) else "")
    cells = (str(check.number), name, clients, check.real, check.ours, check.why)
    return "| " + " | ".join(map(_cell, cells)).replace("|  |", "| |").replace("|  |", "| |").strip() + " |"


def _lines() -> Iterator[str]:
    yield "| No. | Check | Clients | Real | Ours | Why |"
    yield "|---|---|---|---|---|---|"
    for _, check in sorted(CHECKS.items()):
        yield _row(check)


def page() -> str:
    """Return the text of the page."""
    return _HEAD + "\n".join(_lines()) + "\n" + _TAIL


def main() -> None:
    """Write it."""
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
