"""Receive orders by RocketMQ's official Python client: ``python consumer.py ADDRESS [GROUP]``.

It prints::

    billing got o-1 (attempt 1)
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    MessageListener,
    PushConsumer,
)


class Billing(MessageListener):  # type: ignore[misc]  # the client has no types
    """Bill an order; what isn't a success comes again."""

    def __init__(self, group: str) -> None:
        self.group = group

    def consume(self, message: Any) -> ConsumeResult:
        """Handle one message; the server renews its lease meanwhile."""
        print(f"{self.group} got {message.body.decode()} (attempt {message.delivery_attempt})", flush=True)
        return ConsumeResult.SUCCESS


def main() -> None:
    """Receive until the process is told to end."""
    address, group = sys.argv[1], [*sys.argv[2:], "billing"][0]
    configuration = ClientConfiguration(address, Credentials())
    consumer = PushConsumer(configuration, group, Billing(group), {"orders": FilterExpression()})
    consumer.startup()
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    consumer.shutdown()


if __name__ == "__main__":
    main()
