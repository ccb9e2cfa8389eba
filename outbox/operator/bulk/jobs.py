"""Preview bulk jobs, order them so that they do exactly what was previewed, show and cancel them."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.acts.changes import (
    MAX_ITEMS,
    STATES,
    Act,
    Actor,
    Target,
    as_actor,
    check_audited,
    inbox_columns,
    record_of,
    requested,
)
from outbox.acts.messages import act_named
from outbox.database.execute import Row, execute, query, statement
from outbox.database.sql import NOW, PLAN_FOR_VALUES, audit, finish_bulk_jobs, plan_by_index
from outbox.errors import (
    ActRefused,
    BulkJobTooLarge,
    CompensationRefused,
    DatabaseUnreached,
    InvalidRequest,
    NotFound,
    SelectorChanged,
)
from outbox.message.model import uuid7
from outbox.operator import model
from outbox.operator.bulk import sql
from outbox.operator.bulk.sql import Matched
from outbox.operator.databases import CALLER, Databases, OverDatabases, T
from outbox.operator.look import inbox_sql, message_sql, paging
from outbox.operator.look.lists import ActedMessage, check_messages, fates, query_in
from outbox.operator.look.paging import After, Part, SortOrder, checked, page_of
from outbox.reader import plain
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Query

#: How long (seconds) a preview may look for matches of a filter.
SECONDS = 30.0
_SELECTABLE = {
    "message": {"targets", "messages", "inbox"},
    "half": {"targets", "messages", "halves"},
    "inbox": {"targets", "inbox"},
}

_LONGEST_KEY = 255
#: How many kinds of errors an outcome names, and over how many of the items that are done it counts.
_ERRORS = 10
_FATES = 1_000
# The keys that a stored selector has beside the selection.
_ADDED = {"described", "counts"}
_AGAIN = "look at the preview again"
_NEWEST: SortOrder[model.BulkJob] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
_BY_NUMBER: SortOrder[model.BulkItem] = SortOrder(key=lambda item: (item.number,), shape=(int,), newest_first=False)


class _KeyTaken(Exception):
    """Another order with the same idempotency key came first at this moment."""


class BulkJobs(OverDatabases):
    """Act on many messages at once."""

    def preview(
        self,
        name: str,
        selector: model.Selector,
        *,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> model.Preview:
        """Return what a bulk job of this act would do; writes nothing.

        Raises:
            InvalidRequest: a selector or option that isn't one, or several databases have matches.
            NotFound: no database knows any of the messages that are named.
            BulkJobTooLarge: it names more than 1,000 messages.
        """
        act = act_named(name)
        act.check_options(options or {})
        selection = Selection(act, selector, options or {})
        chosen, found = choose_database(self.databases, selection, database)
        sample = [target for each in found.able for target in each.sample]
        shown = {"database": chosen.name, "edge": found.edge and (found.edge,), "digest": found.digest}
        return model.Preview(
            act.name,
            chosen.name,
            model.Total(found.matched, "gte" if found.more else "eq"),
            found.number,
            {act.refusal(each.state): each.count for each in found.counts if each not in found.able},
            sorted(sample, key=lambda target: target.message_id, reverse=True)[: sql.SAMPLE],
            described(act, found.able, more=found.more),
            paging.write_token(shown, selection.context),
        )

    def start(
        self,
        name: str,
        selector: model.Selector,
        *,
        by: str | Actor,
        why: str,
        token: str | None = None,
        database: str | None = None,
        options: Mapping[str, Any] | None = None,
        rate: float | None = None,
        idempotency_key: str | None = None,
    ) -> model.BulkJob:
        """Order a bulk job, which workers carry out; each item is acted on as by `Operator.act`.

        Of messages that are named, those that can't be acted on become items that are skipped; a filter leaves them
        out. ``token`` is that of the `preview`, and needed where a filter selects. ``rate`` is items a second at most.
        The same ``idempotency_key`` returns the bulk job that was ordered with it before.

        Raises:
            SelectorChanged: the preview showed something else, or the key was used for something else.
            ActRefused: none of the selected messages can be acted on.
            CompensationRefused: (a compensation of one message) it can't be compensated.
            BulkJobTooLarge: it matches more than 100,000 messages, or names more than 1,000.
            InvalidRequest, NotFound: as of the preview; a filter without a token, a rate or key that isn't one.
        """
        request = requested(act_named(name), as_actor(by), why, options or {})
        selection = Selection(request.act, selector, request.options)
        check_order(rate, idempotency_key)
        new = sql.NewBulkJob(uuid7(), request, _selector_json(selector), rate, idempotency_key)
        if earlier := self._ordered_before(new):
            return earlier
        if token is None and not selection.by_name:
            raise InvalidRequest("give the token of a preview: a filter may match something else by now", field="token")
        shown = None if token is None else _read_token(token, selection, database)
        if shown is not None and shown["database"] in self.databases:
            chosen = self.databases[shown["database"]]
        else:
            chosen, _ = choose_database(self.databases, selection, database)
        try:
            self._insert(chosen, new, selection, shown)
        except _KeyTaken:
            if earlier := self._ordered_before(new):
                return earlier
            raise SelectorChanged(f"the order with this idempotency key was withdrawn; {_AGAIN}") from None
        return self.bulk_job(new.id)

    def bulk_jobs(self, criteria: model.BulkJobFilter, page: model.PageRequest) -> model.Page[model.BulkJob]:
        """Return a page of the bulk jobs that fit, the newest first."""

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.BulkJob]:
            values = {"state": criteria.state, "after": after[0] if after else None, "limit": limit}
            return Part(read_jobs(connection, database, sql.LIST, **values))

        return self.shown_texts(
            page_of(self.databases, None, checked(criteria), page, _NEWEST, read, ("bulk_jobs", criteria.state))
        )

    def bulk_job(self, bulk_job_id: UUID) -> model.BulkJob:
        """Return a bulk job, and how far it is.

        Raises:
            NotFound: no registered database has it.
            DatabaseUnreached: none of those that can be reached has it.
        """

        find = partial(read_jobs, query=sql.ONE, id=bulk_job_id)
        return self.shown_texts(self._found(bulk_job_id, find)[0])

    def _found(self, bulk_job_id: UUID, read: Callable[[Connection, Database], T]) -> T:
        """Return what is read of a bulk job in the first database that has anything of it; raise as `bulk_job`."""

        def find(database: Database) -> T | None:
            with database.read_only() as connection:
                return read(connection, database) or None

        which = f"no registered database ({', '.join(self.databases)})"
        return self.first_of(None, find, NotFound(f"{which} has bulk job {bulk_job_id}"))

    def _database_of_job(self, bulk_job_id: UUID) -> Database:
        values = {"id": bulk_job_id}
        # Without the counts of its items.
        return self._found(bulk_job_id, lambda each, of: [of] * len(query(each, of.schema, sql.IS_THERE, **values)))[0]

    def bulk_items(
        self, bulk_job_id: UUID, criteria: model.BulkItemFilter, page: model.PageRequest
    ) -> model.Page[model.BulkItem]:
        """Return a page of the items of a bulk job that fit, in their order, and what became of each.

        Raises:
            NotFound: no registered database has it.
            InvalidRequest: a state or token that isn't one.
        """
        if (state := criteria.state) is not None and state not in set(model.BulkItemState):
            raise InvalidRequest(f"state {state!r} must be one of: {', '.join(model.BulkItemState)}", field="state")
        database = self._database_of_job(bulk_job_id)

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.BulkItem]:
            values = {"id": bulk_job_id, "state": state, "after": after[0] if after else 0, "limit": limit}
            return Part([model.BulkItem(*row) for row in query(connection, database.schema, sql.ITEMS, **values)])

        found = self.shown_texts(
            page_of(Databases([database]), None, None, page, _BY_NUMBER, read, ("items", bulk_job_id, state))
        )
        done = [item for item in found.items if item.state == model.BulkItemState.DONE]
        since, unreached = self._fates_of(database, done)
        with_fates = {item.number: replace(item, fates=each) for item, each in zip(done, since, strict=True)}
        items = [with_fates.get(item.number, item) for item in found.items]
        return replace(found, items=items, unreached=[*found.unreached, *unreached])

    def bulk_outcome(self, bulk_job_id: UUID) -> model.BulkOutcome:
        """Return what became of the messages of a bulk job since, counted over the first 1,000 items that are done.

        Raises:
            NotFound: no registered database has it.
        """
        database = self._database_of_job(bulk_job_id)
        values = {"id": bulk_job_id, "state": model.BulkItemState.DONE, "after": 0, "limit": _FATES + 1}
        with database.read_only() as connection:
            every = [model.BulkItem(*row) for row in query(connection, database.schema, sql.ITEMS, **values)]
        items = every[:_FATES]
        since, unreached = self._fates_of(database, items)
        found = [fate for each in since for fate in each]
        errors = Counter(fate.error_kind for fate in found if fate.error_kind and fate.status != "discarded")
        return model.BulkOutcome(
            model.Total(len(items), "gte" if len(every) > len(items) else "eq"),
            dict(Counter(fate.status for fate in found).most_common()),
            dict(errors.most_common(_ERRORS)),
            unreached,
            max(len(errors) - _ERRORS, 0),
        )

    def _fates_of(
        self, database: Database, items: Sequence[model.BulkItem]
    ) -> tuple[list[list[model.FateSince]], list[str]]:
        acted = [ActedMessage(item.action, item.message_id, item.group, item.topic, item.changed_at) for item in items]
        return self.shown_texts(fates(self.databases, database, acted))

    def cancel(self, bulk_job_id: UUID, *, by: str | Actor, why: str = "") -> model.BulkJob:
        """Cancel the open items of a bulk job; the others stay done.

        A worker withdraws a compensation that has begun.

        Raises:
            NotFound: no registered database has it.
            ActRefused: it has finished, or was cancelled before.
            InvalidRequest: an actor without a name, or a reason that can't be stored.
        """
        actor = as_actor(by)
        check_audited(actor, why)
        database = self._database_of_job(bulk_job_id)
        schema = database.schema
        with database.acting() as connection:
            ((finished_at, cancelled_at),) = query(connection, schema, sql.LOCK, id=bulk_job_id)
            if finished_at is not None or cancelled_at is not None:
                what = "was cancelled before" if cancelled_at else f"has finished at {finished_at.isoformat()}"
                raise ActRefused(f"bulk job {bulk_job_id} can't be cancelled: it {what}")
            cancelled = query(connection, schema, sql.CANCEL, id=bulk_job_id, actor=actor.name)
            result = {"did": "cancel", "cancelled": len(cancelled)}
            audited = record_of(schema, "bulk", actor, why, bulk_job_id, result)
            execute(connection, finish_bulk_jobs(schema, bulk_job_id), audited)
        return self.bulk_job(bulk_job_id)

    def _insert(
        self, chosen: Database, new: sql.NewBulkJob, selection: Selection, shown: dict[str, Any] | None
    ) -> None:
        """Write the bulk job, its items and its audit row in one transaction, if the preview still holds."""
        act, states, schema = selection.act, selection.states, chosen.schema
        edge = shown["edge"] if shown else None
        resolved = resolve(self.databases, chosen, selection, edge, most=MAX_ITEMS)
        whys = {state: act.refusal(state) for state in STATES.keys() - states}
        with chosen.acting() as connection:
            matched = match(connection, chosen, selection, resolved, edge, most=MAX_ITEMS)
            order = sql.start(schema, matched, new, sorted(states), whys, all_of_them=selection.by_name)
            *_, rows = execute(connection, plan_by_index(), PLAN_FOR_VALUES, order)
            to_be, written = rows[0][-2:] if rows else (0, 0)
            if to_be > written and new.key is not None and query(connection, schema, sql.BY_KEY, key=new.key):
                raise _KeyTaken
            found = selection.summary_of([row[:-2] for row in rows], resolved.edge, most=MAX_ITEMS)
            if found.more:
                raise BulkJobTooLarge(f"more than {MAX_ITEMS} messages are matched; narrow the filter, such as by time")
            # Of more than a preview counts, it has shown what there was, and not which.
            if shown is not None and shown["digest"] is not None and found.digest != shown["digest"]:
                raise SelectorChanged(
                    f"the messages to act on have changed since the preview: now {found.number}; {_AGAIN}"
                )
            if not found.able:
                raise _nothing(selection, found)
            if to_be > written and found.matched == 1 and selection.selector.targets:
                target = selection.selector.targets[0]
                raise CompensationRefused(act.refused(target, act.refusal("compensating")))
            if to_be > written:
                raise SelectorChanged(f"some of these are being compensated by a bulk job ordered just now; {_AGAIN}")
            result = {"did": "start", "action": act.name, "items": found.matched if selection.by_name else found.number}
            request = new.request
            execute(
                connection,
                statement(schema, sql.DESCRIBE, {"id": new.id, "described": described(act, found.able)}),
                audit(schema, request.by, "bulk", str(new.id), request.why, result, request.origin),
            )

    def _ordered_before(self, new: sql.NewBulkJob) -> model.BulkJob | None:
        """Return the bulk job that was ordered with the key, if it has one; raise SelectorChanged if it is another."""
        order = new.request
        for database in self.databases.values() if new.key is not None else ():
            with database.read_only() as connection:
                rows = query(connection, database.schema, sql.BY_KEY, key=new.key)
            for bulk_job_id, action, actor, reason, options, selected, rate in rows:
                before = {name: value for name, value in json.loads(selected).items() if name not in _ADDED}
                now = (order.act.name, order.by, order.why, order.options, new.selector, new.rate)
                if (action, actor, reason, json.loads(options), before, rate) != now:
                    other = f"idempotency key {new.key!r} was used for something else (bulk job {bulk_job_id})"
                    raise SelectorChanged(f"{other}; use another key")
                return self.bulk_job(bulk_job_id)
        return None


def read_jobs(connection: Connection, database: Database, query: Query, **values: Any) -> list[model.BulkJob]:
    """Return the bulk jobs of a database that a query finds."""
    found = query.read(connection, database.schema, **values)
    for each in found:
        counts = each.pop("counts") or {}
        each |= {str(state): counts.get(state, 0) for state in model.BulkItemState}
    return [model.BulkJob(database.name, **each) for each in found]


def check_order(rate: float | None, key: str | None) -> None:
    """Raise InvalidRequest unless these are a rate and an idempotency key, as far as they are given."""
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InvalidRequest(f"rate = {rate} must be a number of items a second above 0", field="rate")
    if key is not None and (not 0 < len(key) <= _LONGEST_KEY or storable(key) != key):
        raise InvalidRequest(f"an idempotency key has 1 to {_LONGEST_KEY} characters", field="idempotency_key")


def _nothing(selection: Selection, found: Summary) -> ActRefused | CompensationRefused:
    act, targets = selection.act, selection.selector.targets
    if act.as_job and targets and found.matched == 1:
        return CompensationRefused(act.refused(targets[0], act.refusal(found.counts[0].state)))
    whys = "; ".join(f"{each.count}: {act.refusal(each.state)}" for each in found.counts)
    return ActRefused(f"there is nothing to {act.verb or act.name}: {whys or 'the filter matches no message'}")


def _read_token(token: str, selection: Selection, database: str | None) -> dict[str, Any]:
    """Return database, edge and digest; raise SelectorChanged if the token isn't that of a preview of this order."""
    try:
        shown = paging.read_token(token, selection.context) or {}
        kind = dt.datetime if selection.selector.inbox is not None or shown["digest"] is None else UUID
        edge = paging.decode(shown["edge"], (kind,))
        if database not in {None, shown["database"]}:
            raise KeyError("database")
        return {"database": shown["database"], "edge": edge and edge[0], "digest": shown["digest"]}
    except (InvalidRequest, KeyError):
        raise SelectorChanged(
            f"the token isn't one of a preview of this action, selection, options and database; {_AGAIN}"
        ) from None


