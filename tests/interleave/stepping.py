"""A connection that stops before each statement, and a flow: some code in a thread whose connections do so.

A pipeline counts as the statements that it sends, each one a step, BEGIN and COMMIT included: the server runs them one
after the other, and those of other sessions may come between any two. To stop there, stepped connections take the way
of `outbox.database.execute` without pipelines.

A step is not a stop where no other session could tell whether it comes earlier or later: a statement that names no
table, no advisory lock and no snapshot (BEGIN, set_config) belongs to the step after it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from pytest import MonkeyPatch
from sqlalchemy import Connection, Engine, create_engine, make_url

from outbox.database import at_commit, roundtrip
from outbox.database import execute as execution
from outbox.database.execute import driver_of

_WRITTEN = re.compile(r"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|LOCK\s+TABLE)\s+(?:ONLY\s+)?([\w.\"]+)", re.IGNORECASE)
_READ = re.compile(r"\b(?:FROM|JOIN|EXISTS\s*\(\s*SELECT\s+FROM)\s+([\w.\"]+)", re.IGNORECASE)
_LOCKING = re.compile(r"\bFOR\s+(?:NO\s+KEY\s+)?(?:UPDATE|SHARE)\b", re.IGNORECASE)
_OURS = re.compile(r"^(?:\"?outbox\"?\.)?\"?(\w+)\"?$")
_PARTITION = re.compile(r"_(?:default|\d{8}t\d{6})$")
_TIMEOUT = re.compile(r"^\d+ms$")

#: Who is in flight: seen by whoever takes a snapshot as a value, changed by each transaction that writes.
SNAPSHOT = "snapshot"


class Death(BaseException):
    """The end of a process: nothing that follows it runs, and the server drops its connections."""


class Command(Enum):
    """What a flow that has stopped before a step is told."""

    GO = auto()
    #: The process is killed: its backends are gone, its code never goes on.
    KILL = auto()
    #: The connection is lost before the statement; the code gets the driver's error.
    LOSE = auto()
    #: The connection is lost after the server has done the statement, before its answer arrived.
    LOSE_ANSWER = auto()
    #: The order is of no interest any more: go on to the end without stopping.
    RUN_ON = auto()


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a step touches: tables it reads, what it writes or locks, what becomes visible or free by its commit."""

    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    publishes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes or self.publishes)

    def meets(self, other: Footprint) -> bool:
        """Tell whether it may matter which of two steps of different flows comes first.

        Each statement has a snapshot of its own, so that what one flow has written and not committed is nothing to a
        reader. It is something to who writes or locks the same table (it may have to wait), and, whatever the table, to
        who takes the snapshot as a value.
        """
        if (self.writes & other.writes) - {SNAPSHOT}:
            return True
        if SNAPSHOT in self.writes | self.publishes and SNAPSHOT in other.reads:
            return True
        if SNAPSHOT in other.writes | other.publishes and SNAPSHOT in self.reads:
            return True
        mine, theirs = self.publishes - {SNAPSHOT}, other.publishes - {SNAPSHOT}
        return bool(mine & (other.reads | other.writes) or theirs & (self.reads | self.writes))


def footprint_of(sql: str, values: object) -> Footprint:
    """Return what a statement touches, by its text: whole tables, and the advisory locks among its values."""
    read, written = _names(_READ, sql), _names(_WRITTEN, sql)
    if _LOCKING.search(sql):
        written |= read
    if written:
        written.add(SNAPSHOT)
    if "pg_current_snapshot" in sql:
        read.add(SNAPSHOT)
    if "advisory" in sql:
        written |= {f"lock {number}" for number in _numbers(values)}
    return Footprint(frozenset(read), frozenset(written))


def _names(pattern: re.Pattern[str], sql: str) -> set[str]:
    matches = (_OURS.match(name) for name in pattern.findall(sql))
    # A partition counts as its table.
    return {_PARTITION.sub("", match[1].lower()) for match in matches if match} - _NOT_TABLES


_NOT_TABLES = {
    "unnest",
    "generate_series",
    "select",
    "set",
    "now",
    "pg_control_system",
    "clock_timestamp",
    "lateral",
    "of",
    "skip",
}


