"""Handlers whose statements travel together: what is done inside of a pipeline, and who is blamed for what fails there.

Whatever goes wrong in a pipeline is undone with it, and the batch is done again one by one without one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from outbox import Breaker, Message, Outbox, Park, Retry, Skip, testing
from outbox.telemetry.events import BatchUndone
from outbox.telemetry.hooks import TelemetryEvent
from tests.consumer.test_carriers import WRITE, by_async_cursor, by_cursor
from tests.kit.bench import LEDGER, Bench

Act = Callable[[Message, Any], Any]


def in_pipeline(cursor: Any) -> bool:
    """Tell whether the statements of a cursor travel together."""
    return bool(cursor.connection.pgconn.pipeline_status)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_statements_of_a_batch_travel_together(bench: Bench, kind: str) -> None:
    """No handler of a batch waits for an answer: the first one's comes after the last one's statement was sent."""
    seen: list[tuple[bool, Any]] = []
    first: list[Any] = []

    def note(cursor: Any) -> None:
        first.append(cursor)
        seen.append((in_pipeline(cursor), first[0].statusmessage if len(first) == 1 else None))

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        note(cursor)

    async def async_handler(message: Message, cursor: psycopg.AsyncCursor) -> None:
        await by_async_cursor(message, cursor)
        note(cursor)

    consumer = bench.declare(handler if kind == "sync" else async_handler, batch=3, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert seen == [(True, None)] * 3
    assert bench.ledger() == ["1", "2", "3"]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_an_error_in_a_pipeline_blames_its_message(bench: Bench, batch: int, kind: str) -> None:
    """A statement that fails costs its own message one attempt; the others of the batch are consumed."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body == 2:
            cursor.execute("SELECT 1 / %s", (0,))

    async def async_handler(message: Message, cursor: psycopg.AsyncCursor) -> None:
        await by_async_cursor(message, cursor)
        if message.body == 2:
            await cursor.execute("SELECT 1 / %s", (0,))

    consumer = bench.declare(handler if kind == "sync" else async_handler, batch=batch, pipeline=True)
    ids = bench.send(1, 2, 3, 4)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3", "4"]
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1), ("consumed", 1)]
    assert "division by zero" in str(bench.inbox()[ids[1]].error)
    assert bench.rows("SELECT message_id, attempt FROM outbox.attempt_history") == [(ids[1], 1)]


def test_a_later_message_does_not_see_the_error_of_an_earlier_one(bench: Bench) -> None:
    """The read of message 3 fails in the pipeline, because of message 2: what it makes of that counts for nothing."""
    told: list[object] = []

    def handler(message: Message, cursor: psycopg.Cursor) -> Park | None:
        try:
            by_cursor(message, cursor)
            if message.body == 3:
                told.append(cursor.execute("SELECT 3").fetchone())
        except psycopg.Error:
            return Park("the database is broken")
        if message.body == 2:
            cursor.execute("SELECT 1 / %s", (0,))
        return None

    consumer = bench.declare(handler, batch=4, pipeline=True)
    bench.send(1, 2, 3, 4)
    bench.consume(consumer)
    assert told == [(3,)]
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1), ("consumed", 1)]
    assert bench.ledger() == ["1", "3", "4"]


def test_an_error_that_a_handler_swallows(bench: Bench) -> None:
    """It has spoilt the transaction, in a pipeline and without: the message fails, and no other one."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body == 2:
            with suppress(psycopg.Error):
                cursor.execute("SELECT 1 / 0").fetchone()

    consumer = bench.declare(handler, batch=3, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1)]
    assert bench.ledger() == ["1", "3"]


@pytest.mark.parametrize(
    ("answer", "status"), [(Retry(), "failed"), (Park("no"), "parked"), (Skip(), "consumed"), (None, "consumed")]
)
def test_answers_in_a_pipeline(bench: Bench, answer: Any, status: str) -> None:
    """What a handler answers undoes its own message alone."""

    def handler(message: Message, cursor: psycopg.Cursor) -> Any:
        by_cursor(message, cursor)
        return answer if message.body == 2 else None

    consumer = bench.declare(handler, batch=3, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert [each for each, _ in bench.statuses()] == ["consumed", status, "consumed"]
    assert bench.ledger() == (["1", "2", "3"] if answer is None else ["1", "3"])


def test_what_is_undone_is_told(bench: Bench, heard: list[TelemetryEvent]) -> None:
    """A batch that is done again one by one is an event, also where it is a batch of one."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        cursor.execute("SELECT 1 / %s", (0,))

    bench.send(1)
    bench.consume(bench.declare(handler, pipeline=True))
    undone = [event for event in heard if isinstance(event, BatchUndone)]
    assert [(event.size, "division by zero" in event.reason) for event in undone] == [(1, True)]
    assert bench.statuses() == [("failed", 1)]


