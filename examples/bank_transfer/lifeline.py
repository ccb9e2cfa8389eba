"""The child's end of the two pipes to the process that started it.

Standard input is the lifeline: when it closes, the parent is gone, however it ended, and so is the child.
What comes in on it is the number of orders that may have been executed by now; what goes out on standard output
are lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any


class Lifeline:
    """Ends this process with its parent; passes on leave to work, and reports."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def tell(self, **fact: Any) -> None:
        """Report to the parent."""
        # One write of less than a page: a SIGKILL can't tear it.
        sys.stdout.write(json.dumps(fact) + "\n")
        sys.stdout.flush()

    def wait_until_allowed(self, orders: int) -> None:
        """Return when this many orders may be executed."""
        with self._changed:
            self._changed.wait_for(lambda: self._allowed >= orders)

    def _listen(self) -> None:
        # Not through sys.stdin: its lock would still be held by this thread when the interpreter ends.
        with open(0, closefd=False) as lines:
            for line in lines:
                with self._changed:
                    self._allowed = int(line)
                    self._changed.notify_all()
        os._exit(1)
