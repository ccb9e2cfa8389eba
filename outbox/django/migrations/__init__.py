"""One migration for each revision of the outbox's tables; `tests/house/test_django.py` says when one is missing."""
