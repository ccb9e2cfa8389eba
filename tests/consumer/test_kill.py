"""Processes that are killed: nothing lost, nothing doubled; and a message that kills is found out."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outbox import Settings
from outbox.operator.operator import Operator
from tests.consumer import workers
from tests.kit import tries, wait_until
from tests.kit.bench import Bench, make_ledger

ACCOUNTS = 10
KILLS, KIND_KILLS, KEY_KILLS = tries(10), tries(3), tries(3)
CREW = 3
Spawn = Callable[[str, int], Process]


@pytest.fixture
def banks(new_engine: Callable[[], Engine], settings: Settings) -> Iterator[Bench]:
    """A producer and a consumer in two databases, with accounts on the consumer's side."""
    producer, consumer = new_engine(), new_engine()
    make_ledger(consumer)
    with consumer.begin() as connection:
        connection.execute(text("CREATE TABLE account (key text PRIMARY KEY, balance int NOT NULL DEFAULT 0)"))
        connection.execute(text("INSERT INTO account SELECT 'k' || n FROM generate_series(0, 9) n"))
    with Bench(producer, consumer, settings) as bench:
        yield bench


@pytest.fixture
def spawn(banks: Bench) -> Iterator[Spawn]:
    """A function that starts a worker process, of a server that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    lifeline, held = context.Pipe(duplex=False)
    urls = [engine.url.render_as_string(hide_password=False) for engine in (banks.producer, banks.consumer)]
    running: list[Process] = []

    def start(mode: str, seed: int) -> Process:
        process = context.Process(target=workers.start, args=(lifeline, mode, *urls, seed), daemon=True)
        process.start()
        running.append(process)
        return process

    yield start
    for process in running:
        kill(process)
        process.close()
    held.close()


def kill(process: Process) -> None:
    """Kill a process by SIGKILL, and wait for its end."""
    process.kill()
    process.join()


def send(bench: Bench, *bodies: Any, **options: Any) -> None:
    """Send without dispatching: that is what the workers do."""
    with bench.producer.begin() as connection:
        for body in bodies:
            bench.app.send(connection, "t", body, **{"key": "k0", **options})


def unfinished(bench: Bench) -> int:
    """Return how many committed messages have no final state in the inbox yet."""
    with bench.producer.begin() as connection:
        sent = connection.execute(text("SELECT count(*) FROM outbox.op_message")).scalar_one()
    done = bench.value(
        "SELECT count(*) FROM outbox.consumer_message WHERE status NOT IN ('failed', 'waiting', 'taken')"
    )
    return int(sent) - int(done)


@pytest.mark.slow
def test_every_account_is_exact_under_kills(banks: Bench, spawn: Spawn) -> None:
    """SIGKILLs at random moments, with copies and failures on the way: every account is exact in the end."""
    _kill_crews(banks, spawn, "money", KILLS)


@pytest.mark.parametrize("kind", workers.CREDITING)
def test_each_kind_of_handler_is_exact_under_kills(banks: Bench, spawn: Spawn, kind: str) -> None:
    """The same with what handlers may take in place of a session, alone and in pipelines."""
    _kill_crews(banks, spawn, kind, KIND_KILLS)


@pytest.mark.parametrize("mode", workers.TAKING)
def test_what_clients_take_is_exact_under_kills(banks: Bench, spawn: Spawn, mode: str) -> None:
    """The same with messages that are taken, credited and acknowledged in one transaction; by key, also their order."""
    sent = _kill_crews(banks, spawn, mode, KIND_KILLS)
    ledger = [int(body) for body in banks.ledger()]
    in_order = [list(range(key, sent, ACCOUNTS)) for key in range(ACCOUNTS)]
    found = [[n for n in ledger if n % ACCOUNTS == key] for key in range(ACCOUNTS)]
    assert mode == "taken" or found == in_order


def _kill_crews(banks: Bench, spawn: Spawn, mode: str, most: int) -> int:
    """Kill workers of a mode in the middle of their work, so often, and count what is in the ledger in the end.

    Return how many messages were sent.
    """
    chance = random.Random(11)  # noqa: S311
    crew = [spawn(mode, seed) for seed in range(CREW)]
    kills = 0
    sent = 0
    # A run without a copy proves too little; half of the passes that dispatch something resend.
    while kills < most or not (copies(banks) or mode in workers.TAKING):
        with banks.producer.begin() as connection:
            for _ in range(chance.randint(5, 25)):
                banks.app.send(connection, "t", sent, key=f"k{sent % ACCOUNTS}")
                sent += 1
        goal = max(unfinished(banks) - chance.randint(1, 20), 0)
        doomed = chance.randrange(CREW)
        # Kill in the middle of work: when some of what is left is done, whatever the worker is doing then.
        wait_until(lambda goal=goal: unfinished(banks) <= goal, "the workers get on")  # type: ignore[misc]
        for number in {doomed, chance.randrange(CREW)}:
            kill(crew[number])
            assert crew[number].exitcode == -signal.SIGKILL
            kills += 1
            crew[number] = spawn(mode, kills)
    wait_until(lambda: unfinished(banks) == 0, "all messages are consumed or parked")
    for worker in crew:
        kill(worker)

    states = dict(banks.rows("SELECT status, count(*) FROM outbox.consumer_message GROUP BY status"))
    assert sum(states.values()) == sent
    assert states["consumed"] == sent - states.get("parked", 0)
    doubles = "SELECT body, count(*) FROM ledger GROUP BY body HAVING count(*) > 1"
    assert banks.rows(doubles) == []
    assert banks.rows("SELECT count(*) FROM ledger") == [states["consumed"]]
    assert banks.rows("SELECT sum(balance) FROM account") == [states["consumed"]]
    return sent


def copies(bench: Bench) -> int:
    """Return how many messages are in the topic's queues once more."""
    with bench.producer.begin() as connection:
        return int(connection.scalar(text("SELECT count(*) FROM outbox.message WHERE send_number > 1")) or 0)


