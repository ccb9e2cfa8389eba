"""What a worker does: from the outbox and the roles to duties, and the connections they need.

Passes as lanes run them: with a connection to the database, and one to the producer's.

Operations as duties: what operators have ordered in a worker's database, and rollbacks, where it knows how.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from outbox.check.asker import Asker
from outbox.check.once import check_once
from outbox.compensate.once import compensate_once
from outbox.consumer.consumer import Consumer
from outbox.consumer.subscription import Subscription
from outbox.database.execute import execute
from outbox.database.runner import Pass
from outbox.database.sql import OPS, notify
from outbox.dispatch.once import dispatch_once, release_due_once
from outbox.errors import InvalidSettings
from outbox.message.model import Counts
from outbox.operator.bulk.run import operate_once
from outbox.prune.once import prune_consumer_once, prune_producer_once, prune_records_once
from outbox.settings import Settings
from outbox.worker.database import Database
from outbox.worker.duty import Duty
from outbox.worker.lane import AsyncLane, Lane, Runners, SyncLane
from outbox.worker.listener import Listener
from outbox.worker.report import EVERY as REPORT_EVERY
from outbox.worker.report import Reporter

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox


def on_producer(one_pass: Callable[[Connection, Settings], Counts], settings: Settings) -> Pass:
    """Return the pass of a duty that needs the producer's tables only."""
    return lambda connection, _: one_pass(connection, settings)


def start_group(consumer: Consumer, connection: Connection, source: Connection) -> Counts:
    """Register a new group."""
    consumer.start(connection, source)
    return Counts()


def prune_group(
    settings: Settings,
    subscription: Subscription,
    stopping: Callable[[], bool],
    connection: Connection,
    source: Connection,
) -> Counts:
    """Delete old inbox rows and offsets of a group."""
    group, topic = subscription.group, subscription.topic
    return prune_consumer_once(connection, source, settings, group, topic, stopping=stopping)


def send_notification(schema: str, payload: str, connection: Connection, _: Connection) -> Counts:
    """Send a notification."""
    with connection.begin():
        execute(connection, notify(schema, payload))
    return Counts()


#: What a worker may be told to do. The first four serve the producer's tables, ``prune`` and ``operate`` both sides'.
ROLES = ("dispatch", "release", "check", "prune", "consume", "retry", "reconcile", "operate")
PRODUCER_ROLES = frozenset({"dispatch", "release", "check", "prune", "operate"})
_CONSUMER_ROLES = frozenset({"consume", "retry", "prune"})

#: The longest wait (seconds) of a duty that notifications wake.
LISTENING_WAIT = 5.0
#: Retries of one pass; more would keep the lane from the consuming thread.
_RETRIES = 10


def check_roles(roles: Collection[str] | None) -> frozenset[str]:
    """Return the roles of a worker; None means all.

    Raises:
        InvalidSettings: none, or one that doesn't exist.
    """
    if roles is None:
        return frozenset(ROLES)
    given = [roles] if isinstance(roles, str) else list(roles)
    unknown = sorted(set(given).difference(ROLES))
    if unknown or not given:
        raise InvalidSettings(f"roles = {given!r} must be some of {', '.join(ROLES)}")
    return frozenset(given)


