"""What a group reads: filters, where it starts, what it does when messages are gone, how much memory it takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest
from sqlalchemy import Connection

from outbox.consumer import consumer as consumer_module
from outbox.consumer import sql as consumer_sql
from outbox.consumer.subscription import EVERYTHING
from outbox.database.execute import Row, Statement, execute, read_source
from outbox.errors import MessagesPruned
from outbox.prune.prune_pass import prune_producer_once
from tests.kit.bench import Bench, Ward

OFFSETS = "SELECT queue, max(position) FROM outbox.consumer_offset GROUP BY queue ORDER BY queue"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["user:*"], ["user:1", "user:%", "user:_"]),
        (["*:1"], ["user:1", "order:1"]),
        (["user:%"], ["user:%"]),
        (["user:_"], ["user:_"]),
        (["back\\slash"], ["back\\slash"]),
        (["back\\*"], ["back\\slash"]),
        (["*"], ["user:1", "user:%", "user:_", "order:1", "back\\slash", ""]),
        ([""], [""]),
        (["order:1", "user:1"], ["user:1", "order:1"]),
        ([], []),
    ],
)
def test_key_filters(bench: Bench, keys: list[str], wanted: list[str]) -> None:
    """A key pattern's only wildcard is `*`; what doesn't match has no inbox row, and isn't read again."""
    bench.app.declare_topic("t", 1)
    consumer = bench.declare(keys=keys, batch=3)
    for key in ["user:1", "user:%", "user:_", "order:1", "back\\slash", "", None]:
        bench.send(str(key) if key is not None else "no key", key=key)
    bench.consume(consumer)
    assert bench.ledger() == wanted
    assert len(bench.inbox()) == len(wanted)
    assert bench.rows(OFFSETS) == [(0, 7)]


def test_tag_filters(bench: Bench) -> None:
    """A group with tags gets the messages that have one of them, and only these."""
    consumer = bench.declare(tags=["red", "blue"], batch=2)
    for tag in ["red", "green", None, "blue", "RED", "red"]:
        bench.send(str(tag), tag=tag)
    bench.consume(consumer)
    assert bench.ledger() == ["red", "blue", "red"]


@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({"region": "eu"}, ["eu card", "eu cash"]),
        ({"region": ["eu", "us"], "kind": "card"}, ["eu card", "us card"]),
        ({"kind": "it's 100%"}, ["it's 100%"]),
        ({"region": "EU"}, []),
        ({}, ["eu card", "eu cash", "us card", "it's 100%", "card", "nothing"]),
    ],
)
def test_header_filters(bench: Bench, headers: dict[str, str], taken: list[str]) -> None:
    """Of each header that the filter names, a message has one of the values; what is left out has no inbox row."""
    consumer = bench.declare(headers=headers, batch=2)
    for region, kind in [("eu", "card"), ("eu", "cash"), ("us", "card"), (None, "it's 100%"), (None, "card")]:
        given = {"region": region, "kind": kind, "other": "x"}
        body = f"{region} {kind}" if region else kind
        bench.send(body, headers={name: value for name, value in given.items() if value})
    bench.send("nothing")
    bench.consume(consumer)
    assert bench.ledger() == taken
    assert len(bench.inbox()) == len(taken)


def test_start_first_and_now(any_bench: Bench) -> None:
    """A new group starts at the first message or behind the last one; later starts change nothing."""
    any_bench.send(1, 2)
    first, now = any_bench.declare(), any_bench.declare(group="h", start="now")
    any_bench.send(3)
    for _ in range(2):
        any_bench.consume(first)
        any_bench.consume(now)
        any_bench.declare(start="now")
        any_bench.declare(group="h", start="first")
    any_bench.send(4)
    now = any_bench.declare(group="h", start="now")
    any_bench.consume(now)
    inbox_of = any_bench.inbox("h")
    assert len(inbox_of) == 2
    assert sorted(any_bench.ledger()) == ["1", "2", "3", "3", "4"]


def test_a_known_group_reads_new_topics_and_queues_from_their_first(bench: Bench) -> None:
    """A group that started when its topic didn't exist, or had fewer queues, misses nothing that comes later."""
    consumer = bench.declare(start="now")
    bench.app.declare_topic("t", 1)
    bench.send(1)
    bench.consume(consumer)
    bench.app.declare_topic("t", 16)
    for n in range(2, 30):
        bench.send(n, key=f"k{n}")
    bench.consume(bench.declare(start="now"))
    assert sorted(map(int, bench.ledger())) == list(range(1, 30))


def test_two_workers_start_a_group_together(bench: Bench) -> None:
    """Starting a group is done once: a second start at another time doesn't move it."""
    bench.send(1)
    bench.declare()
    before = bench.rows(OFFSETS)
    bench.send(2)
    bench.declare(start="now")
    assert bench.rows(OFFSETS) == before


