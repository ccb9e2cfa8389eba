"""The banks stay open after the day's work, with the admin console over both, until Ctrl-C.

Bank B has closed a few accounts, so that there is something to heal: transfers to them are parked. In the console
the operator opens such a message, and compensates it (bank A refunds the sender), or opens the account again and
retries.
"""

from __future__ import annotations

import random
from contextlib import suppress

from rich.console import Console
from sqlalchemy import delete, select

from . import bank_b
from .banks import Banks
from .workday import workers_running

#: One account in so many is closed.
_CLOSED = 50


def close_accounts(banks: Banks, seed: int) -> None:
    """Close some accounts of bank B, one at least; the same seed closes the same ones."""
    with banks.b.begin() as b:
        accounts = b.scalars(select(bank_b.Account.id).order_by(bank_b.Account.id)).all()
        closed = random.Random(seed).sample(accounts, min(len(accounts), max(1, len(accounts) // _CLOSED)))
        b.execute(delete(bank_b.Account).where(bank_b.Account.id.in_(closed)))


def keep_open(banks: Banks, port: int, screen: Console) -> None:
    """Serve the console, with a worker of each bank at work, until Ctrl-C.

    Raises:
        InvalidSettings: the port can't be had, or a variable ``OUTBOX_CONSOLE_*`` isn't right.
    """
    from outbox.console.app import ConsoleConfig, serve  # noqa: PLC0415 - FastAPI, which a demo without --console needs not

    urls = banks.environment
    config = ConsoleConfig.from_env(
        databases={"bank_a": urls["BANK_A_URL"], "bank_b": urls["BANK_B_URL"]}, port=port, env="demo"
    )
    with workers_running(banks), suppress(KeyboardInterrupt):
        screen.print(
            "The banks stay open. Some transfers are parked: bank B has closed the accounts. Ctrl-C ends it all."
        )
        serve(config, announce=screen.print)