@pytest.mark.parametrize("seed", range(tries(1)))
def test_killed_while_a_group_reads_again(banks: Bench, spawn: Spawn, seed: int) -> None:
    """Resets while three workers work and are killed: each message takes effect once in each passage that it is in."""
    chance = random.Random(seed)  # noqa: S311
    operator = Operator.open({"producer": banks.producer, "consumer": banks.consumer}, banks.settings)
    crew = [spawn("money", seed + number) for number in range(CREW)]
    send(banks, *range(60))
    for passage in range(1, 4):
        wait_until(lambda: unfinished(banks) == 0, "all is consumed or parked")
        operator.reset_group("g", "t", "first", by="ada", why=f"passage {passage}")
        goal = chance.randint(5, 55)
        again = "SELECT count(*) FROM outbox.consumer_message WHERE passage = :passage"
        wait_until(lambda: banks.value(again, passage=passage) >= goal, "some of it was read again")  # noqa: B023
        for number in range(CREW):
            kill(crew[number])
            crew[number] = spawn("money", 10 * passage + number)
    wait_until(lambda: unread(banks) == 0 and unfinished(banks) == 0, "all of it was read again")
    for worker in crew:
        kill(worker)
    effects = """
        SELECT message_id FROM outbox.consumer_message WHERE status = 'consumed'
         UNION ALL SELECT message_id FROM outbox.reread_message WHERE status = 'consumed'"""
    assert sorted(banks.rows(effects)) == sorted(banks.rows("SELECT message_id FROM ledger"))
    assert banks.rows("SELECT count(*) FROM outbox.consumer_message WHERE passage < 3") == [0]
    assert banks.rows("SELECT sum(balance) FROM account") == [banks.value("SELECT count(*) FROM ledger")]


def unread(bench: Bench) -> int:
    """Return how many messages stand after the group's offsets."""
    with bench.producer.begin() as connection:
        ends = connection.execute(text("SELECT queue, max(position) FROM outbox.message GROUP BY 1")).all()
    reached = dict(bench.rows("SELECT queue, max(position) FROM outbox.consumer_offset GROUP BY 1"))
    return sum(end - reached.get(queue, 0) for queue, end in ends)


