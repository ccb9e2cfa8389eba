"""A relay into the table `published`: what it has of each message, once; and when it is emptied."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Message, Outbox, Settings, Worker, testing
from outbox.database import migration
from outbox.errors import InvalidHandler
from outbox.prune import segments as segments_module
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.segments import drop_segment, make_segment
from outbox.relay import PublishedTable
from outbox.worker.clock import Clock
from outbox.worker.plan import Plan
from tests.kit import Tables, wait_until
from tests.prune.yard import OLD, WIDE, YOUNG, Yard
from tests.relay.capturing import logical_server
from tests.relay.debezium import inserts, slot

BODIES = "SELECT payload FROM outbox.published ORDER BY number"


class Shop:
    """An application that relays all topics which begin with `order-` into the table."""

    def __init__(self, engine: Engine, settings: Settings, **options: Any) -> None:
        self.engine, self.app, self.tables = engine, Outbox(engine, settings=settings), Tables(engine)
        self.app.relay("order-*", to=PublishedTable(**options), group="cdc")

    def send(self, body: Any, **options: Any) -> UUID:
        """Send a message."""
        with self.engine.begin() as connection:
            return self.app.send(connection, options.pop("topic", "order-paid"), body, **options)

    def relay(self) -> int:
        """Dispatch and relay all there is; return how many messages were relayed."""
        return testing.drain(self.app).done

    def rows(self, columns: str) -> list[Any]:
        """Return these columns of the table, as they were written."""
        return self.tables.rows(f"SELECT {columns} FROM outbox.published ORDER BY number")


@pytest.fixture
def shop(engine: Engine, settings: Settings) -> Shop:
    """One whose table can be written."""
    return Shop(engine, settings)


def test_a_row_has_all_of_its_message(shop: Shop) -> None:
    """Its columns are those that routers take; the time is that of the sender's database, in UTC."""
    before = shop.tables.value("SELECT clock_timestamp() AT TIME ZONE 'UTC'")
    first = shop.send({"n": 1}, key="é", tag="eu", headers={"traceparent": "00-1-2-01", "type": "OrderPaid", "x": "☃"})
    second = shop.send(b"\x00\xff", content_type="application/x-own")
    shop.send("of no pattern", topic="stock")
    assert shop.relay() == 2
    names = "id, aggregatetype, aggregateid, type, payload, content_type, headers, traceparent, tag, send_number"
    headers = {"traceparent": "00-1-2-01", "type": "OrderPaid", "x": "☃"}
    rows = {row[0]: tuple(row) for row in shop.rows(names)}
    assert rows == {
        first: (first, "order-paid", "é", "OrderPaid", b'{"n":1}', "application/json", headers, "00-1-2-01", "eu", 1),
        second: (second, "order-paid", None, "order-paid", b"\x00\xff", "application/x-own", {}, None, None, 1),
    }
    placed = shop.tables.rows("SELECT half_id, queue, position FROM outbox.message WHERE topic = 'order-paid'")
    assert sorted(map(tuple, shop.rows("id, queue, position"))) == sorted(map(tuple, placed))
    times = shop.rows("timestamp")
    assert all(before <= time <= before + dt.timedelta(hours=1) for time in times)


def test_bodies_are_as_they_were_sent(engine: Engine, settings: Settings) -> None:
    """Byte for byte: empty, no UTF-8, stored compressed."""
    shop = Shop(engine, replace(settings, compress_above=100))
    bodies = [b"", b"\xff\xfe\x00", b"z" * 100_000, bytes(range(256)) * 5]
    for body in bodies:
        shop.send(body, key="k")
    assert shop.relay() == 4
    assert shop.tables.value("SELECT max(length(body)) FROM outbox.half_message") < 100_000
    assert [bytes(body) for body in shop.rows("payload")] == bodies


def test_only_what_was_committed(shop: Shop) -> None:
    """Neither what is rolled back, with its transaction or a savepoint, nor what is undecided."""
    with shop.engine.connect() as connection:
        shop.app.send(connection, "order-paid", "rolled back")
        connection.rollback()
        with connection.begin_nested() as savepoint:
            shop.app.send(connection, "order-paid", "to a savepoint")
            savepoint.rollback()
        shop.app.prepare(connection, "order-paid", "undecided")
        later = shop.app.prepare(connection, "order-paid", "decided later")
        never = shop.app.prepare(connection, "order-paid", "decided against")
        connection.commit()
    shop.app.rollback(never)
    assert shop.relay() == 0
    shop.app.commit(later)
    assert shop.relay() == 1
    assert shop.rows("id") == [later]


