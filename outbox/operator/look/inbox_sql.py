"""Statements that find rows of the inboxes by many conditions, and dead letters by group, topic and kind of error.

Each looks at a window at most. Dead letters are parked rows that aren't discarded.

The inbox's indexes begin with the group, so a list by the newest id is read place by place: group by group by the
primary key, or of what is parked by group and topic. All places are read in one statement, so in one snapshot.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from outbox.consumer.sql import HOLDS_KEY
from outbox.database.execute import Statement, Template, statement
from outbox.database.sql import ALONE, FEEDS, OFFSET_GROUPS, OPEN, SETTLED, jumps
from outbox.message.model import Status
from outbox.operator.look.paging import count_of, first_line, fitting
from outbox.operator.model import InboxFilter
from outbox.text import ADDRESS, OF_SOURCE

#: How many rows one search looks at; and where it looks into errors, which are long.
WINDOW = 10_000
ERROR_WINDOW = 4_000
#: How many rows of one place it looks at, however many places there are.
LEAST = 100
#: How many failed or discarded rows are all read, and sorted; of more, the newest are found soon by the primary key.
FEW_ROWS = 5_000

#: The kind of error of rows that have none.
UNCLASSIFIED = "unclassified"

#: Which index leads to the rows: that of the parked ones, place by place or (where they are few) all of them; that of
#: the failed, the waiting, the taken or the discarded ones, all of them; the primary key, group by group.
Source = Literal["parked", "parked_few", "failed", "waiting", "taken", "discarded", "all"]

FIRST_ID, LAST_ID = UUID(int=0), UUID(int=(1 << 128) - 1)

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
# An id has the time of the client's clock at which the message was handed over, ``born_at`` that of the database at the
# flush. So ids lie behind by the length of a transaction, and ahead only where a client's clock is wrong.
_BEHIND = dt.timedelta(days=1)
_AHEAD = dt.timedelta(minutes=5)
_KIND = f"coalesce(m.error_kind, '{UNCLASSIFIED}'::text)"

# Only ASCII letters are alike in both cases: by the rules of a language it would take five times as long.
_HOLDS = """strpos(lower(m.last_error COLLATE "C"), lower(%(error)s COLLATE "C")) > 0"""
_SHOWN_ERROR = r"regexp_replace(m.last_error, %(hidden)s, '\1***', 'g')"

# The first message of the key, as it is now: the one before it may wait itself.
_WAITS_FOR = f"""CASE WHEN m.follows AND m.status IN {OPEN} AND m.discarded_at IS NULL THEN (
           SELECT h.message_id FROM {{s}}.consumer_message h
            WHERE h.consumer_group = m.consumer_group AND h.topic = m.topic AND h.order_key = m.order_key
              AND {HOLDS_KEY}
            ORDER BY h.turn, h.position, h.message_id LIMIT 1) END"""
_ROW = f"""m.consumer_group, m.message_id, m.topic, m.queue, m.position, m.status, m.attempts, m.next_attempt_at,
       m.error_kind, {{error}}, m.received_at, m.changed_at, m.discarded_at, m.quarantined_by, {_WAITS_FOR},
       m.taken_by"""
#: The columns of an inbox row ``m``, with the first line of its error, and with all of it.
SHORT_ROW = _ROW.replace("{error}", first_line("m.last_error"))
FULL_ROW = _ROW.replace("{error}", "m.last_error")

_INBOX = "{s}.consumer_message"
_ONE_GROUP = "place AS (SELECT %(group)s::text AS consumer_group, ''::text AS topic)"

_OF_TOPIC = f"place AS (SELECT %(group)s::text AS consumer_group, unnest({FEEDS}) AS topic)"

#: The groups that have rows in the inbox.
GROUPS = jumps("place", _INBOX, "consumer_group", selected="consumer_group, ''::text AS topic")

# The rows after the position in one place. A tie in the id is looked at row by row; it is one row more than the share.
_IN_PAIR = """{s}.consumer_message m
             WHERE m.consumer_group = p.consumer_group AND {in_pair} AND m.message_id <= %(below)s::uuid
             ORDER BY m.message_id DESC"""

_LIST = f"""
WITH RECURSIVE {{places}}, chosen AS MATERIALIZED (
    SELECT * FROM place WHERE {{of_topic}}
), share AS (
    SELECT greatest(%(window)s / greatest(count(*), 1), %(least)s) + 1 AS rows FROM chosen
), found AS MATERIALIZED (
    SELECT p.consumer_group, p.topic, m.message_id FROM chosen p CROSS JOIN LATERAL (
        SELECT m.message_id FROM (
            SELECT * FROM {_IN_PAIR} LIMIT (SELECT rows FROM share)) m
         WHERE (m.message_id, m.consumer_group) < (%(below)s::uuid, %(group_below)s) AND {{where}}
         ORDER BY m.message_id DESC LIMIT %(limit)s) m
), full_place AS MATERIALIZED (
    SELECT consumer_group, topic FROM found GROUP BY consumer_group, topic HAVING count(*) = %(limit)s
), edge AS (
    SELECT e.message_id, p.consumer_group
      FROM chosen p CROSS JOIN LATERAL (
            SELECT m.message_id FROM {_IN_PAIR} OFFSET (SELECT rows FROM share) - 1 LIMIT 1) e
     WHERE (p.consumer_group, p.topic) NOT IN (SELECT consumer_group, topic FROM full_place)
     ORDER BY e.message_id DESC, p.consumer_group DESC LIMIT 1
)
SELECT e.message_id, e.consumer_group, {SHORT_ROW}
  FROM (SELECT 1) one LEFT JOIN edge e ON true
  LEFT JOIN (SELECT * FROM found ORDER BY message_id DESC, consumer_group DESC LIMIT %(limit)s) f ON true
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                      WHERE consumer_group = f.consumer_group AND message_id = f.message_id LIMIT 1) m ON true
 ORDER BY m.message_id DESC, m.consumer_group DESC
