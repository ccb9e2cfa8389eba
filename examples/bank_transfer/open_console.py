"""The banks stay open after the day's work, with the admin console over both, until Ctrl-C.

A few accounts of bank B were closed while transfers to them were on their way, so that there is something to heal:
these are parked, and here bank A refunds nothing by itself. In the console the operator opens such a message, and
compensates it (bank A refunds the sender), or opens the account again and retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from rich.console import Console

from .banks import Banks
from .workday import workers_running


def keep_open(banks: Banks, environment: Mapping[str, str], port: int, screen: Console) -> None:
    """Serve the console, with a worker of each bank at work in this environment, until Ctrl-C.

    Raises:
        InvalidSettings: the port can't be had, or a variable ``OUTBOX_CONSOLE_*`` isn't right.
    """
    from outbox.console.app import ConsoleConfig, serve  # noqa: PLC0415 - FastAPI, which a demo without --console needs not

    urls = banks.environment
    config = ConsoleConfig.from_env(
        databases={"bank_a": urls["BANK_A_URL"], "bank_b": urls["BANK_B_URL"]}, port=port, env="demo"
    )
    with workers_running(environment), suppress(KeyboardInterrupt):
        screen.print(
            "The banks stay open. Some transfers are parked: bank B has closed the accounts. Ctrl-C ends it all."
        )
        serve(config, announce=screen.print)
