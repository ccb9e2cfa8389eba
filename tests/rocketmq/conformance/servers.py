"""The servers that checks are run against: ours, as a process on a database of its own, or a real RocketMQ.

``OUTBOX_TEST_ROCKETMQ=HOST:PORT`` names a real one, which was started afresh with the topics and groups that
``python -m tests.rocketmq.conformance.servers`` prints, one a line: ``topic NAME TYPE`` and ``group NAME [fifo]
[attempts=N] [backoff=SECONDS,…]``; its time of immunity and its check interval are 3 s, with 3 checks at most.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kit import wait_until
from tests.kit.processes import ROOT

if TYPE_CHECKING:
    from tests.rocketmq.conformance.suite import Check

#: Where a real one is; empty: ours is started.
REAL = os.environ.get("OUTBOX_TEST_ROCKETMQ", "")
#: What the real one was started with beside the defaults: ``auth``, ``norecall``, …, by commas.
REAL_HAS = frozenset(os.environ.get("OUTBOX_TEST_ROCKETMQ_HAS", "").split(","))
#: Access key and secret where a server has users.
KEY = "alice:secret-of-alice"
#: As the real one is started.
_SETTINGS = {"OUTBOX_IMMUNITY": "3", "OUTBOX_CHECK_INTERVAL": "3", "OUTBOX_MAX_CHECKS": "3"}


@dataclass
class CheckedServer:
    """A server that clients may use: where it is, in plaintext and with TLS; ``key`` is access key and secret."""

    endpoints: str
    tls: str
    ours: bool
    key: str = ""
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
        for client in check.runs:
            if check.topic:
                found.add(f"topic {check.topic_of(client)} {check.topic}")
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


@contextmanager
def ours(url: str, checks: Iterable[Check], needs: str, folder: Path) -> Iterator[CheckedServer]:
    """Run our server, and a worker beside it, on a database that is migrated."""
    options, told, errors = folder / f"options{needs}.toml", folder / f"told{needs}", folder / f"errors{needs}"
    options.write_text(options_of(checks, needs))
    environment = {**os.environ, **_SETTINGS, "OUTBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT)}
    module = "tests.rocketmq.conformance.serving"
    with ExitStack() as stack:
        log = stack.enter_context(errors.open("w"))
        command = [sys.executable, "-m", module, str(options), str(told)]
        process = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        )
        stack.callback(process.kill)

        def addresses() -> list[str]:
            assert process.poll() is None, f"our server has ended: {errors.read_text()[-3000:]}"
            return told.read_text().split() if told.exists() else []

        plain, tls = wait_until(addresses, "our server says where it is")
        yield CheckedServer(plain, tls, ours=True, key=KEY if needs == "auth" else "", log=errors)
        process.terminate()
        process.wait(60)


def main() -> None:
    """Print the topics and groups of all checks."""
    from tests.rocketmq.conformance.checks import CHECKS

    sys.stdout.write("\n".join(lines_of(CHECKS.values())) + "\n")


if __name__ == "__main__":
    main()
