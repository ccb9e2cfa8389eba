"""Settings in which the database has no outbox."""

from examples.django_shop.shop import settings as shop

globals().update({name: value for name, value in vars(shop).items() if name.isupper()})

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "outbox.django"]
OUTBOX: dict[str, object] = {"DATABASES": []}
