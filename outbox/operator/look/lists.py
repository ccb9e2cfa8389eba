"""The lists of messages, undecided halves, scheduled messages, inbox rows, dead letters and audited acts.

And what became of messages since operators acted on them: read from inboxes and producers, written nowhere.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.acts.changes import LONGEST, message_states
from outbox.acts.messages import ACTS
from outbox.database.execute import Row, execute, query
from outbox.errors import InvalidMessage, InvalidRequest
from outbox.message.compression import decompress
from outbox.message.masking import SecretNames, names_in
from outbox.message.model import Status
from outbox.operator import model
from outbox.operator.databases import CALLER, OverDatabases, read_each
from outbox.operator.look import inbox_sql, message_sql
from outbox.operator.look.inbox_sql import InboxQuery, Source
from outbox.operator.look.message_sql import LARGEST_BODY
from outbox.operator.look.paging import After, Part, SortOrder, checked, count_of, page_of
from outbox.operator.look.redactor import Redactor, has_at
from outbox.operator.look.unconsumed import unconsumed
from outbox.text import storable, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.operator.databases import Database, Databases

_TOPICS = "SELECT name FROM {s}.topic ORDER BY name LIMIT %(most)s"
#: Where a kind of error goes on with what an error hasn't.
_UNSAID = re.compile(r" in | of |\*\*\*|\N{HORIZONTAL ELLIPSIS}")
# Of few rows, in the order of the index: a page must not wait for them.
_KEYS = """
SELECT DISTINCT key FROM (SELECT key FROM {s}.half_message ORDER BY id DESC LIMIT %(most)s) n WHERE key IS NOT NULL
"""
_BY_ID: SortOrder[model.MessageRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
_OLDEST: SortOrder[model.HalfRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,), newest_first=False)
_DUE: SortOrder[model.ScheduledRow] = SortOrder(
    key=lambda row: (row.deliver_at, row.id), shape=(dt.datetime, UUID), newest_first=False
)
_RECALLED: SortOrder[model.ScheduledRow] = SortOrder(key=lambda row: (row.id,), shape=(UUID,))
# Within a database, ids are given in the order of time, but for acts at the same moment.
_BY_TIME: SortOrder[model.AuditRow] = SortOrder(
    key=lambda row: (row.acted_at,), shape=(int,), position=lambda row: (row.id,)
)

_LETTERS = 16
_BY_MESSAGE: SortOrder[model.InboxRow] = SortOrder(key=lambda row: (row.message_id, row.group), shape=(UUID, str))
_COLUMNS = len(fields(model.MessageRow)) - 1  # the database isn't read
_DEEPEST = 32


class Lists(OverDatabases):
    """Show lists to an operator; ``redactor`` masks the results of acts, as bodies are masked."""

    redactor: Redactor
    #: What searches mustn't find by, as it isn't shown.
    masking: SecretNames | None = None

    def messages(self, criteria: model.MessageFilter, page: model.PageRequest) -> model.Page[model.MessageRow]:
        """Return a page of the producers' messages that fit, the newest first.

        A page looks at a window of each database (`message_sql.WINDOW` messages, of the topic if one is given) at most,
        unless an index finds the matches: undecided and scheduled messages, and a key, unless its index was dropped.
        Bodies are compared here, `message_sql.BODIES` of them at a time, as far as `BodySearch` goes. With a
        group, see `outbox.operator.look.unconsumed`.
        """

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.MessageRow]:
            return _messages(connection, database, criteria, after[0] if after else None, limit, search)

        if check_messages(criteria).header is not None or criteria.body is not None:
            CALLER.get().search()
        if criteria.group is not None:
            return self.shown_texts(unconsumed(self.databases, criteria, page))
        search = partial(BodySearch, len(self.databases.having("producer", criteria.database)), self.masking)
        return self.shown_texts(page_of(self.databases, "producer", criteria, page, _BY_ID, read))

    def names(self, most: int = 200) -> dict[str, list[str]]:
        """Return what a filter may be about, ``most`` of each: topics, groups, keys, and kinds of errors.

        Topics and groups are the first by their names; keys and errors are those of the newest messages, and of the
        dead letters. Those of a database that can't be read are left out.
        """
        found: dict[str, set[str]] = {"topics": set(), "groups": set(), "sent_keys": set(), "errors": set()}

        def read(connection: Connection, database: Database) -> None:
            if "producer" in database.parts:
                found["topics"] |= {name for (name,) in query(connection, database.schema, _TOPICS, most=most)}
                found["sent_keys"] |= {key for (key,) in query(connection, database.schema, _KEYS, most=most)}
            if "consumer" in database.parts:
                for group, topic in query(connection, database.schema, inbox_sql.FIRST_NAMES, most=most):
                    found["topics" if group is None else "groups"].add(group or topic_of(topic))
                # As far as an error has its kind in it.
                for _, _, kind in execute(connection, inbox_sql.kinds(database.schema))[0]:
                    found["errors"].add(_UNSAID.split(self.shown(kind))[0].strip())

        read_each(self.databases.values(), read, [])
        return {kind: sorted(names - {""})[:most] for kind, names in found.items()}

    def fates_of(self, rows: Sequence[model.MessageRow]) -> dict[UUID, list[model.FateSince]]:
        """Return what became of the dispatched ones of these messages in each group that a registered database knows.

        Groups of a database that can't be read are left out.
        """
        found: dict[UUID, list[model.FateSince]] = {}
        for name in {row.database for row in rows}:
            sent = [row for row in rows if row.database == name and row.status == "dispatched"]
            acted = [ActedMessage("resend", row.id, None, row.topic, row.born_at) for row in sent]
            each, _ = fates(self.databases, self.databases[name], acted)
            found |= {row.id: one for row, one in zip(sent, each, strict=True) if one}
        return self.shown_texts(found)

    def halves(self, criteria: model.HalfFilter, page: model.PageRequest) -> model.Page[model.HalfRow]:
        """Return a page of the undecided halves that fit, the oldest first."""

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.HalfRow]:
            schema = database.schema
            (rows,) = execute(connection, message_sql.list_halves(schema, criteria, after[0] if after else None, limit))
            count = count_of(schema, "half_check") if criteria == model.HalfFilter(database=criteria.database) else None
            return Part.of(rows, 1, lambda row: model.HalfRow(database.name, *row), message_sql.HALF_WINDOW, count)

        return self.shown_texts(page_of(self.databases, "producer", checked(criteria), page, _OLDEST, read))

    def scheduled(self, criteria: model.ScheduledFilter, page: model.PageRequest) -> model.Page[model.ScheduledRow]:
        """Return a page of the scheduled messages that fit, the next due first; of recalled ones, the newest first."""
        order, width, window = _DUE, 2, message_sql.HALF_WINDOW
        if criteria.recalled:
            order, width, window = _RECALLED, 1, message_sql.RECALLED_WINDOW

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.ScheduledRow]:
            schema, every = database.schema, criteria == model.ScheduledFilter(database=criteria.database)
            (rows,) = execute(connection, message_sql.list_scheduled(schema, criteria, after, limit))
            count = count_of(schema, "scheduled_message", "recalled_at IS NULL") if every else None
            return Part.of(rows, width, lambda row: model.ScheduledRow(database.name, *row), window, count)

        return self.shown_texts(page_of(self.databases, "producer", checked(criteria), page, order, read))

    def audit(self, criteria: model.AuditFilter, page: model.PageRequest) -> model.Page[model.AuditRow]:
        """Return a page of what operators did, the newest first.

        A target that is a message's id also finds the acts on it in the inboxes of groups. Acts on a target are
        found by index, all others within a window of each database (`message_sql.AUDIT_WINDOW` acts).
        """

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.AuditRow]:
            schema, below = database.schema, after[0] if after else None
            targets = None if criteria.target is None else audit_targets(connection, database, criteria.target)
            (rows,) = execute(connection, message_sql.list_audit(schema, criteria, targets, below, limit))
            count = count_of(schema, "audit") if criteria == model.AuditFilter(database=criteria.database) else None
            return Part.of(rows, 1, lambda row: shown(audit_row(database.name, row)), message_sql.AUDIT_WINDOW, count)

        def shown(row: model.AuditRow) -> model.AuditRow:
            return replace(row, result=self.redactor.audited(row.result))

        return self.shown_texts(page_of(self.databases, None, checked(criteria), page, _BY_TIME, read))

    def inbox(self, criteria: model.InboxFilter, page: model.PageRequest) -> model.Page[model.InboxRow]:
        """Return a page of the inbox rows that fit, the newest id first, over all groups.

        Parked and failed rows are found by index, all others within a window of each database
        (`inbox_sql.WINDOW` rows; fewer where errors are searched).
        """

        def read(connection: Connection, database: Database, after: After, limit: int) -> Part[model.InboxRow]:
            if (query := query_in(connection, database, criteria)) is None:
                return Part([], count=0)
            return _rows(connection, database, query, (after[0], after[1]) if after else None, limit)

        if checked(criteria).error is not None:
            CALLER.get().search()
        return self.shown_texts(page_of(self.databases, "consumer", criteria, page, _BY_MESSAGE, read))

    def dead_groups(
        self, *, database: str | None = None, group: str | None = None, topic: str | None = None, limit: int = 200
    ) -> list[model.DeadGroup]:
        """Return the dead letters by group, topic and kind of error, the biggest group first, ``limit`` groups at most.

        Counts stop at 10,000, sooner where there are many kinds. Times are those of the oldest and newest messages.

        Raises:
            InvalidRequest: a limit below 1 or over 1,000, or a name that isn't one.
            UnknownDatabase: no database of this name is registered.
        """
        if not 1 <= limit <= inbox_sql.MOST:
            raise InvalidRequest(f"limit {limit} must be 1 to {inbox_sql.MOST}", field="limit")
        criteria = checked(model.InboxFilter(database=database, group=group, topic=topic))
        consumers = self.databases.having("consumer", database)
        found = [dead for each in consumers for dead in _dead_groups(each, criteria, limit)]
        found.sort(key=lambda dead: (-dead.count.value, dead.database, dead.group, dead.topic, dead.error_kind))
        return self.shown_texts(found[:limit])


#: How many bytes one page of a search through bodies may inflate, and for how long (seconds) it may compare them.
INFLATED_BYTES = 16 * LARGEST_BODY
SEARCH_SECONDS = 2.0


class BodySearch:
    """What one page of a search through bodies may still inflate in one of so many databases, and until when.

    Its rows are read before, and their connection is given back: inflating and comparing keep none from others.
    """

    def __init__(self, databases: int, masking: SecretNames | None = None) -> None:
        self.masking: SecretNames | None = masking
        self._left: int = max(INFLATED_BYTES // databases, LARGEST_BODY)
        self._until: float = time.monotonic() + SEARCH_SECONDS / databases

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent; raises as `Caller.check`."""
        CALLER.get().check()
        return self._left <= 0 or time.monotonic() >= self._until

    def opened(self, stored: bytes, encoding: str | None) -> bytes | None:
        """Return a body as it was sent; None where it can't be read, or is too large to be searched.

        Raises:
            InvalidMessage: it may be larger than the rest of the budget; the next page has a whole one.
        """
        limit = min(LARGEST_BODY, self._left)
        try:
            raw = decompress(stored, encoding, limit)
        except InvalidMessage:
            # So much may have been inflated before it failed.
            self._left -= limit
            if limit < LARGEST_BODY:
                raise
            return None
        self._left -= len(raw)
        return raw


