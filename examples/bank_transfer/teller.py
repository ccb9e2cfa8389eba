"""A teller of bank A: executes its share of the orders, in a process of its own.

It keeps no book of how far it got. When it was killed it begins again at the first order, and the database
tells which orders were executed already.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from outbox.errors import AlreadyRolledBack

from .bank_a import (
    AlreadyExecuted,
    Refused,
    Transfer,
    engine,
    order_transfer,
    order_transfer_tcc,
    order_transfer_two_phase,
)
from .bank_a_inquiry import require_acceptance
from .bank_a_tcc import StillReserved
from .lifeline import Lifeline, Steps
from .options import Mode
from .orders import Order
from .source import Source

_LOOK_AGAIN_SECONDS = 0.1

_EXECUTE: dict[Mode, Callable[[Order], object]] = {
    Mode.SEND: order_transfer,
    Mode.TWO_PHASE: order_transfer_two_phase,
    Mode.TCC: order_transfer_tcc,
}


def work(source: Source, teller: int, tellers: int, mode: Mode, lifeline: Lifeline) -> None:
    """Execute one teller's share of the orders, as far and as fast as the lifeline allows."""
    with Session(engine) as session:
        # Only to get there faster: that no order is executed twice is for the ways to know.
        executed = set(session.scalars(select(Transfer.id)))
    steps = None if mode is Mode.SEND else Steps(lifeline)
    lifeline.report(ready=True)
    for number, order in enumerate(source.share(teller, tellers), start=1):
        if order.id in executed:
            continue
        lifeline.wait_until_allowed(number)
        done = False
        while not done:
            if steps:
                steps.begin(number)
            done = _execute(order, mode, lifeline)


def _execute(order: Order, mode: Mode, lifeline: Lifeline) -> bool:
    """Execute an order; False if it has to be executed again."""
    try:
        require_acceptance(order)
        _EXECUTE[mode](order)
    except Refused as refused:
        lifeline.report(line=order.line, refused=str(refused))
    except AlreadyRolledBack:
        # The check took us for dead. Nothing of the order was done: it begins anew, with another half message.
        lifeline.report(line=order.line, late=True)
        return False
    except StillReserved:
        # An earlier life of this teller died over this order; the check releases what it reserved.
        time.sleep(_LOOK_AGAIN_SECONDS)
        return False
    except AlreadyExecuted:
        pass
    return True


def arguments(source: Source, teller: int, tellers: int, mode: Mode) -> list[str]:
    """Return the command line arguments of a teller."""
    return [str(teller), str(tellers), mode, str(source.count), str(source.seed), str(source.file or "")]


def main() -> None:
    """Run a teller from its command line; see `arguments`."""
    teller, tellers, mode, count, seed, file = sys.argv[1:]
    source = Source(Path(file) if file else None, int(count), int(seed))
    work(source, int(teller), int(tellers), Mode(mode), Lifeline())


if __name__ == "__main__":
    main()
