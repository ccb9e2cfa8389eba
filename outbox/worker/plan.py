"""What a worker does: from the outbox and the roles to duties, their lanes, and the listeners that wake them."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox.calling.callback import parked_callback
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.consumer.control.gate import Gate
from outbox.consumer.meter import HandlerReport
from outbox.consumer.outside.calls import CallContext
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.consumer.retry import wake_retries
from outbox.consumer.subscription import Subscription
from outbox.database.at_commit import LocalDispatcher, announce, begin_here, end_here
from outbox.database.duty import ROLES, Duty, Part, Post, Role, Task, duties, whole
from outbox.database.engines import address_of_connections
from outbox.database.sql import OPS, PING, REPORT_INTERVAL, notify, read_news
from outbox.declarations import relayed, topics_to_relay
from outbox.errors import InvalidSettings
from outbox.message.model import Counts
from outbox.prune.prune_pass import prune_consumer_once
from outbox.relay.published import PublishedRows
from outbox.worker.clock import Clock
from outbox.worker.connections import AsyncRunner, OwnRunner, PassContext, Runners, WorkerDatabase
from outbox.worker.duty import Lane, RunningDuty
from outbox.worker.listener import Listener
from outbox.worker.report import ReconciledPairs, Reporter

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.database.engines import Bind
    from outbox.settings import Settings

#: The roles that do something for each group.
_GROUP_ROLES = frozenset({"consume", "retry", "prune"})

#: The longest wait (seconds) of a duty that notifications wake.
LISTENING_WAIT = 5.0
#: How often (seconds) a worker looks for topics that relays take by a pattern.
_FIND_TOPICS = 2.0
#: Retries of one pass; more would keep the lane from the consuming thread.
_RETRIES = 10


def check_roles(roles: Collection[str] | None) -> frozenset[Role]:
    """Return the roles of a worker; None means all.

    Raises:
        InvalidSettings: none, or one that doesn't exist.
    """
    if roles is None:
        return frozenset(ROLES)
    names = [roles] if isinstance(roles, str) else list(roles)
    if not names or not set(names) <= set(ROLES):
        raise InvalidSettings(f"roles = {names!r} must be some of {', '.join(ROLES)}")
    return frozenset(role for role in ROLES if role in names)


def producer_roles(*, only: bool = False) -> Set[Role]:
    """Return the roles that serve the producer's tables; with ``only``, those that serve no others."""
    rights = [(duty.role, each) for duty in duties() if duty.role for each in duty.rights]
    serving = {role for role, each in rights if each.part == "producer" and "worker" in each.granted}
    return serving - {role for role, each in rights if only and each.part == "consumer"}


def _wake_consumer(consumer: Consumer, duty: RunningDuty, queue: int | None) -> None:
    consumer.wake(queue)  # first: the pass that the duty begins must know of it
    duty.wake()


