"""A worker of a bank, in a process of its own: ``outbox run``, and a lifeline to the demo that started it."""

from __future__ import annotations

import sys
from importlib import import_module

from outbox.worker import Worker

from .lifeline import Lifeline


def main() -> int:
    """Run the worker of a bank; return the exit code.

    The arguments are the module of the bank, such as ``bank_a``, the name of the outbox in it, and the worker's roles;
    without roles it has all of them.
    """
    lifeline = Lifeline()
    module, *rest = sys.argv[1:]
    name, *roles = rest or ["outbox"]
    outbox = getattr(import_module(f".{module}", __package__), name)
    lifeline.report(ready=True)
    return Worker(outbox, roles=roles or None).run()


if __name__ == "__main__":
    sys.exit(main())
