"""Made of the revision that the file is named after."""

from outbox.django.migration import migration_of

Migration = migration_of(__name__)
