"""Order per key: what fails holds back its key and no other, and all of a key follow in their order."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

from outbox import Message, Park, Skip
from outbox.consumer.key_order import SEQUENCE_KIND
from outbox.errors import InvalidHandler
from outbox.message.model import Counts
from tests.consumer.test_reread import operator, reset
from tests.kit import Tables
from tests.kit.bench import Bench, Ward, record


def send(bench: Bench, *bodies: str) -> None:
    """Send bodies, each under the key that it begins with."""
    for body in bodies:
        bench.send(body, key=body[0])


def ids(bench: Bench) -> dict[str, UUID]:
    """Return the id of each message by its body."""
    rows = Tables(bench.producer).rows("SELECT convert_from(body, 'utf8'), id FROM outbox.half_message ORDER BY id")
    return dict(tuple(row) for row in rows)


def states(bench: Bench) -> dict[str, str]:
    """Return the status of each message by its body."""
    rows = bench.inbox()
    return {body: rows[id_].status for body, id_ in ids(bench).items() if id_ in rows}


def id_of(bench: Bench, body: str) -> UUID:
    """Return the id of the message with a body."""
    return ids(bench)[body]


def by_key(bodies: list[str]) -> dict[str, list[str]]:
    """Return bodies by key, in order."""
    found: dict[str, list[str]] = {}
    for body in bodies:
        found.setdefault(body[0], []).append(body)
    return found


@pytest.mark.parametrize("batch", [1, 4])
def test_a_failed_message_holds_back_its_key_alone(any_bench: Bench, batch: int) -> None:
    """Later messages of the key wait without a call of the handler; the others of the queue go on."""
    any_bench.app.declare_topic("t", 1)
    ward = Ward("a1")
    consumer = any_bench.declare(ward, ordered="key", batch=batch)
    send(any_bench, "a0", "a1", "b1", "a2", "b2", "a3")
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["a0", "b1", "b2"]
    inbox = any_bench.inbox().values()
    assert sorted((row.status, row.attempts) for row in inbox) == [
        *[("consumed", 1)] * 3,
        ("failed", 1),
        *[("waiting", 0)] * 2,
    ]
    assert not {"a2", "a3"} & set(ward.calls)


def test_a_retry_of_the_head_releases_the_rest_in_order(any_bench: Bench) -> None:
    """When the first message of the key succeeds, those that waited follow, in order, in the same retry pass."""
    ward = Ward("a1")
    consumer = any_bench.declare(ward, ordered="key")
    send(any_bench, "a1", "a2", "a3")
    any_bench.consume(consumer)
    any_bench.retry(consumer)
    send(any_bench, "a4", "b1")
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["b1"]
    ward.ill.clear()
    any_bench.retry(consumer)
    assert any_bench.ledger() == ["b1", "a1", "a2", "a3", "a4"]
    send(any_bench, "a5")
    any_bench.consume(consumer)
    assert any_bench.ledger()[-1] == "a5"
    assert {row.status for row in any_bench.inbox().values()} == {"consumed"}


def test_one_that_waited_may_fail_itself(bench: Bench) -> None:
    """A released message that fails holds back the rest of its key, with attempts of its own."""
    ward = Ward("a1", "a2")
    consumer = bench.declare(ward, ordered="key")
    send(bench, "a1", "a2", "a3")
    bench.consume(consumer)
    ward.ill.remove("a1")
    bench.retry(consumer)
    assert states(bench) == {"a1": "consumed", "a2": "failed", "a3": "waiting"}
    assert {(row.status, row.attempts) for row in bench.inbox().values()} >= {("failed", 1)}
    ward.ill.clear()
    bench.retry(consumer)
    assert bench.ledger() == ["a1", "a2", "a3"]


def test_messages_without_a_key_have_no_order(bench: Bench) -> None:
    """Without a key nothing is held back."""
    bench.app.declare_topic("t", 1)
    consumer = bench.declare(Ward(1), ordered="key")
    bench.send(1, 2, key=None)
    bench.consume(consumer)
    assert bench.statuses() == [("failed", 1), ("consumed", 1)]


def exhausted(bench: Bench, policy: str, *, crash: bool = False) -> tuple[Any, Ward]:
    """Have the first of three messages of a key use up its attempts, under a policy; ``crash``: its starts."""
    ward = Ward("a1")
    consumer = bench.declare(ward, ordered="key", on_exhausted=policy, retry_delays=(60.0,))
    send(bench, "a1", "a2", "a3")
    bench.consume(consumer)
    if crash:
        bench.run(f"UPDATE outbox.consumer_message SET starts = {bench.settings.max_starts} WHERE status = 'failed'")
    bench.retry(consumer)
    bench.retry(consumer, due=False)
    return consumer, ward


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("park", {"a1": "parked", "a2": "waiting", "a3": "waiting"}),
        ("park_sequence", {"a1": "parked", "a2": "parked", "a3": "parked"}),
        ("skip", {"a1": "parked", "a2": "consumed", "a3": "consumed"}),
        ("block", {"a1": "failed", "a2": "waiting", "a3": "waiting"}),
    ],
)
def test_what_becomes_of_a_key_whose_head_is_exhausted(
    bench: Bench, policy: str, expected: dict[str, str], *, crash: bool
) -> None:
    """Out of attempts, or killing its worker, the head is treated as declared, and so is what comes later."""
    consumer, ward = exhausted(bench, policy, crash=crash)
    assert states(bench) == expected
    send(bench, "a4", "b1")
    bench.consume(consumer)
    consumer.retry_once(bench.connection, bench.source)
    assert states(bench)["a4"] == expected["a3"]
    assert states(bench)["b1"] == "consumed"
    head = id_of(bench, "a1")
    ward.ill.clear()
    if policy == "block":
        bench.age_retries()
    else:
        bench.sink.operator.retry(head, group="g", by="me", why="fixed")
    consumer.retry_once(bench.connection, bench.source)
    order = ["a2", "a3", "a4", "a1"] if policy == "skip" else ["a1", "a2", "a3", "a4"]
    assert by_key(bench.ledger())["a"] == order
    assert set(states(bench).values()) == {"consumed"}


def test_a_discarded_head_lets_its_key_go_on(bench: Bench) -> None:
    """What an operator discards doesn't hold back anything, and needs no act for those that waited."""
    consumer, _ = exhausted(bench, "park")
    head = id_of(bench, "a1")
    bench.sink.operator.discard(head, group="g", by="me", why="nobody needs it")
    consumer.retry_once(bench.connection, bench.source)
    assert bench.ledger() == ["a2", "a3"]