class Plan:
    """Duties, lanes and listeners of one worker; nothing is connected yet."""

    def __init__(self, outbox: Outbox, roles: frozenset[str], *, producing: bool, stopping: threading.Event) -> None:
        self.settings = outbox.settings
        self.duties: list[Duty] = []
        self.lanes: list[Lane] = []
        self.listeners: dict[Database, Listener] = {}
        self.parts: dict[Database, set[str]] = {}
        self.starts: list[Callable[[], object]] = []
        self.ends: list[Callable[[], object]] = []
        self._roles = roles
        self._stopping = stopping
        self._own = Database(outbox.engine)
        self._dispatching: list[Duty] = []
        self._consuming: dict[tuple[Database, str], list[Duty]] = {}
        self._upkeep: dict[Database, SyncLane] = {}
        self._dispatch = SyncLane(self._own, None, stopping)
        self._sources: dict[str, Database] = {self._own.address: self._own}
        if producing:
            self._plan_producer(outbox)
        if roles & _CONSUMER_ROLES:
            for subscription in outbox.subscriptions.values():
                self._plan_subscription(subscription)
        if "reconcile" in roles and outbox.reconciliations:
            self._plan_reconciliations(outbox)
        if "operate" in roles:
            self._plan_operate(outbox, producing=producing)
        if "prune" in roles and self._own in self.parts:
            self._plan_records()
        if self.duties:
            self._plan_report(outbox)

    def _plan_producer(self, outbox: Outbox) -> None:
        settings = self.settings
        self.parts.setdefault(self._own, set()).add("producer")
        told = partial(self._wake_consumers, self._own, None)
        if self._roles & {"dispatch", "release"}:
            self.lanes.append(self._dispatch)
        if "dispatch" in self._roles:
            act = on_producer(dispatch_once, settings)
            self._dispatching.append(self._add("dispatch", self._dispatch, act, lambda: settings.idle_wait, after=told))
            self._listen(self._own)
        if "release" in self._roles:
            act = on_producer(release_due_once, settings)
            self._add("release", self._dispatch, act, lambda: settings.release_interval, after=told)
        if "check" in self._roles:
            self._plan_check(outbox)
        if "prune" in self._roles:
            upkeep = self._upkeep_of(self._own)
            act = on_producer(partial(prune_producer_once, stopping=upkeep.ending), settings)
            self._add("prune", upkeep, act, lambda: settings.prune_interval, eager=False)

    def _plan_check(self, outbox: Outbox) -> None:
        # A lane of its own: a pass may take a minute, and dispatch must not wait for it.
        lane = SyncLane(self._own, None, self._stopping)
        self.lanes.append(lane)
        asker = Asker(Runners(self._own, self._stopping), self.settings.checks_in_flight)
        self.ends.append(asker.end)
        one_pass = partial(check_once, checkers=outbox.checkers, asker=asker, stopping=lane.ending)
        act = on_producer(one_pass, self.settings)

        def wait() -> float:
            # A topic may be asked about more often than the settings say; one may be declared at any time.
            return min([self.settings.check_interval, *(each.interval for each in list(outbox.checkers.values()))])

        self._add("check", lane, act, wait, after=partial(self._wake, self._own, OPS), eager=False)

    def _plan_subscription(self, subscription: Subscription) -> None:
        settings, name = self.settings, f"{subscription.topic} of {subscription.group}"
        source = self._source_of(subscription)
        self.parts.setdefault(self._own, set()).add("consumer")
        self.parts.setdefault(source, set()).add("producer")
        remote = None if source is self._own else source
        kind = AsyncLane if subscription.is_async else SyncLane
        lanes: list[Lane] = [
            kind(self._own, remote, self._stopping)
            for _ in range(subscription.threads if "consume" in self._roles else 1)
        ]
        consumers = [Consumer(subscription, settings, lane.ending) for lane in lanes]
        self.lanes += lanes
        self.starts.append(partial(lanes[0].run, partial(start_group, consumers[0])))
        if "consume" in self._roles:
            for number, (lane, consumer) in enumerate(zip(lanes, consumers, strict=True), 1):
                title = f"consume {name}" + (f" #{number}" if len(lanes) > 1 else "")
                duty = self._add(title, lane, consumer.consume_once, partial(self._longest_wait, source))
                self._consuming.setdefault((source, subscription.topic), []).append(duty)
            self._listen(source)
        if "retry" in self._roles:
            act = partial(consumers[0].retry_once, limit=_RETRIES)
            self._add(f"retry {name}", lanes[0], act, lambda: settings.retry_interval, eager=False)
        if "prune" in self._roles:
            act = partial(prune_group, settings, subscription, lanes[0].ending)
            self._add(f"prune {name}", lanes[0], act, lambda: settings.prune_interval, eager=False)

    def _plan_reconciliations(self, outbox: Outbox) -> None:
        from outbox.worker.reconciliation import reconcilers  # noqa: PLC0415 - what few workers do

        # A lane of its own: a job may take long, and nothing must wait for it.
        lane = SyncLane(self._own, None, self._stopping)
        self.lanes.append(lane)
        self.parts.setdefault(self._own, set()).add("consumer")
        for reconciler in reconcilers(outbox, self._stopping):
            self._add(reconciler.name, lane, reconciler, reconciler.wait, eager=False)

    def _plan_operate(self, outbox: Outbox, *, producing: bool) -> None:

        # Lanes of their own: operators wait for what they ordered, and a compensation may take long.
        self.parts.setdefault(self._own, set())
        lane = SyncLane(self._own, None, self._stopping)
        self.lanes.append(lane)
        act, told = operating(outbox, lane), partial(self._wake, self._own, OPS)
        self._add("operate", lane, act, lambda: self.settings.idle_wait, after=told, eager=False)
        if producing and outbox.compensations:
            lane = SyncLane(self._own, None, self._stopping)
            runners = Runners(self._own, self._stopping)
            self.lanes.append(lane)
            self.ends.append(runners.end)
            act = compensating(outbox, lane, runners)
            self._add("compensate", lane, act, lambda: self.settings.idle_wait, eager=False)

    def _plan_records(self) -> None:
        upkeep = self._upkeep_of(self._own)
        act = on_producer(partial(prune_records_once, stopping=upkeep.ending), self.settings)
        self._add("prune records", upkeep, act, lambda: self.settings.prune_interval, eager=False)

    def _plan_report(self, outbox: Outbox) -> None:
        upkeep = self._upkeep_of(self._own)
        reporter = Reporter(outbox, self._roles, self.duties)
        self._add("report", upkeep, reporter, lambda: REPORT_EVERY, eager=False)
        self.ends.append(partial(reporter.goodbye, upkeep))

    def _add(
        self,
        name: str,
        lane: Lane,
        act: Pass,
        longest_wait: Callable[[], float],
        *,
        after: Callable[[], None] | None = None,
        eager: bool = True,
    ) -> Duty:
        duty = Duty(
            name,
            partial(lane.run, act),
            longest_wait=longest_wait,
            stopping=self._stopping,
            reconnect_cap=self.settings.reconnect_cap,
            after=after,
            eager=eager,
        )
        self.duties.append(duty)
        return duty

    def _source_of(self, subscription: Subscription) -> Database:
        if subscription.source is None:
            return self._own
        source = Database(subscription.source)
        return self._sources.setdefault(source.address, source)

    def _upkeep_of(self, database: Database) -> SyncLane:
        if database not in self._upkeep:
            self._upkeep[database] = SyncLane(database, None, self._stopping)
            self.lanes.append(self._upkeep[database])
        return self._upkeep[database]

    def _listen(self, source: Database) -> None:
        if not self.settings.listen or source in self.listeners:
            return
        upkeep = self._upkeep_of(source)
        self.listeners[source] = Listener(
            source,
            self.settings.schema,
            wake=partial(self._wake, source),
            probe=lambda payload: upkeep.run(partial(send_notification, self.settings.schema, payload)),
            own_pids=lambda: {self._dispatch.backend_pid},
            stopping=self._stopping,
            reconnect_cap=self.settings.reconnect_cap,
        )

    def _longest_wait(self, source: Database) -> float:
        listener = self.listeners.get(source)
        return (
            max(LISTENING_WAIT, self.settings.idle_wait) if listener and listener.working else self.settings.idle_wait
        )

    def _wake(self, source: Database, payload: str | None) -> None:
        """Pass a notification on; None stands for all that may have been missed."""
        if payload != OPS:
            self._wake_consumers(source, payload)
        if payload in {OPS, None} and source is self._own:
            for duty in self._dispatching:
                duty.wake()

    def _wake_consumers(self, source: Database, topic: str | None) -> None:
        """Wake those who consume the topic from this database; all who consume from it if it is None."""
        for (database, name), duties in self._consuming.items():
            if database is source and topic in {None, name}:
                for duty in duties:
                    duty.wake()


def operating(outbox: Outbox, lane: SyncLane) -> Pass:
    """Return the pass that carries operations out, on both sides' tables."""
    return on_producer(partial(operate_once, stopping=lane.ending), outbox.settings)


def compensating(outbox: Outbox, lane: SyncLane, runners: Runners) -> Pass:
    """Return the pass that rolls local transactions back."""
    one_pass = partial(compensate_once, compensations=outbox.compensations, new_runner=runners, stopping=lane.ending)
    return on_producer(one_pass, outbox.settings)
