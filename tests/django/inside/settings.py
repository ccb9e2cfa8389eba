"""The shop's settings, with one more application."""

from examples.django_shop.shop import settings as shop

globals().update({name: value for name, value in vars(shop).items() if name.isupper()})

INSTALLED_APPS = [*shop.INSTALLED_APPS, "tests.django.inside"]
DATABASES = {"default": shop.DATABASES["default"] | {"TIME_ZONE": "Asia/Tokyo"}}