# --- messages and acts ------------------------------------------------------------------------------------


def check_messages(criteria: model.MessageFilter) -> model.MessageFilter:
    """Return a filter of messages, or raise InvalidRequest if it isn't one."""
    criteria = checked(criteria)
    for name, pair in (("header", criteria.header), ("body", criteria.body)):
        if any(storable(text) != text or len(text) > LONGEST for text in pair or ()):
            raise InvalidRequest(f"{name} has more than {LONGEST} characters, or one that no stored text has", name)
    if criteria.body is not None:
        try:
            deepest = len(names_in(criteria.body[0]))
        except ValueError as error:
            raise InvalidRequest(str(error), field="body") from None
        if deepest > _DEEPEST:
            raise InvalidRequest(f"body path {criteria.body[0]!r} has more than {_DEEPEST} names", field="body")
    if criteria.group is not None and set(criteria.status) != {model.MessageFate.UNCONSUMED}:
        raise InvalidRequest(
            f"group {criteria.group!r} goes with status unconsumed alone; what it has consumed, failed or parked is in "
            "the list of its inbox",
            field="group",
        )
    if criteria.group is not None and criteria.body is not None:
        raise InvalidRequest("bodies can't be searched together with a group; leave one out", field="body")
    return criteria


def _messages(
    connection: Connection,
    database: Database,
    criteria: model.MessageFilter,
    after: UUID | None,
    limit: int,
    search: Callable[[], BodySearch],
) -> Part[model.MessageRow]:
    schema = database.schema
    by_key = _finds_by_key(connection, schema, criteria.key)
    many = limit if criteria.body is None else message_sql.BODIES
    (rows,) = execute(connection, message_sql.list_messages(schema, criteria, after, many, by_key=by_key))
    end, count, *_ = rows[0]
    found = [row[2:] for row in rows if row[2] is not None]
    searched = message_sql.window_of(criteria) if end else len(found)

    def shown(rows: Sequence[Row], searched: int, end: UUID | None) -> Part[model.MessageRow]:
        items = [model.MessageRow(database.name, *row[:_COLUMNS]) for row in rows[:limit]]
        stopped = (end,) if end and len(items) < limit else None
        return Part(items, searched, stopped, message_sql.count_messages(schema, criteria))

    if (condition := criteria.body) is None:
        return shown(found, searched, end)
    if count == many or len(found) < count:
        searched, end = len(found), found[-1][0]

    def compare() -> Part[model.MessageRow]:
        fitting, compared = _with_value(found, *condition, limit, search())
        if compared < len(found):
            return shown(fitting, compared, found[compared - 1][0])
        return shown(fitting, searched, end)

    return Part([], rest=compare)


