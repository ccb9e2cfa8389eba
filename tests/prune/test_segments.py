"""Segments are emptied as a whole: nothing that somebody could still need goes, and nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outbox import Outbox
from outbox.consumer.sql import message_by_id
from outbox.consumer.subscription import EVERYTHING
from outbox.database.execute import execute
from outbox.database.sql import limits
from outbox.dispatch.dispatch_pass import release_due_once
from outbox.message.ids import uuid7_at
from outbox.prune import segments as module
from outbox.prune import segments_sql
from outbox.prune.prune_pass import prune_producer_once
from outbox.prune.segments import drop_segment, empty_segment, gaps, make_segment, segments
from outbox.reconcile.sql import KEEP, READ_IN_ONE_SNAPSHOT
from tests.dispatch.support import act, dispatch_all, messages
from tests.kit import Tables, wait_until
from tests.prune.yard import HALF, OLD, OP, WIDE, YOUNG, Yard


@pytest.fixture
def yard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Yard]:
    """A producer, on a machine that may be slow."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    yard = Yard(engine)
    yield yard
    yard.connection.close()


# --- what stays ------------------------------------------------------------------------------------------------------


def test_what_is_needed_survives(yard: Yard) -> None:
    """Of all that is in a segment, only what is settled and old goes; then nothing is left that isn't needed."""
    gone = yard.send("a", "b", "c") + yard.send("a", "b", "c")
    newest = set(yard.send(*"abcdefgh")[-8:])
    newest = {each.id for each in messages(yard.connection) if each.id in newest} & _newest(yard)
    undecided, parked = yard.prepare(), yard.prepare()
    yard.run("UPDATE outbox.half_check SET parked_at = now(), reason = 'r' WHERE half_id = :id", id=parked)
    rolled_back, committed = yard.prepare(), yard.prepare()
    yard.app.rollback(rolled_back)
    (scheduled,), (recalled,) = yard.send("x", delay=10**9), yard.send("y", delay=10**9)
    yard.app.operator.recall(recalled, by="test", why="test")
    yard.app.commit(committed)  # and not dispatched
    young = yard.prepare()
    yard.app.rollback(young)
    yard.run("UPDATE outbox.op_message SET decided_at = decided_at + interval '1 day' WHERE half_id = :id", id=young)
    needed = {*newest, undecided, parked, scheduled, committed, young}
    yard.run("INSERT INTO outbox.half_error SELECT id, 'Error', 'no' FROM outbox.half_message")
    assert yard.empty() == len(gone) + 8 - len(newest) + 2
    assert yard.left() == needed
    assert set(yard.rows("SELECT half_id FROM outbox.half_error")) == needed
    assert yard.empty() == 0
    assert yard.rows("SELECT half_id FROM outbox.scheduled_message") == [scheduled]
    assert dispatch_all(yard.connection, YOUNG).done == 1
    yard.app.commit(undecided)
    assert yard.op(undecided) == ("commit", "producer")


def _newest(yard: Yard) -> set[UUID]:
    last = "SELECT DISTINCT ON (topic, queue) half_id FROM outbox.message ORDER BY topic, queue, position DESC"
    return set(yard.rows(last))


def test_nothing_young_goes(yard: Yard) -> None:
    """What is younger than the retention stays; so does a message that was sent again lately."""
    ids = yard.send(*"abcdef")
    assert yard.empty(YOUNG) == 0
    yard.run("UPDATE outbox.op_message SET decided_at = decided_at - interval '1 year'")
    yard.run("UPDATE outbox.message SET visible_at = visible_at - interval '1 year'")
    with yard.observer.connect() as connection, connection.begin():
        assert act(connection, YOUNG, "resend", ids[0]) == 1
    yard.empty(YOUNG)
    assert ids[0] in yard.left()


def test_positions_go_on_after_a_segment_was_emptied_and_dropped(yard: Yard) -> None:
    """The newest of each queue is there to count from, whatever partition it is in."""
    yard.send(*"aaaa")
    assert yard.empty() == 3
    assert drop_segment(yard.connection, OLD, WIDE)
    with yard.connection.begin():
        assert segments(yard.connection, "outbox") == []
    yard.send("a")
    assert [each.position for each in messages(yard.connection)] == [4, 5]


