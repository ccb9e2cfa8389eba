"""Segments of the inbox go as a whole, when all groups' producers have pruned their messages, and nothing else does."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Message, Settings
from outbox.compensate import sql as compensate_sql
from outbox.consumer import sql as consumer_sql
from outbox.database.execute import Statement, execute
from outbox.message.ids import uuid7_at
from outbox.message.model import uuid7
from outbox.prune import inbox as inbox_module
from outbox.prune import rewrite as rewrite_module
from outbox.prune import segments as module
from outbox.prune.inbox import INBOX
from outbox.prune.prune_pass import prune_consumer_once, prune_segments_once
from outbox.prune.segments import Segment, drop_segment, empty_segment, make_segment, segments
from outbox.reconcile.repair import _INSERT_INBOX
from outbox.reconcile.sql import KEEP, READ_IN_ONE_SNAPSHOT
from tests.doctor.support import codes, examine, the
from tests.kit import Tables, wait_until
from tests.kit.bench import Bench, make_ledger, record

DAY_MS = 86_400_000
#: Segments of that time are old by the default settings, and not overdue.
AGO = 8 * DAY_MS
#: Settings by which they are overdue.
OVERDUE: dict[str, Any] = {"retention": 3600.0, "inbox_retention": 2 * 86400.0}
AGE = """
UPDATE outbox.consumer_message
   SET received_at = received_at - interval '7 days', changed_at = changed_at - interval '7 days',
       discarded_at = discarded_at - interval '7 days'
 WHERE message_id = ANY (:ids)
"""


def moved(id_: UUID, ms: int) -> UUID:
    """Return an id as of another time."""
    return UUID(int=id_.int + (ms << 80))


class Yard(Bench):
    """A producer and an inbox in databases of their own. What is sent has an id of a week ago, in one segment."""

    def __init__(self, producer: Engine, consumer: Engine, settings: Settings) -> None:
        super().__init__(producer, consumer, settings)
        make_ledger(consumer)
        now = uuid7()
        first, end = (UUID(int=moved(now, ms - AGO).int >> 80 << 80) for ms in (-DAY_MS // 12, DAY_MS // 12))
        self.segment = Segment(first, end, "old")
        assert make_segment(self.connection, settings, self.segment, INBOX)
        self.at_producer = Tables(producer)
        self.ago = AGO
        self.tails: set[UUID] = set()

    def consumed(self, *bodies: Any, group: str = "g", topic: str = "t", **options: Any) -> list[UUID]:
        """Send, consume and age messages."""
        ids = self.send(*bodies, topic=topic)
        self.consume(self.declare(group=group, topic=topic, **options))
        self.age(*ids)
        return ids

    def age(self, *ids: UUID) -> None:
        """Make inbox rows a week older."""
        self.run(AGE, ids=list(ids))

    def prune_producer(self, *ids: UUID) -> None:
        """Have the producer prune messages."""
        for table, column in (("message", "half_id"), ("op_message", "half_id"), ("half_message", "id")):
            self.at_producer.run(f"DELETE FROM outbox.{table} WHERE {column} = ANY (:ids)", ids=list(ids))

    def gone(self, *bodies: Any, **options: Any) -> list[UUID]:
        """Send, consume and age messages that the producer prunes."""
        ids = self.consumed(*bodies, **options)
        # The newest message of a queue is never pruned.
        self.ago = 0
        self.tails |= {*self.send("tail", topic=options.get("topic", "t"))}
        self.ago = AGO
        self.consume(self.declare(**options))
        self.prune_producer(*ids)
        return ids

    def prune(self, group: str = "g", topic: str = "t", **changes: Any) -> int:
        """Make the pass of a group; return how many rows it deleted one by one."""
        settings = replace(self.settings, **changes)
        return prune_consumer_once(self.connection, self.source, settings, group, topic).done

    def empty(self, **options: Any) -> int:
        """Empty the segment."""
        return empty_segment(self.connection, self.settings, self.segment, INBOX, **options)

    def left(self, group: str = "g") -> set[UUID]:
        """Return which messages the inbox knows."""
        return set(self.inbox(group)) - self.tails

    def ledger(self) -> list[str]:
        """Return the bodies that were recorded, but those of the newest messages."""
        return [body for body in super().ledger() if body != "tail"]

    def in_segment(self) -> int:
        """Count the rows that are in the segment's partition."""
        return int(self.value("SELECT count(*) FROM outbox.consumer_message_old"))


