"""Compensate parked messages without an operator: by the same order as an operator's, and by the same worker.

A message that a known group has parked, and that has stayed so for as long as its compensation says, gets a bulk job
of its topic's. What happens then is what happens to any such order: the message is quarantined in every inbox first,
and not compensated where it took effect. Once ever: a message whose compensation was ordered before, by policy or
operator, isn't ordered by itself again, whatever became of it.

`Settings.compensate_parked` is the switch, and so many are ordered in an hour at most: a consumer that parks all that
it gets (a bad release) must not undo a day's business while all operators sleep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.acts.changes import Actor
from outbox.compensate.compensation import Compensation
from outbox.database.execute import execute
from outbox.database.sql import plan_by_index
from outbox.delivery import sql
from outbox.errors import ActRefused, SelectorChanged
from outbox.operator.databases import Database, Databases
from outbox.operator.model import MAX_IDS
from outbox.operator.operator import Operator
from outbox.settings import Settings
from outbox.telemetry.events import CompensationsHeld
from outbox.telemetry.hooks import emit

if TYPE_CHECKING:
    from sqlalchemy import Connection

#: The actor that orders, in the audit.
ACTOR = "policy"


def compensate_parked(connection: Connection, settings: Settings, compensation: Compensation) -> int:
    """Order the compensation of what known groups have parked for long enough; return how many messages.

    ``connection`` is on the producer's database and not in a transaction.
    """
    schema, topic, limit = settings.schema, compensation.topic, settings.compensate_parked
    if limit == 0:
        return 0
    due = sql.parked(schema, topic=topic, seconds=compensation.after, limit=MAX_IDS)
    with connection.begin():
        _, rows, ((ordered,),) = execute(connection, plan_by_index(), due, sql.ordered_lately(schema, actor=ACTOR))
    ids = [half_id for (half_id,) in rows]
    chosen = ids[: max(limit - ordered, 0)]
    if len(chosen) < len(ids):
        emit(CompensationsHeld(topic=topic, waiting=len(ids) - len(chosen), limit=limit))
    if not chosen:
        return 0
    # The order is made in this database alone: the worker that carries it out asks the consumers'.
    database = Database("own", connection.engine, settings, frozenset({"producer"}))
    why = f"parked for {compensation.after:g} s, which {compensation.name} compensates"
    try:
        Operator(Databases([database])).compensate(chosen, by=Actor(ACTOR, {"via": "worker"}), why=why)
    except (ActRefused, SelectorChanged):
        return 0  # another worker, or an operator, has ordered it at this moment: the next pass sees the rest
    return len(chosen)
