"""Two databases for the tests of reconciliation: messages planted by SQL in any state, and both sides compared."""

from __future__ import annotations

import enum
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pyarrow as pa
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.database.execute import Statement
from outbox.message.ids import uuid7_at
from outbox.message.model import uuid7
from outbox.reconcile.job import Access, Effect, Job, NoProgress, Outcome, Pair, Window
from outbox.reconcile.rows import PairResult, to_findings
from outbox.reconcile.run import reconcile
from outbox.reconcile.tables import InboxState, ProducerState, Torn
from tests.kit.bench import Bench, make_ledger

PAIR = Pair("t", "g")
WITH_EFFECT = Pair("t", "g", effect=Effect("ledger"))
HOUR = 3600.0


class Place(enum.IntEnum):
    """Where in its topic a planted message lies, as the group sees it; the number is the queue."""

    READ = 0  # the group has read past it
    AHEAD = 1  # the group hasn't come so far
    BEFORE = 2  # it was sent before the group began


@dataclass(frozen=True, slots=True)
class Fate:
    """What both sides say of one message. The default is in sync: dispatched and consumed an hour ago.

    ``state`` None: the producer never wrote it. ``age`` is since when (seconds) it is as it is, at both sides;
    ``received`` since when the inbox has it, if that differs. ``due_in`` (seconds, of scheduled ones) may be negative.
    ``body`` None: the inbox has no digest. ``effects`` are rows of the business table. ``torn``: the producer's rows
    are torn afterwards; an op without its half needs one that was never dispatched, the others one that was.
    ``opinion`` is what a producer whose tables aren't ours believes of it (`tests.reconcile.foreign.tell`).
    """

    state: ProducerState | None = ProducerState.DISPATCHED
    status: InboxState = InboxState.CONSUMED
    sends: int = 1
    place: Place = Place.READ
    compensated: bool = False
    skipped: bool = False
    same_body: bool | None = True
    effects: int = 0
    age: float = HOUR
    inbox_age: float | None = None
    received: float | None = None
    due_in: float = -HOUR
    key: str | None = "k"
    tag: str | None = None
    torn: Torn = Torn.NO
    opinion: str | None = None


IN_SYNC = Fate()


class Progress(NoProgress):
    """Notes what a job says, and does something when a stage begins."""

    def __init__(self, at_stage: Callable[[str], None] = lambda title: None) -> None:
        self._at_stage = at_stage
        self.said: list[str] = []

    def stage(self, title: str, total: int | None) -> None:
        """Do what is to be done."""
        super().stage(title, total)
        self._at_stage(title)

    def say(self, sentence: str) -> None:
        """Note the sentence."""
        self.said.append(sentence)


def fate(**changes: Any) -> Fate:
    """Return a message that is in sync but for these changes."""
    return replace(IN_SYNC, **changes)


def ids_at(seconds_ago: float, number: int = 1) -> list[UUID]:
    """Return ids that were made so long ago, one in each millisecond, in order."""
    first = uuid7_at(time.time() - seconds_ago).int
    return [UUID(int=(first + (n << 80)) | random.getrandbits(60)) for n in range(number)]


def kinds(result: PairResult) -> dict[UUID, Outcome]:
    """Return the kind of each difference."""
    found = list(to_findings(result.findings))
    assert len({finding.id for finding in found}) == len(found)
    return {finding.id: finding.outcome for finding in found}


def ids_in(table: pa.Table) -> set[UUID]:
    """Return the ids of a table of findings."""
    return {finding.id for finding in to_findings(table)}


def explain(statement: Statement) -> Statement:
    """Return a statement that tells the plan of another. Rows: ``(line,)``."""
    return Statement("EXPLAIN " + statement.sql, statement.values)


def url_of(engine: Engine) -> str:
    """Return an engine's URL, password included."""
    return engine.url.render_as_string(hide_password=False)


