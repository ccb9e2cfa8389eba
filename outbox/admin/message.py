"""One message with its whole way: half, checks, op, sends, and what each inbox of each registered database says."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

from outbox.admin.gathering import Gathered, gather
from outbox.admin.model import Actor, MessageView
from outbox.admin.redact import Redactor
from outbox.admin.telling import actions_of, next_of
from outbox.admin.timeline import timeline
from outbox.errors import MessageNotFound
from outbox.store import find
from outbox.store.execute import execute
from outbox.store.operator import audit

if TYPE_CHECKING:
    from outbox.admin.databases import Databases


def message(databases: Databases, message_id: UUID, redactor: Redactor, *, reveal: Actor | None = None) -> MessageView:
    """Return all that is known of a message. With ``reveal``, unmasked; that is in the audit before it is returned.

    A database that can't be read is named in ``unseen``, and what it knows is missing.

    Raises:
        MessageNotFound: no database knows it, and all could be read.
        sqlalchemy.exc.DBAPIError: none of those that could be read knows it; or the reveal can't be audited.
    """
    found = gather(databases, message_id)
    if not found.known:
        raise next(iter(found.unseen.values()), _not_found(databases, message_id))
    if reveal is not None and found.home is not None:
        with found.home.acting() as connection:
            statement = audit(found.home.schema, reveal.name, "reveal", str(message_id), "", None, reveal.origin)
            execute(connection, statement)
    return _view(databases, found, redactor, revealed=reveal is not None)


def version_of(databases: Databases, message_id: UUID) -> str:
    """Return a text that is another one whenever anything about the message has changed."""
    return gather(databases, message_id).version


def raw_body(databases: Databases, message_id: UUID) -> tuple[str, bytes]:
    """Return content type and bytes of a message as they are.

    Raises:
        MessageNotFound: no producer's database has it.
    """
    for database in databases.having("producer"):
        with database.looking() as connection:
            (rows,) = execute(connection, find.body(database.schema, message_id))
        if rows:
            content_type, body = rows[0]
            return content_type, bytes(body)
    raise _not_found(databases, message_id)


def _view(databases: Databases, found: Gathered, redactor: Redactor, *, revealed: bool) -> MessageView:
    actions, refused = actions_of(found)
    half, body, compensation = found.half, None, found.compensation
    if half is not None:
        body = redactor.body(half["content_type"], bytes(found.raw), reveal=revealed)
        half = {**half, "headers": redactor.headers(half["headers"], reveal=revealed)}
    if compensation is not None:
        compensation = {**compensation, "result": redactor.document(compensation["result"], reveal=revealed)}
    return MessageView(
        id=found.id,
        database=found.home.name if found.home else None,
        status=half["status"] if half else None,
        next=next_of(found, databases),
        version=found.version,
        half=half,
        check=found.check,
        history=found.history,
        op=found.op,
        sends=found.sends,
        scheduled=found.scheduled,
        compensation=compensation,
        inbox=found.inbox,
        audit=found.audit,
        operations=found.operations,
        timeline=timeline(found),
        body=body,
        actions=actions,
        refused=refused,
        findings=[{"database": name, **finding} for name, finding in found.findings],
        unseen=list(found.unseen),
    )


def _not_found(databases: Databases, message_id: UUID) -> MessageNotFound:
    return MessageNotFound(
        f"no registered database ({', '.join(databases)}) knows message {message_id}; "
        "is it in another one, or was it pruned?"
    )
