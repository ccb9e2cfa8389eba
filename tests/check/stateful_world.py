"""The stateful test's world: one or two databases, a service with checkers and fenced functions, its consumers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, StaticPool, create_engine, text
from sqlalchemy.orm import Session

from outbox import INJECTED, Message, Orphan, Outbox, Settings
from outbox.check.asker import Asker
from outbox.check.check_pass import check_once
from outbox.consumer.consumer import Consumer
from outbox.database.engines import Pass
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.message.model import Answer, Counts
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once
from tests.check.stateful_calls import Call, Refused, Sessions
from tests.check.stateful_model import EXT, MAX_CHECKS, PAID, TOPICS

WHO = {"by": "me", "why": "test"}
GROUP = "g"
#: Nothing becomes due by itself: the test ages what is to be due.
SETTINGS = Settings(
    queues=2,
    immunity=1000,
    check_interval=1000,
    max_checks=MAX_CHECKS,
    retry_delays=(1000.0, 1000.0),
    max_starts=1000,
    prune_batch=3,
)
CHANGE = text("INSERT INTO change VALUES (:number)")
NOTE = text("INSERT INTO note VALUES (:number)")
EFFECT = text("INSERT INTO effect VALUES (:number)")
#: Ends the connection at its COMMIT, after everything that is written before.
DOOM = text("INSERT INTO doom VALUES (1)")
PID = text("SELECT pg_backend_pid()")
CUT = text("SELECT pg_terminate_backend(:pid, 10000)")

_TABLES = """
CREATE TABLE change (number int PRIMARY KEY);
CREATE TABLE note (number int NOT NULL);
CREATE TABLE effect (number int NOT NULL);
CREATE TABLE doom (n int);
CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER die AFTER INSERT ON doom DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION die();
"""
_EMPTY = "; ".join(
    f"DELETE FROM {table}"
    for table in (
        *("change", "note", "effect"),
        *(f"outbox.{name}" for name in ("half_message", "half_check", "check_history", "op_message", "message")),
        *(f"outbox.{name}" for name in ("scheduled_message", "dispatch_cursor", "audit", "topic")),
        *(f"outbox.{name}" for name in ("consumer_message", "consumer_offset", "half_error", "attempt_history")),
    )
)
_STATE = """
SELECT (convert_from(h.body, 'UTF8')::jsonb ->> 'number')::int AS number, h.id, o.resolution, o.decided_by,
       c.half_id IS NOT NULL AS waits, c.fenced, c.check_times, c.parked_at IS NOT NULL AS parked,
       c.next_check_at <= clock_timestamp() AS due, d.half_id IS NOT NULL AS scheduled,
       d.recalled_at IS NOT NULL AS recalled,
       (SELECT count(*) FROM outbox.check_history a WHERE a.half_id = h.id AND a.asked = 'checker') AS asked,
       (SELECT count(*) FROM outbox.check_history a WHERE a.half_id = h.id AND a.asked = 'fence') AS fences,
       (SELECT count(*) FROM outbox.check_history a WHERE a.half_id = h.id AND a.answer IS NULL) AS unanswered,
       (SELECT count(*) FROM outbox.message m WHERE m.half_id = h.id) AS sends
  FROM outbox.half_message h
  LEFT JOIN outbox.op_message o ON o.half_id = h.id
  LEFT JOIN outbox.half_check c ON c.half_id = h.id
  LEFT JOIN outbox.scheduled_message d ON d.half_id = h.id
"""
#: The rest of the producer's side: business changes, what checkers wrote, and rows of halves that are gone.
_BESIDE = """
SELECT 'change' AS what, number, NULL::uuid AS id FROM change
 UNION ALL
SELECT 'note', number, NULL FROM note
 UNION ALL
SELECT 'stray', NULL, r.half_id
  FROM (SELECT half_id FROM outbox.op_message UNION ALL SELECT half_id FROM outbox.half_check
        UNION ALL SELECT half_id FROM outbox.check_history UNION ALL SELECT half_id FROM outbox.message
        UNION ALL SELECT half_id FROM outbox.scheduled_message) r
 WHERE NOT EXISTS (SELECT FROM outbox.half_message h WHERE h.id = r.half_id)
"""
_SINK = """
SELECT number, NULL::uuid, NULL FROM effect
 UNION ALL
SELECT NULL, message_id, status FROM outbox.consumer_message
"""
_OPEN = """
SELECT pid, state, query FROM pg_stat_activity
 WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
   AND backend_type = 'client backend'
"""
_LOCKS = """
SELECT pid, locktype, mode FROM pg_locks
 WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_AUDITS = "SELECT count(*) FROM outbox.audit"