def _with_value(found: Sequence[Row], path: str, value: str, limit: int, search: BodySearch) -> tuple[list[Row], int]:
    """Return the first ``limit`` rows whose bodies have a value, and how many were looked at: one at least."""
    fitting: list[Row] = []
    for number, row in enumerate(found):
        if len(fitting) >= limit or (number and search.is_over):
            return fitting, number
        try:
            raw = search.opened(row[_COLUMNS], row[_COLUMNS + 1])
        except InvalidMessage:  # the next page begins with this one
            return fitting, number
        if raw is not None and has_at(raw, path, value, search.masking):
            fitting.append(row)
    return fitting, len(found)


def _finds_by_key(connection: Connection, schema: str, key: str | None) -> bool:
    """Tell whether there is an index for the key, and not too many messages that have it."""
    if key is None or not query(connection, schema, message_sql.KEY_INDEX)[0][0]:
        return False
    (((count,),),) = execute(connection, message_sql.count_of_key(schema, key, message_sql.OF_KEY + 1))
    return bool(count <= message_sql.OF_KEY)


def audit_targets(connection: Connection, database: Database, target: str) -> list[str]:
    """Return under which targets a database records the acts on one: of a message also ``<group>/<id>``."""
    try:
        message_id = str(UUID(target))
    except ValueError:
        return [target]
    if "consumer" not in database.parts:
        return [message_id]
    groups = query(connection, database.schema, message_sql.KNOWN_GROUPS)
    return [message_id, *(f"{group}/{message_id}" for (group,) in groups)]


