"""The application of several worker processes: its handler says in which process it begins, and waits for a file.

Variables: ``SHOP_URL``; ``SHOP_GATE``, the file without which handlers go on waiting; ``SHOP_HANG``, a file that the
first handler removes, and then keeps the interpreter from all threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from outbox import Message, Outbox, Settings

outbox = Outbox(create_engine(os.environ["SHOP_URL"]), settings=Settings.from_env())


@outbox.consumer("paid", group="mail")
def handle(message: Message, session: Any) -> None:
    """Note the message."""
    session.execute(text("INSERT INTO effect (message_id) VALUES (:id)"), {"id": message.id})
    logging.getLogger("shop").info("handler begins in %d", os.getpid())
    if "SHOP_HANG" in os.environ:
        with suppress(FileNotFoundError):
            Path(os.environ["SHOP_HANG"]).unlink()
            ctypes.PyDLL(None).sleep(600)
    while "SHOP_GATE" in os.environ and not Path(os.environ["SHOP_GATE"]).exists():
        time.sleep(0.01)
