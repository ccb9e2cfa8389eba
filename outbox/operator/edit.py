"""What an operator writes: a copy of a message with another body, and notes on dead letters.

An edit and resend makes the copy, with a new id, and decides what becomes of its original. A note is kept about a kind
of dead letters, with the name of its owner, for the next operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.acts.changes import (
    LONGEST,
    STATES,
    Actor,
    Target,
    apply,
    checked_actor,
    lock,
    record_of,
    requested,
    unless_locked,
)
from outbox.acts.forms import ORIGINALS
from outbox.acts.messages import ACTS
from outbox.acts.whole_acts import EDIT, NOTE
from outbox.compensate.quarantine import QuarantineOrder, quarantine, release
from outbox.database.execute import Template, execute, lock_key
from outbox.database.sql import take_lock
from outbox.errors import ActRefused, DatabaseUnreached, InvalidMessage, InvalidRequest, NotFound, VersionMismatch
from outbox.message.compression import compress
from outbox.message.content import CONVERSATION_HEADER, COPY_HEADER, DEDUPE_HEADER, ENCODING_HEADER, is_json, kind_of
from outbox.message.model import HalfMessage, Status, uuid7
from outbox.operator.databases import Database
from outbox.operator.look import inbox_sql
from outbox.operator.look.lists import Lists, fingerprint_of
from outbox.operator.look.message import MessageFacts, MessageViews, gather
from outbox.operator.model import DeadGroup
from outbox.producer.sql import write_halves
from outbox.text import storable

if TYPE_CHECKING:
    from sqlalchemy import Connection


#: The states of a message at its producer in which it can be edited.
EDIT_STATES = frozenset({"dispatched"})


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that was sent: its id, and a sentence about the act."""

    id: UUID
    outcome: str


@dataclass(frozen=True, slots=True)
class EditPreview:
    """Tell what is known of a message before it is edited: its state in each group, and the copies that it has."""

    topic: str | None
    key: str | None
    status: str | None
    next: str
    groups: list[tuple[str, str]]
    delivered: list[str]
    copies: list[UUID]
    version: str

    @property
    def refusal(self) -> str:
        """Why it can't be edited; empty if it can."""
        return "" if self.status in EDIT_STATES else f"it can't be edited: {self.next}"


@dataclass(frozen=True, slots=True)
class BodyText:
    """A body that is to be edited, as it is."""

    body: str


@dataclass(frozen=True, slots=True)
class _Edit:
    """Hold an operator's request, checked but for the states of the message."""

    actor: Actor
    why: str
    original: str
    acknowledged: bool
    again: bool