def _selector_json(selector: model.Selector) -> dict[str, Any]:
    """Return a selector as JSON can hold it, without the fields that aren't given."""
    if selector.targets is not None:
        return {"targets": [[str(each.message_id), each.group] for each in selector.targets]}
    kind = next(name for name in ("messages", "inbox", "halves") if getattr(selector, name) is not None)
    values = plain(getattr(selector, kind))
    return {kind: {name: value for name, value in values.items() if value not in (None, [])}}


# --- selection -------------------------------------------------------------------------------------------


class Selection:
    """An act and its selector: the part of an order that doesn't depend on the matches.

    Raises:
        InvalidRequest, BulkJobTooLarge: the selector doesn't fit the act, or isn't exactly one.
    """

    def __init__(self, act: Act, selector: model.Selector, options: Mapping[str, Any]) -> None:
        self.act: Act = act
        self.selector: model.Selector = selector
        self.options: Mapping[str, Any] = options
        #: The states in which the act can be done.
        self.states: frozenset[str] = act.states(options)
        #: The values to which a token is bound.
        self.context: tuple[object, ...] = ("bulk_job", act.name, selector, sorted(options.items()))
        #: Whether the messages are named one by one.
        self.by_name: bool = selector.targets is not None
        #: Whether a filter of inboxes selects messages for an act in their producer's database.
        self.is_across: bool = selector.inbox is not None and act.part == "producer"
        #: Whether the act depends on whether a message took effect in any database.
        self.checks_delivery: bool = any("delivered" in option.adds for option in act.options)
        #: Whether the filter must be turned into ids first, since one query can't see all the databases that it needs.
        self.by_ids: bool = self.is_across or (self.checks_delivery and selector.messages is not None)
        self._check()

    def summary_of(self, rows: list[Row], edge: UUID | dt.datetime | None = None, *, most: int) -> Summary:
        """Return the summary that the rows of `sql.summary` make; ``edge``, if set, is known from elsewhere.

        They are of one message more than ``most``, where there are more.
        """
        more = sum(row[1] for row in rows) > most
        # The greatest id of some says nothing of the others.
        own = max((row[9 if self.selector.inbox is not None or more else 8] for row in rows), default=None)
        counts = [
            StateCount(state, count, hashed, group, topic, kind, list(map(Target, ids, groups)))
            for state, count, hashed, group, topic, kind, ids, groups, *_ in rows
        ]
        return Summary(counts, self.states, own if edge is None else edge, most if more else None)

    def _check(self) -> None:
        selector, fits = self.selector, _SELECTABLE[self.act.noun]
        kinds = [kind for kind in ("targets", "messages", "inbox", "halves") if getattr(selector, kind) is not None]
        if len(kinds) != 1:
            raise InvalidRequest(f"select by exactly one of targets, messages, inbox, halves, not {kinds}", "selector")
        if selector.targets is not None:
            if not selector.targets:
                raise InvalidRequest("no message is named", field="selector")
            if (number := len(selector.targets)) > model.MAX_IDS:
                raise BulkJobTooLarge(f"{number} messages are named; at most {model.MAX_IDS} can be, or use a filter")
            for target in selector.targets:
                self.act.check_group(target)
        if not fits.issuperset(kinds):
            raise InvalidRequest(
                f"{self.act.name} can't be done by {kinds[0]}; select by {' or '.join(sorted(fits))}", "selector"
            )
        if selector.messages is not None and selector.messages.body is not None:
            raise InvalidRequest("a bulk job can't select by values in bodies; name the messages", field="body")
        if selector.messages is not None and selector.messages.group is not None:
            raise InvalidRequest(
                "a bulk job can't select the messages that a group hasn't read; name them", field="group"
            )


