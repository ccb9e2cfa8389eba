"""Outboxes with a limit, and what producers do at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, insert

from outbox import Outbox, Settings
from outbox.errors import OutboxBusy
from tests.producer.bank import change


def limited(engine: Engine, setting: str = "max_undispatched", limit: int = 3, **settings: Any) -> Outbox:
    """Return an outbox with a limit."""
    settings |= {setting: limit, "listen": False}
    return Outbox(engine, settings=Settings(**settings))


def tell(outbox: Outbox, engine: Engine, number: int, topic: str = "t") -> None:
    """Make a change and send a message about it, in a transaction."""
    with engine.begin() as connection:
        connection.execute(insert(change).values(number=number))
        outbox.send(connection, topic, {"number": number})


def accepted(act: Callable[[], object]) -> bool:
    """Try once, as a producer does that tries again later."""
    try:
        act()
    except OutboxBusy:
        return False
    return True


def forget(outbox: Outbox) -> None:
    """Have the outbox count anew, as it does when its last count was long ago."""
    flow = outbox._producer._flow
    assert flow is not None
    for gauges in flow._gauges.values():
        for gauge in gauges:
            gauge.until = 0.0
