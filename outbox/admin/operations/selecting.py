"""From a selector to a query in one database, and what that query finds."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.admin.filters import check_filter, check_words
from outbox.admin.inbox import check as check_inbox
from outbox.admin.inbox import wanted_in
from outbox.admin.messages import wanted_of
from outbox.admin.model import MAX_ITEMS, Action, HalfFilter, InboxFilter, MessageFilter
from outbox.admin.operations.asked import Asked, Summary
from outbox.errors import InvalidRequest
from outbox.halves import HalfStatus
from outbox.store import choose, find, find_inbox
from outbox.store.acts import HALF_JOINS
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import execute

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.admin.databases import Database, Databases

#: How long (seconds) a preview may look for what a filter matches.
SECONDS = 30.0
# The halves of these statuses are found by a small table, however many others there are.
_SMALL = {"undecided": "half_check", "scheduled": "scheduled_message", "recalled": "scheduled_message"}
_HALVES = f"{{s}}.half_message h{HALF_JOINS}"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What has to be known before the query: which messages these are, and which of them took effect somewhere.

    ``edge`` bounds a filter that was turned into ids to what there was then.
    """

    ids: list[UUID] = field(default_factory=list)
    delivered: list[UUID] = field(default_factory=list)
    edge: UUID | dt.datetime | None = None


def look_elsewhere(databases: Databases, database: Database, asked: Asked, edge: Any = None) -> Elsewhere:
    """Return what has to be known from other databases for an operation in this one.

    Raises:
        InvalidRequest: a filter that isn't one, or an inbox filter that fits several databases.
    """
    selector = asked.selector
    ids = [target.message_id for target in selector.targets or ()]
    if asked.across and selector.inbox is not None:
        ids, edge = _ids_in_inboxes(databases, selector.inbox, edge)
    elif asked.by_ids and selector.messages is not None:
        with database.looking(SECONDS) as connection:
            statement = choose.ids(database.schema, _messages(selector.messages, edge))
            _, rows = execute(connection, plan_by_index(), statement)
        ids = sorted(each for (each,) in rows)
        edge = edge or max(ids, default=None)
    return Elsewhere(ids, _delivered(databases, asked, ids), edge if asked.by_ids else None)


def look(database: Database, asked: Asked, elsewhere: Elsewhere) -> Summary:
    """Return what is matched in one database now.

    Raises:
        OperationTooLarge: too many.
        InvalidRequest: a filter that isn't one.
    """
    with database.looking(SECONDS) as connection:
        matched = matched_by(connection, database, asked, elsewhere)
        _, rows = execute(connection, plan_by_index(), choose.summary(database.schema, matched))
    return asked.summary_of(rows, elsewhere.edge)


def matched_by(
    connection: Connection, database: Database, asked: Asked, elsewhere: Elsewhere, edge: Any = None
) -> choose.Matched:
    """Return the query that matches what is selected."""
    selector = asked.selector
    if asked.action.part == "consumer" and selector.targets is not None:
        targets = list(dict.fromkeys(selector.targets))
        return choose.named_inbox([each.group or "" for each in targets], [each.message_id for each in targets])
    if selector.targets is not None or asked.by_ids:
        return choose.named_halves(list(dict.fromkeys(elsewhere.ids)), elsewhere.delivered)
    if selector.inbox is not None:
        return choose.inbox(*_inbox_where(connection, database, selector.inbox), edge, MAX_ITEMS + 1)
    if selector.halves is not None:
        undecided = _HALVES.replace("LEFT JOIN {s}.half_check", "JOIN {s}.half_check")
        return choose.halves(undecided, *_half_where(selector.halves), edge, MAX_ITEMS + 1)
    return _messages(selector.messages or MessageFilter(), edge)


def _messages(given: MessageFilter, edge: Any) -> choose.Matched:
    wanted = wanted_of(given)
    where, values = find.where(wanted)
    small = {_SMALL.get(status) for status in wanted.statuses}
    if len(small) == 1 and (table := small.pop()):
        where = f"h.id IN (SELECT half_id FROM {{s}}.{table}) AND {where}"
    return choose.halves(_HALVES, where, values, edge, MAX_ITEMS + 1)


def _inbox_where(connection: Connection, database: Database, wanted: InboxFilter) -> tuple[str, dict[str, object]]:
    check_inbox(wanted)
    sought = wanted_in(connection, database, wanted)
    return find_inbox.where(sought) if sought else ("false", {})


def _half_where(wanted: HalfFilter) -> tuple[str, dict[str, object]]:
    check_filter(wanted, texts=("topic",))
    check_words([wanted.status] if wanted.status is not None else [], HalfStatus, "status")
    return choose.half_where(wanted.topic, wanted.status, wanted.min_age)


def _ids_in_inboxes(databases: Databases, wanted: InboxFilter, edge: Any) -> tuple[list[UUID], dt.datetime]:
    """Return the messages whose inbox rows fit, and when that was."""
    consumers = databases.having("consumer", wanted.database)
    if len(consumers) != 1:
        names = ", ".join(each.name for each in consumers) or "none is registered"
        raise InvalidRequest(f"name the database of the inbox in its filter: {names}", field="database")
    database = consumers[0]
    with database.looking(SECONDS) as connection:
        where, values = _inbox_where(connection, database, wanted)
        _, ((now,),), rows = execute(
            connection,
            plan_by_index(),
            choose.now(),
            choose.inbox_ids(database.schema, where, values, edge, MAX_ITEMS + 1),
        )
    return sorted(each for (each,) in rows), edge or now


def _delivered(databases: Databases, asked: Asked, ids: list[UUID]) -> list[UUID]:
    """Return the messages that took effect in a registered database, where that matters."""
    if asked.action is not Action.ROLLBACK or not ids:
        return []
    found: set[UUID] = set()
    for database in databases.having("consumer"):
        with database.looking(SECONDS) as connection:
            _, rows = execute(connection, plan_by_index(), choose.consumed(database.schema, ids))
        found |= {each for each, _ in rows}
    return sorted(found)
