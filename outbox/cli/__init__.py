"""The command line: ``outbox``, or ``python -m outbox.cli``.

Data go to stdout, everything else to stderr; exit codes are those of `outbox.cli.exits.Code`.
"""

from outbox.cli.main import app, main

__all__ = ["app", "main"]
