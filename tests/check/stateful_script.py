"""What the checkers of the stateful test answer, and what happens while they are asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Orphan, Resolution
from tests.check.stateful_model import ASKABLE, MAX_CHECKS, Half, Model
from tests.check.stateful_world import CUT, DOOM, NOTE, PID, WHO, World

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN

#: What may be answered while others are being asked, too.
PLAIN = ("commit", "rollback", "unknown", "raise", "none", "text")
#: The checker's transaction is undone, or its connection lost.
_LOSSES = ("undo", "cut", "doom")
#: What somebody else does while the question is open, and the plain answer that follows.
_MEANWHILE = {
    "producer": "rollback",
    "operator": "commit",
    "reset": "unknown",
    "once more": "rollback",
    "other worker": "commit",
}
ROUGH = (*_LOSSES, *_MEANWHILE)

#: What each plain answer means.
_MEANING = {"commit": COMMIT, "rollback": ROLLBACK}


class Script:
    """The answers of one pass, or of one check by hand; it keeps the model in step.

    A half gets the answers in turn, and only once one of the rough ones. What is wrong about a question goes into
    ``wrong``, since an exception of a checker's is an answer, too.
    """

    def __init__(
        self,
        world: World,
        model: Model,
        answers: Sequence[str],
        begin_pass: Callable[[], None],
        *,
        by_hand: bool = False,
        dies: bool = False,
    ) -> None:
        self.wrong: list[str] = []
        self._world, self._model, self._answers = world, model, answers
        self._begin_pass = begin_pass
        self._by_hand, self._dies = by_hand, dies
        self._disturbed: set[int] = set()
        self._guard = threading.Lock()

    def ask(self, orphan: Orphan, session: Session | None) -> Any:
        """Answer a question."""
        with self._guard:
            half = self._model.halves[orphan.body["number"]]
            self._look(half, orphan)
            lease = half.lease()
            self._by_hand = False
            answer = self._answers[(half.number + half.asked) % len(self._answers)]
        if session is not None:
            session.execute(NOTE, {"number": half.number})
        if self._dies:
            self._world.cut(self._world.room_pid)
            self._world.cut(self._world.pass_pid)
            return UNKNOWN
        if answer in ROUGH:
            if half.number in self._disturbed:
                return self._answered(half, lease, "unknown", session)
            self._disturbed.add(half.number)
        return self._answered(half, lease, self._disturb(answer, half, session), session)

    def _look(self, half: Half, orphan: Orphan) -> None:
        expected = half.due and not half.parked and not half.spent
        if not (expected or self._by_hand) or not half.undecided or half.fenced or half.topic not in ASKABLE:
            self.wrong.append(f"asked about {half}")
        if orphan.id != half.id or orphan.topic != half.topic:
            self.wrong.append(f"{orphan} is not {half}")
        limit = MAX_CHECKS if expected and not half.wanted else half.checks + 1
        if orphan.checks != half.checks + 1 or orphan.checks > limit:
            self.wrong.append(f"question number {orphan.checks} about {half}")

    def _disturb(self, answer: str, half: Half, session: Session | None) -> str:
        """Do what belongs to a rough answer; return the plain answer that it comes to."""
        if answer not in ROUGH:
            return answer
        if answer in _LOSSES:
            return self._lose(answer, session)
        self._meanwhile(answer, half)
        return _MEANWHILE[answer]

    def _lose(self, answer: str, session: Session | None) -> str:
        """Undo the checker's transaction, or end its connection, now or at its COMMIT."""
        if session is None:
            if answer != "cut":
                return "commit"
            self._world.cut(self._world.room_pid)
        elif answer == "undo":
            session.rollback()
        elif answer == "doom":
            session.execute(DOOM)
        else:
            with suppress(OperationalError):
                session.execute(CUT, {"pid": session.scalar(PID)})
        return "lost"

    def _meanwhile(self, answer: str, half: Half) -> None:
        match answer:
            case "producer":
                self._world.outbox.commit(half.id)
                half.decide(COMMIT, "producer")
            case "operator":
                self._world.outbox.operator.rollback(half.id, **WHO)
                half.decide(ROLLBACK, "operator")
                self._model.audits += 1
            case "reset":
                self._world.outbox.operator.reset(half.id, **WHO)
                half.reset()
                self._model.audits += 1
            case "once more":
                self._world.outbox.operator.check(half.id, **WHO)
                half.once_more()
                self._model.audits += 1
            case "other worker":
                self._world.age_checks([half.id])
                half.due, half.leased = True, False
                self._begin_pass()
                self._world.check(1)

    def _answered(self, half: Half, lease: tuple[int, int], answer: str, session: Session | None) -> Any:
        with self._guard:
            first = half.answer(lease, _MEANING.get(answer, UNKNOWN))
            self._model.noted[half.number] += first and session is not None
        match answer:
            case "commit" | "lost":
                return COMMIT
            case "rollback":
                return ROLLBACK
            case "raise":
                raise ValueError("the checker's own error")
            case "none":
                return None
            case "text":
                return "commit"
        return UNKNOWN
