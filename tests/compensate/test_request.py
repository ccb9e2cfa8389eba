"""Ordering a compensation: what is written, what is refused, and why; and declaring a compensation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from outbox import Outbox
from outbox.errors import ActRefused, CompensationRefused, InvalidHandler, InvalidMessage, InvalidRequest, NotFound
from tests.compensate.support import Town, give_back


def test_what_is_written(village: Town) -> None:
    """An order is a bulk job of one item, with who and why, and is recorded."""
    half_id = village.transfer()
    bulk_job_id = village.order(half_id, acknowledge_delivered=True)
    assert village.at_a.rows(
        "SELECT id, action, requested_by, reason, options, selector, total, started_at, origin FROM outbox.bulk_job"
    ) == [
        (
            bulk_job_id,
            "compensate",
            "ada",
            "no such account",
            {"acknowledge_delivered": True},
            {"targets": [[str(half_id), None]], "described": "compensate 1 dispatched message of topic t"},
            1,
            None,
            None,
        )
    ]
    assert village.at_a.rows(
        "SELECT bulk_job_id, number, action, message_id, topic, consumer_group, state, attempts FROM outbox.bulk_item"
    ) == [(bulk_job_id, 1, "compensate", half_id, "t", None, "pending", 0)]
    assert village.at_a.rows("SELECT actor, action, target, reason FROM outbox.audit") == [
        ("ada", "bulk", str(bulk_job_id), "no such account")
    ]


def test_several_at_once(village: Town) -> None:
    """Many are ordered as one bulk job, of each message once; while it waits, none can be ordered again."""
    ids = [village.transfer() for _ in range(3)]
    bulk_job = village.app.operator.compensate([*ids, ids[0]], by="ada", why="x")
    with pytest.raises(ActRefused, match="3: its local transaction is being compensated"):
        village.app.operator.compensate(ids, by="ada", why="x")
    assert village.at_a.rows("SELECT bulk_job_id, number FROM outbox.bulk_item ORDER BY number") == [
        (bulk_job.id, number) for number in (1, 2, 3)
    ]
    assert village.work().done == 3
    assert village.balance == 1000


def undecided(town: Town) -> UUID:
    """Return a half that nobody has decided."""
    with town.producer.begin() as connection:
        return town.app.prepare(connection, "t", {"amount": 1})


def rolled_back(town: Town) -> UUID:
    """Return a half that was rolled back."""
    half_id = undecided(town)
    town.app.rollback(half_id)
    return half_id


def compensated(town: Town) -> UUID:
    """Return a message that was compensated."""
    half_id = town.transfer()
    assert town.roll_back(half_id) == "done"
    return half_id


def ordered(town: Town) -> UUID:
    """Return a message that is about to be rolled back."""
    half_id = town.transfer()
    town.order(half_id)
    return half_id


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (undecided, "it is not decided yet; roll the half back instead"),
        (rolled_back, "it was rolled back and never sent; there is nothing to undo"),
        (compensated, "its local transaction was compensated; a compensation runs once ever"),
        (ordered, "its local transaction is being compensated; wait for that bulk job, or cancel it"),
    ],
    ids=["undecided", "rolled back", "compensated", "ordered"],
)
def test_refused(village: Town, make: Callable[[Town], UUID], why: str) -> None:
    """What can't be compensated is refused with the reason, and nothing is written."""
    half_id = make(village)
    before = village.at_a.rows("SELECT count(*) FROM outbox.bulk_job")
    with pytest.raises(CompensationRefused) as refused:
        village.order(half_id)
    assert str(refused.value).startswith(f"message {half_id} can't be compensated: ")
    assert why in str(refused.value)
    assert village.at_a.rows("SELECT count(*) FROM outbox.bulk_job") == before


def test_unknown(village: Town) -> None:
    """A message that no database knows isn't found."""
    with pytest.raises(NotFound):
        village.order(UUID(int=1))


def test_decided_after_the_order(village: Town) -> None:
    """What the order overlooked is refused when it is carried out."""
    half_id = rolled_back(village)
    bulk_job_id = village.order(village.transfer())
    village.at_a.run("UPDATE outbox.bulk_item SET message_id = :id", id=half_id)
    assert village.work().taken == 1
    assert village.item(bulk_job_id) == (
        "skipped",
        "refused: its local transaction was rolled back (by the producer): there is nothing to undo",
    )


@pytest.mark.parametrize("reason", ["", "  "])
def test_reason_is_needed(village: Town, reason: str) -> None:
    """Nobody rolls a local transaction back without a reason."""
    with pytest.raises(InvalidRequest, match="give a reason"):
        village.app.operator.compensate(village.transfer(), by="ada", why=reason)


# --- declarations ----------------------------------------------------------------------------------------


def test_second_compensation_is_refused(village: Town) -> None:
    """A topic has one compensation."""
    app = Outbox(village.producer)
    assert app.compensation("t")(give_back) is give_back
    with pytest.raises(InvalidHandler, match=r"compensation of .* is declared already: .*give_back"):
        app.compensation("t")(lambda message, session: None)


@pytest.mark.parametrize(
    ("function", "options", "error", "match"),
    [
        (lambda message: None, {}, InvalidHandler, "must take \\(message, session\\)"),
        ("text", {}, InvalidHandler, "'text' is not callable"),
        (give_back, {"consumers": "postgresql://host/db"}, InvalidHandler, "collection of databases; write"),
        (give_back, {"consumers": ["ada:secret@host"]}, InvalidHandler, "number 1 of consumers can't be read"),
        (give_back, {"consumers": [3]}, InvalidHandler, "must be an engine, an async engine or a URL, not int"),
        (give_back, {"topic": "no topic!"}, InvalidMessage, "topic"),
    ],
)
def test_declaration_that_cannot_work(
    village: Town, function: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    """It is refused when it is made, without giving a password away."""
    given = dict(options)
    with pytest.raises(error, match=match) as refused:
        village.app.compensation(given.pop("topic", "t"), **given)(function)
    assert "secret" not in str(refused.value)


def test_consumers_of_every_kind(town: Town) -> None:
    """A consumer is an engine, an async engine or a URL; one that is named twice, or is the producer, is asked once."""
    url = town.consumer.url.render_as_string(hide_password=False)
    consumers = [town.producer, town.consumer, create_async_engine(town.consumer.url), url]
    compensation = town.compensate_by(give_back, *consumers)
    assert "postgres" not in repr(compensation)
    half_id = town.parked()
    assert town.roll_back(half_id) == "done"
    assert [act[1] for act in town.acts(half_id)] == ["quarantine", "compensate"]
