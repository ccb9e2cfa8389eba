"""`Operator`: all that an operator sees and does, over the registered databases; and `Outbox.operator`, over one.

The latter can also ask the checkers of its process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from sqlalchemy import Engine

from outbox.acts.changes import (
    Act,
    Actor,
    ActRequest,
    Target,
    apply,
    as_actor,
    inbox_states,
    lock,
    message_states,
    requested,
    try_fence,
    unless_locked,
)
from outbox.acts.messages import ACTS, act_named
from outbox.check import sql as check_sql
from outbox.check.asker import Asker, Interview
from outbox.check.check_pass import question_of
from outbox.database.engines import EngineRunner, LoopRunner, calling_engine, engine_of
from outbox.database.execute import execute
from outbox.database.session import wait_for
from outbox.database.sql import wait_at_most
from outbox.errors import ActRefused, CheckRefused, HalfNotFound, InvalidRequest, VersionMismatch
from outbox.message.content import NO_CODECS, Codecs
from outbox.message.masking import SecretNames
from outbox.message.model import Answer, Resolution
from outbox.operator import model
from outbox.operator.bulk.jobs import BulkJobs
from outbox.operator.control import GroupControls
from outbox.operator.databases import MASKED, PATIENCE, Database, Databases
from outbox.operator.edit import Edits, Notes
from outbox.operator.filters import SavedFilters
from outbox.operator.health.workers import LockViews
from outbox.operator.look import inbox_sql
from outbox.operator.look.conversation import ConversationViews
from outbox.operator.look.lists import check_messages
from outbox.operator.look.message import gather
from outbox.operator.look.redactor import Redactor
from outbox.operator.model import BulkJob, Selector
from outbox.operator.schedules import CronSchedules

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncEngine

    from outbox.check.asker import Checker
    from outbox.database.engines import NewRunner, Runner
    from outbox.message.topic import Topic
    from outbox.settings import Settings

#: One message, or several.
Ids = UUID | Collection[UUID]
#: The actor of an act: a name, or an `Actor`, which also says by which interface.
By = str | Actor


class Operator(Notes, Edits, ConversationViews, BulkJobs, CronSchedules, LockViews, GroupControls, SavedFilters):
    """See and act, over one or more databases.

    Acts are recorded in ``audit``, in the transaction in which they are done. ``by`` is the actor: a name, or an
    `Actor`, which also says by which interface. ``why`` is the reason; acts that can't be taken back need it.

    Every list takes a filter and a `PageRequest`, and goes from the newest to the oldest (undecided halves and
    scheduled messages: the other way), over all registered databases unless its filter names one.

    Raises (all of its methods):
        InvalidRequest: a filter, token, selector or option that isn't one.
        UnknownDatabase: no database of the name that a filter names.
        sqlalchemy.exc.DBAPIError: a database can't be reached, or a statement took too long.
    """

    def __init__(
        self,
        databases: Databases,
        redactor: Redactor | None = None,
        codecs: Codecs = NO_CODECS,
        topics: Mapping[str, Topic[Any]] | None = None,
    ) -> None:
        super().__init__(databases, redactor)
        self.codecs: Codecs = codecs
        self.topics: Mapping[str, Topic[Any]] = topics or {}

    @classmethod
    def open(
        cls,
        engines: Mapping[str, Engine],
        settings: Settings,
        *,
        redactor: Redactor | None = None,
        codecs: Codecs = NO_CODECS,
        topics: Mapping[str, Topic[Any]] | None = None,
    ) -> Operator:
        """Return an operator over these engines, after reading which tables each database has.

        Raises:
            SchemaMissing, SchemaOutdated: one has no outbox tables, or not those of this code.
        """
        return cls(Databases.open(engines, settings), redactor, codecs, topics)

    def act(
        self,
        name: str,
        targets: Target | Sequence[Target],
        *,
        by: By,
        why: str = "",
        options: Mapping[str, Any] | None = None,
        version: str | None = None,
        database: str | None = None,
    ) -> str:
        """Do an act of `outbox.acts.messages.ACTS` to one message, or to several of one database, all or none.

        ``version`` is that of the `MessageView` which the actor saw (with one target); None doesn't compare. It is
        compared before: what changes after that is caught by the state in which the act can be done.

        Returns a sentence about each message, one a line.

        Raises:
            NotFound: no database knows a message.
            ActRefused: one isn't in a state in which this can be done; says which, and the mend.
            VersionMismatch: it has changed meanwhile.
            InvalidRequest: no such act, no reason where one is needed, a group that is missing, an option that isn't
                known, or several databases have the messages.
        """
        act = act_named(name)
        request = requested(act, as_actor(by), why, options or {})
        if act.as_job:
            raise InvalidRequest(f"{name} is ordered as a bulk job, also of one message", field="action")
        chosen = list(dict.fromkeys([targets] if isinstance(targets, Target) else targets))
        found = self._database_of(act, chosen, database)
        if version is not None and gather(self.databases, chosen[0].message_id).version != version:
            raise VersionMismatch(f"{chosen[0]} has changed since you looked at it; look again, then decide again")
        why_not = f"another transaction has been working on it for {PATIENCE:g} s; try again in a while"
        with unless_locked(lambda: ActRefused(act.refused(chosen[0], why_not))), found.acting() as connection:
            outcomes = apply(connection, found.settings, request, chosen)
            for target, outcome in zip(chosen, outcomes, strict=True):
                if outcome.state != "done":
                    raise ActRefused(act.refused(target, outcome.text))
        return "\n".join(f"{target} {outcome.text}" for target, outcome in zip(chosen, outcomes, strict=True))

    def _database_of(self, act: Act, targets: Sequence[Target], name: str | None) -> Database:
        """Return the database in which an act on messages is done; ``name`` limits the search to one."""
        if not targets:
            raise InvalidRequest("no message is named", field="target")
        having: dict[str, Database] = {}
        for target in targets:
            act.check_group(target)
            found = [each for each in self.databases.having(act.part, name) if _has(each, act.part, target)]
            anywhere = Target(target.message_id)
            if not found and any(_has(each, part, anywhere) for each in self.databases.values() for part in each.parts):
                state = "unconsumed" if act.part == "consumer" else "unknown"
                raise ActRefused(act.refused(target, act.refusal(state)))
            if not found:
                raise self.not_found(target.message_id)
            having.update({database.name: database for database in found})
        if len(having) > 1:
            raise InvalidRequest(f"{targets[0]} is in several databases; name one of: {', '.join(having)}", "database")
        return next(iter(having.values()))

    def resend(self, message_ids: Ids, *, by: By, why: str = "", database: str | None = None) -> str:
        """Send dispatched messages once more, under the same ids; see `act` for what all acts take and raise.

        A group that has consumed a message does nothing; one that has parked or failed it tries again.
        """
        return self.act("resend", _targets(message_ids), by=by, why=why, database=database)

    def recall(self, message_ids: Ids, *, by: By, why: str, database: str | None = None) -> str:
        """Take scheduled messages back before they are due."""
        return self.act("recall", _targets(message_ids), by=by, why=why, database=database)

    def compensate(
        self, message_ids: Ids, *, by: By, why: str, acknowledge_delivered: bool = False, database: str | None = None
    ) -> BulkJob:
        """Order that the local transactions behind messages be compensated; return the bulk job.

        A worker that has the `compensation` of the topic quarantines each message at its consumers, runs it, and writes
        into the bulk job what came of it.

        Raises:
            CompensationRefused: (of one message) the half isn't committed, was compensated, is about to be, or took
                effect and ``acknowledge_delivered`` isn't set.
            ActRefused: none of several messages can be compensated.
        """
        selector = Selector(targets=tuple(_targets(message_ids)))
        options = {"acknowledge_delivered": True} if acknowledge_delivered else {}
        return self.start("compensate", selector, by=by, why=why, options=options, database=database)

    def check(self, message_ids: Ids, *, by: By, why: str = "", database: str | None = None) -> str:
        """Try the fences of undecided halves; have the next check pass ask about those without one, once more."""
        return self.act("check", _targets(message_ids), by=by, why=why, database=database)

    def reset(self, message_ids: Ids, *, by: By, why: str, database: str | None = None) -> str:
        """Set the counters of undecided halves back and have them checked by the next pass (RocketMQ: resume)."""
        return self.act("reset", _targets(message_ids), by=by, why=why, database=database)

    def commit(self, message_ids: Ids, *, by: By, why: str, force: bool = False, database: str | None = None) -> str:
        """Decide undecided halves by hand, parked or not: commit; with ``force`` also fenced ones."""
        options = {"force": True} if force else {}
        return self.act("commit", _targets(message_ids), by=by, why=why, options=options, database=database)

    def rollback(self, message_ids: Ids, *, by: By, why: str, database: str | None = None) -> str:
        """Decide undecided halves by hand, parked or not: roll back."""
        return self.act("rollback", _targets(message_ids), by=by, why=why, database=database)

    def retry(self, message_ids: Ids, *, group: str, by: By, why: str = "", database: str | None = None) -> str:
        """Have failed or parked messages of a group tried again now; parked ones get all their attempts."""
        return self.act("retry", _targets(message_ids, group), by=by, why=why, database=database)

    def park(self, message_ids: Ids, *, group: str, by: By, why: str, database: str | None = None) -> str:
        """Park failed messages of a group: they aren't tried again until an operator retries them."""
        return self.act("park", _targets(message_ids, group), by=by, why=why, database=database)

    def discard(self, message_ids: Ids, *, group: str, by: By, why: str, database: str | None = None) -> str:
        """Discard parked messages of a group; they can be restored until they are pruned."""
        return self.act("discard", _targets(message_ids, group), by=by, why=why, database=database)

    def restore(self, message_ids: Ids, *, group: str, by: By, why: str = "", database: str | None = None) -> str:
        """Make discarded messages of a group dead letters again."""
        return self.act("restore", _targets(message_ids, group), by=by, why=why, database=database)