def test_an_error_after_the_end_of_the_transaction(bench: Bench) -> None:
    """One handler commits, and a later statement fails: all that travelled together is parked, nothing comes twice."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body == 1:
            psycopg.Cursor(cursor.connection).execute("COMMIT")
        if message.body == 3:
            cursor.execute("SELECT 1 / %s", (0,))

    consumer = bench.declare(handler, batch=3, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.statuses() == [("parked", 1)] * 3
    assert bench.ledger().count("1") == 1
    bench.retry(consumer)
    assert bench.ledger().count("1") == 1


# --- what a handler may do with its cursor ---------------------------------------------------------------------------


def _reads(message: Message, cursor: psycopg.Cursor) -> None:
    by_cursor(message, cursor)
    cursor.execute("SELECT count(*) FROM ledger WHERE message_id = %s", (message.id,))
    assert cursor.fetchone() == (1,)


def _nested_pipeline(message: Message, cursor: psycopg.Cursor) -> None:
    with cursor.connection.pipeline() as pipeline:
        by_cursor(message, cursor)
        pipeline.sync()
        assert cursor.rowcount == 1


def _copies(message: Message, cursor: psycopg.Cursor) -> None:
    with cursor.copy("COPY ledger (message_id, body, attempt) FROM STDIN") as copy:
        copy.write_row((message.id, str(message.body), message.attempt))


def _copies_out(message: Message, cursor: psycopg.Cursor) -> None:
    by_cursor(message, cursor)
    with cursor.copy("COPY (SELECT 1) TO STDOUT") as copy:
        assert [bytes(block) for block in copy] == [b"1\n"]


def _server_cursor(message: Message, cursor: psycopg.Cursor) -> None:
    by_cursor(message, cursor)
    with cursor.connection.cursor("mine") as server:
        server.execute("SELECT n FROM generate_series(1, 500) n")
        assert sum(n for (n,) in server) == 125_250


def _savepoints(message: Message, cursor: psycopg.Cursor) -> None:
    by_cursor(message, cursor)
    with cursor.connection.transaction(force_rollback=True):
        by_cursor(message, cursor)


def _many(message: Message, cursor: psycopg.Cursor) -> None:
    cursor.executemany(WRITE, [(message.id, str(message.body), message.attempt)])


def _streams(message: Message, cursor: psycopg.Cursor) -> None:
    by_cursor(message, cursor)
    assert [n for (n,) in cursor.stream("SELECT generate_series(1, 3)")] == [1, 2, 3]


def _prepares(message: Message, cursor: psycopg.Cursor) -> None:
    cursor.execute(WRITE, (message.id, str(message.body), message.attempt), prepare=True, binary=True)


#: What a handler does with its cursor, and whether psycopg can do that in a pipeline. If not, it is done without.
ACTS: dict[str, tuple[Act, bool]] = {
    "reads": (_reads, True),
    "a nested pipeline": (_nested_pipeline, True),
    "COPY FROM": (_copies, False),
    "COPY TO": (_copies_out, False),
    "a server-side cursor": (_server_cursor, False),
    "savepoints": (_savepoints, True),
    "executemany": (_many, True),
    "stream": (_streams, False),
    "prepares": (_prepares, True),
}


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("act", ACTS)
def test_what_a_cursor_can_do(bench: Bench, act: str, batch: int, pipeline: bool) -> None:
    """All that psycopg has: what it can't do in a pipeline is done once more, one by one, and takes effect once."""
    does, in_pipeline_too = ACTS[act]
    pipelined: list[bool] = []

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        pipelined.append(in_pipeline(cursor))
        does(message, cursor)

    consumer = bench.declare(handler, batch=batch, pipeline=pipeline)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]
    assert bench.statuses() == [("consumed", 1)] * 3
    assert any(pipelined) is pipeline
    if pipeline:
        assert all(pipelined) is in_pipeline_too