class Edits(MessageViews):
    """Send a message again with another body, where it can't succeed as it is."""

    def preview_edit(self, message_id: UUID) -> EditPreview:
        """Return what an edit of a message meets; writes nothing. For errors see `message`."""
        view = self.message(message_id)
        half: Mapping[str, Any] = view.half or {}
        groups = [(row.group, "discarded" if row.discarded_at else row.status) for row in view.inbox]
        delivered = sorted(row.group for row in view.inbox if row.status == Status.CONSUMED)
        known = half.get("topic"), half.get("key"), view.status, view.next
        return EditPreview(*known, groups, delivered, view.copies, view.version)

    def body_to_edit(self, message_id: UUID, *, by: Actor) -> BodyText:
        """Return a body unmasked, which is audited; raise InvalidRequest if it is too large to show, or no text."""
        body = self.message(message_id, reveal=by).body
        if body is None or body.text is None or body.truncated:
            raise InvalidRequest(
                f"the body of message {message_id} is too large, or no text: edit it with `outbox messages edit`",
                "message_id",
            )
        return BodyText(body.text)

    def edit(
        self,
        message_id: UUID,
        body: str,
        *,
        by: str | Actor,
        why: str,
        original: str = "quarantine",
        acknowledge_delivered: bool = False,
        again: bool = False,
        version: str | None = None,
    ) -> Copy:
        """Send a copy of a dispatched message with another body, under a new id, and set the original aside.

        ``body`` is the whole new body as a text: JSON where the content type is JSON's or a codec reads it. It must be
        allowed by the topic's model, where this process knows that. Topic, key, tag and headers are the original's;
        the header ``outbox-copy-of`` has its id. ``original`` is one of `ORIGINALS`. A group that has consumed the
        original would have the effect of both: that is refused unless ``acknowledge_delivered``, and so is a second
        copy unless ``again``. Groups in databases that aren't registered aren't known, nor are those that start later.

        The inboxes are set right first, each in a transaction of its own. If the copy can't be sent then, that is
        undone; if this process dies, the original is quarantined, and can be edited once more.

        Raises:
            NotFound: no database knows the message.
            DatabaseUnreached: one can't be read: what its groups have done isn't known.
            ActRefused: it isn't dispatched, took effect, or has a copy; says which, and the mend.
            VersionMismatch: it has changed since ``version``.
            InvalidRequest: no reason, or a body that is the same, or isn't one of its type or its topic.
        """
        actor = checked_actor(EDIT, by, why)
        if original not in ORIGINALS:
            raise InvalidRequest(f"original {original!r} must be one of: {', '.join(ORIGINALS)}", field="original")
        edit = _Edit(actor, why.strip(), original, acknowledge_delivered, again)
        found = gather(self.databases, message_id, largest=None)
        if found.unseen:
            raise DatabaseUnreached(list(found.unseen))
        if found.home is None or found.half is None:
            raise self.not_found(message_id)
        if version is not None and version != found.version:
            raise VersionMismatch(f"message {message_id} has changed since you looked at it; look again, then decide")
        _check_states(found, edit)
        new, raw = self._new_half(found, found.half, body)
        changes = self._changes(new.content_type, found.raw, raw)
        audited = {"copy": str(new.id), "original": original, "changes": changes}
        return self._send_copy(found, found.home, new, audited, edit)

    def _new_half(self, found: MessageFacts, half: Mapping[str, Any], body: str) -> tuple[HalfMessage, bytes]:
        """Return the copy, and its body as it is before it is compressed."""
        content_type, headers, home = half["content_type"], dict(half["headers"] or {}), found.home
        for of_original in (ENCODING_HEADER, DEDUPE_HEADER):
            headers.pop(of_original, None)
        raw = self._raw(body, content_type)
        if raw == found.raw:
            raise InvalidRequest("the body is the same; change it, or resend the message as it is", field="body")
        try:
            if (topic := self.topics.get(half["topic"])) is not None:
                topic.decode(raw, content_type, headers, self.codecs)
        except InvalidMessage as error:
            raise InvalidRequest(str(error), field="body") from None
        if home is not None and len(raw) > home.settings.max_body_bytes:
            most = home.settings.max_body_bytes
            raise InvalidRequest(f"the body has {len(raw)} bytes; at most {most} are allowed", field="body")
        stored = raw
        headers = {CONVERSATION_HEADER: str(found.id), **headers, COPY_HEADER: str(found.id)}
        if home is not None and 0 < home.settings.compress_above < len(raw):
            stored, encoding = compress(raw)
            headers |= {ENCODING_HEADER: encoding} if encoding else {}
        group, topic_name, key, tag = (half[name] for name in ("producer_group", "topic", "key", "tag"))
        return HalfMessage(uuid7(), group, topic_name, key, tag, headers, content_type, stored), raw

    def _raw(self, body: str, content_type: str) -> bytes:
        """Return the bytes of a body that an operator has written."""
        try:
            raw = body.encode()
            as_json = self.codecs.get(kind_of(content_type)) is not None
            value = json.loads(body, parse_float=Decimal) if as_json or is_json(content_type) else None
            if as_json:
                return self.codecs.encode(value, content_type)[0]
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the body isn't JSON: {error}", field="body") from None
        except InvalidMessage as error:
            raise InvalidRequest(str(error), field="body") from None
        if not is_json(content_type) and not content_type.startswith("text/"):
            raise InvalidRequest(
                f"a body of the type {content_type!r} can't be written as a text; have the application send it, or "
                "register a codec for it",
                field="body",
            )
        return raw

    def _send_copy(
        self, found: MessageFacts, home: Database, new: HalfMessage, audited: Mapping[str, Any], edit: _Edit
    ) -> Copy:
        sends = tuple((send["queue"], send["position"]) for send in found.sends)
        order = QuarantineOrder(
            found.id, new.topic, new.id, edit.actor.name, edit.why, dict(edit.actor.origin) or None, sends,
            source=found.source,
        )  # fmt: skip
        target = Target(found.id)
        quarantined: list[Database] = []
        why_not = "another transaction is working on it; try again"
        with unless_locked(lambda: ActRefused(f"{target} can't be edited: {why_not}")), home.acting() as connection:
            # One at a time: what one has quarantined, another one would take for its own, and see it released.
            execute(connection, take_lock(lock_key("edit", home.schema, str(found.id))))
            try:
                if edit.original == "quarantine":
                    for database in self.databases.having("consumer"):
                        quarantined.append(database)
                        _quarantine(database, order, edit)
                _write(connection, home, new, audited, edit, target)
            except BaseException:
                # A group that still comes to the original takes it as if nothing had been.
                for database in quarantined:
                    with database.engine.connect() as own:
                        release(own, database.schema, order)
                raise
        if edit.original == "discard":
            self._discard(found, edit)
        return Copy(new.id, f"message {found.id} is sent again with another body, as message {new.id}")

    def _changes(self, content_type: str, before: bytes, after: bytes) -> list[dict[str, str | None]] | None:
        """Return what differs between two bodies, each value as it may be shown; None where that can't be told."""
        if is_json(content_type):
            return self.redactor.changes(before, after)
        try:
            old, new = (self.codecs.as_json(raw, content_type) for raw in (before, after))
        except InvalidMessage:  # an original that can't be decoded: what differs isn't known, and the audit says so
            return None
        return None if old is None or new is None else self.redactor.changes(old, new)

    def _discard(self, found: MessageFacts, edit: _Edit) -> None:
        """Discard the original where it is parked."""
        request = requested(ACTS["discard"], edit.actor, edit.why, {})
        for database in self.databases.having("consumer"):
            parked = [
                Target(found.id, row.group)
                for row in found.inbox
                if row.database == database.name and row.status == Status.PARKED and row.discarded_at is None
            ]
            if parked:
                with database.acting() as connection:
                    apply(connection, database.settings, request, parked)


