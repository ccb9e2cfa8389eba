"""Made of the revision that the file is named after."""

from django.db import migrations

from outbox.django.migration import migration_of

Migration: type[migrations.Migration] = migration_of(__name__)