def test_a_sequence_is_parked_with_the_reason(bench: Bench) -> None:
    """Each message of a parked sequence says for which one it is; retried alone it waits for its turn."""
    consumer, ward = exhausted(bench, "park_sequence")
    rows = bench.rows("SELECT (message_id, last_error, error_kind)::text FROM outbox.consumer_message WHERE follows")
    assert len(rows) == 2
    assert all(SEQUENCE_KIND in row and "before it, is parked" in row for row in rows)
    second = id_of(bench, "a2")
    bench.sink.operator.retry(second, group="g", by="me", why="test")
    ward.ill.clear()
    consumer.retry_once(bench.connection, bench.source)
    assert bench.ledger() == []


@pytest.mark.parametrize("answer", [Park("bad"), Skip()])
def test_answers_of_the_head(bench: Bench, answer: Park | Skip) -> None:
    """`Park` holds the key, `Skip` does not."""
    handler = lambda m, s: answer if m.body == "a1" else record(m, s)  # noqa: E731 - as short as its meaning
    consumer = bench.declare(handler, ordered="key")
    send(bench, "a1", "a2")
    bench.consume(consumer)
    consumer.retry_once(bench.connection, bench.source)
    assert states(bench)["a2"] == ("waiting" if isinstance(answer, Park) else "consumed")