def test_a_segment_that_is_dropped_while_the_catalog_is_read_is_none(yard: Yard) -> None:
    """A statement's snapshot still has its row in the catalog, and PostgreSQL can't tell its bounds any more."""
    with yard.observer.connect().execution_options(isolation_level="REPEATABLE READ") as reader:
        reader.exec_driver_sql("SELECT pg_current_snapshot()")
        assert drop_segment(yard.connection, OLD, WIDE)
        assert segments(reader, "outbox") == []


@pytest.mark.parametrize("name", ["half_message_Old", "other", "half_message_x; DROP TABLE outbox.topic; --", 'x"y'])
def test_a_partition_of_somebody_else_is_none(yard: Yard, name: str) -> None:
    """Prune leaves a partition alone whose name it hasn't given: names of segments are written into statements."""
    quoted = '"' + name.replace('"', '""') + '"'
    first, end = WIDE.end, uuid7_at(5e9)
    yard.run(f"CREATE TABLE outbox.{quoted} PARTITION OF outbox.half_message FOR VALUES FROM ('{first}') TO ('{end}')")
    with yard.connection.begin():
        assert segments(yard.connection, "outbox") == [WIDE]
    assert yard.rows("SELECT name FROM outbox.topic") == []


def test_emptying_leaves_no_dead_rows(yard: Yard) -> None:
    """While an old snapshot is held, nothing of what went stays in a table or an index."""
    with yard.observer.connect().execution_options(isolation_level="REPEATABLE READ") as pinned:
        pinned.exec_driver_sql("SELECT pg_current_snapshot()")
        yard.send(*(["a"] * 2_000))
        assert yard.empty() == 1_999
        sizes = "SELECT pg_table_size(c.oid) <= 32768 FROM pg_class c WHERE relname ~ '^(half_|op_)?message_wide$'"
        assert yard.rows(sizes) == [True] * 3
        assert len(yard.left()) == 1


# --- what happens meanwhile ------------------------------------------------------------------------------------------


def _decide(yard: Yard, ids: list[UUID]) -> set[UUID]:
    yard.app.commit(ids[-1])
    return {ids[-1]}


def _resend(yard: Yard, ids: list[UUID]) -> set[UUID]:
    with yard.observer.connect() as connection, connection.begin():
        assert act(connection, YOUNG, "resend", ids[0]) == 1
    return {ids[0]}


def _release(yard: Yard, ids: list[UUID]) -> set[UUID]:
    yard.run("UPDATE outbox.scheduled_message SET deliver_at = now() - interval '1 s'")
    with yard.observer.connect() as connection:
        assert release_due_once(connection, YOUNG).done == 1
    return {ids[-2]}


def _recall(yard: Yard, ids: list[UUID]) -> set[UUID]:
    yard.app.operator.recall(ids[-2], by="test", why="test")
    return {ids[-2]}


