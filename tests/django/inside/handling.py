"""Handlers that use the ORM in the worker's transaction: the effect is there if and only if the inbox says so."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction
from shop.models import CustomerPoints

from outbox import Message, testing
from outbox.django import consumer, outbox, prepare, send
from outbox.errors import InvalidHandler
from tests.django.inside.messages import points

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _emptied() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM outbox.consumer_message")


def handled(do: str) -> list[tuple[str, str | None]]:
    """Send a note, have it handled, and return what the inbox says."""
    with transaction.atomic():
        send("note", {"do": do, "customer": "a"}, key="k")
    testing.drain(outbox())
    with connection.cursor() as cursor:
        cursor.execute("SELECT status, last_error FROM outbox.consumer_message ORDER BY topic DESC")
        return list(cursor.fetchall())


@pytest.mark.parametrize("do", ["write", "read", "undo_some"])
def test_the_effect_commits_with_the_inbox_row(do: str) -> None:
    assert handled(do) == [("consumed", None)]
    assert points("a") == 1
    assert CustomerPoints.objects.count() == 1


@pytest.mark.parametrize(
    ("do", "status", "why"),
    [
        ("fail", "failed", "ValueError: no"),
        ("park", "parked", "so"),
        ("swallow", "failed", "spoilt the transaction"),
        ("close", "failed", "can't close it"),
    ],
)
def test_the_effect_of_a_failure_is_undone(do: str, status: str, why: str) -> None:
    ((found, error),) = handled(do)
    assert found == status
    assert why in str(error)
    assert points("a") is None


def test_a_commit_behind_djangos_back_is_refused() -> None:
    ((status, error),) = handled("end")
    assert status == "failed"
    assert "the transaction is the worker's" in str(error)
    assert points("a") is None


def test_hooks_are_called_after_the_commit_on_the_usual_connection() -> None:
    assert handled("after") == [("consumed", None)]
    assert points("after a") == 0
    assert connection.get_autocommit()


def test_a_handler_sends() -> None:
    assert handled("answer") == [("consumed", None), ("consumed", None)]
    assert points("answered a") == 1


def test_a_handler_that_fails_sends_nothing() -> None:
    handled("fail")
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM outbox.half_message WHERE topic = 'answer' AND born_at > now()")
        assert cursor.fetchone() == (0,)


def test_a_batch_is_one_transaction() -> None:
    with transaction.atomic():
        for number in range(5):
            send("many", {"customer": f"c{number}"}, key="same")
    testing.drain(outbox())
    assert CustomerPoints.objects.count() == 5


def test_outside_of_transactions_an_effect_stays() -> None:
    with transaction.atomic():
        send("mail", {"customer": "a"}, key="k")
    assert testing.drain(outbox()).failed == 1
    assert points("a") == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'")
        assert cursor.fetchone()[0] <= 2


def test_a_checker_uses_the_orm_in_the_transaction_of_its_verdict() -> None:
    with transaction.atomic():
        prepare("payment", {"customer": "a"})
    assert testing.check(outbox()).done == 1
    assert points("checked a") == 0


def test_a_compensation_uses_the_orm_in_its_transaction() -> None:
    handled("fail")
    CustomerPoints.objects.create(customer="a", points=5)
    with connection.cursor() as cursor:
        cursor.execute("SELECT message_id FROM outbox.consumer_message")
        (message_id,) = cursor.fetchone()
    outbox().operator.compensate(message_id, by="ada", why="no such customer")
    assert testing.bulk(outbox()).done == 1
    assert points("a") is None
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM outbox.compensation WHERE half_id = %s", [message_id])
        assert cursor.fetchone() == (1,)


def test_pipelines_are_refused() -> None:
    """The ORM reads the answer of each statement; nothing is registered."""
    with pytest.raises(InvalidHandler, match="group 'hasty': pipeline=True isn't for the ORM"):

        @consumer("note", group="hasty", pipeline=True)
        def never(_: Message) -> None: ...

    assert ("note", "hasty") not in outbox().subscriptions


def test_async_handlers_are_refused() -> None:
    with pytest.raises(InvalidHandler, match="async"):

        @consumer("note", group="late")
        async def never(_: Message) -> Any: ...
