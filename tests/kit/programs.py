"""Programs that tests need and no wheel has: browser, Prometheus, PgBouncer, MariaDB, RabbitMQ, JDK, Maven, Go, Node.

Where a machine lacks one, its tests are skipped. With ``OUTBOX_TEST_PROGRAMS_REQUIRED=1``, as in CI, they fail.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lacks(program: str, mend: str) -> NoReturn:
    """End the test: the machine lacks a program, which ``mend`` says how to get."""
    reason = f"{program} isn't there: {mend}"
    if os.environ.get("OUTBOX_TEST_PROGRAMS_REQUIRED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def program(*names: str, package: str) -> str:
    """Return the path of the first of the programs that is on PATH; a package of Debian's brings it."""
    for name in names:
        if path := shutil.which(name):
            return path
    lacks(names[0], f"apt-get install {package}")
