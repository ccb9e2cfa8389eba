"""Settings whose OUTBOX names what can't be."""

from examples.django_shop.shop import settings as shop

globals().update({name: value for name, value in vars(shop).items() if name.isupper()})

DATABASES = shop.DATABASES | {"lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
OUTBOX = {"DATABASES": ["defualt", "lite"], "MODULES": "nothing"}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "outbox.django"]
