"""The tables from which each order of steps starts, and all that a system does by itself until nothing is left to do.

One database is the producer's and the consumer's. Money moves in it: whoever sends takes 1 from `account` and writes a
`transfer`, in the same transaction; the consumer writes an `effect`, a compensation a `refund`, and what the producer
learns of a message's fate it writes to `told`.

A world is seeded once with real calls, and its rows are kept in the schema `seed`: to put them back takes one round
trip, and the tables are as they were, numbers of transactions included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Connection, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.orm import Session

from outbox import Delivery, Message, Orphan, Outbox, Resolution, Saga, Settings
from outbox.check.asker import Asker, Checker
from outbox.check.check_pass import check_once
from outbox.compensate.compensate_pass import compensate_once
from outbox.consumer.consumer import Consumer
from outbox.database.engines import EngineRunner
from outbox.database.execute import batch_sizes
from outbox.delivery.confirm_pass import confirm_once
from outbox.dispatch.dispatch_pass import dispatch_once, dispatch_passed, release_due_once
from outbox.message.model import Counts
from outbox.prune.segments import drop_segment, segments
from tests.delivery.support import KNOWN

TOPIC, GROUP, KEY = "t", "g", "k"
#: A saga of one step, and the topic of its command: group and topic of each consumer that it needs, in their order.
SAGA, BOOK = "trip", "book"
OF_SAGA = ((f"{SAGA}.start", SAGA), (BOOK, "hotel"), (f"{SAGA}.reply.{BOOK}", SAGA))
SETTINGS = Settings(
    queues=1, immunity=0.0, retry_delays=(0.0,) * 8, retry_jitter=0.0, listen=False, checks_in_flight=1,
    check_timeout=60.0, confirm_grace=0.0,
)  # fmt: skip

_BUSINESS = """
CREATE TABLE account (balance int);
CREATE TABLE transfer (n serial PRIMARY KEY, message_id uuid, kind text);
CREATE TABLE effect (n serial PRIMARY KEY, message_id uuid, position bigint, send_number int, attempt int);
CREATE TABLE refund (message_id uuid);
CREATE TABLE told (message_id uuid, status text);
CREATE TABLE booking (flow_id uuid, command_id uuid);
INSERT INTO account VALUES (1000);
"""
_TABLES = """
SELECT format('%I.%I', n.nspname, c.relname), c.relname,
       (SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute
         WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND attgenerated = '')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname IN ('outbox', 'public')
   AND position('version' IN c.relname) = 0
 ORDER BY 1
"""
_STATE = f"""
SELECT jsonb_build_object(
    'half', (SELECT jsonb_object_agg(id, jsonb_build_object('deliver_at', deliver_at)) FROM outbox.half_message
              WHERE topic = 't'),
    'op', (SELECT jsonb_object_agg(half_id, jsonb_build_object('resolution', resolution, 'by', decided_by))
             FROM outbox.op_message WHERE half_id NOT IN (SELECT id FROM outbox.half_message WHERE topic <> 't')),
    'check', (SELECT jsonb_object_agg(half_id, jsonb_build_object('times', check_times, 'parked', parked_at))
                FROM outbox.half_check),
    'history', (SELECT jsonb_agg(jsonb_build_object('id', half_id, 'answer', answer)) FROM outbox.check_history),
    'message', (SELECT jsonb_agg(jsonb_build_object('id', half_id, 'send', send_number, 'queue', queue,
                                                    'position', position) ORDER BY queue, position)
                  FROM outbox.message WHERE topic = 't'),
    'scheduled', (SELECT jsonb_object_agg(half_id, recalled_by) FROM outbox.scheduled_message),
    'inbox', (SELECT jsonb_object_agg(message_id, jsonb_build_object('status', status, 'attempts', attempts,
                     'error', last_error, 'by', quarantined_by)) FROM outbox.consumer_message WHERE topic = 't'),
    'offset', (SELECT max(position) FROM outbox.consumer_offset WHERE topic <> 'outbox.delivered'),
    'compensation', (SELECT jsonb_agg(half_id) FROM outbox.compensation),
    'items', (SELECT jsonb_agg(jsonb_build_object('id', message_id, 'state', state, 'outcome', outcome))
                FROM outbox.bulk_item),
    'audit', (SELECT jsonb_agg(jsonb_build_object('action', action, 'actor', actor, 'target', target) ORDER BY id)
                FROM outbox.audit),
    'balance', (SELECT balance FROM account),
    'transfer', (SELECT jsonb_agg(jsonb_build_object('id', message_id, 'kind', kind) ORDER BY n) FROM transfer),
    'effect', (SELECT jsonb_agg(jsonb_build_object('id', message_id, 'position', position, 'send', send_number,
                                                   'attempt', attempt) ORDER BY n) FROM effect),
    'refund', (SELECT jsonb_agg(message_id) FROM refund),
    'delivery', (SELECT jsonb_agg(jsonb_build_object('id', half_id, 'number', number, 'status', status,
                        'settled', settled) ORDER BY half_id, number) FROM ({KNOWN}) d),
    'told', (SELECT jsonb_agg(jsonb_build_object('id', message_id, 'status', status)) FROM told),
    'saga', (SELECT jsonb_object_agg(id, status) FROM outbox.saga),
    'command', (SELECT jsonb_agg(jsonb_build_object('id', id, 'topic', topic)) FROM outbox.half_message
                 WHERE topic NOT IN ('t', 'outbox.delivered')),
    'booking', (SELECT jsonb_agg(jsonb_build_object('flow', flow_id, 'command', command_id)) FROM booking))
