"""Retries: when, how often, in which order; parked messages and their return."""

from __future__ import annotations

from functools import partial
from uuid import uuid4

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Park
from outbox.consumer.retry import wake_retries
from outbox.errors import ActRefused, NotFound
from outbox.settings import RETRY_DELAYS
from tests.kit.bench import Bench, Ward, record

WAIT = "SELECT extract(epoch FROM next_attempt_at - changed_at)::float8 FROM outbox.consumer_message"
LATE = "UPDATE outbox.consumer_message SET next_attempt_at = clock_timestamp() + interval '1 h' WHERE status = 'failed'"
OFFSET = "SELECT max(position) FROM outbox.consumer_offset"


def test_retries_follow_the_table(bench: Bench) -> None:
    """After attempt n comes delay n of RocketMQ's table, give or take the jitter; after 1 + 16 it is parked."""
    ward = Ward(1)
    consumer = bench.declare(ward)
    (half_id,) = bench.send(1)
    bench.consume(consumer)
    for attempt, delay in enumerate(RETRY_DELAYS, 1):
        assert bench.statuses() == [("failed", attempt)]
        (wait,) = bench.rows(WAIT)
        assert wait == pytest.approx(delay, rel=bench.settings.retry_jitter + 0.01)
        assert not bench.retry(consumer, due=False)
        bench.retry(consumer)
    assert bench.statuses() == [("parked", 17)]
    assert ward.calls == [1] * 17
    assert bench.ledger() == []
    assert not bench.retry(consumer)
    assert "RuntimeError: ill" in str(bench.inbox()[half_id].error)


def test_one_look_for_all_groups(bench: Bench) -> None:
    """Only groups that have something to retry are woken: what is due, or waits for a message of its key."""
    ward = Ward(1)
    failing = bench.declare(ward, group="failing")
    by_key = bench.declare(ward, group="by-key", ordered="key")
    well = bench.declare(group="well")
    bench.send(1, 2)
    for consumer in failing, by_key, well:
        bench.consume(consumer)
    woken: list[str] = []
    wakes = {(name, "t"): partial(woken.append, name) for name in ("failing", "by-key", "well")}

    def look() -> set[str]:
        woken.clear()
        assert not wake_retries(bench.connection, bench.settings.schema, wakes)
        assert len(woken) == len(set(woken))
        return set(woken)

    assert look() == {"by-key"}  # its pass looks whether something waits for the failed one
    bench.age_retries()
    assert look() == {"failing", "by-key"}
    ward.ill.clear()
    for consumer in failing, by_key, by_key:  # the second one for the message that waited
        bench.retry(consumer)
    assert look() == set()


def test_jitter_spreads(bench: Bench) -> None:
    """Messages that fail together aren't due together."""
    consumer = bench.declare(Ward(*range(20)))
    bench.send(*range(20))
    bench.consume(consumer)
    assert len({round(wait, 3) for wait in bench.rows(WAIT)}) > 10


@pytest.mark.parametrize(("delays", "attempts"), [((), 1), ((5,), 2), ((1, 2, 3), 4)])
def test_tables_of_ones_own(bench: Bench, delays: tuple[float, ...], attempts: int) -> None:
    """The length of a group's own table is the number of its retries; an empty one parks at once."""
    ward = Ward(1)
    consumer = bench.declare(ward, retry_delays=delays)
    bench.send(1, 2)
    bench.consume(consumer)
    for _ in range(10):
        bench.retry(consumer)
    assert bench.statuses() == [("parked", attempts), ("consumed", 1)]
    assert len(ward.calls) == attempts + 1


def test_a_retry_that_succeeds(any_bench: Bench) -> None:
    """A retried message is consumed with its number of attempts, once, and later messages didn't wait for it."""
    ward = Ward(1)
    consumer = any_bench.declare(ward, batch=2)
    any_bench.send(1, 2, 3)
    any_bench.consume(consumer)
    any_bench.retry(consumer)
    ward.ill.clear()
    counts = any_bench.retry(consumer)
    assert (counts.taken, counts.done) == (1, 1)
    assert any_bench.ledger() == ["2", "3", "1"]
    assert any_bench.statuses() == [("consumed", 3), ("consumed", 1), ("consumed", 1)]
    assert not any_bench.retry(consumer)


