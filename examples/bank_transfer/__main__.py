"""``python -m examples.bank_transfer``: the demo from the command line of a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

from outbox.errors import EmbeddedError
from outbox.reconcile.job import EngineName

from .demo import DemoOptions, run
from .options import Via


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo as the command line asks; return the exit code."""
    parser = _parser()
    try:
        options = DemoOptions(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
    try:
        return run(options)
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 69  # as `outbox demo` does


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Two banks, a database each: every transfer arrives exactly once, whatever is killed.",
        epilog="Exit code: 0 settled, not a cent missing; 1 not so; 2 bad options or orders; 130 interrupted.",
    )
    add = parser.add_argument
    add("--orders", type=Path, metavar="FILE", help="payment orders, PKDD'99 format (default: generated)")
    add("--accounts", type=Path, metavar="FILE", help="the account ids that bank A knows (default: all senders)")
    add(
        "--opening-balance",
        type=_amount,
        metavar="AMOUNT",
        help="of every account of bank A (default: what covers its orders)",
    )
    add("--transfers", type=int, default=1000, metavar="N", help="how many to generate (default: %(default)s)")
    add("--producers", type=int, default=2, metavar="N", help="processes of bank A (default: %(default)s)")
    add("--consumers", type=int, default=2, metavar="N", help="processes of bank B (default: %(default)s)")
    add("--crash", action="store_true", help="kill processes at random moments, and start them again")
    add("--kills", type=int, metavar="N", help="how many to kill; implies --crash (default: 30)")
    add("--via", type=Via, choices=list(Via), help="put a real broker, or webhooks, between the banks' databases")
    add("--two-phase", action="store_true", help="half messages first, then debit; orphans are decided by a fence")
    add("--tcc", action="store_true", help="reserve, then confirm or cancel; orphans are decided by a checker")
    add("--faults", action="store_true", help="damage the tables of both banks after the work; all is found and mended")
    add("--no-reconcile", dest="reconcile", action="store_false", help="end without comparing the tables of the banks")
    add(
        "--engine",
        type=EngineName,
        choices=list(EngineName),
        default=EngineName.AUTO,
        help="what compares them (default: spark if it is installed, else local)",
    )
    add("--report", type=Path, metavar="FILE", help="write the reconciliation's HTML page")
    add("--seed", type=int, default=1, metavar="N", help="of the generated orders, the kills and the faults")
    add("--strict", action="store_true", help="exit with 1 if an order was refused")
    add("--json", action="store_true", help="print one JSON object instead of the tables")
    return parser


def _amount(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount") from None


if __name__ == "__main__":
    sys.exit(main())
