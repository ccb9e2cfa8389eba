"""Pause, rate and breaker where something else holds messages back: a key, an expiry, a group that reads again."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session

from outbox import Breaker, Message
from outbox.consumer.consumer import Consumer
from tests.consumer.test_by_key import by_key, send, states
from tests.consumer.test_control import BREAKER, Clock, age_grants, control, gated, trial_due
from tests.consumer.test_expired import FUTURE, PAST, expire, retry_all
from tests.consumer.test_reread import WHY, reset
from tests.kit.bench import Bench, Ward, but

#: It opens at the first failure.
SOON = Breaker(failures=1, window=60, trial_after=30)
KINDS = pytest.mark.parametrize("outside", [False, True], ids=["transactional", "outside"])


def declared(bench: Bench, clock: Clock, handler: Ward, *, outside: bool, **options: Any) -> Consumer:
    """Return a consumer of one of both kinds, in whose topic all keys share a queue."""
    bench.app.declare_topic("t", 1)
    one_at_a_time: dict[str, Any] = {"transactional": False, "concurrency": 1} if outside else {}
    return gated(bench, clock, handler, **one_at_a_time, **options)


def settle_all(bench: Bench, consumer: Consumer) -> None:
    """Make all failures due, and retry until nothing is."""
    bench.age_retries()
    retry_all(bench, consumer)


# --- order per key ---------------------------------------------------------------------------------------------------


@KINDS
def test_a_trial_is_the_first_message_of_its_key(bench: Bench, *, outside: bool) -> None:
    """What waits for a message of its key is passed, and is no trial; a trial that fails leaves all as it was."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside, ordered="key", breaker=SOON)
    send(bench, "a1", "a2", "b1", "b2", "c1", "a3")
    provider.down = True
    bench.consume(consumer)
    assert (provider.calls, control(bench).state) == (["a1"], "open")
    clock.look()
    bench.consume(consumer)
    assert provider.calls == ["a1"]

    trial_due(bench, clock)
    bench.consume(consumer)
    assert provider.calls == ["a1", "b1"]
    assert control(bench).state == "open"

    provider.down = False
    trial_due(bench, clock)
    bench.consume(consumer)
    assert control(bench).state == "running"
    assert provider.done == ["c1"]
    waiting = dict.fromkeys(("a2", "a3", "b2"), "waiting")
    assert states(bench) == {"a1": "failed", "b1": "failed", "c1": "consumed", **waiting}
    settle_all(bench, consumer)
    assert by_key(provider.done) == {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"], "c": ["c1"]}


@KINDS
def test_the_retry_of_a_head_is_a_trial(bench: Bench, *, outside: bool) -> None:
    """Where all keys are held: one head is tried. It fails: nothing follows it; it succeeds: its key goes on."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside, ordered="key", breaker=SOON)
    send(bench, "a1", "a2", "a3")
    provider.down = True
    bench.consume(consumer)
    trial_due(bench, clock)
    bench.consume(consumer)
    bench.retry(consumer)
    assert provider.calls == ["a1", "a1"]
    assert control(bench).state == "open"
    clock.look()
    assert not bench.retry(consumer)
    provider.down = False
    trial_due(bench, clock)
    settle_all(bench, consumer)
    assert control(bench).state == "running"
    assert provider.done == ["a1", "a2", "a3"]


@pytest.mark.parametrize("batch", [1, 4])
@KINDS
def test_a_rate_counts_what_is_handled(bench: Bench, batch: int, *, outside: bool) -> None:
    """What waits for another message of its key, or has expired, uses up nothing of it; the order of a key holds."""
    clock, provider = Clock(), Ward("a1")
    options: dict[str, Any] = {} if outside else {"batch": batch}
    consumer = declared(bench, clock, provider, outside=outside, ordered="key", rate="1/h", **options)
    send(bench, "a1", "a2", "b1")
    bench.send("b2", key="b", expires_at=PAST)
    send(bench, "b3")
    called = []
    for _ in range(3):
        bench.consume(consumer)
        called.append(list(provider.calls))
        clock.now += 3600
        age_grants(bench, 1)
    assert called == [["a1"], ["a1", "b1"], ["a1", "b1", "b3"]]
    assert states(bench) == {"a1": "failed", "a2": "waiting", "b1": "consumed", "b2": "expired", "b3": "consumed"}
    provider.ill.clear()
    bench.age_retries()
    for hour in range(1, 3):
        bench.retry(consumer, due=False)
        assert provider.done[2:] == ["a1", "a2"][:hour]
        clock.now += 3600
        age_grants(bench, 1)


@KINDS
def test_a_pause_keeps_what_waits(bench: Bench, *, outside: bool) -> None:
    """Paused while the first message of a key is retried, those that waited for it stay behind it, and follow later."""
    clock, provider = Clock(), Ward("a1")
    consumer = declared(bench, clock, provider, outside=outside, ordered="key")
    send(bench, "a1", "a2", "a3")
    bench.consume(consumer)
    provider.ill.clear()

    def pause(body: Any) -> None:
        if body == "a1":
            bench.app.operator.pause_group("g", by="me", why="enough")
            clock.look()

    provider.afterwards = pause
    settle_all(bench, consumer)
    send(bench, "a4", "b1")
    bench.consume(consumer)
    assert provider.done == ["a1"]
    assert control(bench).state == "paused"
    bench.app.operator.resume_group("g", by="me")
    clock.look()
    bench.consume(consumer)
    settle_all(bench, consumer)
    assert by_key(provider.done) == {"a": ["a1", "a2", "a3", "a4"], "b": ["b1"]}


def test_a_pause_ends_a_pass_between_batches(bench: Bench) -> None:
    """The batch in which it comes is handled as a whole, and the next one isn't begun."""
    clock = Clock()
    bench.app.declare_topic("t", 1)

    def pause(message: Message, session: Session) -> None:
        bench.app.operator.pause_group("g", by="me", why="enough")
        clock.look()

    consumer = gated(bench, clock, but("b1", pause), ordered="key", batch=2)
    send(bench, "a1", "b1", "a2", "b2")
    bench.consume(consumer)
    assert bench.ledger() == ["a1", "b1"]
    bench.app.operator.resume_group("g", by="me")
    clock.look()
    bench.consume(consumer)
    assert by_key(bench.ledger()) == {"a": ["a1", "a2"], "b": ["b1", "b2"]}


# --- expiry ----------------------------------------------------------------------------------------------------------


@KINDS
def test_what_expires_is_no_trial(bench: Bench, *, outside: bool) -> None:
    """It closes nothing, nor puts off the trial: the next message that is handled is the one that decides."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside, ordered=False, breaker=BREAKER)
    send(bench, "a1", "a2", "a3")
    provider.down = True
    bench.consume(consumer)
    assert control(bench).state == "open"
    bench.send("x1", "x2", key="x", expires_at=PAST)
    trial_due(bench, clock)
    bench.consume(consumer)
    assert (states(bench)["x1"], states(bench)["x2"]) == ("expired", "expired")
    assert control(bench).state in {"open", "half_open"}

    send(bench, "b1")
    bench.send("x3", key="x", expires_at=PAST)
    send(bench, "b2")
    bench.consume(consumer)
    assert provider.calls[3:] == ["b1"]
    assert control(bench).state == "open"
    provider.down = False
    trial_due(bench, clock)
    bench.consume(consumer)
    assert provider.done == ["b2"]
    assert control(bench).state == "running"


@KINDS
def test_a_retry_that_expires_is_no_trial(bench: Bench, *, outside: bool) -> None:
    """Of three that have failed two expire: the third one is tried, and closes it."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside, ordered=False, breaker=BREAKER)
    bench.send("a1", "a2", "a3", expires_at=FUTURE)
    provider.down = True
    bench.consume(consumer)
    expire(bench, "a1")
    expire(bench, "a2")
    provider.down = False
    trial_due(bench, clock)
    bench.run(
        "UPDATE outbox.consumer_message SET next_attempt_at = now() - interval '1 s'"
        " WHERE message_id <> (SELECT max(message_id::text)::uuid FROM outbox.consumer_message)"
    )
    retry_all(bench, consumer)
    assert [states(bench)[body] for body in ("a1", "a2", "a3")] == ["expired", "expired", "failed"]
    assert control(bench).state in {"open", "half_open"}
    trial_due(bench, clock)
    settle_all(bench, consumer)
    assert provider.done == ["a3"]
    assert control(bench).state == "running"


@pytest.mark.parametrize("between", ["expired", "waiting"])
@pytest.mark.parametrize("batch", [1, 10])
def test_a_success_is_seen_behind_what_is_not_handled(bench: Bench, batch: int, between: str) -> None:
    """What expires or waits after a success doesn't hide it: not all has failed, so the breaker stays closed."""
    clock, provider = Clock(), Ward("a1", "c1", "d1")
    consumer = declared(bench, clock, provider, outside=False, ordered="key", breaker=BREAKER, batch=batch)
    send(bench, "a1")
    bench.consume(consumer)
    send(bench, "b1")
    for number in range(2, 6):
        options: dict[str, Any] = {"expires_at": PAST} if between == "expired" else {}
        bench.send(f"a{number}", key="x" if between == "expired" else "a", **options)
    bench.consume(consumer)
    send(bench, "c1", "d1")
    bench.consume(consumer)
    assert states(bench)["a5"] == between
    assert provider.done == ["b1"]
    assert control(bench).state == "running"


# --- a group that reads again ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True, "key"])
@KINDS
def test_a_reset_leaves_a_breaker_open(bench: Bench, ordered: Any, *, outside: bool) -> None:
    """All of it is to be handled again, and one message is tried first."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside, ordered=ordered, breaker=SOON)
    send(bench, "a1", "a2")
    bench.consume(consumer)
    provider.ill = {"b1"}
    clock.look()
    send(bench, "b1", "b2", "c1")
    bench.consume(consumer)
    assert control(bench).state == "open"
    calls = len(provider.calls)
    reset(bench)
    clock.look()
    bench.consume(consumer)
    bench.retry(consumer)
    assert len(provider.calls) == calls
    assert control(bench).state == "open"

    provider.down = True
    trial_due(bench, clock)
    bench.consume(consumer)
    # Where nothing waits for another, it may be the one that had failed, whose retry is of the new passage.
    assert provider.calls[calls:] in ([["a1"]] if ordered else [["a1"], ["b1"]])
    assert control(bench).state == "open"
    provider.down, provider.ill = False, set()
    provider.done.clear()
    trial_due(bench, clock)
    bench.age_retries()
    bench.consume(consumer)
    settle_all(bench, consumer)
    assert control(bench).state == "running"
    if ordered is False:
        assert sorted(provider.done) == ["a1", "a2", "b1", "b2", "c1"]
    else:
        assert by_key(provider.done) == {"a": ["a1", "a2"], "b": ["b1", "b2"], "c": ["c1"]}
    assert set(states(bench).values()) == {"consumed"}


@KINDS
def test_a_reset_leaves_a_group_paused(bench: Bench, *, outside: bool) -> None:
    """It is moved, and reads again when it is resumed, at the rate that an operator gave it."""
    clock, provider = Clock(), Ward()
    consumer = declared(bench, clock, provider, outside=outside)
    send(bench, "a1", "a2")
    bench.consume(consumer)
    bench.app.operator.pause_group("g", by="me", why="enough")
    bench.app.operator.set_rate("g", "1/h", by="me")
    clock.look()
    reset(bench)
    bench.consume(consumer)
    assert (provider.done, control(bench).state) == (["a1", "a2"], "paused")
    bench.app.operator.resume_group("g", by="me")
    for hour in range(1, 3):
        clock.now += 3600
        age_grants(bench, 1)
        bench.consume(consumer)
        assert provider.done[2:] == ["a1", "a2"][:hour]


def test_a_group_that_comes_back_is_free(bench: Bench) -> None:
    """Deleted with all that held it back: paused, slowed down, its breaker open."""
    clock, dependency = Clock(), Ward(down=True)
    options: dict[str, Any] = {"rate": "1000000/s", "breaker": BREAKER}
    bench.send(1, 2, 3)
    bench.consume(gated(bench, clock, dependency, **options))
    bench.consume(gated(bench, clock, group="other", rate="1000000/s"))
    bench.app.operator.pause_group("g", by="me", why="enough")
    bench.app.operator.pause_group("other", by="me", why="enough")
    held = "SELECT consumer_group FROM outbox.{} GROUP BY 1 ORDER BY 1"
    tables = ("group_control", "rate_grant")
    assert [bench.rows(held.format(table)) for table in tables] == [["g", "other"]] * 2
    bench.app.operator.delete_group("g", "t", by="me", why=WHY)
    assert [bench.rows(held.format(table)) for table in tables] == [["other"]] * 2
    bench.consume(gated(bench, clock, **options))
    assert bench.ledger() == ["1", "2", "3", "1", "2", "3"]
    assert control(bench).state == "running"