"""

# Few of many are found by an index of their own, and read by no order: all of them are.
_FEW = f"""
SELECT NULL::uuid, NULL, {SHORT_ROW}
  FROM (SELECT * FROM {{s}}.consumer_message m WHERE {{few}} {{of_group}} AND {{where}} OFFSET 0) m
 WHERE (m.message_id, m.consumer_group) < (%(below)s::uuid, %(group_below)s)
 ORDER BY m.message_id DESC, m.consumer_group DESC LIMIT %(limit)s
"""

_BY_ID = """
WITH RECURSIVE {places}
SELECT NULL::uuid, NULL, {row}
  FROM place p CROSS JOIN LATERAL (
        SELECT * FROM {s}.consumer_message
         WHERE consumer_group = p.consumer_group AND message_id = %(id)s LIMIT 1) m
 WHERE (m.message_id, m.consumer_group) < (%(below)s::uuid, %(group_below)s) AND {where}
 ORDER BY m.consumer_group DESC LIMIT %(limit)s
"""

_IN_SOURCE = {"parked": "m.topic = p.topic AND m.status = 'parked'", "all": "true"}
_ONLY = {
    "parked_few": "m.status = 'parked'",
    "failed": "m.status = 'failed'",
    "taken": "m.status = 'taken'",
    "waiting": "m.status = 'waiting' AND m.order_key IS NOT NULL AND m.discarded_at IS NULL",
    "discarded": "m.discarded_at IS NOT NULL",
}


@dataclass(frozen=True, slots=True)
class InboxQuery(InboxFilter):
    """A checked filter for one database: its fingerprint is replaced by the group, topic and error that it stands for.

    ``error_kind`` is that of rows which are parked and not discarded, `UNCLASSIFIED` where they have none.
    Without ``addresses`` an error is searched as it is shown: by the address in it nothing is found.
    """

    error_kind: str | None = None
    addresses: bool = True


def first_id(since: dt.datetime) -> UUID:
    """Return an id below those of all messages born at that time or later."""
    return _id_at(since, -_BEHIND)


def end_id(until: dt.datetime) -> UUID:
    """Return an id above those of all messages born before that time, unless a client's clock is ahead by minutes."""
    return _id_at(until, _AHEAD)


