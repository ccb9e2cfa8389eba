"""Settings of the shop; its database is that of ``OUTBOX_DATABASE_URL``."""

import os

from sqlalchemy import make_url

_url = make_url(os.environ["OUTBOX_DATABASE_URL"])

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only for a first look")
DEBUG = False
ALLOWED_HOSTS = ["localhost", "testserver"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "outbox.django.admin.OutboxAdminConfig",  # in the place of django.contrib.admin: its index links to the console
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "outbox.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.database,
        "USER": _url.username or "",
        "PASSWORD": _url.password or "",
        "HOST": _url.host or _url.query.get("host", ""),
        "PORT": _url.port or "",
    }
}
OUTBOX = {"GROUP": "shop", "CONSOLE_URL": "http://localhost:8900/"}
