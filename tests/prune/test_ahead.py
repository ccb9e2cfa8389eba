"""Where the DEFAULT partitions are large, segments are made far ahead: nobody waits until their rows are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from outbox import Outbox
from outbox.database.execute import Statement, execute
from outbox.database.tables import SEGMENTED
from outbox.message.ids import uuid7_at
from outbox.prune import ahead
from outbox.prune import segments as module
from outbox.prune.ahead import make_ahead, refusal_of
from outbox.prune.inbox import INBOX
from outbox.prune.segments import Segment, segments
from tests.dispatch.support import dispatch_all, messages
from tests.kit import Tables, wait_until
from tests.prune.dying import patient
from tests.prune.yard import HALF, OP, YOUNG

TABLES = ("message", "half_message", "op_message")
CHECKS = "SELECT count(*) FROM pg_constraint WHERE conname = 'segments_ahead'"
LOCKS = """
SELECT DISTINCT mode FROM pg_locks
 WHERE pid = :pid AND relation IN (SELECT oid FROM pg_class WHERE relname ~ '^(half_|op_)?message(_default)?$')
"""
ROWS = """
WITH half AS (
    INSERT INTO outbox.half_message (id, producer_group, topic, content_type, body)
    SELECT (lpad(to_hex(1600000000000 + n), 12, '0') || '-7000-8000-000000000000')::uuid, 'g', 't', '', ''
      FROM generate_series(1, 300000) n RETURNING id
), op AS (
    INSERT INTO outbox.op_message (half_id, resolution, decided_by)
    SELECT id, 'commit', 'producer' FROM half RETURNING half_id
)
INSERT INTO outbox.message (topic, queue, position, half_id, send_number)
SELECT 't', 0, row_number() OVER (ORDER BY half_id), half_id, 1 FROM op
"""


class Stopped(Exception):
    """A pass was stopped."""


class Ahead(Tables):
    """A producer, and a worker that makes its segments."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.app = Outbox(engine, settings=YOUNG)
        self.connection = engine.connect()

    def make(self) -> list[Segment]:
        """Make segments, and return those that are there."""
        make_ahead(self.connection, YOUNG)
        with self.connection.begin():
            return segments(self.connection, "outbox")

    def make_until(self, word: str) -> None:
        """Make segments; stop before the first statement with this word."""

        def stopping(connection: Connection, *statements: Statement, **options: Any) -> Any:
            if any(word in each.sql for each in statements):
                raise Stopped
            return execute(connection, *statements, **options)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(ahead, "execute", stopping)
            patch.setattr(module, "execute", stopping)
            self.make()

    def send(self) -> UUID:
        """Send a message, which nobody may hold up."""
        with self.observer.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '1ms'"))
            return self.app.send(connection, "t", "body", key="k")

    def refused(self) -> list[Segment]:
        """Return the segments whose ids are refused."""
        with self.connection.begin():
            refusal = refusal_of(self.connection, "outbox")
        return list(refusal.segments) if refusal else []


@pytest.fixture
def producer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    """A producer whose DEFAULT partitions are taken for large ones."""
    patient(monkeypatch)
    producer = Ahead(engine)
    yield producer
    producer.connection.close()


