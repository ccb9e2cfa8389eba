"""The repairs that operators have ordered of what reconciliations found: bulk jobs, carried out batch by batch.

A repair has transactions of its own in both databases. So its items aren't locked but leased for a while, by a
transaction of their own: a worker that dies over them leaves them to another one, which finds repaired messages healed.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.execute import execute
from outbox.database.sql import NOW, begin_bulk_job, finish_bulk_jobs
from outbox.message.model import Counts
from outbox.operator.bulk.run import AGAIN, MOST, budget
from outbox.reconcile.job import Job, Repair
from outbox.reconcile.record import orders
from outbox.reconcile.record.orders import LeasedItem, RepairJob

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.reconcile.duty.following import Following
    from outbox.reconcile.duty.reconciliation import JobReconciler

#: How many findings are leased at once, and for how long (seconds).
BATCH = 100
LEASE = 300.0
#: How long (seconds) until orders are looked for again, and after which one repair leaves the next one its turn.
READ_EVERY = SLICE = 5.0


class Repairer:
    """Carries out the repairs ordered for the pairs of one reconciliation; its calls are the passes of a duty."""

    def __init__(self, reconciler: JobReconciler | Following, stopping: threading.Event) -> None:
        self._reconciler, self._stopping = reconciler, stopping
        self.name: str = f"repair {reconciler.name.removeprefix('reconcile ')}"

    def __call__(self, connection: Connection, _: Connection) -> Counts:
        """Carry on with each repair that is ordered, as fast as it may be; those of pruned runs end."""
        topics, groups = map(list, zip(*self._reconciler.pairs, strict=True))
        counts, until = Counts(), time.monotonic() + SLICE
        with connection.begin():
            schema = self._reconciler.schema
            ((now,),), pruned, rows = execute(
                connection, NOW, orders.skip_pruned(schema), orders.repairs(schema, topics=topics, groups=groups)
            )
            execute(connection, *(finish_bulk_jobs(schema, bulk_job) for bulk_job in {row[0] for row in pruned}))
        for row in rows:
            ordered = RepairJob(*row)
            job = replace(self._reconciler.work_at(now), actor=ordered.requested_by)
            while not self._stopping.is_set():
                step = _batch(connection, job, ordered)
                counts += step
                if not step.taken or time.monotonic() >= until:
                    break
                if ordered.rate is not None:
                    self._stopping.wait(step.taken / ordered.rate)
        return counts


def _batch(connection: Connection, job: Job, ordered: RepairJob) -> Counts:
    """Repair the next findings; end the bulk job if none is left."""
    schema, values = job.consumer.schema, {"id": ordered.id, "run": ordered.run, "lease": LEASE, "limit": BATCH}
    values["rate"] = ordered.rate
    with connection.begin():
        if ordered.rate is not None and not ordered.cancelled:
            values["limit"] = min(BATCH, budget(connection, schema, ordered.id, ordered.rate))
        if ordered.cancelled:
            execute(connection, orders.cancel_left(schema, **values), *orders.end_items(schema, ordered, ()))
            return Counts()
        _, rows = execute(connection, begin_bulk_job(schema, ordered.id), orders.lease(schema, **values))
        if not rows:
            execute(connection, *orders.end_items(schema, ordered, ()))
            return Counts()
    items = sorted((LeasedItem.of(row, ordered.repair) for row in rows), key=attrgetter("number"))
    results = _repair(job, ordered, items)
    return _settle(connection, job, ordered, items, results)


def _repair(job: Job, ordered: RepairJob, items: Sequence[LeasedItem]) -> dict[UUID, str]:
    """Return what became of each message whose finding is still there."""
    from outbox.reconcile.run import repair_found  # noqa: PLC0415 - an extra

    (pair,) = (pair for pair in job.pairs if pair.names == (ordered.topic, ordered.group))
    origin = {**(json.loads(ordered.origin) if ordered.origin else {}), "bulk_job": str(ordered.id)}
    results: dict[UUID, str] = {}
    known = [item for item in items if item.kind is not None]
    by_repair = attrgetter("kind", "action")
    for (kind, action), group in itertools.groupby(sorted(known, key=by_repair), key=by_repair):
        ids = [item.message_id for item in group]
        if action is Repair.ALERT:
            results |= dict.fromkeys(ids, "refused: the policy of the run only reports it; name a repair")
            continue
        chosen: Any = replace(job, policy={kind: action})
        results |= repair_found(chosen, pair, ordered.run, dict.fromkeys(ids, kind), why=ordered.reason, origin=origin)
    return results


def _settle(
    connection: Connection, job: Job, ordered: RepairJob, items: Sequence[LeasedItem], results: dict[UUID, str]
) -> Counts:
    """Write what became of items, and of their findings, in one transaction."""
    from outbox.reconcile.record.write import acted  # noqa: PLC0415 - an extra
    from outbox.reconcile.repair import BUSY  # noqa: PLC0415 - an extra
    from outbox.reconcile.rows import Repaired  # noqa: PLC0415 - an extra

    settled = [item.settled(results.get(item.message_id), BUSY, AGAIN, MOST) for item in items]
    news = [
        Repaired(item.message_id, item.kind, item.action, result)
        for item in items
        if item.kind is not None and (result := results.get(item.message_id, BUSY)) != BUSY
    ]
    schema = job.consumer.schema
    written = [acted(schema, ordered.run, news)] if news else []
    with connection.begin():
        execute(connection, *written, *orders.end_items(schema, ordered, settled))
    states = [each.state for each in settled]
    return Counts(taken=len(items), done=states.count("done"), failed=states.count("failed"))
