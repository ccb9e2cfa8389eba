"""Acts on a group as a whole: have it read again, have it skip a backlog, delete one that is gone.

A **reset** moves the group back in each queue that is ahead of where it is to go on; a **skip** moves it ahead in each
queue that is behind that. Both begin the group's next passage (`outbox.consumer.passage`): nothing in the inbox is
changed by that. A reset is undone by a skip to where the group was, as far as it hasn't read on.

**The races.** Both take the group's lock, as a worker does that starts: of two acts on a group, or an act and a start,
one comes after the other. Then they take the locks of the queues, in order: a worker has one while it handles messages,
so that its transaction has ended by then. The group's offsets are read after that. The worker drops what it has read
ahead, since the offset isn't where it left it. A handler that holds a queue for `outbox.operator.databases.PATIENCE`
seconds has the act refused, and nothing is changed.

The producer is asked before: a consumer finds a message missing that it prunes meanwhile, and stops.
"""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from outbox.acts.changes import Actor, Declaration, checked_actor, record_of, unless_locked
from outbox.acts.whole_acts import DELETE_GROUP, RESET_GROUP, SKIP_GROUP
from outbox.consumer.start import StartPosition, start_positions
from outbox.database.execute import Template, by_size, execute, lock_key
from outbox.database.sql import FEEDS, GROUP_QUEUES, NOW, GroupQueue, take_lock, topic_sql
from outbox.errors import ActRefused, InvalidRequest
from outbox.message.limits import STARTS, is_start, start_from_text
from outbox.message.model import number_of
from outbox.operator.control import GroupControl, controls_in, knowing, no_group
from outbox.operator.databases import CALLER, PATIENCE, Database
from outbox.operator.health import sql as health_sql
from outbox.operator.health.overview import GroupLag, HealthViews
from outbox.operator.health.workers import CONSUMING, consuming, merged, workers_in
from outbox.operator.sources import SourceIdentity, identity_of, met_in, source_of
from outbox.reader import DURATION, seconds_of
from outbox.text import counted, fields_of, topic_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.message.model import Start

#: How long (seconds) messages and inbox rows may be counted.
_COUNTING = 60.0
#: Longer ago (seconds) there was no message.
_OLDEST = 100 * 365 * 86_400.0
#: Days whose start is a place to go on: how long before today they began.
_DAYS = {"today": dt.timedelta(), "yesterday": dt.timedelta(days=1)}
#: Inbox rows that are deleted in one transaction.
_BATCH = 10_000
#: So many clients are named in a refusal.
_NAMED = 3

# --- in the producer's database --------------------------------------------------------------------------------------

#: Count the messages of each queue after a position and up to another one. Rows: ``(queue, messages)``.
_MESSAGES_BETWEEN = Template("""
SELECT r.queue, (SELECT count(*) FROM {s}.message m
                  WHERE m.topic = %(topic)s AND m.queue = r.queue AND m.position > r.after AND m.position <= r.until)
  FROM unnest(%(queues)s::int[], %(after)s::bigint[], %(until)s::bigint[]) r (queue, after, until)
""")

#: Forget what confirm knows of a group as a whole.
_DELETE_DELIVERY_CURSORS = Template("""
DELETE FROM {s}.delivery_cursor WHERE topic = %(topic)s AND consumer_group = %(group)s
""")

# --- in the consumer's database --------------------------------------------------------------------------------------

# One that was deleted halfway has inbox rows only.
#: Tell whether the database knows a group of a topic. Rows: ``(known,)``.
_KNOWS_GROUP = Template(f"""
SELECT EXISTS (SELECT FROM {{s}}.consumer_offset WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS}))
    OR EXISTS (SELECT FROM {{s}}.consumer_message WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS}))
""")

#: Read how far a group is in each queue that it has an offset of. Rows: ``(queue, position)``.
_POSITIONS = Template(f"""{GROUP_QUEUES}
SELECT p.queue, (SELECT max(position) FROM {{s}}.consumer_offset o
                  WHERE o.consumer_group = p.consumer_group AND o.topic = p.topic AND o.queue = p.queue)
  FROM place p WHERE p.consumer_group = %(group)s AND p.topic = %(topic)s
 ORDER BY 1
""")

