"""For the tests of services that use the outbox: run what a worker would run, here and now."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from outbox.check.asker import Asker
from outbox.check.once import check_once
from outbox.check.sql import hurry
from outbox.compensate.quarantine import quarantine_group
from outbox.consumer.consumer import Consumer
from outbox.database import migration
from outbox.database.engines import EngineRunner, Runner, engine_of
from outbox.database.execute import execute
from outbox.dispatch.once import dispatch_once, release_due_once
from outbox.errors import InvalidHandler
from outbox.message.model import Counts
from outbox.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from outbox.app import Outbox
    from outbox.consumer.subscription import Subscription


def drain(*outboxes: Outbox) -> Counts:
    """Dispatch what was sent and consume it, until nothing is left to do; return what the consumers did.

    Messages that a handler sends are dispatched and consumed as well; failed ones are left for their retry, which is
    due later. For outboxes on a sync engine with plain handlers.

    Raises:
        InvalidHandler: an async handler or database; run a `Worker` for these.
    """
    total = Counts()
    while True:
        for outbox in outboxes:
            _dispatch(_engine(outbox), outbox.settings)
        counts = Counts()
        for outbox in outboxes:
            for subscription in outbox.subscriptions.values():
                counts += _consume(outbox, subscription)
        if not counts:
            return total
        total += counts


def check(outbox: Outbox) -> Counts:
    """Check all undecided halves now, however young, and return what came of it.

    Fences are tried and checkers asked, as a worker does once the immunity time is over. For an outbox on a sync engine
    with plain checkers. A function that runs meanwhile is left alone, a parked half too.

    Raises:
        InvalidHandler: an async checker or database; run a `Worker` for these.
    """
    engine = _engine(outbox)

    def plain(is_async: bool) -> Runner:
        if is_async:
            raise InvalidHandler("check can't ask an async checker; run a Worker")
        return EngineRunner(engine)

    asker = Asker(plain, outbox.settings.checks_in_flight)
    try:
        with engine.connect() as connection:
            with connection.begin():
                execute(connection, hurry(outbox.settings.schema))
            return check_once(connection, outbox.settings, outbox.checkers, asker)
    finally:
        asker.end()


def bulk(outbox: Outbox) -> Counts:
    """Carry out all bulk jobs that were ordered in this database, whatever their rates; return what was done.

    Compensations run for topics that have one declared here; one that fails is left for its next try, which is due
    later. For an outbox on a sync engine with plain compensations.

    Raises:
        InvalidHandler: an async compensation or database; run a `Worker` for these.
    """
    # What services import for their tests needn't pay for it otherwise.
    from outbox.compensate.once import compensate_once  # noqa: PLC0415 - importing outbox must not pay for it
    from outbox.operator.bulk.run import bulk_once  # noqa: PLC0415 - importing outbox must not pay for it

    engine, total = _engine(outbox), Counts()
    if topics := sorted(each.topic for each in outbox.compensations.values() if each.is_async):
        raise InvalidHandler(f"bulk can't run the async compensation of {topics[0]!r}; run a Worker")
    with engine.connect() as connection:
        while True:
            counts = bulk_once(connection, outbox.settings, rated=False)
            counts += compensate_once(
                connection,
                outbox.settings,
                compensations=outbox.compensations,
                new_runner=lambda _: EngineRunner(engine),
            )
            if not counts:
                return replace(total, more=False)
            total += counts


def _dispatch(engine: Engine, settings: Settings) -> None:
    if migration.current(engine, settings.schema)["producer"] is None:
        return
    with engine.connect() as connection:
        release_due_once(connection, settings)
        while dispatch_once(connection, settings).more:
            pass


def _consume(outbox: Outbox, subscription: Subscription) -> Counts:
    if subscription.is_async:
        raise InvalidHandler(f"drain can't run the async handler of {subscription.topic!r}; run a Worker")
    with ExitStack() as stack:
        connection = source = stack.enter_context(_engine(outbox).connect())
        if subscription.source is not None:
            source = stack.enter_context(_source(stack, subscription.source))
        consumer = Consumer(subscription, outbox.settings)
        consumer.start(connection, source)
        quarantine_group(connection, source, outbox.settings.schema, subscription.group, subscription.topic)
        counts = Counts()
        while step := consumer.consume_once(connection, source):
            counts += step
        return counts


def _source(stack: ExitStack, bind: object) -> Connection:
    from sqlalchemy import Engine, create_engine  # noqa: PLC0415 - importing outbox must not pay for it

    if isinstance(bind, Engine):
        return bind.connect()
    if not isinstance(bind, str):
        raise InvalidHandler(f"drain can't read from {bind!r}; give the consumer a sync engine or a URL as its source")
    engine = create_engine(bind)
    stack.callback(engine.dispose)
    return engine.connect()


def _engine(outbox: Outbox) -> Engine:
    from sqlalchemy import Engine  # noqa: PLC0415 - importing outbox must not pay for it

    if not isinstance(outbox.engine, Engine):
        raise InvalidHandler("drain needs an Outbox on a sync engine; run a Worker for an AsyncEngine")
    return engine_of(outbox.engine)