@dataclass(frozen=True, slots=True)
class StateCount:
    """Count the matches in one state, with the values that they have in common (None: no such value)."""

    state: str
    count: int
    hash: str
    group: str | None
    topic: str | None
    kind: str | None
    sample: list[Target]


class Summary:
    """Sum up the matches of a query; ``edge`` bounds the same query to the rows of that moment.

    ``most`` is set where there are more than so many, and these are counted alone.
    """

    def __init__(
        self, counts: list[StateCount], states: frozenset[str], edge: UUID | dt.datetime | None, most: int | None
    ) -> None:
        self.counts: list[StateCount] = counts
        self.edge: UUID | dt.datetime | None = edge
        #: Whether there are more than were counted.
        self.more: bool = most is not None
        #: How many there are, or were counted.
        self.matched: int = sum(each.count for each in counts) if most is None else most
        #: Whether there is any message, beside named ones that aren't there.
        self.known: bool = any(each.state not in {"unknown", "unconsumed"} for each in counts)
        #: Those that can be acted on, and how many these are.
        self.able: list[StateCount] = [each for each in counts if each.state in states]
        self.number: int = min(sum(each.count for each in self.able), self.matched)
        of_able: list[list[str | int]] = sorted([each.state, each.count, each.hash] for each in self.able)
        #: A value that differs when the messages to act on differ; None where there are more.
        self.digest: list[list[str | int]] | None = None if self.more else of_able