class MaskedOperator(Operator):
    """See and act for a user without the permission to reveal bodies: a masked value can't be searched by, either.

    A filter that a message fits tells its value, so a few hundred guesses would read a masked number.

    Raises:
        InvalidRequest: (also) a filter by a header or a value in bodies that the redactor masks; it names the field.
    """

    def messages(self, criteria: model.MessageFilter, page: model.PageRequest) -> model.Page[model.MessageRow]:
        """Return a page of the producers' messages that fit, the newest first."""
        self._refuse_masked(criteria)
        self.masking: SecretNames | None = None if self.redactor.display == "full" else self.redactor.names
        return super().messages(criteria, page)

    def preview(self, name: str, selector: Selector, **details: Any) -> model.Preview:
        """Return what a bulk job of this act would do; writes nothing."""
        self._refuse_masked(selector.messages)
        return super().preview(name, selector, **details)

    def start(self, name: str, selector: Selector, **details: Any) -> BulkJob:
        """Order a bulk job, which workers carry out."""
        self._refuse_masked(selector.messages)
        return super().start(name, selector, **details)

    def _refuse_masked(self, criteria: model.MessageFilter | None) -> None:
        if criteria is None:
            return
        check_messages(criteria)
        for field, pair, hides in (
            ("header", criteria.header, self.redactor.hides_header),
            ("body", criteria.body, self.redactor.hides_in_body),
        ):
            if pair is not None and hides(*pair):
                raise InvalidRequest(
                    f"{field} {pair[0]!r} is masked, so only a user with the permission to reveal can search by it; "
                    "leave this condition out, or search by another one",
                    field=field,
                )