def test_the_order_of_each_key(shop: Shop) -> None:
    """It is that of the rows; a batch is written at once."""
    sent = [(f"k{number % 7}", number) for number in range(300)]
    with shop.engine.begin() as connection:
        for key, number in sent:
            shop.app.send(connection, "order-paid", number, key=key)
    assert shop.relay() == 300
    rows = [(key, int(body)) for key, body in shop.rows("aggregateid, payload")]
    for key in {key for key, _ in sent}:
        assert [row for row in rows if row[0] == key] == [each for each in sent if each[0] == key]
    assert len(set(shop.tables.rows("SELECT xmin::text FROM outbox.published"))) <= 8 * 2


def test_what_is_read_again_is_written_again(shop: Shop) -> None:
    """Under the same id, when the group is reset; what is sent again isn't, for the group has it."""
    id_ = shop.send(1)
    shop.relay()
    operator = shop.app.operator
    operator.resend([id_], by="me", why="test")
    shop.relay()
    assert shop.rows("id") == [id_]
    operator.reset_group("cdc", "order-paid", "first", by="me", why="test")
    shop.relay()
    assert shop.rows("id") == [id_] * 2
    assert len(set(shop.rows("number"))) == 2


def test_a_table_that_cannot_be_written_costs_no_attempt(shop: Shop) -> None:
    """The breaker opens; when the table is there again, all is written once."""
    ids = [shop.send(number, key="k") for number in range(3)]
    shop.tables.run("ALTER TABLE outbox.published RENAME TO away")
    shop.relay()
    (why,) = shop.tables.rows("SELECT opened_because FROM outbox.group_control WHERE opened_at IS NOT NULL")
    assert "published" in why
    assert shop.tables.rows("SELECT FROM outbox.consumer_message") == []
    shop.tables.run("ALTER TABLE outbox.away RENAME TO published")
    shop.tables.run("UPDATE outbox.group_control SET trial_at = clock_timestamp() - interval '1 ms'")
    assert shop.relay() == 3
    assert shop.rows("id") == ids
    assert shop.tables.rows("SELECT DISTINCT attempts FROM outbox.consumer_message") == [1]


def test_a_type_that_is_none_is_the_fault_of_its_message(engine: Engine, settings: Settings) -> None:
    """It is parked, since it would stop the router for good; the others are written, those of its key too."""

    def type_of(message: Message) -> Any:
        return {1: None, 2: "a\0b"}.get(message.body, f"v{message.body}")

    shop = Shop(engine, settings, type_of=type_of)
    for number in range(4):
        shop.send(number, key="k")
    shop.relay()
    assert shop.rows("type") == ["v0", "v3"]
    assert len(shop.tables.rows("SELECT FROM outbox.consumer_message WHERE status = 'parked'")) == 2


def test_what_a_router_takes_is_never_null(shop: Shop) -> None:
    """Only the key can be, and what a router takes when it is told to."""
    nullable = """
    SELECT attname::text FROM pg_attribute
     WHERE attrelid = 'outbox.published'::regclass AND attnum > 0 AND NOT attnotnull ORDER BY 1"""
    assert shop.tables.rows(nullable) == ["aggregateid", "tag", "traceparent"]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_every_driver(engine: Engine, settings: Settings, driver: str) -> None:
    """A worker relays on whatever engine its application has."""
    url = make_url(engine.url).set(drivername=f"postgresql+{driver}")
    own: Any = create_async_engine(url) if driver == "asyncpg" else create_engine(url)
    app, tables = Outbox(own, settings=settings), Tables(engine)
    app.relay("order-*", to=PublishedTable())
    sender = Outbox(engine, settings=settings)
    with engine.begin() as connection:
        sender.send(connection, "order-paid", b"\xff", headers={"x": "é"})
        sender.send(connection, "order-paid", b"", key="k")
    with Worker(app):
        wait_until(lambda: len(tables.rows("SELECT FROM outbox.published")) == 2, "both are written")
    assert sorted(bytes(body) for body in tables.rows(BODIES)) == [b"", b"\xff"]