def test_keys_stay_in_order_under_kills(banks: Bench, spawn: Spawn) -> None:
    """Workers that are killed at random moments while one message in ten fails: each key in order, each effect once."""
    chance = random.Random(3)  # noqa: S311
    crew = [spawn("keys", seed) for seed in range(CREW)]
    sent = 0
    for number in range(KEY_KILLS):
        with banks.producer.begin() as connection:
            for _ in range(20):
                banks.app.send(connection, "t", sent, key=f"k{sent % ACCOUNTS}")
                sent += 1
        goal = chance.randint(5, 20)
        wait_until(lambda goal=goal: unfinished(banks) <= goal, "the workers get on")  # type: ignore[misc]
        doomed = chance.randrange(CREW)
        kill(crew[doomed])
        crew[doomed] = spawn("keys", number)
    wait_until(lambda: unfinished(banks) == 0, "all messages are consumed")
    for worker in crew:
        kill(worker)
    ledger = [int(body) for body in banks.ledger()]
    assert [[n for n in ledger if n % ACCOUNTS == key] for key in range(ACCOUNTS)] == [
        list(range(key, sent, ACCOUNTS)) for key in range(ACCOUNTS)
    ]


def test_a_message_that_kills_its_worker_keeps_its_key(banks: Bench, spawn: Spawn) -> None:
    """Where a key blocks rather than go past a message, one that ends its process each time is never passed."""
    send(banks, "bomb", 1, 2)
    send(banks, "other", key="k1")
    settled = "SELECT count(*) FROM outbox.consumer_message WHERE status = 'failed' AND last_error IS NOT NULL"

    def is_settled() -> bool:
        return banks.rows(settled) == [1] and "other" in banks.ledger() and len(banks.inbox()) == 4

    for _ in range(20):
        worker = spawn("block", 0)
        wait_until(lambda: worker.exitcode is not None or is_settled(), "the worker dies or is done")  # noqa: B023
        kill(worker)
        if is_settled():
            break
    assert is_settled()
    assert banks.ledger() == ["other"]
    assert sorted(row.status for row in banks.inbox().values()) == ["consumed", "failed", "waiting", "waiting"]


def test_killed_inside_the_handler(banks: Bench, spawn: Spawn, tmp_path: Path) -> None:
    """A process killed between its business change and the commit leaves nothing, and the next one does it once."""
    reached = tmp_path / "reached"
    send(banks, "money", headers={"file": str(reached)})
    worker = spawn("hang", 0)
    wait_until(reached.exists, "the handler has made its change")
    kill(worker)
    # The server notices the loss by itself; until then the queue's lock is held.
    done = banks.declare()
    wait_until(lambda: banks.consume(done).done, "the queue is free again")
    assert banks.ledger() == ["money"]
    assert banks.statuses() == [("consumed", 1)]


@pytest.mark.parametrize("mode", ["crash", "ordered"])
@pytest.mark.parametrize("seed", range(tries(1)))
def test_a_message_that_kills_its_worker(banks: Bench, spawn: Spawn, mode: str, seed: int) -> None:
    """A message that ends its process each time is parked, with the reason; all others are consumed."""
    with banks.producer.begin() as connection:
        banks.app.send(connection, "t", "first", key="k0")
        bomb = banks.app.send(connection, "t", "bomb", key="k0")
        late = banks.app.send(connection, "t", "late bomb", key="k0")
        for n in range(5):
            banks.app.send(connection, "t", n, key="k0")
    deaths = 0
    while unfinished(banks) > 0:
        worker = spawn(mode, seed)
        wait_until(lambda: worker.exitcode is not None or unfinished(banks) == 0, "the worker dies or is done")  # noqa: B023
        if worker.exitcode is not None:
            assert worker.exitcode == 137
            deaths += 1
            assert deaths < 20, banks.inbox()
    assert sorted(banks.ledger()) == ["0", "1", "2", "3", "4", "first"]
    inbox = banks.inbox()
    for half_id in (bomb, late):
        assert inbox[half_id].status == "parked"
        assert "the worker died each time" in str(inbox[half_id].error)
    assert all(row.status == "consumed" for id_, row in inbox.items() if id_ not in {bomb, late})
