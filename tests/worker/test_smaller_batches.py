"""A batch that fails as a whole is tried with fewer rows, down to one, and then with more again: each kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox, Outgoing, Settings
from outbox.acts.changes import Target
from outbox.check.check_pass import check_fences
from outbox.database.execute import batch_sizes, by_size, driver_of
from outbox.delivery.confirm_pass import confirm_once
from outbox.dispatch.dispatch_pass import dispatch_once, release_due_once
from outbox.operator import model
from outbox.operator.bulk.run import bulk_once
from outbox.prune.prune_pass import prune_consumer_once, prune_producer_once, prune_records_once
from outbox.telemetry.events import BatchTooLarge
from outbox.telemetry.hooks import add_hook
from tests.kit import Tables, consume_all, declare, dispatch_all

WHO = {"by": "test", "why": "test"}
ROWS, MOST = 25, 3
SETTINGS = Settings(queues=2, retention=1e-6, undelivered_retention=0.0)
#: Has a statement fail that changes more rows of a table than it may, as one does that takes too long for the server.
TOO_MANY = """
CREATE FUNCTION outbox.too_many() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT count(*) FROM changed) > {most} THEN RAISE 'too many' USING ERRCODE = '{code}'; END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER too_many AFTER {verb} ON outbox.{table} REFERENCING {when} TABLE AS changed
FOR EACH STATEMENT EXECUTE FUNCTION outbox.too_many()
"""


class Shop(Tables):
    """An outbox and its inbox in one database, with messages that are consumed."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.engine = engine
        self.app = Outbox(engine, settings=SETTINGS)

    def send(self, count: int = ROWS, **options: Any) -> list[Any]:
        """Send messages, which have a queue of their own each time."""
        with self.engine.begin() as connection:
            return [self.app.send(connection, "t", number, key="k", **options) for number in range(count)]

    def consume(self) -> None:
        """Dispatch and consume all."""
        dispatch_all(self.engine, SETTINGS)
        consumer = declare(self.engine, "t", "g", lambda message, session: None, settings=SETTINGS)
        with self.engine.connect() as connection:
            consumer.start(connection, connection)
            consume_all(consumer, connection, connection)

    def limit(self, table: str, verb: str, code: str = "57014", most: int = MOST) -> None:
        """Have statements fail that change more rows."""
        when = "OLD" if verb == "DELETE" else "NEW"
        self.run(TOO_MANY.format(table=table, verb=verb, when=when, code=code, most=most))


@pytest.fixture
def shop(engine: Engine) -> Shop:
    """The shop."""
    return Shop(engine)


@pytest.fixture
def told() -> Iterator[list[BatchTooLarge]]:
    """The batches that were told to be too large."""
    found: list[BatchTooLarge] = []
    remove = add_hook(lambda event: found.append(event) if isinstance(event, BatchTooLarge) else None)
    yield found
    remove()


def dispatch(shop: Shop, connection: Connection) -> int:
    """Messages that are sent."""
    while dispatch_once(connection, SETTINGS).more:
        pass
    return int(shop.value("SELECT count(*) FROM outbox.message"))


def release(shop: Shop, connection: Connection) -> int:
    """Messages that are due."""
    while release_due_once(connection, SETTINGS).more:
        pass
    return int(shop.value("SELECT count(*) FROM outbox.message"))


def hold(shop: Shop, connection: Connection) -> int:
    """Messages that are due, and whose topic is paused."""
    while release_due_once(connection, SETTINGS).more:
        pass
    return int(shop.value("SELECT count(*) FROM outbox.scheduled_message WHERE held_topic IS NOT NULL"))


def prune(shop: Shop, connection: Connection) -> int:
    """Halves that are settled, but the last of each queue."""
    return prune_producer_once(connection, SETTINGS).done + 1


def prune_inbox(shop: Shop, connection: Connection) -> int:
    """Inbox rows whose halves are gone."""
    return prune_consumer_once(connection, connection, SETTINGS, "g", "t").done


def prune_records(shop: Shop, connection: Connection) -> int:
    """Samples that are old."""
    return prune_records_once(connection, SETTINGS).taken


def confirm(shop: Shop, connection: Connection) -> int:
    """Deliveries of messages that a group has parked: what it has consumed needs none."""
    shop.app.known_group("t", group="g")
    shop.run("UPDATE outbox.consumer_message SET status = 'parked'")
    groups = shop.app.groups_to_confirm()
    return confirm_once(connection, Settings(confirm_grace=0.0), groups=groups, callbacks={}).parked


def check(shop: Shop, connection: Connection) -> int:
    """Fenced halves that are due."""
    done = 0
    while (counts := check_fences(connection, SETTINGS)).taken:
        done += counts.done
    return done


def bulk(shop: Shop, connection: Connection) -> int:
    """Items of a bulk job."""
    while bulk_once(connection, SETTINGS).more:
        pass
    return int(shop.value("SELECT count(*) FROM outbox.bulk_item WHERE state = 'done'"))


def delete_group(shop: Shop, connection: Connection) -> int:
    """Inbox rows of a group that is deleted."""
    shop.app.operator.delete_group("g", "t", **WHO)
    return ROWS - int(shop.value("SELECT count(*) FROM outbox.consumer_message"))


def scheduled(shop: Shop) -> None:
    """Have messages due that were sent for later."""
    shop.send(delay=3600)
    dispatch_all(shop.engine, SETTINGS)
    shop.run("UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")


def held(shop: Shop) -> None:
    """Have them due while their topic is paused."""
    shop.send(delay=3600)
    dispatch_all(shop.engine, SETTINGS)
    shop.app.operator.pause_topic("t", by="me", why="test")
    shop.run("UPDATE outbox.scheduled_message SET deliver_at = clock_timestamp()")