def _write(
    connection: Connection, home: Database, new: HalfMessage, audited: Mapping[str, Any], edit: _Edit, target: Target
) -> None:
    """Write the copy and the audit; until the commit a lock keeps others from sending or deciding the original."""
    state = lock(connection, home.settings, ACTS["resend"], [target], wait=True)[target].state or ""
    _check_state(target.message_id, state, edit)
    record = record_of(home.schema, EDIT.name, edit.actor, edit.why, target.message_id, audited)
    execute(connection, write_halves(home.schema, [(new, None)]), record)


def _quarantine(database: Database, order: QuarantineOrder, edit: _Edit) -> None:
    target, why_not = Target(order.message_id), "a handler is working on it at this moment; try again"
    with (
        unless_locked(lambda: ActRefused(f"{target} can't be edited: {why_not}")),
        database.engine.connect() as connection,
    ):
        found = quarantine(connection, database.schema, order, acknowledged=edit.acknowledged)
    if found.consumed and not edit.acknowledged:
        raise _took_effect(order.message_id, found.consumed)


def _took_effect(message_id: UUID, groups: Sequence[str]) -> ActRefused:
    return ActRefused(
        f"{Target(message_id)} can't be edited: it took effect in {', '.join(sorted(groups))}, which would have the "
        "effect of the copy as well; say so with acknowledge_delivered"
    )


