"""The reconciliation of the two services, declared: what the users paid is what the enterprises have."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import Outbox
from outbox.reconcile.job import Access, Effect, EngineName, Job, Pair, Window
from outbox.reconcile.measure import Measure

from . import account_service, order_service
from .account_service import RETURNED
from .message import CARD, GROUP, TOPIC

#: Every message of the topic that the group takes is to have one row in the business table `credit`.
PAIR = Pair(TOPIC, GROUP, tags=[CARD], effect=Effect("credit", "message_id"))

#: What was paid for orders at an enterprise, and not returned, is what it was credited, plus what is on its way.
EARNINGS = Measure(
    name="earnings",
    topic=TOPIC,
    group=GROUP,
    by=("enterprise",),
    values=("orders", "amount"),
    producer="SELECT enterprise, count(*) AS orders, sum(price) AS amount FROM payment "
    f"WHERE state <> '{RETURNED}' GROUP BY enterprise",
    consumer="SELECT enterprise, count(*) AS orders, sum(price) AS amount FROM credit GROUP BY enterprise",
    in_flight={"enterprise": "enterprise", "orders": "*", "amount": "price"},
)


def job(accounts: Engine, orders: Engine, engine: EngineName) -> Job:
    """Return the comparison of the two databases.

    All work is done when it is run: no grace for what is on its way, and no trust in what was in sync before.
    """
    return Job(
        producer=_access(accounts, account_service.outbox),
        consumer=_access(orders, order_service.outbox),
        pairs=(PAIR,),
        window=Window(grace=0),
        engine=engine,
        measures=(EARNINGS,),
        keep_for=0,
        actor="order-payment example",
    )


def _access(engine: Engine, outbox: Outbox) -> Access:
    return Access(engine.url.render_as_string(hide_password=False), outbox.settings)
