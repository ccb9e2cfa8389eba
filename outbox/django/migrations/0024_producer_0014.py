"""Made of the revision that the file is named after."""

from outbox.django.migration import MigrationType, migration_of

Migration: MigrationType = migration_of(__name__)
