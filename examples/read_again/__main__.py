"""``python -m examples.read_again``: the example from the command line of a checkout."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from sqlalchemy import create_engine

from outbox import embedded
from outbox.database import migration
from outbox.errors import EmbeddedError

from .week import run


def main() -> int:
    """Run the example; return 0 if all orders are billed rightly in the end."""
    logging.basicConfig(level=logging.CRITICAL)
    try:
        with embedded.server(["shop"], durable=False) as server:
            migration.upgrade(server.url("shop"))
            engine = create_engine(server.url("shop"))
            try:
                return run(engine, Console(soft_wrap=True))
            finally:
                engine.dispose()
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 69
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
