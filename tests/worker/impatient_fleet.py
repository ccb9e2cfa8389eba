"""The command line, whose supervisor gives up after three deaths in a row."""

from __future__ import annotations

from outbox.cli import main
from outbox.worker.processes import supervisor

if __name__ == "__main__":
    supervisor._DEATHS = 3
    main()
