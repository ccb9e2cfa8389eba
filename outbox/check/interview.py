"""One question from the claim to the record: the verdict is written in the transaction in which it was found."""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.check.checker import Checker
from outbox.check.question import ask
from outbox.decide import decide
from outbox.joined import JoinedSession, commit
from outbox.model import Answer, Counts, Orphan, Resolution
from outbox.settings import Settings
from outbox.store import check as store
from outbox.store.execute import Row, Statement, execute, is_lost
from outbox.text import error_text, summary_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger("outbox.check")

#: How long (seconds) a checker's statement may wait for a lock. It may be waiting for the very transaction that it is
#: asked about: then UNKNOWN is the answer, and the connection is free for another question.
LOCK_TIMEOUT = 0.5


class _QuestionClosed(Exception):
    """An answer came after the question was given up, or put again."""


@dataclass(slots=True, eq=False)
class Interview:
    """A claimed half, whom to ask about it, and what came of it.

    ``answer`` is None until it is recorded; ``held`` tells that it was begun, ``given_up`` that it took too long.
    """

    checker: Checker
    settings: Settings
    half_id: UUID
    claim: int
    history_id: int
    orphan: Orphan | None
    answer: Answer | None = None
    parked: bool = False
    held: bool = False
    given_up: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, checker: Checker, settings: Settings, row: Row) -> Interview:
        """Return the interview for a row of `store.claim`."""
        half_id, claim, history_id, key, tag, headers, content_type, raw, born_at, age, gone = row
        orphan = None
        if not gone:
            orphan = Orphan(
                half_id,
                checker.topic,
                key,
                tag,
                json.loads(headers) if headers else {},
                content_type,
                raw,
                born_at,
                dt.timedelta(seconds=age),
                claim,
                checker.model,
            )
        return cls(checker, settings, half_id, claim, history_id, orphan)

    def hold(self, connection: Connection, _: Connection) -> Counts:
        """Ask, and record the answer, on a connection that isn't in a transaction; not if it was given up by then."""
        with connection.begin():
            # A connection that was lost while it lay idle fails here, and nobody is asked who couldn't be heard.
            execute(connection, self._limits())
        with self._guard:
            if self.given_up:
                return Counts()
            self.held = True
        answer = self._answer(connection)
        if answer.resolution is Resolution.UNKNOWN:
            self.record_unknown(connection, answer)
            return Counts()
        if answer.decided_by is not None:
            with connection.begin():
                execute(connection, self._answered(answer))
        self.answer = answer
        return Counts()

    def give_up(self) -> None:
        """Don't begin, if it hasn't begun."""
        with self._guard:
            self.given_up = True

    def record_unknown(self, connection: Connection, answer: Answer) -> None:
        """Record that there is no verdict; park the half if this was its last check."""
        with connection.begin():
            (parked,) = execute(connection, self._unknown(answer))
        self.answer = answer
        self.parked = bool(parked and parked[0][0])
        if self.parked:
            logger.warning(
                "half message %s of topic %r is parked after %d checks without a verdict",
                self.half_id,
                self.checker.topic,
                self.claim,
                extra={"event": "half.parked", "half_id": str(self.half_id), "topic": self.checker.topic},
            )

    def give_back(self, connection: Connection) -> None:
        """Undo the claim: nobody was asked."""
        with connection.begin():
            execute(connection, store.unasked(self.settings.schema, self.half_id, self.claim, self.history_id))

    def _answer(self, connection: Connection) -> Answer:
        if (orphan := self.orphan) is None:
            return Answer(Resolution.UNKNOWN, "its half message is gone")
        if self.checker.takes_session:
            return self._in_one_transaction(connection, lambda: self._ask_with_session(connection, orphan))
        # No transaction is open meanwhile: the checker may be asking another service.
        answer = ask(self.checker, orphan, None)
        if answer.resolution is Resolution.UNKNOWN:
            return answer
        return self._in_one_transaction(connection, lambda: self._decide(connection, answer))

    def _in_one_transaction(self, connection: Connection, find: Callable[[], Answer]) -> Answer:
        """Find a verdict and commit it with all that was written for it; undo that if there is none, or it lost."""
        began = time.monotonic()
        transaction = connection.begin()
        try:
            # Before anything of the checker's: this also begins the transaction on a connection in AUTOCOMMIT mode.
            execute(connection, self._limits())
            answer = find()
            if answer.resolution is not Resolution.UNKNOWN and answer.decided_by is None:
                commit(connection)
        except Exception as error:
            if is_lost(connection):
                raise
            return Answer(Resolution.UNKNOWN, error_text(error), time.monotonic() - began)
        finally:
            if transaction.is_active:
                transaction.rollback()
        return answer

    def _ask_with_session(self, connection: Connection, orphan: Orphan) -> Answer:
        joined = JoinedSession(connection, is_async=self.checker.is_async)
        try:
            answer = ask(self.checker, orphan, joined)
            if answer.resolution is Resolution.UNKNOWN:
                return answer
            joined.finish()
        finally:
            joined.close()
        return self._decide(connection, answer)

    def _decide(self, connection: Connection, answer: Answer) -> Answer:
        """Write op and answer, unless somebody decided meanwhile: then theirs is the answer."""
        decision = decide(connection, self.settings.schema, self.half_id, answer.resolution, "check")
        if not decision.first:
            error = f"answered {answer.resolution}, but the {decision.decided_by} had decided {decision.resolution}"
            return Answer(decision.resolution, error, answer.seconds, decision.decided_by)
        # With the half's lock, which whoever puts another question must have: it can't be put from here on.
        (recorded,) = execute(connection, self._answered(answer))
        if not recorded:
            raise _QuestionClosed(f"answered {answer.resolution}, but too late: the question was closed")
        return answer

    def _limits(self) -> Statement:
        return store.limit_checker(self.checker.timeout, min(LOCK_TIMEOUT, self.checker.timeout))

    def _answered(self, answer: Answer) -> Statement:
        return store.answered(
            self.settings.schema,
            self.half_id,
            self.history_id,
            answer.resolution.value,
            answer.seconds,
            answer.error,
        )

    def _unknown(self, answer: Answer) -> Statement:
        return store.unknown(
            self.settings.schema,
            self.half_id,
            self.history_id,
            self.claim,
            self.checker.interval,
            self.checker.max_checks,
            answer.seconds,
            answer.error,
        )


def unanswered(error: BaseException | None, seconds: float) -> Answer:
    """Return the answer of an interview that ended without one, or that was given up after so many seconds."""
    if error is not None:
        return Answer(Resolution.UNKNOWN, summary_of(error), seconds)
    return Answer(Resolution.UNKNOWN, f"no answer within {seconds:g} s: the checker was given up", seconds)