class Town(Bench):
    """A producer and a consumer with a business table (`ledger`), whose messages are planted.

    All that `Bench` does works too: messages sent, dispatched and consumed by the framework. ``rows`` and ``run``
    speak to the consumer, ``at_producer`` to the producer; ``{s}`` in their SQL is the schema.
    """

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, settings)
        make_ledger(consumer)
        self.run("CREATE INDEX ON ledger (message_id)")
        self.opinions: dict[UUID, str] = {}

    @property
    def accesses(self) -> tuple[Access, Access]:
        """The producer's database, and the consumer's."""
        return Access(url_of(self.producer), self.settings), Access(url_of(self.consumer), self.settings)

    def job(self, *pairs: Pair, **options: Any) -> Job:
        """Return a job with a grace period of a minute, that reads every row unless told otherwise."""
        options.setdefault("window", Window(grace=60.0))
        return Job(*self.accesses, pairs or (PAIR,), **options)

    def reconcile(self, *pairs: Pair, progress: NoProgress | None = None, **options: Any) -> PairResult:
        """Reconcile, and return the result of the first pair."""
        return reconcile(self.job(*pairs, **options), progress).pairs[0]

    def run(self, sql: str, **values: Any) -> None:
        """Run a statement in the consumer's database."""
        super().run(sql.replace("{s}", self.settings.schema), **values)

    def at_producer(self, sql: str, **values: Any) -> None:
        """Run a statement in the producer's database."""
        with self.producer.begin() as connection:
            connection.execute(text(sql.replace("{s}", self.settings.schema)), values)

    # --- planting ----------------------------------------------------------------------------------------

    def plant(self, fates: Iterable[Fate], *, topic: str = "t", group: str = "g", ids: Any = None) -> list[UUID]:
        """Write messages into both databases; return their ids."""
        planted = list(fates)
        named: list[UUID] = [uuid7() for _ in planted] if ids is None else list(ids)
        self._plant_producer(list(zip(named, planted, strict=True)), topic)
        self._plant_consumer(list(zip(named, planted, strict=True)), topic, group)
        self.opinions |= {id_: each.opinion for id_, each in zip(named, planted, strict=True) if each.opinion}
        return named

    def _plant_producer(self, messages: Sequence[tuple[UUID, Fate]], topic: str) -> None:
        ends = self._ends(topic)
        rows = [_row(id_, each) for id_, each in messages if each.state is not None]
        sends = [
            {"id": str(id_), "queue": each.place, "position": next(ends[each.place]), "send": send}
            | {"age": each.age + each.sends - send}
            for id_, each in messages
            if each.state is ProducerState.DISPATCHED
            for send in range(1, each.sends + 1)
        ]
        self.at_producer("INSERT INTO {s}.topic VALUES (:topic, 8) ON CONFLICT DO NOTHING", topic=topic)
        for sql in (_HALVES, _CHECKS, _OPS, _SCHEDULED, _COMPENSATIONS):
            self.at_producer(sql, rows=json.dumps(rows), topic=topic)
        self.at_producer(_MESSAGES, rows=json.dumps(sends), topic=topic)
        for torn, sql in _TEARING.items():
            ids = [id_ for id_, each in messages if each.torn is torn]
            self.at_producer(sql, ids=ids)
        # Without a cursor the next dispatch compares ops and messages, and finds these to be messages already.
        self.at_producer("DELETE FROM {s}.dispatch_cursor")

    def _ends(self, topic: str) -> dict[int, itertools.count[int]]:
        with self.producer.begin() as connection:
            sql = f"SELECT queue, max(position) FROM {self.settings.schema}.message WHERE topic = :topic GROUP BY 1"
            ends = {row[0]: row[1] for row in connection.execute(text(sql), {"topic": topic})}
        return {place: itertools.count(ends.get(int(place), 0) + 1) for place in Place}

    def _plant_consumer(self, messages: Sequence[tuple[UUID, Fate]], topic: str, group: str) -> None:
        rows = json.dumps([_row(*each) for each in messages])
        ends = {place: next(end) - 1 for place, end in self._ends(topic).items()}
        where = {"group": group, "topic": topic}
        self.run(_INBOX, rows=rows, **where)
        self.run(_LEDGER, rows=rows)
        for place in (Place.READ, Place.BEFORE):
            self.run(_OFFSET, queue=place, position=ends[place], **where)
        self.run(_START, queue=Place.BEFORE, position=ends[Place.BEFORE], **where)

    def plant_bulk(self, number: int, *, topic: str = "t", group: str = "g", first_ms: int | None = None) -> list[UUID]:
        """Write so many messages in sync, by the server; the topic must be new. Returns the ids of some of them.

        They are 1 ms apart, from ``first_ms`` (since 1970) on, and by default end an hour ago.
        """
        first_ms = int((time.time() - HOUR) * 1000) - number if first_ms is None else first_ms
        values = {"topic": topic, "group": group, "base": first_ms, "n": number}
        self.at_producer("INSERT INTO {s}.topic VALUES (:topic, 8)", topic=topic)
        self.at_producer(_BULK_HALVES, **values)
        self.at_producer(_BULK_OPS, **values)
        self.at_producer(_BULK_MESSAGES, **values)
        self.run(_BULK_INBOX, **values)
        self.run(_BULK_OFFSETS, **values)
        with self.producer.begin() as connection:
            step = max(number // 1000, 1)
            sql = f"SELECT {_BULK_ID} FROM generate_series(1, :n, {step}) i"
            return list(connection.execute(text(sql), {"base": first_ms, "n": number}).scalars())

    def set_inbox(self, status: InboxState, *ids: UUID) -> None:
        """Give inbox rows another status."""
        self.run(
            """UPDATE {s}.consumer_message SET status = :status, next_attempt_at = CASE WHEN :status = 'failed'
               THEN now() + interval '1 day' END WHERE message_id = ANY (:ids)""",
            status=status.name.lower(),
            ids=list(ids),
        )

    def forget(self, *ids: UUID) -> None:
        """Delete inbox rows."""
        self.run("DELETE FROM {s}.consumer_message WHERE message_id = ANY (:ids)", ids=list(ids))


def counted(result: PairResult) -> Counter[Outcome]:
    """Return how many messages there are of each outcome, having checked that the differences are those listed."""
    listed = Counter(kinds(result).values())
    assert listed == Counter(result.differences)
    return result.counts


def _row(id_: UUID, each: Fate) -> dict[str, Any]:
    inbox_age = each.age if each.inbox_age is None else each.inbox_age
    return {
        "id": str(id_),
        "state": None if each.state is None else each.state.name.lower(),
        "status": each.status.name.lower(),
        "queue": each.place,
        "compensated": each.compensated,
        "error": "no" if each.skipped or each.status in {InboxState.FAILED, InboxState.PARKED} else None,
        "same_body": each.same_body,
        "effects": each.effects,
        "age": each.age,
        "inbox_age": inbox_age,
        "received": inbox_age if each.received is None else each.received,
        "due": each.due_in,
        "key": each.key,
        "tag": each.tag,
    }


_ROWS = """
jsonb_to_recordset(CAST(:rows AS jsonb)) AS r (
    id uuid, state text, status text, queue int, position int8, send int2, compensated bool, error text,
    same_body bool, effects int, age float8, inbox_age float8, received float8, due float8, key text, tag text)
"""

_HALVES = f"""
INSERT INTO {{s}}.half_message (id, producer_group, topic, key, tag, content_type, body, born_at)
SELECT id, 'p', :topic, key, tag, 'text/plain', uuid_send(id), clock_timestamp() - make_interval(secs => age)
  FROM {_ROWS}
"""
_CHECKS = f"""
INSERT INTO {{s}}.half_check (half_id, fenced, next_check_at, topic)
SELECT id, false, clock_timestamp(), :topic FROM {_ROWS} WHERE state = 'undecided'
"""
_OPS = f"""
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by, decided_at)
SELECT id, CASE state WHEN 'rolled_back' THEN 'rollback' ELSE 'commit' END, 'producer',
       clock_timestamp() - make_interval(secs => age)
  FROM {_ROWS} WHERE state <> 'undecided'
"""
_MESSAGES = f"""
INSERT INTO {{s}}.message (topic, queue, position, half_id, send_number, visible_at)
SELECT :topic, queue, position, id, send, clock_timestamp() - make_interval(secs => age) FROM {_ROWS}
"""
_SCHEDULED = f"""
INSERT INTO {{s}}.scheduled_message (half_id, deliver_at, recalled_at, recalled_by)
SELECT id, clock_timestamp() + make_interval(secs => due),
       CASE state WHEN 'recalled' THEN clock_timestamp() - make_interval(secs => age) END,
       CASE state WHEN 'recalled' THEN 'me' END
  FROM {_ROWS} WHERE state IN ('scheduled', 'recalled')
"""
_COMPENSATIONS = f"""
INSERT INTO {{s}}.compensation (half_id, function, requested_by, reason)
SELECT id, 'f', 'me', :topic FROM {_ROWS} WHERE compensated
"""
_TEARING = {
    Torn.MESSAGE_WITHOUT_HALF: "DELETE FROM {s}.half_message WHERE id = ANY (:ids)",
    Torn.OP_WITHOUT_HALF: "DELETE FROM {s}.half_message WHERE id = ANY (:ids)",
    Torn.MESSAGE_THOUGH_ROLLED_BACK: "UPDATE {s}.op_message SET resolution = 'rollback' WHERE half_id = ANY (:ids)",
    Torn.MESSAGE_THOUGH_UNDECIDED: "DELETE FROM {s}.op_message WHERE half_id = ANY (:ids)",
    Torn.MESSAGE_IN_OTHER_TOPIC: "UPDATE {s}.message SET topic = 'other' WHERE half_id = ANY (:ids)",
}
_INBOX = f"""
INSERT INTO {{s}}.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,
                                  next_attempt_at, body_digest, last_error, received_at, changed_at)
SELECT :group, id, :topic, queue, 1, status, 1, CASE status WHEN 'failed' THEN clock_timestamp() END,
       CASE WHEN same_body THEN substr(sha256(uuid_send(id)), 1, 16) WHEN NOT same_body THEN '\\x00' END, error,
       clock_timestamp() - make_interval(secs => received), clock_timestamp() - make_interval(secs => inbox_age)
  FROM {_ROWS} WHERE status <> 'none'
"""
_LEDGER = f"INSERT INTO ledger (message_id) SELECT id FROM {_ROWS} CROSS JOIN generate_series(1, effects)"
_OFFSET = """
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts)
VALUES (:group, :topic, :queue, :position, 0) ON CONFLICT DO NOTHING
"""
_START = """
INSERT INTO {s}.consumer_start (consumer_group, topic, queue, position) VALUES (:group, :topic, :queue, :position)
ON CONFLICT (consumer_group, topic, queue) DO UPDATE SET position = excluded.position
"""

_BULK_ID = """(lpad(to_hex(CAST(:base AS int8) + i), 12, '0') || '7' || substr(md5(CAST(i AS text)), 1, 3) || '8'
               || substr(md5(CAST(i AS text)), 4, 15))::uuid"""

_BULK_HALVES = f"""
INSERT INTO {{s}}.half_message (id, producer_group, topic, key, content_type, body, born_at)
SELECT {_BULK_ID}, 'p', :topic, 'k' || i % 100, 'text/plain', convert_to(CAST(i AS text), 'UTF8'),
       now() - interval '1 hour'
  FROM generate_series(1, :n) i
"""
_BULK_OPS = f"""
INSERT INTO {{s}}.op_message (half_id, resolution, decided_by, decided_at)
SELECT {_BULK_ID}, 'commit', 'producer', now() - interval '1 hour' FROM generate_series(1, :n) i
"""
_BULK_MESSAGES = f"""
INSERT INTO {{s}}.message (topic, queue, position, half_id, send_number, visible_at)
SELECT :topic, i % 8, i / 8 + 1, {_BULK_ID}, 1, now() - interval '1 hour' FROM generate_series(1, :n) i
"""
_BULK_INBOX = f"""
INSERT INTO {{s}}.consumer_message
       (consumer_group, message_id, topic, queue, position, status, attempts, body_digest, received_at, changed_at)
SELECT :group, {_BULK_ID}, :topic, i % 8, i / 8 + 1, 'consumed', 1,
       substr(sha256(convert_to(CAST(i AS text), 'UTF8')), 1, 16), now() - interval '1 hour', now() - interval '1 hour'
  FROM generate_series(1, :n) i
"""
_BULK_OFFSETS = """
INSERT INTO {s}.consumer_offset (consumer_group, topic, queue, position, starts)
SELECT :group, :topic, q, :n / 8 + 1, 0 FROM generate_series(0, 7) q
"""


def empty(town: Town) -> None:
    """Empty all tables that tests write into."""
    tables = ("half_message", "half_check", "op_message", "message", "scheduled_message", "compensation")
    town.at_producer(f"TRUNCATE {', '.join(f'{{s}}.{table}' for table in tables)}")
    town.run("TRUNCATE ledger, {s}.consumer_message, {s}.consumer_offset, {s}.consumer_start")