class Plan:
    """Duties, lanes and listeners for one Outbox of a worker; nothing is connected yet.

    ``title`` comes before the names of its duties, where the worker serves several. ``loop`` is that of `PassContext`.
    """

    def __init__(
        self,
        outbox: Outbox,
        roles: frozenset[Role],
        clock: Clock,
        *,
        producing: bool,
        stopping: threading.Event,
        title: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
        variables: contextvars.Context | None = None,
    ) -> None:
        self.settings: Settings = outbox.settings
        self.duties: list[RunningDuty] = []
        self.lanes: list[Lane] = []
        self.report: RunningDuty | None = None
        self.listeners: dict[WorkerDatabase, Listener] = {}
        #: The parts of the schema that a database must have.
        self.parts: defaultdict[WorkerDatabase, set[str]] = defaultdict(set)
        #: What its role must be allowed to do in a database: duties of `outbox.database.duty`, by part.
        self.needs: defaultdict[tuple[WorkerDatabase, Part], set[str]] = defaultdict(set)
        #: What its groups read in a database.
        self.topics: defaultdict[WorkerDatabase, set[str]] = defaultdict(set)
        #: What comes before the duties start, and after they have ended.
        self.starts: list[Callable[[], object]] = []
        self.ends: list[Callable[[], object]] = []
        self._outbox = outbox
        #: The groups that have lanes, by topic and group.
        self._served: set[tuple[str, str]] = set()
        self._roles = roles
        self._clock = clock
        self._stopping = stopping
        self._title = title
        self._context = PassContext(outbox.active, loop, variables)
        self._own = WorkerDatabase(outbox.engine)
        self._dispatching: LocalDispatcher | None = None
        self._ops_address = address_of_connections(outbox.engine), self.settings.schema
        self._group = outbox.group
        self._dispatch_runner = OwnRunner(self._own, None, stopping, self._context, self._named("dispatch"))
        #: What wakes the consumers of a topic of a database, for a queue or (None) for any.
        self._consuming: dict[tuple[WorkerDatabase, str], list[Callable[[int | None], None]]] = {}
        #: What wakes the retries of a group, by its consumer.
        self._retrying: list[tuple[Consumer, Callable[[], None]]] = []
        #: The lanes that tasks share, by name and database.
        self._shared: dict[tuple[str, WorkerDatabase], Lane] = {}
        #: Where the groups that handle outside of transactions are pruned, by the database that they read.
        self._prune_lanes: dict[WorkerDatabase, Lane] = {}
        self._reconciled: list[ReconciledPairs] = []
        self._sources: dict[str, WorkerDatabase] = {self._own.address: self._own}
        consuming = roles & _GROUP_ROLES and (outbox.subscriptions or outbox.relays)
        reconciling = "reconcile" in roles and outbox.reconciliations
        #: The parts of the own database that are served.
        self.served: list[Part] = ["producer"] if producing else []
        self.served += ["consumer"] if consuming or reconciling else []
        for subscription in outbox.subscriptions.values() if consuming else ():
            self._plan_subscription(subscription)
        if consuming and outbox.relays:
            self._needs_consumer()
            finding = Task(name="find topics to relay", one_pass=self._find_topics, every=_FIND_TOPICS)
            self._add(finding, self._lane_of("upkeep"))
        if self._retrying or (consuming and outbox.relays):
            every = self.settings.retry_interval
            self._add(Task(name="look for retries", one_pass=self._find_retries, every=every), self._lane_of("upkeep"))
        for duty in duties():
            if duty.tasks and (duty.role is None or duty.role in roles) and (producing or not _of_producer(duty)):
                for task in duty.tasks(self._post(outbox, duty)):
                    self._plan(duty, task)
        if self.duties:
            upkeep, reporter = self._lane_of("upkeep"), Reporter(outbox, self._roles, self.duties, self._reconciled)
            self.report = self._add(Task(name="report", one_pass=whole(reporter), every=REPORT_INTERVAL), upkeep)
            self.ends.append(partial(reporter.goodbye, upkeep.runner))

    def begin(self) -> None:
        """Start the threads."""
        # Those that are begun may find topics to relay, and begin what these need by themselves (`_join`).
        lanes, listeners = list(self.lanes), list(self.listeners.values())
        for lane in lanes:
            lane.start()
        if self._dispatching is not None:
            begin_here(self._ops_address, self._dispatching)
        for listener in listeners:
            listener.start()

    def end(self) -> None:
        """Close all connections, also under passes that run on."""
        if self._dispatching is not None:
            end_here(self._ops_address, self._dispatching)
        for end in (*self.ends, *(lane.runner.end for lane in self.lanes)):
            end()

    def _post(self, outbox: Outbox, duty: Duty) -> Post:
        runners = Runners(self._own, self._stopping, self._context, self._named(duty.name))
        self.ends.append(runners.end)
        return Post(
            outbox=outbox,
            settings=self.settings,
            parts=tuple(self.served),
            roles=self._roles,
            consumes=any(source is self._own for source, _ in self._consuming),
            stopping=self._stopping,
            new_runner=runners,
            at_end=self.ends.append,
            wake_dispatch=partial(self._wake, self._own, OPS),
            wake_consumers=partial(self._wake_consumers, self._own),
        )

    def _plan(self, duty: Duty, task: Task) -> None:
        """Have a task of a duty done."""
        parts = self.parts[self._own]
        for part in task.parts:
            parts.add(part)
            # No role of a worker is granted a reconciliation: its rights are no condition of the start.
            if any(each.part == part and {"worker", "consumer"} & each.granted for each in duty.rights):
                self.needs[self._own, part].add(duty.name)
        if task.compares is not None:
            self._reconciled.append(task.compares)
        if task.lane is not None:
            lane = self._lane_of(task.lane)
        else:
            source = self._source_of(task.source)
            lane = self._lane(self._runner(duty.name, source, is_async=task.is_async, group=task.group))
        is_woken = partial(self._hears, self._own) if task.on_ops else lambda: False
        running = self._add(task, lane, is_woken=is_woken)
        if task.on_ops:
            self._dispatching = LocalDispatcher(
                running.nudge, lambda: running.is_at_work and not self._stopping.is_set()
            )
            self._listen(self._own)

    def _find_topics(self, connection: Connection, *_: object) -> Counts:
        """Have the topics served that a relay's pattern takes, and that weren't there before."""
        for rule in list(self._outbox.relays):
            for topic in topics_to_relay(connection, self.settings.schema, rule):
                if (topic, rule.group) not in self._served and not self._stopping.is_set():
                    self._join(relayed(self._outbox, rule, topic))
        return Counts()

    def _join(self, subscription: Subscription) -> None:
        """Have a group served from now on, while the others are at work; if that fails, nothing of it is left."""
        planned: list[list[Any]] = [self.lanes, self.duties, self.starts, self.ends, self._retrying]
        before = [len(each) for each in planned]
        consuming = {key: len(wakes) for key, wakes in self._consuming.items()}
        listeners, prune_lanes = dict(self.listeners), dict(self._prune_lanes)
        self._plan_subscription(subscription)
        try:
            for start in self.starts[before[2] :]:
                start()
        except BaseException:
            self._served.discard(subscription.key)
            for lane in self.lanes[before[0] :]:
                lane.runner.end()
            for several, count in zip(planned, before, strict=True):
                del several[count:]
            for key, wakes in self._consuming.items():
                del wakes[consuming.get(key, 0) :]
            self.listeners, self._prune_lanes = listeners, prune_lanes
            raise
        for lane in self.lanes[before[0] :]:
            lane.start()
        for source in self.listeners.keys() - listeners.keys():
            self.listeners[source].start()

    def _find_retries(self, connection: Connection, *_: object) -> Counts:
        if not self._retrying:
            return Counts()
        names = [(consumer.subscription.group, consumer.subscription.feed) for consumer, _ in self._retrying]
        wakes = dict(zip(names, (wake for _, wake in self._retrying), strict=True))
        return wake_retries(connection, self.settings.schema, wakes)

    def _plan_subscription(self, subscription: Subscription) -> None:
        """Have a group served: for each of its sources its consumers have lanes of their own."""
        self._served.add(subscription.key)
        self._needs_consumer()
        if parked_callback(subscription) is not None:
            self.needs[self._own, "producer"].add("send")
        if isinstance(subscription.function, PublishedRows) and subscription.function.prefix is None:
            self.needs[self._own, "producer"].add("publish")
        met: dict[str, str] = {}
        several = subscription.of_sources()
        planned = [self._plan_source(each, met, named=len(several) > 1) for each in several]
        if subscription.at_end is not None:
            self.ends.append(subscription.at_end)
        meters = [[consumer.meter for consumer in consumers] for consumers, _ in planned]
        report = HandlerReport(subscription.topic, subscription.group, meters)
        # One of the group's duties tells of the handler, for all of its threads.
        for first in [calling[0] for _, calling in planned if calling][:1]:
            first.task = replace(first.task, facts=lambda: {"handler": report.facts()})

    def _needs_consumer(self) -> None:
        self.parts[self._own].add("consumer")
        self.needs[self._own, "consumer"] |= {"consume"} | self._roles & {"prune"}

    def _plan_source(
        self, subscription: Subscription, met: dict[str, str], *, named: bool
    ) -> tuple[list[Consumer], list[RunningDuty]]:
        """Have a group served that reads from one source; return what consumes, and the duties that call handlers.

        ``met`` gets the address of the source under the name by which what the group keeps of its topic has it. The
        duties are ``named`` after it where there are several.
        """
        settings, group, topic = self.settings, subscription.group, subscription.topic
        source = self._source_of(subscription.sources[0])
        name = f"{topic} of {group}" + (f" in {source.address}" if named else "")
        self.parts[source].add("producer")
        self.needs[source, "producer"].add("consume")
        self.topics[source].add(topic)
        # Outside of transactions, handlers run on no connection of the worker's.
        is_async = subscription.is_async and subscription.transactional
        runner = partial(self._runner, "consume", source, is_async=is_async, group=group)
        threads = subscription.threads if "consume" in self._roles else 1  # a leased group has one: for prune
        lanes = [self._lane(runner()) for _ in range(threads)]
        consumers = [self._consumer(subscription, lane) for lane in lanes]
        first, lane, calling = consumers[0], lanes[0], list[RunningDuty]()
        prune_lane, longest = lane, self._longest_wait
        if not subscription.transactional and not subscription.leased:
            longest = self._wait_for_retries
            if self._roles >= {"consume", "prune"}:
                # A pass lasts as long as a handler runs: it retries by itself, and has its lane for itself.
                prune_lane = self._prune_lanes.get(source) or self._lane(runner())
                self._prune_lanes[source] = prune_lane

        def start_group(connection: Connection, producer: Connection) -> Counts:
            first.start(connection, producer)
            feed = first.subscription.feed
            if (other := met.setdefault(feed, source.address)) != source.address:
                raise InvalidSettings(
                    f"group {group!r} reads topic {topic!r} from {other} and from {source.address}, which have one id: "
                    "one is a copy of the other; give it an id of its own by outbox db new-source"
                )
            for each, of_lane in zip(consumers, lanes, strict=True):
                each.subscription, of_lane.runner.on_source = first.subscription, each.find_source
            quarantine_group(connection, producer, settings.schema, group, feed)
            return Counts()

        def prune(connection: Connection, producer: Connection, stopping: Callable[[], bool]) -> Counts:
            feed = first.subscription.feed
            return prune_consumer_once(connection, producer, settings, group, feed, stopping=stopping)

        self.starts.append(partial(lane.runner.run, start_group))
        roles = self._roles & {"prune"} if subscription.leased else self._roles
        if "consume" in roles:
            for number, (each, consumer) in enumerate(zip(lanes, consumers, strict=True), 1):
                title = f"consume {name}" + (f" #{number}" if len(lanes) > 1 else "")
                wait = partial(longest, source, consumer.gate)
                is_woken = partial(self._hears, source)
                task = Task(name=title, one_pass=whole(consumer.consume_once), every=wait, eager=True)
                calling.append(duty := self._add(task, each, is_woken=is_woken))
                if isinstance(consumer, OutsideConsumer):
                    consumer.on_progress = duty.progressed
                self._consuming.setdefault((source, topic), []).append(partial(_wake_consumer, consumer, duty))
            self._listen(source)
        retries_by_itself = not subscription.transactional and "consume" in roles
        if "retry" in roles and not retries_by_itself:
            again = whole(partial(first.retry_once, limit=_RETRIES))
            calling.append(duty := self._add(Task(name=f"retry {name}", one_pass=again, every=math.inf), lane))
            self._retrying.append((first, duty.wake))
        if "prune" in self._roles:
            self._add(Task(name=f"prune {name}", one_pass=prune, every=settings.prune_interval), prune_lane)
        return consumers, calling

    def _consumer(self, subscription: Subscription, lane: Lane) -> Consumer:
        """Return what consumes in a lane."""
        if subscription.transactional or subscription.leased:
            return Consumer(subscription, self.settings, lane.ending)
        consumer = OutsideConsumer(
            subscription,
            self.settings,
            self._stopping.is_set,
            context=CallContext(self._context.active, self._context.loop, self._context.variables),
            consumes="consume" in self._roles,
            retries="retry" in self._roles,
        )
        self.ends.append(consumer.end)
        return consumer

    def _source_of(self, bind: Bind | None) -> WorkerDatabase:
        """Return the producer's database, of which a worker has one object."""
        source = self._own if bind is None else WorkerDatabase(bind)
        return self._sources.setdefault(source.address, source)

    def _named(self, duty: str, group: str | None = None) -> str:
        """Return what the server calls the connections of a duty."""
        return f"outbox/{group or self._group}/{duty}"

    def _runner(
        self, duty: str, source: WorkerDatabase, *, is_async: bool = False, group: str | None = None
    ) -> OwnRunner:
        remote, kind = None if source is self._own else source, AsyncRunner if is_async else OwnRunner
        return kind(self._own, remote, self._stopping, self._context, self._named(duty, group))

    def _lane(self, runner: OwnRunner) -> Lane:
        lane = Lane(runner, self._clock, self._stopping)
        self.lanes.append(lane)
        return lane

    def _lane_of(self, name: str, database: WorkerDatabase | None = None) -> Lane:
        """Return the lane of a name that tasks on a database share."""
        key = name, database or self._own
        if key not in self._shared:
            runner = OwnRunner(key[1], None, self._stopping, self._context, self._named(name))
            self._shared[key] = self._lane(self._dispatch_runner if name == "dispatch" else runner)
        return self._shared[key]

    def _add(self, task: Task, lane: Lane, *, is_woken: Callable[[], bool] = lambda: False) -> RunningDuty:
        running = RunningDuty(task, lane, self.settings.reconnect_cap, title=self._title, is_woken=is_woken)
        self.duties.append(running)
        return running

    def _listen(self, source: WorkerDatabase) -> None:
        if not self.settings.listen or source in self.listeners:
            return
        schema = self.settings.schema

        def send_ping(connection: Connection, *_: object) -> Counts:
            announce(connection, notify(schema, PING))
            return Counts()

        # Not among the duties of which the worker reports: it has no work of its own.
        task = Task(name=f"ping {source.address}", one_pass=send_ping, every=math.inf)
        ping = RunningDuty(task, self._lane_of("upkeep", source), self.settings.reconnect_cap, title=self._title)
        self.listeners[source] = Listener(
            source,
            schema,
            name=self._named("listen"),
            wake=partial(self._wake, source),
            ping=ping.wake,
            own_pids=lambda: {self._dispatch_runner.backend_pid},
            stopping=self._stopping,
            reconnect_cap=self.settings.reconnect_cap,
        )

    def _longest_wait(self, source: WorkerDatabase, gate: Gate) -> float:
        wait = self.settings.idle_wait
        # No notification tells that a group may go on.
        return min(max(LISTENING_WAIT, wait) if self._hears(source) else wait, gate.wait)

    def _hears(self, source: WorkerDatabase) -> bool:
        """Do notifications of new messages arrive from this database?"""
        listener = self.listeners.get(source)
        return listener is not None and listener.working

    def _wait_for_retries(self, source: WorkerDatabase, gate: Gate) -> float:
        wait = self._longest_wait(source, gate)
        return min(wait, self.settings.retry_interval) if "retry" in self._roles else wait

    def _wake(self, source: WorkerDatabase, payload: str | None) -> None:
        """Pass a notification on; None stands for all that may have been missed."""
        if payload != OPS:
            self._wake_consumers(source, payload)
        if payload in {OPS, None} and source is self._own and self._dispatching is not None:
            self._dispatching.wake()

    def _wake_consumers(self, source: WorkerDatabase, news: str | None) -> None:
        """Wake those consumers of this database that the news concerns, as `read_news` reads it; None concerns all."""
        topic, queue = (None, None) if news is None else read_news(news)
        every = [each for each in self._consuming if each[0] is source] if topic is None else [(source, topic)]
        for each in every:
            for wake in self._consuming.get(each, ()):
                wake(queue)


def _of_producer(duty: Duty) -> bool:
    """Does a duty work on the producer's tables alone?"""
    return {each.part for each in duty.rights} == {"producer"}
