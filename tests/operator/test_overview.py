"""The overview: numbers, topics and lags over the borders of databases."""

from __future__ import annotations

import datetime as dt
from bisect import bisect_left
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, create_engine

from outbox import Outbox, Park, Retry, Settings
from outbox.consumer.meter import BOUNDS
from outbox.database.identity import renew
from outbox.errors import InvalidRequest, NotFound, UnknownDatabase
from outbox.operator.databases import Database, Databases
from outbox.operator.health import overview
from outbox.operator.health.overview import HealthViews
from tests.operator.health import (
    consume,
    dispatch,
    findings,
    open_databases,
    overview_of,
    sample,
    send,
    sql,
    this_minute,
)

NewEngine = Callable[..., Engine]


def test_an_empty_database(engine: Engine) -> None:
    """Where nothing was ever sent all counts are zero, and what isn't known is None."""
    found = overview_of(bank=engine)
    assert found.tiles == {
        "pending": 0, "oldest_pending": None, "undecided": 0, "orphans": 0, "parked_halves": 0, "dead": 0,
        "failed": 0, "scheduled": 0, "throughput": None, "lag": None,
    }  # fmt: skip
    assert (found.topics, found.unreachable, found.capped) == ([], [], [])
    assert {tuple(each.values) for each in found.series} == {(None,) * 59}


def test_tiles(engine: Engine) -> None:
    """Each state of a message counts where it belongs."""
    send(engine, 5)
    dispatch(engine)
    consume(engine, engine, [Park("no such account"), Park("no such account"), Retry()], limit=4)
    send(engine, 3)
    send(engine, 1, delay=3600)
    outbox = Outbox(engine, settings=Settings(immunity=0.0))
    with engine.begin() as connection:
        half, *_ = (outbox.prepare(connection, "paid", "body") for _ in range(2))
    sql(engine, "UPDATE outbox.half_check SET parked_at = now(), reason = 'over' WHERE half_id = :id", id=half)
    tiles = overview_of(bank=engine).tiles
    assert {name: tiles[name] for name in ("pending", "undecided", "orphans", "parked_halves", "dead", "failed")} == {
        "pending": 4, "undecided": 2, "orphans": 1, "parked_halves": 1, "dead": 2, "failed": 1,
    }  # fmt: skip
    assert (tiles["lag"], tiles["scheduled"]) == (1, 0)
    assert tiles["oldest_pending"] is not None
    dispatch(engine)
    tiles = overview_of(bank=engine).tiles
    assert (tiles["scheduled"], tiles["pending"], tiles["oldest_pending"], tiles["lag"]) == (1, 0, None, 4)


def test_discarded_messages_are_no_dead_letters(engine: Engine) -> None:
    """What an operator has discarded needs no operator any more."""
    send(engine, 2)
    dispatch(engine)
    consume(engine, engine, [Park("no"), Park("no")])
    assert overview_of(bank=engine).tiles["dead"] == 2
    sql(
        engine,
        "UPDATE outbox.consumer_message SET discarded_at = now() WHERE message_id = "
        "(SELECT message_id FROM outbox.consumer_message LIMIT 1)",
    )
    found = overview_of(bank=engine)
    assert (found.tiles["dead"], found.topics[0].groups[0].parked) == (1, 1)
    sql(engine, "UPDATE outbox.consumer_message SET discarded_at = now()")
    assert not findings(overview_of(bank=engine), "parked")


def test_a_count_that_stopped(engine: Engine) -> None:
    """A count that stopped at its limit is named."""
    sql(
        engine,
        "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) "
        "VALUES ('mail', 'paid', 0, 1, 0)",
    )
    sql(
        engine,
        "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status, attempts) "
        "SELECT 'mail', gen_random_uuid(), 'paid', 0, 1, 'parked', 1 FROM generate_series(1, 10001)",
    )
    found = overview_of(bank=engine)
    assert (found.tiles["dead"], found.capped) == (10_000, ["dead"])
    (problem,) = findings(found, "parked")
    assert problem.sentence.startswith("at least 10,000 messages")


