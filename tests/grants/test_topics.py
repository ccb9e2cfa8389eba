"""A consumer that may see one topic: what it reads, what it doesn't, and that nothing changes for anybody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from outbox.consumer.sql import messages_after
from outbox.consumer.subscription import EVERYTHING
from outbox.database.execute import Statement, execute
from outbox.database.sql import plan_by_index
from outbox.errors import InvalidMessage
from outbox.operator.health.grants import policy_of
from tests.grants.town import Town, bulk, consume, look, release, send

SEEN = text("SELECT topic FROM outbox.message UNION SELECT topic FROM outbox.half_message")


@pytest.fixture
def mailer(town: Town) -> Iterator[str]:
    """A role that consumes the topic `t`, and may see no other."""
    town.dispatched(3)
    town.dispatched(3, topic="secret")
    with town.acting_as("consumer", topics=["t"]) as name:
        yield name


@pytest.mark.usefixtures("mailer")
def test_it_sees_its_topic_alone(town: Town) -> None:
    """Messages and bodies of other topics aren't there for it; its own are consumed as before."""
    with town.at["producer"].connect() as connection:
        assert list(connection.scalars(SEEN)) == ["t"]
    consume(town)


def test_it_may_not_change_that(town: Town, mailer: str) -> None:
    """It can't see more by turning row security off, nor drop the policy."""
    drop = f"DROP POLICY {policy_of(mailer)} ON outbox.message"
    for attempt in ("SET row_security = off; SELECT FROM outbox.message", drop):
        with town.at["producer"].connect() as connection, pytest.raises(DBAPIError, match=r"row-level|owner"):
            connection.exec_driver_sql(attempt)


@pytest.mark.usefixtures("mailer")
@pytest.mark.parametrize(
    ("role", "act"), [("producer", send), ("worker", release), ("viewer", look), ("operator", bulk("producer"))]
)
def test_nothing_changes_for_others(town: Town, role: str, act: Callable[[Town], None]) -> None:
    """Who isn't kept to topics sends, dispatches and sees as before, though row security is on."""
    with town.acting_as(role):
        act(town)
        if role == "viewer":
            with town.at["producer"].connect() as connection:
                assert set(connection.scalars(SEEN)) == {"t", "secret"}


@pytest.mark.usefixtures("mailer")
def test_messages_are_still_found_by_index(town: Town) -> None:
    """The policy's condition leaks nothing, so that it is no barrier to the planner."""
    values = {"topic": "t", "queue": 0, "position": 0, "grown": 0, "limit": 500, "bytes": 1_000_000}
    read = messages_after("outbox", **values, **EVERYTHING)
    with town.at["producer"].begin() as connection:
        _, lines = execute(connection, plan_by_index(), Statement("EXPLAIN " + read.sql, read.values))
    plan = "\n".join(line for (line,) in lines)
    assert "Seq Scan" not in plan
    assert "topic = 't'" in plan


def test_names(town: Town) -> None:
    """Policies are per role, also where the names are long or odd; a topic that isn't one is refused."""
    first, second = (policy_of("r" * 60 + end) for end in "ab")
    assert first != second
    assert len(first) <= 63
    assert policy_of('a "b"') == '"topics_of_a ""b"""'
    with pytest.raises(InvalidMessage), town.acting_as("consumer", topics=["it's"]):
        pass
