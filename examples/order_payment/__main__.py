"""``python -m examples.order_payment``: the example from the command line of a checkout."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence

from outbox import embedded
from outbox.errors import EmbeddedError, ReconcileError
from outbox.reconcile.job import EngineName


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example as the command line asks; return the exit code."""
    options = _parser().parse_args(arguments)
    # What fails here fails on purpose, and is in the report.
    logging.getLogger("outbox").setLevel(logging.INFO if options.log else logging.CRITICAL)
    try:
        with (
            embedded.server(["accounts", "orders"], durable=False) as server,
            socket.create_server(("127.0.0.1", 0)) as listening,
        ):
            # The services read their surroundings when they are imported, as they do anywhere else.
            urls = {"ACCOUNTS_URL": server.url("accounts"), "ORDERS_URL": server.url("orders")}
            os.environ.update(urls, **_shorter(options.minute), **_at(listening))
            from .demo import run  # noqa: PLC0415 - see above
            from .timeline import NotFinished  # noqa: PLC0415 - see above

            try:
                return run(options.orders, options.seed, options.minute, EngineName(options.engine), listening)
            except (NotFinished, ReconcileError) as error:
                print(error, file=sys.stderr)
                return 1
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 69
    except KeyboardInterrupt:
        return 130


def _shorter(minute: float) -> dict[str, str]:
    """Return the settings of both services, by default minutes and hours, for minutes that take so many seconds."""
    return {
        "OUTBOX_CONFIRM_INTERVAL": str(minute),
        "OUTBOX_CONFIRM_GRACE": str(minute),
        "OUTBOX_CONFIRM_RESENDS": "2",
        "OUTBOX_RETRY_DELAYS": f"{6 * minute},{6 * minute}",
        "GIVE_BACK_AFTER": str(2 * minute),
        "RECONCILE_EVERY": str(minute),
    }


def _at(listening: socket.socket) -> dict[str, str]:
    """Return where the order service is asked, and the token that both services have."""
    host, port = listening.getsockname()
    url = f"http://{host}:{port}/inbox/status"
    return {"ORDERS_STATUS_URL": url, "ORDERS_STATUS_TOKEN": secrets.token_urlsafe()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Orders are paid in one service and settled in another; each payment is settled, or given back.",
        epilog="Exit code: 0 in sync, to the cent; 1 not so; 2 bad options; 130 interrupted.",
    )
    add = parser.add_argument
    add("--orders", type=_number, default=100, metavar="N", help="how many orders are paid (default: %(default)s)")
    add("--minute", type=_seconds, default=1.0, metavar="SECONDS", help="how long one takes (default: %(default)s)")
    add("--engine", choices=("local", "spark"), default="local", help="what compares at the end (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the orders and the accident")
    add("--log", action="store_true", help="let both services log what fails")
    return parser


def _number(text: str) -> int:
    if not text.isdigit() or not 10 <= int(text) <= 100_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 10 and 100,000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.1 and 60")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