def test_each_tenant_has_its_own(engine: Engine, settings: Settings) -> None:
    """The table is that of the schema whose messages are relayed."""
    migration.upgrade(engine.url.render_as_string(hide_password=False), schema="second")
    app = Outbox(settings=settings)
    app.relay("order-*", to=PublishedTable())
    tenants = [app.bound_to(engine), app.bound_to(engine, schema="second")]
    for number, tenant in enumerate(tenants):
        with engine.begin() as connection:
            tenant.send(connection, "order-paid", number)
    with Worker(*tenants):
        for number, schema in enumerate(("outbox", "second")):
            rows = f"SELECT payload FROM {schema}.published"
            wait_until(lambda rows=rows: Tables(engine).rows(rows), "it is written")  # type: ignore[misc]
            assert [bytes(body) for body in Tables(engine).rows(rows)] == [str(number).encode()]


def test_what_it_needs_is_known_before(settings: Settings) -> None:
    """A worker looks for its right at the start; what is for handlers outside of transactions is refused."""
    app = Outbox(create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none"), settings=settings)
    app.relay("order-paid", to=PublishedTable())
    assert app.subscriptions["order-paid", "relay-published"].batch == 500
    plan = Plan(app, frozenset({"consume"}), Clock(), producing=False, stopping=threading.Event())
    assert "publish" in plan.needs[plan._own, "producer"]
    plan.end()
    with pytest.raises(InvalidHandler, match="concurrency"):
        app.relay("order-lost", to=PublishedTable(), concurrency=2)
    with pytest.raises(InvalidHandler, match="block"):
        app.relay("order-lost", to=PublishedTable(), on_exhausted="block")  # type: ignore[arg-type]  # what is tested


# --- prune -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logical_url() -> Iterator[str]:
    """The URL of a database whose WAL has a slot."""
    with logical_server() as server, slot(server.url("shop")):
        yield server.url("shop")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be slow."""
    monkeypatch.setattr(segments_module, "WAIT", 30.0)


@pytest.mark.usefixtures("patient")
def test_prune_takes_rows_with_their_segment_and_writes_none_again(logical_url: str) -> None:
    """Whatever partition they are in, and whatever of their halves is kept: readers of the WAL see nothing of it."""
    engine = create_engine(logical_url)
    shop = Shop(engine, YOUNG)
    for number in range(10):
        shop.send(number, key="k")
    shop.relay()
    assert inserts(logical_url) == 10
    yard = Yard(engine)  # which moves them out of the DEFAULT partition
    assert shop.tables.value("SELECT count(*) FROM outbox.published_wide") == 10
    assert inserts(logical_url) == 0
    assert yard.empty() == 9
    assert len(yard.left()) == 1
    assert shop.rows("id") == []
    id_ = shop.send("late")
    shop.relay()
    assert inserts(logical_url) == 1
    assert drop_segment(yard.connection, OLD, WIDE)
    assert id_ in yard.left()
    assert shop.rows("id") == []
    assert make_segment(yard.connection, YOUNG, WIDE)
    shop.send("last")
    assert shop.relay() == 1
    assert inserts(logical_url) == 1
    yard.connection.close()
    engine.dispose()


def _relayed(shop: Shop) -> list[UUID]:
    ids = [shop.send(number, key="k") for number in range(3)]
    ids += [shop.send(number, key="k", dedupe=f"order-{number}") for number in range(3)]
    shop.relay()
    return ids


def test_prune_takes_rows_one_by_one(engine: Engine) -> None:
    """Those of business strings' ids too; a row that was written when its half had gone goes as well."""
    shop = Shop(engine, YOUNG)
    ids = _relayed(shop)
    assert set(shop.rows("id")) == set(ids)
    with engine.connect() as connection:
        prune_producer_once(connection, OLD)
        assert len(shop.rows("id")) == 1  # of the newest message of its queue, which stays
        shop.tables.run(
            "INSERT INTO outbox.published (id, aggregatetype, type, payload, timestamp, content_type, headers, queue,"
            " position, send_number) VALUES (:id, 't', 't', '', now(), '', '{}', 0, 1, 1)",
            id=ids[0],
        )
        assert len(shop.rows("id")) == 2
        prune_producer_once(connection, OLD)
    assert ids[0] not in shop.rows("id")
