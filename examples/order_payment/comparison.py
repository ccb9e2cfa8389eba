"""The reconciliation of the two services: what the users paid is what the enterprises have."""

from __future__ import annotations

from sqlalchemy import Engine

from outbox import Outbox
from outbox.operator.databases import Databases, open_database
from outbox.operator.model import PageRequest
from outbox.reconcile.config import job_of, merged, read_file
from outbox.reconcile.job import Access, EngineName, Job
from outbox.reconcile.record.views import Reconciliations, Run, RunFilter

from . import account_service, order_service
from .order_service import EACH_MINUTE, RECONCILIATION

_MOST = 500


def job(accounts: Engine, orders: Engine, engine: EngineName) -> Job:
    """Return the comparison of the two databases.

    All work is done when it is run: no grace for messages on their way, and no trust in earlier results.
    """
    values = {
        "producer": _access(accounts, account_service.outbox),
        "consumer": _access(orders, order_service.outbox),
        "window": {"grace": 0.0},
        "engine": engine,
        "keep_for": 0.0,
        "actor": "order-payment example",
    }
    return job_of(merged(read_file(RECONCILIATION), values))


def each_minute(orders: Engine) -> list[Run]:
    """Return the runs of the worker of the order service, the newest first."""
    databases = Databases([open_database("orders", orders, order_service.outbox.settings)])
    found = Reconciliations(databases).runs(RunFilter(schedule=EACH_MINUTE), PageRequest(size=_MOST))
    return list(found.items)


def _access(engine: Engine, outbox: Outbox) -> Access:
    return Access(engine.url.render_as_string(hide_password=False), outbox.settings)