def _check_states(found: MessageFacts, edit: _Edit) -> None:
    """Raise if the message can't be edited as its producer and its groups have it."""
    _check_state(found.id, found.state or "unknown", edit)
    if (consumed := [row.group for row in found.inbox if row.status == Status.CONSUMED]) and not edit.acknowledged:
        raise _took_effect(found.id, consumed)
    open_in = sorted(row.group for row in found.inbox if row.status == "unconsumed" or Status(row.status).alone)
    if edit.original == "discard" and open_in:
        raise ActRefused(
            f"{Target(found.id)} can't be edited and discarded: it may still take effect in {', '.join(open_in)}; have "
            "it quarantined instead"
        )


def _check_state(message_id: UUID, state: str, edit: _Edit) -> None:
    able = EDIT_STATES | ({"replaced"} if edit.again else frozenset())
    if state not in able:
        mend = "; a second one has the effect twice, unless the first is set aside: say so with again"
        why = STATES[state] + (mend if state == "replaced" else "")
        raise ActRefused(f"{Target(message_id)} can't be edited: {why}")


# --- notes on dead letters -----------------------------------------------------------------------------

_WRITE = Template("""
INSERT INTO {s}.dead_letter_note (consumer_group, topic, error_kind, note, owner, written_by)
VALUES (%(group)s, %(topic)s, %(kind)s, %(note)s, %(owner)s, %(by)s)
ON CONFLICT (consumer_group, topic, error_kind) DO UPDATE
   SET note = excluded.note, owner = excluded.owner, written_by = excluded.written_by, written_at = clock_timestamp()
""")
_DELETE = Template("""
DELETE FROM {s}.dead_letter_note
 WHERE consumer_group = %(group)s AND topic = %(topic)s AND error_kind = %(kind)s
""")


class Notes(Lists):
    """Write the notes of operators about dead letters."""

    def dead_group(self, fingerprint: str) -> DeadGroup:
        """Return the group of dead letters of a fingerprint, with its note.

        Raises:
            NotFound, DatabaseUnreached: as `note`.
        """

        def find(database: Database) -> DeadGroup | None:
            groups = self.dead_groups(database=database.name, limit=inbox_sql.MOST)
            return next((each for each in groups if each.fingerprint == fingerprint), None)

        return self.first_of("consumer", find, self._no_group(fingerprint))

    def note(self, fingerprint: str, *, by: str | Actor, why: str = "", note: str = "", owner: str = "") -> str:
        """Write a note about a group of dead letters, and its owner, over the last one; return a sentence.

        Both empty take it away. It stays while there are such dead letters, and for ``record_retention`` after that.

        Raises:
            NotFound: no registered database has dead letters of this fingerprint.
            DatabaseUnreached: one can't be read that may.
            InvalidRequest: more than 1,000 characters, or some that the database can't store.
        """
        actor, texts = checked_actor(NOTE, by, why), {"note": note.strip(), "owner": owner.strip()}
        for name, text in texts.items():
            if len(text) > LONGEST or storable(text) != text:
                raise InvalidRequest(
                    f"the {name} must have at most {LONGEST} characters, and none that the database can't store", name
                )

        def write_in(database: Database) -> str | None:
            with database.read_only() as connection:
                (kinds,) = execute(connection, inbox_sql.kinds(database.schema))
            for group, topic, kind in kinds:
                if fingerprint_of(database.name, group, topic, kind) != fingerprint:
                    continue
                values = {"group": group, "topic": topic, "kind": kind}
                written = {name: text or None for name, text in texts.items()}
                with database.acting() as connection:
                    write = _WRITE(database.schema, **values, **written, by=actor.name)
                    change = write if any(texts.values()) else _DELETE(database.schema, **values)
                    record = record_of(database.schema, NOTE.name, actor, why, fingerprint, values | written)
                    execute(connection, change, record)
                what = "is noted for" if any(texts.values()) else "is taken away from"
                return f"the note {what} dead letters of group {group}, topic {topic} ({kind})"
            return None

        return self.first_of("consumer", write_in, self._no_group(fingerprint))

    def _no_group(self, fingerprint: str) -> NotFound:
        return NotFound(
            f"no registered database ({', '.join(self.databases)}) has dead letters of the fingerprint "
            f"{fingerprint[:40]!r}; `outbox dead groups` lists those that there are"
        )
