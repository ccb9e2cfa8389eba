"""Django: ``transaction.atomic`` carries the messages, ``migrate`` makes the tables, handlers use the ORM.

::

    INSTALLED_APPS = [..., "outbox.django"]

    from outbox.django import consumer, send

    with transaction.atomic():
        order = Order.objects.create(...)
        send("order-created", {"id": order.id}, key=order.customer)

    @consumer("order-created", group="points")
    def add_points(message):
        Points.objects.create(order_id=message.body["id"])

Everything takes ``using``, as Django's own functions do: the alias of a database in ``DATABASES``. Handlers, checkers
and compensations are found in the module ``messages`` of each application.
"""

from outbox.django.databases import outbox as outbox
from outbox.django.databases import outboxes as outboxes
from outbox.django.handlers import checker as checker
from outbox.django.handlers import compensation as compensation
from outbox.django.handlers import consumer as consumer
from outbox.django.sending import commit as commit
from outbox.django.sending import prepare as prepare
from outbox.django.sending import rollback as rollback
from outbox.django.sending import send as send
from outbox.django.sending import transactional as transactional
