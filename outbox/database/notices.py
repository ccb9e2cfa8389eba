"""The statements that write notices, in the transaction of what they tell: about messages of this database, or copied.

See `outbox.message.notice`. The half message and its op are written at once; a notice whose id is there already isn't
written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox.database.execute import Statement, Template
from outbox.message.content import (
    CAUSE_HEADER,
    CONVERSATION_HEADER,
    ENCODING_HEADER,
    NOTICE_HEADER,
    OPTION_HEADERS,
    SENDER_HEADER,
)
from outbox.message.notice import PARKED
from outbox.text import process_name

if TYPE_CHECKING:
    from outbox.message.model import Message

#: What writing notices needs.
NOTICES = """SELECT INSERT ON half_message
SELECT ON message
INSERT ON op_message
USAGE ON op_sequence"""


class Notice(NamedTuple):
    """A notice to be written: its id, the message that it is about, and what it tells of it."""

    id: UUID
    about: UUID
    facts: Mapping[str, Any]


# Each message is looked up by itself, in the one partition that can have it. The options of the sender aren't those of
# the notice: it asks for no answer, and doesn't expire.
_WRITE = Template(f"""
WITH notice AS (
    INSERT INTO {{s}}.half_message (id, producer_group, topic, key, tag, headers, content_type, body)
    SELECT n.id, h.producer_group, %(topic)s, h.id::text, %(tag)s,
           h.headers - %(options)s::text[] || jsonb_build_object(
               '{CONVERSATION_HEADER}', coalesce(h.headers ->> '{CONVERSATION_HEADER}', h.id::text),
               '{CAUSE_HEADER}', h.id, '{SENDER_HEADER}', %(process)s::text,
               '{NOTICE_HEADER}', (n.facts::jsonb || jsonb_build_object(
                   'id', h.id, 'topic', h.topic, 'key', h.key, 'tag', h.tag, 'born_at', h.born_at,
                   'queue', m.queue, 'position', m.position, 'visible_at', m.visible_at,
                   'options', (SELECT coalesce(jsonb_object_agg(name, value), '{{}}')
                                 FROM jsonb_each(h.headers) o (name, value)
                                WHERE name = ANY (%(options)s::text[]))))::text),
           h.content_type, h.body
      FROM unnest(%(ids)s::uuid[], %(about)s::uuid[], %(facts)s::text[]) WITH ORDINALITY n (id, about, facts, number)
     CROSS JOIN LATERAL (SELECT id, producer_group, topic, key, tag, coalesce(headers, '{{}}') AS headers,
                                content_type, body, born_at
                           FROM {{s}}.half_message WHERE id = n.about OFFSET 0) h
      LEFT JOIN LATERAL (SELECT queue, position, visible_at FROM {{s}}.message
                          WHERE half_id = n.about ORDER BY send_number LIMIT 1) m ON true
     ORDER BY n.number
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM notice
""")


def write_notices(schema: str, topic: str, group: str, notices: Sequence[Notice]) -> Statement:
    """Write notices to a topic, for a group; in their order, one for each id."""
    values = {"topic": topic, "tag": group, "options": sorted(OPTION_HEADERS), "process": process_name()}
    columns = {"ids": [each.id for each in notices], "about": [each.about for each in notices]}
    return _WRITE(schema, **values, **columns, facts=[json.dumps(each.facts) for each in notices])


# Not where another worker has settled the message meanwhile in another way. One that has parked it has told that, by
# the same id.
_WRITE_COPY = Template("""
WITH notice AS (
    INSERT INTO {s}.half_message (id, producer_group, topic, key, tag, headers, content_type, body)
    SELECT %(id)s::uuid, %(app)s, %(topic)s, %(key)s, %(tag)s, %(headers)s::text::jsonb, %(content_type)s,
           %(body)b::bytea
     WHERE EXISTS (SELECT FROM {s}.consumer_message
                    WHERE consumer_group = %(group)s AND message_id = %(about)s AND status = 'parked')
    ON CONFLICT DO NOTHING RETURNING id
)
INSERT INTO {s}.op_message (half_id, resolution, decided_by) SELECT id, 'commit', 'producer' FROM notice
""")


def write_parked(
    schema: str, app: str, notice: Notice, message: Message | None, *, topic: str, tag: str, group: str
) -> Statement:
    """Write the notice of an application that a message, which was read elsewhere, is parked in a group.

    Only if it is. ``message`` is None where it isn't known any more.
    """
    about, headers = str(notice.about), {} if message is None else message.headers
    facts: dict[str, Any] = {"id": about, "topic": topic, "position": None, **notice.facts}
    content_type, body = "application/json", b"null"
    own: dict[str, str] = {SENDER_HEADER: process_name(), CAUSE_HEADER: about}
    if message is not None:
        content_type, body = message.content_type, message.stored
        facts |= {"key": message.key, "tag": message.tag, "queue": message.queue, "position": message.position}
        facts |= {"born_at": message.born_at.isoformat(), "visible_at": message.visible_at.isoformat()}
        if message.encoding is not None:
            own[ENCODING_HEADER] = message.encoding
    # A character that this database has no code for must not keep the message from being parked: within the facts,
    # which are a text of their own, it is written in ASCII.
    plain = {
        name: value for name, value in headers.items() if name not in OPTION_HEADERS and f"{name}{value}".isascii()
    }
    facts["options"] = {name: value for name, value in headers.items() if name not in plain}
    own |= {CONVERSATION_HEADER: headers.get(CONVERSATION_HEADER, about), NOTICE_HEADER: json.dumps(facts)}
    return _WRITE_COPY(
        schema,
        id=notice.id,
        app=app,
        topic=PARKED,
        about=notice.about,
        key=about,
        tag=tag,
        group=group,
        headers=json.dumps({**plain, **own}),
        content_type=content_type,
        body=body,
    )
