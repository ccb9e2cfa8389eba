"""What the application is told when something is parked: a message of a group, and a half message; once each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import DeadLetter, Message, Orphan, Outbox, Park, Resolution, Worker, testing
from outbox.consumer.failure import record_failure
from outbox.consumer.sql import InboxUpdate
from outbox.consumer.subscription import Entry
from outbox.database.execute import execute
from outbox.database.sql import GroupQueue
from outbox.errors import InvalidHandler
from outbox.message.notice import PARKED
from tests.compensate.test_kill import Killer
from tests.delivery.killed_calling import note, serve, serve_halves
from tests.delivery.support import Post, refuse
from tests.kit import stride, wait_until
from tests.kit.processes import spoken_to

NOTICES = "SELECT count(*) FROM outbox.half_message WHERE topic = 'outbox.parked'"


def calling(post: Post, function: Callable[..., Any] = note, **options: Any) -> Outbox:
    """Return bank B, which can't handle anything, and is told of it."""
    app = Outbox(post.consumer, group="bank", settings=options.pop("settings", post.settings))
    source = None if post.producer is post.consumer else post.producer
    rules = {"retry_delays": (), **options.pop("rules", {})}
    app.consumer("t", group="g", source=source, **rules)(options.pop("handler", refuse))
    app.on_parked("t", **options)(function)
    return app


def park(post: Post, app: Outbox, *bodies: Any, **options: Any) -> list[UUID]:
    """Have messages parked, and what is told of them handled."""
    ids = post.send(*bodies, **options)
    testing.drain(app)
    return ids