def audit_row(database: str, row: Row) -> model.AuditRow:
    """Return a row of `message_sql.list_audit` without its end as an `AuditRow`."""
    return model.AuditRow(database, *row[:-2], *(None if value is None else json.loads(value) for value in row[-2:]))


# --- inboxes ---------------------------------------------------------------------------------------------


def fingerprint_of(*kind: str) -> str:
    """Return a short name for the database, group, topic and kind of error of dead letters."""
    return hashlib.sha256("\0".join(kind).encode()).hexdigest()[:_LETTERS]


def _dead_groups(database: Database, criteria: model.InboxFilter, limit: int) -> list[model.DeadGroup]:
    schema, name, found = database.schema, database.name, []
    with database.read_only() as connection:
        counting = inbox_sql.counts(schema, criteria.group, criteria.topic, limit, model.COUNT_LIMIT)
        if not (counts := execute(connection, counting)[0]):
            return []
        groups, topics, kinds = ([row[column] for row in counts] for column in range(3))
        rows, parked, notes = execute(
            connection,
            inbox_sql.details(schema, groups, topics, kinds),
            inbox_sql.trends(schema),
            inbox_sql.notes(schema, groups=groups, topics=topics, kinds=kinds),
        )
    trends: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0] * inbox_sql.HOURS)
    for *names, hours_ago, parked_then in parked:
        trends[tuple(names)][-1 - hours_ago] = parked_then
    noted = {tuple(row[:3]): row[3:] for row in notes}
    for number, first_at, last_at, *sample in rows:
        group, topic, kind, value, most = counts[number - 1]
        fingerprint = fingerprint_of(name, group, topic, kind)
        count = model.Total(value, "gte" if value >= most else "eq")
        row = model.InboxRow(name, *sample)
        key = group, topic, kind
        times = first_at, last_at
        found.append(model.DeadGroup(fingerprint, name, *key, count, *times, row, trends[key], *noted.get(key, ())))
    return found


