"""A message that was sent again: groups that have parked or failed it try again, all others do nothing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text

from outbox.consumer.consumer import Consumer
from tests.kit.bench import Bench, Ward

LOCK = text("SELECT FROM outbox.consumer_message WHERE message_id = :id FOR UPDATE")


def parked(bench: Bench, **options: Any) -> tuple[Ward, Consumer, UUID]:
    """Return a handler that was mended after the second of three messages was parked; the consumer; that message."""
    handler = Ward(2)
    consumer = bench.declare(handler, retry_delays=(), **options)
    _, half_id, _ = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.inbox()[half_id].status == "parked"
    handler.ill.clear()
    return handler, consumer, half_id


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("batch", [1, 10])
def test_a_parked_message_is_tried_again(any_bench: Bench, ordered: bool, batch: int) -> None:
    """With all its attempts, as after an operator's retry; what came before and after it isn't handled twice."""
    _, consumer, half_id = parked(any_bench, ordered=ordered, batch=batch)
    any_bench.send(4)
    any_bench.resend(half_id)
    any_bench.send(5)
    any_bench.consume(consumer)
    any_bench.retry(consumer, due=False)
    assert any_bench.inbox()[half_id].status == "consumed"
    assert sorted(any_bench.ledger()) == ["1", "2", "3", "4", "5"]
    assert not any_bench.consume(consumer)


def test_each_send_is_another_try(any_bench: Bench) -> None:
    """Parked again, and sent again: it is tried once for each send, whichever queue that is in."""
    handler, consumer, half_id = parked(any_bench)
    handler.ill.add(2)
    for queues in (8, 64):
        any_bench.app.declare_topic("t", queues)
        any_bench.resend(half_id)
        any_bench.consume(consumer)
        assert any_bench.statuses()[1] == ("failed", 0)
        assert any_bench.retry(consumer, due=False).parked == 1
    handler.ill.clear()
    any_bench.resend(half_id)
    any_bench.consume(consumer)
    assert any_bench.retry(consumer, due=False).done == 1


def test_a_failed_message_is_tried_at_once(any_bench: Bench) -> None:
    """It doesn't wait for its time, and has the attempts that it had left."""
    handler = Ward(1)
    consumer = any_bench.declare(handler, retry_delays=(3600, 3600))
    (half_id,) = any_bench.send(1)
    any_bench.consume(consumer)
    handler.ill.clear()
    assert not any_bench.retry(consumer, due=False)
    any_bench.resend(half_id)
    any_bench.consume(consumer)
    assert any_bench.retry(consumer, due=False).done == 1
    assert any_bench.statuses() == [("consumed", 2)]


def test_what_an_operator_has_discarded_stays_so(any_bench: Bench) -> None:
    """It was decided that this group never handles the message."""
    _, consumer, half_id = parked(any_bench)
    any_bench.sink.operator.discard(half_id, group="g", by="me", why="nobody needs it")
    any_bench.resend(half_id)
    any_bench.consume(consumer)
    assert not any_bench.retry(consumer, due=False)
    assert any_bench.inbox()[half_id].status == "parked"
    assert any_bench.ledger() == ["1", "3"]


def test_the_same_send_read_again_is_no_new_one(any_bench: Bench) -> None:
    """A group whose offset was set back reads the send that it has parked before, and leaves it parked."""
    _, consumer, half_id = parked(any_bench)
    any_bench.run("DELETE FROM outbox.consumer_offset WHERE position > 0")
    any_bench.consume(consumer)
    assert not any_bench.retry(consumer, due=False)
    assert any_bench.inbox()[half_id].status == "parked"


@pytest.mark.parametrize("became", ["parked", "failed", "consumed", "discarded"])
def test_a_row_that_another_transaction_holds(any_bench: Bench, became: str) -> None:
    """The queue doesn't go past the message until a retry or an operator lets go of it; what it is then, counts."""
    _, consumer, half_id = parked(any_bench)
    any_bench.send(4)
    any_bench.resend(half_id)
    changes = {
        "parked": "changed_at = now()",
        "failed": "status = 'failed', attempts = 3, next_attempt_at = now() + interval '1 day'",
        "consumed": "status = 'consumed'",
        "discarded": "discarded_at = now()",
    }
    with any_bench.consumer.begin() as rival:
        rival.execute(LOCK, {"id": half_id})
        consumer.consume_once(any_bench.connection, any_bench.source)
        consumer.consume_once(any_bench.connection, any_bench.source)
        assert any_bench.ledger() == ["1", "3", "4"]
        assert any_bench.rows("SELECT max(position) FROM outbox.consumer_offset") == [4]
        sql = f"UPDATE outbox.consumer_message SET {changes[became]} WHERE message_id = :id"
        rival.execute(text(sql), {"id": half_id})
    any_bench.consume(consumer)
    assert any_bench.rows("SELECT max(position) FROM outbox.consumer_offset") == [5]
    assert any_bench.retry(consumer, due=False).done == (became in {"parked", "failed"})


def test_the_operator_s_word_is_kept(bench: Bench) -> None:
    """`resend` says that the message is sent again: the group that has parked it handles it."""
    _, consumer, half_id = parked(bench)
    assert bench.app.operator.resend(half_id, by="ann", why="mended") == f"message {half_id} is sent again (send 2)"
    assert bench.consume(consumer).taken == 1
    assert bench.retry(consumer, due=False).done == 1
    assert bench.ledger() == ["1", "3", "2"]
