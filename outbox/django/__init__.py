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
from outbox.django.functions import checker as checker
from outbox.django.functions import commit as commit
from outbox.django.functions import compensation as compensation
from outbox.django.functions import consumer as consumer
from outbox.django.functions import prepare as prepare
from outbox.django.functions import rollback as rollback
from outbox.django.functions import send as send
from outbox.django.functions import transactional as transactional