def test_a_lag_over_the_border_of_a_database(engine: Engine, new_engine: NewEngine) -> None:
    """A group in one database lags behind the topic of another; without that one the lag isn't known."""
    shop = new_engine()
    send(engine, 10)
    dispatch(engine)
    consume(shop, engine, limit=6)
    found = overview_of(bank=engine, shop=shop)
    (topic,) = found.topics
    assert (topic.database, topic.topic, topic.queues, topic.messages) == ("bank", "paid", 8, 10)
    assert [(group.database, group.group, group.consumed, group.lag) for group in topic.groups] == [
        ("shop", "mail", 6, 4)
    ]
    assert found.tiles["lag"] == 4
    alone = overview_of(shop=shop)
    assert [(topic.database, topic.topic, topic.groups[0].lag) for topic in alone.topics] == [("shop", "paid", None)]
    assert alone.tiles["lag"] is None


def test_two_databases_with_one_topic(engine: Engine, new_engine: NewEngine) -> None:
    """Which of two producers a group consumes from is told by the id that it has met, and of copies by the address."""
    other, shop = new_engine(), new_engine()
    for producer, count in ((engine, 10), (other, 3)):
        send(producer, count)
        dispatch(producer)
    consume(shop, other, limit=1)
    for _ in range(2):
        topics = overview_of(bank=engine, other=other, shop=shop).topics
        lags = [(topic.database, [group.lag for group in topic.groups]) for topic in topics]
        assert lags == [("bank", []), ("other", [2])]
        with engine.begin() as connection:
            renew(connection, "outbox")


def test_throughput_at_the_moment(engine: Engine) -> None:
    """It is counted from the newest sample that is at least a minute old."""
    send(engine, 10)
    dispatch(engine)
    minute = this_minute(engine)
    sample(engine, minute - dt.timedelta(minutes=2), {"paid": {"messages": 4}})
    sample(engine, minute - dt.timedelta(minutes=5), {"paid": {"messages": 10}})  # from here on: none
    throughput = overview_of(bank=engine).tiles["throughput"]
    assert throughput is not None
    assert 0 < throughput <= 6 / 2  # less, the longer it took to ask


def test_series_of_a_window(engine: Engine, new_engine: NewEngine) -> None:
    """Samples become series; those of a group lie in another database than those of its topic."""
    shop = new_engine()
    sql(
        shop,
        "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts) "
        "VALUES ('mail', 'paid', 0, 1, 0)",
    )
    send(engine, 1)
    dispatch(engine)
    minute = this_minute(engine)
    for back in reversed(range(4)):
        at = minute - dt.timedelta(minutes=back)
        sample(engine, at, {"paid": {"messages": 100 - 10 * back, "undispatched": back}})
        sample(shop, at, {}, {"paid": {"mail": {"consumed": 80 - 10 * back, "parked": 3 - back}}})
    found = {each.name: each for each in overview_of(bank=engine, shop=shop).series}
    assert found["throughput"].times[-1] == found["dead"].times[-1]
    assert len(found["throughput"].times) >= 58  # a minute that ends here and now has no sample
    ends = {name: [value for value in each.values if value is not None][-3:] for name, each in found.items()}
    assert ends["throughput"] == ends["throughput/paid"] == ends["consumed"] == [10, 10, 10]
    assert (ends["backlog"], ends["dead"], ends["lag/paid/mail"]) == ([2, 1, 0], [1, 2, 3], [20, 20, 20])
    assert found["throughput"].values.count(None) == len(found["throughput"].times) - 3