def test_a_retry_settles_the_head_while_the_next_is_read(any_bench: Bench) -> None:
    """The head is settled after a consumer saw its key held and before it has written that the message waits."""
    ward = Ward("a1")
    consumer, other = any_bench.declare(ward, ordered="key"), any_bench.declare(ward, ordered="key")
    any_bench.app.declare_topic("t", 1)
    send(any_bench, "a1")
    any_bench.consume(consumer)
    any_bench.age_retries()
    ward.ill.clear()

    def meanwhile(message: Message, session: Session) -> None:
        record(message, session)
        with any_bench.another() as there:
            assert other.retry_once(*there).done == 1

    # One batch: its first message's handler has the retry run while the second one is known to wait.
    slow = any_bench.declare(meanwhile, ordered="key", batch=2)
    send(any_bench, "b1", "a2")
    any_bench.consume(slow)
    assert sorted(row.status for row in any_bench.inbox().values()) == ["consumed", "consumed", "waiting"]
    consumer.retry_once(any_bench.connection, any_bench.source)
    assert by_key(any_bench.ledger())["a"] == ["a1", "a2"]


def test_a_quarantine_comes_in_between(bench: Bench) -> None:
    """A message that is quarantined while it is about to wait is passed; the others of the batch lose nothing."""
    bench.app.declare_topic("t", 1)
    ward = Ward("a1")
    consumer = bench.declare(ward, ordered="key")
    send(bench, "a1")
    bench.consume(consumer)
    quarantined: list[Any] = []

    def meanwhile(message: Message, session: Session) -> None:
        record(message, session)
        if not quarantined:
            id_ = id_of(bench, "a2")
            quarantined.append(id_)
            with bench.consumer.begin() as own:
                own.exec_driver_sql(
                    "INSERT INTO outbox.consumer_message (consumer_group, message_id, topic, queue, position, status,"
                    f" attempts) VALUES ('g', '{id_}', 't', 0, 0, 'quarantined', 0)"
                )

    slow = bench.declare(meanwhile, ordered="key", batch=2)
    send(bench, "b1", "a2")
    bench.consume(slow)
    assert states(bench) == {"a1": "failed", "b1": "consumed", "a2": "quarantined"}
    assert bench.ledger() == ["b1"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_failure_passes_what_waits_before_it(bench: Bench, *, ends: bool) -> None:
    """In one batch a message waits and the next one fails (or ends the transaction): the first isn't lost."""
    bench.app.declare_topic("t", 1)

    def handler(message: Message, session: Session) -> None:
        if message.body == "b1" and ends:
            # Past the cursors, which refuse it.
            session.connection().connection.driver_connection.pgconn.exec_(b"COMMIT")  # type: ignore[union-attr]
        if message.body in {"a1", "b1"}:
            raise RuntimeError("ill")
        record(message, session)

    consumer = bench.declare(handler, ordered="key", batch=3)
    send(bench, "a1")
    bench.consume(consumer)
    send(bench, "a2", "b1", "a3")
    bench.consume(consumer)
    expected = {"a1": "failed", "a2": "waiting", "b1": "parked" if ends else "failed", "a3": "waiting"}
    assert states(bench) == expected
    assert bench.rows("SELECT turn FROM outbox.consumer_message WHERE order_key = 'a' ORDER BY message_id") == [1, 2, 3]


def test_a_group_that_is_not_ordered_by_key_any_more(bench: Bench) -> None:
    """What waits when the rule is changed follows by the same pass, one of each key at a time."""
    ward = Ward("a1")
    send(bench, "a1", "a2", "a3")
    bench.consume(bench.declare(ward, ordered="key"))
    ward.ill.clear()
    later = bench.declare(ward)
    for _ in range(3):
        bench.retry(later)
    assert bench.ledger() == ["a1", "a2", "a3"]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("state", ["failed", "parked"])
def test_a_held_key_is_read_again(any_bench: Bench, batch: int, state: str) -> None:
    """After a reset, what an earlier passage had holds back nothing: all of the key are handled again, in order."""
    any_bench.app.declare_topic("t", 1)
    ward = Ward("a2")
    options: dict[str, Any] = {"ordered": "key", "batch": batch, "retry_delays": () if state == "parked" else (60.0,)}
    consumer = any_bench.declare(ward, **options)
    send(any_bench, "a1", "a2", "b1", "a3")
    any_bench.consume(consumer)
    before = {"a1": "consumed", "a2": state, "b1": "consumed", "a3": "waiting"}
    assert states(any_bench) == before
    reset(any_bench)
    # What waits or has failed is not retried before the group comes to it.
    assert any_bench.retry(consumer) == Counts()
    assert states(any_bench) == before
    ward.ill = {"a1"}
    any_bench.consume(consumer)
    assert any_bench.ledger() == ["a1", "b1", "b1"]
    assert states(any_bench) == {"a1": state, "a2": "waiting", "b1": "consumed", "a3": "waiting"}
    ward.ill.clear()
    send(any_bench, "a4")
    any_bench.consume(consumer)
    if state == "parked":
        operator(any_bench).retry(id_of(any_bench, "a1"), group="g", by="me", why="fixed")
    any_bench.retry(consumer)
    assert any_bench.ledger()[3:] == ["a1", "a2", "a3", "a4"]
    assert set(states(any_bench).values()) == {"consumed"}
    assert any_bench.rows("SELECT count(*) FROM outbox.consumer_message WHERE order_key IS NOT NULL") == [0]
    # The evidence of the earlier passage: not of the message that only waited.
    assert any_bench.rows("SELECT status FROM outbox.reread_message ORDER BY message_id") == [
        "consumed",
        state,
        "consumed",
    ]


def test_a_held_key_is_skipped(bench: Bench) -> None:
    """A skip ahead moves the group only: what failed before holds its key as it did."""
    bench.app.declare_topic("t", 1)
    ward = Ward("a1")
    consumer = bench.declare(ward, ordered="key")
    send(bench, "a1", "a2")
    bench.consume(consumer)
    send(bench, "a3", "b1")
    operator(bench).skip_group("g", "t", "now", by="ada", why="test")
    send(bench, "a4", "b2")
    bench.consume(consumer)
    assert states(bench) == {"a1": "failed", "a2": "waiting", "a4": "waiting", "b2": "consumed"}
    ward.ill.clear()
    bench.retry(consumer)
    assert bench.ledger() == ["b2", "a1", "a2", "a4"]


def test_a_blocked_crasher_keeps_its_order_in_place(bench: Bench) -> None:
    """A message of an ordered queue that blocks isn't parked because it kills its worker: nothing goes past it."""
    consumer = bench.declare(ordered=True, on_exhausted="block")
    bench.send(1, 2)
    queue = bench.rows("SELECT queue FROM outbox.message LIMIT 1")[0]
    bench.run(
        "INSERT INTO outbox.consumer_offset (consumer_group, topic, queue, position, starts, written_at) "
        f"VALUES ('g', 't', {queue}, 0, {bench.settings.max_starts}, clock_timestamp() - interval '1 minute')"
    )
    bench.consume(consumer)
    assert bench.statuses() == [("failed", 1)]
    assert bench.ledger() == []
    bench.age_retries()
    bench.consume(consumer)
    assert bench.ledger() == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ordered": "keys"}, "ordered = 'keys' must be True, False or 'key'"),
        ({"ordered": True, "on_exhausted": "skip"}, "needs ordered='key'$"),
        ({"on_exhausted": "park_sequence"}, "needs ordered='key'$"),
        ({"ordered": "key", "on_exhausted": "drop"}, "must be one of: park, park_sequence, skip, block$"),
    ],
)
def test_rules_that_contradict_each_other(bench: Bench, options: dict[str, Any], message: str) -> None:
    """What can't work is refused where it is declared."""
    with pytest.raises(InvalidHandler, match=message):
        bench.declare(**options)
