"""A worker process whose checker says when it is asked, and hangs. Arguments: the database's URL, ``async`` or not."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

from sqlalchemy import create_engine, text

from outbox import Orphan, Outbox
from outbox.worker import Worker

NOTE = text("INSERT INTO effect (message_id) VALUES (:id)")


def main() -> int:
    """Run until a signal comes; return the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    outbox = Outbox(create_engine(sys.argv[1]))

    def checker(orphan: Orphan, session: Any) -> None:
        session.execute(NOTE, {"id": orphan.id})
        logging.info("checker begins")
        threading.Event().wait()

    async def async_checker(orphan: Orphan, session: Any) -> None:
        await session.execute(NOTE, {"id": orphan.id})
        logging.info("checker begins")
        await asyncio.Event().wait()

    outbox.checker("paid")(async_checker if sys.argv[2] == "async" else checker)
    return Worker(outbox).run()


if __name__ == "__main__":
    sys.exit(main())