"""
_AGE = """
UPDATE outbox.half_check SET next_check_at = clock_timestamp() WHERE next_check_at > clock_timestamp();
UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()
 WHERE recalled_at IS NULL AND deliver_at > clock_timestamp();
UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() - interval '2 s'
 WHERE status = 'failed' AND next_attempt_at > clock_timestamp() - interval '2 s';
UPDATE outbox.bulk_item SET next_attempt_at = clock_timestamp()
 WHERE state = 'pending' AND next_attempt_at > clock_timestamp();
"""
#: What lets all messages look as if they had been settled a month ago.
_LONG_AGO = """
UPDATE outbox.op_message SET decided_at = decided_at - interval '30 days';
UPDATE outbox.message SET visible_at = visible_at - interval '30 days';
UPDATE outbox.consumer_message SET changed_at = changed_at - interval '30 days';
"""


def take_money(carrier: Any, message_id: UUID | None, kind: str) -> None:
    """Make the business change beside a message."""
    carrier.execute(text("UPDATE account SET balance = balance - 1"))
    carrier.execute(
        text("INSERT INTO transfer (message_id, kind) VALUES (:id, :kind)"), {"id": message_id, "kind": kind}
    )


def handle(message: Message, session: Session) -> None:
    """Take effect; at the first attempt of a message that says so, fail after that."""
    values = {"id": message.id, "at": message.position, "send": message.send_number, "attempt": message.attempt}
    session.execute(
        text("INSERT INTO effect (message_id, position, send_number, attempt) VALUES (:id, :at, :send, :attempt)"),
        values,
    )
    if message.body.get("fails") and message.attempt == 1:
        raise ValueError("not at the first attempt")


def give_back(message: Message, session: Session) -> None:
    """Undo the local transaction."""
    session.execute(text("UPDATE account SET balance = balance + 1"))
    session.execute(text("INSERT INTO refund VALUES (:id)"), {"id": message.id})


def tell(delivery: Delivery, session: Session) -> None:
    """Write down what the producer is told of a message; the same may be told twice."""
    values = {"id": delivery.message.id, "status": delivery.status.value}
    session.execute(text("INSERT INTO told VALUES (:id, :status)"), values)


def book(message: Message, session: Session) -> None:
    """Book for a saga, and answer."""
    values = {"flow": message.key, "command": message.id}
    session.execute(text("INSERT INTO booking VALUES (:flow, :command)"), values)
    message.reply(session, "booked")


def says_commit(orphan: Orphan) -> Resolution:
    """Know that the local transaction has committed."""
    return Resolution.COMMIT


@dataclass
class World:
    """A database with one business, the `Outbox` of it, and the message that the flows meet at."""

    url: str
    settings: Settings = SETTINGS
    #: The messages that the flows are about, by the stage in which each was seeded.
    subjects: dict[str, UUID] = field(default_factory=dict)
    #: What a stage needs to come to rest, beside the passes of workers.
    nightly: list[Callable[[World], int]] = field(default_factory=list)
    ordered: bool = False
    has_saga: bool = False
    #: How often the handler was called for each message since the tables were put back.
    calls: Counter[UUID] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.engine = create_engine(self.url, poolclass=NullPool)
        conninfo = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._raw = psycopg.connect(conninfo, autocommit=True)
        self._raw.execute(_BUSINESS)
        self._tables = [(str(name), str(short), str(columns)) for name, short, columns in self._raw.execute(_TABLES)]
        self._raw.execute("CREATE SCHEMA seed")
        self._runs = 0
        self._apps: dict[Engine, Outbox] = {}
        # As a worker's.
        self._connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.app = self.outbox(self.engine)
        self.app.declare_topic(TOPIC, 1)

    def outbox(self, engine: Engine) -> Outbox:
        """Return an `Outbox` with all that the application registers."""
        app = Outbox(engine, settings=self.settings)
        app.consumer(TOPIC, group=GROUP, ordered=self.ordered)(self.handle)
        app.compensation(TOPIC)(give_back)
        app.checker(TOPIC)(says_commit)
        app.on_delivered(TOPIC)(tell)
        app.on_undeliverable(TOPIC)(tell)
        if self.has_saga:
            self.saga: Saga[Any] = Saga(app, SAGA, timeout=None)
            self.saga.step(BOOK, BOOK)
            app.consumer(BOOK, group="hotel")(book)
        return app

    def app_on(self, engine: Engine) -> Outbox:
        """Return the `Outbox` of a flow; made once in each world, so that no flow pays for what it reads at first."""
        app = self._apps.get(engine)
        made_for = self.ordered, self.has_saga
        if app is None or (app.subscriptions[TOPIC, GROUP].ordered, OF_SAGA[0] in app.subscriptions) != made_for:
            app = self._apps[engine] = self.outbox(engine)
            _ = app.operator.databases
        return app

    def bind(self) -> None:
        """Make all flows' `Outbox` anew where the stage needs another."""
        for engine in list(self._apps):
            self.app_on(engine)

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()
        self._raw.close()
        self.engine.dispose()

    def handle(self, message: Message, session: Session) -> None:
        """Count the call, and handle the message."""
        self.calls[message.id] += 1
        handle(message, session)

    # --- seeds -------------------------------------------------------------------------------------------

    def run(self, sql: str, **values: Any) -> None:
        """Execute statements by hand."""
        with self.engine.begin() as connection:
            for each in sql.split(";"):
                if each.strip():
                    connection.execute(text(each), values)

    def send(self, kind: str = "send", **options: Any) -> UUID:
        """Send a message with its business change."""
        options.setdefault("key", KEY)
        body = {"fails": options.pop("fails", False)}
        with self.engine.begin() as connection:
            message_id = self.app.send(connection, TOPIC, body, **options)
            take_money(connection, message_id, kind)
        return message_id

    def keep(self) -> None:
        """Keep the tables as they are now, for `reset`."""
        body = []
        for name, short, columns in self._tables:
            self._raw.execute(f"DROP TABLE IF EXISTS seed.{short}; CREATE TABLE seed.{short} AS TABLE {name}".encode())
            body.append(f"DELETE FROM {name};")
            if self._raw.execute(f"SELECT EXISTS (SELECT FROM {name})".encode()).fetchone() == (True,):
                body.append(
                    f"INSERT INTO {name} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM seed.{short};"
                )
        self._raw.execute(
            f"CREATE OR REPLACE FUNCTION seed.reset() RETURNS void LANGUAGE plpgsql AS "
            f"$$ BEGIN {' '.join(body)} END $$".encode()
        )

    def clear(self) -> None:
        """Empty all tables but the account, and forget the subjects."""
        self._raw.execute(
            ("TRUNCATE " + ", ".join(name for name, *_ in self._tables)).encode()
            + b"; INSERT INTO account VALUES (1000)"
        )
        self.subjects.clear()
        self.nightly.clear()
        self.ordered = self.has_saga = False
        self.app = self.outbox(self.engine)
        self.app.declare_topic(TOPIC, 1)

    def reset(self) -> None:
        """Put the tables back as they were kept, in one round trip; a flow may have made a segment."""
        self._runs += 1
        with self._connection.begin():
            made = segments(self._connection, self.settings.schema)
        for segment in made:
            drop_segment(self._connection, self.settings, segment)
        self.calls.clear()
        for engine in (self.engine, *self._apps):  # what a batch has failed by would make the next run another one
            batch_sizes(engine).clear()
        if self._runs % 300 == 0:
            self._raw.execute("VACUUM")
        self._raw.execute("SELECT seed.reset()")

    def state(self) -> dict[str, Any]:
        """Return all rows that an oracle looks at."""
        row = self._raw.execute(_STATE).fetchone()
        assert row
        return dict(row[0])

    # --- what workers do ---------------------------------------------------------------------------------

    def rest(self, passes: int = 25) -> None:
        """Make all passes of a system, with nothing waiting for its time, until none of them does anything."""
        consumers = [self.consumer(self.app), *self.consumers_of_saga(self.app), *self.told()]
        asker = Asker(lambda _: EngineRunner(self.engine), 1)
        try:
            for _ in range(passes):
                if not self._pass(consumers, asker):
                    return
        finally:
            asker.end()
        raise AssertionError("it never comes to rest")

    def _pass(self, consumers: Sequence[Consumer], asker: Asker) -> int:
        connection = self._connection
        self._raw.execute(_AGE)
        counts = [
            drained(lambda: dispatch_once(connection, self.settings)),
            release_due_once(connection, self.settings),
            check_once(connection, self.settings, self.checkers, asker),
            compensate_once(
                connection, self.settings, compensations=self.app.compensations,
                new_runner=lambda _: EngineRunner(self.engine),
            ),
            *(drained(partial(each.consume_once, connection, connection)) for each in consumers),
            *(each.retry_once(connection, connection) for each in consumers),
        ]  # fmt: skip
        taken = sum(count.taken for count in counts)
        return taken or sum(night(self) for night in self.nightly)

    @property
    def checkers(self) -> dict[str, Checker]:
        """Who can be asked about a half."""
        return self.app.checkers

    def consumer(self, app: Outbox) -> Consumer:
        """Return a worker's consumer."""
        return Consumer(app.subscriptions[TOPIC, GROUP], self.settings)

    def consumers_of_saga(self, app: Outbox) -> list[Consumer]:
        """Return those that a worker has for the saga and its participant."""
        return [Consumer(app.subscriptions[each], self.settings) for each in OF_SAGA if each in app.subscriptions]

    def told(self) -> list[Consumer]:
        """Return those that call what the producer has for the fates of messages."""
        return [Consumer(each, self.settings) for each in self.app.subscriptions.values() if each.about is not None]

    def confirm(self) -> int:
        """Learn what became of messages, as the producer's worker does; return of how many something new."""
        return confirm_on(self, self.app, self._connection).taken

    def start_group(self) -> None:
        """Register the group, as a worker does before it consumes."""
        self.consumer(self.app).start(self._connection, self._connection)