def consumed(shop: Shop) -> None:
    """Have messages consumed."""
    shop.send()
    shop.consume()


def forgotten(shop: Shop) -> None:
    """Have their halves gone."""
    consumed(shop)
    for table in ("message", "op_message", "half_message"):
        shop.run(f"DELETE FROM outbox.{table}")
    shop.run("UPDATE outbox.consumer_message SET changed_at = now() - interval '1 year'")


def sampled(shop: Shop) -> None:
    """Have old samples."""
    shop.run(
        "INSERT INTO outbox.stats_sample (sampled_at, stats)"
        f" SELECT now() - interval '30 days' - n * interval '1 minute', '{{}}' FROM generate_series(1, {ROWS}) n"
    )


def prepared(shop: Shop) -> None:
    """Have fenced halves due."""
    with shop.engine.begin() as connection:
        for _ in range(ROWS):
            shop.app._producer.prepare(connection, "t", Outgoing({}), fenced=True, immunity=0)


def ordered(shop: Shop) -> None:
    """Have messages ordered to be sent again."""
    ids = shop.send()
    dispatch_all(shop.engine, SETTINGS)
    shop.app.operator.start("resend", model.Selector(targets=tuple(Target(id_) for id_ in ids)), by="me", why="test")


Act = Callable[[Shop, Connection], int]
BATCHES: dict[str, tuple[Callable[[Shop], Any], Act, str, str]] = {
    "dispatch": (Shop.send, dispatch, "message", "INSERT"),
    "release": (scheduled, release, "message", "INSERT"),
    "hold": (held, hold, "scheduled_message", "UPDATE"),
    "prune": (consumed, prune, "half_message", "DELETE"),
    "prune inbox": (forgotten, prune_inbox, "consumer_message", "DELETE"),
    "prune records": (sampled, prune_records, "stats_sample", "DELETE"),
    "confirm": (consumed, confirm, "delivery", "INSERT"),
    "check": (prepared, check, "op_message", "INSERT"),
    "bulk": (ordered, bulk, "message", "INSERT"),
    "delete group": (consumed, delete_group, "consumer_message", "DELETE"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_each_kind_of_batch_is_done(shop: Shop, told: list[BatchTooLarge], name: str) -> None:
    """With as few rows as may be, in one pass after another, and each once."""
    prepare, act, table, verb = BATCHES[name]
    prepare(shop)
    shop.limit(table, verb)
    with shop.engine.connect() as connection:
        assert act(shop, connection) == ROWS
    assert told


@pytest.mark.parametrize("code", ["57014", "55P03", "25P04", "53200", "40P01", "23514"])
def test_whatever_a_batch_fails_by(shop: Shop, told: list[BatchTooLarge], code: str) -> None:
    """A time-out, a lock, too little memory, a row: with one row at a time it is done, and then it grows again."""
    shop.send()
    shop.limit("message", "INSERT", code, most=1)
    with shop.engine.connect() as connection:
        assert dispatch(shop, connection) == ROWS
        assert {event.batch for event in told} == {"dispatch"}
        order = "SELECT (convert_from(h.body, 'UTF8'))::int FROM outbox.message m JOIN outbox.half_message h"
        assert shop.rows(f"{order} ON h.id = m.half_id ORDER BY m.position") == list(range(ROWS))
        shop.run("DROP FUNCTION outbox.too_many CASCADE")
        told.clear()
        shop.send(100)
        assert dispatch(shop, connection) == ROWS + 100
    assert told == []
    assert batch_sizes(shop.engine)["dispatch", "outbox"] > 10


def test_what_fails_with_any_number_of_rows(shop: Shop, told: list[BatchTooLarge]) -> None:
    """It is tried once in a pass: no privilege, and no server."""
    shop.send()
    shop.limit("message", "INSERT", "42501", most=0)
    with shop.engine.connect() as connection, pytest.raises(DBAPIError, match="too many"):
        dispatch_once(connection, SETTINGS)
    assert told == []
    assert ("dispatch", "outbox") not in batch_sizes(shop.engine)


def test_a_time_out_of_statements(shop: Shop, told: list[BatchTooLarge]) -> None:
    """The server's own, of a role or a database: rows that take 20 ms each, and statements that may take 200."""
    shop.send(40)
    shop.run("""
        CREATE FUNCTION outbox.slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_sleep(0.02); RETURN NEW;
        END $$;
        CREATE TRIGGER slowly BEFORE INSERT ON outbox.message FOR EACH ROW EXECUTE FUNCTION outbox.slowly()""")
    with shop.engine.connect() as connection:
        connection.execute(text("SET statement_timeout = '200ms'"))
        connection.commit()
        assert dispatch(shop, connection) == 40
    assert "statement timeout" in told[0].reason


def test_a_connection_that_a_batch_has_cost(shop: Shop, told: list[BatchTooLarge]) -> None:
    """The next batch has half of the rows, whatever the server could still say; one of one row stays at that."""
    sizes: list[int] = []

    def attempt(size: int) -> tuple[int]:
        sizes.append(size)
        if len(sizes) < 5:
            driver_of(connection).close()
            connection.exec_driver_sql("SELECT 1")
        return (int(len(sizes) > 5),)

    for _ in range(7):
        with shop.engine.connect() as connection, suppress(DBAPIError):
            by_size(connection, ("lost",), 4, attempt)
    assert sizes == [4, 2, 1, 1, 1, 1, 2]
    assert [event.size for event in told] == [4, 2]
