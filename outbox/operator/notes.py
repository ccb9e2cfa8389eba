"""Keep the notes of operators about a kind of dead letters, and the name of its owner, for the next operator."""

from __future__ import annotations

from outbox.acts.changes import LONGEST, Actor, checked_actor, record_of
from outbox.acts.whole_acts import NOTE
from outbox.database.execute import Template, execute
from outbox.errors import InvalidRequest, NotFound
from outbox.operator.databases import Database
from outbox.operator.look import inbox_sql
from outbox.operator.look.lists import Lists, fingerprint_of
from outbox.operator.model import DeadGroup
from outbox.text import storable

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
