"""What a checker declares; and ask checkers, several at a time, and give up those that take too long.

An interview is one question from its lease to its record: the verdict is written in the transaction in which it was
found. Only a Resolution is an answer; whatever else a checker returns or raises is UNKNOWN.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar
from uuid import UUID

from outbox.calling.callback import parked_callback, parked_facts, parked_notice
from outbox.calling.engine import CallFailed, call
from outbox.calling.function import CalledFunction
from outbox.check import sql
from outbox.database.decision import decide
from outbox.database.engines import NewRunner, Runner
from outbox.database.execute import Row, Statement, execute, is_lost
from outbox.database.notices import Notice, write_notices
from outbox.database.session import commit
from outbox.database.sql import limits
from outbox.errors import InvalidHandler
from outbox.message.answer import CHECKER, CalledKind
from outbox.message.model import Answer, Counts, Orphan, Resolution, read_headers
from outbox.settings import Settings
from outbox.telemetry.events import HalfChecked, HalfParked
from outbox.telemetry.hooks import emit
from outbox.text import SEARCHED_CHARS, error_text, summary_of, without

if TYPE_CHECKING:
    from sqlalchemy import Connection


_INT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checker(CalledFunction):
    """The checker of a topic (RocketMQ: ``TransactionListener.checkLocalTransaction``); durations in seconds.

    ``function`` takes the `Orphan`, and a session if it has a second parameter. ``immunity`` is for halves of this
    topic that name none of their own; ``interval``, ``max_checks`` and ``timeout`` are as in `Settings`.

    Raises:
        InvalidHandler: a function that can't be called so, or a rule that can't work.
    """

    decorator: ClassVar[str] = "checker"
    kind: ClassVar[CalledKind] = CHECKER
    forms: ClassVar[tuple[tuple[str, ...], ...]] = (("orphan", "session"), ("orphan",))
    settings: ClassVar[Mapping[str, str]] = {
        "immunity": "immunity",
        "interval": "check_interval",
        "max_checks": "max_checks",
        "timeout": "check_timeout",
    }
    timeout: float
    immunity: float
    interval: float
    max_checks: int

    def check(self) -> None:
        """Raise InvalidHandler if a rule can't work."""
        if not self.interval > 0:
            raise InvalidHandler(f"{self.what}: interval = {self.interval!r} must be greater than 0 (seconds)")
        if type(self.max_checks) is not int or not 0 < self.max_checks <= _INT:
            raise InvalidHandler(f"{self.what}: max_checks = {self.max_checks!r} must be an int between 1 and {_INT}")

    def check_with(self, settings: Settings) -> None:
        """Raise InvalidHandler if it may take longer than a pass."""
        if self.timeout > settings.check_time_limit:
            raise InvalidHandler(
                f"{self.what}: timeout = {self.timeout!r} s is longer than a pass may take "
                f"(check_time_limit = {settings.check_time_limit!r} s)"
            )


def ask(checker: Checker, orphan: Orphan, connection: Connection) -> Answer:
    """Call the checker, in the transaction on a connection if it takes a session; each end of it becomes an answer."""
    began, refusal = time.monotonic(), None
    try:
        # A str that spells a resolution is refused as well: a checker that returns one may just as well return "ok".
        resolution = call(checker, orphan, connection)
    except CallFailed as failed:
        resolution, refusal = Resolution.UNKNOWN, str(failed)
    except QuestionDropped:
        raise
    except Exception as error:
        return Answer(Resolution.UNKNOWN, error_text(error), time.monotonic() - began, cause=error)
    return Answer(resolution, refusal, time.monotonic() - began)


#: How long (seconds) a checker's statement may wait for a lock. It may be waiting for the very transaction that it is
#: asked about: then UNKNOWN is the answer, and the connection is free for another question.
LOCK_TIMEOUT = 0.5


def tell_parked(schema: str, checker: Checker, parked: Mapping[UUID, Row]) -> list[Statement]:
    """Tell the callback of a topic, if there is one, that halves were parked: by ids, why and after how many checks."""
    callback = parked_callback(checker)
    if callback is None or not parked:
        return []
    notices = [Notice(parked_notice(id_, None), id_, parked_facts(None, *why)) for id_, why in parked.items()]
    return [write_notices(schema, callback.internal, callback.group, notices)]


class QuestionDropped(Exception):
    """The question never came to an answer, since the process that was asked went away: it was no check."""


class _QuestionClosed(Exception):
    """An answer came after the question was given up, or put again."""