def test_a_savepoint_keeps_an_error_from_the_rest(bench: Bench) -> None:
    """Without a pipeline a handler goes on after an error in a savepoint; in one the batch is done again without."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        try:
            with cursor.connection.transaction():
                cursor.execute("SELECT 1 / %s", (0,))
        except psycopg.Error:
            by_cursor(message, cursor)

    for group, pipeline in (("a", False), ("b", True)):
        bench.run("DELETE FROM ledger")
        for body in (1, 2, 3):
            bench.send(body, topic=group)
        bench.consume(bench.declare(handler, topic=group, group=group, batch=3, pipeline=pipeline))
        assert bench.ledger() == ["1", "2", "3"]
        assert bench.statuses(group) == [("consumed", 1)] * 3


def test_a_service_function_has_its_session_one_by_one(bench: Bench) -> None:
    """A decorated function that needs a session can't have one in a pipeline: it gets it when the batch is redone."""
    refused: list[str] = []

    @bench.sink.transactional(topic="next")
    def book(body: Any, session: Any = None) -> dict[str, Any]:
        session.execute(LEDGER, {"id": None, "body": str(body), "attempt": 1})
        return {"body": body}

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        try:
            book(message.body)
        except Exception as error:
            refused.append(str(error))
            raise

    consumer = bench.declare(handler, batch=2, pipeline=True)
    bench.send(1, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2"]
    assert len(refused) == 1
    assert "a handler with pipeline=True has no session" in refused[0]


# --- beside other rules ----------------------------------------------------------------------------------------------


def test_a_list_in_a_pipeline(bench: Bench) -> None:
    """A handler that takes the list may have its statements travel together, too."""

    def handler(messages: list[Message], cursor: psycopg.Cursor) -> None:
        for message in messages:
            by_cursor(message, cursor)
            if message.body == 2:
                cursor.execute("SELECT 1 / %s", (0,))

    consumer = bench.declare(handler, batch=3, takes_batch=True, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "3"]
    assert bench.statuses() == [("consumed", 1), ("failed", 1), ("consumed", 1)]


def test_an_ordered_group_in_a_pipeline(bench: Bench) -> None:
    """It stops at the message that fails, and the one before it is consumed."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        by_cursor(message, cursor)
        if message.body == 2 and message.attempt == 1:
            cursor.execute("SELECT 1 / %s", (0,))

    consumer = bench.declare(handler, batch=3, ordered=True, pipeline=True)
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1"]
    bench.age_retries()
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3"]
    assert bench.statuses() == [("consumed", 1), ("consumed", 2), ("consumed", 1)]


def test_a_breaker_counts_what_fails_in_a_pipeline(bench: Bench) -> None:
    """Only attempts that were charged count for the breaker: a batch that is done again counts for nothing."""

    def handler(message: Message, cursor: psycopg.Cursor) -> None:
        cursor.execute("SELECT 1 / %s", (0,))

    consumer = bench.declare(handler, batch=5, pipeline=True, breaker=Breaker(failures=3, window=60, trial_after=60))
    bench.send(1, 2, 3, 4, 5)
    bench.consume(consumer)
    assert bench.statuses() == [("failed", 1)] * 3


@pytest.mark.parametrize("kind", ["cursor", "pipeline"])
@pytest.mark.parametrize("point", ["before_handler", "after_handler", "after_commit"])
def test_the_tools_for_tests_know_cursors(bench: Bench, point: Any, kind: str) -> None:
    """`testing.killing`, `failing` and `running_twice` work with whatever a handler takes."""
    outbox = Outbox(bench.consumer, settings=bench.settings)
    outbox.consumer("t", group="g", batch=2, pipeline=kind == "pipeline")(by_cursor)
    bench.send(1, 2)
    with testing.killing(outbox, "t", point=point):
        testing.drain(outbox)
    with testing.running_twice(outbox):
        testing.drain(outbox)
    assert sorted(bench.ledger()) == ["1", "2"]
    assert bench.statuses() == [("consumed", 1)] * 2