@dataclass(frozen=True, slots=True)
class ResolvedIds:
    """What other databases say before the query: which messages these are, and which of them took effect somewhere.

    ``edge`` bounds a filter that was turned into ids to what there was then.
    """

    ids: list[UUID]
    delivered: list[UUID]
    edge: UUID | dt.datetime | None


def resolve(
    databases: Databases, database: Database, selection: Selection, edge: Any = None, *, most: int
) -> ResolvedIds:
    """Return the ids that a bulk job in this database needs from others; of one message more than ``most``.

    ``edge``: the bound that a preview has shown.
    """
    selector = selection.selector
    ids = list(dict.fromkeys(target.message_id for target in selector.targets or ()))
    if selection.is_across and selector.inbox is not None:
        ids, edge = _ids_in_inboxes(databases, selector.inbox, edge, most)
    elif selection.by_ids and selector.messages is not None:
        with database.read_only(SECONDS) as connection:
            matched, values = _match_messages(selector.messages, edge, most)
            found = statement(database.schema, f"SELECT id FROM ({matched}) m", values)
            ((now,),), rows = execute(connection, NOW, found)
        ids = sorted(each for (each,) in rows)
        edge = edge or (now if len(ids) > most else max(ids, default=None))
    return ResolvedIds(ids, _delivered(databases, selection, ids), edge if selection.by_ids else None)


