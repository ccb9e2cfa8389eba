"""Serve a topic of a bank to RocketMQ's client of the other one: ``outbox rocketmq serve``, and a lifeline to the demo.

The other bank needs no right in this bank's database. Its group keeps the order of keys, which are RocketMQ's message
groups.
"""

from __future__ import annotations

import sys
from importlib import import_module

from outbox.rocketmq.options import GroupOptions, RocketmqOptions
from outbox.rocketmq.server import Listen, RocketmqServer

from .lifeline import Lifeline
from .message import GROUP, GROUP_A
from .via import Between


def main() -> int:
    """Run a gateway; the arguments are the module of its bank, and the topic that it serves. Return the exit code."""
    lifeline = Lifeline()
    bank, between = import_module(f".{sys.argv[1]}", __package__), Between.of_environment()
    host, _, port = between.publish_at[sys.argv[2]].rpartition(":")
    options = RocketmqOptions(groups={name: GroupOptions(fifo=True) for name in (GROUP, GROUP_A)})
    server = RocketmqServer(bank.publisher, options, [Listen(host, int(port))])
    lifeline.report(ready=True)
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
