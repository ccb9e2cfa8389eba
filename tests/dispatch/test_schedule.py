"""Randomised schedules of overlapping transactions on real connections, with the dispatcher in between."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings, strategies
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import NestedTransaction

from outbox import Outbox, Settings
from outbox.dispatch.dispatch_pass import dispatch_once
from tests.dispatch.support import assert_dense, by_key, flush, messages
from tests.kit import tries

CONNECTIONS = 4
KEYS = 3
LOCK = text("UPDATE counter SET value = value + 1 WHERE key = :key")
RESET = text(
    "TRUNCATE outbox.message, outbox.op_message, outbox.half_message, outbox.scheduled_message; "
    "UPDATE counter SET value = 0"
)


@dataclass
class Writer:
    """One connection, and what its transaction will have done if it commits."""

    connection: Connection
    sends: list[tuple[str, int]] = field(default_factory=list)
    savepoints: list[tuple[NestedTransaction, int, set[str]]] = field(default_factory=list)
    locks: set[str] = field(default_factory=set)


class Interpreter:
    """Runs a schedule; a lock is only taken where it is free, so no step ever waits."""

    def __init__(self, app: Outbox, dispatcher: Connection, writers: list[Connection]) -> None:
        self.app, self.dispatcher = app, dispatcher
        self.writers = [Writer(connection) for connection in writers]
        self.committed: dict[str, list[int]] = {}
        self.count = 0

    def step(self, who: int, what: str, key: str, limit: int) -> None:
        """Do one thing, or nothing where it isn't possible now."""
        if what == "dispatch":
            dispatch_once(self.dispatcher, self.app.settings, limit=limit)
            return
        writer = self.writers[who]
        if not writer.connection.in_transaction():
            writer.connection.begin()
        getattr(self, f"_{what}")(writer, key)

    def _xid(self, writer: Writer, _: str) -> None:
        writer.connection.execute(text("SELECT pg_current_xact_id()"))

    def _send(self, writer: Writer, key: str) -> None:
        if key not in writer.locks:
            if any(key in other.locks for other in self.writers):
                return
            writer.connection.execute(LOCK, {"key": key})
            writer.locks.add(key)
        self.count += 1
        self.app.send(writer.connection, "t", self.count, key=key)
        writer.sends.append((key, self.count))

    def _flush(self, writer: Writer, _: str) -> None:
        # Only what is in no savepoint: the framework itself never writes earlier than at the commit.
        if not writer.savepoints:
            flush(writer.connection)

    def _savepoint(self, writer: Writer, _: str) -> None:
        writer.savepoints.append((writer.connection.begin_nested(), len(writer.sends), set(writer.locks)))

    def _undo(self, writer: Writer, _: str) -> None:
        if writer.savepoints:
            savepoint, length, locks = writer.savepoints.pop()
            savepoint.rollback()
            del writer.sends[length:]
            writer.locks = locks

    def _release(self, writer: Writer, _: str) -> None:
        if writer.savepoints:
            writer.savepoints.pop()[0].commit()

    def _commit(self, writer: Writer, _: str) -> None:
        self._end(writer, commit=True)

    def _rollback(self, writer: Writer, _: str) -> None:
        self._end(writer, commit=False)

    def _end(self, writer: Writer, *, commit: bool) -> None:
        transaction = writer.connection.get_transaction()
        assert transaction is not None
        if commit:
            transaction.commit()
            for key, number in writer.sends:
                self.committed.setdefault(key, []).append(number)
        else:
            transaction.rollback()
        writer.sends, writer.savepoints, writer.locks = [], [], set()

    def finish(self, limit: int) -> None:
        """Commit what is open, dispatch the rest."""
        for writer in self.writers:
            if writer.connection.in_transaction():
                self._end(writer, commit=True)
        while dispatch_once(self.dispatcher, self.app.settings, limit=limit).more:
            pass


STEPS = strategies.lists(
    strategies.tuples(
        strategies.integers(0, CONNECTIONS - 1),
        strategies.sampled_from(
            ["send"] * 6
            + ["commit"] * 4
            + ["dispatch"] * 5
            + ["savepoint", "undo"] * 3
            + ["xid", "flush", "release", "rollback"]
        ),
        strategies.sampled_from([f"k{n}" for n in range(KEYS)]),
        strategies.integers(1, 5),
    ),
    min_size=25,
    max_size=90,
)


def test_any_schedule_dispatches_what_was_committed_in_commit_order(app: Outbox, engine: Engine) -> None:
    """Whatever transactions overlap: dispatched is what committed, each key in commit order, positions without hole."""
    with engine.connect() as dispatcher, ExitStack() as stack:
        writers = [stack.enter_context(engine.connect()) for _ in range(CONNECTIONS)]

        @settings(max_examples=tries(20), suppress_health_check=list(HealthCheck), database=None)
        @given(steps=STEPS, limit=strategies.integers(1, 5))
        def check(steps: list[tuple[int, str, str, int]], limit: int) -> None:
            with dispatcher.begin():
                dispatcher.execute(RESET)
            interpreter = Interpreter(app, dispatcher, writers)
            try:
                for step in steps:
                    interpreter.step(*step)
                interpreter.finish(limit)
            finally:
                for writer in writers:
                    if writer.in_transaction():
                        writer.rollback()
            found = messages(dispatcher)
            assert_dense(found)
            assert by_key(found) == interpreter.committed

        check()


def test_the_interpreter_finds_a_cut_by_xid(app: Outbox, engine: Engine, settings: Settings) -> None:
    """The check above can fail: messages in the order of their transactions' xids do not pass it."""
    with engine.connect() as dispatcher, engine.connect() as first, engine.connect() as second:
        interpreter = Interpreter(app, dispatcher, [first, second])
        for who, what in ((0, "xid"), (1, "send"), (1, "commit"), (0, "send"), (0, "commit")):
            interpreter.step(who, what, "k0", 1)
        with dispatcher.begin():
            by_xid = dispatcher.execute(
                text(
                    "SELECT convert_from(h.body, 'UTF8')::int FROM outbox.op_message o "
                    "JOIN outbox.half_message h ON h.id = o.half_id ORDER BY o.xid, o.sequence"
                )
            ).scalars()
            assert list(by_xid) != interpreter.committed["k0"]
        interpreter.finish(1)
        assert by_key(messages(dispatcher)) == interpreter.committed
