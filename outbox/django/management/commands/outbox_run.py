"""``manage.py outbox_run``: a worker of all databases that ``OUTBOX`` names."""

from __future__ import annotations

from outbox.django.management.commands.outbox import OutboxCommand


class OutboxRunCommand(OutboxCommand):
    """Runs a worker until it is stopped; the same as ``manage.py outbox run``."""

    help = "Run a worker of the outbox: dispatch, consume, check, retry, prune; see: manage.py outbox_run --help"
    before: tuple[str, ...] = ("run",)


Command = OutboxRunCommand