def match(
    connection: Connection,
    database: Database,
    selection: Selection,
    resolved: ResolvedIds,
    edge: Any = None,
    *,
    most: int,
) -> Matched:
    """Return the query that matches the selection; one message more than ``most`` at most."""
    selector = selection.selector
    if selection.act.part == "consumer" and selector.targets is not None:
        return sql.NAMED_INBOX, inbox_columns(dict.fromkeys(selector.targets))
    if selector.targets is not None or selection.by_ids:
        return sql.NAMED_HALVES, {"ids": resolved.ids, "delivered": resolved.delivered}
    if selector.inbox is not None:
        where, values = _inbox_where(connection, database, selector.inbox)
        return sql.INBOX.replace("{where}", where), values | _bounds(edge, most)
    if selector.halves is not None:
        where, values = paging.fitting(checked(selector.halves), message_sql.HALF_FITS)
        return sql.UNDECIDED_HALVES.replace("{where}", where), values | _bounds(edge, most)
    return _match_messages(selector.messages or model.MessageFilter(), edge, most)


def _match_messages(criteria: model.MessageFilter, edge: Any, most: int) -> Matched:
    where, values = message_sql.where(check_messages(criteria))
    table, fits = message_sql.driver(criteria)
    if table != "half_message":
        where = f"h.id IN (SELECT half_id FROM {{s}}.{table} WHERE {fits}) AND {where}"
    return sql.HALVES.replace("{where}", where), values | _bounds(edge, most)