def _id_at(moment: dt.datetime, more: dt.timedelta) -> UUID:
    milliseconds = (moment - _EPOCH + more) // dt.timedelta(milliseconds=1)
    return UUID(int=max(0, min(milliseconds << 80, LAST_ID.int)))


_FITS = {
    "group": "m.consumer_group = %(group)s",
    "topic": f"m.topic = ANY ({FEEDS})",
    "message_id": "m.message_id = %(message_id)s",
    "error_kind": f"m.status = 'parked' AND m.discarded_at IS NULL AND {_KIND} = %(error_kind)s",
    "error": _HOLDS,
    "attempts_gte": "m.attempts >= %(attempts_gte)s",
    "since": "m.changed_at >= %(since)s",
    "until": "m.changed_at < %(until)s",
}


def address_sql() -> str:
    """Return the pattern of addresses as PostgreSQL has it; what it finds is masked as ``\\1***``."""
    return ADDRESS.pattern.replace(r"\b", r"\y")


def where(criteria: InboxQuery) -> tuple[str, dict[str, Any]]:
    """Return the condition over ``{s}.consumer_message m`` that a query stands for, and its values.

    Statuses are written out: the planner takes a partial index only where it sees that the condition implies its own.
    """
    condition, values = fitting(criteria, _FITS)
    if criteria.error is not None and not criteria.addresses:
        condition = condition.replace(_HOLDS, _HOLDS.replace("m.last_error", _SHOWN_ERROR))
        values["hidden"] = address_sql()
    if criteria.status:
        words = ", ".join(f"'{Status(status).value}'" for status in sorted(set(criteria.status)))
        condition += f" AND m.status IN ({words})"
    if criteria.discarded is not None:
        condition += f" AND m.discarded_at IS {'NOT NULL' if criteria.discarded else 'NULL'}"
    return condition, values


def list_inbox(
    schema: str, criteria: InboxQuery, source: Source, after: tuple[UUID, str] | None, limit: int
) -> Statement:
    """Find rows of the inboxes by one source, the newest id first, ties by the group, below ``after``.

    Rows: the id and the group at which the search stopped, and `SHORT_ROW`, with a group of None where nothing is
    found. Rows below the place at which it stopped aren't all there are.
    """
    condition, values = where(criteria)
    of_kind = criteria.error_kind is not None and source == "parked"
    return statement(
        schema,
        _FEW if source in _ONLY else _LIST,
        values | _below(criteria, after) | {"limit": limit, "window": window_of(criteria), "least": LEAST},
        places=_pairs(criteria, source),
        in_pair=f"m.topic = p.topic AND {_FITS['error_kind']}" if of_kind else _IN_SOURCE.get(source, ""),
        few=_ONLY.get(source, ""),
        of_group="" if criteria.group is None else "AND consumer_group = %(group)s",
        of_topic=f"topic = ANY ({FEEDS})" if source == "parked" and criteria.topic is not None else "true",
        where=condition,
    )


def _pairs(criteria: InboxQuery, source: Source) -> str:
    if source != "parked":
        return GROUPS if criteria.group is None else _ONE_GROUP
    if criteria.group is not None and criteria.topic is not None:
        return _OF_TOPIC
    return _topic_jumps("place", _INBOX, "topic", where="status = 'parked'", group=criteria.group)


def _topic_jumps(
    name: str, table: str, *keys: str, group: str | None, topic: str | None = None, where: str = "true"
) -> str:
    """Return the part of the values of ``keys``, the first of which is the topic, in all groups or in one.

    In one group, those of a topic and its feeds alone, and of few others.
    """
    if group is None:
        return jumps(name, table, "consumer_group", *keys, where=where)
    # Next to an equality on the group, a comparison of rows with a group in them would have it read from the group's
    # beginning each time.
    up_to, start = ("true", "true") if topic is None else (_UP_TO_FEEDS, "topic >= %(topic)s")
    where = f"{where} AND consumer_group = %(group)s AND {up_to}"
    return jumps(name, table, *keys, where=where, start=start, selected=", ".join(("consumer_group", *keys)))


