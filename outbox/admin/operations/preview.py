"""What an operation would do, counted in the database in which it would be done; writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outbox.admin import paging
from outbox.admin.doing import check_options
from outbox.admin.model import Action, Preview, Selector, Total
from outbox.admin.operations.asked import Asked, Summary
from outbox.admin.operations.selecting import look, look_elsewhere
from outbox.admin.operations.words import described
from outbox.admin.states import refusal, states_for
from outbox.errors import InvalidRequest, MessageNotFound
from outbox.store.choose import SAMPLE

if TYPE_CHECKING:
    from outbox.admin.databases import Database, Databases


def preview(
    databases: Databases, action: Action, selector: Selector, *, database: str | None, options: Mapping[str, Any]
) -> Preview:
    """Return what an operation would do; see `outbox.admin.service.Admin.preview`.

    Raises:
        InvalidRequest: a selector or option that isn't one, or several databases have what it matches.
        MessageNotFound: no database knows any of the messages that are named.
        OperationTooLarge: it matches more than 100,000 messages, or names more than 1,000.
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
    """Return the database in which the operation is to be done, and what is matched there.

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
