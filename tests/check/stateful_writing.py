"""Rules of the stateful test: transactions that send, prepare and decide, and fenced functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from outbox import Resolution
from outbox.errors import HalfNotFound
from tests.check.stateful_calls import Call, Death, Refused
from tests.check.stateful_model import LONE, TOPICS, Change, Decide, Half, Model, Step, Write
from tests.check.stateful_script import COMMIT, ROLLBACK
from tests.check.stateful_world import CHANGE, DOOM, PID, World

T = TypeVar("T")

topics = st.sampled_from(TOPICS)
verdicts = st.sampled_from([COMMIT, ROLLBACK])
#: Which one of those that there are.
picks = st.integers(0, 15)
rarely = st.sampled_from([False, False, False, True])
writes = st.lists(st.tuples(topics, st.booleans(), rarely), max_size=2)
kinds = st.sampled_from(["prepared", "prepared", "prepared", "sent", "delayed", "dead"])


class Transaction:
    """An open transaction with a session: its steps, by savepoint."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pid = session.scalar(PID) or 0
        self.levels: list[list[Step]] = [[]]
        self.savepoints: list[Any] = []

    @property
    def steps(self) -> list[Step]:
        """All that was done so far and not undone."""
        return [step for level in self.levels for step in level]


class Writing(RuleBasedStateMachine):
    """The rules; each does something to the database and says what must come of it."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.world.empty()
        self.outbox = self.world.outbox
        self.model = Model()
        self.open: list[Transaction] = []
        self.calls: list[tuple[Call, Half]] = []
        #: As the last invariant has found it.
        self.state = self.world.state()

    @initialize(seeds=st.lists(st.tuples(topics, kinds), min_size=2, max_size=6), dispatched=st.booleans())
    def begin_with(self, seeds: list[tuple[str, str]], dispatched: bool) -> None:
        """Begin with some halves, of which some are those of fenced functions that died before their business.

        The first dispatch there ever is compares all ops with all messages; the later ones go on from a cursor.
        """
        while dispatched and self.world.dispatch():
            pass
        transaction = Transaction(self.world.sessions())
        for topic, kind in seeds:
            if kind == "dead":
                self.call(topic, begins=False)
                self._go_on(*self.calls.pop(), "die")
            else:
                self._write(transaction, topic, kind == "prepared", kind == "delayed")
        self._end(transaction, "commit")

    def pick(self, pick: int, candidates: Sequence[T]) -> T:
        """Return one of the candidates."""
        return candidates[pick % len(candidates)]

    @property
    def halves(self) -> list[Half]:
        """All halves there ever were, the undecided ones more often than the others."""
        return self.model.undecided() * 2 + list(self.model.halves.values()) + self.model.lost[:2]

    # --- transactions ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < 3)
    @rule(writes=writes)
    def begin(self, writes: list[tuple[str, bool, bool]]) -> None:
        """Begin a transaction, perhaps with some writes."""
        self.open.append(Transaction(self.world.sessions()))
        for write in writes:
            self._write(self.open[-1], *write)

    @precondition(lambda self: self.open)
    @rule(pick=picks, topic=topics, prepared=st.booleans(), delayed=rarely)
    def write(self, pick: int, topic: str, prepared: bool, delayed: bool) -> None:
        """Make a business change and send or prepare a message with it."""
        self._write(self.pick(pick, self.open), topic, prepared, delayed)

    def _write(self, transaction: Transaction, topic: str, prepared: bool, delayed: bool) -> Half:
        number = self.model.next_number()
        transaction.session.execute(CHANGE, {"number": number})
        act = self.outbox.prepare if prepared else self.outbox.send
        id_ = act(transaction.session, topic, {"number": number}, delay=3600 if delayed else None)
        half = Half(number, id_, topic, delayed=delayed)
        if not prepared:
            half.decide(COMMIT, "producer")
        transaction.levels[-1] += [Change(number), Write(half)]
        return half

    @precondition(lambda self: self.open and self.halves)
    @rule(pick=picks, which=picks, resolution=verdicts, own=rarely)
    def decide_within(self, pick: int, which: int, resolution: Resolution, own: bool) -> None:
        """Make a business change, and decide a half at its commit; perhaps one that is prepared there."""
        transaction = self.pick(pick, self.open)
        half = self._write(transaction, LONE, True, False) if own else self.pick(which, self.halves)
        if half.fenced:
            return
        number = self.model.next_number()
        transaction.session.execute(CHANGE, {"number": number})
        (self.outbox.commit if resolution is COMMIT else self.outbox.rollback)(half.id, within=transaction.session)
        transaction.levels[-1] += [Change(number), Decide(half, resolution)]

    @precondition(lambda self: any(len(each.savepoints) < 2 for each in self.open))
    @rule(pick=picks, writes=writes)
    def savepoint(self, pick: int, writes: list[tuple[str, bool, bool]]) -> None:
        """Set a savepoint, perhaps with some writes after it."""
        transaction = self.pick(pick, [each for each in self.open if len(each.savepoints) < 2])
        transaction.savepoints.append(transaction.session.begin_nested())
        transaction.levels.append([])
        for write in writes:
            self._write(transaction, *write)

    @precondition(lambda self: any(each.savepoints for each in self.open))
    @rule(pick=picks, keep=st.booleans())
    def end_savepoint(self, pick: int, keep: bool) -> None:
        """Release a savepoint, or go back to it."""
        transaction = self.pick(pick, [each for each in self.open if each.savepoints])
        savepoint, steps = transaction.savepoints.pop(), transaction.levels.pop()
        if keep:
            savepoint.commit()
            transaction.levels[-1] += steps
        else:
            savepoint.rollback()
            self.model.forget(steps)

    @precondition(lambda self: self.open)
    @rule(pick=picks, how=st.sampled_from(["commit", "commit", "commit", "rollback", "cut", "doom", "close"]))
    def end(self, pick: int, how: str) -> None:
        """End a transaction, by itself or by the loss of its connection, before its COMMIT or at it."""
        transaction = self.pick(pick, self.open)
        self.open.remove(transaction)
        self._end(transaction, how)

    def _end(self, transaction: Transaction, how: str) -> None:
        refused = self.model.refused(transaction.steps)
        expected = [error for error in (refused, how in {"cut", "doom"} and OperationalError) if error]
        failed = how in {"rollback", "close"} or bool(expected)
        with transaction.session as session:
            if how == "cut":
                self.world.cut(transaction.pid)
            if how == "doom":
                session.execute(DOOM)
            if how in {"rollback", "close"}:
                getattr(session, how)()
            elif expected:
                with pytest.raises(tuple(expected)):
                    session.commit()
            else:
                session.commit()
        (self.model.forget if failed else self.model.commit)(transaction.steps)

    @rule(
        topic=topics,
        prepared=st.sampled_from([True, True, False]),
        delayed=rarely,
        how=st.sampled_from(["commit", "commit", "commit", "doom"]),
    )
    def write_alone(self, topic: str, prepared: bool, delayed: bool, how: str) -> None:
        """Send or prepare one message in a transaction."""
        transaction = Transaction(self.world.sessions())
        self._write(transaction, topic, prepared, delayed)
        self._end(transaction, how)

    @precondition(lambda self: self.halves)
    @rule(pick=picks, resolution=verdicts)
    def decide(self, pick: int, resolution: Resolution) -> None:
        """Decide a half in a transaction of its own: again the same is fine, anything else is refused."""
        half = self.pick(pick, self.halves)
        if half.fenced:
            return
        act = self.outbox.commit if resolution is COMMIT else self.outbox.rollback
        self._decide(half, resolution, "producer", lambda: act(half.id))

    def _decide(self, half: Half, resolution: Resolution, by: str, act: Callable[[], Any]) -> bool:
        """Have a half decided, and see that only the first decision counts; tell whether this was the one."""
        if half in self.model.lost:
            with pytest.raises(HalfNotFound):
                act()
            return False
        if half.error and (half.pruned or half.verdict != resolution):
            with pytest.raises(half.error):
                act()
            return False
        first = half.decide(resolution, by)
        assert act().first == first
        return first

    # --- fenced functions --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.calls) < 3)
    @rule(topic=topics, begins=st.booleans())
    def call(self, topic: str, begins: bool) -> None:
        """Call a fenced function: its half is prepared, its business is about to begin, or begins."""
        number = self.model.next_number()
        call = Call(self.world.calls[topic], number)
        assert call.where == "prepared", call.error
        half = self.model.halves[number] = Half(number, self.world.id_of(number), topic, fenced=True)
        self.calls.append((call, half))
        if begins:
            self._go_on(call, half, "go")

    @precondition(lambda self: self.calls)
    @rule(pick=picks, how=st.sampled_from(["go", "go", "refuse", "refuse and wait", "break", "die", "doom"]))
    def go_on(self, pick: int, how: str) -> None:
        """Let a fenced function go on to where it stops next; or fail, say no, die, or die at its COMMIT."""
        call, half = self.pick(pick, self.calls)
        self._go_on(call, half, how)
        if how == "refuse" and call.where == "deciding":
            self._go_on(call, half, "go")
        if call.where == "ended":
            self.calls.remove((call, half))

    def _go_on(self, call: Call, half: Half, how: str) -> None:
        was, connected = call.where, call.connected
        command: BaseException | str = Death() if how == "die" else "go"
        if was == "business" and how not in {"go", "die"}:
            command = "doom" if how == "doom" else ValueError("boo") if how == "break" else Refused()
        now = call.tell(command)
        if isinstance(command, Death):
            assert isinstance(call.error, Death | OperationalError), call.error
        elif was == "prepared" and half.error and not half.pruned:
            assert isinstance(call.error, half.error), call.error
        elif was == "prepared":
            assert now == "business", call.error
        elif was == "deciding":
            assert isinstance(call.error, Refused)
            half.decide(ROLLBACK, "producer")
        elif isinstance(command, Refused):
            assert now == "deciding", call.error
        elif how == "break":
            assert isinstance(call.error, ValueError), call.error
        elif not connected or how == "doom":
            assert isinstance(call.error, (OperationalError, half.error or OperationalError)), call.error
        elif half.error:
            assert isinstance(call.error, half.error), call.error
        else:
            assert now == "ended" and call.error is None, call.error
            half.decide(COMMIT, "producer")
            self.model.changes.add(half.number)

    @precondition(lambda self: any(call.where == "business" for call, _ in self.calls))
    @rule(pick=picks)
    def cut_call(self, pick: int) -> None:
        """End the connection of a fenced function that is at its business."""
        call, _ = self.pick(pick, [each for each in self.calls if each[0].where == "business"])
        self.world.cut(call.pid)
        call.connected = False

    def _runs(self, half: Half) -> bool:
        """Tell whether the business transaction of a fenced half is open."""
        return any(each is half and call.where == "business" and call.connected for call, each in self.calls)
