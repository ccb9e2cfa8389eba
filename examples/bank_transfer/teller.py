"""A teller of bank A: executes its share of the orders, in a process of its own.

It keeps no book of how far it got. When it was killed it begins again at the first order, and the database
tells what was executed already.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from .bank_a import Refused, Transfer, engine, order_transfer
from .lifeline import Lifeline
from .source import Source


def work(source: Source, teller: int, tellers: int, lifeline: Lifeline) -> None:
    """Execute one teller's share of the orders, as far and as fast as the lifeline allows."""
    with Session(engine) as session:
        # Only to get there faster: that no order is executed twice is for `order_transfer` to know.
        executed = set(session.scalars(select(Transfer.id)))
    lifeline.tell(ready=True)
    for number, order in enumerate(source.share(teller, tellers), start=1):
        if order.id in executed:
            continue
        lifeline.wait_until_allowed(number)
        try:
            order_transfer(order)
        except Refused as refused:
            lifeline.tell(line=order.line, refused=str(refused))


def arguments(source: Source, teller: int, tellers: int) -> list[str]:
    """Return the command line arguments of a teller."""
    return [str(teller), str(tellers), str(source.count), str(source.seed), str(source.file or "")]


def main() -> None:
    """Run a teller from its command line; see `arguments`."""
    teller, tellers, count, seed, file = sys.argv[1:]
    source = Source(Path(file) if file else None, int(count), int(seed))
    work(source, int(teller), int(tellers), Lifeline())


if __name__ == "__main__":
    main()
