"""Tells the demo where in an order a teller stands, so that a kill can be aimed at it.

An order that begins with a half message takes two transactions: the first writes the half, the second decides it. To
die between the two, or inside the second, is what leaves an orphan. The ways themselves know nothing of this.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from .lifeline import Lifeline

BETWEEN, SECOND = "between the phases", "in the second phase"


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
            self._lifeline.tell(step=SECOND, order=self._order)

    def _after_commit(self, _: Any) -> None:
        self._commits += 1
        if self._commits == 1:
            self._lifeline.tell(step=BETWEEN, order=self._order)
