"""A group whose database is another one than the producer's."""

from __future__ import annotations

from shop.models import CustomerPoints

from outbox import Message
from outbox.django import consumer


@consumer("order-created", group="points", using="other", source="default")
def add_points(message: Message) -> None:
    """Write the points where the inbox is."""
    CustomerPoints.objects.using("other").create(customer=message.body["customer"], points=message.body["total"])