def confirm_on(world: World, app: Outbox, connection: Connection) -> Counts:
    """Make a pass that asks what became of messages."""
    return confirm_once(connection, world.settings, groups=app.groups_to_confirm(), callbacks=app.delivery_callbacks)


def drained(one_pass: Callable[[], Counts]) -> Counts:
    """Make a pass until it says that there is no more."""
    counts = total = one_pass()
    for _ in range(30):
        if not counts.more:
            return total
        counts = one_pass()
        total += replace(counts, more=False)
    raise AssertionError("a pass never comes to an end")


# --- stages ----------------------------------------------------------------------------------------------

Stage = Callable[[World], UUID | None]


def nothing(world: World) -> None:
    """Nobody has anything to do."""


def undecided(world: World) -> UUID:
    """A half is prepared, and due to be checked."""
    with world.engine.begin() as connection:
        half_id = world.app.prepare(connection, TOPIC, {}, key=KEY, immunity=0)
        take_money(connection, half_id, "prepare")
    return half_id


def orphan(world: World) -> UUID:
    """A fenced half whose function has died."""
    with world.engine.begin() as connection:
        from outbox.message.model import Outgoing

        body = Outgoing({}, key=KEY)
        half_id: UUID = world.app._producer.prepare(connection, TOPIC, body, immunity=0, fenced=True)
        return half_id


