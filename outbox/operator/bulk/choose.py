"""What a bulk job acts on: from a selector to a query in one database, counted for a preview or before the order."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import Row, Statement, execute, query, statement
from outbox.errors import BulkJobTooLarge, InvalidRequest, MessageNotFound
from outbox.operator.acts import Act
from outbox.operator.bulk import sql
from outbox.operator.bulk.sql import Matched
from outbox.operator.changes import MESSAGE_JOINS, inbox_columns
from outbox.operator.look import inbox_sql, lists_sql
from outbox.operator.look.inbox import query_in
from outbox.operator.look.lists import check_messages
from outbox.operator.look.paging import checked
from outbox.operator.model import (
    MAX_IDS,
    MAX_ITEMS,
    InboxFilter,
    MessageFilter,
    Selector,
    Target,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

#: How long (seconds) a preview may look for what a filter matches.
SECONDS = 30.0
# The halves of these statuses are found by a small table, however many others there are.
_SMALL = {"undecided": "half_check", "scheduled": "scheduled_message", "recalled": "scheduled_message"}
_HALVES = f"{{s}}.half_message h{MESSAGE_JOINS}"
_SELECTABLE = {
    "message": {"targets", "messages", "inbox"},
    "half": {"targets", "messages", "halves"},
    "inbox": {"targets", "inbox"},
}


@dataclass(frozen=True, slots=True)
class Selection:
    """An act and what it is to be done to: the part of an order that doesn't depend on what is found."""

    act: Act
    selector: Selector
    options: Mapping[str, Any]

    @property
    def by_name(self) -> bool:
        """Are the messages named one by one?"""
        return self.selector.targets is not None

    @property
    def is_across(self) -> bool:
        """Does a filter of inboxes select messages for an act in their producer's database?"""
        return self.selector.inbox is not None and self.act.part == "producer"

    @property
    def by_ids(self) -> bool:
        """Must the filter be turned into ids first, since one query can't see all the databases that it needs?"""
        return self.is_across or (self.checks_delivery and self.selector.messages is not None)

    @property
    def checks_delivery(self) -> bool:
        """Does the act depend on whether a message took effect in any database?"""
        return any("delivered" in option.adds for option in self.act.options)

    @property
    def states(self) -> frozenset[str]:
        """The states in which the act can be done."""
        return self.act.states(self.options)

    @property
    def context(self) -> object:
        """What a token is bound to."""
        return ("bulk_job", self.act.name, self.selector, sorted(self.options.items()))

    def summary_of(self, rows: list[Row], edge: UUID | dt.datetime | None = None) -> Summary:
        """Return what the rows of `sql.summary` say; ``edge``, if set, is known from elsewhere.

        Raises:
            BulkJobTooLarge: too many are matched.
        """
        own = max((row[9 if self.selector.inbox is not None else 8] for row in rows), default=None)
        counts = [
            StateCount(state, count, hashed, group, topic, kind, list(map(Target, ids, groups)))
            for state, count, hashed, group, topic, kind, ids, groups, *_ in rows
        ]
        summary = Summary(counts, own if edge is None else edge)
        if summary.matched > MAX_ITEMS:
            raise BulkJobTooLarge(f"more than {MAX_ITEMS} messages are matched; narrow the filter, such as by time")
        return summary

    def check(self) -> None:
        """Check that the selector fits the act.

        Raises:
            InvalidRequest: it doesn't, or isn't exactly one.
            BulkJobTooLarge: too many targets.
        """
        selector, fits = self.selector, _SELECTABLE[self.act.noun]
        kinds = [kind for kind in ("targets", "messages", "inbox", "halves") if getattr(selector, kind) is not None]
        if len(kinds) != 1:
            raise InvalidRequest(f"select by exactly one of targets, messages, inbox, halves, not {kinds}", "selector")
        if selector.targets is not None:
            if not selector.targets:
                raise InvalidRequest("no message is named", field="selector")
            if (number := len(selector.targets)) > MAX_IDS:
                raise BulkJobTooLarge(f"{number} messages are named; at most {MAX_IDS} can be, or use a filter")
            for target in selector.targets:
                self.act.check_group(target)
        if not fits.issuperset(kinds):
            raise InvalidRequest(
                f"{self.act.name} can't be done by {kinds[0]}; select by {' or '.join(sorted(fits))}", "selector"
            )
        if selector.messages is not None and selector.messages.body is not None:
            raise InvalidRequest("a bulk job can't select by what is in the bodies; name the messages", field="body")


