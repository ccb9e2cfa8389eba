"""Dedupe: what a message that is to be sent once costs its transaction, and what operators' indexes cost a send."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from benchmarks import bank
from benchmarks.lab import Benchmark, Lab
from benchmarks.measure import Arm, Figure, compared, interleave, rate
from outbox import Outbox, Settings

#: The share of its rate that a transaction with a send may lose by an index that every database has.
_BAR = 0.95
#: Databases that lack an index which every other one has for operators.
_WITHOUT = {"keyless": "ix_half_message_key", "topicless": "ix_half_message_topic"}


def run(lab: Lab) -> list[Figure]:
    """Measure transactions with one message: sent, sent once, sent for the second time; and without an index."""
    count, rounds = lab.scale(20, 10), lab.scale(120, 4)
    for name, index in {"main": None, **_WITHOUT}.items():
        engine = lab.engine(name)
        bank.open_bank(engine)
        if index is not None:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"DROP INDEX outbox.{index}")
    numbers = itertools.count()
    options: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "sent": ("main", dict),
        "once": ("main", lambda: {"dedupe": f"order-{next(numbers)}"}),
        "second": ("main", lambda: {"dedupe": "order"}),
        **{name: (name, dict) for name in _WITHOUT},
    }
    arms: dict[str, Arm] = {}
    for name, (database, of_send) in options.items():
        engine = lab.engine(database)
        outbox = Outbox(engine, settings=Settings())
        arms[name] = partial(rate, count, partial(_transactions, engine, outbox, of_send, count))
    lab.say("dedupe")
    results = interleave(arms, rounds)
    return [
        compared("transaction with 1 sent once", "", results["once"], "with 1 sent", results["sent"], None),
        compared("the same, sent before", "", results["second"], "with 1 sent", results["sent"], None),
        compared("transaction with 1 sent", "", results["sent"], "no index on keys", results["keyless"], _BAR),
        compared("the same", "", results["sent"], "no index on topics", results["topicless"], _BAR),
    ]


def _transactions(engine: Engine, outbox: Outbox, of_send: Callable[[], dict[str, Any]], count: int) -> None:
    for _ in range(count):
        with Session(engine) as session, session.begin():
            order = bank.new_order()
            session.execute(bank.MOVE, {"account_id": order["sender"], "moved": -order["amount"]})
            session.execute(bank.NOTE, {"account_id": order["sender"], "amount": -order["amount"]})
            outbox.send(session, bank.TOPIC, order, key=order["receiver"], **of_send())


BENCHMARK = Benchmark(run, ("main", *_WITHOUT))