def committed(world: World) -> UUID:
    """A message is sent, and not dispatched."""
    return world.send()


def delayed(world: World) -> UUID:
    """A message for later is sent, and not dispatched."""
    return world.send("late", delay=3600)


def due(world: World) -> UUID:
    """A scheduled message is due."""
    message_id = world.send("late", delay=3600)
    dispatch_once(world._connection, world.settings)
    world.run("UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp() - interval '1 s'")
    return message_id


def dispatched(world: World) -> UUID:
    """A message waits in its queue."""
    message_id = world.send()
    dispatch_once(world._connection, world.settings)
    return message_id


def failing(world: World) -> UUID:
    """A message waits in its queue that will fail at first, and one behind it."""
    message_id = world.send(fails=True)
    world.send()
    dispatch_once(world._connection, world.settings)
    return message_id


def in_order(world: World) -> UUID:
    """The same, for an ordered group."""
    world.ordered = True
    world.app = world.outbox(world.engine)
    return failing(world)


def begun(world: World) -> UUID:
    """A saga was started, and its message waits in its queue."""
    world.has_saga = True
    world.app = world.outbox(world.engine)
    for topic, _ in OF_SAGA:
        world.app.declare_topic(topic, 1)
    for consumer in world.consumers_of_saga(world.app):
        consumer.start(world._connection, world._connection)
    with world.engine.begin() as connection:
        flow_id: UUID = world.saga.start(connection, "Rome")
    dispatch_once(world._connection, world.settings)
    return flow_id


