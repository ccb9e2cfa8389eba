"""What must be true of every half message after any order of acts: the stateful test's model, without a database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from outbox import Resolution
from outbox.errors import AlreadyCommitted, AlreadyRolledBack, HalfNotFound

Verdict = Literal["commit", "rollback"]
MAX_CHECKS = 3

#: Topics by who can be asked: a checker with a session, one without, nobody.
PAID, EXT, LONE = "paid", "ext", "lone"
TOPICS = (PAID, EXT, LONE)
ASKABLE = frozenset({PAID, EXT})


@dataclass(slots=True, eq=False)
class Half:
    """A half message, and all that is known of its fate.

    ``checks`` is the counter, ``asked`` how often a checker was asked ever, ``fences`` how often its fence was tried,
    ``unanswered`` how many of the questions got no answer; ``wanted``: an operator wants it asked once more, whatever
    the counter says. ``open``: the last question is one of these; ``leased``:
    whoever put it may still be waiting. ``due``: its wait is over, which says nothing while it is parked.
    """

    number: int
    id: UUID
    topic: str
    fenced: bool = False
    delayed: bool = False
    verdict: Verdict | None = None
    by: str | None = None
    checks: int = 0
    asked: int = 0
    fences: int = 0
    unanswered: int = 0
    due: bool = False
    parked: bool = False
    wanted: bool = False
    open: bool = False
    leased: bool = False
    recalled: bool = False
    pruned: bool = False

    @property
    def undecided(self) -> bool:
        """Does it wait for a decision?"""
        return self.verdict is None

    @property
    def spent(self) -> bool:
        """Would the next pass park it without asking?"""
        return self.checks >= MAX_CHECKS and not self.wanted

    @property
    def error(self) -> type[Exception] | None:
        """The error of whoever decides it otherwise now, or wants to be the first."""
        if self.pruned:
            return HalfNotFound
        if self.verdict is None:
            return None
        return AlreadyCommitted if self.verdict == "commit" else AlreadyRolledBack

    def decide(self, resolution: Resolution | Verdict, by: str) -> bool:
        """Decide it unless it is decided; tell whether this was the decision."""
        if not self.undecided:
            return False
        self.verdict = "commit" if resolution == Resolution.COMMIT else "rollback"
        self.by = by
        self.due = self.parked = self.open = self.leased = False
        return True

    def lease(self) -> tuple[int, int]:
        """Count a question; return its number, and the counter."""
        self.checks += 1
        self.asked += 1
        self.unanswered += 1
        self.open = self.leased = True
        self.due = self.wanted = False
        return self.asked, self.checks

    def answer(self, lease: tuple[int, int], resolution: Resolution) -> bool:
        """Take the answer to a question, unless another was put since; tell whether it was the decision."""
        question, counter = lease
        if question != self.asked:
            return False
        self.unanswered -= 1
        self.open = self.leased = False
        if resolution is not Resolution.UNKNOWN:
            return self.decide(resolution, "check")
        if self.undecided and self.checks == counter:
            self.due = False
            self.parked = self.parked or self.checks >= MAX_CHECKS
        return False

    def reset(self) -> None:
        """Set the counter back. It is due, but for a question that is open: not before its lease ends."""
        self.checks = 0
        self.due, self.parked = self.due or not self.open, False

    def once_more(self) -> None:
        """Have it checked once more."""
        self.wanted = True
        self.due, self.parked = self.due or not self.open, False


@dataclass(frozen=True, slots=True)
class Write:
    """A half message that a transaction writes at its commit."""

    half: Half


@dataclass(frozen=True, slots=True)
class Decide:
    """A decision that a transaction writes at its commit, which fails unless it is the first."""

    half: Half
    resolution: Resolution


@dataclass(frozen=True, slots=True)
class Change:
    """A business change."""

    number: int


Step = Write | Decide | Change


@dataclass(slots=True)
class Model:
    """All halves that were ever committed to the database, and the business changes that must be there."""

    halves: dict[int, Half] = field(default_factory=dict)
    lost: list[Half] = field(default_factory=list)
    changes: set[int] = field(default_factory=set)
    #: What checkers with a session wrote together with their verdict.
    noted: Counter[int] = field(default_factory=Counter)
    audits: int = 0
    numbers: int = 0

    def next_number(self) -> int:
        """Return a number that no half and no change has."""
        self.numbers += 1
        return self.numbers

    def refused(self, steps: list[Step]) -> type[Exception] | None:
        """Return the error with which a transaction of these steps must fail, if it must."""
        written = {id(step.half) for step in steps if isinstance(step, Write)}
        decided: dict[int, Half] = {}
        for step in steps:
            if not isinstance(step, Decide):
                continue
            half = step.half
            if id(half) not in written and self.halves.get(half.number) is not half:
                return HalfNotFound
            if (error := half.error) is not None:
                return error
            if (earlier := decided.get(id(half))) is not None:
                return earlier.error
            decided[id(half)] = Half(half.number, half.id, half.topic, verdict=step.resolution.value)  # type: ignore[arg-type]
        return None

    def commit(self, steps: list[Step]) -> None:
        """Apply the steps of a transaction that committed."""
        for step in steps:
            match step:
                case Write(half):
                    self.halves[half.number] = half
                case Decide(half, resolution):
                    half.decide(resolution, "producer")
                case Change(number):
                    self.changes.add(number)

    def forget(self, steps: list[Step]) -> None:
        """Apply the end of a transaction that didn't commit, or of a part of it."""
        self.lost += [step.half for step in steps if isinstance(step, Write)]

    def undecided(self) -> list[Half]:
        """Return the halves that wait for a decision."""
        return [half for half in self.halves.values() if half.undecided]

    def ended(self) -> list[Half]:
        """Return the halves that will never be delivered, or not again."""
        return [
            half for half in self.halves.values() if not half.pruned and (half.verdict == "rollback" or half.recalled)
        ]

    def due(self) -> list[Half]:
        """Return the halves that the next pass decides by their fence, asks about, or parks."""
        return [
            half for half in self.undecided() if half.due and not half.parked and (half.fenced or half.topic in ASKABLE)
        ]