def _bounds(edge: UUID | dt.datetime | None, most: int) -> dict[str, Any]:
    is_id = isinstance(edge, UUID)
    return {"edge": edge if is_id else None, "until": None if is_id else edge, "most": most + 1}


def _inbox_where(connection: Connection, database: Database, criteria: model.InboxFilter) -> tuple[str, dict[str, Any]]:
    query = query_in(connection, database, checked(criteria))
    return inbox_sql.where(query) if query else ("false", {})


def _ids_in_inboxes(
    databases: Databases, criteria: model.InboxFilter, edge: Any, most: int
) -> tuple[list[UUID], dt.datetime]:
    """Return the messages whose inbox rows fit, and when that was."""
    consumers = databases.having("consumer", criteria.database)
    if len(consumers) != 1:
        names = ", ".join(each.name for each in consumers) or "none is registered"
        raise InvalidRequest(f"name the database of the inbox in its filter: {names}", field="database")
    database = consumers[0]
    with database.read_only(SECONDS) as connection:
        where, values = _inbox_where(connection, database, criteria)
        ids = statement(database.schema, sql.INBOX_IDS, values | _bounds(edge, most), where=where)
        ((now,),), rows = execute(connection, NOW, ids)
    return sorted(each for (each,) in rows), edge or now


def _delivered(databases: Databases, selection: Selection, ids: list[UUID]) -> list[UUID]:
    """Return the messages that took effect in a registered database, where that matters."""
    if not selection.checks_delivery or not ids:
        return []
    if databases.away:
        raise DatabaseUnreached(list(databases.away))
    found: set[Row] = set()
    for database in databases.having("consumer"):
        with database.read_only(SECONDS) as connection:
            found.update(query(connection, database.schema, sql.CONSUMED, ids=ids))
    return sorted(each for (each,) in found)


