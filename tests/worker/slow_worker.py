"""A worker process whose handler says when it begins, and ends when it is told to. Argument: the database's URL."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from sqlalchemy import create_engine, text

from outbox import Message, Outbox
from outbox.worker import Worker


def main() -> int:
    """Run until a signal comes; return the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    outbox = Outbox(create_engine(sys.argv[1]))

    @outbox.consumer("paid", group="mail")
    def handle(message: Message, session: Any) -> None:
        session.execute(text("INSERT INTO effect (message_id) VALUES (:id)"), {"id": message.id})
        logging.info("handler begins")
        os.read(0, 1)

    return Worker(outbox).run()


if __name__ == "__main__":
    sys.exit(main())
