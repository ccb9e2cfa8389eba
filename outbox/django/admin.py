"""The admin's index with a link to the console: put `OutboxAdminConfig` in the place of ``django.contrib.admin``."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import AdminSite
from django.contrib.admin.apps import AdminConfig

from outbox.django.databases import configuration


class ConsoleLink:
    """For an `AdminSite` of your own, before its other bases: superusers see a link to the console."""

    def get_app_list(self, request: Any, app_label: str | None = None) -> list[Any]:
        """Return what the index lists, and the console if ``OUTBOX.CONSOLE_URL`` says where it is."""
        entries: list[Any] = super().get_app_list(request, app_label)  # type: ignore[misc]  # the site's, after this one
        url = configuration().own.console_url
        if url is None or app_label is not None or not request.user.is_superuser:
            return entries
        console = {
            "name": "Console",
            "object_name": "Console",
            "admin_url": url,
            "add_url": None,
            "view_only": True,
            "perms": {"add": False, "change": False, "delete": False, "view": True},
        }
        outbox = {
            "name": "Outbox",
            "app_label": "outbox",
            "app_url": url,
            "has_module_perms": True,
            "models": [console],
        }
        return [*entries, outbox]


class OutboxAdminSite(ConsoleLink, AdminSite):
    """Django's own admin site with the link."""


class OutboxAdminConfig(AdminConfig):
    """In ``INSTALLED_APPS``: ``"outbox.django.admin.OutboxAdminConfig"`` rather than ``"django.contrib.admin"``."""

    default_site = "outbox.django.admin.OutboxAdminSite"