class OutboxOperator(Operator):
    """See and act in the database of an `Outbox`, in transactions of its own; see `Operator`.

    On an AsyncEngine its methods are called inside `Outbox.run_sync`.

    Raises (all of its methods):
        TransactionRequired: the Outbox is bound to an AsyncEngine, and the call isn't inside ``run_sync``.
        SchemaMissing, SchemaOutdated: the database has no outbox tables, or not those of this code.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        settings: Settings,
        checkers: Mapping[str, Checker],
        codecs: Codecs,
        topics: Mapping[str, Topic[Any]],
    ) -> None:
        self.redactor: Redactor = MASKED
        self.codecs: Codecs = codecs
        self.topics: Mapping[str, Topic[Any]] = topics
        self._engine = engine
        self._settings = settings
        self._checkers = checkers
        self._databases: Databases | None = None

    @property
    def databases(self) -> Databases:  # type: ignore[override]  # read at the first use
        """The one database, read at the first use."""
        if self._databases is None or not isinstance(self._engine, Engine):
            engine = calling_engine(self._engine)  # refuses each caller outside run_sync
            self._databases = self._databases or Databases.open({"outbox": engine}, self._settings)
        return self._databases

    def check_now(self, message_id: UUID, *, by: By, why: str = "", new_runner: NewRunner | None = None) -> Answer:
        """Check an undecided half here and now, parked or not, by its fence or by its checker; return the answer.

        ``new_runner`` makes the connections for the checker, given whether it is async; by default they come from the
        engine, for plain checkers only. Inside `Outbox.run_sync` async checkers are asked too, on the caller's loop.

        Raises:
            HalfNotFound: no half message has this id.
            CheckRefused: the half is decided, no checker is registered for its topic here, the checker is async and
                there is no loop for it, or the half is being asked about or decided at this moment.
        """
        if isinstance(self._engine, Engine):
            return self._check_now(engine_of(self._engine), None, message_id, by, why, new_runner)
        calling_engine(self._engine)  # refuses callers outside run_sync
        engine, loop = engine_of(self._engine), asyncio.get_running_loop()
        # In a thread: waiting for an answer must not keep the loop from the checker that is to give it.
        answer = asyncio.to_thread(self._check_now, engine, loop, message_id, by, why, new_runner)
        return cast("Answer", wait_for(answer))

    def _check_now(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop | None,
        message_id: UUID,
        by: By,
        why: str,
        new_runner: NewRunner | None,
    ) -> Answer:
        def from_engine(is_async: bool) -> Runner:
            if not is_async:
                return EngineRunner(self._engine)
            if loop is None:
                raise CheckRefused("an async checker needs an event loop: use `check`, and let a worker ask")
            return LoopRunner(self._engine, loop)

        request = requested(ACTS["check"], as_actor(by), why, {})
        asker = Asker(new_runner or from_engine, 1)
        try:
            with engine.connect() as connection:
                # Whatever the engine has: after the wait for a lock the half is read as it is by then.
                connection.execution_options(isolation_level="READ COMMITTED")
                return self._check(connection, asker, request, Target(message_id))
        finally:
            asker.end()

    def _check(self, connection: Connection, asker: Asker, request: ActRequest, target: Target) -> Answer:
        act, settings, began = request.act, self._settings, time.monotonic()
        why_not = f"a transaction that decides it has not ended for {PATIENCE:g} s; try again in a while"
        with unless_locked(lambda: CheckRefused(act.refused(target, why_not))), connection.begin():
            execute(connection, wait_at_most(PATIENCE))
            state = lock(connection, settings, act, [target], wait=True)[target].state or ""
            if state == "unknown":
                raise HalfNotFound(target.message_id)
            if state not in act.from_states:
                raise CheckRefused(act.refused(target, act.refusal(state)))
            if state == "fenced":
                running = try_fence(connection, settings, request, target)
                answer = Resolution.UNKNOWN if running else Resolution.ROLLBACK
                return Answer(answer, check_sql.RUNNING if running else None, time.monotonic() - began)
            interview = self._lease(connection, asker, request, target)
        return _hold(connection, asker, interview)

    def _lease(self, connection: Connection, asker: Asker, request: ActRequest, target: Target) -> Interview:
        schema = self._settings.schema
        (((topic, _, remote),),) = execute(connection, check_sql.lock(schema, target.message_id))
        if remote is not None:
            why = (
                f"its producer is asked by a server ({remote}), and not from here; have that ask at its next pass, or "
                "decide the half yourself"
            )
            raise CheckRefused(request.act.refused(target, why))
        if (checker := self._checkers.get(topic)) is None:
            why = (
                f"no checker is registered for topic {topic!r} here; register one with @outbox.checker({topic!r}), or "
                "decide the half yourself"
            )
            raise CheckRefused(request.act.refused(target, why))
        asker.make_runner(is_async=checker.is_async)
        rows, _ = execute(
            connection,
            check_sql.lease_this(schema, target.message_id, question_of(checker)),
            request.record(schema, target, {"asked": "checker"}),
        )
        if not rows:
            why = "it is being asked about at this moment; try again in a while"
            raise CheckRefused(request.act.refused(target, why))
        return Interview.of(checker, self._settings, rows[0])


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


def _targets(message_ids: Ids, group: str | None = None) -> list[Target]:
    ids = [message_ids] if isinstance(message_ids, UUID) else message_ids
    return [Target(message_id, group) for message_id in ids]


def _has(database: Database, part: str, target: Target) -> bool:
    """Tell whether a part of a database has the message, in the inbox of its group or (without one) of any."""
    schema, message_id = database.schema, target.message_id
    with database.read_only() as connection:
        if part == "producer":
            (((_, state, _),),) = execute(connection, message_states(schema, [message_id]))
            return bool(state != "unknown")
        if target.group:
            return bool(execute(connection, inbox_states(schema, groups=[target.group], ids=[message_id]))[0])
        (rows,) = execute(connection, inbox_sql.rows_of(schema, inbox_sql.InboxQuery(), message_id, None, 1))
        return bool(rows)