@pytest.fixture
def yard(engine: Engine, new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A producer and an inbox, on a machine that may be slow."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    with Yard(new_engine(), engine, Settings()) as yard:
        monkeypatch.setattr("outbox.producer.producer.uuid7", lambda: moved(uuid7(), -yard.ago))
        yield yard


# --- what stays ------------------------------------------------------------------------------------------------------


def test_only_what_is_done_with_goes(yard: Yard) -> None:
    """Failed, parked and young rows stay, and those whose message the producer has; what was discarded goes."""
    gone = yard.gone(*range(20))
    there = yard.consumed("the producer has it")
    (young,) = yard.send("young")
    yard.consume(yard.declare())

    def fail(message: Message, session: Any) -> None:
        raise ValueError("no such account")

    failed, parked, discarded, just_discarded = yard.send("failed", "parked", "discarded", "just discarded")
    yard.consume(yard.declare(fail))
    for each in (parked, discarded, just_discarded):
        yard.sink.operator.park(each, group="g", by="me", why="test")
    yard.sink.operator.discard(discarded, group="g", by="me", why="test")
    yard.age(failed, parked, discarded, just_discarded)
    yard.sink.operator.discard(just_discarded, group="g", by="me", why="test")
    yard.gone("last")
    yard.prune_producer(young, failed, parked, discarded, just_discarded)
    assert yard.prune() == 0
    assert yard.empty() == len(gone) + 2
    assert yard.left() == {*there, young, failed, parked, just_discarded}
    assert yard.empty() == 0
    yard.sink.operator.restore(just_discarded, group="g", by="me")
    assert yard.inbox()[just_discarded].status == "parked"
    yard.prune_producer(*there)
    yard.prune()
    assert yard.empty() == 1


def test_a_quarantine_lasts_as_long_as_its_message(yard: Yard) -> None:
    """While the producer has a message that was compensated, its quarantine keeps it out; then it goes."""
    (half_id,) = yard.send("compensated")
    quarantine = compensate_sql.insert("outbox", "t", [compensate_sql.NewQuarantine("g", half_id, 0, 0, None)])
    with yard.connection.begin():
        execute(yard.connection, quarantine)
    yard.age(half_id)
    yard.gone("other")
    yard.prune()
    assert yard.empty() == 1
    yard.resend(half_id)
    yard.dispatch()
    yard.consume(yard.declare())
    assert yard.ledger() == ["other"]
    assert yard.inbox()[half_id].status == "quarantined"
    yard.prune_producer(half_id)
    yard.prune()
    assert yard.empty() == 1
    assert yard.left() == set()


def test_all_groups_must_have_asked(yard: Yard) -> None:
    """What belongs to a group, or to a topic, for which nobody has asked its producer stays; the rest goes."""
    ids = yard.gone(1, 2, 3)
    with yard.observer.begin() as connection:
        copy = text(
            "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts,"
            " changed_at) SELECT 'h', message_id, topic, queue, position, status, attempts, changed_at"
            " FROM outbox.consumer_message WHERE message_id = ANY (:ids)"
        )
        connection.execute(copy, {"ids": ids})
    other = yard.gone("x", topic="u")
    yard.prune()
    assert yard.empty() == 3
    assert (yard.left("h"), yard.left()) == (set(ids), set(other))
    yard.prune("h")
    yard.prune(topic="u")
    assert yard.empty() == 4
    assert yard.in_segment() == 0


def test_a_row_that_is_younger_than_the_question_stays(yard: Yard) -> None:
    """A half of a long transaction may not have been there yet when its producer was asked."""
    yard.gone(1, 2)
    yard.prune()
    yard.run("UPDATE outbox.segment_hold SET asked_at = asked_at - interval '10 days'")
    assert yard.empty() == 0
    yard.prune()
    assert yard.empty() == 2


def test_a_producer_that_has_too_many_is_not_done(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written down then, and nothing goes; a segment that is overdue is pruned row by row."""
    gone, there = yard.gone(*range(5)), yard.consumed(*range(5, 9))
    for name, most in (("FEW", 3), ("_HALVES", 4)):
        with monkeypatch.context() as patch:
            patch.setattr(inbox_module, name, most)
            assert yard.prune() == 0
        assert yard.rows("SELECT * FROM outbox.segment_hold") == []
        assert yard.empty() == 0
    monkeypatch.setattr(inbox_module, "FEW", 3)
    assert yard.prune(**OVERDUE) == len(gone)
    assert yard.left() == set(there)


def test_too_much_to_keep(yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A segment with more to keep than is written again is left alone, and that is told when it is overdue."""
    caplog.set_level(logging.INFO, "outbox.prune")
    yard.gone(*range(5))
    yard.consumed(*range(5, 9))
    yard.prune()
    for name in (module, inbox_module):
        monkeypatch.setattr(name, "FEW", 3)
    assert yard.empty(by_row=True) == 0
    assert [getattr(record, "outbox_event", "") for record in caplog.records] == ["segment.held"]
    assert len(yard.left()) == 9


def test_a_segment_that_is_dropped(yard: Yard) -> None:
    """Its rows move into the DEFAULT partition, where they are still known, and pruned when their time has come."""
    yard.gone(1, 2, 3)
    there = yard.consumed("there")
    yard.prune()
    assert yard.empty() == 3
    assert drop_segment(yard.connection, yard.settings, yard.segment, INBOX)
    assert {*yard.rows("SELECT message_id FROM outbox.consumer_message_default")} == {*there, *yard.tails}
    yard.resend(*there)
    yard.dispatch()
    yard.consume(yard.declare())
    assert yard.ledger() == ["1", "2", "3", "there"]
    assert yard.prune() == 0
    yard.prune_producer(*there)
    assert yard.prune() == 1
    assert yard.left() == set()


def test_odd_ids(yard: Yard) -> None:
    """Ids of another kind, and of clocks that are far off, are in no segment and go row by row."""
    odd = [UUID(int=1), uuid4(), UUID(int=(1 << 128) - 2), uuid7_at(4e9)]
    rows = consumer_sql.consumed("outbox", "g", "t", 0, 0, odd, list(range(4)), [b"x"] * 4)
    with yard.connection.begin():
        execute(yard.connection, consumer_sql.MARK, rows)
    assert yard.left() == set(odd)
    yard.age(*odd)
    assert yard.prune() == 4
    assert yard.left() == set()


def test_doctor_names_the_pair_that_has_not_asked(yard: Yard) -> None:
    """Once a segment is overdue, the doctor says whose rows hold it."""
    yard.gone(1, 2, 3)
    yard.gone("x", topic="u")
    yard.prune()
    ours = examine(yard.consumer, yard.settings)
    assert "segment.held" not in codes(ours)
    overdue = replace(yard.settings, **OVERDUE)
    finding = the(examine(yard.consumer, overdue), "segment.held")
    assert {name: finding.details[name] for name in ("group", "topic")} == {"group": "g", "topic": "u"}
    yard.prune(topic="u")
    assert "segment.held" not in codes(examine(yard.consumer, overdue))


# --- dead rows -------------------------------------------------------------------------------------------------------


def _buffers(yard: Yard) -> int:
    """Count the buffers that a pass with nothing to do touches, and the look at a batch of new messages."""
    start = consumer_sql.start_retry("outbox", group="g", topic="t", ordered=False)
    known = consumer_sql.known("outbox", [moved(uuid7(), -AGO) for _ in range(10)], "g")
    total = 0
    for each in (start, known):
        explain = Statement(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {each.sql}", each.values)
        with yard.connection.begin():
            (((plan,),),) = execute(yard.connection, explain)
        total += sum(plan[0]["Plan"][f"Shared {kind} Blocks"] for kind in ("Hit", "Read"))
    return total


def test_no_dead_rows_and_nothing_to_step_over(yard: Yard) -> None:
    """While a snapshot is held, nothing of what went stays, and passes touch no more of the inbox than before."""
    with yard.observer.connect().execution_options(isolation_level="REPEATABLE READ") as pinned:
        pinned.exec_driver_sql("SELECT pg_current_snapshot()")
        sizes, buffers = [], []
        for _ in range(3):
            yard.gone(*range(1_000), batch=500)
            yard.prune()
            assert yard.empty() == 1_000
            with yard.consumer.connect() as other:
                sizes.append(other.scalar(text("SELECT pg_total_relation_size('outbox.consumer_message_old')")))
            buffers.append(_buffers(yard))
        assert len(set(sizes)) == 1
        assert max(buffers) <= min(buffers) + 5


def test_what_was_written_down_of_segments_leaves_no_dead_rows(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a segment that went nothing stays, not even where a snapshot is held; what counts of others does."""
    monkeypatch.setattr(rewrite_module, "WAIT", 30.0)
    yard.gone(1, 2, 3)
    yard.prune()
    notes = "SELECT to_jsonb(h)::text FROM outbox.segment_hold h"
    (kept,) = yard.rows(notes)
    others = "SELECT consumer_group, topic, gen_random_uuid(), message_ids, asked_at FROM outbox.segment_hold"
    with yard.observer.connect().execution_options(isolation_level="REPEATABLE READ") as pinned:
        pinned.exec_driver_sql("SELECT pg_current_snapshot()")
        yard.run(f"INSERT INTO outbox.segment_hold {others}, generate_series(1, 500)")
        assert yard.empty() == 3
        assert yard.rows(notes) == [kept]
        with yard.consumer.connect() as other:
            assert other.scalar(text("SELECT pg_relation_size('outbox.segment_hold')")) == 8192


# --- what happens meanwhile ------------------------------------------------------------------------------------------


def _consume_late(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    (late,) = yard.send("late")
    yard.consume(yard.declare())
    return {late}


def _retry(yard: Yard, ids: list[UUID]) -> set[UUID]:
    assert yard.retry(yard.declare()).done == 1
    return {ids[0]}


def _quarantine(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    (half_id,) = yard.send("compensated")
    quarantine = compensate_sql.insert("outbox", "t", [compensate_sql.NewQuarantine("g", half_id, 0, 0, None)])
    with yard.sink.engine.begin() as connection:  # type: ignore[union-attr]  # it has a sync engine
        execute(connection, quarantine)
    return {half_id}


def _restore(yard: Yard, ids: list[UUID]) -> set[UUID]:
    yard.sink.operator.restore(ids[1], group="g", by="me")
    return {ids[1]}


def _give_back(yard: Yard, ids: list[UUID]) -> set[UUID]:
    values = {"groups": ["g"], "id": ids[2], "bulk_jobs": [UUID(int=7)]}
    with yard.sink.engine.begin() as connection:  # type: ignore[union-attr]  # it has a sync engine
        execute(connection, compensate_sql.give_back("outbox", **values))
    return {ids[2]}


def _repair(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    lost = moved(uuid7(), -AGO)
    values = {"group": "g", "topic": "t", "status": "consumed", "attempts": 1, "why": "test"}
    values |= {"ids": [lost], "queues": [0], "positions": [1], "digests": [b"x"]}
    yard_insert = Statement(_INSERT_INBOX.replace("{s}", "outbox"), values)
    with yard.sink.engine.begin() as connection:  # type: ignore[union-attr]  # it has a sync engine
        execute(connection, yard_insert)
    return {lost}


def _resend(yard: Yard, ids: list[UUID]) -> set[UUID]:
    yard.resend(ids[3])
    yard.dispatch()
    yard.consume(yard.declare())
    return {ids[3]}


LATE = [_consume_late, _retry, _quarantine, _restore, _give_back, _repair, _resend]


def _plant(yard: Yard) -> list[UUID]:
    """Make rows that somebody may change: a failed, a discarded, a quarantined one, and one that the producer has."""

    def fail(message: Message, session: Any) -> None:
        raise ValueError("no such account")

    failed, discarded, quarantined = yard.send("failed", "discarded", "quarantined")
    yard.consume(yard.declare(fail))
    for each in (discarded, quarantined):
        yard.sink.operator.park(each, group="g", by="me", why="test")
    yard.sink.operator.discard(discarded, group="g", by="me", why="test")
    with yard.connection.begin():
        take = compensate_sql.take("outbox", groups=["g"], id=quarantined, bulk_job=UUID(int=7))
        execute(yard.connection, take)
    yard.age(failed, discarded, quarantined)
    yard.prune_producer(discarded, quarantined)
    return [failed, discarded, quarantined, *yard.consumed("there")]


@pytest.mark.parametrize("happen", LATE)
def test_what_changes_after_the_survey_survives(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, happen: Callable[[Yard, list[UUID]], set[UUID]]
) -> None:
    """Whatever is written into a segment between its survey and its lock is kept."""
    ids = _plant(yard)
    gone = yard.gone(*range(10))
    yard.prune()
    changed: list[UUID] = []
    compact = module._compact

    def after_the_survey(*arguments: Any) -> int:
        changed.extend(happen(yard, ids))
        return compact(*arguments)

    monkeypatch.setattr(module, "_compact", after_the_survey)
    assert yard.empty() >= len(gone)
    assert {*changed, ids[0], ids[3]} <= yard.left()
    assert not yard.left() & set(gone)
    yard.consume(yard.declare())
    assert len(yard.ledger()) == len(set(yard.ledger()))


@pytest.mark.parametrize("happen", LATE)
def test_who_writes_meanwhile_waits_and_goes_on(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, happen: Callable[[Yard, list[UUID]], set[UUID]]
) -> None:
    """Who comes in the middle of the act waits for its end, and finds what was kept: nothing is lost or done twice."""
    ids = _plant(yard)
    gone = yard.gone(*range(10))
    yard.prune()
    if happen in {_restore, _give_back}:  # They went before: there is nothing to change any more.
        gone += ids[1:3]
    written: list[UUID] = []
    problems: list[BaseException] = []

    def write() -> None:
        with Bench(yard.producer, yard.consumer, yard.settings) as other:
            try:
                written.extend(happen(other, ids))  # type: ignore[arg-type]  # what they use is a bench's
            except BaseException as error:
                problems.append(error)

    writer = threading.Thread(target=write)

    def begin_and_see_it_wait(connection: Connection, *statements: Any, **options: Any) -> Any:
        if any("TRUNCATE" in each.sql for each in statements):
            writer.start()
            wait_until(lambda: yard.waiting() or problems, "the writer waits for the segment")
        return execute(connection, *statements, **options)

    monkeypatch.setattr(module, "execute", begin_and_see_it_wait)
    assert yard.empty() >= 10
    writer.join()
    assert not yard.left() & set(gone)
    if happen is _restore:
        assert problems  # It says that there is no such message.
    else:
        assert problems == []
        assert set(written) - {ids[2]} <= yard.left()
    yard.consume(yard.declare())
    assert len(yard.ledger()) == len(set(yard.ledger()))


# --- locks -----------------------------------------------------------------------------------------------------------


def test_a_handler_that_runs_is_not_disturbed(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass gives up, says so, and has changed nothing; neither has the handler waited for it."""
    caplog.set_level(logging.DEBUG, "outbox.prune")
    yard.gone(1, 2, 3)
    yard.prune()
    seen: list[int] = []

    def handle(message: Message, session: Any) -> None:
        record(message, session)
        with yard.consumer.connect() as other:
            seen.append(empty_segment(other, yard.settings, yard.segment, INBOX))

    yard.send("long")
    monkeypatch.setattr(module, "WAIT", 0.1)
    yard.consume(yard.declare(handle))
    assert seen == [0]
    assert "segment.busy" in {getattr(each, "outbox_event", "") for each in caplog.records}
    monkeypatch.setattr(module, "WAIT", 30.0)
    assert yard.empty() == 3
    assert yard.ledger() == ["1", "2", "3", "long"]


def test_a_reconciliation_keeps_its_rows(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snapshot has begun to read isn't truncated under it."""
    ids = yard.gone(1, 2, 3)
    yard.prune()
    with yard.observer.connect() as snapshot, snapshot.begin():
        execute(snapshot, READ_IN_ONE_SNAPSHOT, KEEP["consumer"]("outbox"))
        assert snapshot.scalar(text("SELECT 1"))
        monkeypatch.setattr(module, "WAIT", 0.1)
        assert yard.empty() == 0
        assert set(snapshot.scalars(text("SELECT message_id FROM outbox.consumer_message"))) >= set(ids)
    monkeypatch.setattr(module, "WAIT", 30.0)
    assert yard.empty() == 3


def test_one_worker_at_a_time(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second worker leaves the segment alone."""
    yard.gone(1, 2, 3)
    yard.prune()
    seen: list[int] = []
    with yard.consumer.connect() as second:

        def rival(connection: Connection, *statements: Any, **options: Any) -> Any:
            if any("TRUNCATE" in each.sql for each in statements):
                seen.append(empty_segment(second, yard.settings, yard.segment, INBOX))
            return execute(connection, *statements, **options)

        monkeypatch.setattr(module, "execute", rival)
        assert yard.empty() == 3
        assert seen == [0]


def _both(connection: Connection, yard: Yard) -> None:
    prune_consumer_once(connection, yard.source, yard.settings, "g", "t")
    empty_segment(connection, yard.settings, yard.segment, INBOX)


def _drop(connection: Connection, yard: Yard) -> None:
    drop_segment(connection, yard.settings, yard.segment, INBOX)


@pytest.mark.parametrize("act", [_both, _drop])
def test_a_worker_killed_at_any_statement(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, act: Callable[[Connection, Yard], None]
) -> None:
    """A worker that dies between any two statements leaves all that is needed, and the next one goes on."""
    needed = set(yard.consumed("there"))
    cut_at, statements, died = 0, 0, True

    def cut(connection: Connection, *several: Any, **options: Any) -> Any:
        nonlocal statements
        if connection is not yard.source:
            statements += 1
            if statements == cut_at:
                connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        return execute(connection, *several, **options)

    while died:
        yard.gone(cut_at)
        statements, cut_at = 0, cut_at + 1
        for each in (module, inbox_module):
            monkeypatch.setattr(each, "execute", cut)
        try:
            with yard.consumer.connect() as worker:
                act(worker, yard)
            died = False
        except DBAPIError:
            pass
        for each in (module, inbox_module):
            monkeypatch.setattr(each, "execute", execute)
        assert needed <= yard.left()
    assert cut_at > 5
    yard.prune()
    yard.empty()
    drop_segment(yard.connection, yard.settings, yard.segment, INBOX)
    yard.prune()
    assert yard.left() == needed


# --- which segments --------------------------------------------------------------------------------------------------


def test_a_pass_makes_and_empties_segments(yard: Yard) -> None:
    """The time that comes is covered; what is old goes with its segment, and what is known of that with it."""
    yard.gone(1, 2, 3)
    yard.prune()
    assert prune_segments_once(yard.connection, yard.settings, INBOX).done == 3
    with yard.connection.begin():
        found = segments(yard.connection, "outbox", INBOX)
    assert yard.segment not in found
    assert len(found) == 2
    assert prune_segments_once(yard.connection, yard.settings, INBOX).done == 0
    assert yard.rows("SELECT count(*) FROM outbox.segment_hold") == [0]
    with yard.connection.begin():
        ids = [uuid7()]
        rows = consumer_sql.consumed("outbox", "g", "t", 0, 0, ids, [1], [b"x"])
        execute(yard.connection, consumer_sql.MARK, rows)
    assert yard.rows("SELECT count(*) FROM outbox.consumer_message_default") == [0]


def test_a_late_change_is_found_by_index(yard: Yard) -> None:
    """What is done under the lock reads nothing but what was written lately."""
    yard.gone(*range(300), batch=100)
    survey = INBOX.survey(yard.connection, yard.settings, yard.segment)
    assert survey is not None
    changed = INBOX.changed("outbox", yard.segment, survey)
    with yard.connection.begin():
        execute(yard.connection, Statement("SET LOCAL enable_seqscan = off"))
        (lines,) = execute(yard.connection, Statement(f"EXPLAIN (FORMAT JSON) {changed.sql}"))
    assert "consumer_message_old_late" in json.dumps(lines)
