"""``transaction.atomic`` as the carrier: the message is there if and only if the business row is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import django.db
import psycopg
import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction
from shop.models import PlacedOrder

from outbox.django import commit, outbox, prepare, rollback, send, transactional
from outbox.errors import AlreadyCommitted, InvalidHandler, InvalidMessage, InvalidSettings, TransactionRequired
from outbox.message.model import Outgoing
from outbox.producer import process

pytestmark = pytest.mark.django_db(transaction=True)


def halves(topic: str = "t") -> list[tuple[str, str | None]]:
    """Return the keys of a topic's halves in the order of their ops, with the decisions."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT key, resolution FROM outbox.half_message half LEFT JOIN outbox.op_message ON half_id = half.id "
            "WHERE topic = %s ORDER BY sequence",
            [topic],
        )
        return list(cursor.fetchall())


@pytest.fixture(autouse=True)
def _emptied() -> None:
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox.half_message, outbox.op_message, outbox.half_check")


def order(key: str) -> UUID:
    """Write an order, and send a message of it."""
    PlacedOrder.objects.create(customer=key, total=1)
    return send("t", {"a": 1}, key=key, headers={"who": "me"}, tag="red")


def keys() -> list[str]:
    """Return the customers of the orders, which must be the keys of the committed halves."""
    found = [str(key) for key, resolution in halves() if resolution == "commit"]
    assert sorted(found) == sorted(PlacedOrder.objects.values_list("customer", flat=True))
    return found


def test_a_process_that_sends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report waits for Django's COMMIT, and goes by a connection of its own."""
    monkeypatch.setattr(process, "REPORT_EVERY", 0.0)
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox.producer_process")
    monkeypatch.setattr(outbox()._producer, "_report", process.ProcessReport("outbox", "shop"))

    def reported() -> int:
        for thread in threading.enumerate():
            if thread.name == process.THREAD:
                thread.join()
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM outbox.producer_process WHERE producer_group = 'shop'")
            return int(cursor.fetchone()[0])

    with pytest.raises(ZeroDivisionError), transaction.atomic():
        order("undone")
        raise ZeroDivisionError
    assert reported() == 0
    with transaction.atomic():
        order("kept")
        assert reported() == 0
    assert reported() == 1


def test_both_commit_or_neither_does() -> None:
    with transaction.atomic():
        assert isinstance(order("kept"), UUID)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        order("undone")
        raise ZeroDivisionError
    assert keys() == ["kept"]


def test_a_savepoint_takes_its_messages_along() -> None:
    with transaction.atomic():
        order("before")
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            order("inside")
            with transaction.atomic():
                order("deeper")
            raise ZeroDivisionError
        with transaction.atomic():
            order("after")
    assert keys() == ["before", "after"]


def test_a_commit_that_fails_takes_the_message_along() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "ALTER TABLE shop_placedorder ADD CONSTRAINT once UNIQUE (customer) DEFERRABLE INITIALLY DEFERRED"
        )
    try:
        with pytest.raises(django.db.IntegrityError), transaction.atomic():
            order("twice")
            order("twice")
        assert keys() == []
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE shop_placedorder DROP CONSTRAINT once")


def _end(driver: Any) -> None:
    """Have the server end a connection."""
    with psycopg.connect(outbox().url.set(drivername="postgresql").render_as_string(hide_password=False)) as other:
        pid = driver.info.backend_pid
        other.execute("SELECT pg_terminate_backend(%s, 60000)", [pid])


def test_a_connection_that_is_lost_at_the_commit_takes_both_along() -> None:
    with pytest.raises(django.db.OperationalError), transaction.atomic():
        order("lost")
        _end(connection.connection)
    connection.close()
    assert keys() == []


def test_autocommit_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(TransactionRequired, match=r"transaction\.atomic\(\)"):
        send("t", {})
    with transaction.atomic():
        order("one")
    with pytest.raises(TransactionRequired):
        prepare("t", {})
    assert keys() == ["one"]


def test_a_transaction_of_your_own_will_do() -> None:
    transaction.set_autocommit(False)
    try:
        order("kept")
        transaction.commit()
        order("undone")
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert keys() == ["kept"]


def test_nothing_is_sent_in_a_transaction_that_will_be_rolled_back() -> None:
    with pytest.raises(transaction.TransactionManagementError), transaction.atomic():
        transaction.set_rollback(True)
        send("t", {})
    assert halves() == []


def test_an_event_loop_is_refused_as_django_refuses_it() -> None:
    async def view() -> None:
        send("t", {})

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(view())


def test_bad_input_is_refused_before_anything_is_written() -> None:
    with transaction.atomic():
        cases: list[tuple[str, Any, str | None]]
        cases = [("no topic!", {}, None), ("t", {}, "k" * 300), ("t", {1: object()}, None)]
        for topic, body, key in cases:
            with pytest.raises(InvalidMessage):
                send(topic, body, key=key)
        PlacedOrder.objects.count()
    with pytest.raises(InvalidSettings, match=r"OUTBOX\.DATABASES"):
        outbox("other")
    assert halves() == []


def test_an_error_of_the_server_is_djangos() -> None:
    with transaction.atomic():
        half_id = order("once")
    with pytest.raises(django.db.IntegrityError), transaction.atomic():
        PlacedOrder.objects.create(customer="again", total=1)
        send("t", {}, id=half_id)
    assert keys() == ["once"]


@pytest.mark.parametrize(("decide", "resolution"), [(commit, "commit"), (rollback, "rollback")])
def test_a_half_is_decided_with_the_transaction(decide: Callable[[UUID], None], resolution: str) -> None:
    with transaction.atomic():
        half_id = prepare("t", {}, key="k")
    assert halves() == [("k", None)]
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        decide(half_id)
        raise ZeroDivisionError
    assert halves() == [("k", None)]
    with transaction.atomic():
        decide(half_id)
    assert halves() == [("k", resolution)]


def test_a_second_decision_fails_with_its_transaction() -> None:
    with transaction.atomic():
        half_id = prepare("t", {})
        commit(half_id)
    with pytest.raises(AlreadyCommitted), transaction.atomic():
        PlacedOrder.objects.create(customer="twice", total=1)
        commit(half_id)
    assert not PlacedOrder.objects.exists()


def test_a_decorated_function_sends_what_it_returns() -> None:
    @transactional(topic="t", key=lambda body: body["name"], message=lambda placed: {"name": placed.customer})
    def place(name: str) -> PlacedOrder:
        """Place."""
        placed = PlacedOrder.objects.create(customer=name, total=1)
        if name == "bad":
            raise ZeroDivisionError
        return placed

    assert place("a").customer == "a"
    with pytest.raises(ZeroDivisionError):
        place("bad")
    with transaction.atomic():
        place("b")
        with pytest.raises(ZeroDivisionError):
            place("bad")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        place("c")
        raise ZeroDivisionError
    assert keys() == ["a", "b"]
    assert (place.__name__, place.__doc__) == ("place", "Place.")


def test_a_decorated_function_may_say_more_or_nothing() -> None:
    @transactional(topic="t")
    def place(outgoing: Outgoing | None) -> Outgoing | None:
        return outgoing

    assert place(None) is None
    body: object = place(Outgoing({"x": 1}, key="own"))
    assert body == {"x": 1}
    assert halves() == [("own", "commit")]
    with pytest.raises(InvalidHandler, match="async"):

        @transactional(topic="t")
        async def never() -> None: ...
