"""The worker: starts the duties, keeps them going, and ends them in good order."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from outbox.database import migration
from outbox.database.grants import require_privileges
from outbox.errors import InvalidSettings
from outbox.telemetry.events import WorkerCutOff, WorkerStarted, WorkerStopped, WorkerStopping
from outbox.telemetry.hooks import emit
from outbox.worker.clock import Clock
from outbox.worker.duty import Health
from outbox.worker.plan import PRODUCER_ROLES, Plan, check_roles

if TYPE_CHECKING:
    from outbox.app import Outbox

_POLL = 0.5
#: Seconds after which a loop that did not turn is stuck. It turns every second.
_STUCK_AFTER = 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Runs the background duties of an `Outbox`, each as often as its work comes in.

    ``roles`` limits it to some of ``dispatch``, ``release``, ``check``, ``prune``, ``consume``, ``retry``,
    ``reconcile`` and ``bulk`` (what operators have ordered); by default it does all that its database has tables and
    handlers for. As many workers as one likes may run at once.

    Connections to the database of the Outbox: one for each consuming thread (the sum of ``threads`` of the
    subscriptions); one for each checker that runs (at most ``checks_in_flight``) and for a compensation that runs; and
    at most seven: for dispatch and release, for prune, reports and probes, and one each for check, LISTEN,
    reconciliations, bulk jobs, and compensations. A reconciliation that runs has some of its own, to both databases.
    For each further database that is a ``source`` of subscriptions: one for each of their consuming threads, one for
    probes, one for LISTEN. They don't count in the engine's pool.

    A worker is used once. Raises `InvalidSettings` for a role that doesn't exist.
    """

    def __init__(self, outbox: Outbox, *, roles: Collection[str] | None = None) -> None:
        self._outbox = outbox
        self._roles = check_roles(roles)
        self._all = roles is None
        self._stopping = threading.Event()
        self._stop_once = threading.Lock()
        self._drained: bool | None = None
        self._plan: Plan | None = None
        self._running = False
        self._clock = Clock()
        # Its put() may interrupt itself, as a signal handler does; an Event's set() would deadlock.
        self._news: SimpleQueue[int | None] = SimpleQueue()

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the duties in threads of their own, and return.

        Raises:
            SchemaMissing, SchemaOutdated: a database isn't migrated; names the command to run.
            PrivilegeMissing: the role of a connection may not do its duties; names the command to run.
            sqlalchemy.exc.OperationalError: a database can't be reached.
            RuntimeError: the worker was started before.
        """
        if self._plan is not None or self._stopping.is_set():
            raise RuntimeError("a Worker is used once; make another one to start again")
        plan = self._plan = Plan(
            self._outbox, self._roles, self._clock, producing=self._produces(), stopping=self._stopping
        )
        try:
            self._require(plan)
            for begin in plan.starts:
                begin()
        except BaseException:
            self.stop(0)
            raise
        for lane in plan.lanes:
            lane.start()
        for listener in plan.listeners.values():
            listener.start()
        self._clock.start()
        self._running = True
        emit(WorkerStarted(count=len(plan.duties), duties=tuple(duty.name for duty in plan.duties)))

    def stop(self, timeout: float | None = None) -> bool:
        """Drain and end: begin no new pass, wait for running handlers, close the connections.

        Waits at most ``timeout`` seconds (None: the setting ``drain_timeout``). Handlers that take longer lose their
        connection: what they did is rolled back and costs no attempt. Returns whether all finished in time.
        """
        deadline = time.monotonic() + (self._outbox.settings.drain_timeout if timeout is None else timeout)
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
            for lane in self._plan.lanes if self._plan else ():
                lane.runner.cut()
            return 128 + second

    def wake(self) -> None:
        """Have all duties run at once, rather than when their wait is over; cheap, from any thread."""
        for duty in self._plan.duties if self._plan else ():
            duty.wake()

    def health(self) -> dict[str, Health]:
        """Return how each duty fares, by its name; empty before the start."""
        return {duty.name: duty.health for duty in self._plan.duties} if self._plan else {}

    def is_alive(self) -> bool:
        """Do the loops turn? A worker that hasn't started, or is stopping, is alive; a handler that takes long is too.

        If this is False, only another process can help.
        """
        plan = self._plan
        if plan is None or not self._running or self._stopping.is_set():
            return True
        long_ago = time.monotonic() - _STUCK_AFTER
        return self._clock.beat_at > long_ago and all(lane.turns(long_ago) for lane in plan.lanes)

    def is_ready(self) -> bool:
        """Is it started, on migrated databases, with all its duties at work, and every connection there?

        It isn't before its first report was written, while a database is out of reach, or when it is stopping.
        """
        if self._plan is None or not self._running or self._stopping.is_set() or not self.is_alive():
            return False
        health = self.health()
        reported = health["report"].last_success is not None
        return reported and not any(each.connection_lost for each in health.values())

    def _hear(self) -> int | None:
        """Wait for a signal or, None, the end of `stop`."""
        while True:
            # Not for ever: a signal that comes just before the thread blocks does not wake it.
            with suppress(Empty):
                return self._news.get(timeout=_POLL)

    def _produces(self) -> bool:
        """Does this worker serve the producer's tables?"""
        if not self._roles & PRODUCER_ROLES:
            return False
        named = not self._all and self._roles & {"dispatch", "release", "check"}
        if named or (not self._outbox.subscriptions and self._roles & PRODUCER_ROLES - {"bulk"}):
            return True
        return migration.current(self._outbox.engine, self._outbox.settings.schema)["producer"] is not None

    def _require(self, plan: Plan) -> None:
        """Make sure that there is something to do, and that the tables for it are there."""
        if not plan.duties:
            raise InvalidSettings(
                f"nothing to do for the roles {', '.join(sorted(self._roles))}: the Outbox has no consumers; "
                "import the modules that register them before the worker starts"
            )
        schema = self._outbox.settings.schema
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
        plan = self._plan
        if plan is None:
            return True
        emit(WorkerStopping())
        self._clock.stop()
        late = [lane.running for lane in plan.lanes if not lane.rested(max(deadline - time.monotonic(), 0))]
        for listener in plan.listeners.values():
            listener.close()
        if late:
            emit(WorkerCutOff(duties=tuple(late)))
        for end in (*plan.ends, *(lane.runner.end for lane in plan.lanes)):
            end()
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
