"""What a worker does: from the outbox and the roles to duties, their lanes, and the listeners that wake them."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from outbox.check.asker import Asker
from outbox.check.once import check_once
from outbox.compensate.once import compensate_once
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.consumer.control.gate import Gate
from outbox.consumer.meter import HandlerReport
from outbox.consumer.outside.calls import CallContext
from outbox.consumer.outside.consumer import OutsideConsumer
from outbox.consumer.retry import wake_retries
from outbox.consumer.subscription import Subscription
from outbox.database.at_commit import announce
from outbox.database.engines import Pass
from outbox.database.grants import Part
from outbox.database.sql import OPS, PROBE, REPORT_INTERVAL, notify, read_news
from outbox.dead_letter.once import announce_halves_once, announce_messages_once
from outbox.delivery.known_group import KnownGroup
from outbox.delivery.once import ConfirmReport, confirm_once
from outbox.dispatch.once import dispatch_once, release_due_once
from outbox.errors import InvalidSettings
from outbox.message.model import Counts
from outbox.operator.bulk.run import bulk_once
from outbox.prune.inbox import INBOX
from outbox.prune.once import (
    prune_consumer_once,
    prune_producer_once,
    prune_records_once,
    prune_runs_once,
    prune_segments_once,
)
from outbox.worker.clock import Clock
from outbox.worker.connections import AsyncRunner, OwnRunner, PassContext, Runners, WorkerDatabase
from outbox.worker.duty import Duty, Lane
from outbox.worker.listener import Listener
from outbox.worker.report import ReconciledPairs, Reporter

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.settings import Settings

P = ParamSpec("P")

#: What a worker may do. The first four serve the producer's tables; ``prune`` and ``bulk`` serve the consumer's too.
ROLES = ("dispatch", "release", "check", "prune", "consume", "retry", "reconcile", "bulk", "confirm")
PRODUCER_ROLES = frozenset({"dispatch", "release", "check", "prune", "bulk", "confirm"})
_CONSUMER_ROLES = frozenset({"consume", "retry", "prune"})

#: The longest wait (seconds) of a duty that notifications wake.
LISTENING_WAIT = 5.0
#: Retries of one pass; more would keep the lane from the consuming thread.
_RETRIES = 10
#: How often (seconds) the application is called for parked halves and messages.
DEAD_LETTER_INTERVAL = 30.0


def check_roles(roles: Collection[str] | None) -> frozenset[str]:
    """Return the roles of a worker; None means all.

    Raises:
        InvalidSettings: none, or one that doesn't exist.
    """
    if roles is None:
        return frozenset(ROLES)
    names = [roles] if isinstance(roles, str) else list(roles)
    if not names or not set(names) <= set(ROLES):
        raise InvalidSettings(f"roles = {names!r} must be some of {', '.join(ROLES)}")
    return frozenset(names)


def _alone(function: Callable[Concatenate[Connection, P], Counts], *values: P.args, **named: P.kwargs) -> Pass:
    """Return a pass over the worker's own database only."""
    return lambda connection, _: function(connection, *values, **named)


def _wake_consumer(consumer: Consumer, duty: Duty, queue: int | None) -> None:
    consumer.wake(queue)  # first: the pass that the duty begins must know of it
    duty.wake()


