"""A worker process that carries bulk jobs out, slowly. Argument: the database's URL."""

from __future__ import annotations

import sys

from sqlalchemy import create_engine

from outbox import Outbox, Settings
from outbox.operator.bulk import run
from outbox.worker import Worker


def main() -> int:
    """Run until a signal comes, in batches of 2, so that there is a middle in which to be killed."""
    run.BATCH = 2
    return Worker(Outbox(create_engine(sys.argv[1]), settings=Settings()), roles=["bulk"]).run()


if __name__ == "__main__":
    sys.exit(main())