#: Read how often operators moved each group, and when last. Rows: ``(group, topic, passages, when)``.
_PASSAGES = Template(f"""
SELECT consumer_group, {topic_sql("topic")}, count(DISTINCT (topic, passage))::int, max(began_at)
  FROM {{s}}.consumer_passage GROUP BY 1, 2
""")

#: The owner that the newest note about dead letters of a group and topic names. Rows: ``(group, topic, owner)``.
_OWNERS = Template("""
SELECT DISTINCT ON (consumer_group, topic) consumer_group, topic, owner
  FROM {s}.dead_letter_note WHERE owner IS NOT NULL ORDER BY consumer_group, topic, written_at DESC
""")

#: Read under which names a group keeps what it has read of a topic. Rows: ``(name,)``.
_FEEDS = Template(f"""{GROUP_QUEUES}
SELECT DISTINCT topic FROM place WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS})
""")

# As in the consumer's `drop_starts`, a prune waits that was about to delete the row that is written. A worker that
# handles messages outside of transactions holds no lock meanwhile: by a newer lease it finds that its results count no
# more.
#: Move a group in some queues, whose locks are held: that begins its next passage. Rows: ``(passage,)`` for each queue.
_MOVE = Template("""
WITH moved AS (
    SELECT queue, former, position, message_id,
           (SELECT coalesce(max(passage), 0) + 1 FROM {s}.consumer_passage
             WHERE consumer_group = %(group)s AND topic = %(topic)s)::smallint AS passage
      FROM unnest(%(queues)s::int[], %(formers)s::bigint[], %(positions)s::bigint[], %(ids)s::uuid[])
           m (queue, former, position, message_id)
), dropped AS (
    DELETE FROM {s}.consumer_offset o USING moved m
     WHERE o.consumer_group = %(group)s AND o.topic = %(topic)s AND o.queue = m.queue
       AND (o.position > m.position OR (o.position = m.position AND o.starts > 0))
), stopped AS (
    INSERT INTO {s}.consumer_lease (consumer_group, topic, queue, term, renewal, worker, started, until)
    SELECT %(group)s, %(topic)s, m.queue, k.term + 1, 0, NULL, k.started, clock_timestamp()
      FROM moved m CROSS JOIN LATERAL (
           SELECT term, started FROM {s}.consumer_lease k
            WHERE k.consumer_group = %(group)s AND k.topic = %(topic)s AND k.queue = m.queue
            ORDER BY term DESC, renewal DESC LIMIT 1) k
), noted AS (
    INSERT INTO {s}.consumer_passage (consumer_group, topic, queue, passage, former, position)
    SELECT %(group)s, %(topic)s, queue, passage, former, position FROM moved
), written AS (
    INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts, message_id, passage)
    SELECT %(group)s, %(topic)s, queue, position, 0, message_id, passage FROM moved
    ON CONFLICT (consumer_group, topic, queue, position, starts)
    DO UPDATE SET written_at = clock_timestamp(), message_id = excluded.message_id, passage = excluded.passage
)
SELECT passage FROM moved
""")

#: Count the messages of a topic in the inbox of a group. Rows: ``(status, messages)``.
_CONTENTS = Template(f"""
SELECT CASE WHEN discarded_at IS NULL THEN status ELSE 'discarded' END, count(*) FROM {{s}}.consumer_message
 WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS}) GROUP BY 1 ORDER BY 1
""")

#: Each deletes, in one table, the rows that make a group known, or that are kept about it as a whole.
_FORGET_GROUP = tuple(
    Template(f"DELETE FROM {{s}}.{table} WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS})")
    for table in (
        "consumer_offset",
        "consumer_lease",
        "consumer_start",
        "consumer_passage",
        "group_control",
        "rate_grant",
        "segment_hold",
        "log_loss",
        "dead_letter_note",
        "reconciliation_settled",
        "reconciliation_mark",
    )
)