@dataclass(frozen=True, slots=True)
class StateCount:
    """How many of what is matched are in one state, and what they have in common (None: nothing)."""

    state: str
    count: int
    hash: str
    group: str | None
    topic: str | None
    kind: str | None
    sample: list[Target]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a query has matched; ``edge`` bounds the same query to what there was then."""

    counts: list[StateCount]
    edge: UUID | dt.datetime | None

    @property
    def matched(self) -> int:
        """How many there are."""
        return sum(each.count for each in self.counts)

    @property
    def known(self) -> bool:
        """Is there anything, beside names of what isn't there?"""
        return any(each.state not in {"unknown", "unconsumed"} for each in self.counts)

    def able(self, states: frozenset[str]) -> list[StateCount]:
        """Return those that can be acted on."""
        return [each for each in self.counts if each.state in states]

    def digest(self, states: frozenset[str]) -> list[list[Any]]:
        """Return a value that differs when what can be acted on differs."""
        return sorted([each.state, each.count, each.hash] for each in self.able(states))


@dataclass(frozen=True, slots=True)
class ResolvedIds:
    """What other databases say before the query: which messages these are, and which of them took effect somewhere.

    ``edge`` bounds a filter that was turned into ids to what there was then.
    """

    ids: list[UUID]
    delivered: list[UUID]
    edge: UUID | dt.datetime | None


def resolve(databases: Databases, database: Database, selection: Selection, edge: Any = None) -> ResolvedIds:
    """Return what has to be known from other databases for a bulk job in this one.

    Raises:
        InvalidRequest: a filter that isn't one, or an inbox filter that fits several databases.
    """
    selector = selection.selector
    ids = list(dict.fromkeys(target.message_id for target in selector.targets or ()))
    if selection.is_across and selector.inbox is not None:
        ids, edge = _ids_in_inboxes(databases, selector.inbox, edge)
    elif selection.by_ids and selector.messages is not None:
        with database.reading(SECONDS) as connection:
            matched = _match_messages(selector.messages, edge)
            rows = query(connection, database.schema, f"SELECT id FROM ({matched.sql}) m", **matched.values)
        ids = sorted(each for (each,) in rows)
        edge = edge or max(ids, default=None)
    return ResolvedIds(ids, _delivered(databases, selection, ids), edge if selection.by_ids else None)


def match(
    connection: Connection, database: Database, selection: Selection, resolved: ResolvedIds, edge: Any = None
) -> Matched:
    """Return the query that matches what is selected."""
    selector = selection.selector
    if selection.act.part == "consumer" and selector.targets is not None:
        return Matched(sql.NAMED_INBOX, inbox_columns(dict.fromkeys(selector.targets)))
    if selector.targets is not None or selection.by_ids:
        return Matched(sql.NAMED_HALVES, {"ids": resolved.ids, "delivered": resolved.delivered})
    if selector.inbox is not None:
        where, values = _inbox_where(connection, database, selector.inbox)
        return _bounded(sql.INBOX.replace("{where}", where), values, edge)
    if selector.halves is not None:
        where, values = lists_sql.half_where(checked(selector.halves))
        undecided = _HALVES.replace("LEFT JOIN {s}.half_check", "JOIN {s}.half_check")
        return _match_halves(undecided, f"o.half_id IS NULL AND {where}", values, edge)
    return _match_messages(selector.messages or MessageFilter(), edge)


def _match_messages(criteria: MessageFilter, edge: Any) -> Matched:
    where, values = lists_sql.where(check_messages(criteria))
    small = {_SMALL.get(status) for status in criteria.status}
    if len(small) == 1 and (table := small.pop()):
        where = f"h.id IN (SELECT half_id FROM {{s}}.{table}) AND {where}"
    return _match_halves(_HALVES, where, values, edge)


def _match_halves(source: str, where: str, values: dict[str, Any], edge: Any) -> Matched:
    return _bounded(sql.HALVES.replace("{from}", source).replace("{where}", where), values, edge)


def _bounded(query: str, values: dict[str, Any], edge: Any) -> Matched:
    return Matched(query, {**values, "edge": edge, "most": MAX_ITEMS + 1})


