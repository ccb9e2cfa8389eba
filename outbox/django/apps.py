"""The application ``outbox.django``: it reads the settings, and imports the modules that have handlers."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import connections
from django.utils.module_loading import autodiscover_modules

from outbox.django.databases import configuration
from outbox.errors import InvalidSettings


class OutboxConfig(AppConfig):
    """Its label is ``outbox``; it has no models, so there is nothing that `makemigrations` could miss."""

    name = "outbox.django"
    label = "outbox"
    verbose_name: str = "Outbox"

    def ready(self) -> None:
        """Import the handlers: the modules of that name in the installed applications."""
        checks.register(check_settings, checks.Tags.database)
        checks.register(check_settings, checks.Tags.compatibility)
        autodiscover_modules(configuration().own.modules)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """Report the faults of ``OUTBOX`` in the settings (`manage.py check`)."""
    try:
        own = configuration().own
    except InvalidSettings as error:
        return [checks.Error(str(error), id="outbox.E001")]
    found: list[checks.CheckMessage] = []
    for alias in own.databases:
        if alias not in connections:
            hint = f"DATABASES has {', '.join(connections)}"
            found.append(checks.Error(f"OUTBOX.DATABASES names {alias!r}", hint=hint, id="outbox.E002"))
        elif connections[alias].vendor != "postgresql":
            hint = "name the PostgreSQL databases in OUTBOX.DATABASES"
            found.append(checks.Error(f"database {alias!r} isn't PostgreSQL", hint=hint, id="outbox.E003"))
    return found
