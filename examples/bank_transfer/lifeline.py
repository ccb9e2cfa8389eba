"""The child's end of the two pipes to the process that started it.

Standard input is the lifeline: when it closes, the parent is gone, however it ended, and so is the child.
What comes in on it is the number of orders that may have been executed by now; what goes out on standard output
are lines of JSON.

An order that begins with a half message takes two transactions: the first writes the half, the second decides it. To
die between the two, or inside the second, is what leaves an orphan. So the child reports these steps, and the parent
can aim a kill at them. The code that executes orders knows nothing of this.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

BETWEEN, SECOND = "between the phases", "in the second phase"


def report(**fact: Any) -> None:
    """Report to the parent."""
    # One write of less than a page: a SIGKILL can't tear it.
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


class Lifeline:
    """Ends this process with its parent; passes on leave to work, and reports."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def report(self, **fact: Any) -> None:
        """Report to the parent."""
        report(**fact)

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


class Steps:
    """Listens to the commits of this process, and reports the steps of each order."""

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._order = 0
        self._commits = 0
        event.listen(Session, "before_commit", self._before_commit)
        event.listen(Session, "after_commit", self._after_commit)

    def begin(self, order: int) -> None:
        """Note that an order begins, this many-th of the teller."""
        self._order, self._commits = order, 0

    def _before_commit(self, _: Any) -> None:
        if self._commits == 1:
            self._lifeline.report(step=SECOND, order=self._order)

    def _after_commit(self, _: Any) -> None:
        self._commits += 1
        if self._commits == 1:
            self._lifeline.report(step=BETWEEN, order=self._order)