# Each partition has ctids of its own.
#: Delete some of the inbox rows of a group, and some of those of earlier passages. Rows: one for each.
_DELETE_ROWS = tuple(
    Template(f"""
DELETE FROM {{s}}.{table}
 WHERE (tableoid, ctid) IN (SELECT tableoid, ctid FROM {{s}}.{table}
                             WHERE consumer_group = %(group)s AND topic = ANY ({FEEDS}) LIMIT %(limit)s) RETURNING 1
""")
    for table in ("consumer_message", "reread_message")
)


@dataclass(frozen=True, slots=True)
class GroupRow(GroupControl):
    """A group of a topic, from all of its sources, with what holds it back.

    ``owner`` is the person or team that a note names for its dead letters, the last one written.
    ``eta`` is in how many seconds it has caught up as it goes now; None where it doesn't, or that isn't known.

    ``lag`` is None where the database of a producer isn't known.

    ``oldest_lag`` is for how many seconds the oldest of these messages has waited; None also where the
    producer's tables are in another database.

    ``workers`` consume for it now. ``passages`` is how often operators have moved it, ``moved_at`` when last.
    """

    columns: ClassVar[str] = (
        "group topic state rate owner lag> oldest>=oldest_lag eta> failed> parked> workers> openings> "
        "passages> moved=moved_at because"
    )
    owner: str | None
    lag: int | None
    oldest_lag: float | None
    eta: float | None
    failed: int
    parked: int
    workers: int
    passages: int
    moved_at: dt.datetime | None


@dataclass(frozen=True, slots=True)
class QueueMove:
    """How a group is moved in one queue: from the position ``former`` to ``position``, over so many messages."""

    queue: int
    former: int
    position: int
    messages: int


@dataclass(frozen=True, slots=True)
class GroupMove:
    """Tell what an act would do to a group: in which queues it moves it, and over how many messages in all.

    ``source`` is the producer's database. ``missing`` messages were pruned, or may have been, and can't be read again.
    """

    database: str
    source: str
    group: str
    topic: str
    queues: list[QueueMove]
    messages: int
    missing: int

    @property
    def reach(self) -> int:
        """How many messages it touches."""
        return self.messages

    @property
    def refusal(self) -> str:
        """Why the act would be refused; empty where it wouldn't."""
        return "" if self.queues else "there is nothing to do: it is there already"


@dataclass(frozen=True, slots=True)
class GroupContents:
    """Count what goes with a deleted group: its inbox rows by status.

    ``workers`` are the names of the processes that consume for it, ``clients`` the ids of RocketMQ's clients that do so
    by such a process; a client that isn't listed there may have received a moment ago.
    """

    database: str
    group: str
    topic: str
    inbox: dict[str, int]
    workers: list[str]
    clients: list[str]

    @property
    def reach(self) -> int:
        """How many messages it touches."""
        return sum(self.inbox.values())

    @property
    def refusal(self) -> str:
        """Why the act would be refused; empty where it wouldn't."""
        if not self.workers:
            return ""
        mend = "take its consumer out of the application, or stop its RocketMQ clients, first"
        more = ", …" if len(self.clients) > _NAMED else ""
        named = f"{counted(len(self.clients), 'RocketMQ client')}: {', '.join(self.clients[:_NAMED])}{more}"
        return f"{', '.join(self.workers)} consumes for it{f' ({named})' if self.clients else ''}; {mend}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a group is to go on, as its producer's database says."""

    act: Declaration
    consumer: Database
    source: Database
    group: str
    topic: str
    feed: str
    starts: Sequence[StartPosition]

    @property
    def pair(self) -> dict[str, str]:
        """The group and its topic, as it keeps it, as values of statements."""
        return {"group": self.group, "topic": self.feed}

    @property
    def name(self) -> str:
        """The group and its topic, as a sentence names them."""
        return f"group {self.group!r} of topic {self.topic!r}"

    def moves(self, positions: Mapping[int, int]) -> list[tuple[StartPosition, QueueMove]]:
        """Return how the group is moved in each queue in which it is, as far as it is now."""
        found = []
        for start in self.starts:
            former = positions.get(start.queue, 0)
            if start.position < former if self.act is RESET_GROUP else start.position > former:
                over = abs(number_of(former) - number_of(start.position))
                found.append((start, QueueMove(start.queue, former, start.position, over)))
        return found


