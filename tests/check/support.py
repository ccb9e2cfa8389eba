"""A bench for the check: passes are run by hand, as a worker's duty would run them, on halves that are aged by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outbox import Counts, Orphan, Outbox, Resolution, Settings
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.database.engines import NewRunner
from outbox.worker.connections import OwnRunner, Runners, WorkerDatabase
from tests.kit import Tables, dispatch_all, open_observer, python, wait_until

T = TypeVar("T")

#: The time (seconds) of a checker that is to be given up: on a busy machine, only to be asked takes a while.
SHORT = 2


class Declined(Exception):
    """What a local transaction or a checker may end with."""


@dataclass
class Bench(Tables):
    """An `Outbox`, a scheduler that makes passes when it is told to, and one who looks on.

    ``let_go`` is for checkers that hang: it is set when the test ends.
    """

    outbox: Outbox
    observer: Engine
    stack: ExitStack
    new_runner: NewRunner | None = None
    let_go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        stopping = threading.Event()
        database = WorkerDatabase(self.engine)
        self.runner = OwnRunner(database, None, stopping)
        self.asker = Asker(self.new_runner or Runners(database, stopping), self.settings.checks_in_flight)
        for end in (_wait_for_askers, self.runner.end, self.asker.end, self.let_go.set):
            self.stack.callback(end)

    @property
    def engine(self) -> Engine:
        """The engine of the application."""
        assert isinstance(self.outbox.engine, Engine)
        return self.outbox.engine

    @property
    def settings(self) -> Settings:
        """The settings of the outbox."""
        return self.outbox.settings

    def colleague(self, outbox: Outbox | None = None) -> Bench:
        """Return another scheduler on the same database, with the same checkers or those of ``outbox``."""
        return Bench(outbox or self.outbox, self.observer, self.stack, self.new_runner, self.let_go)

    # --- acts --------------------------------------------------------------------------------------------

    def prepare(self, topic: str = "paid", body: Any = None, *, due: bool = True, **options: Any) -> UUID:
        """Prepare a half in a transaction of its own, past its immunity time unless it isn't to be ``due``."""
        with self.engine.begin() as connection:
            half_id = self.outbox.prepare(connection, topic, {} if body is None else body, **options)
        if due:
            self.age(half_id)
        return half_id

    def age(self, *half_ids: UUID) -> None:
        """Let the wait of undecided halves be over: of these, or of all; not of those that are being decided."""
        self.age_checks(*half_ids)

    def warm_up(self, *, is_async: bool = False, count: int = 1) -> None:
        """Open connections for checkers, where the time that a checker may take is too short for that as well."""
        for _ in range(count):
            runner = self.asker._new_runner(is_async)
            runner.run(lambda *_: Counts())
            self.asker._idle[is_async].append(runner)

    def check(self, *, stopping: Callable[[], bool] = lambda: False) -> Counts:
        """Make one pass."""
        checkers, asker = self.outbox.checkers, self.asker
        return self.runner.run(lambda c, _: check_once(c, self.settings, checkers, asker, stopping=stopping))

    def age_and_check(self, times: int = 1) -> Counts:
        """Make so many passes, before each of which all waits are over."""
        counts = Counts()
        for _ in range(times):
            self.age()
            counts += self.check()
        return counts

    def dispatch(self) -> int:
        """Turn committed ops into messages; return how many."""
        return dispatch_all(self.engine, self.settings).done

    def register(self, given: Any, topic: str = "paid", **options: Any) -> list[Orphan]:
        """Register a checker that always answers, or raises, the same; return the list of what it is asked about.

        An Event is waited for, and then the answer is COMMIT.
        """
        asked: list[Orphan] = []

        @self.outbox.checker(topic, **options)
        def checker(orphan: Orphan) -> Any:
            asked.append(orphan)
            if isinstance(given, BaseException):
                raise given
            if isinstance(given, threading.Event):
                given.wait()
                return Resolution.COMMIT
            return given

        return asked

    def kill_at(self, event: str, table: str, *, nth: int = 1) -> None:
        """Have the server end the backend that is the ``nth`` to come to an event on a table, once.

        The event is that of a trigger, such as "BEFORE INSERT"; "COMMIT" stands for the COMMIT of an inserted row.
        """
        kind, when, how = "", event, "FOR EACH ROW"
        if event == "COMMIT":
            kind, when, how = "CONSTRAINT", "AFTER INSERT", "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        self.run("CREATE SEQUENCE fuse")
        self.run(
            "CREATE FUNCTION blow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" IF nextval('fuse') = {nth} THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60);"
            " END IF; RETURN coalesce(new, old); END $$"
        )
        self.run(f"CREATE {kind} TRIGGER blow {when} ON {table} {how} EXECUTE FUNCTION blow()")

    def kill_process_that_asks(self, half_id: UUID) -> None:
        """Have another process ask about the half, the only one that is due; kill it while it waits for an answer."""
        with python("tests.check.asking_process", self.engine) as process:
            assert process.stdout
            assert process.stdout.readline() == f"asked about {half_id}\n"
            process.kill()

    def was_killed(self) -> bool:
        """Tell whether a backend has come to what `kill_at` named."""
        return bool(self.value("SELECT is_called FROM fuse"))

    # --- looks -------------------------------------------------------------------------------------------

    def rows(self, sql: str, **values: Any) -> list[Any]:
        """Return the rows of a query, which have their columns as attributes."""
        return self.records(sql, **values)

    def waits(self, half_id: UUID) -> Any:
        """Return the check of an undecided half with ``wait``, the seconds until it is due; None if it has none."""
        rows = self.rows(
            "SELECT *, extract(epoch FROM next_check_at - clock_timestamp())::float8 AS wait, parked_at IS NOT NULL"
            " AS parked FROM outbox.half_check WHERE half_id = :id",
            id=half_id,
        )
        return rows[0] if rows else None

    def history(self, half_id: UUID) -> list[Any]:
        """Return the checks of a half, the first one first."""
        return self.rows("SELECT * FROM outbox.check_history WHERE half_id = :id ORDER BY id", id=half_id)

    def answers(self, half_id: UUID) -> list[str | None]:
        """Return what came of each check of a half."""
        return [row.answer for row in self.history(half_id)]

    def wait_for(self, fact: Callable[[], Any], what: str) -> Any:
        """Wait until a fact is true."""
        return wait_until(fact, what)