def window_of(criteria: InboxQuery) -> int:
    """Return how many rows one search for these looks at."""
    return WINDOW if criteria.error is None else ERROR_WINDOW


def count_few(schema: str, criteria: InboxQuery, source: Source, most: int) -> Statement:
    """Count the rows that `list_inbox` would read by an index of few, ``most`` at most. Rows: ``(rows,)``."""
    condition = _ONLY[source] + ("" if criteria.group is None else " AND consumer_group = %(group)s")
    return count_of(schema, "consumer_message", condition, most, group=criteria.group)


def _below(criteria: InboxQuery, after: tuple[UUID, str] | None) -> dict[str, object]:
    # A row that was changed before a time was written before it.
    first = (end_id(criteria.until), "") if criteria.until is not None else (LAST_ID, "")
    below = first if after is None else min(first, after)
    return {"below": below[0], "group_below": below[1]}


def rows_of(
    schema: str, criteria: InboxQuery, message_id: UUID, after: tuple[UUID, str] | None, limit: int, row: str = FULL_ROW
) -> Statement:
    """Find one message in all inboxes. Rows: as of `list_inbox`; the error is as ``row`` has it."""
    condition, values = where(criteria)
    values |= _below(criteria, after) | {"id": message_id, "limit": limit}
    return statement(schema, _BY_ID, values, places=_pairs(criteria, "all"), row=row, where=condition)


def count(schema: str, criteria: InboxQuery) -> Statement | None:
    """Count rows; None where no index does: of what isn't parked, failed or discarded, and by other conditions."""
    others = (criteria.message_id, criteria.error, criteria.attempts_gte, criteria.since, criteria.until)
    indexed = len(criteria.status) == 1 and criteria.status[0] in {"parked", "failed"}
    by_pair = criteria.topic is None or criteria.group is not None
    if not (indexed and by_pair) or any(value is not None for value in others):
        return None
    condition, values = where(criteria)
    return count_of(schema, "consumer_message", condition, **values)


#: How many groups of dead letters a search knows, and how many rows it counts in all of them together.
MOST = 1_000
_COUNTED = 50_000
#: How many rows at either end of a group tell when its first and its last was parked.
_ENDS = 50

_DEAD_KIND = f"coalesce(c.error_kind, '{UNCLASSIFIED}'::text)"
_DEAD = "c.status = 'parked' AND c.discarded_at IS NULL"

_KINDS = """
WITH RECURSIVE {kinds}, chosen AS MATERIALIZED (
    SELECT * FROM (SELECT * FROM kind LIMIT %(most)s) k WHERE {of_topic}
)"""

# Behind a topic and its feeds in the index, and before all others but some with more of what isn't a letter.
_UP_TO_FEEDS = f"topic < %(topic)s || '{chr(ord(OF_SOURCE) + 1)}'"

_DEAD_LIST = f"{_KINDS} SELECT consumer_group, topic, kind FROM chosen"

_THESE = f"{_DEAD} AND c.consumer_group = k.consumer_group AND c.topic = k.topic AND {_DEAD_KIND} = k.kind"

_COUNTS = f"""{_KINDS}
SELECT k.consumer_group, k.topic, k.kind, n.count, n.most
  FROM chosen k CROSS JOIN LATERAL (
    SELECT count(*) AS count, (SELECT least(%(limit)s, greatest(%(counted)s / count(*), 100)) FROM chosen) AS most
      FROM (SELECT FROM {{s}}.consumer_message c WHERE {_THESE}
             LIMIT (SELECT least(%(limit)s, greatest(%(counted)s / count(*), 100)) FROM chosen)) c) n
 ORDER BY n.count DESC, 1, 2, 3 LIMIT %(groups)s
"""

