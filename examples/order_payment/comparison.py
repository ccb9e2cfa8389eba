"""The reconciliation of the two services: what is compared, and what is left to an operator."""

from __future__ import annotations

from decimal import Decimal

from sqlalchemy import Engine, select, update

from outbox import Outbox
from outbox.database.tables import producer_tables
from outbox.reconcile.job import Access, Effect, EngineName, Job, Pair, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.rows import InboxState, JobResult, to_findings

from . import balance_service, order_service
from .accidents import INBOX
from .balance_service import GROUP, TOO_LOW, UserBalance
from .message import TOPIC, PaymentDue

_SCHEMA = order_service.outbox.settings.schema
_HALVES = producer_tables(_SCHEMA).tables[f"{_SCHEMA}.half_message"]

#: Every message of the topic is to have one row in the business table `payment`.
PAIR = Pair(TOPIC, GROUP, effect=Effect("payment", "message_id"))

#: What was ordered at an enterprise is what it was paid, plus what is on its way.
EARNINGS = Measure(
    name="earnings",
    topic=TOPIC,
    group=GROUP,
    by=("enterprise",),
    values=("orders", "amount"),
    producer="SELECT enterprise, count(*) AS orders, sum(price) AS amount FROM customer_order GROUP BY enterprise",
    consumer="SELECT enterprise, count(*) AS orders, sum(price) AS amount FROM payment GROUP BY enterprise",
    in_flight={"enterprise": "enterprise", "orders": "*", "amount": "price"},
)


def job(orders: Engine, balances: Engine, engine: EngineName, *, apply: bool = False) -> Job:
    """Return the comparison of the two databases; ``apply`` also mends what can be mended without a human.

    All work is done when it is run: no grace for what is on its way, and no trust in what was in sync before.
    """
    return Job(
        producer=_access(orders, order_service.outbox),
        consumer=_access(balances, balance_service.outbox),
        pairs=(PAIR,),
        window=Window(grace=0),
        engine=engine,
        measures=(EARNINGS,),
        apply=apply,
        keep_for=0,
        actor="order-payment example",
    )


def top_up(result: JobResult, orders: Engine, balances: Engine) -> Decimal:
    """Pay in what parked payments lack, and give them back to the consumer; return how much was paid in.

    Whose balance is too low is known to no machine's policy: this is the operator.
    """
    paid_in = Decimal()
    for pair in result.pairs:
        for finding in to_findings(pair.findings):
            if finding.status is not InboxState.PARKED:
                continue
            with balances.begin() as connection:
                reason = connection.scalar(select(INBOX.c.last_error).where(INBOX.c.message_id == finding.id)) or ""
                if not reason.startswith(TOO_LOW):
                    continue
                due = _body(orders, finding.id)
                more = {"amount": UserBalance.amount + due.price}
                connection.execute(update(UserBalance).where(UserBalance.user == due.user).values(more))
            Outbox(balances).operator.retry(finding.id, group=GROUP, by="operator", why="paid in by the user")
            paid_in += due.price
    return paid_in


def _body(orders: Engine, message_id: object) -> PaymentDue:
    with orders.connect() as connection:
        body = connection.execute(select(_HALVES.c.body).where(_HALVES.c.id == message_id)).scalar_one()
    return PaymentDue.model_validate_json(body)


def _access(engine: Engine, outbox: Outbox) -> Access:
    return Access(engine.url.render_as_string(hide_password=False), outbox.settings)
