"""Use the tables from calls: work in a few threads, each piece of it in one transaction on a connection of a pool.

The server's event loop never waits for PostgreSQL. Each piece of work is such that it may be done twice (an id, a guard
in the statement), so what fails because its connection was lost is done once more.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import QueuePool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outbox.consumer.subscription import Subscription
from outbox.database.engines import engine_like
from outbox.database.execute import Template, driver_of, execute, sqlstate
from outbox.database.sql import OPS, PING, notify, read_news
from outbox.dispatch.sql import topic_queues
from outbox.leases import NO_HANDLER, LeasedGroup
from outbox.rocketmq.options import RocketmqOptions
from outbox.rocketmq.rules import Refused
from outbox.rocketmq.wire import WireCode
from outbox.telemetry.events import ClientCallFailed, PassFailed
from outbox.telemetry.hooks import emit
from outbox.text import message_of, process_name
from outbox.worker.connections import WorkerDatabase, cut
from outbox.worker.listener import Listener

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from outbox.app import Outbox
    from outbox.settings import Settings

T = TypeVar("T")

#: So many pieces of work are done at once.
THREADS = 8
#: For so long (seconds) what was read of topics and of the database's clock is good.
_TOPICS_FOR, _CLOCK_FOR = 5.0, 60.0
#: Failures to reach the database that are less than so long (seconds) apart are one outage.
_OUTAGE = 10.0
#: So long (seconds) the end waits for what has lost its connection.
_CUT_WITHIN = 5.0
_NOW: Template = Template("SELECT extract(epoch FROM clock_timestamp())::float8")


def is_unreached(error: Exception) -> bool:
    """Tell whether an error says that the database can't be had: it has no state of a statement."""
    return isinstance(error, PoolTimeout) or (isinstance(error, DBAPIError) and not sqlstate(error))