def checker_of(
    answer: Callable[[Orphan], Any],
    write: Callable[[Session], object] = lambda session: None,
    *,
    is_async: bool = False,
    takes_session: bool = True,
) -> Callable[..., Any]:
    """Return a checker of a kind that does ``write`` with its session, if it takes one, and then answers."""

    def plain(orphan: Orphan) -> Any:
        return answer(orphan)

    def with_session(orphan: Orphan, session: Session) -> Any:
        assert type(session) is Session
        write(session)
        return answer(orphan)

    async def plain_async(orphan: Orphan) -> Any:
        await asyncio.sleep(0)  # as one that waits for its provider: it comes back to its event loop
        return answer(orphan)

    async def with_session_async(orphan: Orphan, session: AsyncSession) -> Any:
        assert type(session) is AsyncSession
        await session.run_sync(write)
        return answer(orphan)

    if is_async:
        return with_session_async if takes_session else plain_async
    return with_session if takes_session else plain


class NoRunner:
    """A connection that can't be opened; without an ``error`` one that refuses, because everything is to end."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.opened = 0

    def run(self, _: object) -> Counts:
        """Fail, or do nothing."""
        self.opened += 1
        if self._error:
            raise self._error
        return Counts()

    def end(self) -> None:
        """Do nothing."""


@contextmanager
def beside(bench: Bench, act: Callable[[], T]) -> Iterator[Future[T]]:
    """Run an act in another thread meanwhile. Whatever the test does, checkers are let go."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(act)
        finally:
            bench.let_go.set()


def open_bench(url: str, stack: ExitStack, new_runner: NewRunner | None = None, **settings: Any) -> Bench:
    """Return a bench on a migrated database."""
    engine = create_engine(url)
    stack.callback(engine.dispose)
    outbox = Outbox(engine, settings=Settings(**settings))
    return Bench(outbox, open_observer(url, stack), stack, new_runner)


def asking_threads() -> list[str]:
    """Return the names of the threads that ask checkers."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outbox-check-")]


def _wait_for_askers() -> None:
    wait_until(lambda: not asking_threads(), "the threads of checkers have ended")
