"""Run what a worker would run, here and now: dispatch, consume, retry, check, confirm, bulk jobs, and more.

For outboxes on an AsyncEngine, and for async functions, each is called by `outbox.testing.on_loop`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING

from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.outside.calls import CallContext
from outbox.consumer.outside.consumer import consumer_of
from outbox.database.dialect import tables_missing
from outbox.database.duty import ROLES, Post, Task, duties
from outbox.declarations import relayed, topics_to_relay
from outbox.errors import InvalidHandler
from outbox.message.model import Counts
from outbox.testing import sql
from outbox.testing.due import age, dispatch, parts
from outbox.testing.runners import PassRunners, TransactionRunner, rolled_back, source_connection

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.consumer.subscription import Subscription

#: Rounds of dispatch and consume after which `drain` gives up. A message that is answered by the next takes one.
ROUNDS = 100


class NotQuiet(AssertionError):
    """There is no end of the work: each message is answered by one, or one is retried for ever."""


def drain(
    *outboxes: Outbox, delayed: bool = False, failed: bool = False, orphans: bool = False, rounds: int = ROUNDS
) -> Counts:
    """Dispatch the messages sent, consume them, retry and check those due, until nothing is left.

    Returns what the consumers did. Messages that a handler sends are dispatched and consumed as well. Work that is due
    later is left alone, unless it is made due in each round: ``delayed`` messages, ``failed`` ones (until they are
    consumed or parked), and ``orphans`` (undecided halves: fences are tried and checkers asked). For outboxes on a sync
    engine with plain functions.

    Raises:
        NotQuiet: there was still something to do in the last of so many ``rounds``.
        SchemaMissing: an outbox's database has no tables of it.
        InvalidHandler: an async function or database; call it by `on_loop` for these.
    """
    return _drain(PassRunners("drain"), outboxes, _Due(delayed, failed, orphans), rounds)


def check(outbox: Outbox) -> Counts:
    """Check all undecided halves now, however young, and return what came of it.

    Fences are tried and checkers asked, as a worker does once the immunity time is over. For an outbox on a sync engine
    with plain checkers. A function that runs meanwhile is left alone, a parked half too.

    Raises:
        InvalidHandler: an async checker or database: call it by `on_loop` for these; or the outbox is rolled back.
    """
    return _carry_out(PassRunners("check"), outbox, "check", at_once=True)


def bulk(outbox: Outbox) -> Counts:
    """Carry out all bulk jobs that were ordered in this database, whatever their rates; return the counts.

    Compensations run for topics that have one declared here; one that fails is left for its next try, which is due
    later. For an outbox on a sync engine with plain compensations.

    Raises:
        InvalidHandler: an async compensation or database: call it by `on_loop` for these; or the outbox is rolled back.
    """
    runners, total = PassRunners("bulk"), Counts()
    while counts := _carry_out(runners, outbox, "bulk", "compensate", at_once=True):
        total += counts
    return replace(total, more=False)


def confirm(outbox: Outbox) -> Counts:
    """Ask the known groups what became of messages, however young; return how many fates are new.

    Messages that a group has lost are sent again, and those parked for long enough are ordered to be compensated
    (`bulk` carries that out). What callbacks are to be told, `drain` delivers. For an outbox on a sync engine.

    Raises:
        InvalidHandler: an async database: call it by `on_loop` for it; or the outbox is rolled back.
    """
    return _carry_out(PassRunners("confirm"), outbox, "confirm", at_once=True)


def schedules(outbox: Outbox) -> Counts:
    """Send a message of each schedule that is declared, as if its time had come now; return how many were sent.

    Those of its own times that are due by now are sent too. `drain` hands the messages to their consumers. For an
    outbox on a sync engine with plain functions.

    Raises:
        InvalidHandler: an async function or database: call it by `on_loop` for these; or the outbox is rolled back.
    """
    return _carry_out(PassRunners("schedules"), outbox, "schedule", at_once=True)


# --- drain -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Due:
    """The work that is made due in each round."""

    delayed: bool
    failed: bool
    orphans: bool


@dataclass(slots=True)
class _Round:
    """What one round did: what its consumers did, by group and topic; ``progress`` if anything at all."""

    counts: Counts = field(default_factory=Counts)
    by_consumer: Counter[tuple[str, str]] = field(default_factory=Counter)
    progress: bool = False


def _drain(runners: PassRunners, outboxes: Sequence[Outbox], due: _Due, rounds: int) -> Counts:
    total, last = Counts(), _Round()
    if not any(outbox.subscriptions or outbox.relays for outbox in outboxes):
        text = "consumes nothing: no consumer is declared; import the modules that register them"
        warnings.warn(f"{runners.act} {text}", stacklevel=3)
    for outbox in outboxes:
        if not parts(runners.of(outbox), outbox):
            raise tables_missing(outbox.url, f"{runners.act} finds none", (), outbox.settings.schema)
    for _ in range(rounds):
        last = _Round()
        for outbox in outboxes:
            last.progress |= _produce(runners, outbox, due)
        for outbox in outboxes:
            _find_topics(runners, outbox)
            handled = [each for each in outbox.subscriptions.values() if not each.leased]
            for subscription in (each for several in handled for each in several.of_sources()):
                counts = _consume(runners, outbox, subscription, due)
                last.counts += counts
                last.by_consumer[subscription.group, subscription.topic] += counts.taken
        total += last.counts
        if not last.counts and not last.progress:
            return replace(total, more=False)
    raise NotQuiet("\n".join(_unquiet(last, rounds)))


def _unquiet(last: _Round, rounds: int) -> Iterator[str]:
    yield f"there is still something to do after {rounds} rounds of dispatch and consume. The last one did:"
    for (group, topic), taken in last.by_consumer.items():
        if taken:
            yield f"  group {group!r} took {taken} of topic {topic!r}"
    if not last.counts:
        yield "  nothing but dispatch, release or check"
    yield "Does a handler send what it consumes itself, or is a message retried for ever? For more, give rounds=…"


def _produce(runners: PassRunners, outbox: Outbox, due: _Due) -> bool:
    """Check, dispatch and release; tell whether anything came of it."""
    runner = runners.of(outbox)
    if "producer" not in parts(runner, outbox):
        return False
    if due.orphans:
        age(runner, outbox, sql.age_orphans)
    # Checkers have connections of their own, which don't see a transaction that is rolled back.
    left_out = outbox in rolled_back and not due.orphans
    checked = Counts() if left_out else _carry_out(runners, outbox, "check")
    dispatched = dispatch(runner, outbox)
    if due.delayed:
        age(runner, outbox, sql.age_delayed)
        dispatched += dispatch(runner, outbox)
    return bool(checked.done or checked.parked or dispatched)


def _find_topics(runners: PassRunners, outbox: Outbox) -> None:
    """Declare the groups of topics that relays take by a pattern."""

    def one_pass(connection: Connection, _: Connection) -> Counts:
        for rule in outbox.relays:
            for topic in topics_to_relay(connection, outbox.settings.schema, rule):
                relayed(outbox, rule, topic)
        return Counts()

    if outbox.relays and "producer" in parts(runners.of(outbox), outbox):
        runners.of(outbox).run(one_pass)


def _consume(runners: PassRunners, outbox: Outbox, subscription: Subscription, due: _Due) -> Counts:
    # Outside of transactions a handler runs on no connection of ours.
    on_loop = subscription.is_async and subscription.transactional
    what = f"the async handler of {subscription.topic!r}" if on_loop else None
    runner, schema = runners.of(outbox, what), outbox.settings.schema
    if due.failed:
        age(runner, outbox, sql.age_failed)

    def one_pass(connection: Connection, _: Connection) -> Counts:
        counts = Counts()
        with outbox.active(), source_connection(subscription.sources[0], connection) as source:
            inside = isinstance(runner, TransactionRunner)
            # The pass would wait for handlers on the loop that it runs on.
            context = CallContext(loop=None if inside else runners.loop)
            consumer = consumer_of(subscription, outbox.settings, context)
            consumer.start(connection, source)
            if not inside:
                quarantine_group(connection, source, schema, subscription.group, consumer.subscription.feed)
            try:
                while step := consumer.consume_once(connection, source):
                    counts += step
                while step := consumer.retry_once(connection, source):
                    counts += step
            finally:
                consumer.end()
                if subscription.at_end is not None:
                    subscription.at_end()
        return counts

    return runner.run(one_pass)


# --- other duties ------------------------------------------------------------------------------------------

#: What the duties call.
_CALLED = {"check": "checker", "compensate": "compensation", "schedule": "function of a schedule"}


def _carry_out(runners: PassRunners, outbox: Outbox, *names: str, at_once: bool = False) -> Counts:
    """Carry out duties, each once."""
    _refuse_rolled_back(runners, outbox)
    counts = Counts()
    for duty in duties():
        if duty.name not in names or duty.tasks is None:
            continue
        called = _CALLED.get(duty.name, duty.name)
        # The check meets an async checker only where it is asked.
        functions = None if duty.name == "check" else duty.functions
        for each in getattr(outbox, functions).values() if functions else ():
            if each.is_async:
                runners.of(outbox, f"the async {each.what}")
        ends = ExitStack()
        post = Post(
            consumes=False,
            outbox=outbox,
            settings=outbox.settings,
            parts=parts(runners.of(outbox), outbox),
            roles=frozenset(ROLES),
            stopping=Event(),
            new_runner=runners.new(outbox, f"an async {called}"),
            at_end=ends.callback,
            wake_dispatch=lambda: None,
            wake_consumers=lambda _: None,
            at_once=at_once,
        )
        with ends:
            for task in duty.tasks(post):
                counts += _run(runners, outbox, task)
    return counts


def _run(runners: PassRunners, outbox: Outbox, task: Task) -> Counts:
    def one_pass(connection: Connection, _: Connection) -> Counts:
        with source_connection(task.source, connection) as source:
            return task.one_pass(connection, source, lambda: False)

    return runners.active(outbox, task.name if task.is_async else None).run(one_pass)


def _refuse_rolled_back(runners: PassRunners, outbox: Outbox) -> None:
    if outbox in rolled_back:
        raise InvalidHandler(
            f"{runners.act}: checkers, bulk jobs and callbacks work on connections of their own, which can't see a "
            "transaction that is rolled back; commit in this test, in a database of its own"
        )
