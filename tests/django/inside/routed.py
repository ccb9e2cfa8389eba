"""Settings with a router that keeps the outbox out of the database."""

from typing import Any

from examples.django_shop.shop import settings as shop

globals().update({name: value for name, value in vars(shop).items() if name.isupper()})

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "outbox.django"]


class NoOutbox:
    """Allows all but the outbox's migrations."""

    def allow_migrate(self, _db: str, app_label: str, **_: Any) -> bool:
        """Say no to the outbox."""
        return app_label != "outbox"


DATABASE_ROUTERS = [NoOutbox()]
