"""Do one thing to one message: in the database that has it, in one transaction with its audit row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.exc import DBAPIError

from outbox.admin.databases import PATIENCE, Database, Databases
from outbox.admin.doing import deed_of, do
from outbox.admin.model import Action, Actor, Target
from outbox.admin.states import DONE_TO, UNCONSUMED, UNKNOWN, refusal
from outbox.dispatch import LOCK_NOT_AVAILABLE
from outbox.errors import ActRefused, InvalidRequest, MessageNotFound, VersionMismatch
from outbox.store import find_inbox
from outbox.store.acts import half_states, inbox_states
from outbox.store.dispatch import plan_by_index
from outbox.store.execute import execute


def act(
    databases: Databases,
    action: Action,
    target: Target,
    *,
    actor: Actor,
    reason: str,
    options: Mapping[str, Any],
    version: str | None,
    database: str | None,
) -> str:
    """Do one thing to one message, and say in a sentence what came of it; see `outbox.admin.service.Admin.act`.

    ``version`` is looked at before: what changes after that is caught by the state in which the act can be done.

    Raises:
        MessageNotFound: nobody knows the message.
        ActRefused: it isn't in a state in which this can be done; says which, and the mend.
        VersionMismatch: it has changed meanwhile.
        InvalidRequest: no reason where one is needed, a group that is missing, an option that isn't known, or several
            databases have the message.
    """
    deed = deed_of(action, actor, reason, options)
    if action is Action.ROLLBACK:
        raise InvalidRequest("a rollback is ordered as an operation, also of one message", field="action")
    found = find(databases, action, target, database)
    if version is not None:
        _check_version(databases, target, version)
    try:
        with found.acting() as connection:
            (outcome,) = do(connection, found.settings, deed, [target], wait=True)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        why = f"somebody has been working on it for {PATIENCE:g} s; look again in a while"
        raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {why}") from error
    if outcome.state != "done":
        raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {outcome.text}")
    return f"{named(target)} {outcome.text}"


def named(target: Target) -> str:
    """Return what a message is called in a sentence."""
    return f"message {target.message_id}" + (f" of group {target.group}" if target.group else "")


def find(databases: Databases, action: Action, target: Target, name: str | None) -> Database:
    """Return the database in which an act on a message is done; ``name`` limits the search to one.

    Raises:
        MessageNotFound: nobody knows the message.
        ActRefused: the message is known, but not where this act is done.
        InvalidRequest: a group that is missing or too many, or several databases have the message.
        UnknownDatabase: no database has this name.
    """
    check_group(action, target)
    asked = databases.having(action.part, name)
    having = [database for database in asked if _has(database, action, target)]
    if len(having) == 1:
        return having[0]
    if having:
        names = ", ".join(database.name for database in having)
        raise InvalidRequest(f"{named(target)} is in several databases; name one of: {names}", field="database")
    if not any(_knows(database, target) for database in databases.values()):
        raise MessageNotFound(
            f"no registered database ({', '.join(databases)}) knows message {target.message_id}; "
            "is it in another one, or was it pruned?"
        )
    state = UNCONSUMED if action.part == "consumer" else UNKNOWN
    raise ActRefused(f"{named(target)} can't be {DONE_TO[action]}: {refusal(action, state)}")


def check_group(action: Action, target: Target) -> None:
    """See that a target has a group where the act needs one, and none elsewhere.

    Raises:
        InvalidRequest: it hasn't, or has.
    """
    if action.part == "consumer" and not target.group:
        raise InvalidRequest(f"name the group in whose inbox message {target.message_id} is", field="group")
    if action.part == "producer" and target.group:
        raise InvalidRequest(f"{action} is done on the producer's side, which knows no groups", field="group")


def _has(database: Database, action: Action, target: Target) -> bool:
    with database.looking() as connection:
        if action.part == "consumer":
            (rows,) = execute(connection, inbox_states(database.schema, [target.group or ""], [target.message_id]))
            return bool(rows)
        (((_, state, _),),) = execute(connection, half_states(database.schema, [target.message_id]))
        return bool(state != UNKNOWN)


def _knows(database: Database, target: Target) -> bool:
    """Does any table of a database know the message?"""
    rows: Sequence[Any] = ()
    with database.looking() as connection:
        if "producer" in database.parts:
            (((_, state, _),),) = execute(connection, half_states(database.schema, [target.message_id]))
            if state != UNKNOWN:
                return True
        if "consumer" in database.parts:
            wanted = find_inbox.rows_of(database.schema, find_inbox.Wanted(), target.message_id, None, 1)
            _, rows = execute(connection, plan_by_index(), wanted)
    return any(row[2] is not None for row in rows)


def _check_version(databases: Databases, target: Target, version: str) -> None:
    from outbox.admin.message import version_of  # noqa: PLC0415

    if version_of(databases, target.message_id) != version:
        raise VersionMismatch(
            f"message {target.message_id} has changed since you looked at it; look again, then decide again"
        )