class Groups(HealthViews):
    """Show groups to an operator, and act on them."""

    def groups(self, database: str | None = None) -> list[GroupRow]:
        """Return the groups of all databases, or of one: how far each is behind, what holds it back, how it was moved.

        Raises:
            UnknownDatabase: no database of that name.
        """
        overview = self.overview()
        facts: dict[tuple[str, str, str], dict[str, Any]] = {}
        for each in self.databases.having("consumer", database):
            if each.name in overview.unreachable:
                continue
            with each.read_only() as connection:
                controls = controls_in(connection, each)
                moved, owned = execute(connection, _PASSAGES(each.schema), _OWNERS(each.schema))
            owners = {(topic, group): owner for group, topic, owner in owned}
            moves = {(topic, group): rest for group, topic, *rest in moved}
            for row in controls:
                pair = row.topic, row.group
                passages, moved_at = moves.get(pair, (0, None))
                more = {"passages": passages, "moved_at": moved_at, "owner": owners.get(pair)}
                facts[each.name, *pair] = {**fields_of(row), **more}
        lags: dict[tuple[str, str, str], list[GroupLag]] = defaultdict(list)
        for lag in (lag for topic in overview.topics for lag in topic.groups):
            lags[lag.database, topic_of(lag.topic), lag.group].append(lag)
        rows = []
        for key, of_sources in lags.items():
            # One that began since isn't among them yet.
            if known := facts.get(key):
                waits = [each.oldest_lag for each in of_sources if each.oldest_lag is not None]
                behind = [each.lag for each in of_sources if each.lag is not None]
                etas = [each.eta for each in of_sources if each.lag]
                if known["state"] == "running" and not any(each.attended for each in of_sources):
                    known["state"] = "unattended"
                shown = GroupRow(
                    **known,
                    lag=sum(behind) if len(behind) == len(of_sources) else None,
                    oldest_lag=max(waits, default=None),
                    eta=None if None in etas else max(filter(None, etas), default=None),
                    failed=sum(each.failed for each in of_sources),
                    parked=sum(each.parked for each in of_sources),
                    workers=of_sources[0].workers,
                )
                rows.append(shown)
        return self.shown_texts(rows)

    def preview_reset(
        self, group: str, topic: str, to: Start | str, *, database: str | None = None, source: str | None = None
    ) -> GroupMove:
        """Return what a reset would do; writes nothing. For the arguments and errors see `reset_group`."""
        return self._preview(self._plan(RESET_GROUP, group, topic, to, database, source))

    def reset_group(
        self,
        group: str,
        topic: str,
        to: Start | str,
        *,
        by: str | Actor,
        why: str,
        skip_pruned: bool = False,
        database: str | None = None,
        source: str | None = None,
    ) -> str:
        """Have a group read a topic again from ``to`` on; return a sentence about it.

        It handles again all messages that it had consumed, failed or parked there, but no quarantined, discarded or
        compensated one. ``to`` is a `Start`, or a text (`outbox.consumer.start.start_from_text`), also an age: 3d.
        ``database`` is the group's, ``source`` that of the producer, where they can't be told.

        Raises:
            NotFound: no database that can be read knows the group and the topic.
            ActRefused: it isn't ahead of that; or it is busy; or messages of then were pruned, and that isn't accepted
                by ``skip_pruned``.
            InvalidRequest: no reason, something that isn't a `Start`, or several databases that it could be.
            DatabaseUnreached: a database can't be read that may know it.
        """
        plan = self._plan(RESET_GROUP, group, topic, to, database, source)
        return self._move(plan, by, why, skip_pruned=skip_pruned)

    def preview_skip(
        self, group: str, topic: str, to: Start | str = "now", *, database: str | None = None, source: str | None = None
    ) -> GroupMove:
        """Return what a skip would do; writes nothing. For the arguments and errors see `skip_group`."""
        return self._preview(self._plan(SKIP_GROUP, group, topic, to, database, source))

    def skip_group(
        self,
        group: str,
        topic: str,
        to: Start | str = "now",
        *,
        by: str | Actor,
        why: str,
        database: str | None = None,
        source: str | None = None,
    ) -> str:
        """Have a group leave out the messages that it hasn't read yet, up to ``to``; return a sentence about it.

        It never handles them, unless it is reset; its producer and reconciliations take them for left out. Failed and
        parked messages stay so. For the arguments and errors see `reset_group`.
        """
        plan = self._plan(SKIP_GROUP, group, topic, to, database, source)
        return self._move(plan, by, why, skip_pruned=True)

    def preview_delete(self, group: str, topic: str, *, database: str | None = None) -> GroupContents:
        """Return what would be deleted with a group; writes nothing. For errors see `delete_group`."""
        return _contents(self._whole_group(group, topic, database), group, topic)

    def delete_group(self, group: str, topic: str, *, by: str | Actor, why: str, database: str | None = None) -> str:
        """Delete a group of a topic that is gone, with its inbox; return a sentence about it.

        It holds no messages of its producer any more, and is in no list and no statistics. Should it come back, it
        begins anew, and handles again what its producer still has. One that is interrupted is done again.

        Raises:
            NotFound: no database that can be read knows the group and the topic.
            ActRefused: a worker consumes for it, or it is busy.
            InvalidRequest: no reason, several databases that it could be, or a topic of one source (``orders@1``).
        """
        actor, pair = checked_actor(DELETE_GROUP, by, why), {"group": group, "topic": topic}
        consumer = self._whole_group(group, topic, database)
        contents = _contents(consumer, group, topic)
        if contents.workers:
            raise ActRefused(f"group {group!r} of topic {topic!r} isn't gone: {contents.refusal}")
        with unless_locked(partial(busy, f"group {group!r} of topic {topic!r}")), consumer.acting() as connection:
            for feed in sorted({topic, *(feed for (feed,) in execute(connection, _FEEDS(consumer.schema, **pair))[0])}):
                _lock_group(connection, consumer.schema, group, feed)
            forget = [each(consumer.schema, **pair) for each in _FORGET_GROUP]
            target = f"{group}/{topic}"
            record = record_of(consumer.schema, DELETE_GROUP.name, actor, why, target, contents.inbox)
            execute(connection, *forget, record)
        for old in _DELETE_ROWS:

            def delete(size: int, old: Template = old) -> tuple[int, bool]:
                with consumer.acting() as connection:
                    deleted = len(execute(connection, old(consumer.schema, **pair, limit=size))[0])
                return deleted, deleted == size

            more = True
            while more:
                _, more = by_size(consumer.engine, (DELETE_GROUP.name, old.sql), _BATCH, delete)
        for producer in self.databases.having("producer"):
            with producer.acting() as connection:
                execute(connection, _DELETE_DELIVERY_CURSORS(producer.schema, **pair))
        rows = counted(sum(contents.inbox.values()), "inbox row")
        return f"group {group!r} of topic {topic!r} is deleted, with {rows}; should it come back, it begins anew"

    # --- where a group is, and where it reads from -------------------------------------------------------------------

    def _whole_group(self, group: str, topic: str, name: str | None) -> Database:
        if (whole := topic_of(topic)) != topic:
            error = (
                f"{topic!r} is one source of group {group!r}, which is deleted with all of them: name topic {whole!r}"
            )
            raise InvalidRequest(error, field="topic")
        return self._consumer_of(group, topic, name)

    def _consumer_of(self, group: str, topic: str, name: str | None) -> Database:
        having: list[str] = []
        for each in self.databases.having("consumer", name):
            with each.read_only() as connection:
                (((known,),),) = execute(connection, _KNOWS_GROUP(each.schema, group=group, topic=topic))
            having += [each.name] if known else []
        return knowing(self.databases, having, group, topic, name)

    def _source_of(self, consumer: Database, group: str, topic: str, name: str | None) -> tuple[Database, str]:
        """Return the database that a group reads a topic from, and the name under which the group keeps that."""
        having: dict[str, SourceIdentity] = {}
        for each in self.databases.having("producer", name):
            with each.read_only() as connection:
                (topics,) = execute(connection, health_sql.TOPICS(each.schema))
                if topic_of(topic) in dict(topics):
                    having[each.name] = identity_of(connection, each)
        with consumer.read_only() as connection:
            met = met_in(connection, consumer)
            of_topic = _FEEDS(consumer.schema, group=group, topic=topic_of(topic))
            reached = {feed for (feed,) in execute(connection, of_topic)[0] if topic in {feed, topic_of(feed)}}
        found = {feed: source_of(consumer.name, feed, met, having) for feed in sorted(reached) or [topic]}
        known = {source: feed for feed, source in found.items() if source is not None}
        if len(known) == 1 and (len(found) == 1 or name is not None):
            ((source, feed),) = known.items()
            return self.databases[source], feed
        if having and not known and any(feed in met for feed in found):
            at = ", ".join(f"{feed} at {met[feed].address or met[feed].id}" for feed in found if feed in met)
            raise InvalidRequest(
                f"group {group!r} reads {at}, which is none of: {', '.join(having)}; register it", field="source"
            )
        if having:
            raise InvalidRequest(
                f"several databases have topic {topic!r}, and it isn't known from which one of them group {group!r} "
                f"reads, or it reads from several; name one of: {', '.join(having)}",
                field="source",
            )
        what = f"has the messages of topic {topic!r}; register that of its producer"
        raise no_group(self.databases, what, name)

    # --- moving ------------------------------------------------------------------------------------------------------

    def _plan(
        self, act: Declaration, group: str, topic: str, to: Start | str, database: str | None, source: str | None
    ) -> _Plan:
        start = _start_of(to)
        consumer = self._consumer_of(group, topic, database)
        producer, feed = self._source_of(consumer, group, topic, source)
        topic = topic_of(topic)
        with producer.read_only() as connection:
            if isinstance(start, dt.timedelta):
                now: dt.datetime = execute(connection, NOW)[0][0][0]
                midnight = now.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
                start = (midnight if to in _DAYS else now) - start
            starts = start_positions(None, connection, producer.schema, topic, start)
        return _Plan(act, consumer, producer, group, topic, feed, starts)

    def _preview(self, plan: _Plan) -> GroupMove:
        CALLER.get().search()
        with plan.consumer.read_only() as connection:
            (rows,) = execute(connection, _POSITIONS(plan.consumer.schema, **plan.pair))
        moves = plan.moves(dict(rows))
        messages = sum(move.messages for _, move in moves)
        missing = _missing(plan, moves, messages) if plan.act is RESET_GROUP else 0
        names = plan.consumer.name, plan.source.name, plan.group, plan.topic
        return GroupMove(*names, [move for _, move in moves], messages, missing)

    def _move(self, plan: _Plan, by: str | Actor, why: str, *, skip_pruned: bool) -> str:
        act, schema, what = plan.act, plan.consumer.schema, plan.name
        actor, preview = checked_actor(act, by, why), self._preview(plan)
        if preview.missing and not skip_pruned:
            raise ActRefused(
                f"{what} can't read all of that again: {counted(preview.missing, 'message')} of before were pruned, or "
                "may have been; go back less far, or accept that by skip_pruned (--skip-pruned)"
            )
        with unless_locked(partial(busy, plan.name)), plan.consumer.acting() as connection:
            queues = [start.queue for start in plan.starts]
            moves = plan.moves(_lock_group(connection, schema, plan.group, plan.feed, queues))
            if not moves:
                where = "behind" if act is RESET_GROUP else "ahead of"
                raise ActRefused(f"{what} is {where} that already, in all queues")
            values = {
                "queues": [move.queue for _, move in moves],
                "formers": [move.former for _, move in moves],
                "positions": [move.position for _, move in moves],
                "ids": [start.message_id for start, _ in moves],
            }
            (rows,) = execute(connection, _MOVE(schema, **plan.pair, **values))
            passage, messages = rows[0][0], sum(move.messages for _, move in moves)
            by_queue = {move.queue: [move.former, move.position] for _, move in moves}
            result = {"passage": passage, "messages": messages, "missing": preview.missing, "queues": by_queue}
            execute(connection, record_of(schema, act.name, actor, why, f"{plan.group}/{plan.feed}", result))
        does = "reads up to {} again" if act is RESET_GROUP else "leaves {} out"
        return f"{what} {does.format(counted(messages, 'message'))} (passage {passage})"