def _numbers(values: object) -> Iterator[int]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, int) and not isinstance(values, bool) and abs(values) > 10**6:
        yield values


@dataclass(frozen=True, slots=True)
class Step:
    """A statement before which a flow has stopped, and on which backend it will run."""

    sql: str
    footprint: Footprint
    #: What is dropped if the connection is lost here: locks become free, and nothing becomes visible.
    undone: Footprint
    pid: int
    commits: bool

    def __str__(self) -> str:
        return " ".join(self.sql.split())[:110]


class State(Enum):
    """Where a flow is."""

    RUNNING = auto()
    STOPPED = auto()
    #: It has sent its statement, which waits for a lock.
    BLOCKED = auto()
    ENDED = auto()


class SteppedCursor(psycopg.Cursor[Any]):
    """A cursor whose statements are steps of a flow."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        """Stop, and execute."""
        connection = self.connection
        if not isinstance(connection, SteppedConnection) or not connection.flow.stepping:
            return super().execute(query, params, **options)
        sql = query if isinstance(query, str) else str(query)
        connection.before(sql, params)
        answer = super().execute(sql.replace("'200ms'", "'120s'"), _patient(params), **options)
        connection.after()
        return answer


class _OwnSteppedCursor(SteppedCursor):
    """A cursor of ours on a stepped connection, with the adapters that our statements have."""

    adapters = property(lambda _: roundtrip.own_adapters())


def _patient(params: Any) -> Any:
    """Return values with which waiting ends by what the others do, and never by the clock."""
    if isinstance(params, list | tuple):
        return [_patient(value) for value in params]
    return "120s" if isinstance(params, str) and _TIMEOUT.match(params) else params


class SteppedConnection(psycopg.Connection[Any]):
    """A connection of a flow."""

    flow: Flow

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cursor_factory = SteppedCursor
        self._touched: frozenset[str] = frozenset()
        self._answer_is_lost = False

    def commit(self) -> None:
        """Stop, and commit."""
        self._end("COMMIT", super().commit)

    def rollback(self) -> None:
        """Stop, and roll back."""
        self._end("ROLLBACK", super().rollback)

    def _end(self, sql: str, act: Callable[[], None]) -> None:
        if self.flow.dead and sql == "ROLLBACK":
            return  # the server has done that
        if not self.flow.stepping or self.info.transaction_status in {
            TransactionStatus.IDLE,
            TransactionStatus.UNKNOWN,
        }:
            self.flow.stay_dead()
            act()
            return
        self.before(sql, None)
        act()
        self.after()

    def before(self, sql: str, params: object) -> None:
        """Stop before a statement, if anybody could notice it; do as the flow is told."""
        self.flow.stay_dead()
        ends, opened = sql in {"COMMIT", "ROLLBACK"}, Footprint(publishes=self._touched)
        if ends:
            footprint, self._touched = opened, frozenset()
        else:
            footprint = footprint_of(sql, params)
            if self.autocommit and self.info.transaction_status is TransactionStatus.IDLE and "BEGIN" not in sql:
                footprint = Footprint(footprint.reads, footprint.writes, footprint.writes)
            else:
                self._touched |= footprint.writes
        if footprint:
            step = Step(sql, footprint, opened, self.info.backend_pid, bool(footprint.publishes) and sql != "ROLLBACK")
            self._answer_is_lost = self.flow.stop(step) is Command.LOSE_ANSWER

    def after(self) -> None:
        """Lose the answer, if that is what the flow was told."""
        if self._answer_is_lost:
            self._answer_is_lost = False
            self.pgconn.finish()
            raise psycopg.OperationalError("consuming input failed: the answer is lost")


class Flow:
    """Some code in a thread, which stops before each of its steps; used again and again, one run after the other."""

    def __init__(self, number: int, url: str, events: SimpleQueue[Flow]) -> None:
        self.number = number
        self.name = ""
        self.state = State.ENDED
        self.step: Step | None = None
        self.pid = 0
        self.result: Any = None
        self.error: BaseException | None = None
        self.stepping = False
        self.dead = False
        self._events = events
        self._moves = threading.Lock()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._free_run = False
        self._opened: list[SteppedConnection] = []
        self._conninfo = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self.engine = create_engine(url, creator=self._connect, pool_size=4)
        with self.engine.connect(), self.engine.connect():  # so that no run pays for what an engine asks first
            pass

    def _connect(self) -> SteppedConnection:
        self.stay_dead()
        stepping, self.stepping = self.stepping, False
        # Two flows that wait for each other are found out soon.
        connection = SteppedConnection.connect(self._conninfo, options="-c deadlock_timeout=100ms")
        self.stepping = stepping
        assert isinstance(connection, SteppedConnection)
        connection.flow = self
        self._opened.append(connection)
        return connection

    @property
    def pids(self) -> list[int]:
        """The backends of its connections."""
        return [connection.info.backend_pid for connection in self._opened if not connection.closed]

    def start(self, name: str, act: Callable[[Engine], Any]) -> None:
        """Run some code in a thread; it stops before its first step."""
        self.name, self.result, self.error, self.step = name, None, None, None
        self.dead, self._free_run, self.stepping, self.state = False, False, True, State.RUNNING
        threading.Thread(target=self._run, args=(act,), daemon=True).start()

    def _run(self, act: Callable[[Engine], Any]) -> None:
        try:
            self.result = act(self.engine)
        except BaseException as error:
            self.error = error
        self._report(State.ENDED)

    def tell(self, command: Command) -> None:
        """Let it go on from where it has stopped."""
        self.state = State.RUNNING
        self._commands.put(command)

    def run_on(self) -> None:
        """Don't stop any more from now on; to be said before any flow goes on."""
        self._free_run = True

    def stop(self, step: Step) -> Command:
        """Stop before a step, in the flow's thread, until it is told what to do."""
        if self._free_run:
            return Command.RUN_ON
        self.step = step
        self._report(State.STOPPED)
        command = self._commands.get()
        self.pid = step.pid
        if command is Command.KILL:
            self.dead = True
            raise Death
        return command

    def stay_dead(self) -> None:
        """Stop whatever the code of a killed process would still do."""
        if self.dead:
            raise Death

    def _report(self, state: State) -> None:
        with self._moves:
            self.state = state
        self._events.put(self)

    def waits(self, waits: bool) -> bool:
        """Say that its statement waits for a lock, or may not any more; False if it isn't at a statement now."""
        before, after = (State.RUNNING, State.BLOCKED) if waits else (State.BLOCKED, State.RUNNING)
        with self._moves:
            if self.state is not before:
                return False
            self.state = after
            return True

    def end(self, *, clean: bool) -> None:
        """Make ready for another run; connections that were hurt are not used again."""
        self.stepping = self.dead = False
        if not clean:
            for connection in self._opened:
                if not connection.closed:
                    connection.pgconn.finish()
            self._opened.clear()
            self.engine.dispose()


@contextmanager
def without_pipelines() -> Iterator[None]:
    """Have stepped connections execute statement by statement.

    A COMMIT then doesn't begin the next transaction, whose statements are the same ones, one by one.
    """
    round_trip, can_chain, own_cursor = execution._round_trip, execution.can_chain, roundtrip.own_cursor

    def one_by_one(driver: Any, pairs: Any) -> Any:
        return None if _is_stepped(driver) else round_trip(driver, pairs)

    def chains(connection: Connection) -> bool:
        return not _is_stepped(driver_of(connection)) and can_chain(connection)

    def cursor(raw: Any) -> Any:
        return _OwnSteppedCursor(raw, row_factory=tuple_row) if _is_stepped(raw) else own_cursor(raw)

    with MonkeyPatch.context() as patch:
        patch.setattr(execution, "_round_trip", one_by_one)
        patch.setattr(roundtrip, "own_cursor", cursor)
        patch.setattr(at_commit, "can_chain", chains)
        yield


def _is_stepped(driver: Any) -> bool:
    return isinstance(driver, SteppedConnection) and driver.flow.stepping


def short(half_id: object) -> str:
    """Return the end of an id, which is its random part."""
    return str(half_id)[-6:]