_DETAILS = f"""
SELECT k.number, e.first, e.last, {SHORT_ROW}
  FROM unnest(%(consumer_groups)s::text[], %(topics)s::text[], %(kinds)s::text[]) WITH ORDINALITY
       k (consumer_group, topic, kind, number)
  CROSS JOIN LATERAL (
    SELECT * FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id DESC LIMIT 1) m
  CROSS JOIN LATERAL (
    SELECT min(changed_at) AS first, max(changed_at) AS last FROM (
        (SELECT changed_at FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id LIMIT %(ends)s)
        UNION ALL
        (SELECT changed_at FROM {{s}}.consumer_message c WHERE {_THESE} ORDER BY c.message_id DESC LIMIT %(ends)s)) t) e
 ORDER BY k.number
"""


def kinds(schema: str, group: str | None = None, topic: str | None = None) -> Statement:
    """Find which kinds of dead letters there are, `MOST` at most. Rows: ``(group, topic, kind)``."""
    return _of_kinds(_DEAD_LIST, schema, group, topic, {})


def counts(schema: str, group: str | None, topic: str | None, groups: int, limit: int) -> Statement:
    """Count dead letters by their kind, the most first, ``groups`` kinds at most.

    Rows: ``(group, topic, kind, count, where the count stopped at most)``; the more kinds, the sooner it stops.
    """
    return _of_kinds(_COUNTS, schema, group, topic, {"groups": groups, "limit": limit, "counted": _COUNTED})