def booked(world: World) -> UUID:
    """A saga has ended, and its participant has booked."""
    flow_id = begun(world)
    world.rest()
    return flow_id


def failed(world: World) -> UUID:
    """A message has failed, its queue has left it behind, and its retry is due."""
    message_id = world.send("failed", fails=True)
    dispatch_once(world._connection, world.settings)
    consumer = world.consumer(world.app)
    drained(lambda: consumer.consume_once(world._connection, world._connection))
    return message_id


def parked(world: World) -> UUID:
    """A message is a dead letter."""
    message_id = failed(world)
    world.app.operator.park(message_id, group=GROUP, by="seed", why="seed")
    world.run("DELETE FROM outbox.audit")
    return message_id


def settled(world: World) -> UUID:
    """A message was consumed so long ago that it may be pruned; a younger one follows it."""
    message_id = newest(world)
    world.send()
    world.rest()
    return message_id


def newest(world: World) -> UUID:
    """A message was consumed so long ago that it may be pruned, and none follows it."""
    message_id = world.send("old")
    world.rest()
    world.run(_LONG_AGO)
    return message_id


def resent(world: World) -> UUID:
    """A message has failed, its retry is due, and it was sent again."""
    message_id = failed(world)
    world.app.operator.resend(message_id, by="seed", why="seed")
    return message_id


def passed(world: World) -> UUID:
    """Dispatch has passed an op without making its message."""
    message_id = world.send("passed")
    world.run("UPDATE outbox.op_message SET xid = '3' WHERE half_id = :id", id=message_id)

    def place(world: World) -> int:
        with world.engine.begin() as connection:
            placed, _ = dispatch_passed(connection, world.settings, [message_id], actor="rest", reason="repair")
        return len(placed)

    world.nightly.append(place)
    return message_id


def missing(world: World) -> UUID:
    """The consumer has lost the inbox row of a message, and its effect with it."""
    message_id = world.send("lost")
    world.rest()
    world.run("DELETE FROM outbox.consumer_message WHERE message_id = :id; DELETE FROM effect WHERE message_id = :id",
              id=message_id)  # fmt: skip

    def send_again(world: World) -> int:
        lacking = text("SELECT count(*) = 0 FROM outbox.consumer_message WHERE message_id = :id")
        with world.engine.connect() as connection:
            if not connection.scalar(lacking, {"id": message_id}):
                return 0
        world.app.operator.resend(message_id, by="rest", why="repair")
        return 1

    world.nightly.append(send_again)
    return message_id


def restored(world: World) -> UUID:
    """The database was restored into another cluster: dispatch has to begin anew."""
    message_id = world.send()
    world.run("UPDATE outbox.dispatch_cursor SET system_identifier = system_identifier - 1")
    return message_id


def promoted(world: World) -> UUID:
    """Another server has taken over the log: dispatch has to begin an epoch."""
    message_id = world.send()
    world.run("UPDATE outbox.dispatch_cursor SET log = 'before the fail-over'")
    return message_id


#: By what their seeding does to what is there already: let all come to rest; dispatch and consume; dispatch; nothing.
STAGES: dict[str, Stage] = {
    stage.__name__: stage
    for stage in (
        nothing, settled, newest, missing, failed, parked, resent, due, dispatched, begun, booked, failing, in_order,
        undecided, orphan, committed, delayed, passed, restored, promoted,
    )
}  # fmt: skip


def seed(world: World, stages: Sequence[str], *orders: Callable[[World], None]) -> None:
    """Seed the stages, and what the flows have ordered about them before they meet; keep the tables so."""
    world.clear()
    # So that the group is known, dispatch has a cursor, and the queue has an end.
    dispatch_once(world._connection, world.settings)
    world.start_group()
    world.send("old")
    world.rest()
    for name in sorted(stages, key=list(STAGES).index):
        subject = STAGES[name](world)
        if subject is not None:
            world.subjects[name] = subject
    for order in orders:
        order(world)
    world.keep()