@dataclass(slots=True, eq=False)
class Interview:
    """A leased half, its checker, and what came of it.

    ``answer`` is None until it is recorded; ``held`` tells that it was begun, ``abandoned`` that it took too long. The
    `Asker` runs it on ``runner`` until ``deadline`` (by `time.monotonic`), ``ended`` tells that it runs no more.
    """

    checker: Checker
    settings: Settings
    half_id: UUID
    checks: int
    history_id: int
    orphan: Orphan | None
    answer: Answer | None = None
    parked: bool = False
    held: bool = False
    abandoned: bool = False
    ended: bool = False
    deadline: float = 0.0
    runner: Runner = field(init=False, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def of(cls, checker: Checker, settings: Settings, row: Row) -> Interview:
        """Return the interview for a row of `sql.lease`."""
        half_id, checks, history_id, key, tag, headers, content_type, raw, born_at, age, gone = row
        orphan = None
        if not gone:
            (headers, encoding), age = read_headers(headers), dt.timedelta(seconds=age)
            known = half_id, checker.topic, key, tag, headers, content_type, raw, born_at, age, checks
            orphan = Orphan(*known, checker.model, checker.codecs, encoding)
        return cls(checker, settings, half_id, checks, history_id, orphan)

    def hold(self, connection: Connection, _: Connection) -> Counts:
        """Ask, and record the answer, on a connection that isn't in a transaction; not if it was given up by then."""
        with connection.begin():
            # A connection that was lost while it lay idle fails here, before a checker is asked in vain.
            execute(connection, self._limits())
        with self._guard:
            if self.abandoned:
                return Counts()
            self.held = True
        try:
            answer = self._answer(connection)
        except QuestionDropped:
            with self._guard:  # one that was given up by now has been recorded
                self.held = self.abandoned
            raise
        if answer.resolution is Resolution.UNKNOWN:
            self.record_unknown(connection, answer)
            return Counts()
        if answer.decided_by is not None:
            with connection.begin():
                execute(connection, self._answered(answer))
        self._keep(answer)
        return Counts()

    def give_up(self) -> None:
        """Don't begin, if it hasn't begun."""
        with self._guard:
            self.abandoned = True

    def record_unknown(self, connection: Connection, answer: Answer) -> None:
        """Record that there is no verdict; park the half if this was its last check."""
        if (orphan := self.orphan) is not None and (error := answer.error) is not None:
            if answer.cause is None:
                text = without(error[:SEARCHED_CHARS], orphan.secrets)
            else:
                text = error_text(answer.cause, orphan.secrets)
            answer = replace(answer, error=text)
        unknown = sql.unknown(
            self.settings.schema,
            half_id=self.half_id,
            id=self.history_id,
            checks=self.checks,
            interval=self.checker.interval,
            max_checks=self.checker.max_checks,
            answer=Resolution.UNKNOWN.value,
            seconds=answer.seconds,
            error=answer.error,
            reason=sql.PARK_REASON,
        )
        with connection.begin():
            (found,) = execute(connection, unknown)
            self.parked = bool(found and found[0][0])
            parked = {self.half_id: found[0][1:]} if self.parked else {}
            if statements := tell_parked(self.settings.schema, self.checker, parked):
                execute(connection, *statements)
        self._keep(answer)
        if self.parked:
            emit(HalfParked(half_id=self.half_id, topic=self.checker.topic, checks=self.checks))

    def _keep(self, answer: Answer) -> None:
        """Keep the recorded answer, and tell it."""
        self.answer = answer
        emit(
            HalfChecked(
                half_id=self.half_id,
                topic=self.checker.topic,
                checks=self.checks,
                resolution=answer.resolution.value,
                seconds=answer.seconds,
                reason=None if answer.error is None else answer.error.partition("\n")[0],
                error=answer.cause,
            )
        )

    def give_back(self, connection: Connection) -> None:
        """Undo the lease: no checker was asked."""
        with connection.begin():
            schema, half_id = self.settings.schema, self.half_id
            execute(connection, sql.unasked(schema, half_id=half_id, checks=self.checks, id=self.history_id))

    def _answer(self, connection: Connection) -> Answer:
        if (orphan := self.orphan) is None:
            return Answer(Resolution.UNKNOWN, "its half message is gone")
        if self.checker.takes_session:
            return self._in_one_transaction(
                connection, lambda: self._decide(connection, ask(self.checker, orphan, connection))
            )
        # No transaction is open meanwhile: the checker may be asking another service.
        answer = ask(self.checker, orphan, connection)
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
            return Answer(Resolution.UNKNOWN, error_text(error), time.monotonic() - began, cause=error)
        finally:
            if transaction.is_active:
                transaction.rollback()
        return answer

    def _decide(self, connection: Connection, answer: Answer) -> Answer:
        """Write op and answer, unless another writer decided meanwhile: then its decision is the answer."""
        if answer.resolution is Resolution.UNKNOWN:
            return answer
        decision = decide(connection, self.settings.schema, self.half_id, answer.resolution, "check")
        if not decision.first:
            error = f"answered {answer.resolution}, but the {decision.decided_by} had decided {decision.resolution}"
            return Answer(decision.resolution, error, answer.seconds, decision.decided_by)
        # With the half's lock, which a worker that puts another question must have: it can't be put from here on.
        (recorded,) = execute(connection, self._answered(answer))
        if not recorded:
            raise _QuestionClosed(f"answered {answer.resolution}, but too late: the question was closed")
        return answer

    def _limits(self) -> Statement:
        return limits(self.checker.timeout, min(LOCK_TIMEOUT, self.checker.timeout))

    def _answered(self, answer: Answer) -> Statement:
        found = {"answer": answer.resolution.value, "seconds": answer.seconds, "error": answer.error}
        return sql.answered(self.settings.schema, half_id=self.half_id, id=self.history_id, **found)


def unanswered(error: BaseException | None, seconds: float) -> Answer:
    """Return the answer of an interview that ended without one, or that was given up after so many seconds."""
    if error is not None:
        return Answer(Resolution.UNKNOWN, summary_of(error), seconds, cause=error)
    return Answer(Resolution.UNKNOWN, f"no answer within {seconds:g} s: the checker was given up", seconds)


class Asker:
    """Holds interviews in threads of their own, at most ``in_flight`` at a time. Used by one thread.

    ``name`` is whose halves it asks about (`Preparation.asker`); None: those of applications.

    A thread can't be ended from outside. A checker that doesn't answer in time is given up: its question is closed, so
    that a late answer can't be recorded, it loses its connection, and its thread is left behind. While ``in_flight``
    threads of a topic are left behind, the topic rests, and the others go on.
    """

    def __init__(self, new_runner: NewRunner, in_flight: int, name: str | None = None) -> None:
        self.name = name
        self._new_runner = new_runner
        self._in_flight = in_flight
        self._idle: dict[bool, list[Runner]] = {False: [], True: []}
        self._running: set[Interview] = set()
        self._ended: SimpleQueue[tuple[Interview, BaseException | None]] = SimpleQueue()
        self._left_behind: Counter[str] = Counter()
        self._unasked: set[str] = set()
        self._guard = threading.Lock()

    @property
    def free(self) -> int:
        """How many interviews may begin now."""
        return self._in_flight - len(self._running)

    @property
    def busy(self) -> bool:
        """Is an interview under way, or ended and not looked at?"""
        return bool(self._running)

    def rests(self, topic: str) -> bool:
        """Tell whether too many of a topic's checkers hang."""
        with self._guard:
            return self._left_behind[topic] >= self._in_flight

    def newly_unasked(self, topics: set[str]) -> list[str]:
        """Remember the topics that no checker can be asked about; return those that the last pass didn't have."""
        new, self._unasked = sorted(topics - self._unasked), topics
        return new

    def make_runner(self, *, is_async: bool) -> None:
        """Make sure that there is a connection for the next interview; raises what refuses one."""
        if not self._idle[is_async]:
            self._idle[is_async].append(self._new_runner(is_async))

    def begin(self, interview: Interview) -> None:
        """Begin an interview in a thread of its own."""
        self.make_runner(is_async=interview.checker.is_async)
        interview.runner = self._idle[interview.checker.is_async].pop()
        interview.deadline = time.monotonic() + interview.checker.timeout
        self._running.add(interview)
        name = f"outbox-check-{interview.checker.topic}"
        thread = threading.Thread(target=self._hold, args=(interview,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process has no threads left
            self._end(interview, error)

    def next_ended(self, *, wait: bool) -> tuple[Interview, Answer | None] | None:
        """Return an interview that has ended or was given up, with its answer if it could not record one itself.

        None: none is running, or, unless it may ``wait``, none has ended so far.
        """
        while self._running:
            soonest = min(self._running, key=lambda interview: interview.deadline)
            left = soonest.deadline - time.monotonic()
            try:
                # Before anything is given up: a question that has ended may have waited for this look.
                interview, error = self._ended.get(wait and left > 0, max(left, 0))
            except Empty:
                if left <= 0 and self._give_up(soonest):
                    return soonest, unanswered(None, soonest.checker.timeout)
                if left <= 0 or wait:
                    continue
                return None
            self._running.remove(interview)
            self._idle[interview.checker.is_async].append(interview.runner)
            if error is None or interview.answer is not None:
                return interview, None
            seconds = interview.checker.timeout - (interview.deadline - time.monotonic())
            return interview, unanswered(error, seconds)
        return None

    def rest(self) -> None:
        """Close the idle connections, but for one."""
        for runners in self._idle.values():
            while len(runners) > 1:
                runners.pop().end()

    def end(self) -> None:
        """Close all connections, also under interviews that run on."""
        for runners in self._idle.values():
            while runners:
                runners.pop().end()
        for interview in list(self._running):
            interview.runner.end()

    def _hold(self, interview: Interview) -> None:
        error: BaseException | None = None
        try:
            interview.runner.run(interview.hold)
            if interview.held and interview.answer is None:  # such as by a GreenletExit, which ends a greenlet silently
                error = RuntimeError("the call of the checker ended without an answer")
        except BaseException as raised:  # a checker may raise whatever it likes; it is recorded as its answer
            error = raised
        self._end(interview, error)

    def _end(self, interview: Interview, error: BaseException | None) -> None:
        with self._guard:
            interview.ended = True
            if interview.abandoned:
                self._left_behind[interview.checker.topic] -= 1
            else:
                self._ended.put((interview, error))

    def _give_up(self, interview: Interview) -> bool:
        """Give an interview up, unless it has just ended."""
        with self._guard:
            if interview.ended:
                return False
            interview.give_up()
            self._left_behind[interview.checker.topic] += 1
        self._running.remove(interview)
        interview.runner.end()
        return True
