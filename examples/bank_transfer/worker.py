"""A worker of a bank, in a process of its own: ``outbox run``, and a lifeline to the demo that started it."""

from __future__ import annotations

import sys
from importlib import import_module

from outbox.worker import Worker

from .lifeline import Lifeline


def main() -> int:
    """Run the worker of the bank named on the command line, ``bank_a`` or ``bank_b``; return the exit code."""
    lifeline = Lifeline()
    bank = import_module(f".{sys.argv[1]}", __package__)
    lifeline.report(ready=True)
    return Worker(bank.outbox).run()


if __name__ == "__main__":
    sys.exit(main())