def test_a_retry_pass_has_a_limit(bench: Bench) -> None:
    """A retry pass stops at its limit and says that there is more."""
    ward = Ward(*range(5))
    consumer = bench.declare(ward)
    bench.send(*range(5))
    bench.consume(consumer)
    bench.age_retries()
    ward.ill.clear()
    counts = consumer.retry_once(bench.connection, bench.source, limit=3)
    assert (counts.done, counts.more) == (3, True)
    counts = consumer.retry_once(bench.connection, bench.source, limit=3)
    assert (counts.done, counts.more) == (2, False)


def test_a_copy_of_a_failed_message(bench: Bench) -> None:
    """A copy of a message that waits for its retry is stepped over: the retry has its time and its count."""
    ward = Ward(1)
    consumer = bench.declare(ward)
    (half_id,) = bench.send(1)
    bench.consume(consumer)
    bench.resend(half_id)
    assert bench.consume(consumer).done == 0
    assert ward.calls == [1]
    assert bench.statuses() == [("failed", 1)]


def test_a_retry_of_a_pruned_message(bench: Bench) -> None:
    """A failed message that the producer no longer has is parked, with the reason."""
    consumer = bench.declare(Ward(1))
    (half_id,) = bench.send(1)
    bench.consume(consumer)
    bench.run("TRUNCATE outbox.message, outbox.half_message, outbox.op_message")
    assert bench.retry(consumer).parked == 1
    assert "pruned" in str(bench.inbox()[half_id].error)


def test_two_retriers_take_different_messages(bench: Bench) -> None:
    """While one worker retries a message, another one takes the next, and nobody runs it twice."""
    ward = Ward(1, 2)
    outer, inner = bench.declare(ward), bench.declare()
    bench.send(1, 2)
    bench.consume(outer)
    bench.age_retries()
    ward.ill.clear()
    seen = []

    def handler(message: Message, session: Session) -> None:
        record(message, session)
        with bench.consumer.connect() as other:
            seen.append(inner.retry_once(other, other).done)

    outer = bench.declare(handler)
    assert outer.retry_once(bench.connection, bench.source).done == 1
    assert seen == [1]
    assert sorted(bench.ledger()) == ["1", "2"]


def test_resume(bench: Bench) -> None:
    """A resumed message has all its attempts again; who did it and why is recorded; only a parked one can be."""
    ward = Ward(1)
    consumer = bench.declare(ward, retry_delays=(1,))
    parked, fine = bench.send(1, 2)
    with pytest.raises((ActRefused, NotFound)):
        bench.sink.operator.retry(parked, group="g", by="me", why="test")
    bench.consume(consumer)
    assert bench.sink.operator.retry(parked, group="g", by="me").endswith("is due now, with the attempts it has left")
    bench.retry(consumer)
    bench.sink.operator.retry(parked, group="g", by="me", why="fixed it")
    bench.retry(consumer)
    bench.retry(consumer)
    assert bench.inbox()[parked].status == "parked"
    ward.ill.clear()
    bench.sink.operator.retry(parked, group="g", by="me", why="fixed it")
    assert consumer.retry_once(bench.connection, bench.source).done == 1
    assert bench.ledger() == ["2", "1"]
    for half_id in (parked, fine):
        with pytest.raises(ActRefused, match="it is consumed"):
            bench.sink.operator.retry(half_id, group="g", by="me", why="test")
    with pytest.raises(NotFound):
        bench.sink.operator.retry(uuid4(), group="nobody", by="me", why="test")
    assert bench.rows("SELECT actor, reason, target FROM outbox.audit WHERE action = 'retry'") == [
        ("me", None, f"g/{parked}"),
        *[("me", "fixed it", f"g/{parked}")] * 2,
    ]


