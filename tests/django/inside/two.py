"""Settings with two databases: the shop's own, and one with the points."""

import os

from examples.django_shop.shop import settings as shop

globals().update({name: value for name, value in vars(shop).items() if name.isupper()})

INSTALLED_APPS = [*shop.INSTALLED_APPS, "tests.django.inside"]
DATABASES = shop.DATABASES | {"other": shop.DATABASES["default"] | {"NAME": os.environ["OTHER_DATABASE"]}}
OUTBOX = {"DATABASES": ["default", "other"], "MODULES": "across"}
