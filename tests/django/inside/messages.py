"""Handlers that do to their transaction what handlers may do."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import IntegrityError, connection, transaction
from shop.models import CustomerPoints

from outbox import Message, Orphan, Park, Resolution
from outbox.django import checker, compensation, consumer, send


def points(customer: str) -> int | None:
    """Return a customer's points; None without a row."""
    found: int | None = CustomerPoints.objects.filter(customer=customer).values_list("points", flat=True).first()
    return found


def write(message: Message) -> None:
    """Have an effect that shows."""
    CustomerPoints.objects.create(customer=message.body["customer"], points=1)


def fail(message: Message) -> None:
    """Fail after the effect."""
    write(message)
    raise ValueError("no")


def park(message: Message) -> Park:
    """Ask to be parked after the effect."""
    write(message)
    return Park("so")


def undo_some(message: Message) -> None:
    """Roll back a part by a nested block, whose own hook is never called."""
    write(message)
    try:
        with transaction.atomic():
            CustomerPoints.objects.update(points=99)
            transaction.on_commit(lambda: CustomerPoints.objects.create(customer="never"))
            CustomerPoints.objects.create(customer=message.body["customer"])
    except IntegrityError:
        pass


def swallow(message: Message) -> None:
    """Go on after an error that has spoilt the transaction."""
    write(message)
    try:
        with transaction.atomic(savepoint=False):
            raise ValueError("caught outside")
    except ValueError:
        pass


def after(message: Message) -> None:
    """Do something after the COMMIT, in a transaction of its own; one such function fails, and the others go on."""
    write(message)
    customer = message.body["customer"]
    transaction.on_commit(partial(CustomerPoints.objects.create, customer=customer))
    transaction.on_commit(lambda: CustomerPoints.objects.filter(customer=customer).update(points=points(customer) or 0))
    transaction.on_commit(lambda: CustomerPoints.objects.create(customer=f"after {customer}"))


def answer(message: Message) -> None:
    """Send."""
    write(message)
    send("answer", {"do": "write", "customer": f"answered {message.body['customer']}"})


def close(message: Message) -> None:
    """Close the connection, as code does that was written for threads."""
    write(message)
    connection.close()


def end(message: Message) -> None:
    """End the transaction behind Django's back."""
    write(message)
    with connection.cursor() as cursor:
        cursor.execute("COMMIT")


def read(message: Message) -> None:
    """See the types and the time zone of Django's own connections, also through a cursor on the server."""
    write(message)
    assert connection.in_atomic_block
    with connection.cursor() as cursor:
        cursor.execute("SELECT now(), current_setting('TimeZone'), '{\"a\": 1}'::jsonb, ARRAY[1, 2]")
        now, zone, json, numbers = cursor.fetchone()
    assert now.utcoffset() == dt.timedelta(hours=9)
    assert (zone, json, numbers) == ("Asia/Tokyo", '{"a": 1}', [1, 2])
    assert [each.points for each in CustomerPoints.objects.iterator(chunk_size=1)]


DEEDS: dict[str, Callable[[Message], Any]] = {
    function.__name__: function for function in (write, fail, park, undo_some, swallow, after, answer, close, end, read)
}


@consumer("note", group="keeper")
def keep(message: Message) -> Any:
    """Do what the message says."""
    return DEEDS[message.body["do"]](message)


@consumer("answer", group="keeper")
def keep_answer(message: Message) -> None:
    """Keep an answer."""
    write(message)


@consumer("many", group="keeper", batch=10, takes_batch=True)
def keep_many(messages: list[Message]) -> None:
    """Keep several at once."""
    CustomerPoints.objects.bulk_create(CustomerPoints(customer=each.body["customer"]) for each in messages)


@consumer("mail", group="keeper", transactional=False)
def mail(message: Message) -> None:
    """Have an effect of its own, on a connection of its own thread."""
    assert not connection.in_atomic_block
    write(message)
    raise ValueError("the mail is out")


@checker("payment", immunity=0)
def was_paid(orphan: Orphan) -> Resolution:
    """Look into the shop's tables, and write there."""
    CustomerPoints.objects.create(customer=f"checked {orphan.body['customer']}")
    return Resolution.COMMIT


@compensation("note")
def take_back(message: Message) -> None:
    """Undo."""
    CustomerPoints.objects.filter(customer=message.body["customer"]).delete()
