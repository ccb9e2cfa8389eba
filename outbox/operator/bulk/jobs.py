"""Bulk jobs: previewed, ordered so that what was previewed is what is done, shown, and cancelled."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute
from outbox.database.sql import audit, finish_bulk_jobs, plan_by_index
from outbox.errors import ActRefused, BulkJobNotFound, CompensationRefused, InvalidRequest, SelectorChanged
from outbox.message.model import uuid7
from outbox.operator.acts import STATES, act_named
from outbox.operator.bulk import choose_sql, sql
from outbox.operator.bulk.choose import Selection, Summary, choose_database, described, match, preview_of, resolve
from outbox.operator.changes import ActRequest, check_audited, requested
from outbox.operator.databases import OverDatabases
from outbox.operator.look import paging
from outbox.operator.look.paging import Part, Position, SortOrder, checked, merged
from outbox.operator.model import (
    Actor,
    BulkItem,
    BulkItemState,
    BulkJob,
    BulkJobFilter,
    Page,
    PageRequest,
    Preview,
    Selector,
    as_actor,
)
from outbox.reader import plain
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

_LONGEST_KEY = 255
_AGAIN = "look at the preview again"
_NEWEST: SortOrder[BulkJob] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
_BY_NUMBER: SortOrder[BulkItem] = SortOrder(key=lambda item: (item.number,), shape=(int,), newest_first=False)


class _KeyTaken(Exception):
    """Another order with the same idempotency key came first at this moment."""


class BulkJobs(OverDatabases):
    """What an operator does to many messages at once."""

    def preview(
        self,
        name: str,
        selector: Selector,
        *,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Preview:
        """Return what a bulk job of this act would do; writes nothing.

        Raises:
            InvalidRequest: a selector or option that isn't one, or several databases have what it matches.
            MessageNotFound: no database knows any of the messages that are named.
            BulkJobTooLarge: it matches more than 100,000 messages, or names more than 1,000.
        """
        return preview_of(self.databases, Selection(act_named(name), selector, options or {}), database)

    def start(
        self,
        name: str,
        selector: Selector,
        *,
        by: str | Actor,
        why: str,
        token: str | None = None,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
        rate: float | None = None,
        idempotency_key: str | None = None,
    ) -> BulkJob:
        """Order a bulk job, which workers carry out; each item is acted on as by `Operator.act`.

        Of messages that are named, those that can't be acted on become items that are skipped; a filter leaves them
        out. ``token`` is that of the `preview`, and needed where a filter selects. ``rate`` is items a second at most.
        The same ``idempotency_key`` returns the bulk job that was ordered with it before.

        Raises:
            SelectorChanged: the preview showed something else, or the key was used for something else.
            ActRefused: nothing of what is selected can be acted on.
            CompensationRefused: (a compensation of one message) it can't be compensated.
            BulkJobTooLarge: too many messages.
            InvalidRequest, MessageNotFound: as of the preview; a filter without a token, a rate or key that isn't one.
        """
        selection = Selection(act_named(name), selector, options or {})
        request = requested(selection.act, as_actor(by), why, selection.options)
        selection.check()
        _check_order(rate, idempotency_key)
        if idempotency_key is not None and (earlier := self._ordered_before(idempotency_key, request, selector, rate)):
            return earlier
        if token is None and not selection.by_name:
            raise InvalidRequest("give the token of a preview: a filter may match something else by now", field="token")
        shown = None if token is None else _read_token(token, selection, database)
        if shown is not None and shown["database"] in self.databases:
            chosen = self.databases[shown["database"]]
        else:
            chosen, _ = choose_database(self.databases, selection, database)
        new = choose_sql.NewBulkJob(uuid7(), request, _selector_json(selector), rate, idempotency_key)
        try:
            _insert(self.databases, chosen, new, selection, shown)
        except _KeyTaken:
            earlier = self._ordered_before(idempotency_key or "", request, selector, rate)
            if earlier is None:
                raise SelectorChanged(f"the order with this idempotency key was withdrawn; {_AGAIN}") from None
            return earlier
        return self.bulk_job(new.id)

    def bulk_jobs(self, criteria: BulkJobFilter, page: PageRequest) -> Page[BulkJob]:
        """Return a page of the bulk jobs that fit, the newest first.

        Raises:
            InvalidRequest: a filter or token that isn't one.
            UnknownDatabase: the filter names a database that isn't registered.
        """
        state = checked(criteria).state
        names = list(self.databases) if criteria.database is None else [self.databases[criteria.database].name]

        def read(name: str, after: Position | None, limit: int) -> Part[BulkJob]:
            one = self.databases[name]
            with one.reading() as connection:
                statement = sql.list_jobs(one.schema, state, after[0] if after else None, limit)
                (rows,) = execute(connection, statement)
            return Part([_to_job(name, row) for row in rows])

        return merged(names, page, ("bulk_jobs", criteria.state), _NEWEST, read)

    def bulk_job(self, bulk_job_id: UUID) -> BulkJob:
        """Return a bulk job.

        Raises:
            BulkJobNotFound: no registered database has it.
        """
        for database in self.databases.values():
            with database.reading() as connection:
                (rows,) = execute(connection, sql.job(database.schema, bulk_job_id))
            if rows:
                return _to_job(database.name, rows[0])
        raise BulkJobNotFound(f"no registered database ({', '.join(self.databases)}) has bulk job {bulk_job_id}")

    def bulk_items(
        self, bulk_job_id: UUID, page: PageRequest, *, state: BulkItemState | str | None = None
    ) -> Page[BulkItem]:
        """Return a page of the items of a bulk job, in their order.

        Raises:
            BulkJobNotFound: no registered database has it.
            InvalidRequest: a state or token that isn't one.
        """
        if state is not None and state not in set(BulkItemState):
            raise InvalidRequest(f"state {state!r} must be one of: {', '.join(BulkItemState)}", field="state")
        database = self.databases[self.bulk_job(bulk_job_id).database]

        def read(_: str, after: Position | None, limit: int) -> Part[BulkItem]:
            with database.reading() as connection:
                statement = sql.items(database.schema, bulk_job_id, state, after[0] if after else 0, limit)
                (rows,) = execute(connection, statement)
            return Part([BulkItem(*row) for row in rows])

        return merged([database.name], page, ("items", bulk_job_id, state), _BY_NUMBER, read)

    def cancel(self, bulk_job_id: UUID, *, by: str | Actor, why: str = "") -> BulkJob:
        """Cancel what is left of a bulk job; what was done stays done.

        A worker withdraws a compensation that has begun.

        Raises:
            BulkJobNotFound: no registered database has it.
            ActRefused: it has finished, or was cancelled before.
            InvalidRequest: an actor without a name, or a reason that can't be stored.
        """
        actor = as_actor(by)
        check_audited(actor, why)
        database = self.databases[self.bulk_job(bulk_job_id).database]
        schema = database.schema
        with database.acting() as connection:
            (((finished_at, cancelled_at),),) = execute(connection, sql.lock(schema, bulk_job_id))
            if finished_at is not None or cancelled_at is not None:
                what = "was cancelled before" if cancelled_at else f"has finished at {finished_at.isoformat()}"
                raise ActRefused(f"bulk job {bulk_job_id} can't be cancelled: it {what}")
            cancelled, _ = execute(
                connection, sql.cancel(schema, bulk_job_id, actor.name), finish_bulk_jobs(schema, bulk_job_id)
            )
            result = {"did": "cancel", "cancelled": len(cancelled)}
            execute(connection, audit(schema, actor.name, "bulk", str(bulk_job_id), why, result, actor.origin))
        return self.bulk_job(bulk_job_id)

    def _ordered_before(self, key: str, request: ActRequest, selector: Selector, rate: float | None) -> BulkJob | None:
        """Return the bulk job that was ordered with a key before.

        Raises:
            SelectorChanged: something else was ordered.
        """
        for database in self.databases.values():
            with database.reading() as connection:
                (rows,) = execute(connection, sql.by_key(database.schema, key))
            if rows:
                _check_same(rows[0], key, request, selector, rate)
                return self.bulk_job(rows[0][0])
        return None


def jobs_of(connection: Connection, database: Database, message_id: UUID) -> list[BulkJob]:
    """Return the bulk jobs of a database that a message was in."""
    (rows,) = execute(connection, sql.jobs_of(database.schema, message_id))
    return [_to_job(database.name, row) for row in rows]


def _to_job(database: str, row: Row) -> BulkJob:
    fields = dict(zip(sql.BULK_JOB, row, strict=True))
    counts = json.loads(fields.pop("counts") or "{}")
    fields |= {"options": json.loads(fields["options"]), "described": fields["described"] or fields["action"]}
    return BulkJob(database, **fields, **{str(state): counts.get(state, 0) for state in BulkItemState})


def _check_order(rate: float | None, key: str | None) -> None:
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InvalidRequest(f"rate = {rate} must be a number of items a second above 0", field="rate")
    if key is not None and (not 0 < len(key) <= _LONGEST_KEY or storable(key) != key):
        raise InvalidRequest(f"an idempotency key has 1 to {_LONGEST_KEY} characters", field="idempotency_key")


def _insert(
    databases: Databases,
    chosen: Database,
    new: choose_sql.NewBulkJob,
    selection: Selection,
    shown: dict[str, Any] | None,
) -> None:
    """Write the bulk job, its items and its audit row in one transaction, if it is what was shown."""
    act, states, schema = selection.act, selection.states, chosen.schema
    edge = shown["edge"] if shown else None
    resolved = resolve(databases, chosen, selection, edge)
    whys = {state: act.refusal(state) for state in STATES.keys() - states}
    with chosen.acting() as connection:
        matched = match(connection, chosen, selection, resolved, edge)
        statement = choose_sql.start(schema, matched, new, sorted(states), whys, all_of_them=selection.by_name)
        _, rows = execute(connection, plan_by_index(), statement)
        to_be, written = rows[0][-2:] if rows else (0, 0)
        if to_be > written and new.key is not None and execute(connection, sql.by_key(schema, new.key))[0]:
            raise _KeyTaken
        found = selection.summary_of([row[:-2] for row in rows], resolved.edge)
        able = found.able(states)
        number = sum(each.count for each in able)
        if shown is not None and found.digest(states) != shown["digest"]:
            raise SelectorChanged(f"what can be acted on has changed since the preview: now {number}; {_AGAIN}")
        if not able:
            raise _nothing(selection, found)
        if to_be > written and found.matched == 1 and selection.selector.targets:
            target = selection.selector.targets[0]
            raise CompensationRefused(act.refused(target, act.refusal("compensating")))
        if to_be > written:
            raise SelectorChanged(f"some of these are being compensated by a bulk job ordered just now; {_AGAIN}")
        result = {"did": "start", "action": act.name, "items": found.matched if selection.by_name else number}
        request = new.request
        execute(
            connection,
            choose_sql.describe(schema, new.id, described(act, able)),
            audit(schema, request.by, "bulk", str(new.id), request.why, result, request.origin),
        )


def _nothing(selection: Selection, found: Summary) -> ActRefused | CompensationRefused:
    act, targets = selection.act, selection.selector.targets
    if act.as_job and targets and found.matched == 1:
        return CompensationRefused(act.refused(targets[0], act.refusal(found.counts[0].state)))
    whys = "; ".join(f"{each.count}: {act.refusal(each.state)}" for each in found.counts)
    return ActRefused(f"there is nothing to {act.verb or act.name}: {whys or 'the filter matches no message'}")


def _read_token(token: str, selection: Selection, database: str | None) -> dict[str, Any]:
    """Return what a token says: database, edge and digest.

    Raises:
        SelectorChanged: it isn't that of a preview of this order.
    """
    kind = dt.datetime if selection.selector.inbox is not None else UUID
    try:
        shown = paging.read_token(token, selection.context) or {}
        edge = paging.decode(shown["edge"], (kind,))
        if database not in {None, shown["database"]}:
            raise KeyError("database")
        return {"database": shown["database"], "edge": edge and edge[0], "digest": shown["digest"]}
    except (InvalidRequest, KeyError):
        raise SelectorChanged(
            f"the token isn't one of a preview of this action, selection, options and database; {_AGAIN}"
        ) from None


def _check_same(row: Row, key: str, request: ActRequest, selector: Selector, rate: float | None) -> None:
    bulk_job_id, action, actor, reason, options, selected, earlier_rate = row
    before = {name: value for name, value in json.loads(selected).items() if name not in {"described", "counts"}}
    now = json.loads(json.dumps(_selector_json(selector)))
    if (action, actor, reason, json.loads(options), before, earlier_rate) != (
        request.act.name, request.by, request.why, dict(request.options), now, rate,
    ):  # fmt: skip
        raise SelectorChanged(
            f"idempotency key {key!r} was used for something else (bulk job {bulk_job_id}); use another key"
        )


def _selector_json(selector: Selector) -> dict[str, Any]:
    """Return a selector as JSON can hold it, without the fields that aren't given."""
    if selector.targets is not None:
        return {"targets": [[str(each.message_id), each.group] for each in selector.targets]}
    kind = next(name for name in ("messages", "inbox", "halves") if getattr(selector, name) is not None)
    criteria = getattr(selector, kind)
    values = {each.name: getattr(criteria, each.name) for each in dataclasses.fields(criteria)}
    return {kind: {name: _plain(value) for name, value in values.items() if value not in (None, ())}}


def _plain(value: Any) -> Any:
    return value.astimezone(dt.UTC).isoformat() if isinstance(value, dt.datetime) else plain(value)