def query_in(connection: Connection, database: Database, criteria: model.InboxFilter) -> InboxQuery | None:
    """Return the query of a (checked) filter for one database; None if nothing in it can fit.

    The fingerprint becomes the group, topic and kind of error that it stands for; ``discarded`` asks for what is
    parked.
    """
    query = InboxQuery(**asdict(criteria), addresses=CALLER.get().addresses)
    statuses = set(query.status)
    if query.discarded or query.fingerprint is not None:
        if statuses and Status.PARKED not in statuses:
            return None
        statuses = {Status.PARKED}
    if query.fingerprint is not None:
        (kinds,) = execute(connection, inbox_sql.kinds(database.schema))
        found = (kind for kind in kinds if fingerprint_of(database.name, *kind) == query.fingerprint)
        group, topic, kind = next(found, (None, None, None))
        if group is None or query.group not in {None, group} or query.topic not in {None, topic}:
            return None
        query = replace(query, group=group, topic=topic, error_kind=kind)
    return replace(query, status=tuple(sorted(statuses)), error=query.error or None)


def _rows(
    connection: Connection, database: Database, query: InboxQuery, after: tuple[UUID, str] | None, limit: int
) -> Part[model.InboxRow]:
    """Search by each source, and put together the rows above the position at which one of them stopped."""
    schema, rows, stops = database.schema, [], []
    for part, source in _sources(connection, schema, query):
        if query.message_id is not None:
            statement = inbox_sql.rows_of(schema, part, query.message_id, after, limit, inbox_sql.SHORT_ROW)
        else:
            statement = inbox_sql.list_inbox(schema, part, source, after, limit)
        (found,) = execute(connection, statement)
        rows += [model.InboxRow(database.name, *row[2:]) for row in found if row[2] is not None]
        stops += [(row[0], row[1]) for row in found[:1] if row[0] is not None]
    stop = max(stops, default=None)
    rows.sort(key=_BY_MESSAGE.key, reverse=True)
    shown = [row for row in rows if stop is None or _BY_MESSAGE.key(row) >= stop][:limit]
    searched = inbox_sql.window_of(query) if stop else len(shown)
    return Part(shown, searched, stop if len(shown) < limit else None, inbox_sql.count(schema, query))