_OFFSETS = "SELECT topic, queue, max(position) FROM outbox.consumer_offset GROUP BY 1, 2"


class KnownRunner:
    """A connection for a checker, which is known to the world, so that it can be cut."""

    def __init__(self, world: World) -> None:
        self._world = world

    def run(self, act: Pass) -> Counts:
        """Run an act on a connection of the pool."""
        with self._world.engine.connect() as connection:
            self._world.room_pid = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
            return act(connection, connection)

    def end(self) -> None:
        """Do nothing: checkers end by themselves here."""


@dataclass(frozen=True)
class State:
    """What all tables say."""

    halves: dict[int, Any]
    strays: list[UUID]
    changes: set[int]
    notes: Counter[int]
    effects: Counter[int]
    inbox: dict[UUID, str]
    audits: int


class World:
    """Everything that the rules act on. ``ask`` answers for the checkers, ``handle`` acts for the handlers."""

    def __init__(self, url: str, sink_url: str) -> None:
        self.engine = create_engine(url, pool_size=20)
        self.sink_engine = self.engine if sink_url == url else create_engine(sink_url)
        self.observers = [_observer(each) for each in dict.fromkeys((url, sink_url))]
        for observer in self.observers:
            with observer.connect() as connection:
                connection.exec_driver_sql(_TABLES)
        self.ask: Callable[[Orphan, Session | None], Any] = lambda orphan, session: None
        self.handle: Callable[[int, Session], Any] = lambda number, session: None
        self.pass_pid = self.room_pid = 0
        self.sessions = Sessions(self.engine, expire_on_commit=False)
        self.outbox = Outbox(self.sessions, settings=SETTINGS)
        self.outbox.checker(PAID)(self._ask_with_session)
        self.outbox.checker(EXT)(self._ask)
        self.calls = {topic: self._function(topic) for topic in TOPICS}
        self.sink = Outbox(self.sink_engine, settings=SETTINGS)
        self.consumers: list[Consumer] = []

    def _ask(self, orphan: Orphan) -> Any:
        return self.ask(orphan, None)

    def _ask_with_session(self, orphan: Orphan, session: Session) -> Any:
        return self.ask(orphan, session)

    def _function(self, topic: str) -> Callable[..., Any]:
        @self.outbox.two_phase(topic=topic, body=lambda number, call: {"number": number}, rollback_on=(Refused,))
        def work(number: int, call: Call, session: Session = INJECTED) -> None:
            session.execute(CHANGE, {"number": number})
            call.pid = session.scalar(PID) or 0
            if call.stop("business") == "doom":
                session.execute(DOOM)

        return work

    def empty(self) -> None:
        """Make everything as it was at the start."""
        for observer in self.observers:
            with observer.connect() as connection:
                connection.exec_driver_sql("SET lock_timeout = '10s'")
                connection.exec_driver_sql(_EMPTY)
                # A message without a key takes its queue by this number: an example must go the same way again.
                connection.exec_driver_sql("ALTER SEQUENCE outbox.op_sequence RESTART")
        self.restart_consumers()

    def recover(self) -> None:
        """End whatever a failed example has left."""
        for observer in self.observers:
            with observer.connect() as connection:
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                    " AND datname = current_database() AND backend_type = 'client backend'"
                )
        self.engine.dispose()
        self.sink_engine.dispose()

    def close(self) -> None:
        """Close all connections."""
        for engine in (self.engine, self.sink_engine, *self.observers):
            engine.dispose()

    # --- passes ------------------------------------------------------------------------------------------

    def check(self, in_flight: int) -> Counts:
        """Make a pass of the check, as a worker of its own."""
        asker = Asker(lambda is_async: KnownRunner(self), in_flight)
        with self.engine.connect() as connection:
            self.pass_pid = connection.scalar(PID) or 0
            connection.commit()
            try:
                return check_once(connection, SETTINGS, self.outbox.checkers, asker)
            finally:
                asker.end()

    def check_now(self, half_id: UUID) -> Answer:
        """Check a half by hand."""
        return self.outbox.operator.check_now(half_id, new_runner=lambda is_async: KnownRunner(self), **WHO)

    def dispatch(self, limit: int | None = None) -> Counts:
        """Make a pass of the dispatch."""
        with self.engine.connect() as connection:
            return dispatch_once(connection, SETTINGS, limit=limit)

    def release(self) -> None:
        """Make a pass of the release of due deliveries."""
        with self.engine.connect() as connection:
            release_due_once(connection, SETTINGS)

    def restart_consumers(self) -> None:
        """Replace the consumers by new ones, as a new worker would."""
        app = Outbox(self.sink_engine, settings=SETTINGS)
        for topic in TOPICS:
            app.consumer(topic, group=GROUP, batch=3 if topic == PAID else 1)(self._handle)
        self.consumers = [Consumer(subscription, SETTINGS) for subscription in app.subscriptions.values()]
        self._on_sink(lambda consumer, connection, source: consumer.start(connection, source))

    def consume(self, queues: Collection[int] = ()) -> None:
        """Consume all there is; at first, the consumers are told of these queues."""

        def drain(consumer: Consumer, connection: Connection, source: Connection) -> None:
            for queue in queues:
                consumer.wake(queue)
            # One that was told of some may find nothing there, and the next pass looks at all.
            while consumer.consume_once(connection, source) or consumer.consume_once(connection, source):
                pass

        self._on_sink(drain)

    def retry(self) -> None:
        """Retry what is due."""
        self._on_sink(lambda consumer, connection, source: consumer.retry_once(connection, source))

    def prune(self) -> None:
        """Prune both sides."""
        with self.engine.connect() as connection:
            prune_producer_once(connection, SETTINGS)
        self._on_sink(
            lambda consumer, connection, source: prune_consumer_once(
                connection, source, SETTINGS, consumer.subscription.group, consumer.subscription.topic
            )
        )

    def _on_sink(self, act: Callable[[Consumer, Connection, Connection], object]) -> None:
        for consumer in self.consumers:
            with self.sink_engine.connect() as connection, self.engine.connect() as source:
                act(consumer, connection, connection if self.engine is self.sink_engine else source)

    def _handle(self, message: Message, session: Session) -> Any:
        session.execute(EFFECT, {"number": message.body["number"]})
        return self.handle(message.body["number"], session)

    # --- acts beside the framework -----------------------------------------------------------------------

    def cut(self, pid: int) -> None:
        """End a connection, as an administrator would."""
        self.run("SELECT pg_terminate_backend(:pid, 10000)", pid=pid)

    def run(self, sql: str, **values: Any) -> list[Any]:
        """Execute a statement in the producer's database, and commit."""
        return self._rows(self.observers[0], sql, **values)

    def run_on_sink(self, sql: str, **values: Any) -> list[Any]:
        """Execute a statement in the consumer's database, and commit."""
        return self._rows(self.observers[-1], sql, **values)

    def _rows(self, observer: Engine, sql: str, **values: Any) -> list[Any]:
        with observer.connect() as connection:
            result = connection.execute(text(sql), values)
            return list(result) if result.returns_rows else []

    def age_checks(self, ids: Sequence[UUID]) -> None:
        """Let the waits of undecided halves be over, and the leases of those who were asked about them."""
        self.run("UPDATE outbox.half_check SET next_check_at = now() WHERE half_id = ANY (:ids)", ids=ids)
        self.run(
            "UPDATE outbox.check_history SET asked_at = asked_at - interval '1 day' WHERE half_id = ANY (:ids)", ids=ids
        )

    # --- looks -------------------------------------------------------------------------------------------

    def id_of(self, number: int) -> UUID:
        """Return the id of a half."""
        found: UUID = self.run(
            "SELECT id FROM outbox.half_message WHERE (convert_from(body, 'UTF8')::jsonb ->> 'number')::int = :number",
            number=number,
        )[0][0]
        return found

    def state(self) -> State:
        """Read everything."""
        beside, sink = self.run(_BESIDE), self.run_on_sink(_SINK)
        return State(
            {row.number: row for row in self.run(_STATE)},
            [row.id for row in beside if row.what == "stray"],
            {row.number for row in beside if row.what == "change"},
            Counter(row.number for row in beside if row.what == "note"),
            Counter(row[0] for row in sink if row[1] is None),
            {row[1]: row[2] for row in sink if row[1] is not None},
            sum(self._rows(observer, _AUDITS)[0][0] for observer in self.observers),
        )

    def unread(self) -> set[UUID]:
        """Return the halves of which there are messages that the group has yet to read."""
        offsets = {tuple(row[:2]): row[2] for row in self.run_on_sink(_OFFSETS)}
        rows = self.run("SELECT half_id, topic, queue, position FROM outbox.message")
        return {row.half_id for row in rows if row.position > offsets.get((row.topic, row.queue), 0)}

    def open_transactions(self) -> list[Any]:
        """Return the connections to both databases that are in a transaction, and the locks that are held."""
        return [row for observer in self.observers for sql in (_OPEN, _LOCKS) for row in self._rows(observer, sql)]


def _observer(url: str) -> Engine:
    return create_engine(url, isolation_level="AUTOCOMMIT", poolclass=StaticPool)