def _send_one(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    return set(yard.send("a"))


def _send_one_undispatched(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    with yard.observer.begin() as connection:
        return {yard.app.send(connection, "t", "late", key="a")}


def _prepare_one(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    return {yard.prepare()}


def _prepare_and_roll_back(yard: Yard, _ids: list[UUID]) -> set[UUID]:
    half_id = yard.prepare()
    yard.app.rollback(half_id)
    return {half_id}


@pytest.mark.parametrize(
    "happen",
    [_decide, _resend, _release, _recall, _send_one, _send_one_undispatched, _prepare_one, _prepare_and_roll_back],
)
def test_what_changes_after_the_survey_survives(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, happen: Callable[[Yard, list[UUID]], set[UUID]]
) -> None:
    """Whatever is written into a segment between its survey and its lock is kept."""
    ids = yard.send(*"abababab") + yard.send("x", delay=10**9) + [yard.prepare()]
    kept: list[UUID] = []
    compact = module._compact

    def after_the_survey(*arguments: Any) -> int:
        kept.extend(happen(yard, ids))
        return compact(*arguments)

    monkeypatch.setattr(module, "_compact", after_the_survey)
    assert yard.empty()
    assert {*kept, *ids[-2:]} <= yard.left()
    assert yard.rows("SELECT count(*) FROM outbox.half_message_wide") == [len(yard.left())]
    dispatch_all(yard.connection, YOUNG)
    sent = [each.id for each in messages(yard.connection)]
    if happen in {_decide, _release, _send_one, _send_one_undispatched}:
        assert set(kept) <= set(sent)
    if happen is _resend:
        assert sent.count(ids[0]) == 2


@pytest.mark.parametrize("verb", ["commit", "resend"])
def test_a_writer_waits_for_the_truncation_and_goes_on(yard: Yard, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """A late decision and a resend that come in the middle wait, and find what was kept: nothing is lost."""
    ids = yard.send(*"abab")
    undecided = yard.prepare()
    done: list[Any] = []

    def write() -> None:
        if verb == "commit":
            yard.app.commit(undecided)
            done.append(undecided)
        else:
            with yard.observer.connect() as connection, connection.begin():
                done.append(act(connection, YOUNG, "resend", ids[-1]))

    writer = threading.Thread(target=write)

    def begin_and_see_it_wait(connection: Connection, *statements: Any, **options: Any) -> Any:
        if any('INSERT INTO "outbox".half_message_wide' in each.sql for each in statements):
            writer.start()
            wait_until(yard.waiting, "the writer waits for the segment")
        return execute(connection, *statements, **options)

    monkeypatch.setattr(module, "execute", begin_and_see_it_wait)
    assert yard.empty() == 2
    writer.join()
    dispatch_all(yard.connection, YOUNG)
    sent = [each.id for each in messages(yard.connection)]
    assert yard.left() == {*ids[-2:], undecided}
    assert sent.count(undecided) == (verb == "commit")
    assert sent.count(ids[-1]) == (1 if verb == "commit" else 2)


# --- locks -----------------------------------------------------------------------------------------------------------


def test_a_lock_that_cannot_be_had(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pass gives up, says so, and has changed nothing; what is overdue goes row by row."""
    caplog.set_level(logging.DEBUG, "outbox.prune")
    monkeypatch.setattr(module, "WAIT", 0.1)
    yard.send(*"aaaa")
    with yard.observer.connect() as reader, reader.begin():
        reader.execute(text("SELECT count(*) FROM outbox.message"))
        assert yard.empty() == 0
        assert len(yard.left()) == 4
        assert [getattr(record, "outbox_event", "") for record in caplog.records] == ["segment.busy"]
        assert yard.empty(by_row=True) == 3
    assert len(yard.left()) == 1


@pytest.mark.parametrize("state", ["55P03", "57014"])
def test_a_transaction_that_is_cut_off_before_its_block(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """A lock that can't be had, or a time-out, before the first statement of the block: told, and left to the next."""
    monkeypatch.setattr(module, "WAIT", 0.05)
    if state == "57014":  # the time-out of statements comes first
        monkeypatch.setattr(module, "limits", lambda seconds, _: limits(seconds, 60))
    caplog.set_level(logging.DEBUG, "outbox.prune")
    later = module.segment_of(WIDE.end, uuid7_at(5e9))
    with yard.observer.begin() as catalog:
        catalog.execute(text("LOCK TABLE pg_inherits IN ACCESS EXCLUSIVE MODE"))
        assert not make_segment(yard.connection, YOUNG, later)
        assert drop_segment(yard.connection, YOUNG, WIDE) is False
        for name in ("empty", "make way for", "let in"):
            with module.shortly(yard.connection, "outbox", name, WIDE, module.PRODUCER) as mine:
                assert not mine
    assert [getattr(record, "outbox_event", None) for record in caplog.records] == ["segment.busy"] * 5
    assert make_segment(yard.connection, YOUNG, later)


def test_a_survey_that_takes_longer_than_the_server_lets_it(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment is left for now; once it is overdue, its rows go one by one."""
    yard.send(*"abababab")
    before = len(yard.left())
    monkeypatch.setattr(segments_sql, "SURVEY", "SELECT pg_sleep(60)")
    yard.connection.execute(text("SET statement_timeout = '100ms'"))
    yard.connection.commit()
    assert yard.empty() == 0
    assert len(yard.left()) == before
    yard.connection.execute(text("SET statement_timeout = 0"))
    yard.connection.commit()
    monkeypatch.setattr(segments_sql, "SURVEY", "DO $$ BEGIN RAISE USING ERRCODE = '57014'; END $$")
    gone = yard.empty(by_row=True)
    assert gone == before - len(yard.left()) > 0


def test_a_transaction_that_has_sent_holds_nothing_up(yard: Yard) -> None:
    """A segment is emptied while a sender, who writes into another one, has yet to commit."""
    yard.send(*"aaaa")
    with yard.observer.connect() as sender, sender.begin():
        for statement in (HALF, OP):
            sender.execute(text(statement), {"id": WIDE.end})
        assert yard.empty() == 3


def test_a_reconciliation_keeps_its_rows(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a snapshot has begun to read isn't truncated under it."""
    ids = yard.send(*"aaaa")
    with yard.observer.connect() as snapshot, snapshot.begin():
        execute(snapshot, READ_IN_ONE_SNAPSHOT, KEEP["producer"]("outbox"))
        assert snapshot.scalar(text("SELECT 1"))
        monkeypatch.setattr(module, "WAIT", 0.1)
        assert yard.empty() == 0
        assert set(snapshot.scalars(text("SELECT id FROM outbox.half_message"))) == set(ids)
    monkeypatch.setattr(module, "WAIT", 30.0)
    assert yard.empty() == 3


def test_one_worker_at_a_time(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second worker leaves the segment alone, and one that comes after its end finds it gone."""
    yard.send(*"aaaa")
    seen: list[int] = []
    with yard.observer.connect() as second:

        def rival(connection: Connection, *statements: Any, **options: Any) -> Any:
            if any("TRUNCATE" in each.sql for each in statements):
                seen.append(empty_segment(second, OLD, WIDE))
            return execute(connection, *statements, **options)

        monkeypatch.setattr(module, "execute", rival)
        assert yard.empty() == 3
        assert seen == [0]
        assert drop_segment(yard.connection, OLD, WIDE)
        assert empty_segment(second, OLD, WIDE) == 0
        assert drop_segment(second, OLD, WIDE) is False


@pytest.mark.parametrize("act_on", [empty_segment, drop_segment])
def test_a_connection_lost_at_any_statement(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, act_on: Callable[..., Any]
) -> None:
    """A worker that dies between any two statements leaves all that is needed, and the next one goes on."""
    needed = {yard.prepare(), *yard.send("x", delay=10**9)}
    cut_at, statements, died = 0, 0, True

    def cut(connection: Connection, *several: Any, **options: Any) -> Any:
        nonlocal statements
        statements += 1
        if statements == cut_at:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        return execute(connection, *several, **options)

    while died:
        newest = yard.send(*"aaa")[-1]
        statements, cut_at = 0, cut_at + 1
        monkeypatch.setattr(module, "execute", cut)
        try:
            with yard.observer.connect() as worker:
                act_on(worker, OLD, WIDE)
            died = False
        except DBAPIError:
            pass
        monkeypatch.setattr(module, "execute", execute)
        assert {*needed, newest} <= yard.left()
        assert {each.id for each in messages(yard.connection)} >= {newest}
    assert cut_at > 5
    yard.empty()
    drop_segment(yard.connection, OLD, WIDE)
    prune_producer_once(yard.connection, OLD)
    assert yard.left() == {*needed, newest}


# --- which segments --------------------------------------------------------------------------------------------------


def test_segments_are_made_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that comes is covered, once, whatever length was used before; what is there moves over."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    tables = Tables(engine)
    app = Outbox(engine, settings=YOUNG)
    with engine.begin() as connection:
        half_id = app.send(connection, "t", "before", key="a")
    with engine.connect() as connection:
        for retention in (86400.0, 86400.0, 7200.0, 400_000.0):
            module.make_next(connection, replace(YOUNG, retention=retention))
            with connection.begin():
                found = segments(connection, "outbox")
            assert all(each.end == later.first for each, later in pairwise(found))
        assert tables.rows("SELECT count(*) FROM outbox.half_message_default") == [0]
        dispatch_all(connection, YOUNG)
        assert [each.id for each in messages(connection)] == [half_id]


@pytest.mark.parametrize("first", ["sender", "segment"])
def test_a_send_into_the_range_of_a_new_segment(engine: Engine, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """A sender whose row goes where the segment is being made doesn't fail: one of the two waits for the other."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    tables, app = Tables(engine), Outbox(engine, settings=YOUNG)
    sent: list[UUID] = []

    def send() -> None:
        with engine.begin() as connection:
            sent.append(app.send(connection, "t", "body", key="a"))

    sender = threading.Thread(target=send)

    def with_a_sender(connection: Connection, *statements: Any, **options: Any) -> Any:
        if any("ATTACH" in each.sql for each in statements) and not sender.is_alive() and not sent:
            sender.start()
            wait_until(tables.waiting, "the sender waits for the segment")
        return execute(connection, *statements, **options)

    with engine.connect() as connection:
        if first == "segment":
            monkeypatch.setattr(module, "execute", with_a_sender)
            assert make_segment(connection, YOUNG, WIDE)
            sender.join()
        else:
            monkeypatch.setattr(module, "WAIT", 0.1)
            with engine.connect() as writer, writer.begin():
                writer.execute(text(HALF), {"id": UUID(int=1 << 100)})
                writer.execute(text(OP), {"id": UUID(int=1 << 100)})
                assert not make_segment(connection, YOUNG, WIDE)
            monkeypatch.setattr(module, "WAIT", 30.0)
            send()
            assert make_segment(connection, YOUNG, WIDE)
        dispatch_all(connection, YOUNG)
        assert [each.id for each in messages(connection)] == sent
    assert tables.rows("SELECT count(*) FROM outbox.half_message_default") == [0]


def test_a_reader_that_comes_while_a_segment_is_made(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statement that waits for the new segment reads it: it misses neither what moved there nor what came since."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    tables, app = Tables(engine), Outbox(engine, settings=YOUNG)
    with engine.begin() as connection:
        half_id = app.send(connection, "t", "body", key="a")
    found: list[Any] = []

    def read() -> None:
        with engine.connect() as connection:
            found.extend(execute(connection, message_by_id("outbox", id=half_id, **EVERYTHING))[0])

    reader = threading.Thread(target=read)

    def with_a_reader(connection: Connection, *statements: Any, **options: Any) -> Any:
        if any("ATTACH" in each.sql for each in statements) and reader.ident is None:
            reader.start()
            wait_until(tables.waiting, "the reader waits for the segment")
        return execute(connection, *statements, **options)

    with engine.connect() as connection:
        dispatch_all(connection, YOUNG)
        monkeypatch.setattr(module, "execute", with_a_reader)
        assert make_segment(connection, YOUNG, WIDE)
    reader.join()
    assert [row[1] for row in found] == [half_id]


def test_ids_of_no_segment_are_pruned_row_by_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of another kind, and of clocks that are far off, go with the DEFAULT partitions."""
    monkeypatch.setattr(module, "WAIT", 30.0)
    tables = Tables(engine)
    odd = [UUID(int=1), UUID("01000000-0000-7000-8000-000000000000"), UUID(int=(1 << 128) - 2)]
    with engine.connect() as connection:
        module.make_next(connection, YOUNG)
        with connection.begin():
            ranges = list(gaps(segments(connection, "outbox")))
        assert len(ranges) == 2
        for each in odd:
            tables.run(HALF, id=each)
            tables.run(OP, id=each)
        assert prune_producer_once(connection, OLD).done == len(odd)
    assert tables.rows("SELECT id FROM outbox.half_message") == []