def test_of_many_topics_those_that_are_highest_now_are_drawn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of many topics are long: only what is drawn is read, and the sums are those of all."""
    monkeypatch.setattr(overview, "_FEW", 3)
    minute = this_minute(engine)
    for number, topic in enumerate(("paid", "sent", "lost")):
        send(engine, 3 + number, topic=topic)
    for back in reversed(range(4)):
        topics = {topic: {"messages": 10 - back, "undispatched": 5} for topic in ("paid", "sent", "lost")}
        sample(engine, minute - dt.timedelta(minutes=back), topics)
    series = HealthViews(open_databases(bank=engine)).overview(most=1).series
    values = {each.name: [value for value in each.values if value is not None][-3:] for each in series}
    assert (values["throughput"], values["backlog"], values["backlog/lost"]) == ([3] * 3, [15] * 3, [5] * 3)
    assert [name for name in values if name.startswith("backlog/")] == ["backlog/lost"]


@pytest.mark.parametrize("window", ["6h", "24h", "7d"])
def test_longer_windows(engine: Engine, window: str) -> None:
    """One sample stands for each step, the first in it; a step without one is a gap."""
    sql(
        engine,
        """INSERT INTO outbox.stats_sample
           SELECT t, jsonb_build_object('at', t, 'totals', jsonb_build_object('messages',
                  extract(epoch FROM t)::int8 / 60))
             FROM generate_series(date_trunc('minute', clock_timestamp()) - interval '7 days 3 hours',
                                  clock_timestamp() - interval '1 minute', interval '1 minute') t
            WHERE extract(hour FROM t) <> 4 OR clock_timestamp() - t < interval '24 hours'""",
    )
    values = {each.name: each.values for each in overview_of(window, bank=engine).series}["throughput"]
    assert {value for value in values if value is not None} == {1.0}
    assert values.count(None) <= 14


def test_a_sample_that_failed_is_stood_in_for(engine: Engine) -> None:
    """Where the first sample of a step couldn't be taken, the next one stands for it."""
    sql(
        engine,
        """INSERT INTO outbox.stats_sample
           SELECT t, CASE WHEN extract(minute FROM t)::int % 5 = 0 THEN '{"error": "canceled"}' ELSE jsonb_build_object(
                  'at', t, 'totals', jsonb_build_object('messages', extract(epoch FROM t)::int8 / 60)) END
             FROM generate_series(date_trunc('minute', clock_timestamp()) - interval '7 hours',
                                  clock_timestamp() - interval '1 minute', interval '1 minute') t""",
    )
    values = {each.name: each.values for each in overview_of("6h", bank=engine).series}["throughput"]
    assert {1.0} <= set(values) <= {1.0, None}
    assert values.count(None) <= 1


def test_a_window_that_is_none(engine: Engine) -> None:
    """The error names those that are."""
    with pytest.raises(InvalidRequest, match="1h, 6h, 24h, 7d"):
        overview_of("1y", bank=engine)


def test_a_database_that_is_away(engine: Engine) -> None:
    """It is named with the reason and without a password, and hides nothing of the others."""
    send(engine, 3)
    gone = create_engine(engine.url.set(database="gone", password="hunter2"))  # noqa: S106
    parts = frozenset({"producer", "consumer"})
    both = Databases([Database("bank", engine, Settings(), parts), Database("gone", gone, Settings(), parts)])
    found = HealthViews(both).overview()
    assert (found.unreachable, found.tiles["pending"]) == (["gone"], 3)
    (problem,) = findings(found, "can't be reached")
    assert (problem.severity, problem.page, problem.query) == ("problem", "system", {"database": "gone"})
    assert "gone" in problem.sentence
    assert "hunter2" not in repr(found)
    nothing = HealthViews(Databases([Database("gone", gone, Settings(), parts)])).overview()
    assert (nothing.series, nothing.topics, set(nothing.tiles.values())) == ([], [], {None})


def test_the_work_of_a_group_by_minute(engine: Engine) -> None:
    """Counts and percentiles of all workers that had the group; a minute without a sample or a worker is a gap."""
    health, now = HealthViews(open_databases(b=engine)), this_minute(engine)
    fast, slow = str(bisect_left(BOUNDS, 0.01)), str(bisect_left(BOUNDS, 2.0))
    done = {"done": 100.0, "failed": 3.0, "calls": {fast: 90, slow: 10}}
    idle = {"done": 0.0, "failed": 0.0, "calls": {}}
    for back, work in ((2, {"paid": {"mail": done}}), (3, {"paid": {"mail": idle}}), (4, {"paid": {"other": done}})):
        sample(engine, now - dt.timedelta(minutes=back), {}, work=work)
    found = {each.name: each for each in health.work("paid", "mail", "b")}
    at = found["p50"].times.index(now - dt.timedelta(minutes=2))
    assert {name: each.values[at - 2 : at + 2] for name, each in found.items() if name[0] != "p"} == {
        "consumed": [None, 0.0, 100.0, None],
        "failed": [None, 0.0, 3.0, None],
    }
    assert [each is None for each in found["p50"].values[at - 2 : at + 2]] == [True, True, False, True]
    assert [found[name].values[at] for name in ("p50", "p95")] == pytest.approx([0.01, 2.0], rel=0.25)
    with pytest.raises(NotFound, match="no group 'nobody' of topic 'paid' is known"):
        health.work("paid", "nobody")
    with pytest.raises(InvalidRequest, match="window"):
        health.work("paid", "mail", window="2y")
    with pytest.raises(UnknownDatabase):
        health.work("paid", "mail", "nowhere")
