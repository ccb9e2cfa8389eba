"""Bulk jobs: previewed, ordered so that what was previewed is what is done, shown, and cancelled."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, execute, query, statement
from outbox.database.sql import audit, finish_bulk_jobs, plan_by_index
from outbox.errors import ActRefused, BulkJobNotFound, CompensationRefused, InvalidRequest, SelectorChanged
from outbox.message.model import uuid7
from outbox.operator.acts import STATES, act_named
from outbox.operator.bulk import sql
from outbox.operator.bulk.choose import Selection, Summary, choose_database, described, match, resolve
from outbox.operator.changes import ActRequest, check_audited, requested
from outbox.operator.databases import OverDatabases
from outbox.operator.look import paging
from outbox.operator.look.paging import Part, Position, SortOrder, checked, page_of
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
    Total,
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
        act = act_named(name)
        selection = Selection(act, selector, options or {})
        act.check_options(selection.options)
        selection.check()
        chosen, found = choose_database(self.databases, selection, database)
        able = found.able(selection.states)
        sample = sorted((each for count in able for each in count.sample), key=lambda t: t.message_id, reverse=True)
        edge, digest = found.edge and (found.edge,), found.digest(selection.states)
        return Preview(
            act.name,
            chosen.name,
            Total(found.matched),
            sum(each.count for each in able),
            {act.refusal(each.state): each.count for each in found.counts if each not in able},
            sample[: sql.SAMPLE],
            described(act, able),
            paging.write_token({"database": chosen.name, "edge": edge, "digest": digest}, selection.context),
        )

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
        new = sql.NewBulkJob(uuid7(), request, _selector_json(selector), rate, idempotency_key)
        try:
            _insert(self.databases, chosen, new, selection, shown)
        except _KeyTaken:
            earlier = self._ordered_before(idempotency_key or "", request, selector, rate)
            if earlier is None:
                raise SelectorChanged(f"the order with this idempotency key was withdrawn; {_AGAIN}") from None
            return earlier
        return self.bulk_job(new.id)

    def bulk_jobs(self, criteria: BulkJobFilter, page: PageRequest) -> Page[BulkJob]:
        """Return a page of the bulk jobs that fit, the newest first."""

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[BulkJob]:
            values = {"state": criteria.state, "after": after[0] if after else None, "limit": limit}
            return Part([_to_job(database.name, row) for row in query(connection, database.schema, sql.LIST, **values)])

        databases = self.databases.having(None, checked(criteria).database)
        return page_of(databases, ("bulk_jobs", criteria.state), page, _NEWEST, read)

    def bulk_job(self, bulk_job_id: UUID) -> BulkJob:
        """Return a bulk job.

        Raises:
            BulkJobNotFound: no registered database has it.
        """
        for database in self.databases.values():
            with database.reading() as connection:
                rows = query(connection, database.schema, sql.ONE, id=bulk_job_id)
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

        def read(connection: Connection, database: Database, after: Position | None, limit: int) -> Part[BulkItem]:
            values = {"id": bulk_job_id, "state": state, "after": after[0] if after else 0, "limit": limit}
            return Part([BulkItem(*row) for row in query(connection, database.schema, sql.ITEMS, **values)])

        return page_of([database], ("items", bulk_job_id, state), page, _BY_NUMBER, read)

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
            ((finished_at, cancelled_at),) = query(connection, schema, sql.LOCK, id=bulk_job_id)
            if finished_at is not None or cancelled_at is not None:
                what = "was cancelled before" if cancelled_at else f"has finished at {finished_at.isoformat()}"
                raise ActRefused(f"bulk job {bulk_job_id} can't be cancelled: it {what}")
            cancelled = query(connection, schema, sql.CANCEL, id=bulk_job_id, actor=actor.name)
            result = {"did": "cancel", "cancelled": len(cancelled)}
            audited = audit(schema, actor.name, "bulk", str(bulk_job_id), why, result, actor.origin)
            execute(connection, finish_bulk_jobs(schema, bulk_job_id), audited)
        return self.bulk_job(bulk_job_id)

    def _ordered_before(self, key: str, request: ActRequest, selector: Selector, rate: float | None) -> BulkJob | None:
        """Return the bulk job that was ordered with a key before.

        Raises:
            SelectorChanged: something else was ordered.
        """
        for database in self.databases.values():
            with database.reading() as connection:
                rows = query(connection, database.schema, sql.BY_KEY, key=key)
            if rows:
                _check_same(rows[0], key, request, selector, rate)
                return self.bulk_job(rows[0][0])
        return None


def jobs_of(connection: Connection, database: Database, message_id: UUID) -> list[BulkJob]:
    """Return the bulk jobs of a database that a message was in."""
    rows = query(connection, database.schema, sql.OF_MESSAGE, id=message_id)
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
    new: sql.NewBulkJob,
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
        order = sql.start(schema, matched, new, sorted(states), whys, all_of_them=selection.by_name)
        _, rows = execute(connection, plan_by_index(), order)
        to_be, written = rows[0][-2:] if rows else (0, 0)
        if to_be > written and new.key is not None and query(connection, schema, sql.BY_KEY, key=new.key):
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
            statement(schema, sql.DESCRIBE, {"id": new.id, "described": described(act, able)}),
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
    now = _selector_json(selector)
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
    values = plain(getattr(selector, kind))
    return {kind: {name: value for name, value in values.items() if value not in (None, [])}}
