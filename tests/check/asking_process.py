"""A process that makes one pass, and hangs if it has to ask: ``python -m tests.check.asking_process URL``.

Its checker says on standard output what it is asked about, and hangs.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

from outbox import Orphan
from tests.check.support import open_bench


def main(url: str) -> None:
    """Make the pass."""
    bench = open_bench(url, ExitStack())

    @bench.outbox.checker("paid")
    def checker(orphan: Orphan) -> None:
        print("asked about", orphan.id, flush=True)  # noqa: T201
        threading.Event().wait()

    bench.check()


if __name__ == "__main__":
    main(sys.argv[1])
