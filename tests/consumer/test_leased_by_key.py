"""Several leased messages of one key, taken together: what becomes of the later ones when an earlier one fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text

from outbox.errors import LeaseEnded
from outbox.leases import LeasedMessage
from tests.consumer.test_leased import bodies, end_leases, leased
from tests.kit.bench import Bench

Fail = Callable[[LeasedMessage[Any]], object]


@pytest.fixture(params=["in Python", "in SQL"])
def fail(request: pytest.FixtureRequest, bench: Bench) -> Fail:
    """Say that an attempt failed, which is due again after an hour."""

    def in_sql(taken: LeasedMessage[Any]) -> None:
        with bench.consumer.begin() as connection:
            connection.execute(text("SELECT outbox.fail(:handle, 'no stock', 3600)"), {"handle": taken.handle})

    return in_sql if request.param == "in SQL" else lambda taken: taken.fail("no stock", delay=3600)


@pytest.mark.parametrize("take_id", [None, "x"])
def test_those_behind_a_failed_one_wait_at_no_attempts_cost(take_id: str | None, fail: Fail, bench: Bench) -> None:
    """They come together when it is done, each at its first attempt; no word counts that a client says of them now."""
    group = leased(bench, ordered="key")
    bench.send("1", "2", "3")
    first, *rest = group.take(10, take_id=take_id)
    fail(first)
    assert bench.statuses()[1:] == [("waiting", 0)] * 2
    for each in rest:
        with pytest.raises(LeaseEnded):
            each.acknowledge()
    assert group.take(10, take_id=take_id) == []
    end_leases(bench)
    (again,) = group.take(10)
    assert (again.body, again.attempt) == ("1", 2)
    assert again.acknowledge()
    followed = group.take(10)
    assert [(each.body, each.attempt) for each in followed] == [("2", 1), ("3", 1)]
    for each in rest:
        with pytest.raises(LeaseEnded):
            each.acknowledge()
    assert all(each.acknowledge() for each in followed)
    assert bench.rows("SELECT error FROM outbox.attempt_history") == ["no stock"]


def test_those_behind_a_parked_one_are_not_parked(fail: Fail, bench: Bench) -> None:
    """They go on when an operator discards it, though the table of the group has no retry."""
    group = leased(bench, ordered="key", retry_delays=())
    first_id, *_ = bench.send("1", "2", "3")
    first, *_ = group.take(10)
    fail(first)
    end_leases(bench)
    assert group.take(10) == []
    assert bench.statuses() == [("parked", 1), ("waiting", 0), ("waiting", 0)]
    bench.sink.operator.discard([first_id], group="g", by="me", why="test")
    assert bodies(group.take(10)) == ["2", "3"]


def test_a_sequence_is_parked_with_those_that_were_given_back(bench: Bench) -> None:
    """By the group's rule they are dead letters beside the first, and its retry hands all of them out."""
    group = leased(bench, ordered="key", on_exhausted="park_sequence")
    first_id, *_ = bench.send("1", "2", "3")
    group.take(10)[0].fail("no use", park=True)
    assert group.take(10) == []
    assert [status for status, _ in bench.statuses()] == ["parked"] * 3
    bench.sink.operator.retry([first_id], group="g", by="me", why="test")
    got: list[Any] = []
    while taken := group.take(10):
        got += bodies(taken)
        assert all(each.acknowledge() for each in taken)
    assert got == ["1", "2", "3"]


def test_those_behind_a_skipped_one_stay_with_their_client(bench: Bench) -> None:
    """It holds nothing back, so that the client goes on with them."""
    group = leased(bench, ordered="key", on_exhausted="skip")
    bench.send("1", "2", "3")
    first, *rest = group.take(10)
    first.fail("no use", park=True)
    assert group.take(10) == []
    assert all(each.acknowledge() for each in rest)


def test_only_those_behind_it_are_given_back(fail: Fail, bench: Bench) -> None:
    """The earlier ones, and those of other keys, stay with the client."""
    group = leased(bench, ordered="key")
    bench.app.declare_topic("t", 1)
    for body in ("a1", "b1", "a2", "b2", "a3"):
        bench.send(body, key=body[0])
    taken = {each.body: each for each in group.take(10)}
    fail(taken.pop("a2"))
    with pytest.raises(LeaseEnded):
        taken.pop("a3").acknowledge()
    assert all(each.acknowledge() for each in taken.values())


def test_what_was_tried_before_keeps_its_attempts(fail: Fail, bench: Bench) -> None:
    """Of a later one that has failed, what it has cost isn't forgotten; it isn't handed out before the first either."""
    group = leased(bench, ordered="key")
    bench.send("1", "2", "3")
    first, second, _ = group.take(10)
    second.fail("no stock", delay=0)
    fail(first)
    assert [attempts for _, attempts in bench.statuses()][1:] == [1, 0]
    assert group.take(10) == []


def test_another_takes_messages_are_left_to_its_client(fail: Fail, bench: Bench) -> None:
    """An operator has given the first one to another client, which fails at it: the rest is in the hands of its own."""
    group = leased(bench, ordered="key")
    first_id, *_ = bench.send("1", "2")
    _, second = group.take(10, taker="till 1")
    bench.sink.operator.retry([first_id], group="g", by="me", why="test")
    (first,) = group.take(10, taker="till 2")
    fail(first)
    assert second.acknowledge()


def test_what_is_settled_at_this_moment_is_left_to_its_transaction(fail: Fail, bench: Bench) -> None:
    """A failure waits for no transaction of an application, which may last; the others behind it are given back."""
    group = leased(bench, ordered="key")
    bench.send("1", "2", "3")
    first, second, _ = group.take(10)
    with bench.consumer.connect() as connection, connection.begin():
        assert second.acknowledge(connection)
        fail(first)
    assert [status for status, _ in bench.statuses()][1:] == ["consumed", "waiting"]