def test_a_large_table_is_not_read_under_a_lock(producer: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL takes the CHECK for a proof when a segment is attached, of each table and for each segment."""
    monkeypatch.undo()
    monkeypatch.setattr(module, "WAIT", 30.0)
    producer.run(ROWS)
    notices: list[str] = []
    driver: Any = producer.connection.connection.dbapi_connection
    driver.add_notice_handler(lambda diagnostic: notices.append(diagnostic.message_primary))
    producer.connection.execute(text("SET client_min_messages = debug1"))
    producer.connection.commit()
    made = producer.make()
    assert len(made) == 2 + ahead._BEHIND
    for table in TABLES:
        implied = f'updated partition constraint for default partition "{table}_default" is implied by existing'
        assert len([each for each in notices if each.startswith(implied)]) == len(made)
    assert producer.value(CHECKS) == 0
    assert all(each.end == later.first for each, later in pairwise(made))
    with producer.connection.begin():
        now = module.now_ms(producer.connection)
    assert (made[0].first.int >> 80) - now >= ahead._lead(YOUNG) * 1000
    # They are made once. What is sent until they begin goes into the DEFAULT partitions.
    assert producer.make() == made
    half_id = producer.send()
    assert producer.rows("SELECT id FROM outbox.half_message_default WHERE id = :id", id=half_id) == [half_id]
    assert producer.value("SELECT count(*) FROM outbox.half_message") == 300_001


def test_nobody_waits_for_the_validation(producer: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the rows are read, others send, dispatch, and read."""
    sent, modes = [producer.send()], set[str]()

    def validating(connection: Connection, *statements: Statement, **options: Any) -> Any:
        results = execute(connection, *statements, **options)
        if any("VALIDATE" in each.sql for each in statements):
            modes.update(producer.rows(LOCKS, pid=connection.scalar(text("SELECT pg_backend_pid()"))))
            sent.append(producer.send())
            with producer.observer.connect() as other:
                dispatch_all(other, YOUNG)
                assert {each.id for each in messages(other)} == set(sent)
        return results

    monkeypatch.setattr(ahead, "execute", validating)
    assert len(producer.make()) == 1
    assert len(sent) == 1 + len(SEGMENTED["producer"])
    assert "ShareUpdateExclusiveLock" in modes
    assert not {mode for mode in modes if "Exclusive" in mode} - {"ShareUpdateExclusiveLock"}


@pytest.mark.parametrize("word", ["ADD CONSTRAINT", "VALIDATE", "ATTACH", "DROP CONSTRAINT"])
def test_a_lock_that_cannot_be_had(producer: Ahead, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """The pass gives up, whatever step it has come to; the next one goes on from there."""
    producer.make_until(word)
    monkeypatch.setattr(module, "WAIT", 0.1)
    monkeypatch.setattr(ahead, "_PATIENCE", 0.1)
    mode = "SHARE UPDATE EXCLUSIVE" if word == "VALIDATE" else "ROW EXCLUSIVE"
    with producer.observer.connect() as other, other.begin():
        other.execute(text(f"LOCK TABLE outbox.op_message, outbox.op_message_default IN {mode} MODE"))
        assert producer.make() == [] or word == "DROP CONSTRAINT"
        assert producer.value(CHECKS) == (0 if word == "ADD CONSTRAINT" else len(SEGMENTED["producer"]))
    monkeypatch.setattr(module, "WAIT", 30.0)
    assert len(producer.make()) == 1
    assert producer.value(CHECKS) == 0


@pytest.mark.parametrize("word", ["VALIDATE", "ATTACH", "DROP CONSTRAINT"])
def test_ids_of_the_time_to_come_are_let_in_before_it_comes(
    producer: Ahead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str
) -> None:
    """A CHECK that a killed worker has left behind doesn't outlive half the time until its ids come."""
    producer.make_until(word)
    (refused,) = producer.refused()
    id_ = UUID(int=refused.first.int + 1)
    if word != "DROP CONSTRAINT":
        with pytest.raises(IntegrityError, match="segments_ahead"):
            producer.run(HALF, id=id_)
    # As long ahead as this, it is as near as half the way.
    monkeypatch.setattr(ahead, "_LEAD", 100 * ahead._lead(YOUNG))
    make_ahead(producer.connection, YOUNG)
    warnings = [getattr(record, "outbox_event", "") for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["segments.given_up"]
    assert producer.value(CHECKS) == 0
    producer.run(HALF, id=id_)


def test_rows_of_clocks_that_are_ahead(producer: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment whose ids are there already isn't made; the others are, and whatever is sent later stays."""
    monkeypatch.setattr(ahead, "_BEHIND", 1)
    length = module.segment_length(YOUNG.retention)
    with producer.connection.begin():
        now = module.now_ms(producer.connection) / 1000
    in_the_second = uuid7_at((now // length + 4.5) * length)
    odd = [in_the_second, UUID(int=1), UUID(int=(1 << 128) - 1), uuid7_at(now + 365 * 86400)]
    for id_ in odd:
        producer.run(HALF, id=id_)
        producer.run(OP, id=id_)
    made = producer.make()
    assert len(made) == 2
    assert not any(each.first <= in_the_second < each.end for each in made)
    assert set(producer.rows("SELECT id FROM outbox.half_message_default")) == set(odd)
    assert producer.value(CHECKS) == 0


def test_there_is_no_end_of_segments(producer: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the end of the last one comes near, the next ones begin where it ends; with another length, too."""
    found = [first] = producer.make()
    other, passed = replace(YOUNG, retention=YOUNG.retention * 0.7), ahead._lead(YOUNG)
    while len(found) == 1:
        # The same as if time had passed.
        monkeypatch.setattr(ahead, "_LEAD", passed)
        make_ahead(producer.connection, other)
        with producer.connection.begin():
            found = segments(producer.connection, "outbox")
        passed += module.segment_length(other.retention) / 2
    assert found[0] == first
    assert len(found) > 1
    assert all(each.end == later.first for each, later in pairwise(found))


def test_a_small_table_is_read_at_once(producer: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little is in the DEFAULT partitions, the segment of now is made, and no id is ever refused."""
    monkeypatch.setattr(ahead, "_SMALL", 8 << 20)
    half_id = producer.send()
    made = producer.make()
    assert made[0].first <= half_id < made[0].end
    assert producer.value(CHECKS) == 0


def test_two_workers(producer: Ahead, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that comes while another one reads the rows leaves it alone."""
    caplog.set_level(logging.DEBUG, "outbox.prune")
    calls: list[int] = []

    def validating(connection: Connection, *statements: Statement, **options: Any) -> Any:
        if any("VALIDATE" in each.sql for each in statements) and not calls:
            calls.append(1)
            with producer.observer.connect() as rival:
                make_ahead(rival, YOUNG)
        return execute(connection, *statements, **options)

    monkeypatch.setattr(ahead, "execute", validating)
    assert len(producer.make()) == 1
    assert producer.value(CHECKS) == 0
    wait_until(lambda: not producer.waiting(), "nobody waits")


def test_messages_that_are_kept_for_years(producer: Ahead) -> None:
    """Segments are as long as that, and as far ahead; no limit is too large for the server."""
    year = 366 * 86400.0
    make_ahead(producer.connection, replace(YOUNG, retention=3 * year, inbox_retention=4 * year))
    with producer.connection.begin():
        assert len(segments(producer.connection, "outbox")) == 1


def test_so_does_the_inbox(producer: Ahead) -> None:
    """By the same steps, with its own CHECK."""
    make_ahead(producer.connection, YOUNG, INBOX)
    with producer.connection.begin():
        assert len(segments(producer.connection, "outbox", INBOX)) == 1
        assert segments(producer.connection, "outbox") == []
    assert producer.value(CHECKS) == 0
    assert producer.make()
