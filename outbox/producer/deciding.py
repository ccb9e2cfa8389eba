"""Write the producer's decisions on halves, and tell hooks of each: before its op is written, and after the COMMIT.

Where nothing listens, that costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.database.at_commit import after_commit
from outbox.database.decision import already, decide
from outbox.telemetry import hooks
from outbox.telemetry.events import HalfDecided, HalfDeciding

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outbox.message.model import Decision, Resolution
    from outbox.telemetry.hooks import Middleware, Registry


def tell_deciding(middlewares: Registry[Middleware], half_id: UUID, resolution: Resolution) -> list[Callable[[], None]]:
    """Tell hooks that a half is about to be decided; return what tells them after the COMMIT. Nothing without hooks."""
    if not (hooks.listeners.hooks or middlewares.hooks):
        return []
    began = time.monotonic()

    def tell(kind: type[HalfDeciding], **more: Any) -> None:
        with hooks.work_for(middlewares):
            hooks.emit(kind(half_id=half_id, resolution=resolution.value, **more))

    tell(HalfDeciding)
    return [lambda: tell(HalfDecided, seconds=time.monotonic() - began)]


def decide_now(
    connection: Connection, schema: str, half_id: UUID, resolution: Resolution, middlewares: Registry[Middleware]
) -> Decision:
    """Decide a half at once, in the connection's transaction; see `Producer.decide_now`."""
    waiting = tell_deciding(middlewares, half_id, resolution)
    decision = decide(connection, schema, half_id, resolution)
    if decision.resolution is not resolution:
        raise already(decision)
    for tell_decided in waiting if decision.first else ():
        after_commit(connection, tell_decided)
    return decision