def _inbox_where(connection: Connection, database: Database, criteria: InboxFilter) -> tuple[str, dict[str, Any]]:
    query = query_in(connection, database, checked(criteria))
    return inbox_sql.where(query) if query else ("false", {})


def _ids_in_inboxes(databases: Databases, criteria: InboxFilter, edge: Any) -> tuple[list[UUID], dt.datetime]:
    """Return the messages whose inbox rows fit, and when that was."""
    consumers = databases.having("consumer", criteria.database)
    if len(consumers) != 1:
        names = ", ".join(each.name for each in consumers) or "none is registered"
        raise InvalidRequest(f"name the database of the inbox in its filter: {names}", field="database")
    database = consumers[0]
    with database.reading(SECONDS) as connection:
        where, values = _inbox_where(connection, database, criteria)
        values |= {"edge": edge, "most": MAX_ITEMS + 1}
        ids = statement(database.schema, sql.INBOX_IDS, values, where=where)
        ((now,),), rows = execute(connection, Statement(sql.NOW), ids)
    return sorted(each for (each,) in rows), edge or now


def _delivered(databases: Databases, selection: Selection, ids: list[UUID]) -> list[UUID]:
    """Return the messages that took effect in a registered database, where that matters."""
    if not selection.checks_delivery or not ids:
        return []
    found: set[UUID] = set()
    for database in databases.having("consumer"):
        with database.reading(SECONDS) as connection:
            found |= {each for (each,) in query(connection, database.schema, sql.CONSUMED, ids=ids)}
    return sorted(found)


def choose_database(databases: Databases, selection: Selection, name: str | None) -> tuple[Database, Summary]:
    """Return the database in which the bulk job is to be done, and what is matched there.

    Raises:
        InvalidRequest: several have what is matched, or none is of the kind that is needed.
        MessageNotFound: no database knows any of the messages that are named.
        UnknownDatabase: none has the name that was passed.
    """
    act = selection.act
    selector = selection.selector
    criteria = selector.messages or selector.halves or (None if selection.is_across else selector.inbox)
    if name is None and criteria is not None:
        name = criteria.database
    candidates = databases.having(act.part, name)
    if not candidates:
        which = f"database {name!r} has" if name else "no registered database has"
        raise InvalidRequest(f"{which} the {act.part}'s tables, which {act.name} needs", field="database")
    found: list[tuple[Database, Summary]] = []
    for database in candidates:
        resolved = resolve(databases, database, selection)
        with database.reading(SECONDS) as connection:
            matched = match(connection, database, selection, resolved)
            (rows,) = execute(connection, sql.summary(database.schema, matched))
        found.append((database, selection.summary_of(rows, resolved.edge)))
    having = [(database, summary) for database, summary in found if summary.known]
    if len(having) > 1:
        names = ", ".join(database.name for database, _ in having)
        raise InvalidRequest(f"several databases have such messages; name one of: {names}", field="database")
    if not having and selection.by_name:
        raise MessageNotFound(f"no registered database ({', '.join(databases)}) knows any of these messages")
    return having[0] if having else found[0]


_WORDS = {"delivered": "consumed", "compensating": "half compensated", "fenced": "undecided"}


def described(act: Act, able: Sequence[StateCount]) -> str:
    """Return what is done to how many messages of which group and topic.

    Such as "retry 12 parked messages of group bank-b, topic transfers (NoAccount in bank_b.py:credit)".
    """
    counts: Counter[str] = Counter()
    for each in able:
        counts[_WORDS.get(each.state, each.state)] += each.count
    number, verb = counts.total(), act.verb or act.name
    if not number:
        return f"{verb} no message"
    noun = f"{'half ' if set(counts) == {'undecided'} else ''}message{'' if number == 1 else 's'}"
    if len(counts) == 1:
        what = f"{number} {next(iter(counts))} {noun}"
    else:
        what = f"{number} {noun} ({', '.join(f'{count} {word}' for word, count in counts.most_common())})"
    return f"{verb} {what}{_where(able)}"


def _where(able: Sequence[StateCount]) -> str:
    groups, topics, kinds = ({getattr(each, name) for each in able} for name in ("group", "topic", "kind"))
    group, topic, kind = (values.pop() if len(values) == 1 else None for values in (groups, topics, kinds))
    names = [f"{word} {name}" for word, name in (("group", group), ("topic", topic)) if name]
    return (f" of {', '.join(names)}" if names else "") + (f" ({kind})" if kind else "")