def test_an_ordered_queue_waits_for_its_first_message(bench: Bench) -> None:
    """An ordered group runs nothing of a queue before its failed message is done, then goes on in order."""
    ward = Ward(2)
    consumer = bench.declare(ward, ordered=True, batch=3)
    bench.send(*range(1, 6))
    bench.consume(consumer)
    assert bench.ledger() == ["1"]
    bench.run(LATE)
    assert not bench.consume(consumer).done
    assert not bench.retry(consumer, due=False)
    calls = len(ward.calls)
    assert not bench.consume(consumer).done
    assert len(ward.calls) == calls, "a message was tried before its time"
    bench.age_retries()
    bench.consume(consumer)
    assert bench.statuses() == [("consumed", 1), ("failed", 2)]
    ward.ill.clear()
    bench.age_retries()
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2", "3", "4", "5"]
    assert bench.statuses()[1] == ("consumed", 3)


def test_other_queues_go_on(bench: Bench) -> None:
    """A blocked queue of an ordered group blocks no other one."""
    bench.app.declare_topic("t", 8)
    consumer = bench.declare(Ward("bad"), ordered=True)
    bench.send("bad", "behind", key="k0")
    for n in range(40):
        bench.send(n, key=f"other {n}")
    bench.consume(consumer)
    blocked = bench.rows("SELECT count(*) FROM outbox.message WHERE queue = (SELECT m.queue FROM outbox.message m "
                         "JOIN outbox.half_message h ON h.id = m.half_id WHERE h.key = 'k0' LIMIT 1)")  # fmt: skip
    assert len(bench.ledger()) == 42 - blocked[0]
    assert "behind" not in bench.ledger()


@pytest.mark.parametrize("policy", ["park", "block"])
def test_an_ordered_message_that_has_used_up_its_attempts(bench: Bench, policy: str) -> None:
    """Out of attempts, an ordered message is parked and its queue goes on, or it blocks on, as was declared."""
    ward = Ward(1)
    consumer = bench.declare(ward, ordered=True, on_exhausted=policy, retry_delays=(1, 7))
    bench.send(1, 2)
    for _ in range(6):
        bench.consume(consumer)
        bench.age_retries()
    if policy == "park":
        assert bench.statuses() == [("parked", 3), ("consumed", 1)]
    else:
        assert bench.statuses() == [("failed", 6)]
        ward.ill.clear()
        bench.consume(consumer)
        assert bench.ledger() == ["1", "2"]


def test_a_handlers_park_frees_an_ordered_queue(bench: Bench) -> None:
    """`Park` lets an ordered queue go on at once, even one that blocks when attempts are used up."""
    consumer = bench.declare(
        lambda m, s: Park("bad") if m.body == 1 else record(m, s), ordered=True, on_exhausted="block"
    )
    bench.send(1, 2)
    bench.consume(consumer)
    assert bench.ledger() == ["2"]


@pytest.mark.parametrize("copies", [0, 2])
def test_resume_in_an_ordered_group(bench: Bench, copies: int) -> None:
    """A message of an ordered group that was parked and resumed is run again, copy or not, and done once."""
    ward = Ward(1)
    consumer = bench.declare(ward, ordered=True, retry_delays=())
    half_id, *_ = bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.inbox()[half_id].status == "parked"
    bench.sink.operator.retry(half_id, group="g", by="me", why="test")
    assert consumer.retry_once(bench.connection, bench.source).parked == 1
    ward.ill.clear()
    bench.sink.operator.retry(half_id, group="g", by="me", why="test")
    for _ in range(copies):
        bench.resend(half_id)
    bench.consume(consumer)
    consumer.retry_once(bench.connection, bench.source)
    assert bench.ledger() == ["2", "3", "1"]
    assert bench.inbox()[half_id].status == "consumed"


def test_a_blocked_queue_survives_many_workers(bench: Bench) -> None:
    """However many workers come upon a blocked queue, nobody takes its message for one that kills workers."""
    ward = Ward(1)
    bench.declare(ward, ordered=True, on_exhausted="block", retry_delays=(3600,))
    (half_id, _) = bench.send(1, 2)
    for number in range(2 * bench.settings.max_starts):
        consumer = bench.declare(ward, ordered=True, on_exhausted="block", retry_delays=(3600,))
        bench.consume(consumer)
        if number % 2:
            bench.age_retries()
    assert bench.inbox()[half_id].status == "failed"
    assert bench.ledger() == []
    assert bench.rows(OFFSET) == [0]
