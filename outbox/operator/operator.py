"""`Operator`: all that an operator sees and does, over the registered databases; and `Outbox.operator`, over one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from outbox.database.execute import execute
from outbox.database.failure import LOCK_NOT_AVAILABLE, sqlstate
from outbox.errors import ActRefused, InvalidRequest, VersionMismatch
from outbox.operator.acts import Act, act_named
from outbox.operator.bulk.jobs import BulkJobs
from outbox.operator.changes import apply, inbox_states, message_states, requested
from outbox.operator.databases import PATIENCE, Database, Databases
from outbox.operator.health import overview, system
from outbox.operator.look import inbox_sql
from outbox.operator.look.lists import Lists
from outbox.operator.look.message import MessageViews, gather
from outbox.operator.look.redact import Redactor
from outbox.operator.model import Actor, BulkJob, Selector, Target, as_actor

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from outbox.operator.health.overview import Overview
    from outbox.operator.health.system import HandlerRow, System, WorkerRow
    from outbox.settings import Settings

#: One message, or several.
Ids = UUID | Collection[UUID]


class Operator(Lists, MessageViews, BulkJobs):
    """See and act, over one or more databases.

    Acts are recorded in ``audit``, in the transaction in which they are done. ``by`` is who acts: a name, or an `Actor`
    that also says by which interface. ``why`` is the reason, which the acts need that can't be taken back.

    Every list takes a filter and a `PageRequest`, and goes from the newest to the oldest (undecided halves and
    scheduled messages: the other way), over all registered databases unless its filter names one.

    Raises (all of its methods):
        InvalidRequest: a filter, token, selector or option that isn't one.
        UnknownDatabase: no database of the name that a filter names.
        sqlalchemy.exc.DBAPIError: a database can't be reached, or a statement took too long.
    """

    @classmethod
    def open(cls, engines: Mapping[str, Engine], settings: Settings, *, redactor: Redactor | None = None) -> Operator:
        """Return an operator over these engines, after reading which tables each database has.

        Raises:
            SchemaMissing, SchemaOutdated: one has no outbox tables, or not those of this code.
        """
        return cls(Databases.open(engines, settings), redactor)

    # --- health ----------------------------------------------------------------------------------------------

    def overview(self, window: str = "1h") -> Overview:
        """Return the state of all databases, with series over ``window``: 1h, 6h, 24h or 7d."""
        return overview.overview(self.databases, window)

    def workers(self) -> list[WorkerRow]:
        """Return the workers that run or were not ended in order."""
        return system.workers(self.databases)

    def handlers(self) -> list[HandlerRow]:
        """Return what is registered on the living workers."""
        return system.handlers(self.databases)

    def system(self) -> System:
        """Return versions, revisions, tables and settings."""
        return system.system(self.databases)

    # --- acts ------------------------------------------------------------------------------------------------

    def act(
        self,
        name: str,
        targets: Target | Sequence[Target],
        *,
        by: str | Actor,
        why: str = "",
        options: Mapping[str, Any] | None = None,
        version: str | None = None,
        database: str | None = None,
    ) -> str:
        """Do an act of `outbox.operator.acts.ACTS` to one message, or to several of one database, all or none.

        ``version`` is that of the `MessageView` which the actor saw (with one target); None doesn't compare. It is
        compared before: what changes after that is caught by the state in which the act can be done.

        Returns a sentence about each message, one a line.

        Raises:
            MessageNotFound: no database knows a message.
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
        try:
            with found.acting() as connection:
                outcomes = apply(connection, found.settings, request, chosen)
                for target, outcome in zip(chosen, outcomes, strict=True):
                    if outcome.state != "done":
                        raise ActRefused(act.refused(target, outcome.text))
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
            why_not = f"another transaction has been working on it for {PATIENCE:g} s; try again in a while"
            raise ActRefused(act.refused(chosen[0], why_not)) from error
        return "\n".join(f"{target} {outcome.text}" for target, outcome in zip(chosen, outcomes, strict=True))

    def _database_of(self, act: Act, targets: Sequence[Target], name: str | None) -> Database:
        """Return the database in which an act on messages is done; ``name`` limits the search to one.

        Raises:
            MessageNotFound: no database knows one of them.
            ActRefused: one is known, but not where this act is done.
            InvalidRequest: a group that is missing or too many, or not exactly one database has the messages.
            UnknownDatabase: no database has this name.
        """
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

    def resend(self, message_ids: Ids, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Send dispatched messages once more, under the same ids; see `act` for what all acts take and raise.

        A group that has consumed a message does nothing; one that has parked or failed it tries again.
        """
        return self.act("resend", _targets(message_ids), by=by, why=why, database=database)

    def recall(self, message_ids: Ids, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Take scheduled messages back before they are due."""
        return self.act("recall", _targets(message_ids), by=by, why=why, database=database)

    def compensate(
        self,
        message_ids: Ids,
        *,
        by: str | Actor,
        why: str,
        acknowledge_delivered: bool = False,
        database: str | None = None,
    ) -> BulkJob:
        """Order that the local transactions behind messages be compensated; return the bulk job.

        A worker that has the `compensation` of the topic quarantines each message at its consumers, runs it, and writes
        into the bulk job what came of it.

        Raises:
            CompensationRefused: (of one message) the half isn't committed, was compensated, is about to be, or took
                effect and ``acknowledge_delivered`` isn't set.
            ActRefused: none of several messages can be compensated.
        """
        return self.start(
            "compensate",
            Selector(targets=tuple(_targets(message_ids))),
            by=by,
            why=why,
            options={"acknowledge_delivered": True} if acknowledge_delivered else {},
            database=database,
        )

    def check(self, message_ids: Ids, *, by: str | Actor, why: str = "", database: str | None = None) -> str:
        """Try the fences of undecided halves; have the next check pass ask about those without one, once more."""
        return self.act("check", _targets(message_ids), by=by, why=why, database=database)

    def reset(self, message_ids: Ids, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Set the counters of undecided halves back and have them checked by the next pass (RocketMQ: resume)."""
        return self.act("reset", _targets(message_ids), by=by, why=why, database=database)

    def commit(
        self, message_ids: Ids, *, by: str | Actor, why: str, force: bool = False, database: str | None = None
    ) -> str:
        """Decide undecided halves by hand, parked or not: commit; with ``force`` also fenced ones."""
        options = {"force": True} if force else {}
        return self.act("commit", _targets(message_ids), by=by, why=why, options=options, database=database)

    def rollback(self, message_ids: Ids, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Decide undecided halves by hand, parked or not: roll back."""
        return self.act("rollback", _targets(message_ids), by=by, why=why, database=database)

    def retry(
        self, message_ids: Ids, *, group: str, by: str | Actor, why: str = "", database: str | None = None
    ) -> str:
        """Have failed or parked messages of a group tried again now; parked ones get all their attempts."""
        return self.act("retry", _targets(message_ids, group), by=by, why=why, database=database)

    def park(self, message_ids: Ids, *, group: str, by: str | Actor, why: str, database: str | None = None) -> str:
        """Park failed messages of a group: they aren't tried again until an operator retries them."""
        return self.act("park", _targets(message_ids, group), by=by, why=why, database=database)

    def discard(self, message_ids: Ids, *, group: str, by: str | Actor, why: str, database: str | None = None) -> str:
        """Discard parked messages of a group; they can be restored until they are pruned."""
        return self.act("discard", _targets(message_ids, group), by=by, why=why, database=database)

    def restore(
        self, message_ids: Ids, *, group: str, by: str | Actor, why: str = "", database: str | None = None
    ) -> str:
        """Make discarded messages of a group dead letters again."""
        return self.act("restore", _targets(message_ids, group), by=by, why=why, database=database)


def _targets(message_ids: Ids, group: str | None = None) -> list[Target]:
    ids = [message_ids] if isinstance(message_ids, UUID) else message_ids
    return [Target(message_id, group) for message_id in ids]


def _has(database: Database, part: str, target: Target) -> bool:
    """Tell whether a part of a database has the message, in the inbox of its group or (without one) of any."""
    schema, message_id = database.schema, target.message_id
    with database.reading() as connection:
        if part == "producer":
            (((_, state, _),),) = execute(connection, message_states(schema, [message_id]))
            return bool(state != "unknown")
        if target.group:
            return bool(execute(connection, inbox_states(schema, [target]))[0])
        (rows,) = execute(connection, inbox_sql.rows_of(schema, inbox_sql.InboxQuery(), message_id, None, 1))
        return bool(rows)