def _start_of(to: Start | str) -> Start | dt.timedelta:
    """Return where a group is to go on, or how long ago that is; of a day how long before this one it began."""
    if isinstance(to, str):
        if to in _DAYS:
            return _DAYS[to]
        return dt.timedelta(seconds=min(seconds_of(to), _OLDEST)) if DURATION.fullmatch(to) else start_from_text(to)
    if not is_start(to):
        raise InvalidRequest(f"to = {to!r} must be {STARTS}", field="to")
    return to


def _contents(consumer: Database, group: str, topic: str) -> GroupContents:
    with consumer.read_only(_COUNTING) as connection:
        (inbox,) = execute(connection, _CONTENTS(consumer.schema, group=group, topic=topic))
        reports = workers_in(connection, consumer)
    of_group = [each for each in merged(reports) if (each.topic, each.group) == (topic, group)]
    workers = {worker for each in of_group if each.kind in CONSUMING for worker in each.workers}
    # A server lists some of its clients, and has a duty for each group for which one has received lately.
    workers |= {each.row.name for each in reports if consuming([each])[f"{topic} of {group}"]}
    clients = sorted({each.name for each in of_group if each.kind == "client"})
    return GroupContents(consumer.name, group, topic, dict(inbox), sorted(workers), clients)


def _missing(plan: _Plan, moves: Sequence[tuple[StartPosition, QueueMove]], messages: int) -> int:
    """Return how many of the messages that a reset is about were pruned, or may have been."""
    values = {
        "queues": [move.queue for _, move in moves],
        "after": [move.position for _, move in moves],
        "until": [move.former for _, move in moves],
    }
    with plan.source.read_only(_COUNTING) as connection:
        (rows,) = execute(connection, _MESSAGES_BETWEEN(plan.source.schema, topic=plan.topic, **values))
    # Numbers are dense: a numbered message that isn't there was pruned.
    there = sum(count for _, count in rows)
    missing: int = sum(start.missing for start, _ in moves) + max(messages - there, 0)
    return missing


def _lock_group(
    connection: Connection, schema: str, group: str, topic: str, queues: Sequence[int] = ()
) -> dict[int, int]:
    """Have the group, and its queues, until the transaction ends; return how far it is in each queue.

    ``queues`` are some that it may have no offset of.
    """
    reached = _POSITIONS(schema, group=group, topic=topic)
    _, rows = execute(connection, take_lock(lock_key("group", schema, group, topic)), reached)
    locks = {GroupQueue(schema, group, topic, queue).lock for queue in (*queues, *dict(rows))}
    # In one order everywhere.
    *_, rows = execute(connection, *map(take_lock, sorted(locks)), reached)
    return dict(rows)


def busy(what: str) -> ActRefused:
    """Return the refusal of an act for which a lock couldn't be had."""
    return ActRefused(
        f"{what} is busy: a session has held a lock of it for {PATIENCE:g} s, a handler that runs for example, and "
        "nothing was done; try again in a while, or see which one it is: outbox lock list"
    )
