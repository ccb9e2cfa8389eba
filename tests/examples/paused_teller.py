"""The real teller of bank A, which stops at a point of its first order until it is killed, or told to go on.

Run with the folder to talk through, the point, and the teller's own arguments. At the point it makes the file
``paused`` in the folder, and waits for the file ``go``. A point is an event and the how-many-th of its kind it is:
``before_commit`` (of a session: neither half message nor op are written), ``commit`` (of the engine: the op is written,
COMMIT isn't sent; a half message shares the round trip of its COMMIT), ``after_commit``, ``after_flush``,
``after_rollback``. ``none:0`` is no point.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from examples.bank_transfer import teller
from examples.bank_transfer.bank_a import engine


def pause_at(folder: Path, name: str, number: int) -> None:
    """Stop at the event of this name and number."""
    seen = 0

    def happened(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            (folder / "paused").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

    # The outbox listens to the same events, and came first.
    event.listen(engine if name == "commit" else Session, name, happened)


if __name__ == "__main__":
    folder, (name, number) = Path(sys.argv[1]), sys.argv[2].split(":")
    if int(number):
        pause_at(folder, name, int(number))
    sys.argv[1:] = sys.argv[3:]
    teller.main()