class Tables:
    """The database of an `Outbox`, as the calls of a server use it.

    ``outbox`` has the declarations of the one that was given, and an engine whose connections are made alike;
    ``beside`` is how many more connections than threads are kept: those of checks.
    """

    def __init__(self, outbox: Outbox, options: RocketmqOptions, beside: int = 0) -> None:
        self.options = options
        self.engine: Engine = engine_like(
            outbox.engine,
            name="outbox-rocketmq",
            poolclass=QueuePool,
            pool_size=THREADS + beside,
            pool_use_lifo=True,  # a taker looks anew at a connection that it hasn't met
            isolation_level="READ COMMITTED",
        )
        self.outbox: Outbox = outbox.bound_to(self.engine)
        self.settings: Settings = outbox.settings
        self.schema: str = outbox.settings.schema
        self.threads: ThreadPoolExecutor = ThreadPoolExecutor(THREADS, "outbox-rocketmq")
        #: What clients are told to be the host that stores messages.
        self.host: str = process_name()
        self._listener: Listener | None = None
        self._stopping = threading.Event()
        self._busy: list[Any] = []
        self._guard = threading.Lock()
        self._cut_off = False
        self._unreached_at = -_OUTAGE
        self._queues: dict[str, tuple[float, int]] = {}
        self._offset = 0.0
        self._offset_until = 0.0

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Do work in one transaction, in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(self.do, work))

    def do(self, work: Callable[[Connection], T]) -> T:
        """Do work in one transaction, in the calling thread; once more if the connection was lost."""
        try:
            return self._do(work)
        except DBAPIError as error:
            if not error.connection_invalidated or self._cut_off:
                raise
        # Its pool knows by now that the other connections are as old.
        return self._do(work)

    async def lend(self, work: Callable[[Connection], T]) -> T:
        """Do work that has transactions of its own, in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self._lend, work)

    def _lend(self, work: Callable[[Connection], T]) -> T:
        with self._connected() as connection:
            return work(connection)

    def _do(self, work: Callable[[Connection], T]) -> T:
        with self._connected() as connection, connection.begin():
            return work(connection)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            driver = driver_of(connection)
            with self._guard:
                self._busy.append(driver)
            try:
                yield connection
            finally:
                with self._guard:
                    self._busy = [each for each in self._busy if each is not driver]

    def now(self, connection: Connection) -> float:
        """Return the database's Unix time, as far as this host's clock goes on from what was read a while ago."""
        if time.monotonic() > self._offset_until:
            (((now,),),) = execute(connection, _NOW(self.schema))
            self._offset = now - time.time()
            self._offset_until = time.monotonic() + _CLOCK_FOR
        return self.clock()

    def clock(self) -> float:
        """Return the database's Unix time, as far as it is known without asking."""
        return time.time() + self._offset

    async def queues(self, topic: str) -> int:
        """Return how many queues a topic has; raise Refused if none is there, and none is to be made."""
        until, queues = self._queues.get(topic, (0.0, 0))
        if time.monotonic() < until:
            return queues
        if not (found := await self.run(partial(self._find, topic))):
            if not self.options.auto_create and topic not in self.options.topics and topic not in self.outbox.topics:
                text = f"no topic {topic} is known: declare it, or let the server make topics (auto_create)"
                raise Refused(WireCode.TOPIC_NOT_FOUND, text)
            found = await asyncio.get_running_loop().run_in_executor(self.threads, self._make, topic)
        self._queues[topic] = time.monotonic() + _TOPICS_FOR, found
        return found

    def _find(self, topic: str, connection: Connection) -> int:
        (rows,) = execute(connection, topic_queues(self.schema, topic))
        return rows[0][0] if rows else 0

    def _make(self, topic: str) -> int:
        queues = self.options.topic(topic).queues or self.settings.queues
        self.outbox.declare_topic(topic, queues)
        return queues

    def declare(self, topics: Collection[str]) -> None:
        """Make topics that aren't there."""
        for topic in topics:
            if not self.do(partial(self._find, topic)):
                self._make(topic)

    def leased(self, topic: str, group: str, **options: Any) -> LeasedGroup[Any]:
        """Return a leased group of a topic, with options of `Outbox.leased`, which no Outbox has to keep for ever."""
        named = {"group": group, "ordered": False, "leased": True, "transactional": False, **options}
        outbox, settings = self.outbox, self.settings
        declared = Subscription.declare(
            settings, topic, NO_HANDLER, None, outbox.codecs, beside=outbox.functions, **named
        )
        return LeasedGroup(lambda: declared, settings, lambda: self.engine)

    # --- waiting -------------------------------------------------------------------------------------------------

    def listen(self, wake: Callable[[str | None], None]) -> None:
        """Call a function with the topics of which new messages are told; None: of any."""
        if self.settings.listen:
            self._listener = Listener(
                WorkerDatabase(self.engine),
                self.schema,
                name="outbox-rocketmq",
                wake=lambda news: None if news == OPS else wake(None if news is None else read_news(news)[0]),
                ping=self._ping,
                own_pids=lambda: (),
                stopping=self._stopping,
                reconnect_cap=self.settings.reconnect_cap,
            )
            self._listener.start()

    def _ping(self) -> None:
        self.threads.submit(self.do, lambda connection: execute(connection, notify(self.schema, PING)))

    async def pause(self, news: asyncio.Event) -> None:
        """Wait until there may be new messages, or some that are due again."""
        hears = self._listener is not None and self._listener.working
        longest = self.settings.retry_interval if hears else self.settings.idle_wait
        with suppress(TimeoutError):  # nothing was told
            await asyncio.wait_for(news.wait(), longest)

    def tell_failure(self, duty: str, error: Exception, failures: int = 1) -> None:
        """Tell that something failed which will be tried again."""
        facts: dict[str, Any] = {"reason": message_of(error), "connection_lost": isinstance(error, DBAPIError)}
        emit(PassFailed(duty=duty, failures=failures, repeated=failures > 1, error=error, **facts))

    def tell_call_failed(self, call: str, client: str, topic: str, error: Exception) -> None:
        """Tell that a call of a client failed here; while the database is out of reach that is told once."""
        now = time.monotonic()
        unreached = is_unreached(error)
        repeated = unreached and now - self._unreached_at < _OUTAGE
        self._unreached_at = now if unreached else self._unreached_at
        emit(ClientCallFailed(call=call, client=client, topic=topic, repeated=repeated, error=error))

    def end(self, within: float, last: Callable[[Connection], object] | None = None) -> None:
        """Finish what was begun, then do a last work, and close all connections.

        What takes longer than so many seconds loses its connection, and is rolled back.
        """
        self._stopping.set()
        if self._listener is not None:
            self._listener.close()
        ending = threading.Thread(target=self.threads.shutdown, name="outbox-rocketmq-end", daemon=True)
        ending.start()
        ending.join(within)
        if ending.is_alive():
            self._cut_off = True
            self.threads.shutdown(wait=False, cancel_futures=True)
            with self._guard:
                for driver in self._busy:
                    cut(driver)
            ending.join(_CUT_WITHIN)
        if last is not None:
            with suppress(Exception):  # it may be away
                self._lend(last)
        self.engine.dispose()
