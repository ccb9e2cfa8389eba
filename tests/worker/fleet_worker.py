"""A worker process that runs a fleet. Arguments: the URL of its database, and the file of the fleet."""

from __future__ import annotations

import sys

from sqlalchemy import create_engine

from outbox import Outbox
from outbox.worker import Worker


def main() -> int:
    """Run until a signal comes; return the exit code."""
    outbox = Outbox(create_engine(sys.argv[1]))
    outbox.reconciliation("fleet", every=3600, fleet=sys.argv[2])
    return Worker(outbox, roles=["dispatch", "release", "reconcile"]).run()


if __name__ == "__main__":
    sys.exit(main())