class Plan:
    """Duties, lanes and listeners for one Outbox of a worker; nothing is connected yet.

    ``title`` comes before the names of its duties, where the worker serves several. ``loop`` is that of `PassContext`.
    """

    def __init__(
        self,
        outbox: Outbox,
        roles: frozenset[str],
        clock: Clock,
        *,
        producing: bool,
        stopping: threading.Event,
        title: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
        variables: contextvars.Context | None = None,
    ) -> None:
        self.settings: Settings = outbox.settings
        self.duties: list[Duty] = []
        self.lanes: list[Lane] = []
        self.report: Duty | None = None
        self.listeners: dict[WorkerDatabase, Listener] = {}
        #: The parts of the schema that a database must have.
        self.parts: defaultdict[WorkerDatabase, set[str]] = defaultdict(set)
        #: What its role must be allowed to do in a database: duties of `outbox.database.grants`, by part.
        self.needs: defaultdict[tuple[WorkerDatabase, Part], set[str]] = defaultdict(set)
        #: What its groups read in a database.
        self.topics: defaultdict[WorkerDatabase, set[str]] = defaultdict(set)
        #: What comes before the duties start, and after they have ended.
        self.starts: list[Callable[[], object]] = []
        self.ends: list[Callable[[], object]] = []
        self._roles = roles
        self._clock = clock
        self._stopping = stopping
        self._title = title
        self._context = PassContext(outbox.active, loop, variables)
        self._own = WorkerDatabase(outbox.engine)
        self._dispatching: Duty | None = None
        self._group = outbox.group
        self._dispatch_runner = OwnRunner(self._own, None, stopping, self._context, self._named("dispatch"))
        #: What wakes the consumers of a topic of a database, for a queue or (None) for any.
        self._consuming: dict[tuple[WorkerDatabase, str], list[Callable[[int | None], None]]] = {}
        #: What wakes the retries of a group and a topic.
        self._retrying: dict[tuple[str, str], Callable[[], None]] = {}
        self._upkeep: dict[WorkerDatabase, Lane] = {}
        #: Where the groups that handle outside of transactions are pruned, by the database that they read.
        self._prune_lanes: dict[WorkerDatabase, Lane] = {}
        self._reconciled: list[ReconciledPairs] = []
        self._sources: dict[str, WorkerDatabase] = {self._own.address: self._own}
        if producing:
            self._plan_producer(outbox)
        if roles & _CONSUMER_ROLES:
            for subscription in outbox.subscriptions.values():
                self._plan_subscription(subscription)
        if self._retrying:
            look = _alone(wake_retries, self.settings.schema, self._retrying)
            self._add("look for retries", self._upkeep_of(self._own), look, self.settings.retry_interval, eager=False)
        self._plan_dead_letters(outbox, producing=producing)
        if "reconcile" in roles and outbox.reconciliations:
            self._plan_reconciliations(outbox)
        if "bulk" in roles:
            self._plan_bulk(outbox, producing=producing)
        if "prune" in roles and "consumer" in self.parts.get(self._own, ()):
            self._plan_prune("inbox segments", partial(prune_segments_once, side=INBOX))
        if "prune" in roles and self._own in self.parts:
            self._plan_prune("prune records", prune_records_once)
        if self.duties:
            upkeep, reporter = self._upkeep_of(self._own), Reporter(outbox, self._roles, self.duties, self._reconciled)
            self.report = self._add("report", upkeep, reporter, REPORT_INTERVAL, eager=False)
            self.ends.append(partial(reporter.goodbye, upkeep.runner))

    def begin(self) -> None:
        """Start the threads."""
        for lane in self.lanes:
            lane.start()
        for listener in self.listeners.values():
            listener.start()

    def end(self) -> None:
        """Close all connections, also under passes that run on."""
        for end in (*self.ends, *(lane.runner.end for lane in self.lanes)):
            end()

    def _plan_producer(self, outbox: Outbox) -> None:
        settings, roles = self.settings, self._roles
        self.parts[self._own].add("producer")
        self.needs[self._own, "producer"] |= roles & PRODUCER_ROLES - {"confirm"}
        if roles & {"dispatch", "release"}:
            lane = self._lane(self._dispatch_runner)
        if "dispatch" in roles:
            self._dispatching = self._plan_messages("dispatch", lane, dispatch_once, settings.idle_wait)
            self._listen(self._own)
        if "release" in roles:
            self._plan_messages("release", lane, release_due_once, settings.release_interval)
        if "check" in roles:
            self._plan_check(outbox)
        if "prune" in roles:
            self._plan_prune("segments", prune_segments_once)
            self._plan_prune("prune", prune_producer_once)
        if "confirm" in roles and (groups := outbox.groups_to_confirm()):
            self._plan_confirm(outbox, groups)

    def _plan_messages(self, name: str, lane: Lane, make: Callable[..., Counts], wait: float) -> Duty:
        """Have messages made, and those consumers woken that they are for."""
        arrived: list[str] = []

        def pass_on(news: str) -> None:
            arrived.append(news)
            self._wake_consumers(self._own, news)

        def wake() -> None:
            # Of a pass that failed it isn't known what it has made.
            if not arrived:
                self._wake_consumers(self._own, None)
            arrived.clear()

        return self._add(name, lane, _alone(make, self.settings, on_news=pass_on), wait, after=wake)

    def _plan_confirm(self, outbox: Outbox, groups: Sequence[KnownGroup]) -> None:
        settings = self.settings
        self.needs[self._own, "producer"].add("confirm")
        if any(group.consumer is None and group.status_url is None for group in groups):
            self.parts[self._own].add("consumer")
            self.needs[self._own, "consumer"].add("confirm")
        # A lane of its own: consumers may be slow to answer, and callbacks slow to return.
        lane = self._lane(name="confirm")
        runners, report = Runners(self._own, self._stopping, self._context, self._named("confirm")), ConfirmReport()
        self.ends.append(runners.end)
        one_pass = _alone(
            confirm_once,
            settings,
            groups=groups,
            callbacks=outbox.delivery_callbacks,
            new_runner=runners,
            compensations=outbox.compensations,
            stopping=lane.ending,
            report=report,
        )
        wake = partial(self._wake_consumers, self._own, None)
        every = settings.confirm_interval
        self._add("confirm", lane, one_pass, every, after=wake, eager=False, facts=report.facts)

    def _plan_check(self, outbox: Outbox) -> None:
        settings = self.settings
        # A lane of its own: a pass may take a minute, and dispatch must not wait for it.
        lane = self._lane(name="check")
        runners = Runners(self._own, self._stopping, self._context, self._named("check"))
        asker = Asker(runners, settings.checks_in_flight)
        self.ends.append(asker.end)

        def wait() -> float:
            # A topic may be asked about more often than the settings say; one may be declared at any time.
            return min([settings.check_interval, *(each.interval for each in list(outbox.checkers.values()))])

        one_pass = _alone(check_once, settings, outbox.checkers, asker, stopping=lane.ending)
        self._add("check", lane, one_pass, wait, after=partial(self._wake, self._own, OPS), eager=False)

    def _plan_subscription(self, subscription: Subscription) -> None:
        settings, group, topic = self.settings, subscription.group, subscription.topic
        name = f"{topic} of {group}"
        source = self._source_of(subscription)
        self.parts[self._own].add("consumer")
        self.parts[source].add("producer")
        self.needs[self._own, "consumer"] |= {"consume"} | self._roles & {"prune", "bulk"}
        self.needs[source, "producer"].add("consume")
        self.topics[source].add(topic)
        remote = None if source is self._own else source
        # Outside of transactions, handlers run on no connection of the worker's.
        kind = AsyncRunner if subscription.is_async and subscription.transactional else OwnRunner
        threads = subscription.threads if "consume" in self._roles else 1
        runner = partial(kind, self._own, remote, self._stopping, self._context, self._named("consume", group))
        lanes = [self._lane(runner()) for _ in range(threads)]
        consumers = [self._consumer(subscription, lane) for lane in lanes]
        first, lane = consumers[0], lanes[0]
        prune_lane, longest = lane, self._longest_wait
        if not subscription.transactional:
            longest = self._wait_for_retries
            if self._roles >= {"consume", "prune"}:
                # A pass lasts as long as a handler runs: it retries by itself, and has its lane for itself.
                prune_lane = self._prune_lanes.get(source) or self._lane(runner())
                self._prune_lanes[source] = prune_lane
        report = HandlerReport(topic, group, [consumer.meter for consumer in consumers])
        # One of the group's duties tells of the handler, for all of its threads.
        facts = iter([lambda: {"handler": report.facts()}])

        def start_group(connection: Connection, producer: Connection) -> Counts:
            first.start(connection, producer)
            quarantine_group(connection, producer, settings.schema, group, topic)
            return Counts()

        def prune(connection: Connection, producer: Connection) -> Counts:
            return prune_consumer_once(connection, producer, settings, group, topic, stopping=prune_lane.ending)

        self.starts.append(partial(lane.runner.run, start_group))
        if "consume" in self._roles:
            for number, (each, consumer) in enumerate(zip(lanes, consumers, strict=True), 1):
                title = f"consume {name}" + (f" #{number}" if len(lanes) > 1 else "")
                wait = partial(longest, source, consumer.gate)
                is_woken = partial(self._hears, source)
                duty = self._add(title, each, consumer.consume_once, wait, is_woken=is_woken, facts=next(facts, dict))
                if isinstance(consumer, OutsideConsumer):
                    consumer.on_progress = duty.progressed
                self._consuming.setdefault((source, topic), []).append(partial(_wake_consumer, consumer, duty))
            self._listen(source)
        retries_by_itself = not subscription.transactional and "consume" in self._roles
        if "retry" in self._roles and not retries_by_itself:
            one_pass = partial(first.retry_once, limit=_RETRIES)
            duty = self._add(f"retry {name}", lane, one_pass, math.inf, eager=False, facts=next(facts, dict))
            self._retrying[group, topic] = duty.wake
        if "prune" in self._roles:
            self._add(f"prune {name}", prune_lane, prune, settings.prune_interval, eager=False)

    def _consumer(self, subscription: Subscription, lane: Lane) -> Consumer:
        """Return what consumes in a lane."""
        if subscription.transactional:
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

    def _plan_dead_letters(self, outbox: Outbox, *, producing: bool) -> None:
        """Have the application called for parked halves and messages, by the workers that check and retry.

        A lane for each: the application's functions may be slow to return.
        """
        settings = self.settings
        for callback in outbox.parked_callbacks.values():
            kind, name = AsyncRunner if callback.is_async else OwnRunner, f"dead letters {callback.topic}"
            runner = partial(kind, self._own, stopping=self._stopping, context=self._context)
            if producing and "check" in self._roles:
                self.needs[self._own, "producer"].add("dead letters")
                lane = self._lane(runner(source=None, name=self._named("dead letters")))
                one_pass = _alone(announce_halves_once, settings, callback, stopping=lane.ending)
                self._add(f"{name}, halves", lane, one_pass, DEAD_LETTER_INTERVAL, eager=False)
            for (topic, group), subscription in outbox.subscriptions.items():
                if topic == callback.topic and "retry" in self._roles:
                    self.needs[self._own, "consumer"].add("dead letters")
                    source = self._source_of(subscription)
                    remote = None if source is self._own else source
                    lane = self._lane(runner(source=remote, name=self._named("dead letters", group)))
                    one_pass = partial(
                        announce_messages_once,
                        settings=settings,
                        callback=callback,
                        subscription=subscription,
                        stopping=lane.ending,
                    )
                    self._add(f"{name} of {group}", lane, one_pass, DEAD_LETTER_INTERVAL, eager=False)

    def _source_of(self, subscription: Subscription) -> WorkerDatabase:
        """Return the producer's database, of which a worker has one object."""
        source = self._own if subscription.source is None else WorkerDatabase(subscription.source)
        return self._sources.setdefault(source.address, source)

    def _plan_reconciliations(self, outbox: Outbox) -> None:
        from outbox.worker.following import followings  # noqa: PLC0415 - what few workers do
        from outbox.worker.reconciliation import JobReconciler, reconcilers  # noqa: PLC0415 - what few workers do
        from outbox.worker.repairs import READ_EVERY, Repairer  # noqa: PLC0415 - what few workers do

        # A lane of its own: a job may take long, and nothing must wait for it.
        lane = self._lane(name="reconcile")
        self.parts[self._own].add("consumer")
        for reconciler in reconcilers(outbox, self._stopping):
            self._reconciled.append((reconciler.declared.name, reconciler.pairs))
            self._add(reconciler.name, lane, reconciler, reconciler.wait, eager=False)
            if isinstance(reconciler, JobReconciler):
                repairer = Repairer(reconciler, self._stopping)
                self._add(repairer.name, lane, repairer, READ_EVERY, eager=False)
            elif "prune" in self._roles:
                ((topic, group),) = reconciler.pairs
                self.needs[self._own, "consumer"].add("prune")
                self._plan_prune(f"prune {reconciler.name}", partial(prune_runs_once, group=group, topic=topic))
        for following in followings(outbox, self._stopping):
            self._reconciled.append((following.declared.name, following.pairs))
            # Nothing that takes long must keep it.
            own = self._lane(name="follow")
            self._add(following.name, own, following, following.wait, eager=False)
            self.ends.append(following.end)
            repairer = Repairer(following, self._stopping)
            self._add(repairer.name, lane, repairer, READ_EVERY, eager=False)

    def _plan_bulk(self, outbox: Outbox, *, producing: bool) -> None:
        settings, every = self.settings, self.settings.idle_wait
        # Lanes of their own: operators wait for what they ordered, and a compensation may take long.
        self.parts.setdefault(self._own, set())
        lane, wake = self._lane(name="bulk"), partial(self._wake, self._own, OPS)
        one_pass = _alone(bulk_once, settings, stopping=lane.ending)
        self._add("bulk", lane, one_pass, every, after=wake, eager=False)
        if producing and (registered := outbox.compensations):
            self.needs[self._own, "producer"].add("compensate")
            lane = self._lane(name="compensate")
            runners = Runners(self._own, self._stopping, self._context, self._named("compensate"))
            self.ends.append(runners.end)
            one_pass = _alone(
                compensate_once, settings, compensations=registered, new_runner=runners, stopping=lane.ending
            )
            self._add("compensate", lane, one_pass, every, eager=False)

    def _plan_prune(self, name: str, prune: Callable[..., Counts]) -> None:
        upkeep = self._upkeep_of(self._own)
        one_pass = _alone(prune, self.settings, stopping=upkeep.ending)
        self._add(name, upkeep, one_pass, self.settings.prune_interval, eager=False)

    def _named(self, duty: str, group: str | None = None) -> str:
        """Return what the server calls the connections of a duty."""
        return f"outbox/{group or self._group}/{duty}"

    def _lane(self, runner: OwnRunner | None = None, name: str = "") -> Lane:
        runner = runner or OwnRunner(self._own, None, self._stopping, self._context, self._named(name))
        lane = Lane(runner, self._clock, self._stopping)
        self.lanes.append(lane)
        return lane

    def _add(
        self,
        name: str,
        lane: Lane,
        one_pass: Pass,
        wait: float | Callable[[], float],
        *,
        after: Callable[[], None] | None = None,
        eager: bool = True,
        is_woken: Callable[[], bool] = lambda: False,
        reported: bool = True,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> Duty:
        longest = wait if callable(wait) else lambda: wait
        cap = self.settings.reconnect_cap
        name = self._title + name
        duty = Duty(
            name,
            one_pass,
            lane,
            longest_wait=longest,
            reconnect_cap=cap,
            after=after,
            eager=eager,
            is_woken=is_woken,
            facts=facts,
        )
        if reported:
            self.duties.append(duty)
        return duty

    def _upkeep_of(self, database: WorkerDatabase) -> Lane:
        if database not in self._upkeep:
            runner = OwnRunner(database, None, self._stopping, self._context, self._named("upkeep"))
            self._upkeep[database] = self._lane(runner)
        return self._upkeep[database]

    def _listen(self, source: WorkerDatabase) -> None:
        if not self.settings.listen or source in self.listeners:
            return
        schema = self.settings.schema

        def send_probe(connection: Connection, _: Connection) -> Counts:
            announce(connection, notify(schema, PROBE))
            return Counts()

        # Not among the duties of which the worker reports: it has no work of its own.
        probe = self._add(f"probe {source.address}", self._upkeep_of(source), send_probe, math.inf, reported=False)
        self.listeners[source] = Listener(
            source,
            schema,
            name=self._named("listen"),
            wake=partial(self._wake, source),
            probe=probe.wake,
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
        if payload in {OPS, None} and source is self._own and self._dispatching:
            self._dispatching.wake()

    def _wake_consumers(self, source: WorkerDatabase, news: str | None) -> None:
        """Wake those consumers of this database that the news concerns, as `read_news` reads it; None concerns all."""
        topic, queue = (None, None) if news is None else read_news(news)
        every = [each for each in self._consuming if each[0] is source] if topic is None else [(source, topic)]
        for each in every:
            for wake in self._consuming.get(each, ()):
                wake(queue)
