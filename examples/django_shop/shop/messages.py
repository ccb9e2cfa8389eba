"""Handle the shop's messages; a worker (``manage.py outbox_run``) finds this module by its name."""

from __future__ import annotations

from django.db.models import F

from outbox import Message
from outbox.django import consumer

from .models import CustomerPoints


@consumer("order-created", group="points")
def add_points(message: Message) -> None:
    """Add a point for each euro, in the transaction that says that it was done."""
    customer, total = message.body["customer"], message.body["total"]
    CustomerPoints.objects.get_or_create(customer=customer)
    CustomerPoints.objects.filter(customer=customer).update(points=F("points") + total)
