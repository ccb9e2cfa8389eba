"""What waits for an earlier message of its key, as operators and producers see it."""

from __future__ import annotations

from uuid import UUID

import pytest

from outbox.acts.changes import MessageStatus
from outbox.database.execute import execute
from outbox.delivery import sql as delivery_sql
from outbox.errors import ActRefused
from outbox.message.model import Status
from outbox.operator.health.stats import stats
from outbox.operator.model import InboxFilter, MessageFate, MessageFilter, PageRequest
from tests.kit.bench import Bench, Ward

ALL = PageRequest(100)


@pytest.fixture
def waiting(bench: Bench) -> list[UUID]:
    """Return three messages of one key: the first has failed, the others wait."""

    consumer = bench.declare(Ward(1), ordered="key")
    ids = bench.send(1, 2, 3)
    bench.consume(consumer)
    return ids


def test_lists_show_for_which_one(bench: Bench, waiting: list[UUID]) -> None:
    """The inbox has a list of what waits, with the message that holds the key now; a message's page says so too."""
    first, second, third = waiting
    query = InboxFilter(status=(Status.WAITING,))
    rows = bench.sink.operator.inbox(query, ALL).items
    assert [(row.message_id, row.waits_for) for row in rows] == [(third, first), (second, first)]
    view = bench.sink.operator.message(third)
    assert "received" not in [event.kind for event in view.timeline]
    assert [(row.status, row.waits_for) for row in view.inbox] == [("waiting", first)]
    assert f"waits in group g for message {first}" in view.next


def test_counts_tell_how_many(bench: Bench, waiting: list[UUID]) -> None:
    """What waits is counted apart from what will be retried by itself."""
    (group,) = stats(bench.connection, bench.settings, ["producer", "consumer"]).groups
    assert (group.failed, group.waiting, group.parked) == (1, len(waiting) - 1, 0)


def test_a_group_has_yet_to_consume_it(bench: Bench, waiting: list[UUID]) -> None:
    """The list of what a group hasn't consumed has the message that failed and those that wait for it."""
    wanted = MessageFilter(group="g", status=(MessageFate.UNCONSUMED,))
    rows = bench.sink.operator.messages(wanted, ALL).items
    assert sorted(row.id for row in rows) == sorted(waiting)
    assert {row.status for row in rows} <= set(MessageStatus)


@pytest.mark.parametrize("act", ["retry", "park", "discard"])
def test_acts_are_refused_and_name_the_mend(bench: Bench, waiting: list[UUID], act: str) -> None:
    """An operator acts on the message that holds the key, and not on those that wait for it."""
    with pytest.raises(ActRefused, match=r"waits for an earlier message of its key.*that one"):
        getattr(bench.sink.operator, act)(waiting[2], group="g", by="me", why="test")


def test_a_producer_learns_that_it_will_be_tried(bench: Bench, waiting: list[UUID]) -> None:
    """To a producer that asks what became of it, what waits is what will be retried."""
    statement = delivery_sql.statuses("outbox", group="g", ids=waiting)
    with bench.connection.begin():
        (rows,) = execute(bench.connection, statement)
    assert {id_: status for id_, status, _ in rows} == dict.fromkeys(waiting, "failed")


def test_a_compensation_takes_it_out(bench: Bench, waiting: list[UUID]) -> None:
    """What is quarantined while it waits is passed, and what is quarantined at the head frees the key."""
    consumer = bench.declare(ordered="key")
    for id_ in waiting[:2]:
        bench.run(
            "UPDATE outbox.consumer_message SET status = 'quarantined', next_attempt_at = NULL WHERE message_id = :id",
            id=id_,
        )
    bench.retry(consumer, due=False)
    assert bench.ledger() == ["3"]