def park_half(post: Post, app: Outbox) -> UUID:
    """Have a half parked: nobody knows what became of its transaction."""
    app.checker("t", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    with Session(post.producer) as session, session.begin():
        half_id = app.prepare(session, "t", {"amount": 5})
    assert testing.check(app).parked == 1
    return half_id


def called(post: Post) -> list[tuple[UUID, str, str]]:
    """Return for what bank B was called, in order."""
    return [tuple(row) for row in post.rows("SELECT message_id, consumer_group, status FROM told ORDER BY n")]


def test_told_once_of_a_message(post: Post) -> None:
    """In the database of its group, with the message and the reason."""
    letters: list[DeadLetter[Any]] = []
    app = calling(post, lambda letter, session: letters.append(letter))
    options = {"headers": {"tenant": "b", "city": "Łódź"}, "tag": "blue", "key": "kim", "reply_to": "answers"}
    first, second = park(post, app, {"amount": 1}, {"amount": 2}, **options)
    testing.drain(app)
    letters.sort(key=lambda letter: letter.id)
    assert [(each.id, each.topic, each.group, each.attempts) for each in letters] == [
        (first, "t", "g", 1),
        (second, "t", "g", 1),
    ]
    assert "no such account" in letters[0].reason
    message = letters[1].message
    assert isinstance(message, Message)
    assert (message.id, message.body, message.key, message.tag) == (second, {"amount": 2}, "kim", "blue")
    assert (message.headers["tenant"], message.headers["city"]) == ("b", "Łódź")
    assert (message.reply_to, message.attempt) == ("answers", 1)
    assert post.value("SELECT parked.changed_at = notice.born_at FROM outbox.consumer_message parked,"
                      " outbox.half_message notice WHERE parked.message_id = :id AND notice.key = :key",
                      id=first, key=str(first)) is not None  # fmt: skip


def test_told_once_of_a_half(post: Post) -> None:
    """In the producer's database; and not again, if an operator has it asked again in vain."""
    letters: list[DeadLetter[Any]] = []
    app = Outbox(post.producer, settings=post.settings)
    app.on_parked("t")(lambda letter, session: letters.append(letter))
    half_id = park_half(post, app)
    testing.drain(app)
    app.operator.reset(half_id, by="me", why="again")
    assert testing.check(app).parked == 1
    testing.drain(app)
    (letter,) = letters
    assert (letter.id, letter.group, letter.attempts) == (half_id, None, 1)
    assert "no verdict" in letter.reason
    assert isinstance(letter.message, Orphan)
    assert letter.message.body == {"amount": 5}


def test_told_of_a_half_whose_last_question_was_never_answered(post: Post) -> None:
    """The worker that asked has died: the next pass parks the half, and tells it."""
    app = Outbox(post.producer, settings=post.settings)
    app.on_parked("t")(note)
    app.checker("t", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    with Session(post.producer) as session, session.begin():
        half_id = app.prepare(session, "t", {"amount": 5})
    post.at_a.run("UPDATE outbox.half_check SET check_times = 1, last_answer = 'unknown'")
    assert testing.check(app).parked == 1
    testing.drain(app)
    assert [id_ for id_, *_ in post.told()] == [half_id]


def test_both_in_one_database(village: Post) -> None:
    """A service that produces and consumes is told of both."""
    app = calling(village)
    (message_id,) = park(village, app, 1)
    half_id = park_half(village, app)
    testing.drain(app)
    assert {(id_, group) for id_, group, _ in called(village)} == {(half_id, None), (message_id, "g")}


@pytest.mark.parametrize("how", ["retried", "ordered", "outside", "a crash", "a sequence"])
def test_however_it_is_parked(post: Post, how: str) -> None:
    """By the pass that retries, in its place, outside of transactions, as what kills its worker, with its key."""
    letters: list[DeadLetter[Any]] = []
    rules: dict[str, Any] = {"retry_delays": (3600.0,)}
    handler: Callable[..., Any] = refuse
    if how == "ordered":
        rules |= {"ordered": True}
    elif how == "outside":
        rules |= {"transactional": False}
        handler = lambda message: Park("no such account")  # noqa: E731 - a handler
    elif how == "a sequence":
        rules |= {"ordered": "key", "on_exhausted": "park_sequence"}
    app = calling(post, lambda letter, session: letters.append(letter), rules=rules, handler=handler)
    ids = post.send(1, 2) if how == "a sequence" else post.send(1)
    if how == "a crash":
        testing.drain(app)
        post.run("UPDATE outbox.consumer_message SET starts = 99, next_attempt_at = now() - interval '1 h'")
    testing.drain(app, failed=True)
    letters.sort(key=lambda letter: letter.id)
    assert [(each.id, each.message and each.message.body) for each in letters] == list(zip(ids, (1, 2), strict=False))


def test_the_row_and_its_notice_are_one_transaction(post: Post) -> None:
    """Where the notice can't be written, the message isn't parked: it is handled again."""
    app = calling(post)
    (message_id,) = post.send(1)
    post.run("ALTER TABLE outbox.half_message ADD CONSTRAINT shut CHECK (topic <> 'outbox.parked') NOT VALID")
    try:
        with pytest.raises(IntegrityError):
            testing.drain(app)
        assert post.inbox() == {}
    finally:
        post.run("ALTER TABLE outbox.half_message DROP CONSTRAINT shut")
    testing.drain(app)
    assert [id_ for id_, *_ in called(post)] == [message_id]


def test_nothing_is_told_of_what_another_worker_has_written(post: Post) -> None:
    """A row that stays as it is, since another worker has failed at the message more often, has told it already."""
    app = calling(post)
    subscription = app.subscriptions["t", "g"]
    (message_id,) = post.send(1)
    of = GroupQueue("outbox", "g", "t", 0)
    entry, row = Entry(1, message_id, None), InboxUpdate(message_id, 1, "parked", 1, None, "why")
    for _ in range(2):
        post.run("UPDATE outbox.consumer_message SET status = 'consumed'")
        with post.connection.begin():
            execute(post.connection, *record_failure(subscription, of, entry, row, 0))
        post.run("DELETE FROM outbox.half_message WHERE topic = 'outbox.parked'")
    assert post.value(NOTICES) == 0


def test_two_workers_park_the_same_message(post: Post) -> None:
    """Its lease ran out under the first one: the second waits for its commit, and doesn't tell it once more."""
    app = calling(post)
    subscription = app.subscriptions["t", "g"]
    (message_id,) = post.send(1)
    of, entry = GroupQueue("outbox", "g", "t", 0), Entry(1, message_id, None)
    row = InboxUpdate(message_id, 1, "parked", 1, None, "why")
    with post.consumer.connect() as first, post.consumer.connect() as second, ThreadPoolExecutor() as pool:
        pid, committing = second.scalar(text("SELECT pg_backend_pid()")), first.begin()
        execute(first, *record_failure(subscription, of, entry, row, 0))
        later = pool.submit(execute, second, *record_failure(subscription, of, entry, row, 0))
        blocked = "SELECT cardinality(pg_blocking_pids(:pid)) > 0"
        wait_until(lambda: post.value(blocked, pid=pid), "the second one waits")
        committing.commit()
        later.result()
        second.commit()
    assert post.value(NOTICES) == 1
    testing.drain(app)
    assert [id_ for id_, *_ in called(post)] == [message_id]


def test_what_raises_is_undone_and_called_again(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    """The others are called for all the same."""
    broken = True

    def fail(letter: DeadLetter[Any], session: Session) -> None:
        note(letter, session)
        if broken and letter.message and letter.message.body == 1:
            raise RuntimeError("the ticket system is down")

    app = calling(post, fail)
    first, second = park(post, app, 1, 2)
    assert [id_ for id_, *_ in called(post)] == [second]
    assert "the ticket system is down" in caplog.text
    broken = False
    testing.drain(app, failed=True)
    assert [id_ for id_, *_ in called(post)] == [second, first]


def test_a_callback_that_is_parked_tells_nobody(post: Post) -> None:
    """There is no end otherwise: what is parked of an internal topic is found in the lists, like all else."""
    app = calling(post, refuse, settings=replace(post.settings, retry_delays=()))
    park(post, app, 1)
    testing.drain(app, failed=True)
    parked = "SELECT topic FROM outbox.consumer_message WHERE status = 'parked' ORDER BY topic"
    assert (post.rows(parked), post.value(NOTICES)) == ([PARKED, "t"], 1)


def test_what_an_operator_has_in_hand(post: Post) -> None:
    """Nothing is told of what an operator parks, nor twice of what is parked again."""
    app = calling(post)
    (parked,) = park(post, app, 1)
    app.operator.retry(parked, group="g", by="me", why="again")
    assert testing.drain(app).parked == 1
    assert [id_ for id_, *_ in called(post)] == [parked]


def test_what_it_sends_is_caused_by_its_notice(village: Post) -> None:
    """It may send, with its session; what it sends belongs to the conversation."""

    def write(letter: DeadLetter[Any], session: Session) -> None:
        app.send(session, "tickets", {"why": letter.reason})

    app = calling(village, write)
    (message_id,) = park(village, app, 1)
    headers = "SELECT headers FROM outbox.half_message WHERE topic = :topic"
    notice, ticket = (village.value(headers, topic=topic) for topic in (PARKED, "tickets"))
    assert notice["outbox-cause"] == notice["outbox-conversation"] == str(message_id)
    assert ticket["outbox-conversation"] == str(message_id)


def test_the_producer_has_pruned_it(post: Post) -> None:
    """What was parked before is told with its message; what is found to be gone without."""
    bodies: list[Any] = []
    app = calling(post, lambda letter, session: bodies.append(letter.message), rules={"retry_delays": (3600.0,)})
    park(post, app, 1)
    for table in ("message", "half_message", "op_message"):
        post.at_a.run(f"DELETE FROM outbox.{table}")
    testing.drain(app, failed=True)
    assert bodies == [None]


def test_in_a_test_that_is_rolled_back(village: Post) -> None:
    """All of it happens in the one transaction of the test, within savepoints."""
    letters: list[DeadLetter[Any]] = []
    app = calling(village, lambda letter, session: letters.append(letter))
    with testing.rolling_back(app) as connection:
        message_id = app.send(connection, "t", {"amount": 1})
        testing.drain(app)
    assert [each.id for each in letters] == [message_id]
    assert village.value(NOTICES) == 0


@dataclass
class Transfer:
    """A body."""

    amount: int


def test_async_and_with_a_model(village: Post) -> None:
    """A coroutine gets an AsyncSession, and the body as what it is declared to be."""
    amounts: list[int] = []

    async def announce() -> int:
        engine = create_async_engine(village.producer.url)
        app = Outbox(engine, settings=village.settings)
        app.consumer("t", group="g", retry_delays=())(refuse)

        @app.on_parked("t", model=Transfer)
        async def write(letter: DeadLetter[Transfer], session: AsyncSession) -> None:
            assert letter.message is not None
            amounts.append(letter.message.body.amount)
            await session.execute(text("INSERT INTO told (message_id) VALUES (:id)"), {"id": letter.id})

        counts = await testing.on_loop(testing.drain, app)
        await engine.dispose()
        return counts.done

    ids = village.send({"amount": 5})
    assert asyncio.run(announce()) == 1
    assert (amounts, village.rows("SELECT message_id FROM told")) == ([5], ids)


def test_by_a_worker(post: Post) -> None:
    """One of the consumer's calls for messages, one of the producer's for halves."""
    app, producing = calling(post), Outbox(post.producer, settings=post.settings)
    producing.on_parked("t")(note)
    half_id = park_half(post, producing)
    with Worker(app, producing):
        (message_id,) = post.send(1)
        wait_until(lambda: [id_ for id_, *_ in called(post)] == [message_id], "bank B is called")
        wait_until(lambda: [id_ for id_, *_ in post.told()] == [half_id], "bank A is called")


def test_what_can_not_be_declared(post: Post) -> None:
    """A second function, and one that takes something else."""
    app = calling(post)
    with pytest.raises(InvalidHandler, match="on_parked of 't' is declared already"):
        app.on_parked("t")(note)
    with pytest.raises(InvalidHandler, match="letter, session"):
        app.on_parked("other")(lambda: None)  # type: ignore[arg-type,misc]  # what is refused


@pytest.mark.slow
def test_killed_anywhere(post: Post) -> None:
    """Killed after a round trip of the pass that parks, or of the one that tells, each letter is told once.

    A night tries all of them.
    """
    with spoken_to(serve) as pipe:
        _kill_those_that_park(post, pipe)


def _kill_those_that_park(post: Post, pipe: Pipe) -> None:
    killer, app = Killer(pipe, post), calling(post)
    stages = set()
    for after in itertools.count(1, stride(2)):
        (parked,) = post.send(after)
        ended = killer.kill_after(after)
        stages.add((parked in post.inbox(), parked in [id_ for id_, *_ in called(post)]))
        post.age_retries()
        testing.drain(app)
        assert post.inbox()[parked].status == "parked"
        assert [id_ for id_, *_ in called(post)].count(parked) == 1
        if ended:
            break
    assert stages == {(False, False), (True, False), (True, True)}


@pytest.mark.slow
def test_killed_anywhere_over_a_half(post: Post) -> None:
    """Killed after any round trip of the pass that parks a half, or of the one that tells, it is told once."""
    app = Outbox(post.producer, settings=post.settings)
    app.on_parked("t")(note)
    app.checker("t", max_checks=1)(lambda orphan: Resolution.UNKNOWN)
    stages = set()
    with spoken_to(serve_halves) as pipe:
        killer = Killer(pipe, post)
        for after in itertools.count(1, stride(2)):
            with Session(post.producer) as session, session.begin():
                half_id = app.prepare(session, "t", {"amount": 5}, immunity=0)
            ended = killer.kill_after(after)
            parked = "SELECT parked_at IS NOT NULL FROM outbox.half_check WHERE half_id = :id"
            stages.add((post.at_a.value(parked, id=half_id), half_id in [id_ for id_, *_ in post.told()]))
            post.at_a.run("UPDATE outbox.half_check SET next_check_at = now() - interval '1 s'")
            testing.check(app)
            testing.drain(app, failed=True)
            assert post.at_a.value(parked, id=half_id)
            assert [id_ for id_, *_ in post.told()].count(half_id) == 1
            if ended:
                break
    assert stages == {(False, False), (True, False), (True, True)}
