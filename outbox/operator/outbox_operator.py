"""`Outbox.operator`: an operator over the database of one `Outbox`, whose checkers can be asked in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from outbox.check import sql as check_sql
from outbox.check.asker import Asker, Interview
from outbox.check.once import question_of
from outbox.database.execute import execute
from outbox.database.failure import LOCK_NOT_AVAILABLE, sqlstate
from outbox.database.runner import EngineRunner
from outbox.database.sql import wait_at_most
from outbox.errors import CheckRefused, HalfNotFound, TransactionRequired
from outbox.message.model import Answer, Resolution
from outbox.operator.acts import ACTS
from outbox.operator.changes import ActRequest, lock, requested, try_fence
from outbox.operator.databases import PATIENCE, Databases
from outbox.operator.look.redact import Redactor
from outbox.operator.model import Actor, Target, as_actor
from outbox.operator.operator import Operator

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.check.checker import Checker
    from outbox.database.runner import NewRunner, Runner
    from outbox.settings import Settings


class OutboxOperator(Operator):
    """See and act in the database of an `Outbox`, in transactions of its own; see `Operator`.

    Raises (all of its methods):
        TransactionRequired: the Outbox is bound to an AsyncEngine.
        SchemaMissing, SchemaOutdated: the database has no outbox tables, or not those of this code.
    """

    def __init__(self, engine: Engine | AsyncEngine, settings: Settings, checkers: Mapping[str, Checker]) -> None:
        self.redactor = Redactor()
        self._engine = engine
        self._settings = settings
        self._checkers = checkers

    @cached_property
    def databases(self) -> Databases:  # type: ignore[override]
        """The one database, read at the first use."""
        return Databases.open({"outbox": self._sync_engine}, self._settings)

    @property
    def _sync_engine(self) -> Engine:
        if not isinstance(self._engine, Engine):
            raise TransactionRequired(
                "this Outbox is bound to an AsyncEngine; for acts of operators make one on a sync engine: "
                "Outbox(create_engine(url))"
            )
        return self._engine

    def check_now(
        self, message_id: UUID, *, by: str | Actor, why: str = "", new_runner: NewRunner | None = None
    ) -> Answer:
        """Check an undecided half here and now, parked or not, by its fence or by its checker; return the answer.

        ``new_runner`` makes the connections for the checker, given whether it is async; by default they come from the
        engine, for plain checkers only.

        Raises:
            HalfNotFound: no half message has this id.
            CheckRefused: the half is decided, no checker is registered for its topic here, the checker is async, or the
                half is being asked about or decided at this moment.
        """
        engine = self._sync_engine

        def plain(is_async: bool) -> Runner:
            if is_async:
                raise CheckRefused("an async checker needs an event loop: use `check`, and let a worker ask")
            return EngineRunner(engine)

        asker = Asker(new_runner or plain, 1)
        try:
            with engine.connect() as connection:
                return check_now(connection, self._settings, self._checkers, asker, message_id, by=by, why=why)
        finally:
            asker.end()


def check_now(
    connection: Connection,
    settings: Settings,
    checkers: Mapping[str, Checker],
    asker: Asker,
    message_id: UUID,
    *,
    by: str | Actor,
    why: str,
) -> Answer:
    """Check an undecided half here and now, by its fence or by one of these checkers.

    ``connection`` must not be in a transaction.

    Raises:
        HalfNotFound, CheckRefused: see `OutboxOperator.check_now`.
    """
    act, target = ACTS["check"], Target(message_id)
    request = requested(act, as_actor(by), why, {})
    began = time.monotonic()
    try:
        with connection.begin():
            execute(connection, wait_at_most(PATIENCE))
            state = lock(connection, settings, act, [target], wait=True)[target].state or ""
            if state == "unknown":
                raise HalfNotFound(message_id)
            if state not in act.from_states:
                raise CheckRefused(act.refused(target, act.refusal(state)))
            if state != "fenced":
                interview = _claim(connection, settings, checkers, asker, request, target)
            else:
                running = try_fence(connection, settings, request, target)
                resolution, error = (Resolution.UNKNOWN, check_sql.RUNNING) if running else (Resolution.ROLLBACK, None)
                return Answer(resolution, error, time.monotonic() - began)
    except DBAPIError as failure:
        if sqlstate(failure) != LOCK_NOT_AVAILABLE:
            raise
        why_not = f"a transaction that decides it has not ended for {PATIENCE:g} s; try again in a while"
        raise CheckRefused(act.refused(target, why_not)) from failure
    return _hold(connection, asker, interview)


def _claim(
    connection: Connection,
    settings: Settings,
    checkers: Mapping[str, Checker],
    asker: Asker,
    request: ActRequest,
    target: Target,
) -> Interview:
    (((topic, _),),) = execute(connection, check_sql.lock(settings.schema, target.message_id))
    if (checker := checkers.get(topic)) is None:
        why = (
            f"no checker is registered for topic {topic!r} here; register one with @outbox.checker({topic!r}), or "
            "decide the half yourself"
        )
        raise CheckRefused(request.act.refused(target, why))
    asker.make_runner(is_async=checker.is_async)
    rows, _ = execute(
        connection,
        check_sql.claim_this(settings.schema, target.message_id, question_of(checker)),
        request.record(settings.schema, target, {"asked": "checker"}),
    )
    if not rows:
        raise CheckRefused(request.act.refused(target, "it is being asked about at this moment; try again in a while"))
    return Interview.of(checker, settings, rows[0])


def _hold(connection: Connection, asker: Asker, interview: Interview) -> Answer:
    asker.begin(interview)
    _, unrecorded = asker.next_ended(wait=True) or (interview, None)
    if not interview.held:
        interview.give_back(connection)
        why = unrecorded.error if unrecorded else "the process is about to end"
        raise CheckRefused(f"half message {interview.half_id} could not be asked about: {why}")
    if unrecorded is not None:
        interview.record_unknown(connection, unrecorded)
    assert interview.answer is not None  # noqa: S101 - ended, and recorded by itself or here
    return interview.answer
