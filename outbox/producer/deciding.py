"""Write the producer's decisions on halves, and tell hooks of each: before its op is written, and after the COMMIT.

Where nothing listens, that costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox.telemetry import hooks
from outbox.telemetry.events import HalfDecided, HalfDeciding

if TYPE_CHECKING:
    from outbox.message.model import Resolution
    from outbox.telemetry.hooks import Middleware, Registry


def tell_deciding(middlewares: Registry[Middleware], half_id: UUID, resolution: Resolution) -> list[Callable[[], None]]:
    """Tell hooks that a half is about to be decided; return what tells them after the COMMIT. Nothing without hooks."""
    if not (hooks.listeners.hooks or middlewares.hooks):
        return []
    decision: dict[str, Any] = {"half_id": half_id, "resolution": resolution.value}
    began = time.monotonic()

    def tell_decided() -> None:
        with hooks.work_for(middlewares):
            hooks.emit(HalfDecided(**decision, seconds=time.monotonic() - began))

    with hooks.work_for(middlewares):
        hooks.emit(HalfDeciding(**decision))
    return [tell_decided]