def details(schema: str, groups: list[str], topics: list[str], kinds: list[str]) -> Statement:
    """Read the newest of each kind, and when the first and the last were parked, as told by the oldest and newest ids.

    Rows: ``(number from 1, first, last, group, id, topic, …)`` as of `list_inbox`; none for a
    kind that has gone meanwhile.
    """
    ends = max(1, min(_ENDS, 10_000 // max(len(groups), 1)))
    values = {"consumer_groups": groups, "topics": topics, "kinds": kinds, "ends": ends}
    return statement(schema, _DETAILS, values)


#: So many hours are told of dead letters, and so many failed attempts are looked at for that.
HOURS = 24
ATTEMPTS = 20_000

#: How many messages were parked, by group, topic and kind, in each of the last hours.
#: Rows: ``(group, topic, kind, hours ago, count)``.
trends: Template = Template(f"""
SELECT consumer_group, topic, kind, hours_ago, count(*)::int
  FROM (SELECT consumer_group, topic, status, coalesce(error_kind, '{UNCLASSIFIED}') AS kind,
               floor(extract(epoch FROM statement_timestamp() - failed_at) / 3600)::int AS hours_ago
          FROM {{s}}.attempt_history
         WHERE failed_at > statement_timestamp() - interval '{HOURS} hours'
         ORDER BY failed_at DESC LIMIT {ATTEMPTS}) a
 WHERE status = 'parked' AND hours_ago BETWEEN 0 AND {HOURS - 1}
 GROUP BY 1, 2, 3, 4
""")

#: Notes about kinds of dead letters. Rows: ``(group, topic, kind, note, owner, written by, written at)``.
notes: Template = Template("""
SELECT n.consumer_group, n.topic, n.error_kind, n.note, n.owner, n.written_by, n.written_at
  FROM unnest(%(groups)s::text[], %(topics)s::text[], %(kinds)s::text[]) k (consumer_group, topic, kind)
  JOIN {s}.dead_letter_note n
    ON n.consumer_group = k.consumer_group AND n.topic = k.topic AND n.error_kind = k.kind
""")


def _of_kinds(sql: str, schema: str, group: str | None, topic: str | None, values: dict[str, object]) -> Statement:
    of_topic = f"topic = ANY ({FEEDS})" if topic is not None else "true"
    values |= {"group": group, "topic": topic, "most": MOST}
    found = _topic_jumps(
        *("kind", f"{_INBOX} c", "topic", f"{_DEAD_KIND} AS kind"), where=_DEAD, group=group, topic=topic
    )
    return statement(schema, sql, values, kinds=found, of_topic=of_topic)


# --- what became of messages since ----------------------------------------------------------------------

#: The groups that read any of these topics, or a feed of one. Rows: ``(topic, group)``.
GROUPS_OF = f"""{OFFSET_GROUPS}
SELECT t.topic, one.consumer_group FROM one CROSS JOIN unnest(%(topics)s::text[]) t (topic)
 WHERE EXISTS (SELECT FROM {{s}}.consumer_offset o WHERE o.consumer_group = one.consumer_group AND o.topic = t.topic)
    OR EXISTS (SELECT FROM {{s}}.consumer_offset o WHERE o.consumer_group = one.consumer_group
                  AND o.topic > t.topic || '{OF_SOURCE}' AND o.topic < t.topic || '{chr(ord(OF_SOURCE) + 1)}')
 ORDER BY 1, 2
"""
_OFFSETS = """
WITH RECURSIVE {places}
SELECT p.topic, p.queue, (SELECT max(position) FROM {s}.consumer_offset o
                           WHERE o.consumer_group = %(group)s AND o.topic = p.topic AND o.queue = p.queue)
  FROM place p ORDER BY 1, 2
"""


def offsets(schema: str, group: str, topic: str | None) -> Statement:
    """Find how far a group has read the queues of all its topics, or of one. Rows: ``(topic, queue, position)``."""
    found = _topic_jumps("place", "{s}.consumer_offset", "topic", "queue", group=group, topic=topic)
    return statement(schema, _OFFSETS, {"group": group, "topic": topic}, places=found)


#: The first groups, and the first topics that groups read, ``most`` of each. Rows: ``(group or NULL, topic or NULL)``.
FIRST_NAMES = f"""{OFFSET_GROUPS}, {jumps("pair", "{s}.consumer_offset", "consumer_group", "topic")}
(SELECT consumer_group, NULL FROM one LIMIT %(most)s) UNION ALL (SELECT NULL, topic FROM pair LIMIT %(most)s)
"""

#: Which of these messages a group is done with, or will try by itself: they failed, or wait. Rows: ``(id,)``.
met: Template = Template(f"""
SELECT w.id FROM unnest(%(ids)s::uuid[]) w (id)
 CROSS JOIN LATERAL (SELECT status FROM {{s}}.consumer_message
                      WHERE consumer_group = %(group)s AND message_id = w.id LIMIT 1) m
 WHERE m.status IN {ALONE} OR m.status IN {SETTLED}
""")

#: What became of messages in groups since acts, each at its time.
#: Rows: ``(number from 0, group, status, changed at, kind of error, first line of the error)``.
# A retry makes a message due, and so does a resend when its group comes to it: only an attempt since then says that it
# has failed again. A message that is still parked from before waits for its group to come to the resend.
since: Template = Template(f"""
SELECT w.number::int - 1, w.consumer_group,
       CASE WHEN m.message_id IS NULL THEN 'unconsumed'
            WHEN m.discarded_at IS NOT NULL THEN 'discarded'
            WHEN m.status IN {SETTLED} THEN m.status
            WHEN a.failed_at IS NOT NULL THEN m.status
            WHEN m.status = 'parked' AND m.changed_at > w.acted_at THEN 'parked'
            ELSE 'pending' END,
       m.changed_at, m.error_kind, {first_line("m.last_error")}
  FROM unnest(%(groups)s::text[], %(ids)s::uuid[], %(times)s::timestamptz[]) WITH ORDINALITY
       w (consumer_group, id, acted_at, number)
  LEFT JOIN LATERAL (SELECT * FROM {{s}}.consumer_message
                      WHERE consumer_group = w.consumer_group AND message_id = w.id LIMIT 1) m ON true
  LEFT JOIN LATERAL (SELECT failed_at FROM {{s}}.attempt_history h
                      WHERE h.message_id = w.id AND h.consumer_group = w.consumer_group AND h.failed_at > w.acted_at
                      ORDER BY failed_at DESC LIMIT 1) a ON true
 ORDER BY w.number
""")
