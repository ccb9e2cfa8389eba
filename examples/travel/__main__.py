"""``python -m examples.travel``: the example from the command line of a checkout."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from outbox import embedded
from outbox.errors import EmbeddedError

DATABASES = ("agency", "flights", "hotels", "cars", "bank")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example as the command line asks; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    kills = (options.kills or 5 * len(DATABASES)) if options.crash else 0
    try:
        with embedded.server(list(DATABASES), durable=False) as server:
            # The services read where their databases are when they are imported, as they do anywhere else.
            os.environ.update({f"{name.upper()}_URL": server.url(name) for name in DATABASES})
            from .demo import NotFinished, run  # noqa: PLC0415 - it imports the services, see above

            try:
                return run(options.flows, kills=kills, seed=options.seed, within=options.within)
            except NotFinished as error:
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
        description="Trips are booked over four services, or not at all.",
        epilog="Exit code: 0 in sync, to the cent; 1 not so; 2 bad options; 130 interrupted.",
    )
    add = parser.add_argument
    add("--flows", type=_number, default=300, metavar="N", help="how many trips are planned (default: %(default)s)")
    add("--crash", action="store_true", help="have workers in processes of their own, and kill them")
    add("--kills", type=_number, metavar="N", help="how many are killed (default: each service's five times)")
    add("--within", type=_number, default=600, metavar="SECONDS", help="to the end of all trips (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="N", help="of the trips and the kills")
    return parser


def _number(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 1 and 1,000,000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
