"""The books of both banks, compared: which messages, which business table, and which sums must agree.

Where a broker is between the banks, bank B's group reads a topic of its own database, and not bank A's: for the
framework that is another topic, whose messages have the same ids. So bank B's side is given as a query, as that of a
consumer without an outbox would be; then ids, bodies and effects are compared, and no sums.
"""

from __future__ import annotations

from importlib.util import find_spec

from outbox.errors import pip_install
from outbox.reconcile.job import Access, Effect, EngineName, Job, Pair, Window
from outbox.reconcile.measure import Measure
from outbox.reconcile.tables import ForeignTable

from . import bank_a, bank_b
from .banks import Banks
from .message import GROUP, OUTCOMES, TOPIC
from .options import DemoOptions, Mode

#: How many ranges of ids are compared at once.
WORKERS = 2

#: Every message of the topic is to have one row in bank B's ledger.
PAIR = Pair(TOPIC, GROUP, effect=Effect("ledger_entry", "message_id"))

_BODY = {"receiver": "receiver", "transfers": "*", "amount": "amount"}
_CREDITED = "SELECT account_id AS receiver, count(*) AS transfers, sum(amount) AS amount FROM ledger_entry GROUP BY 1"
_PROMISED = f"""
SELECT body ->> 'receiver' AS receiver, count(*) AS transfers, sum((body ->> 'amount')::numeric) AS amount
  FROM (SELECT convert_from(h.body, 'UTF8')::jsonb AS body, coalesce(o.resolution, 'none') AS resolution
          FROM {bank_a.outbox.settings.schema}.half_message h
          LEFT JOIN {bank_a.outbox.settings.schema}.op_message o ON o.half_id = h.id
         WHERE h.topic = '{TOPIC}'
           AND NOT EXISTS (SELECT FROM {bank_a.outbox.settings.schema}.compensation c WHERE c.half_id = h.id)) h
"""

#: The sum that bank A debited, and did not refund, equals the one that bank B credited plus the transfers on their way.
DEBITED = Measure(
    name="debited",
    topic=TOPIC,
    group=GROUP,
    by=("receiver",),
    values=("transfers", "amount"),
    producer="SELECT t.receiver, count(*) AS transfers, -sum(l.amount) AS amount "
    "FROM ledger_entry l JOIN transfer t ON t.id = l.transfer_id "
    "WHERE NOT EXISTS (SELECT FROM ledger_entry r WHERE r.refund_of = t.id) GROUP BY 1",
    consumer=_CREDITED,
    in_flight=_BODY,
)

#: What was promised by half messages, and not taken back, is what was credited, is on its way, or was rolled back.
PROMISED = Measure(
    name="promised",
    topic=TOPIC,
    group=GROUP,
    by=("receiver",),
    values=("transfers", "amount"),
    producer=f"{_PROMISED} GROUP BY 1",
    rolled_back=f"{_PROMISED} WHERE resolution = 'rollback' GROUP BY 1",
    consumer=_CREDITED,
    in_flight=_BODY,
)


#: What bank B has made of the messages that it took in: each had one effect, a credit or the answer that there is none.
TAKEN_IN = ForeignTable(
    query=f"""
SELECT c.message_id, c.status, c.attempts, c.received_at, c.changed_at, c.body_digest,
       (SELECT count(*) FROM ledger_entry e WHERE e.message_id = c.message_id) + coalesce(r.refusals, 0) AS effects
  FROM {bank_b.outbox.settings.schema}.consumer_message c
  LEFT JOIN (SELECT (headers ->> 'outbox-cause')::uuid AS id, count(*) AS refusals
               FROM {bank_b.outbox.settings.schema}.half_message
              WHERE topic = '{OUTCOMES}' AND convert_from(body, 'UTF8')::json ->> 'objection' IS NOT NULL
              GROUP BY 1) r ON r.id = c.message_id
 WHERE c.consumer_group = '{GROUP}' AND c.topic = '{TOPIC}'
""",
    columns={
        "id": "message_id",
        "status": "status",
        "attempts": "attempts",
        "received_at": "received_at",
        "changed_at": "changed_at",
        "digest": "body_digest",
        "effects": "effects",
    },
)


def job(banks: Banks, options: DemoOptions, *, apply: bool = False) -> Job:
    """Return the comparison of the two banks; ``apply`` also mends what can be mended without a human.

    The day's work is done when it runs: there is no grace for open transfers. Nothing is taken on trust that was in
    sync before, since a demo is to show that it is.
    """
    urls = banks.environment
    if options.via:
        return Job(
            producer=Access(urls["BANK_A_URL"], bank_a.outbox.settings),
            consumer=Access(urls["BANK_B_URL"], bank_b.outbox.settings),
            pairs=(Pair(TOPIC, GROUP),),
            window=Window(grace=0),
            engine=engine_of(options),
            consumer_table=TAKEN_IN,
            record=False,
            workers=WORKERS,
            actor="demo",
        )
    return Job(
        producer=Access(urls["BANK_A_URL"], bank_a.outbox.settings),
        consumer=Access(urls["BANK_B_URL"], bank_b.outbox.settings),
        pairs=(PAIR,),
        window=Window(grace=0),
        engine=engine_of(options),
        measures=(DEBITED,) if options.mode is Mode.SEND else (DEBITED, PROMISED),
        apply=apply,
        keep_for=0,
        workers=WORKERS,
        actor="demo",
    )


def engine_of(options: DemoOptions) -> EngineName:
    """Return what compares: Spark if it is installed, unless the options say otherwise."""
    if options.engine is not EngineName.AUTO:
        return options.engine
    return EngineName.SPARK if find_spec("pyspark") else EngineName.LOCAL


def engine_in_words(options: DemoOptions) -> str:
    """Return what compares, for the screen; without Spark, how to have it do so."""
    if engine_of(options) is EngineName.SPARK:
        return "Spark"
    return "this process" if find_spec("pyspark") else f"this process; for Spark: {pip_install('demo-spark')}"
