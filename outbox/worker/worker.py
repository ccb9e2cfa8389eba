"""The worker: starts the duties, keeps them going, and ends them in good order."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from outbox.database import migration
from outbox.database.execute import Backoff, kind_of
from outbox.errors import ErrorKind, InvalidSettings
from outbox.operator.health.grants import require_privileges
from outbox.telemetry.events import (
    PassRecovered,
    WorkerCutOff,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from outbox.telemetry.hooks import emit, work_for
from outbox.text import database_address
from outbox.worker.clock import Clock
from outbox.worker.duty import Health, Lane, RunningDuty, after_failure
from outbox.worker.plan import Plan, check_roles, producer_roles

if TYPE_CHECKING:
    from outbox.app import Outbox

_POLL = 0.5
#: Seconds after which a loop that did not turn is stuck. It turns every second.
_STUCK_AFTER = 60.0
#: Seconds in which a handler on the application's loop must have ended after it was cut off.
_CUT_OFF_SECONDS = 5.0
_NO_CONSUMER = (
    "; it consumes nothing: no consumer is declared; import the modules that register them before it starts, or leave "
    "out the role consume where that is meant"
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Runs the background duties of an `Outbox`, or of several, each as often as its work comes in.

    As a context manager it runs within the block. With ``async with`` async handlers, checkers and compensations run as
    tasks of the loop around it, with its clients and locks; else each of the worker's threads has a loop of its own.
    Several Outboxes are databases, schemas or tenants (`Outbox.bound_to`), each with duties and connections of its own.

    ``roles`` limits it to some of ``dispatch``, ``release``, ``check``, ``prune``, ``consume``, ``retry``,
    ``reconcile`` and ``bulk`` (orders of operators); by default it does all that its database has tables and handlers
    for. As many workers as one likes may run at once.

    Connections to the database of the Outbox: one for each consuming thread (the sum of ``threads`` of the
    subscriptions); one for each checker that runs (at most ``checks_in_flight``) and for a compensation that runs; and
    at most seven: for dispatch and release, for prune, reports and pings, and one each for check, LISTEN,
    reconciliations, bulk jobs, and compensations. A reconciliation that runs has some of its own, to both databases.
    For each further database that is a ``source`` of subscriptions: one for each of their consuming threads, one for
    pings, one for LISTEN. They don't count in the engine's pool.

    A worker is used once. Raises `InvalidSettings` for a role that doesn't exist.
    """

    def __init__(self, outbox: Outbox, *others: Outbox, roles: Collection[str] | None = None) -> None:
        self._outboxes = (outbox, *others)
        self._roles = check_roles(roles)
        self._all = roles is None
        self._stopping = threading.Event()
        self._stop_once = threading.Lock()
        self._drained: bool | None = None
        self._started = False
        self._plans: list[Plan] = []
        # How the start fares of those whose databases are out of reach, by the titles of their duties.
        self._late: dict[str, Health] = {}
        self._running = False
        self._clock = Clock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._variables: contextvars.Context | None = None
        # Its put() may interrupt itself, as a signal handler does; an Event's set() would deadlock.
        self._news: SimpleQueue[int | None] = SimpleQueue()

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Worker:
        self._loop, self._variables = asyncio.get_running_loop(), contextvars.copy_context()
        # In a thread: the groups of async handlers are made ready on the loop, which must turn meanwhile.
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await self._stop_in_thread(starting)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop_in_thread(None)

    async def _stop_in_thread(self, starting: asyncio.Future[None] | None) -> None:
        """Stop, while the loop goes on turning for the handlers; a cancel cuts them off."""
        if starting is not None:
            await asyncio.wait([starting])
            starting.exception()  # the cancel is raised instead
        stopping = asyncio.ensure_future(asyncio.to_thread(self._stop, None))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self._cut()
            await asyncio.wait([stopping])
            raise

    def start(self) -> None:
        """Start the duties in threads of their own, and return.

        Raises:
            NotBound: an Outbox has no database yet.
            SchemaMissing, SchemaOutdated: a database isn't migrated; names the command to run.
            PrivilegeMissing: the role of a connection may not do its duties; names the command to run.
            sqlalchemy.exc.OperationalError: a database can't be reached. Of several, all: one that can be reached is
                served, and the others are tried again.
            RuntimeError: the worker was started before.
        """
        if self._started or self._stopping.is_set():
            raise RuntimeError("a Worker is used once; make another one to start again")
        self._started = True
        named = dict(zip(_titles(self._outboxes), self._outboxes, strict=True))
        late: dict[str, Outbox] = {}
        try:
            for title, outbox in named.items():
                try:
                    self._plans.append(self._prepared(title, outbox))
                except DBAPIError as error:
                    late[title] = outbox
                    if kind_of(error) is not ErrorKind.UNAVAILABLE or len(late) == len(named):
                        raise
                    self._failed(title, outbox, error)
        except BaseException:
            self._stop(0)
            raise
        for plan in self._plans:
            plan.begin()
        if late:
            threading.Thread(target=self._begin_late, args=(late,), name="outbox-worker-start", daemon=True).start()
        self._clock.start()
        self._running = True
        self._tell_started()

    def _tell_started(self) -> None:
        consumes, checks, names = "consume" in self._roles, "check" in self._roles, [duty.name for duty in self._duties]
        pairs = {pair for outbox in self._outboxes for pair in outbox.subscriptions if consumes}
        groups, topics = sorted({group for _, group in pairs}), sorted({topic for topic, _ in pairs})
        checkers = sorted({topic for outbox in self._outboxes for topic in outbox.checkers if checks})
        lacks = "" if pairs or not consumes else _NO_CONSUMER
        listed: dict[str, Any] = {"groups": tuple(groups), "topics": tuple(topics), "checkers": tuple(checkers)}
        emit(WorkerStarted(count=len(names), duties=tuple(names), lacks=lacks, **listed))

    def _prepared(self, title: str, outbox: Outbox) -> Plan:
        """Return the plan of an Outbox's duties, ready to begin."""
        producing = self._produces(outbox)
        plan = Plan(
            outbox,
            self._roles,
            self._clock,
            producing=producing,
            stopping=self._stopping,
            title=title,
            loop=self._loop,
            variables=self._variables,
        )
        try:
            self._require(plan)
            # An upgrade that ended in between has made both parts: a plan of before it would never dispatch.
            outdated = not producing and self._produces(outbox)
            for start in () if outdated else plan.starts:
                start()
        except BaseException:
            plan.end()
            raise
        if outdated:
            plan.end()
            return self._prepared(title, outbox)
        return plan

    def _begin_late(self, late: dict[str, Outbox]) -> None:
        """Try again to begin for the Outboxes whose databases were out of reach; the others are at work."""
        backoff = Backoff(_POLL, min(outbox.settings.reconnect_cap for outbox in late.values()))
        while late and not self._stopping.wait(backoff.next()):
            for title, outbox in list(late.items()):
                try:
                    plan = self._prepared(title, outbox)
                except Exception as error:  # whatever it is by now: one tenant never stops the others
                    self._failed(title, outbox, error)
                    continue
                # The end of the worker waits for this lock, and then ends the plans that have begun.
                with self._stop_once:
                    if self._stopping.is_set():
                        plan.end()
                        return
                    self._plans.append(plan)
                    plan.begin()
                del late[title]
                with work_for(outbox.middlewares):
                    emit(PassRecovered(duty=_start_of(title), failures=self._late.pop(title).failures))

    def _failed(self, title: str, outbox: Outbox, error: Exception) -> None:
        health, failed = after_failure(_start_of(title), self._late.get(title, Health()), error)
        self._late[title] = replace(health, connection_lost=True)
        with work_for(outbox.middlewares):
            emit(failed)

    @property
    def _duties(self) -> list[RunningDuty]:
        return [duty for plan in self._plans for duty in plan.duties]

    @property
    def _lanes(self) -> list[Lane]:
        return [lane for plan in self._plans for lane in plan.lanes]

    def stop(self, timeout: float | None = None) -> bool:
        """Drain and end: begin no new pass, wait for running handlers, close the connections.

        Waits at most ``timeout`` seconds (None: the setting ``drain_timeout``). Handlers that take longer lose their
        connection: what they did is rolled back and costs no attempt. Returns whether all finished in time.

        Raises:
            RuntimeError: called on the loop that the handlers run on, which could not end then; leave the ``async
                with`` block instead.
        """
        if self._loop is not None and self._loop is asyncio._get_running_loop():
            raise RuntimeError("stop() would block the loop that the handlers run on: leave the 'async with' block")
        return self._stop(timeout)

    def _stop(self, timeout: float | None) -> bool:
        deadline = time.monotonic() + (self.drain_timeout if timeout is None else timeout)
        self._stopping.set()
        with self._stop_once:
            if self._drained is None:
                self._drained = self._drain(deadline)
                self._news.put(None)
        return self._drained

    def run(self) -> int:
        """Start, and run until SIGTERM, SIGINT or `stop`; return the exit code for the process.

        The first signal drains as `stop` does, then the code is 0. A second one ends at once, with 128 plus its
        number (130 for SIGINT, 143 for SIGTERM). Signals are only handled in the main thread.

        Raises:
            As `start`.
        """
        with self._signals():
            self.start()
            first = self._hear()
            if first is None:
                return 0
            threading.Thread(target=self.stop, name="outbox-worker-stop", daemon=True).start()
            second = self._hear()
            if second is None:
                return 0
            self._cut()
            return 128 + second

    def wake(self) -> None:
        """Have all duties run at once, rather than when their wait is over; cheap, from any thread."""
        for duty in self._duties:
            duty.wake()

    def health(self) -> dict[str, Health]:
        """Return how each duty fares, by its name; empty before the start."""
        late = {_start_of(title): health for title, health in list(self._late.items())}
        return late | {duty.name: duty.health for duty in self._duties}

    @property
    def is_running(self) -> bool:
        """Has it been started? It also is when it has stopped."""
        return self._running

    @property
    def drain_timeout(self) -> float:
        """How long (seconds) `stop` waits for running handlers: of several Outboxes, the longest time."""
        return max(outbox.settings.drain_timeout for outbox in self._outboxes)

    @property
    def hang_timeout(self) -> float:
        """How long (seconds) its process may give no sign of life: of several Outboxes, the longest time."""
        return max(outbox.settings.hang_timeout for outbox in self._outboxes)

    def is_alive(self) -> bool:
        """Do the loops turn? A worker that hasn't started, or is stopping, is alive; a handler that takes long is too.

        If this is False, only another process can help.
        """
        if not self._running or self._stopping.is_set():
            return True
        long_ago = time.monotonic() - _STUCK_AFTER
        return self._clock.beat_at > long_ago and all(lane.turns(long_ago) for lane in self._lanes)

    def is_ready(self) -> bool:
        """Is it started, on migrated databases, with all its duties at work, and every connection there?

        It isn't before its first report was written, while a database is out of reach or can't be used as it is, or
        when it is stopping.
        """
        if not self._running or self._stopping.is_set() or not self.is_alive():
            return False
        reported = all(plan.report is not None and plan.report.health.last_success for plan in self._plans)
        return reported and not any(each.connection_lost or each.unusable for each in self.health().values())

    def _hear(self) -> int | None:
        """Wait for a signal or, None, the end of `stop`."""
        while True:
            # Not for ever: a signal that comes just before the thread blocks does not wake it.
            with suppress(Empty):
                return self._news.get(timeout=_POLL)

    def _cut(self) -> None:
        """Take their connections away from the handlers that run on."""
        for lane in self._lanes:
            lane.runner.cut()

    def _produces(self, outbox: Outbox) -> bool:
        """Does this worker serve the producer's tables of an Outbox?"""
        serving = self._roles & producer_roles()
        if not serving:
            return False
        named = not self._all and serving & producer_roles(only=True)
        if named or outbox.relays or (not outbox.subscriptions and serving - {"bulk"}):
            return True
        return migration.current(outbox.engine, outbox.settings.schema)["producer"] is not None

    def _require(self, plan: Plan) -> None:
        """Make sure that there is something to do, and that the tables for it are there."""
        if not plan.duties:
            raise InvalidSettings(
                f"nothing to do for the roles {', '.join(sorted(self._roles))}: the Outbox has no consumers; "
                "import the modules that register them before the worker starts"
            )
        schema = plan.settings.schema
        for database, parts in plan.parts.items():
            with closing(database.connect()) as connection:
                # Bulk jobs are carried out in whatever there is.
                revisions = {} if parts else migration.current(connection, schema)
                there = parts or {part for part in migration.PARTS if revisions[part]}
                migration.require(connection, there or migration.PARTS, schema)
        for (database, part), duties in plan.needs.items():
            with closing(database.connect()) as connection:
                topics = plan.topics[database] if part == "producer" else ()
                require_privileges(connection, schema, duties, part, topics)

    def _drain(self, deadline: float) -> bool:
        if not self._plans:
            return True
        emit(WorkerStopping())
        self._clock.stop()
        late = [lane for lane in self._lanes if not lane.rested(max(deadline - time.monotonic(), 0))]
        names = tuple(lane.running for lane in late)
        for plan in self._plans:
            for listener in plan.listeners.values():
                listener.close()
        if late:
            emit(WorkerCutOff(duties=names))
        for plan in self._plans:
            plan.end()
        if self._loop is not None:
            # The loop may be closed from here on: a task that was cancelled has to be gone by then.
            for lane in late:
                lane.rested(_CUT_OFF_SECONDS)
        emit(WorkerStopped(drained=not late))
        return not late

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, lambda n, _: self._news.put(n)) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _start_of(title: str) -> str:
    return f"{title}start"


def _titles(outboxes: Sequence[Outbox]) -> list[str]:
    """Return what comes before the names of an Outbox's duties: nothing for a single one."""
    if len(outboxes) == 1:
        return [""]
    names = [f"{database_address(outbox.url)}/{outbox.settings.schema}" for outbox in outboxes]
    # Two may share a database and a schema, as those of two groups do.
    same = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name}#{count + 1} " if count else f"{name} " for name, count in zip(names, same, strict=True)]