def choose_database(databases: Databases, selection: Selection, name: str | None) -> tuple[Database, Summary]:
    """Return the database in which the bulk job is to be done, and its matches; see `BulkJobs.preview`."""
    CALLER.get().search()
    act, selector = selection.act, selection.selector
    criteria = selector.messages or selector.halves or (None if selection.is_across else selector.inbox)
    if name is None and criteria is not None:
        name = criteria.database
    candidates = databases.having(act.part, name)
    if not candidates:
        which = f"database {name!r} has" if name else "no registered database has"
        raise InvalidRequest(f"{which} the {act.part}'s tables, which {act.name} needs", field="database")
    found: list[tuple[Database, Summary]] = []
    for database in candidates:
        resolved = resolve(databases, database, selection, most=model.PREVIEWED)
        with database.read_only(SECONDS) as connection:
            matched = match(connection, database, selection, resolved, most=model.PREVIEWED)
            (rows,) = execute(connection, sql.summary(database.schema, matched))
        found.append((database, selection.summary_of(rows, resolved.edge, most=model.PREVIEWED)))
    having = [(database, summary) for database, summary in found if summary.known]
    if len(having) > 1:
        names = ", ".join(database.name for database, _ in having)
        raise InvalidRequest(f"several databases have such messages; name one of: {names}", field="database")
    if not having and selection.by_name and (away := databases.away_for(name)):
        raise DatabaseUnreached(away)
    if not having and selection.by_name:
        raise NotFound(f"no registered database ({', '.join(databases)}) knows any of these messages")
    return having[0] if having else found[0]


_WORDS = {"delivered": "consumed", "compensating": "half compensated", "fenced": "undecided"}


def described(act: Act, able: Sequence[StateCount], *, more: bool = False) -> str:
    """Return a text of the act, the number of messages, group and topic; ``more``: there are more than were counted.

    Such as "retry 12 parked messages of group bank-b, topic transfers (NoAccount in bank_b.py:credit)".
    """
    counts: Counter[str] = Counter()
    for each in able:
        counts[_WORDS.get(each.state, each.state)] += each.count
    number, verb = counts.total(), act.verb or act.name
    if not number:
        return f"{verb} those that can be of more than {model.PREVIEWED} messages" if more else f"{verb} no message"
    amount = f"at least {min(number, model.PREVIEWED)}" if more else str(number)
    noun = f"{'half ' if set(counts) == {'undecided'} else ''}message{'' if number == 1 else 's'}"
    if len(counts) == 1:
        what = f"{amount} {next(iter(counts))} {noun}"
    else:
        what = f"{amount} {noun} ({', '.join(f'{count} {word}' for word, count in counts.most_common())})"
    known = {name: {getattr(each, name) for each in able} for name in ("group", "topic", "kind")}
    common = {name: value for name, (value, *others) in known.items() if value and not others}
    kind = common.pop("kind", None)
    names = ", ".join(f"{word} {name}" for word, name in common.items())
    return f"{verb} {what}" + (f" of {names}" if names else "") + (f" ({kind})" if kind else "")
