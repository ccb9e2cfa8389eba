"""A worker of one service, in a process of its own: ``outbox run``, and a lifeline to the demo that started it."""

from __future__ import annotations

import sys

from outbox.worker import Worker

from ..bank_transfer.lifeline import Lifeline
from . import agency, bank, vendors

OUTBOXES = {
    "agency": agency.outbox,
    "flights": vendors.flights.outbox,
    "hotels": vendors.hotels.outbox,
    "cars": vendors.cars.outbox,
    "bank": bank.outbox,
}


def main() -> int:
    """Run the worker of the service that the command line names; return the exit code."""
    lifeline = Lifeline()
    lifeline.report(ready=True)
    return Worker(OUTBOXES[sys.argv[1]]).run()


if __name__ == "__main__":
    sys.exit(main())