def _sources(connection: Connection, schema: str, query: InboxQuery) -> list[tuple[InboxQuery, Source]]:
    """Return by which indexes the rows are found; each with the statuses that it finds."""
    few: Source | None = "discarded" if query.discarded else None if query.error is None else "parked_few"
    by_status: dict[Status, tuple[Source | None, Source]] = {
        Status.PARKED: (few, "parked"),
        Status.FAILED: ("failed", "all"),
        Status.WAITING: ("waiting", "all"),
        Status.TAKEN: ("taken", "all"),
        Status.QUARANTINED: (None, "all"),
    }
    statuses = set(query.status)
    if query.message_id is not None or not statuses or statuses - by_status.keys():
        return [(query, "all")]
    return [
        (replace(query, status=(status,)), few if few and _are_few(connection, schema, query, few) else many)
        for status, (few, many) in by_status.items()
        if status in statuses
    ]


def _are_few(connection: Connection, schema: str, query: InboxQuery, source: Source) -> bool:
    most = inbox_sql.FEW_ROWS if query.error is None else inbox_sql.ERROR_WINDOW
    (((count,),),) = execute(connection, inbox_sql.count_few(schema, query, source, most + 1))
    return bool(count <= most)


# --- what became of messages since ----------------------------------------------------------------------

#: The acts after which groups have a message in their hands.
RETRIED = frozenset({"retry", "resend"})
_IN_GROUPS = frozenset({"resend", *(act.name for act in ACTS.values() if act.noun == "inbox")})

_WITH_ERROR = frozenset({*(each for each in Status if each.open), "discarded"})


@dataclass(frozen=True, slots=True)
class ActedMessage:
    """A message on which an act was done: in the inbox of a group, or (None) at its producer; when, by the database."""

    action: str
    message_id: UUID
    group: str | None
    topic: str | None
    acted_at: dt.datetime


def fates(
    databases: Databases, home: Database, acted: Sequence[ActedMessage]
) -> tuple[list[list[model.FateSince]], list[str]]:
    """Return what became of messages since acts that were done in a database, and which databases couldn't be read.

    After an act on an inbox: in that group. After a resend: in each group of the topic that a registered database
    knows; there the clocks of two databases are compared. After all other acts: at the producer.
    """
    found: list[list[model.FateSince]] = [[] for _ in acted]
    unreached = list(databases.away)
    by_producer = [number for number, each in enumerate(acted) if each.action not in _IN_GROUPS]
    if by_producer:
        with home.read_only() as connection:
            ids = [acted[number].message_id for number in by_producer]
            (rows,) = execute(connection, message_states(home.schema, ids))
        states = {message_id: state for message_id, state, _ in rows}
        for number in by_producer:
            found[number].append(model.FateSince(home.name, None, states[acted[number].message_id], None, None, None))
    for database in databases.having("consumer"):
        numbers = [
            number
            for number, each in enumerate(acted)
            if each.action in _IN_GROUPS and (each.group is None or database is home)
        ]
        if not numbers:
            continue
        read = read_each([database], partial(_in_groups, numbers=numbers, acted=acted), unreached)
        for number, fate in read.get(database.name, ()):
            found[number].append(fate)
    return found, unreached


def _in_groups(
    connection: Connection, database: Database, numbers: Iterable[int], acted: Sequence[ActedMessage]
) -> list[tuple[int, model.FateSince]]:
    schema, groups_of = database.schema, defaultdict(list)
    if topics := sorted({acted[number].topic or "" for number in numbers if acted[number].group is None}):
        for topic, group in query(connection, schema, inbox_sql.GROUPS_OF, topics=topics):
            groups_of[topic].append(group)
    pairs = [
        (number, group)
        for number in numbers
        for group in ([acted[number].group] if acted[number].group else groups_of[acted[number].topic or ""])
    ]
    values = {
        "groups": [group for _, group in pairs],
        "ids": [acted[number].message_id for number, _ in pairs],
        "times": [acted[number].acted_at for number, _ in pairs],
    }
    (rows,) = execute(connection, inbox_sql.since(schema, **values))
    return [
        (
            pairs[row][0],
            model.FateSince(
                database.name, group, status, at, *((kind, error) if status in _WITH_ERROR else (None, None))
            ),
        )
        for row, group, status, at, kind, error in rows
    ]
