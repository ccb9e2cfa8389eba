"""Make due what would be due later: rows are made older, the clock is left alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.message.content import check_seconds
from outbox.testing import sql, steps
from outbox.testing.runners import PassRunners, in_thread

if TYPE_CHECKING:
    from outbox.app import Outbox
    from outbox.database.execute import Template


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
    are dispatched before: a delayed message can be made due only then. On a sync engine; await `amake_due` for an
    AsyncEngine.
    """
    producers = {sql.age_delayed: delayed, sql.age_orphans: orphans}
    _age(PassRunners("make_due"), outbox, producers, {sql.age_failed: failed}, None, ids)


def advance(outbox: Outbox, by: dt.timedelta | float) -> None:
    """Let so much time (timedelta or seconds) have passed for all that waits: delayed, failed, and undecided halves.

    Checkers are told that much more of the age of a half. Sent messages are dispatched before. On a sync engine; await
    `aadvance` for an AsyncEngine.
    """
    producers = dict.fromkeys((sql.age_delayed, sql.age_orphans, sql.age_halves), True)
    seconds = dt.timedelta(seconds=check_seconds("by", by))
    _age(PassRunners("advance"), outbox, producers, {sql.age_failed: True}, seconds, None)


async def amake_due(
    outbox: Outbox,
    *,
    delayed: bool = True,
    failed: bool = True,
    orphans: bool = True,
    ids: Collection[UUID] | None = None,
) -> None:
    """Do the same as `make_due` for any outbox; async functions run on the loop that awaits this."""
    await in_thread(make_due, outbox, delayed=delayed, failed=failed, orphans=orphans, ids=ids)


async def aadvance(outbox: Outbox, by: dt.timedelta | float) -> None:
    """Do the same as `advance` for any outbox; async functions run on the loop that awaits this."""
    await in_thread(advance, outbox, by)


def _age(
    runners: PassRunners,
    outbox: Outbox,
    producers: dict[Template, bool],
    consumers: dict[Template, bool],
    by: dt.timedelta | None,
    ids: Collection[UUID] | None,
) -> None:
    runner = runners.of(outbox)
    parts = steps.parts(runner, outbox)
    if "producer" in parts:
        steps.dispatch(runner, outbox)
    chosen = (producers if "producer" in parts else {}) | (consumers if "consumer" in parts else {})
    for older, is_chosen in chosen.items():
        if is_chosen:
            steps.age(runner, outbox, older, by, None if ids is None else list(ids))
