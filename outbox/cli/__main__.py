"""``python -m outbox.cli``."""

from outbox.cli import main

main()