PRUNE = "DELETE FROM outbox.message WHERE position BETWEEN :a AND :b"


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
def test_messages_that_were_pruned_unread(bench: Bench, a: int, b: int) -> None:
    """A group that fell behind stops with an error that names what it missed, unless it is told to skip."""
    bench.app.declare_topic("t", 1)
    consumer = bench.declare(settings=replace(bench.settings, read_ahead=2))
    bench.send(1, 2, 3, 4, 5)
    if a > 1:
        consumer._stopping = lambda: len(bench.ledger()) >= 2
        bench.consume(consumer)
        consumer._stopping = lambda: False
    bench.run(PRUNE, a=a, b=b)
    with pytest.raises(MessagesPruned, match=f"{a} to {b} were pruned"):
        bench.consume(consumer)
    with pytest.raises(MessagesPruned):
        bench.consume(consumer)
    bench.consume(bench.declare(on_pruned="skip"))
    assert bench.ledger() == [str(n) for n in range(1, 6) if not a <= n <= b]


def test_a_stuck_queue_stops_no_other(bench: Bench) -> None:
    """Messages pruned unread in one queue don't keep a pass from the others."""
    consumer = bench.declare()
    for n in range(40):
        bench.send(n, key=f"k{n}")
    bench.run("DELETE FROM outbox.message WHERE queue = 3 AND position = 1")
    stuck = bench.rows("SELECT count(*) FROM outbox.message WHERE queue = 3")[0]
    assert stuck > 0
    with pytest.raises(MessagesPruned, match="queue 3"):
        bench.consume(consumer)
    assert len(bench.ledger()) == 39 - stuck


def test_a_new_group_after_a_prune(bench: Bench) -> None:
    """A new group that starts at the first message starts at the first that is kept."""
    bench.app.declare_topic("t", 1)
    bench.send(1, 2, 3)
    bench.run(PRUNE, a=1, b=2)
    bench.consume(bench.declare())
    assert bench.ledger() == ["3"]


def test_big_bodies_are_read_a_few_at_a_time(bench: Bench) -> None:
    """What is read ahead is bounded by its bytes: one big body at least, and no more than the bound allows."""
    settings = replace(bench.settings, read_ahead_bytes=2_500_000)
    consumer = bench.declare(lambda m, s: None, settings=settings, batch=10)
    for _ in range(6):
        bench.send(b"x" * 1_000_000)
    bench.send(b"y" * 4_000_000)
    bench.send(b"z")
    (queue,) = bench.rows("SELECT DISTINCT queue FROM outbox.message")
    read = []
    for position in (0, 5, 6, 7):
        with bench.connection.begin():
            bounds = {"position": position, "limit": 500, "bytes": 2_500_000, "grown": 0}
            statement = consumer_sql.messages_after("outbox", topic="t", queue=queue, **bounds, **EVERYTHING)
            rows = [row[0] for row in execute(bench.connection, statement)[0]]
            read.append([each for each in rows if each > position])
    assert read == [[1, 2, 3], [6, 7], [7], [8]]
    tracemalloc.start()
    try:
        assert bench.consume(consumer).done == 8
        assert tracemalloc.get_traced_memory()[1] < 3 * 5_000_000
    finally:
        tracemalloc.stop()


def test_read_ahead_when_another_worker_moves_on(bench: Bench) -> None:
    """A worker with messages read ahead goes on where another one has left the queue, and back again."""
    one, two = bench.declare(), bench.declare()
    bench.send(*range(9))
    for turn in range(3):
        for number, consumer in enumerate((one, two)):
            until = 3 * turn + number + 1
            consumer._stopping = lambda until=until: len(bench.ledger()) >= until  # type: ignore[misc]
            bench.consume(consumer)
    one._stopping = lambda: False
    bench.consume(one)
    assert bench.ledger() == [str(n) for n in range(9)]
    assert set(bench.statuses()) == {("consumed", 1)}


def test_a_stop_between_two_transactions(bench: Bench) -> None:
    """A worker that is told to stop ends its pass after the transaction it is in, and charges no attempt."""
    ward = Ward()
    consumer = bench.declare(ward)
    consumer._stopping = lambda: len(ward.done) >= 2
    bench.send(1, 2, 3)
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2"]
    assert bench.statuses() == [("consumed", 1)] * 2


def test_an_idle_pass_steps_over_nothing_that_was_pruned(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an old snapshot keeps pruned messages in the indexes, a pass with nothing to do reads no block more."""
    blocks: list[int] = []

    def explained(connection: Connection, *statements: Statement) -> list[list[Row]]:
        for statement in statements:
            sql = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement.sql}"
            (((plan,),),) = execute(connection, Statement(sql, statement.values))
            blocks.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
        return read_source(connection, *statements)

    bench.app.declare_topic("t", 1)
    consumer = bench.declare(batch=1_000)
    bench.send(*range(3_000))
    bench.consume(consumer)
    monkeypatch.setattr(consumer_module, "read_source", explained)
    assert not consumer.consume_once(bench.connection, bench.connection)
    before, blocks[:] = sum(blocks), []
    with bench.producer.connect().execution_options(isolation_level="REPEATABLE READ") as pinned:
        pinned.exec_driver_sql("SELECT pg_current_snapshot()")
        assert prune_producer_once(bench.connection, replace(bench.settings, retention=1e-6)).done == 2_999
        assert not consumer.consume_once(bench.connection, bench.connection)
    assert sum(blocks) <= before
