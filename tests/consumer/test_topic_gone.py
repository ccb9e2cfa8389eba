"""An operator deletes a topic that is gone; nothing that is needed goes with it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from outbox.errors import ActRefused, InvalidRequest, NotFound
from outbox.prune.prune_pass import prune_producer_once
from tests.consumer.test_reread import operator
from tests.kit.bench import Bench

WHO = {"by": "ada", "why": "nobody sends it"}


@pytest.fixture
def ended(any_bench: Bench) -> Bench:
    """A bench whose retention is over at once."""
    any_bench.settings = replace(any_bench.settings, retention=1e-6, undelivered_retention=0.0)
    return any_bench


def prune(bench: Bench) -> None:
    """Delete what prune deletes."""
    with bench.producer.connect() as connection:
        prune_producer_once(connection, bench.settings)


def left(bench: Bench) -> dict[str, int]:
    """Count the rows of the producer."""
    tables = ("topic", "message", "half_message", "op_message", "delivery_cursor", "topic_total")
    with bench.producer.begin() as connection:
        count = "SELECT count(*) FROM outbox.{}"
        return {each: connection.exec_driver_sql(count.format(each)).scalar_one() for each in tables}


def test_gone(ended: Bench) -> None:
    """First its groups, then prune; then it is in no table, no list, no statistics; and may come back."""
    acting = operator(ended)
    ids = ended.send(1, 2, 3)
    ended.resend(ids[2])
    ended.consume(ended.declare())
    with pytest.raises(ActRefused, match=r"delete its groups first \(outbox group delete\): g \("):
        acting.delete_topic("t", **WHO)
    acting.delete_group("g", "t", **WHO)
    with pytest.raises(ActRefused, match="prune has yet to delete messages of 1 queue"):
        acting.delete_topic("t", **WHO)
    prune(ended)
    preview = acting.preview_delete_topic("t")
    assert (preview.last_messages, preview.living, preview.groups, preview.workers) == (1, [], [], [])
    assert "with its 1 last message" in acting.delete_topic("t", **WHO)
    assert set(left(ended).values()) == {0}
    assert acting.overview().topics == []
    with pytest.raises(NotFound):
        acting.delete_topic("t", **WHO)
    ended.send(4)
    ended.consume(ended.declare())
    assert ended.ledger() == ["1", "2", "3", "4"]
    assert [topic.committed for topic in acting.overview().topics] == [1]


def test_comes_back_after_a_pause(ended: Bench) -> None:
    """Deleted while it was paused, it is paused no more; another one is."""
    topics = ended.app.operator
    for topic in ("t", "other"):
        ended.send(1, topic=topic)
        topics.pause_topic(topic, by="me", why="test")
    prune(ended)
    operator(ended).delete_topic("t", **WHO)
    assert [row.topic for row in topics.topic_pauses()] == ["other"]
    consumer = ended.declare()
    ended.send(2)
    ended.consume(consumer)
    assert ended.ledger() == ["2"]


def test_not_gone(ended: Bench) -> None:
    """What is undecided or scheduled speaks against it; nothing is changed."""
    acting = operator(ended)
    ended.send(1)
    ended.send(2, delay=3600)
    with ended.producer.begin() as connection:
        half_id: UUID = ended.app.prepare(connection, "t", 3)
    before = left(ended)
    with pytest.raises(ActRefused, match="a half message of it is undecided; a message of it is scheduled"):
        acting.delete_topic("t", **WHO)
    ended.app.rollback(half_id)
    with pytest.raises(ActRefused, match="isn't gone: a message of it is scheduled"):
        acting.delete_topic("t", **WHO)
    assert left(ended) == before | {"op_message": before["op_message"] + 1}
    with pytest.raises(InvalidRequest, match="give a reason"):
        acting.delete_topic("t", by="ada", why=" ")


def test_within_the_retention(bench: Bench) -> None:
    """A message that could be redelivered, or asked about, isn't deleted."""
    bench.send(1)
    with pytest.raises(ActRefused, match="prune has yet to delete messages of 1 queue"):
        operator(bench).delete_topic("t", **WHO)
