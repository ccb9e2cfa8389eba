"""Single steps of a test: dispatch, also inside the writer's own transaction, and what would be due later is due now.

Rows are made older for that; the clock is left alone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.database.at_commit import savepoint
from outbox.database.duty import PARTS, Part
from outbox.database.execute import Template, execute
from outbox.database.sql import take_lock
from outbox.dispatch import sql as dispatch_sql
from outbox.dispatch.dispatch_pass import dispatch_lock, dispatch_once, release_due_once
from outbox.message.content import check_seconds
from outbox.message.model import Counts
from outbox.testing import sql
from outbox.testing.runners import PassRunners, TransactionRunner, read

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.app import Outbox
    from outbox.database.engines import Runner
    from outbox.settings import Settings


def parts(runner: Runner, outbox: Outbox) -> list[Part]:
    """Return whose tables there are."""
    ((row,),) = read(runner, lambda connection: execute(connection, sql.parts(outbox.settings.schema)))
    return [part for part, there in zip(PARTS, row, strict=True) if there]


def dispatch(runner: Runner, outbox: Outbox) -> Counts:
    """Dispatch all that is committed, and release all that is due."""
    one = _dispatch_within if isinstance(runner, TransactionRunner) else _dispatch
    return runner.run(lambda connection, _: one(connection, outbox.settings))


def _dispatch(connection: Connection, settings: Settings) -> Counts:
    total = release_due_once(connection, settings)
    while True:
        counts = dispatch_once(connection, settings)
        total += counts
        if not counts.more:
            return total


def _dispatch_within(connection: Connection, settings: Settings) -> Counts:
    """Dispatch in the transaction that wrote the ops, of which no snapshot and so no cursor tells.

    The lock is kept to the end of the test: another one that is rolled back on the same database waits for it here,
    before it has written anything that both would.
    """
    total = Counts()
    append = partial(dispatch_sql.appending, settings, settings.dispatch_batch)
    with savepoint(connection):
        lock = dispatch_lock(settings.schema)
        execute(connection, take_lock(lock), dispatch_sql.try_turn(lock))
        execute(connection, sql.write_late_ops(settings.schema), sql.wait_for_commit(settings.schema))
        while True:
            ids, (released, *_) = execute(
                connection, sql.undispatched(settings.schema), append(dispatch_sql.RELEASE_DUE)
            )
            counts = Counts(taken=released[0], done=released[1])
            if ids:
                half_ids = [half_id for (half_id,) in ids]
                these = append(dispatch_sql.APPEND_THESE, half_ids=half_ids)
                (((ops, messages, scheduled, *_),),) = execute(connection, these)
                counts += Counts(taken=ops, done=messages + scheduled)
            total += counts
            if not counts:
                return total


def age(
    runner: Runner, outbox: Outbox, older: Template, by: dt.timedelta | None = None, ids: Sequence[UUID] | None = None
) -> None:
    """Make rows older, by so much, or so that they are due; those of some messages, or all."""
    values = {"seconds": None if by is None else by.total_seconds(), "ids": None if ids is None else list(ids)}

    read(runner, lambda connection: execute(connection, older(outbox.settings.schema, **values)))


def make_due(
    outbox: Outbox,
    *,
    delayed: bool = True,
    failed: bool = True,
    orphans: bool = True,
    ids: Collection[UUID] | None = None,
) -> None:
    """Let ``delayed`` messages, the retries of ``failed`` ones and the checks of ``orphans`` be due now.

    All of them, or those of the messages of ``ids``; one that would have been due earlier comes first. Sent messages
    are dispatched before: a delayed message can be made due only then. On a sync engine; by `on_loop` for an
    AsyncEngine.
    """
    producers = {sql.age_delayed: delayed, sql.age_orphans: orphans}
    _age(PassRunners("make_due"), outbox, producers, {sql.age_failed: failed}, None, ids)


def advance(outbox: Outbox, by: dt.timedelta | float) -> None:
    """Let so much time (timedelta or seconds) have passed for all that waits: delayed, failed, and undecided halves.

    Checkers are told that much more of the age of a half. Sent messages are dispatched before. On a sync engine; by
    `on_loop` for an AsyncEngine.
    """
    producers = dict.fromkeys((sql.age_delayed, sql.age_orphans, sql.age_halves), True)
    seconds = dt.timedelta(seconds=check_seconds("by", by))
    _age(PassRunners("advance"), outbox, producers, {sql.age_failed: True}, seconds, None)


def _age(
    runners: PassRunners,
    outbox: Outbox,
    producers: dict[Template, bool],
    consumers: dict[Template, bool],
    by: dt.timedelta | None,
    ids: Collection[UUID] | None,
) -> None:
    runner = runners.of(outbox)
    found = parts(runner, outbox)
    if "producer" in found:
        dispatch(runner, outbox)
    chosen = (producers if "producer" in found else {}) | (consumers if "consumer" in found else {})
    for older, is_chosen in chosen.items():
        if is_chosen:
            age(runner, outbox, older, by, None if ids is None else list(ids))
