"""``python -m examples.order_payment``: the example from the command line of a checkout."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from outbox import embedded
from outbox.errors import EmbeddedError, ReconcileError
from outbox.reconcile.job import EngineName


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example as the command line asks; return the exit code."""
    options = _parser().parse_args(arguments)
    # Orders that can't be paid are parked, which is in the report; whatever else fails is told.
    logging.getLogger("outbox.consumer").addFilter(
        lambda record: getattr(record, "outbox_event", "") != "message.parked"
    )
    try:
        with embedded.server(["orders", "balances"], durable=False) as server:
            # The services read where their databases are when they are imported, as they do anywhere else.
            os.environ.update(ORDERS_URL=server.url("orders"), BALANCES_URL=server.url("balances"))
            from .demo import NotFinished, run  # noqa: PLC0415 - it imports the services, see above

            try:
                return run(options.orders, options.seed, EngineName(options.engine))
            except (NotFinished, ReconcileError) as error:
                print(error, file=sys.stderr)
                return 1
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 69
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Orders are placed in one service and paid in another; what went wrong is found and repaired.",
        epilog="Exit code: 0 in sync, to the cent; 1 not so; 2 bad options; 130 interrupted.",
    )
    add = parser.add_argument
    add("--orders", type=_number, default=300, metavar="N", help="how many orders are placed (default: %(default)s)")
    add("--engine", choices=("local", "spark"), default="local", help="what compares (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the orders and the accidents")
    return parser


def _number(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 1 and 1,000,000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
