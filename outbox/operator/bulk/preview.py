"""What a bulk job would do, counted in the database in which it would be done; writes nothing.

From a selector to a query in one database, and what that query finds.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.sql import plan_by_index
from outbox.errors import InvalidRequest, MessageNotFound
from outbox.operator.acts import check_options, refusal, states_for
from outbox.operator.bulk import choose_sql
from outbox.operator.bulk.choose_sql import SAMPLE
from outbox.operator.bulk.selection import Asked, Summary
from outbox.operator.bulk.show import described
from outbox.operator.look import inbox_sql, messages_sql, paging
from outbox.operator.look.inbox import check as check_inbox
from outbox.operator.look.inbox import wanted_in
from outbox.operator.look.messages import check_filter, check_words, wanted_of
from outbox.operator.model import MAX_ITEMS, Action, HalfFilter, InboxFilter, MessageFilter, Preview, Selector, Total
from outbox.operator.old_halves import HalfStatus
from outbox.operator.sql import HALF_JOINS

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

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
    """Return what has to be known from other databases for a bulk job in this one.

    Raises:
        InvalidRequest: a filter that isn't one, or an inbox filter that fits several databases.
    """
    selector = asked.selector
    ids = [target.message_id for target in selector.targets or ()]
    if asked.across and selector.inbox is not None:
        ids, edge = _ids_in_inboxes(databases, selector.inbox, edge)
    elif asked.by_ids and selector.messages is not None:
        with database.looking(SECONDS) as connection:
            statement = choose_sql.ids(database.schema, _messages(selector.messages, edge))
            _, rows = execute(connection, plan_by_index(), statement)
        ids = sorted(each for (each,) in rows)
        edge = edge or max(ids, default=None)
    return Elsewhere(ids, _delivered(databases, asked, ids), edge if asked.by_ids else None)


def look(database: Database, asked: Asked, elsewhere: Elsewhere) -> Summary:
    """Return what is matched in one database now.

    Raises:
        BulkJobTooLarge: too many.
        InvalidRequest: a filter that isn't one.
    """
    with database.looking(SECONDS) as connection:
        matched = matched_by(connection, database, asked, elsewhere)
        _, rows = execute(connection, plan_by_index(), choose_sql.summary(database.schema, matched))
    return asked.summary_of(rows, elsewhere.edge)


def matched_by(
    connection: Connection, database: Database, asked: Asked, elsewhere: Elsewhere, edge: Any = None
) -> choose_sql.Matched:
    """Return the query that matches what is selected."""
    selector = asked.selector
    if asked.action.part == "consumer" and selector.targets is not None:
        targets = list(dict.fromkeys(selector.targets))
        return choose_sql.named_inbox([each.group or "" for each in targets], [each.message_id for each in targets])
    if selector.targets is not None or asked.by_ids:
        return choose_sql.named_halves(list(dict.fromkeys(elsewhere.ids)), elsewhere.delivered)
    if selector.inbox is not None:
        return choose_sql.inbox(*_inbox_where(connection, database, selector.inbox), edge, MAX_ITEMS + 1)
    if selector.halves is not None:
        undecided = _HALVES.replace("LEFT JOIN {s}.half_check", "JOIN {s}.half_check")
        return choose_sql.halves(undecided, *_half_where(selector.halves), edge, MAX_ITEMS + 1)
    return _messages(selector.messages or MessageFilter(), edge)


def _messages(given: MessageFilter, edge: Any) -> choose_sql.Matched:
    wanted = wanted_of(given)
    where, values = messages_sql.where(wanted)
    small = {_SMALL.get(status) for status in wanted.statuses}
    if len(small) == 1 and (table := small.pop()):
        where = f"h.id IN (SELECT half_id FROM {{s}}.{table}) AND {where}"
    return choose_sql.halves(_HALVES, where, values, edge, MAX_ITEMS + 1)


def _inbox_where(connection: Connection, database: Database, wanted: InboxFilter) -> tuple[str, dict[str, object]]:
    check_inbox(wanted)
    sought = wanted_in(connection, database, wanted)
    return inbox_sql.where(sought) if sought else ("false", {})


def _half_where(wanted: HalfFilter) -> tuple[str, dict[str, object]]:
    check_filter(wanted, texts=("topic",))
    check_words([wanted.status] if wanted.status is not None else [], HalfStatus, "status")
    return choose_sql.half_where(wanted.topic, wanted.status, wanted.min_age)


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
            choose_sql.now(),
            choose_sql.inbox_ids(database.schema, where, values, edge, MAX_ITEMS + 1),
        )
    return sorted(each for (each,) in rows), edge or now


def _delivered(databases: Databases, asked: Asked, ids: list[UUID]) -> list[UUID]:
    """Return the messages that took effect in a registered database, where that matters."""
    if asked.action is not Action.COMPENSATE or not ids:
        return []
    found: set[UUID] = set()
    for database in databases.having("consumer"):
        with database.looking(SECONDS) as connection:
            _, rows = execute(connection, plan_by_index(), choose_sql.consumed(database.schema, ids))
        found |= {each for each, _ in rows}
    return sorted(found)


def preview(
    databases: Databases, action: Action, selector: Selector, *, database: str | None, options: Mapping[str, Any]
) -> Preview:
    """Return what a bulk job would do; see `outbox.operator.service.Admin.preview`.

    Raises:
        InvalidRequest: a selector or option that isn't one, or several databases have what it matches.
        MessageNotFound: no database knows any of the messages that are named.
        BulkJobTooLarge: it matches more than 100,000 messages, or names more than 1,000.
    """
    check_options(action, options)
    asked = Asked(action, selector, options)
    asked.check()
    chosen, found = choose_database(databases, asked, database)
    wanted = states_for(action, options)
    able = found.able(wanted)
    return Preview(
        action,
        chosen.name,
        Total(found.matched),
        sum(each.count for each in able),
        {refusal(action, each.state): each.count for each in found.kept if each.state not in wanted},
        sorted((target for each in able for target in each.sample), key=lambda t: t.message_id, reverse=True)[:SAMPLE],
        described(action, able),
        token_of(asked, chosen, found),
    )


def choose_database(databases: Databases, asked: Asked, name: str | None) -> tuple[Database, Summary]:
    """Return the database in which the bulk job is to be done, and what is matched there.

    Raises:
        InvalidRequest: several have what is matched, or none is of the kind that is needed.
        MessageNotFound: no database knows any of the messages that are named.
        UnknownDatabase: none has the name that was given.
    """
    if name is None and not asked.across and asked.wanted is not None:
        name = asked.wanted.database
    candidates = databases.having(asked.action.part, name)
    if not candidates:
        which = f"database {name!r} has" if name else "no registered database has"
        raise InvalidRequest(f"{which} the {asked.action.part}'s tables, which {asked.action} needs", field="database")
    found = [(database, look(database, asked, look_elsewhere(databases, database, asked))) for database in candidates]
    having = [(database, summary) for database, summary in found if summary.known]
    if len(having) > 1:
        names = ", ".join(database.name for database, _ in having)
        raise InvalidRequest(f"several databases have such messages; name one of: {names}", field="database")
    if not having and asked.by_name:
        raise MessageNotFound(f"no registered database ({', '.join(databases)}) knows any of these messages")
    return having[0] if having else found[0]


def token_of(asked: Asked, database: Database, found: Summary) -> str:
    """Return what binds an order to what was previewed: the selection, the database, and all that can be acted on."""
    edge = paging.encode(None if found.edge is None else (found.edge,))
    digest = found.digest(states_for(asked.action, asked.options))
    return paging.write({"database": database.name, "edge": edge, "digest": digest}, asked.context)
